"""TIER 4: HTTP and gRPC, the only package that handles statuses and headers. `attend.serving` executes the calls."""
