"""The same input through one head as wide as all of them: what is it that many heads change?

The one-head layer of the same seed has the very matrices of the layer with h heads, since a seed draws them whole. So its scores are the
sum of the heads' own, over sqrt(h) (its scale is 1/sqrt(h * head_dim)); grouped keys and values count for each head that shares them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.metrics.per_row import Block


def merged(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Call, Tensor, Tensor, Tensor]:
    """The call and its projections [b, heads, n, d] as those of one head, [b, 1, n, h * d]."""
    h, groups = query.shape[1], query.shape[1] // key.shape[1]
    wide = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    query, key, value = (x.transpose(1, 2).flatten(2)[:, None] for x in wide)
    return replace(call, scale=call.scale / h**0.5, head_scale=None), query, key, value


class SingleHead:
    """Sums over query rows of what the one head does, and of what it shares with each of the many."""

    def __init__(self) -> None:
        self._sums = torch.zeros(())  # [b, 3]: entropy, confidence, rows
        self._likeness = torch.zeros(())  # [3, b, h]: products, and both squares
        self._outputs: list[Tensor] = []  # [b, rows, h * d]

    def read(self, block: Block, many: Block, value: Tensor) -> None:
        """Adds a block of the one head, and the same rows of the many."""
        counts = block.counts[:, 0]
        entropy = torch.special.entr(block.shares[:, 0]).sum(-1)
        rows = torch.stack((entropy.double(), block.shares[:, 0].amax(-1).double(), counts.double()))
        self._sums = self._sums + (rows * counts).sum(-1).T
        both = (block.counts & many.counts)[..., None]
        one, other = block.shares * both, many.shares * both
        products = torch.stack([(x * y).flatten(2).sum(-1).double() for x, y in ((one, other), (one, one), (other, other))])
        self._likeness = self._likeness + products
        self._outputs.append(block.weights[:, 0] @ value[:, 0].to(block.weights.dtype))

    @property
    def outputs(self) -> Tensor:
        """[b, q, h * d]: what the one head makes, before the output projection."""
        return torch.cat(self._outputs, 1)

    def parts(self, many: Tensor, one: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """Entropy, confidence and what becomes of the output [b, q, out] over the rows [b, q] that count."""
        entropy, confidence = (self._sums[:, :2] / self._sums[:, 2:]).T
        products, of_one, of_many = self._likeness
        many, one = (x.double().masked_fill(~counts[..., None], 0).flatten(1) for x in (many, one))
        size = many.square().sum(-1).sqrt()
        return {
            "entropy": entropy,
            "confidence": confidence,
            "similarity": (products / (of_one * of_many).sqrt()).clamp(max=1),
            "relative_change": (one - many).square().sum(-1).sqrt() / size,
            "cosine": ((many * one).sum(-1) / (size * one.square().sum(-1).sqrt())).clamp(-1, 1),
        }
