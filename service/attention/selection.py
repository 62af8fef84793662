"""Selects the attention weights to return: some heads and queries, the mean over heads, or the largest of each row."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from service.attention.call import Call


def select_heads_and_queries(
    call: Call, query: Tensor, key: Tensor, fully_masked: Tensor | None
) -> tuple[Call, Tensor, Tensor, Tensor | None]:
    """Restrict a call, its query [b, h, q, d], key [b, kv heads, k, d] and fully masked rows [b, h, q] to its selected heads and queries.

    The new key has one head for each selected query head. Rows of the new masks are selected queries; `heads` and `queries` of the new call
    are their original indices. Without a selection, the arguments are returned.
    """
    if not call.selects:
        return call, query, key, fully_masked
    heads, queries = call.heads or tuple(range(query.shape[1])), call.queries or tuple(range(query.shape[2]))
    groups = query.shape[1] // key.shape[1]
    heads_at = torch.tensor(heads, device=query.device)
    query, key = query.index_select(1, heads_at), key.index_select(1, heads_at // groups)
    fully_masked = None if fully_masked is None else fully_masked.index_select(1, heads_at)
    if call.queries is not None:
        rows_at = torch.tensor(queries, device=query.device)
        query, fully_masked = query.index_select(2, rows_at), None if fully_masked is None else fully_masked.index_select(2, rows_at)
    masks = call.masks.select(call.heads, call.queries)
    return replace(call, masks=masks, heads=heads, queries=queries), query, key, fully_masked


def of_heads(per_head: Tensor, heads: Sequence[int] | None) -> Tensor:
    """The selected heads of a tensor [h, …]; None: all."""
    return per_head if heads is None else per_head[list(heads)]


def select_weights(weights: Tensor, call: Call) -> Tensor:
    """The weights of the selected heads and queries, from all weights [b, h, q, k]."""
    for axis, places in ((1, call.heads), (2, call.queries)):
        if places is not None:
            weights = weights.index_select(axis, torch.tensor(places, device=weights.device))
    return weights


def reduce_weights(weights: Tensor, call: Call) -> dict[str, Tensor]:
    """`attention_weights`, averaged over heads if requested; with `top_k`, the largest `values` of each row and their `keys`."""
    if call.average:
        weights = weights.mean(1)
    if call.top_k is None:
        return {"attention_weights": weights}
    values, keys = top_k(weights, min(call.top_k, weights.shape[-1]))
    return {"values": values, "keys": keys}


def top_k(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest numbers along the last axis and their indices, [..., n], largest first; ties go to the lower index.

    torch.topk returns ties in any order, and a stable sort of all numbers is slow. So only rows with ties among the n + 1 largest are
    computed again: all numbers above the n-th largest, and the first of those equal to it.
    """
    if 2 * n >= values.shape[-1]:
        largest, indices = torch.sort(values, dim=-1, descending=True, stable=True)
        return largest[..., :n], indices[..., :n]
    largest, indices = torch.topk(values, n + 1, dim=-1)
    tied = (largest[..., 1:] == largest[..., :-1]).any(-1)
    largest, indices = largest[..., :n], indices[..., :n]
    if n and tied.any():
        rows = values[tied].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)  # topk treats NaN as the largest, too
        least = rows.topk(n, -1).values[:, -1:]
        above, equal = rows > least, rows == least
        taken = above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
        places = taken.nonzero()[:, 1].view(-1, n)  # in order of index
        order = rows.gather(1, places).sort(dim=1, descending=True, stable=True).indices
        indices[tied] = places.gather(1, order)
        largest[tied] = values[tied].gather(1, indices[tied])
    return largest, indices
