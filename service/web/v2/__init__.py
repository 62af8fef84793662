"""The Open Inference Protocol over HTTP, under /v2: another form of the same calls. No second way through the house."""
