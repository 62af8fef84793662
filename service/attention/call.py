"""`Call`, the input of a layer, and `Result`, its output; functions that select the attention weights that a call requests.

The creator of a Call must ensure that its shapes fit the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from service.attention.masks import MASK_TENSORS, Masks

FullyMasked = Literal["zero", "uniform", "error"]
# Names of the outputs that a call may request, by what they are computed from. There is one more, `indexer_mask`.
PROJECTED = frozenset({"query_projection", "key_projection", "value_projection", "latent", "rope_key"})
SCORED = frozenset({"scores", "log_sum_exp", "attention_weights"})
TOP_K = frozenset({"keys", "values"})  # in place of attention weights, with `top_k`
FROM_HEADS = frozenset({"head_outputs", "concatenated", "output"})
GRADIENTS = ("query_gradient", "key_gradient", "value_gradient")


@dataclass(frozen=True, slots=True)
class Call:
    """One call to a layer; tensors have the layer's dtype. In self-attention `key is query`; `value is key` if both are the same input."""

    query: Tensor  # [b, q, query_dim]
    key: Tensor  # [b, k, key_dim]
    value: Tensor  # [b, k, value_dim]
    masks: Masks
    scale: float
    outputs: frozenset[str]  # of the names above
    softcap: float | None = None
    positions: Tensor | None = None  # float64 [b|1, q] or [b|1, q, axes], by which RoPE rotates queries; None: masks.positions
    key_positions: Tensor | None = None  # float64 [b|1, k] or [b|1, k, axes]; None: 0, 1, …
    fully_masked: FullyMasked = "zero"
    head_scale: Tensor | None = None  # [b|1, h, 1, 1]
    dropout: tuple[float, int] | None = None  # p, seed
    heads: tuple[int, ...] | None = None  # selected attention weights; None: all
    queries: tuple[int, ...] | None = None
    average: bool = False
    top_k: int | None = None
    reproducible: bool = False
    is_part: bool = False  # whether this is one part of a call cut along its keys; log_sum_exp, used to combine parts, is then float64
    output_gradient: Tensor | None = None  # [b, q, output_dim], if gradients are among the outputs

    @property
    def selects(self) -> bool:
        """Whether only some heads or queries of the attention weights are requested."""
        return self.heads is not None or self.queries is not None

    @property
    def rope_positions(self) -> tuple[Tensor, Tensor]:
        """The positions of queries [b|1, q] and of keys [b|1, k], or [..., axes], by which RoPE rotates them."""
        of_keys = torch.arange(self.key.shape[1], device=self.key.device)[None] if self.key_positions is None else self.key_positions
        return self.masks.positions if self.positions is None else self.positions, of_keys

    def to(self, device: torch.device) -> "Call":
        """The call with its tensors on `device`; the same object if they already are."""
        if self.query.device == device:
            return self
        query = self.query.to(device)
        key = query if self.key is self.query else self.key.to(device)
        value = key if self.value is self.key else self.value.to(device)
        moved = {name: tensor.to(device) for name in MASK_TENSORS if (tensor := getattr(self.masks, name)) is not None}
        names = ("positions", "key_positions", "head_scale", "output_gradient")
        others = {name: tensor.to(device) for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, query=query, key=key, value=value, masks=replace(self.masks, **moved), **others)


@dataclass(frozen=True, slots=True)
class Result:
    """`tensors` maps the names in `Call.outputs` to tensors; with `top_k`, `keys` and `values` replace `attention_weights`.

    `fully_masked`, bool [b, h, q], marks the rows without a key to attend to; None if there are none.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    fully_masked: Tensor | None = None

    @property
    def fully_masked_rows(self) -> int:
        return 0 if self.fully_masked is None else int(self.fully_masked.sum())

    def first_fully_masked(self, n: int = 4) -> list[tuple[int, int, int]]:
        """(batch, head, query) of the first few fully masked rows."""
        return [] if self.fully_masked is None else [(b, h, i) for b, h, i in self.fully_masked.nonzero()[:n].tolist()]

    def split(self, sizes: Sequence[int]) -> "list[Result]":
        """The results of consecutive batch items, `sizes` of them each. Tensors are views."""
        if len(sizes) == 1:
            return [self]
        items = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        masked = self.fully_masked
        results = []
        for i in items:
            tensors = {name: tensor[i] for name, tensor in self.tensors.items()}
            results.append(Result(tensors, None if masked is None else masked[i]))
        return results


class WeightBlock(NamedTuple):
    """The attention weights of a block of query rows."""

    rows: slice
    weights: Tensor  # [b, h, rows, k]
    visible: Tensor | None  # bool [b|1, h|1, rows|1, k|1]: the keys that each query may attend to; None: all


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
    head_indices = torch.tensor(heads, device=query.device)
    query, key = query.index_select(1, head_indices), key.index_select(1, head_indices // groups)
    fully_masked = None if fully_masked is None else fully_masked.index_select(1, head_indices)
    if call.queries is not None:
        query_indices = torch.tensor(queries, device=query.device)
        query, fully_masked = (
            query.index_select(2, query_indices),
            None if fully_masked is None else fully_masked.index_select(2, query_indices),
        )
    masks = call.masks.select(call.heads, call.queries)
    return replace(call, masks=masks, heads=heads, queries=queries), query, key, fully_masked


def select_heads(per_head: Tensor, heads: Sequence[int] | None) -> Tensor:
    """The selected heads of a tensor [h, …]; None: all."""
    return per_head if heads is None else per_head[list(heads)]


def select_weights(weights: Tensor, call: Call) -> Tensor:
    """The weights of the selected heads and queries, from all weights [b, h, q, k]."""
    for axis, indices in ((1, call.heads), (2, call.queries)):
        if indices is not None:
            weights = weights.index_select(axis, torch.tensor(indices, device=weights.device))
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
        taken_indices = taken.nonzero()[:, 1].view(-1, n)  # in ascending order
        order = rows.gather(1, taken_indices).sort(dim=1, descending=True, stable=True).indices
        indices[tied] = taken_indices.gather(1, order)
        largest[tied] = values[tied].gather(1, indices[tied])
    return largest, indices
