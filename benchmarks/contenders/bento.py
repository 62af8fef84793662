"""BentoML, one worker, NumPy arrays."""

import bentoml
import numpy as np
import torch
from layer import attend as compute


@bentoml.service(workers=1, traffic={"timeout": 60})
class Attend:
    @bentoml.api
    def attend(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> dict:
        tensors = [torch.from_numpy(np.asarray(array, np.float32)) for array in (query, key, value)]
        output, weights = compute(*tensors)
        return {"output": output.tolist(), "attention_weights": weights.tolist()}
