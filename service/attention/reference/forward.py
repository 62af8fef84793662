"""Multi-head attention in NumPy float64: the reference that the layer of the service is compared with.

It shares no code with that layer and prefers clarity to speed: arrays of shape [batch, heads, queries, keys] are formed at once. The steps
are project, norm, RoPE, scales of queries by position, terms of the distance, scale, softcap, add biases, block, softmax, dropout, gate, in
this order. Layers with differential attention have two softmaxes, and a norm before the gate; other layers may have another normaliser
than softmax.

Vaswani et al. 2017, "Attention Is All You Need", section 3.2:
    Attention(Q, K, V) = softmax(Q Kᵀ / √d) V
    MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O   where head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from service.attention.reference.masks import (
    blocked_by_chunks,
    blocked_by_keys,
    blocked_by_masks,
    blocked_by_position,
    blocked_by_segments,
    query_positions,
    spread,
)
from service.attention.reference.positions import (
    grid_bias,
    position_bias,
    query_factors,
    relative_terms,
    rotary_positions,
    rotate,
)
from service.spec import LAMBDAS, LayerSpec
from service.spec_parts import OutputGate, QKNorm
from service.tensors import Array


@dataclass(frozen=True, slots=True)
class Reference:
    """Every output of one call in float64; a call without a batch drops the leading b of each."""

    output: Array  # [b, q, output_dim]; without projections, concatenated
    attention_weights: Array  # [b, h, q, k], after dropout
    scores: Array  # [b, h, q, k], after everything added and blocked, before the softmax; in differential layers before the first
    log_sum_exp: Array  # [b, h, q], of the scores and the sink
    normalised: Array  # [b, n, h, q, k], each softmax or sigmoid, before dropout, 0 in fully masked rows; n = 2 if differential, else 1
    query_projection: Array  # [b, h, q, d], after the norm, RoPE and query_scale
    key_projection: Array  # [b, kv heads, k, d], after the norm and RoPE
    value_projection: Array  # [b, kv heads, k, dv]
    head_outputs: Array  # [b, h, q, dv], after head_scale and the gate
    concatenated: Array  # [b, q, h*dv]
    indexer_mask: Array  # [b, q, k], 1 for the keys that the indexer selects; without an indexer, for those that may be attended to
    latent: Array  # [b, k, key_value_rank], of the key, after the norm; rank 0 without latent attention
    rope_key: Array  # [b, k, rope_key_dim], what the keys of all heads begin with, after RoPE; likewise
    fully_masked: Array  # [b, h, q], true where no key is left

    @property
    def fully_masked_rows(self) -> int:
        return int(self.fully_masked.sum())


@np.errstate(invalid="ignore", over="ignore")  # blocked keys may be NaN or infinite; their scores are replaced by -inf
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
    segments: ArrayLike | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    query_offset: ArrayLike | Literal["end"] | None = None,
    positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    causal: bool = False,
    window: Mapping[str, int | None] | None = None,
    fully_masked: Literal["zero", "uniform", "error"] = "zero",
    head_scale: ArrayLike | None = None,
    dropout: Mapping[str, Any] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Reference:
    """Every output of the layer `spec` with these canonical weights. Arguments are named and shaped as the fields of a request.

    query [b, q, query_dim], key [b, k, key_dim], value [b, k, value_dim]; masks and bias [q, k], [b, q, k] or [b, h, q, k], axes of 1
    broadcast; key masks [b, k]; valid_lens [b] or [b, q]; query_offset an integer, [b] or "end"; positions [b, q] or [b, q, axes] and
    key_positions [b, k] or [b, k, axes], by which RoPE rotates; head_scale [h] or [b, h].
    A query [q, query_dim] has no batch axis, and then no argument has one.

    ValueError: a value without a key; q != k without query_offset where positions matter; fully masked rows with fully_masked="error".
    """
    if value is not None and key is None:
        raise ValueError("expected a key beside the value, got a value alone")
    batched = np.ndim(query) == 3
    key = query if key is None else key
    value = key if value is None else value
    q, k, v = (project_heads(spec, weights, name, as_batch(x, batched)) for name, x in (("query", query), ("key", key), ("value", value)))
    shape = (*q.shape[:3], k.shape[2])  # [b, h, q, k]

    if segments is not None:
        query_segments = key_segments = segments
    blocked_keys = blocked_by_keys(shape, *(as_batch(x, batched) for x in (valid_lens, attend_keys, block_keys, key_segments)))
    indices = query_positions(query_offset, blocked_keys, needed=causal or window is not None or bool(spec.positional))
    ahead = np.arange(shape[-1]) - indices[:, None, :, None]  # [b, 1, q, k], position of key j less that of query i
    turned = rotary_positions(as_batch(positions, batched), as_batch(key_positions, batched), indices, shape[-1])
    if spec.rope:
        q, k = rotate_parts(spec, q, turned["query"]), rotate_parts(spec, k, turned["key"])
    if spec.qk_norm and spec.qk_norm.after_rope:
        q, k = (normalise_heads(x, weights, name, spec.qk_norm) for x, name in ((q, "query"), (k, "key")))
    if spec.query_scale:
        q = q * query_factors(indices, spec.query_scale)

    # Sum of the biases, and the blocked pairs.
    added = spread(0.0 if bias is None else np.asarray(bias, np.float64), shape, batched) + position_bias(spec, weights, ahead)
    if spec.grid_bias:
        added = added + grid_bias(spec, weights, q, indices, shape[-1])
    windows = (spec.window.model_dump() if spec.window else {}, window or {})
    by_position = blocked_by_position(ahead, causal, windows)
    if spec.chunk_size:
        by_position |= blocked_by_chunks(indices, shape[-1], spec.chunk_size)
    in_sequence: Array = ~np.all(blocked_keys[:, :1], axis=2)  # [b, 1 or q, k], real keys of the query's segment
    if query_segments is not None and key_segments is not None:
        other = blocked_by_segments(as_batch(query_segments, batched), as_batch(key_segments, batched))
        by_position, in_sequence = by_position | other, in_sequence & ~other[:, 0]
    blocked = np.isneginf(added) | blocked_by_masks(attend_mask, block_mask, shape, batched) | blocked_keys | by_position
    allowed: Array = ~np.all(blocked, axis=1)  # [b, q, k]
    if spec.indexer:
        allowed &= indexed(spec, weights, as_batch(query, batched), as_batch(key, batched), turned, allowed)
        blocked |= ~allowed[:, None]
    empty = np.all(blocked, axis=-1)  # [b, h, q]
    if fully_masked == "error" and empty.any():
        raise ValueError(f"expected a key for every query, got none at [b, h, q] = {np.argwhere(empty)[0].tolist()}")

    all_scores = []
    for queries, keys in zip(parts_of(spec, q), parts_of(spec, repeat_kv_heads(k, spec.num_heads)), strict=True):
        scores = (spec.scale if scale is None else scale) * raw_scores(spec, weights, queries, keys, ahead)
        if cap := spec.softcap if softcap is None else softcap:
            scores = cap * np.tanh(scores / cap)
        factor, less = growth(spec, blocked, in_sequence)
        all_scores.append(np.where(blocked, -np.inf, factor * (scores + added) - less))
    scores, sinks = all_scores[0], np.asarray(weights["sinks"], np.float64)[:, None] if spec.sinks else None
    normalised, (log_sum_exp, *_) = zip(*(softmax(x, sinks) for x in all_scores), strict=True)
    if spec.normalizer == "sigmoid":
        normalised = (np.exp(-np.logaddexp(0.0, -scores)),)
    filling = np.where(empty, 1 / max(shape[-1], 1) if fully_masked == "uniform" else 0.0, 0.0)[..., None]
    attention_weights = np.sum([factor * (x + filling) for factor, x in zip(factors(spec, weights), normalised, strict=True)], axis=0)
    if dropout is not None:
        attention_weights = attention_weights * dropout_multiplier(dropout, shape)

    heads = average_values(attention_weights, repeat_kv_heads(v, spec.num_heads))
    if spec.differential:
        heads = (1 - spec.differential.lambda_init) * normalise_heads(heads, weights, "head", QKNorm(eps=spec.differential.eps))
    if head_scale is not None:
        heads = heads * np.asarray(head_scale, np.float64)[..., None, None]  # [h, 1, 1] or [b, h, 1, 1]
    if spec.output_gate:
        heads = heads * activate(gate_logits(spec, weights, as_batch(query, batched)), spec.output_gate)
    concatenated = merge_heads(heads)
    outputs: dict[str, Array] = {
        "output": project(concatenated, weights, "output") if spec.projections else concatenated,
        "attention_weights": attention_weights,
        "scores": scores,
        "log_sum_exp": log_sum_exp,
        "normalised": np.stack(normalised, axis=1),
        "query_projection": q,
        "key_projection": k,
        "value_projection": v,
        "head_outputs": heads,
        "concatenated": concatenated,
        "indexer_mask": allowed.astype(np.float64),
        "latent": compress(spec, weights, "key", as_batch(key, batched)) if spec.latent else k[:, 0, :, :0],
        "rope_key": k[:, 0, :, : spec.latent.rope_key_dim if spec.latent else 0],
        "fully_masked": empty,
    }
    return Reference(**{name: x if batched else x[0] for name, x in outputs.items()})


def indexed(
    spec: LayerSpec, weights: Mapping[str, Array], query: Array, key: Array, positions: Mapping[str, Array], allowed: Array
) -> Array:
    """Whether a key is among the top_k allowed ones by index score, bool [b, q, k] (DeepSeek-AI 2025, arXiv 2512.02556, equations 1, 2).

    I_ij = Σ_h w_ih relu(q_ih · k_j). Ties go to the lower key. The models' positive factors on scores change no order. RoPE
    rotates queries and keys by `positions`.
    """
    assert spec.indexer is not None
    k = normalise_heads(project(key, weights, "index_key")[:, None], weights, "index_key", QKNorm(kind="layer", eps=spec.indexer.eps))
    q = split_heads(project(compress(spec, weights, "query", query), weights, "index_query"), spec.indexer.num_heads)
    if spec.rope:
        rope = spec.rope.model_copy(update={"interleaved": spec.indexer.interleaved})
        q, k = rotate(q, positions["query"], rope), rotate(k, positions["key"], rope)
    scores = np.einsum("bqh,bhqk->bqk", project(query, weights, "index_head_weights"), np.maximum(q @ k.swapaxes(-1, -2), 0))
    best = np.argsort(np.where(allowed, -scores, np.inf), axis=-1, kind="stable")[..., : spec.indexer.top_k]
    selected = np.zeros(allowed.shape, bool)
    np.put_along_axis(selected, best, True, axis=-1)
    return selected


def growth(spec: LayerSpec, blocked: Array, in_sequence: Array) -> tuple[Array, Array]:
    """A factor on the scores [b, h, q, k], and what is taken from them: ln n of scalable softmax, of sigmoid, otherwise 1 and 0.

    Scalable softmax (Nakanishi 2025, equation 3): n keys that the row may attend to. Sigmoid (Ramapuram et al. 2024, equation 3): n keys
    `in_sequence`, bool [b, 1 or q, k]. ln 0 counts as 0.
    """
    factor, less = np.ones(1), np.zeros(1)
    if spec.normalizer == "scalable_softmax":
        factor = np.log(np.maximum((~blocked).sum(axis=-1, keepdims=True), 1))
    if spec.normalizer == "sigmoid":
        less = np.log(np.maximum(in_sequence.sum(axis=-1), 1))[:, None, :, None]
    return factor, less


def parts_of(spec: LayerSpec, x: Array) -> list[Array]:
    """The queries or keys of each softmax: two halves of [b, h, n, d] in differential layers, otherwise x alone."""
    return np.split(x, 2, axis=-1) if spec.differential else [x]


def rotate_parts(spec: LayerSpec, x: Array, positions: Array) -> Array:
    """RoPE of each of `parts_of` x [b, h, n, d]."""
    assert spec.rope is not None
    return np.concatenate([rotate(part, positions, spec.rope) for part in parts_of(spec, x)], axis=-1)


def factors(spec: LayerSpec, weights: Mapping[str, Array]) -> list[float]:
    """The factor of each softmax in the weights: 1 and -λ, with λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init (Ye et al., eq. 2)."""
    if not spec.differential:
        return [1.0]
    q1, k1, q2, k2 = (np.asarray(weights[name], np.float64) for name in LAMBDAS)
    return [1.0, -(float(np.exp(q1 @ k1) - np.exp(q2 @ k2)) + spec.differential.lambda_init)]


def raw_scores(spec: LayerSpec, weights: Mapping[str, Array], q: Array, k: Array, ahead: Array) -> Array:
    """Q Kᵀ and the terms of the distance, before the scale: [b, h, q, d], [b, h, k, d], [b, 1, q, k] -> [b, h, q, k]."""
    products: Array = q @ k.swapaxes(-1, -2)
    return products + relative_terms(spec, weights, q, k, ahead) if spec.relative_scores else products


def gate_logits(spec: LayerSpec, weights: Mapping[str, Array], query: ArrayLike) -> Array:
    """X W_θ of Qiu et al. 2025 (arXiv 2505.06708), equation 5: [b, q, d_model] -> [b, h, q, dv], or [b, h, q, 1] for a headwise gate."""
    return split_heads(project(query, weights, "gate"), spec.num_heads)


def activate(logits: Array, gate: OutputGate) -> Array:
    """1 / (1 + exp(-x)), or softplus ln(1 + exp(x)), neither of which overflows here."""
    if gate.activation == "softplus":
        return np.logaddexp(0.0, logits)
    return np.exp(-np.logaddexp(0.0, -logits))


def as_batch(x: ArrayLike | None, batched: bool) -> Any:
    """An argument with a batch axis, added if the call has none."""
    return x if x is None else np.asarray(x) if batched else np.asarray(x)[None]


def project_heads(spec: LayerSpec, weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """A query, key or value as heads, [b, n, in] -> [b, heads, n, d]: projected and normalised if the layer does that."""
    heads = spec.num_heads if name == "query" else spec.num_kv_heads
    width = spec.value_head_dim if name == "value" else spec.head_dim
    if spec.latent:
        split = latent_heads(spec, weights, name, x)
    else:
        projected = project(x, weights, name) if spec.projections else x.astype(np.float64)
        if projected.shape[-1] != heads * width:
            raise ValueError(f"expected a {name} of {heads} heads of {width} numbers, got {projected.shape[-1]} numbers")
        split = split_heads(projected, heads)
    return normalise_heads(split, weights, name, spec.qk_norm) if spec.qk_norm and normalises(spec.qk_norm, name) else split


def latent_heads(spec: LayerSpec, weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Multi-head latent attention, DeepSeek-AI 2024 (arXiv 2405.04434), equations 9 to 17: [b, n, in] -> [b, heads, n, d], before RoPE.

    c = norm(W^D x); a query or value is W^U c. A key is [k^R; k^C] with k^C = W^UK c and k^R = W^KR x, which is the same for all heads.
    """
    assert spec.latent is not None
    heads = spec.num_heads if name == "query" else spec.num_kv_heads
    up = split_heads(project(compress(spec, weights, name, x), weights, name), heads)
    if name != "key":
        return up
    shared = project(x, weights, "rope_key")[:, None]
    return np.concatenate([np.broadcast_to(shared, (*up.shape[:3], spec.latent.rope_key_dim)), up], axis=-1)


def compress(spec: LayerSpec, weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """The latent vectors of a query, key or value: [b, n, in] -> [b, n, rank]; x itself if there are none."""
    if spec.latent is None or (name == "query" and spec.latent.query_rank is None):
        return x
    down = "query_down" if name == "query" else "key_value_down"
    return normalise_heads(project(x, weights, down), weights, down, QKNorm(eps=spec.latent.eps))


def normalises(norm: QKNorm, name: str) -> bool:
    """Whether the norm applies to the projected query, key or value as it is, before RoPE."""
    return norm.values if name == "value" else not norm.after_rope


def project(x: ArrayLike, weights: Mapping[str, Array], name: str) -> Array:
    """x Wᵀ + b, with W [out, in] as in `torch.nn.Linear`: [b, n, in] -> [b, n, out]; b is 0 without `name.bias`."""
    projected = np.asarray(x, np.float64) @ np.asarray(weights[f"{name}.weight"], np.float64).T
    return projected + np.asarray(weights.get(f"{name}.bias", 0.0), np.float64)


def split_heads(x: Array, heads: int) -> Array:
    """[b, n, h*d] -> [b, h, n, d]: head i is columns i*d to (i+1)*d of every row."""
    b, n, width = x.shape
    return x.reshape(b, n, heads, width // heads).transpose(0, 2, 1, 3)


def repeat_kv_heads(x: Array, heads: int) -> Array:
    """Grouped-query attention (Ainslie et al. 2023): [b, kv heads, n, d] -> [b, h, n, d], each kv head h / kv heads times in a row."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def merge_heads(x: Array) -> Array:
    """[b, h, n, d] -> [b, n, h*d], the inverse of `split_heads`."""
    b, h, n, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, n, h * d)


def normalise_heads(x: Array, weights: Mapping[str, Array], name: str, norm: QKNorm) -> Array:
    """`normalise` for x [b, heads, n, d] with the weight and bias of `name`_norm, 1 and 0 if the layer has none."""
    return normalise(x, norm_weight(weights, f"{name}_norm.weight", 1.0), norm, norm_weight(weights, f"{name}_norm.bias", 0.0))


def normalise(x: Array, weight: ArrayLike, norm: QKNorm, bias: ArrayLike = 0.0) -> Array:
    """x / √(mean x² + eps) · w + b (RMS norm, Zhang and Sennrich 2019); the layer norm subtracts the mean of x first.

    The mean is over the last axis, or over all heads of a row: axes 1 and 3 of [b, heads, n, d].
    """
    axes = (-1,) if norm.over == "head" else (1, 3)
    if norm.kind == "layer":
        x = x - x.mean(axis=axes, keepdims=True)
    normed: Array = x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + norm.eps) * np.asarray(weight, np.float64) + np.asarray(bias)
    return normed


def norm_weight(weights: Mapping[str, Array], name: str, otherwise: float) -> Array:
    """A norm's weight or bias, [d] or [heads, d], to be broadcast to [b, heads, n, d]; `otherwise` if the layer has none."""
    return np.asarray(weights[name], np.float64)[..., None, :] if name in weights else np.array(otherwise)


def softmax(scores: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """exp(s_j - m) / Σ exp(s_j - m) over the last axis with m = max s, and log Σ exp(s_j): [..., k] -> [..., k], [...].

    Subtracting m avoids overflow of exp. A sink, broadcast to the rows, is one more score whose weight is dropped. A row of -inf has
    weights 0 and logarithm -inf, with or without a sink.
    """
    empty = np.isneginf(scores).all(axis=-1, keepdims=True)
    sink = -np.inf if sinks is None else sinks[..., None]
    highest = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    highest = np.where(empty, 0.0, highest)
    exponentials = np.exp(scores - highest)
    total = exponentials.sum(axis=-1, keepdims=True) + np.where(empty, 0.0, np.exp(sink - highest))
    with np.errstate(divide="ignore"):
        log_sum_exp = (highest + np.log(total))[..., 0]
    return exponentials / np.where(total == 0, 1.0, total), log_sum_exp


def average_values(weights: Array, values: Array) -> Array:
    """Σ_j w_ij v_j: [b, h, q, k], [b, h, k, d] -> [b, h, q, d]. Terms with weight 0 are 0, even where v is NaN or infinite."""
    if np.isfinite(values).all():
        return weights @ values
    seen = np.where(weights[..., None] == 0, 0.0, values[:, :, None])  # [b, h, q, k, d]
    result: Array = (weights[..., None] * seen).sum(axis=3)
    return result


def dropout_multiplier(dropout: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """1/(1-p) for kept weights and 0 for dropped ones (inverted dropout, Srivastava et al. 2014): [b, h, q, k]."""
    drawn = np.random.RandomState(dropout["seed"]).random_sample(shape)
    multiplier: Array = (drawn >= dropout["p"]) / (1 - dropout["p"])
    return multiplier
