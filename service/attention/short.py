"""Computes short calls without masks in NumPy, including the projections.

The arithmetic of such a call takes microseconds. NumPy has less overhead here than torch: decoding has just used NumPy's code, while
torch's has left the processor's caches since the last request. Calls are attended separately, so calls of any lengths may share the
products of the projections, without padding.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from service.attention.call import Call, Result
from service.attention.linear import NARROW
from service.attention.projections import Projections
from service.attention.selection import chosen, selection
from service.spec import PROJECTIONS, LayerSpec
from service.tensors import Array

ROWS = 64  # most queries; in longer calls arithmetic outweighs overhead
PRODUCT = 1 << 18  # most multiplications in a product: for more, OpenBLAS starts threads beyond the planned number
SCORES = 1 << 15  # most scores [h, q, k] of one item
SAFE = 60.0  # |scores| up to this need no subtraction of the row's maximum before exp in float32
OUTPUTS = frozenset({"output", "attention_weights"})


class Short:
    """Computes short calls to one layer. Immutable."""

    def __init__(self, projections: Projections) -> None:
        self.spec, self._projections, weights = projections.spec, projections, projections.weights
        self._matrices = {
            name: (np.ascontiguousarray(weights[f"{name}.weight"].numpy().T), weights[f"{name}.bias"].numpy())
            for name in ("query+key+value", *PROJECTIONS)
        }
        self._ones = np.ones((ROWS, 1), self._matrices["output"][0].dtype)
        self._rows = min(ROWS, math.isqrt(SCORES // self.spec.num_heads), math.isqrt(PRODUCT // self.spec.head_dim))

    @staticmethod
    def suits_layer(spec: LayerSpec, device: torch.device) -> bool:
        """Whether the layer is narrow, on a CPU, with equal widths and numbers of heads, all biases, and no other features."""
        usual = spec.num_heads * spec.head_dim == spec.d_model <= NARROW and spec.num_kv_heads == spec.num_heads
        widths = {spec.d_model, spec.key_dim, spec.value_dim, spec.output_dim, spec.value_head_dim * spec.num_heads}
        biases = all(spec.has_bias(name) for name in ("query", "key", "value", "output"))
        more = spec.alibi or spec.relative_bias or spec.rope or spec.qk_norm or spec.sinks
        is_cpu = device.type == "cpu" and spec.dtype in ("float32", "float64")
        return bool(is_cpu and spec.projections and usual and len(widths) == 1 and biases and not more)

    def suits(self, call: Call) -> bool:
        """Whether the call is short, has as many keys as queries, no masks or modifiers, and requests only output and weights."""
        masks, query = call.masks, call.query
        return not (
            not 0 < query.shape[1] <= self._rows
            or query.shape[1] != call.key.shape[1]
            or not query.shape[0]
            or not call.outputs <= OUTPUTS
            or call.softcap
            or call.reproducible
            or call.dropout is not None
            or call.head_scale is not None
            or masks.bias is not None
            or masks.has_any
        )

    def __call__(self, calls: Sequence[Call]) -> list[Result]:
        """Compute the calls, which must agree in `key is query` and `value is key`."""
        with np.errstate(over="ignore", invalid="ignore"):  # overflow gives infinity or NaN without a warning, as in torch
            projected = self._project(calls)
            merged = np.empty((len(projected[0]), self.spec.d_model), projected[0].dtype)
            weights, places, start = [], [], 0
            for call in calls:
                place = slice(start, start := start + call.query.shape[0] * call.query.shape[1])
                weights.append(self._attend(call, [x[place] for x in projected], merged[place]))
                places.append(place)
            output = self._product(merged, "output")
        results = []
        for call, place, of_call in zip(calls, places, weights, strict=True):
            tensors = {}
            if "output" in call.outputs:
                tensors["output"] = torch.from_numpy(output[place].reshape(call.query.shape))
            if "attention_weights" in call.outputs:
                tensors |= selection(chosen(torch.from_numpy(of_call), call), call)
            results.append(Result(tensors))
        return results

    def _project(self, calls: Sequence[Call]) -> list[Array]:
        """Projected query, key and value [rows of all calls, h * d]; one product if they are one input, else three."""
        names, first = PROJECTIONS[:3], calls[0]
        if first.query is first.key is first.value:
            packed, width = self._product(_rows([call.query for call in calls]), "query+key+value"), self.spec.d_model
            return [packed[:, :width], packed[:, width : 2 * width], packed[:, 2 * width :]]
        return [self._product(_rows([getattr(call, name) for call in calls]), name) for name in names]

    def _attend(self, call: Call, projected: Sequence[Array], merged: Array) -> Array:
        """Compute the attention weights [b, h, n, n] from query, key and value [b * n, h * d].

        Writes the weighted values to `merged` [b * n, h * d].
        """
        batch, length, _ = call.query.shape
        shape = batch, length, self.spec.num_heads, self.spec.head_dim
        query, key, value = (x.reshape(shape).swapaxes(1, 2) for x in projected)  # [b, h, n, d]
        scores = np.matmul(query, key.swapaxes(2, 3))
        scores *= call.scale
        if not -SAFE <= np.minimum.reduce(scores, axis=None) <= np.maximum.reduce(scores, axis=None) <= SAFE:
            scores -= scores.max(-1, keepdims=True)
        weights: Array = np.exp(scores, out=scores)
        weights /= weights @ self._ones[:length]  # sums over the last axis; np.sum takes three times as long for short rows
        np.matmul(weights, value, out=merged.reshape(shape).swapaxes(1, 2))
        return weights

    def _product(self, rows: Array, name: str) -> Array:
        """Apply a projection: [rows, in] -> [rows, out]."""
        weight, bias = self._matrices[name]
        if rows.size * weight.shape[1] > PRODUCT:
            return self._projections.product(torch.from_numpy(rows), name).numpy()
        product: Array = rows @ weight
        product += bias
        return product


def _rows(tensors: Sequence[Tensor]) -> Array:
    """Concatenate tensors [b, n, d_model] to [rows, d_model]."""
    arrays = [tensor.numpy().reshape(-1, tensor.shape[2]) for tensor in tensors]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
