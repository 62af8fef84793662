"""Multi-head attention in NumPy float64, as plainly as it can be written: what every faster way is held against.

It knows neither torch nor requests, and shares no line with the layer that serves: the two can only agree by both being right.
So clarity beats speed here. Everything of shape [batch, heads, queries, keys] is formed at once, and one step follows the other in
the order the service promises: scale, softcap, everything added, everything blocked, softmax, dropout.

Vaswani et al. 2017, "Attention Is All You Need", section 3.2:
    Attention(Q, K, V) = softmax(Q Kᵀ / √d) V
    MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O   where head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from service.spec import LayerSpec
from service.tensors import Array


@dataclass(frozen=True, slots=True)
class Reference:
    """Every output of one call in float64; a call without a batch drops the leading b of each."""

    output: Array  # [b, q, d_model]
    attention_weights: Array  # [b, h, q, k], after dropout
    scores: Array  # [b, h, q, k], after everything added and blocked, before the softmax
    log_sum_exp: Array  # [b, h, q], of the scores
    query_projection: Array  # [b, h, q, d]
    key_projection: Array  # [b, h, k, d]
    value_projection: Array  # [b, h, k, d]
    head_outputs: Array  # [b, h, q, d], after head_scale
    concatenated: Array  # [b, q, h*d]
    fully_masked: Array  # [b, h, q], true where no key is left

    @property
    def fully_masked_rows(self) -> int:
        return int(self.fully_masked.sum())


@np.errstate(invalid="ignore", over="ignore")  # a blocked key may hold NaN or infinity: it is computed with, and then left out
def attend(
    spec: LayerSpec,
    weights: Mapping[str, Array],
    *,
    query: ArrayLike,
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    attend_mask: ArrayLike | None = None,
    block_mask: ArrayLike | None = None,
    attend_keys: ArrayLike | None = None,
    block_keys: ArrayLike | None = None,
    valid_lens: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    query_offset: ArrayLike | Literal["end"] | None = None,
    causal: bool = False,
    window: Mapping[str, int | None] | None = None,
    fully_masked: Literal["zero", "uniform", "error"] = "zero",
    head_scale: ArrayLike | None = None,
    dropout: Mapping[str, Any] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Reference:
    """What the layer `spec` with these canonical weights answers. Arguments are named and shaped as the fields of a request.

    query [b, q, d_model], key [b, k, key_dim], value [b, k, value_dim]; masks and bias [q, k], [b, q, k] or [b, h, q, k], axes of 1
    broadcast; key masks [b, k]; valid_lens [b] or [b, q]; query_offset an integer, [b] or "end"; head_scale [h] or [b, h].
    A query [q, d_model] is a call without a batch: every argument then drops its b.

    ValueError: a value without a key; causal or a window with q != k and no offset; rows without a key under fully_masked="error".
    """
    if value is not None and key is None:
        raise ValueError("expected a key beside the value, got a value alone")
    batched = np.ndim(query) == 3
    key = query if key is None else key
    value = key if value is None else value

    def as_batch(x: ArrayLike | None) -> Any:
        return x if x is None else np.asarray(x) if batched else np.asarray(x)[None]

    inputs = {"query": as_batch(query), "key": as_batch(key), "value": as_batch(value)}
    q, k, v = (split_heads(project(x, weights, name), spec.num_heads) for name, x in inputs.items())
    shape = (*q.shape[:3], k.shape[2])  # [b, h, q, k]

    # What is added to the scores, and which keys each query may not see.
    keys = (as_batch(valid_lens), as_batch(attend_keys), as_batch(block_keys))
    added = spread(0.0 if bias is None else np.asarray(bias, np.float64), shape, batched)
    blocked = np.isneginf(added) | blocked_by_masks(attend_mask, block_mask, shape, batched) | blocked_by_keys(*keys, shape)
    if causal or window is not None:
        blocked |= blocked_by_position(place_queries(query_offset, keys, shape), causal, window or {}, shape)
    empty = np.all(blocked, axis=-1)  # [b, h, q]
    if fully_masked == "error" and empty.any():
        raise ValueError(f"expected a key for every query, got none at [b, h, q] = {np.argwhere(empty)[0].tolist()}")

    scores = (spec.scale if scale is None else scale) * (q @ k.swapaxes(-1, -2))
    if cap := spec.softcap if softcap is None else softcap:
        scores = cap * np.tanh(scores / cap)
    scores = np.where(blocked, -np.inf, scores + added)
    attention_weights, log_sum_exp = softmax(scores)
    if fully_masked == "uniform":
        attention_weights[empty] = 1 / max(shape[-1], 1)
    if dropout is not None:
        attention_weights = attention_weights * kept(dropout, shape)

    heads = average_values(attention_weights, v)
    if head_scale is not None:
        heads = heads * np.asarray(head_scale, np.float64)[..., None, None]  # [h, 1, 1] or [b, h, 1, 1]
    concatenated = merge_heads(heads)
    outputs: dict[str, Array] = {
        "output": project(concatenated, weights, "output"),
        "attention_weights": attention_weights,
        "scores": scores,
        "log_sum_exp": log_sum_exp,
        "query_projection": q,
        "key_projection": k,
        "value_projection": v,
        "head_outputs": heads,
        "concatenated": concatenated,
        "fully_masked": empty,
    }
    return Reference(**{name: x if batched else x[0] for name, x in outputs.items()})


def project(x: ArrayLike, weights: Mapping[str, Array], name: str) -> Array:
    """x Wᵀ + b, with W [out, in] as `torch.nn.Linear` keeps it: [b, n, in] -> [b, n, out]. No `name.bias` means none."""
    projected = np.asarray(x, np.float64) @ np.asarray(weights[f"{name}.weight"], np.float64).T
    return projected + np.asarray(weights.get(f"{name}.bias", 0.0), np.float64)


def split_heads(x: Array, heads: int) -> Array:
    """[b, n, h*d] -> [b, h, n, d]: head i is columns i*d to (i+1)*d of every row."""
    b, n, width = x.shape
    return x.reshape(b, n, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Array) -> Array:
    """[b, h, n, d] -> [b, n, h*d], the way back from `split_heads`."""
    b, h, n, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, n, h * d)


def softmax(scores: Array) -> tuple[Array, Array]:
    """exp(s_j - m) / Σ exp(s_j - m) over the last axis with m = max s, and log Σ exp(s_j): [..., k] -> [..., k], [...].

    Subtracting m changes nothing but keeps exp from overflowing. A row of -inf alone has weights 0 and the logarithm -inf.
    """
    highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    highest = np.where(np.isneginf(highest), 0.0, highest)
    exponentials = np.exp(scores - highest)
    total = exponentials.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_sum_exp = (highest + np.log(total))[..., 0]
    return exponentials / np.where(total == 0, 1.0, total), log_sum_exp


def average_values(weights: Array, values: Array) -> Array:
    """Σ_j w_ij v_j: [b, h, q, k], [b, h, k, d] -> [b, h, q, d]. A weight of 0 counts for nothing, even where 0·v is NaN."""
    if np.isfinite(values).all():
        return weights @ values
    seen = np.where(weights[..., None] == 0, 0.0, values[:, :, None])  # [b, h, q, k, d]
    result: Array = (weights[..., None] * seen).sum(axis=3)
    return result


def spread(x: ArrayLike, shape: tuple[int, ...], batched: bool) -> Array:
    """A mask or bias as [b, h, q, k]. Of rank 3 it is [b, q, k], or [h, q, k] where there is no batch."""
    x = np.asarray(x)
    return np.broadcast_to(x[:, None] if x.ndim == 3 and batched else x, shape)


def blocked_by_masks(attend: ArrayLike | None, block: ArrayLike | None, shape: tuple[int, ...], batched: bool) -> Array:
    """What is blocked by the masks over queries and keys, as [b, h, q, k]. Of each of them 1 means what its name says."""
    blocked = np.zeros(shape, bool)
    if attend is not None:
        blocked |= ~spread(np.asarray(attend, bool), shape, batched)
    if block is not None:
        blocked |= spread(np.asarray(block, bool), shape, batched)
    return blocked


def blocked_by_keys(lens: Array | None, attend: Array | None, block: Array | None, shape: tuple[int, ...]) -> Array:
    """What valid_lens [b] or [b, q] and the key masks [b, k] block, as [b, h, q, k]."""
    blocked = np.zeros(shape, bool)
    if lens is not None:
        per_query = lens[:, None] if lens.ndim == 1 else lens  # [b, 1] or [b, q]
        blocked |= np.arange(shape[-1]) >= per_query[:, None, :, None]
    if attend is not None:
        blocked |= ~attend.astype(bool)[:, None, None, :]
    if block is not None:
        blocked |= block.astype(bool)[:, None, None, :]
    return blocked


def place_queries(offset: ArrayLike | None, keys: tuple[Array | None, Array | None, Array | None], shape: tuple[int, ...]) -> Array:
    """The key position at which each query stands, i + offset: [b, q].

    "end" puts the last query on the item's last real key: offset = n - q, where n is 1 + the highest key that `keys` (valid_lens,
    of all its queries, and the two key masks) leave open, 0 if none.
    """
    b, _, q, k = shape
    if offset is None and q != k:
        raise ValueError(f"expected query_offset, since {q} queries and {k} keys do not say how they line up")
    if isinstance(offset, str):
        unseen = blocked_by_keys(*keys, shape)[:, 0].all(axis=1)  # [b, k], by all queries
        offset = np.where(unseen, 0, np.arange(1, k + 1)).max(axis=1, initial=0) - q
    offsets = np.broadcast_to(0 if offset is None else offset, (b,))
    placed: Array = np.arange(q) + offsets[:, None]
    return placed


def blocked_by_position(placed: Array, causal: bool, window: Mapping[str, int | None], shape: tuple[int, ...]) -> Array:
    """What lies ahead of the query (causal) or outside placed - left <= j <= placed + right, as [b, 1, q, k]."""
    ahead = np.arange(shape[-1]) - placed[:, None, :, None]
    left, right = window.get("left"), window.get("right")
    blocked = np.zeros(ahead.shape, bool)
    if causal:
        blocked |= ahead > 0
    if left is not None:
        blocked |= ahead < -left
    if right is not None:
        blocked |= ahead > right
    return blocked


def kept(dropout: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """1/(1-p) for a weight that is kept and 0 for one that is not (inverted dropout, Srivastava et al. 2014): [b, h, q, k]."""
    drawn = np.random.RandomState(dropout["seed"]).random_sample(shape)
    multiplier: Array = (drawn >= dropout["p"]) / (1 - dropout["p"])
    return multiplier
