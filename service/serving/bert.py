"""BERT in NumPy float64: computes the input of any of its attention layers, and reads the weights of that layer.

The demo and the page use it for real inputs of deeper layers. It is not served, and it is slow.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.attention.reference.forward import attend
from service.spec import LayerSpec
from service.tensors import Array

PROJECTIONS = {"query": "self.query", "key": "self.key", "value": "self.value", "output": "output.dense"}
ERF = np.vectorize(math.erf, otypes=[float])


@dataclass(frozen=True, slots=True)
class Bert:
    """A checkpoint. `tensor(name)` may be lazy, since only indexed rows are read."""

    tensor: Callable[[str], Any]
    spec: LayerSpec  # of every attention layer
    epsilon: float  # of the layer norms

    def hidden_states(self, ids: Sequence[int], layer: int) -> Array:
        """The input [n, d_model] of attention layer `layer` (0-based) for one sequence of n token ids."""
        x = self._embed(ids)
        for i in range(layer):
            x = self._block(x, i)
        return x

    def attention_weights(self, layer: int) -> dict[str, Array]:
        """The weights and biases of the layer's attention by canonical name."""
        return {
            f"{ours}.{kind}": self.tensor(f"encoder.layer.{layer}.attention.{theirs}.{kind}")[:]
            for ours, theirs in PROJECTIONS.items()
            for kind in ("weight", "bias")
        }

    def _embed(self, ids: Sequence[int]) -> Array:
        """LayerNorm(word + position + type 0)."""
        words, positions, types = (self.tensor(f"embeddings.{name}_embeddings.weight") for name in ("word", "position", "token_type"))
        rows = np.concatenate([words[i : i + 1] for i in ids]).astype(np.float64)
        return self._norm(rows + positions[: len(ids)] + types[:1], "embeddings.LayerNorm")

    def _block(self, x: Array, layer: int) -> Array:
        """LayerNorm(x + attention(x)), then LayerNorm(x + feed-forward(x)): [n, d_model] -> [n, d_model]."""
        at = f"encoder.layer.{layer}"
        attended = attend(self.spec, self.attention_weights(layer), query=x).output
        x = self._norm(x + attended, f"{at}.attention.output.LayerNorm")
        inner = self._linear(x, f"{at}.intermediate.dense")
        inner = inner * (1 + ERF(inner / math.sqrt(2))) / 2  # GELU (Hendrycks and Gimpel 2016)
        return self._norm(x + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")

    def _linear(self, x: Array, name: str) -> Array:
        projected: Array = x @ self.tensor(f"{name}.weight")[:].T.astype(np.float64) + self.tensor(f"{name}.bias")[:]
        return projected

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        normal = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + self.epsilon)
        scaled: Array = normal * self.tensor(f"{name}.weight")[:] + self.tensor(f"{name}.bias")[:]
        return scaled
