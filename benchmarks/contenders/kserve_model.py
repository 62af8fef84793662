"""KServe's model server with a custom model, V2 protocol."""

import os

import numpy as np
import torch
from kserve import InferOutput, InferResponse, Model, ModelServer
from layer import attend

BINARY = os.environ["FORM"] == "v2bin"


class Attention(Model):
    def __init__(self) -> None:
        super().__init__("default")
        self.ready = True

    async def predict(self, payload, headers=None, response_headers=None):
        results = attend(*(torch.from_numpy(np.array(tensor.as_numpy())) for tensor in payload.inputs))
        outputs = []
        for name, tensor in zip(("output", "attention_weights"), results, strict=True):
            outputs.append(InferOutput(name, list(tensor.shape), "FP32"))
            outputs[-1].set_data_from_numpy(tensor.numpy(), binary_data=BINARY)
        return InferResponse(payload.id or "1", "default", outputs)


if __name__ == "__main__":
    ModelServer(http_port=int(os.environ["PORT"]), workers=1, enable_grpc=False, access_log_format=None).start([Attention()])
