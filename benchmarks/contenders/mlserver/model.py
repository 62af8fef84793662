"""A custom runtime of MLServer."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from layer import attend
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Attention(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        arrays = [NumpyCodec.decode_input(tensor).astype(np.float32) for tensor in payload.inputs]
        results = attend(*map(torch.from_numpy, arrays))
        names = ("output", "attention_weights")
        outputs = [NumpyCodec.encode_output(name, tensor.numpy()) for name, tensor in zip(names, results, strict=True)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
