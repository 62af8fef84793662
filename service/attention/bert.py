"""BERT around its attention, in NumPy float64: the hidden states that each of its attention layers gets, and that layer's weights.

Token ids and the tensors of a checkpoint in, arrays out; what a sentence is, and where checkpoints lie, is not known here. It is not
served and not fast: it exists so that a real model's deeper layers can be shown and checked with what they meet in that model.
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
    """A checkpoint: `part` gives a tensor by its name, of which rows can be taken, so that no table of words need be read as a whole."""

    part: Callable[[str], Any]
    spec: LayerSpec  # of every attention layer
    epsilon: float  # of the layer norms

    def hidden_states(self, ids: Sequence[int], layer: int) -> Array:
        """The input of attention layer `layer`, counted from 0, for one sequence of tokens: [n] -> [n, d_model]."""
        x = self._embed(ids)
        for below in range(layer):
            x = self._pass_through(x, below)
        return x

    def attention_weights(self, layer: int) -> dict[str, Array]:
        """Weights and biases of the layer's attention under their canonical names, as the checkpoint has them."""
        return {
            f"{ours}.{kind}": self.part(f"encoder.layer.{layer}.attention.{theirs}.{kind}")[:]
            for ours, theirs in PROJECTIONS.items()
            for kind in ("weight", "bias")
        }

    def _embed(self, ids: Sequence[int]) -> Array:
        """LayerNorm(word + position + type 0)."""
        words, positions, types = (self.part(f"embeddings.{name}_embeddings.weight") for name in ("word", "position", "token_type"))
        rows = np.concatenate([words[i : i + 1] for i in ids]).astype(np.float64)
        return self._norm(rows + positions[: len(ids)] + types[:1], "embeddings.LayerNorm")

    def _pass_through(self, x: Array, layer: int) -> Array:
        """A whole layer, [n, d_model] -> the same: attention and a feed-forward part, each added to its input and then normalised."""
        at = f"encoder.layer.{layer}"
        attended = attend(self.spec, self.attention_weights(layer), query=x).output
        x = self._norm(x + attended, f"{at}.attention.output.LayerNorm")
        inner = self._linear(x, f"{at}.intermediate.dense")
        inner = inner * (1 + ERF(inner / math.sqrt(2))) / 2  # GELU (Hendrycks and Gimpel 2016)
        return self._norm(x + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")

    def _linear(self, x: Array, name: str) -> Array:
        projected: Array = x @ self.part(f"{name}.weight")[:].T.astype(np.float64) + self.part(f"{name}.bias")[:]
        return projected

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        normal = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + self.epsilon)
        scaled: Array = normal * self.part(f"{name}.weight")[:] + self.part(f"{name}.bias")[:]
        return scaled
