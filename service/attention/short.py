"""Short calls without masks, in NumPy: whole calls, from the projections to the output.

The arithmetic of such a call takes some microseconds. A dozen NumPy functions around it, which the server has just used to read the
request, take less time than torch's operations, whose code has left the processor's caches since the last request. Every item is computed
by itself, so calls of any lengths may share the products of the projections, and nothing is padded.
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

ROWS = 64  # of one item: in longer calls arithmetic outweighs the steps around it
PRODUCT = 1 << 18  # multiplications of one product: beyond, OpenBLAS starts threads, which the server has not planned for
SCORES = 1 << 15  # [heads, queries, keys] of one item
SAFE = 60.0  # scores whose exponentials float32 can sum without subtracting the row's maximum first
OUTPUTS = frozenset({"output", "attention_weights"})


class Short:
    """Short calls to one layer. Immutable."""

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
        """Whether the layer is a narrow one of the usual kind on a CPU: as many heads everywhere, biases, and nothing else."""
        usual = spec.num_heads * spec.head_dim == spec.d_model <= NARROW and spec.num_kv_heads == spec.num_heads
        widths = {spec.d_model, spec.key_dim, spec.value_dim, spec.output_dim, spec.value_head_dim * spec.num_heads}
        biases = all(spec.has_bias(name) for name in ("query", "key", "value", "output"))
        more = spec.alibi or spec.relative_bias or spec.rope or spec.qk_norm or spec.sinks
        is_cpu = device.type == "cpu" and spec.dtype in ("float32", "float64")
        return bool(is_cpu and spec.projections and usual and len(widths) == 1 and biases and not more)

    def suits(self, call: Call) -> bool:
        """Whether the call is short, has as many keys as queries, no masks, and wants nothing but output and weights."""
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
            or masks.blocks
        )

    def __call__(self, calls: Sequence[Call]) -> list[Result]:
        """The result of each call. They are alike in whether keys are their queries and values their keys."""
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow shows in the numbers, as torch's would
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
        """Query, key and value [rows of all calls, h * d]: one product where the inputs are the same, else one for each."""
        names, first = PROJECTIONS[:3], calls[0]
        if first.query is first.key is first.value:
            packed, width = self._product(_rows([call.query for call in calls]), "query+key+value"), self.spec.d_model
            return [packed[:, :width], packed[:, width : 2 * width], packed[:, 2 * width :]]
        return [self._product(_rows([getattr(call, name) for call in calls]), name) for name in names]

    def _attend(self, call: Call, projected: Sequence[Array], merged: Array) -> Array:
        """The attention weights [b, h, n, n], from the call's query, key and value [b * n, h * d].

        The weighted values are written to `merged`, [b * n, h * d].
        """
        batch, length, _ = call.query.shape
        shape = batch, length, self.spec.num_heads, self.spec.head_dim
        query, key, value = (x.reshape(shape).swapaxes(1, 2) for x in projected)  # [b, h, n, d]
        scores = np.matmul(query, key.swapaxes(2, 3))
        scores *= call.scale
        if not -SAFE <= np.minimum.reduce(scores, axis=None) <= np.maximum.reduce(scores, axis=None) <= SAFE:
            scores -= scores.max(-1, keepdims=True)
        weights: Array = np.exp(scores, out=scores)
        weights /= weights @ self._ones[:length]  # a sum over the last axis, in a third of np.sum's time for short rows
        np.matmul(weights, value, out=merged.reshape(shape).swapaxes(1, 2))
        return weights

    def _product(self, rows: Array, name: str) -> Array:
        """[rows, in] -> [rows, out] by a projection."""
        weight, bias = self._matrices[name]
        if rows.size * weight.shape[1] > PRODUCT:
            return self._projections.product(torch.from_numpy(rows), name).numpy()
        product: Array = rows @ weight
        product += bias
        return product


def _rows(tensors: Sequence[Tensor]) -> Array:
    """Tensors [b, n, d_model] as rows, one after another."""
    arrays = [tensor.numpy().reshape(-1, tensor.shape[2]) for tensor in tensors]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
