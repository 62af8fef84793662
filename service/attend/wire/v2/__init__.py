"""Requests and replies of the Open Inference Protocol: a layer is a model; the fields of a request are tensors and parameters."""
