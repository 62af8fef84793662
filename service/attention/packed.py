"""Short calls of any lengths together: one product for the rows of all at each projection, and between them each call by itself.

For calls that `whole` takes. Most of what few rows cost is to read the weights, and the way through a library to the product: both are
paid once here. Attention itself is a few small operations for each call, and nothing is padded.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.linear import NARROW
from service.attention.projections import Projections
from service.attention.single import SCORES, attend
from service.spec import PROJECTIONS
from service.tensors import Array


class Packed:
    """What one layer does with such calls. Immutable."""

    def __init__(self, projections: Projections) -> None:
        self.spec, self._product = projections.spec, projections.product
        self._nothing = torch.empty(1, 1, 1, dtype=projections.dtype)  # what a product with beta=0 is added to
        self._dtype = self._nothing.numpy().dtype
        self._narrow = self.spec.d_model <= NARROW

    def __call__(self, calls: Sequence[Call]) -> list[tuple[Tensor, Tensor]]:
        """Of each call output [batch, n, d_model] and weights [batch, heads, n, n]. They share their inputs in the same way."""
        ends = [0, *accumulate(math.prod(call.query.shape[:2]) for call in calls)]
        places = [slice(*bounds) for bounds in pairwise(ends)]
        projected, merged = self._project(calls), np.empty((ends[-1], self.spec.num_heads, self.spec.head_dim), self._dtype)
        weights = [self._attend(call.query.shape[0], projected[:, place], merged[place]) for call, place in zip(calls, places, strict=True)]
        output = self._product(torch.from_numpy(merged.reshape(ends[-1], -1)), "output")
        outputs = [output[place].view(call.query.shape) for call, place in zip(calls, places, strict=True)]
        return list(zip(outputs, weights, strict=True))

    def _project(self, calls: Sequence[Call]) -> Array:
        """Query, key and value [3, rows of all, heads, head_dim]."""
        heads = (self.spec.num_heads, self.spec.head_dim)
        if calls[0].query is calls[0].key is calls[0].value:
            packed = self._product(_rows([call.query for call in calls]), "query+key+value").numpy()
            return packed.reshape(-1, 3, *heads).swapaxes(0, 1)
        inputs = zip(*((call.query, call.key, call.value) for call in calls), strict=True)
        projected = (self._product(_rows(xs), name) for xs, name in zip(inputs, PROJECTIONS, strict=False))
        return np.stack([x.numpy().reshape(-1, *heads) for x in projected])

    def _attend(self, batch: int, projected: Array, merged: Array) -> Tensor:
        """The weights [batch, heads, n, n] of one call from its [3, batch * n, heads, head_dim]; what its heads give goes to `merged`.

        Which library does it depends on the layer and on the length of an item alone, not on other calls.
        """
        rows, (heads, width) = len(merged) // batch, merged.shape[1:]
        if self._narrow and heads * rows**2 <= SCORES:
            query, key, value = projected.reshape(3, batch, rows, heads, width).swapaxes(2, 3)
            into = merged.reshape(batch, rows, heads, width).swapaxes(1, 2)
            return torch.from_numpy(attend(query, key, value, into, self.spec.scale))
        items = torch.from_numpy(projected).view(3, batch, rows, heads, width).transpose(2, 3).flatten(1, 2)
        q, k, v = items.unbind()  # [batch * heads, n, head_dim]
        weights = torch.softmax(torch.baddbmm(self._nothing, q, k.mT, beta=0, alpha=self.spec.scale), -1)
        made = torch.bmm(weights, v).view(batch, heads, rows, width)
        torch.from_numpy(merged).view(batch, rows, heads, width).copy_(made.transpose(1, 2))
        return weights.view(batch, heads, rows, rows)


def _rows(inputs: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in inputs]) if len(inputs) > 1 else inputs[0].flatten(0, 1)
