"""Attention weights that are not one softmax of the scores: differential attention."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.eager import Eager, RowBlock
from service.spec import LAMBDAS, LayerSpec


def eager_for(spec: LayerSpec) -> type[Eager]:
    """The class that computes the layer's weights."""
    return DifferentialAttention if spec.differential else Eager


class DifferentialAttention(Eager):
    """Weights softmax(q1 k1) - lambda softmax(q2 k2) of the halves of queries and keys, and a norm of each head's output (Ye et al. 2024).

    Blocks have the scores of the first softmax; requests cannot ask for scores.
    """

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__(spec, weights, device)
        assert spec.differential is not None
        q1, k1, q2, k2 = (weights[name].double() for name in LAMBDAS)
        self._lambda = float(torch.exp(q1 @ k1) - torch.exp(q2 @ k2)) + spec.differential.lambda_init
        self._eps, self._factor = spec.differential.eps, torch.tensor(1 - spec.differential.lambda_init, dtype=self.dtype, device=device)
        if spec.differential.norm_weights:
            self._factor = self._factor * weights["head_norm.weight"].to(self.dtype)

    def __call__(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None, wanted: Iterable[str]
    ) -> dict[str, Tensor]:
        tensors = super().__call__(call, query, key, value, fully_masked, wanted)
        if (outputs := tensors.get("head_outputs")) is not None:
            exact = outputs.to(self.dtype)
            exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._eps)
            tensors["head_outputs"] = (exact * self._factor).to(self.layer_dtype)
        return tensors

    def row_blocks(
        self, call: Call, query: Tensor, key: Tensor, fully_masked: Tensor | None, blocks: Iterable[slice] | None = None
    ) -> Iterator[RowBlock]:
        blocks = None if blocks is None else tuple(blocks)
        halves = zip(query.chunk(2, -1), key.chunk(2, -1), strict=True)
        first, second = (super(DifferentialAttention, self).row_blocks(call, *half, fully_masked, blocks) for half in halves)
        for one, other in zip(first, second, strict=True):
            yield one._replace(attention_weights=partial(self._difference, one, other))

    def _difference(self, one: RowBlock, other: RowBlock) -> Tensor:
        return one.attention_weights() - self._lambda * other.attention_weights()
