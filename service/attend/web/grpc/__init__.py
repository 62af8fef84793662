"""The Open Inference Protocol over gRPC, on a separate port. Needs the extra `grpc`."""
