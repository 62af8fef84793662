"""The strongest links of each head: the largest weights and where they stand. Read a block of query rows at a time, so that [q, k] is
never held: the best so far and the best of the block are one short list.
"""

import torch
from torch import Tensor

from service.attention.metrics.per_row import Block


class StrongestLinks:
    """The n largest weights of each (batch, head), largest first; ties go to the lower query, then to the lower key."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._weights: Tensor | None = None  # [b, h, n at most]
        self._places: Tensor | None = None  # [b, h, n at most], query * keys + key
        self._num_keys = 0

    def read(self, block: Block) -> None:
        """Takes the block's links among the best."""
        self._num_keys = block.shares.shape[-1]
        weights = block.weights.masked_fill(~block.counts[..., None], 0).flatten(2)
        places = largest(weights, min(self.n, weights.shape[-1]))
        best, here = weights.gather(-1, places), places + block.rows.start * self._num_keys
        if self._weights is not None and self._places is not None:
            best, here = torch.cat((self._weights, best), -1), torch.cat((self._places, here), -1)
            best, order = best.sort(dim=-1, descending=True, stable=True)
            best, here = best[..., : self.n], here.gather(-1, order)[..., : self.n]
        self._weights, self._places = best, here

    def parts(self) -> dict[str, Tensor]:
        """`queries`, `keys` and `weights`, each [b, h, n]; -1 and NaN where a head has fewer links: a weight of 0 is none."""
        assert self._weights is not None and self._places is not None
        none = self._weights <= 0
        num_keys = max(1, self._num_keys)
        queries = (self._places // num_keys).masked_fill(none, -1)
        keys = (self._places % num_keys).masked_fill(none, -1)
        return {"queries": queries, "keys": keys, "weights": self._weights.double().masked_fill(none, torch.nan)}


def largest(values: Tensor, n: int) -> Tensor:
    """Indices of the n largest along the last axis, largest first, ties to the lower index: [..., n].

    torch's topk leaves ties to chance, and sorting all costs far more: so the n-th largest value is found, and those equal to it counted.
    """
    if not n:
        return torch.zeros((*values.shape[:-1], 0), dtype=torch.int64, device=values.device)
    least = values.topk(n, -1).values[..., -1:]
    above, equal = values > least, values == least
    taken = above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
    at = taken.nonzero()[:, -1].view(*values.shape[:-1], n)  # in order of index
    order = values.gather(-1, at).sort(dim=-1, descending=True, stable=True).indices
    return at.gather(-1, order)
