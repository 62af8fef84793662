"""FLOOR 4: HTTP and gRPC, the only package that handles statuses and headers. `service.serving` executes the calls."""
