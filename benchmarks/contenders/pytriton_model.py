"""NVIDIA Triton by PyTriton, dynamic batching on."""

import os

import numpy as np
import torch
from layer import D_MODEL, NUM_HEADS, attend
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


@batch
def infer(query, key, value):
    output, weights = attend(*(torch.from_numpy(np.array(array)) for array in (query, key, value)))
    return {"output": output.numpy(), "attention_weights": weights.numpy()}


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name=name, dtype=np.float32, shape=shape)


if __name__ == "__main__":
    port = int(os.environ["PORT"])
    ports = TritonConfig(http_address="127.0.0.1", http_port=port, grpc_port=port + 1, metrics_port=port + 2)
    with Triton(config=ports) as triton:
        triton.bind(
            "default",
            infer,
            inputs=[tensor(name, -1, D_MODEL) for name in ("query", "key", "value")],
            outputs=[tensor("output", -1, D_MODEL), tensor("attention_weights", NUM_HEADS, -1, -1)],
            config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=500)),
        )
        triton.serve()
