"""Some of the attention weights: the smaller problem that has only the selected heads and queries, and what is taken of its weights."""

from dataclasses import replace

import torch
from torch import Tensor

from service.attention.call import Call


def narrowed(call: Call, query: Tensor, key: Tensor, empty: Tensor | None) -> tuple[Call, Tensor, Tensor, Tensor | None]:
    """The call of its selected heads and queries alone, with query [b, heads, queries, d], key [b, heads, k, d] and the rows without a
    key, `empty` [b, heads, queries], of these.

    `query`, `key` and `empty` are those of all heads and queries, and come back as they are where nothing is selected. The masks are
    narrowed, so that rows count from the first selected query; `heads` and `queries` then say which they were.
    """
    if not call.selects:
        return call, query, key, empty
    heads, queries = call.heads or tuple(range(query.shape[1])), call.queries or tuple(range(query.shape[2]))
    groups = query.shape[1] // key.shape[1]
    heads_at = torch.tensor(heads, device=query.device)
    query, key = query.index_select(1, heads_at), key.index_select(1, heads_at // groups)
    empty = None if empty is None else empty.index_select(1, heads_at)
    if call.queries is not None:
        rows_at = torch.tensor(queries, device=query.device)
        query, empty = query.index_select(2, rows_at), None if empty is None else empty.index_select(2, rows_at)
    masks = call.masks.narrowed(call.heads, call.queries)
    return replace(call, masks=masks, heads=heads, queries=queries), query, key, empty


def chosen(weights: Tensor, call: Call) -> Tensor:
    """Of weights [b, heads, queries, k] of all heads and queries, those of the selected."""
    for axis, places in ((1, call.heads), (2, call.queries)):
        if places is not None:
            weights = weights.index_select(axis, torch.tensor(places, device=weights.device))
    return weights


def selection(weights: Tensor, call: Call) -> dict[str, Tensor]:
    """The weights as asked for: averaged over heads, or the largest of each row with their keys."""
    if call.average:
        weights = weights.mean(1)
    if call.top_k is None:
        return {"attention_weights": weights}
    values, keys = _largest(weights, min(call.top_k, weights.shape[-1]))
    return {"values": values, "keys": keys}


def _largest(weights: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row and their keys, ties to the lower key.

    torch.topk is faster than a stable sort but breaks ties as it likes: only rows in which there are any, up to the one that just misses,
    are sorted.
    """
    if 2 * n >= weights.shape[-1]:
        values, keys = torch.sort(weights, dim=-1, descending=True, stable=True)
    else:
        values, keys = torch.topk(weights, n + 1, dim=-1)
        tied = (values[..., 1:] == values[..., :-1]).any(-1)
        if tied.any():
            exact, places = torch.sort(weights[tied], dim=-1, descending=True, stable=True)
            values[tied], keys[tied] = exact[..., : n + 1], places[..., : n + 1]
    return values[..., :n], keys[..., :n]
