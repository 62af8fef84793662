"""The Open Inference Protocol's form of requests and replies: a layer is a model, its fields are tensors and parameters."""
