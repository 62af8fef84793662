"""Metrics between heads: how alike their weights are. Sums over query rows, added up block by block; [h, h] is all that is kept.

A pair of heads is compared on the rows that count for both.
"""

import torch
from torch import Tensor

from service.attention.metrics.per_row import Block


class CosineSimilarity:
    """Products of the heads' rows: what cosine similarity and the disagreement of positions are made of."""

    def __init__(self) -> None:
        self._dots = self._squares = self._rows = torch.zeros(())

    def read(self, block: Block) -> None:
        """Adds the block's rows."""
        counts = block.counts.double()
        flat = block.shares.flatten(2)
        self._dots = self._dots + (flat @ flat.transpose(1, 2)).double()
        self._squares = self._squares + block.shares.square().sum(-1).double() @ counts.transpose(1, 2)
        self._rows = self._rows + counts @ counts.transpose(1, 2)

    def cosine_similarity(self) -> Tensor:
        """[b, h, h]: cosine of the angle between two heads' weights, taken as one long vector each."""
        return (self._dots / (self._squares * self._squares.transpose(1, 2)).sqrt()).clamp(-1, 1)

    def position_disagreement(self) -> Tensor:
        """[b]: -1/h^2 sum_ij |A_i * A_j| (Li et al. 2018), of each query and averaged over queries, so that lengths compare."""
        return -(self._dots / self._rows).mean((1, 2))


class JensenShannon:
    """The Jensen-Shannon divergence between heads, in nats and averaged over queries: from 0 to ln 2 (Clark et al. 2019, who sum it)."""

    def __init__(self) -> None:
        self._sum = self._rows = torch.zeros(())

    def read(self, block: Block) -> None:
        """Adds the block's rows: entropy of the mean less the mean of the entropies, one head against all at a time."""
        shares, counts = block.shares, block.counts
        own = torch.special.entr(shares).sum(-1)
        columns = []
        for i in range(shares.shape[1]):
            mixed = torch.special.entr((shares + shares[:, i : i + 1]) / 2).sum(-1)
            divergence = (mixed - (own + own[:, i : i + 1]) / 2).clamp(min=0)
            columns.append((divergence * (counts & counts[:, i : i + 1])).double().sum(-1))
        self._sum = self._sum + torch.stack(columns, -1)
        self._rows = self._rows + counts.double() @ counts.double().transpose(1, 2)

    def mean(self) -> Tensor:
        """[b, h, h]."""
        return self._sum / self._rows


def deviation(block: Block) -> Tensor:
    """[b, rows]: the standard deviation of a weight across heads, averaged over the keys that any head may see.

    NaN for rows that do not count for every head.
    """
    spread = block.shares.std(1, correction=0)  # [b, rows, k]
    seen = torch.ones(1, 1, spread.shape[-1], dtype=torch.bool, device=spread.device) if block.seen is None else block.seen.any(1)
    keys = seen.expand(*seen.shape[:-1], spread.shape[-1]).sum(-1)
    return (spread.masked_fill(~seen, 0).sum(-1).double() / keys).masked_fill(~block.counts.all(1), torch.nan)


def cosines(gram: Tensor) -> Tensor:
    """[..., h, h] products of vectors -> the cosines of the angles between them; NaN where one is 0."""
    lengths = gram.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    return (gram / (lengths[..., :, None] * lengths[..., None, :])).clamp(-1, 1)


def disagreement(gram: Tensor) -> Tensor:
    """[b]: -1/h^2 sum_ij cos(x_i, x_j), i = j included (Li et al. 2018): -1 for heads that are all the same."""
    return -cosines(gram).mean((-2, -1))
