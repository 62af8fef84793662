"""One short call by itself, in NumPy: a dozen of its functions, for a layer of the usual kind and a call without masks.

The arithmetic of such a call takes some microseconds. On the way to it torch runs through hundreds of functions that nothing else of a
request needs, so every one of them is fetched from far away again; NumPy's are at hand, since the numbers were read with them.
Where more is to be computed, by one call or by several together, torch is the faster of the two.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from service.attention.call import Call
from service.spec import LayerSpec
from service.tensors import Array

LARGEST = 1 << 18  # multiplications of one product: beyond, OpenBLAS takes threads of its own, which are not this server's to give
SCORES = 8192  # [heads, queries, keys]
SAFE = 60.0  # of scores, whose exponentials can be added up in float32 without first taking the largest of a row away


class Single:
    """One layer's weights, [in, out] as NumPy likes them best. Immutable."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self._together, *self._each, self._output = (
            (np.ascontiguousarray(weights[f"{name}.weight"].numpy().T), weights[f"{name}.bias"].numpy())
            for name in ("query+key+value", "query", "key", "value", "output")
        )

    @staticmethod
    def suits(spec: LayerSpec, length: int) -> bool:
        """Whether calls of that length are done faster here than in torch."""
        return 3 * length * spec.d_model**2 <= LARGEST and spec.num_heads * length**2 <= SCORES

    def __call__(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output [1, queries, d_model] and weights [1, heads, queries, keys]."""
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows shows in the numbers, as torch's would
            query, key, value = self._project(call)
            merged = np.empty((query.shape[1], *query.shape[::2]), query.dtype)  # [queries, heads, head_dim]
            weights = attend(query, key, value, merged.transpose(1, 0, 2), self.spec.scale)
            weight, bias = self._output
            output = merged.reshape(len(merged), -1) @ weight
            output += bias
        return torch.from_numpy(output[None]), torch.from_numpy(weights[None])

    def _project(self, call: Call) -> Iterable[Array]:
        """Query, key and value [heads, n, head_dim]."""
        length, heads = call.query.shape[1], (self.spec.num_heads, self.spec.head_dim)
        if call.key is call.query and call.value is call.key:
            weight, bias = self._together
            packed = call.query.numpy()[0] @ weight
            packed += bias
            return tuple(packed.reshape(length, 3, *heads).transpose(1, 2, 0, 3))
        projected = []
        for x, (weight, bias) in zip((call.query, call.key, call.value), self._each, strict=True):
            rows = x.numpy()[0] @ weight
            rows += bias
            projected.append(rows.reshape(length, *heads).transpose(1, 0, 2))
        return projected


def attend(query: Array, key: Array, value: Array, merged: Array, scale: float) -> Array:
    """Attention of few rows: the weights [..., heads, queries, keys]; what they make of the values goes to `merged`. All four come
    [..., heads, n, head_dim], as views of whatever they are part of.
    """
    scores = np.matmul(query, key.swapaxes(-1, -2))
    scores *= scale
    if not -SAFE <= np.minimum.reduce(scores, axis=None) <= np.maximum.reduce(scores, axis=None) <= SAFE:
        scores -= scores.max(-1, keepdims=True)
    weights: Array = np.exp(scores, out=scores)
    weights /= np.add.reduce(weights, axis=-1, keepdims=True)
    np.matmul(weights, value, out=merged)
    return weights
