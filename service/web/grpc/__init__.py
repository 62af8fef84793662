"""The Open Inference Protocol over gRPC, on a port of its own: another form of the same calls. Needs the extra `grpc`."""
