"""Selects keys by index scores as if these were computed in float64, and computes most of them in float32, in half of the time.

A float32 score of d products in each of h heads differs from the exact one by at most E = (d + h + 4) ε Σ_h |w_h| |q_h| max |k|. So keys
whose score exceeds the n-th largest by more than 2E are selected, and those that fall short of it by more are not, whatever the rounding.
The few others of each row are computed in float64.
"""

import torch
from torch import Tensor

LEAST_PRODUCTS = 1 << 10  # of each pair of a query and a key; for fewer, float64 is as fast
MOST_OPEN = 16  # share of the pairs, as 1/n: with more open ones, all are computed in float64


def index_scores(query: Tensor, key: Tensor, factors: Tensor) -> Tensor:
    """Σ_h w_h relu(q_h · k): [b, heads, q, d], [b, k, d], [b, q, heads] -> [b, q, k]."""
    batch, heads, rows, width = query.shape
    products = (query.reshape(batch, heads * rows, width) @ key.mT).clamp_(min=0).view(batch, heads, rows, key.shape[1])
    return torch.einsum("bhqk,bqh->bqk", products, factors)


@torch.no_grad()
def select_in_float32(query: Tensor, key: Tensor, factors: Tensor, visible: Tensor, n: int) -> Tensor | None:
    """bool [b, 1, q, k]: whether a key is visible and among the n visible ones with the largest scores; None if float32 does not tell.

    query [b, heads, q, d], key [b, k, d] and factors [b, q, heads] are float64.
    """
    scores = index_scores(query.float(), key.float(), factors.float()).masked_fill_(~visible[:, 0], -torch.inf)
    error = _error(query, key, factors)
    if not bool(error.isfinite().all()):
        return None
    least = scores.topk(n, sorted=False).values.amin(-1, keepdim=True)
    chosen = scores > least + 2 * error  # every visible key if there are fewer than n
    still_open = (scores - least).abs() <= 2 * error
    missing = n - chosen.sum(-1)
    undecided = still_open & (still_open.sum(-1) > missing)[..., None]
    chosen |= still_open & ~undecided
    counts = undecided.sum(-1)
    if not (most := int(counts.max())):
        return chosen[:, None]
    item, row = counts.nonzero(as_tuple=True)
    if len(item) * most * MOST_OPEN > undecided.numel():
        return None
    keys, is_open = _of_rows(undecided[item, row], most)
    exact = (key[item[:, None], keys] @ query[item, :, row].mT).clamp_(min=0) @ factors[item, row][..., None]  # [rows, most, 1]
    order = exact[..., 0].masked_fill_(~is_open, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    best = torch.arange(most) < missing[item, row][:, None]
    at = best.nonzero(as_tuple=True)
    chosen[item[at[0]], row[at[0]], keys.gather(1, order)[at]] = True
    return chosen[:, None]


def _of_rows(flags: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The indices of the true flags of each row, ascending, [rows, most], and which of these there are; others are 0."""
    row, index = flags.nonzero(as_tuple=True)
    place = torch.arange(len(row)) - torch.searchsorted(row, row)
    indices = torch.zeros(len(flags), most, dtype=torch.int64)
    exists = torch.zeros(len(flags), most, dtype=torch.bool)
    indices[row, place], exists[row, place] = index, True
    return indices, exists


def _error(query: Tensor, key: Tensor, factors: Tensor) -> Tensor:
    """The bound E of the module's docstring for each row, and what underflows: float32 [b, q, 1]; inf if scores may overflow."""
    lengths = torch.linalg.vector_norm(query, dim=-1).mT * torch.linalg.vector_norm(key, dim=-1).amax(-1)[:, None, None]  # [b, q, heads]
    float32, terms = torch.finfo(torch.float32), query.shape[-1] + query.shape[1] + 4
    largest = (factors.abs() * lengths).sum(-1, keepdim=True).float()
    underflow = terms * float32.tiny * (1 + factors.abs().sum(-1, keepdim=True))
    bound: Tensor = (largest * (terms * float32.eps) + underflow).float()
    return bound.masked_fill_(~largest.isfinite(), torch.inf)
