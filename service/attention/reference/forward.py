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
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from service.attention.reference.positions import grid_bias, position_bias, query_factors, relative_terms, rotate
from service.attention.reference.request import Request
from service.spec import LAMBDAS, LayerSpec
from service.spec_parts import OutputGate, QKNorm
from service.tensors import Array


@dataclass(frozen=True, slots=True)
class Outputs:
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


@dataclass(frozen=True, slots=True)
class Positions:
    """Where the queries and keys of a call are."""

    indices: Array  # [b, q], the key position of each query
    ahead: Array  # [b, 1, q, k], the position of key j less that of query i
    rotary: Mapping[str, Array]  # of "query" and "key" for RoPE: [b, n] or [b, n, axes]; b may be 1


def attend(spec: LayerSpec, weights: Mapping[str, Array], **arguments: Any) -> Outputs:
    """Every output of the layer `spec` with these canonical weights. The arguments are the fields of `Request`.

    ValueError: a value without a key; q != k without query_offset where positions matter; fully masked rows with fully_masked="error".
    """
    request = Request(**arguments)
    outputs = Layer(spec, weights).attend(request)
    return outputs if request.batched else Outputs(**{field.name: getattr(outputs, field.name)[0] for field in fields(Outputs)})


class Layer:
    """A layer; each method is a step of its computation. `compare/changes.py` replaces steps in subclasses to make mistakes."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Array]) -> None:
        self.spec = spec
        self.weights = {name: np.asarray(x, np.float64) for name, x in weights.items()}  # by canonical name

    @np.errstate(invalid="ignore", over="ignore")  # blocked keys may be NaN or infinite; their scores are replaced by -inf
    def attend(self, request: Request) -> Outputs:
        """Every output, with a batch axis."""
        spec = self.spec
        q, k, v = (self.project_heads(name, getattr(request, name)) for name in ("query", "key", "value"))
        shape = (*q.shape[:3], k.shape[2])  # [b, h, q, k]
        positions = self.positions(request, shape)
        q, k = self.at_positions(q, k, positions)

        biases = self.biases(request, q, positions)
        blocked = np.broadcast_to(self.blocked(request, biases, positions), shape)
        fully_masked = np.all(blocked, axis=-1)  # [b, h, q]
        if request.fully_masked == "error" and fully_masked.any():
            raise ValueError(f"expected a key for every query, got none at [b, h, q] = {np.argwhere(fully_masked)[0].tolist()}")

        all_scores = []
        for queries, keys in zip(self.softmax_parts(q), self.softmax_parts(self.repeat_kv_heads(k)), strict=True):
            scores = self.scale(request) * self.raw_scores(queries, keys, positions.ahead)
            if cap := self.softcap(request):
                scores = cap * np.tanh(scores / cap)
            all_scores.append(
                np.where(blocked, -np.inf, self.log_num_keys(blocked) * (scores + biases) - self.log_sequence_length(request))
            )
        results = [self.normalise_scores(scores) for scores in all_scores]
        normalised, log_sum_exp = [weights for weights, _ in results], results[0][1]
        fill = np.where(fully_masked, 1 / max(shape[3], 1) if request.fully_masked == "uniform" else 0.0, 0.0)[..., None]
        attention_weights = np.sum([factor * (x + fill) for factor, x in zip(self.softmax_factors(), normalised, strict=True)], axis=0)
        if request.dropout is not None:
            attention_weights = attention_weights * dropout_multiplier(request.dropout, shape)

        heads = average_values(attention_weights, self.repeat_kv_heads(v))
        if spec.differential:
            heads = (1 - spec.differential.lambda_init) * self.norm(heads, "head", QKNorm(eps=spec.differential.eps))
        if request.head_scale is not None:
            heads = heads * np.asarray(request.head_scale, np.float64)[..., None, None]  # [h, 1, 1] or [b, h, 1, 1]
        if spec.output_gate:
            heads = heads * activate(self.gate_logits(request.query), spec.output_gate)
        concatenated = self.merge_heads(heads)
        return Outputs(
            output=self.project(concatenated, "output") if spec.projections else concatenated,
            attention_weights=attention_weights,
            scores=all_scores[0],
            log_sum_exp=log_sum_exp,
            normalised=np.stack(normalised, axis=1),
            query_projection=q,
            key_projection=k,
            value_projection=v,
            head_outputs=heads,
            concatenated=concatenated,
            indexer_mask=1.0 - np.all(blocked, axis=1),
            latent=self.compress("key", request.key) if spec.latent else k[:, 0, :, :0],
            rope_key=k[:, 0, :, : spec.latent.rope_key_dim if spec.latent else 0],
            fully_masked=fully_masked,
        )

    # From inputs to heads and back: x [b, n, in], heads [b, heads, n, d]

    def project_heads(self, name: str, x: Array) -> Array:
        """A query, key or value as heads, before RoPE: projected and normalised if the layer does that."""
        spec, heads = self.spec, self.spec.num_heads if name == "query" else self.spec.num_kv_heads
        width = spec.value_head_dim if name == "value" else spec.head_dim
        if spec.latent:
            split = self.latent_heads(name, x, heads)
        else:
            projected = self.project(x, name) if spec.projections else x.astype(np.float64)
            if projected.shape[-1] != heads * width:
                raise ValueError(f"expected a {name} of {heads} heads of {width} numbers, got {projected.shape[-1]} numbers")
            split = self.split_heads(projected, heads)
        norm = spec.qk_norm
        return self.norm(split, name, norm) if norm and (norm.values if name == "value" else not norm.after_rope) else split

    def latent_heads(self, name: str, x: Array, heads: int) -> Array:
        """Multi-head latent attention, DeepSeek-AI 2024 (arXiv 2405.04434), equations 9 to 17.

        c = norm(W^D x); a query or value is W^U c. A key is [k^R; k^C] with k^C = W^UK c and k^R = W^KR x, which is the same for all heads.
        """
        up = self.split_heads(self.project(self.compress(name, x), name), heads)
        return np.concatenate([self.share(self.project(x, "rope_key"), heads), up], axis=-1) if name == "key" else up

    def compress(self, name: str, x: Array) -> Array:
        """The latent vectors of a query, key or value: [b, n, in] -> [b, n, rank]; x itself if there are none."""
        if self.spec.latent is None or (name == "query" and self.spec.latent.query_rank is None):
            return x
        down = "query_down" if name == "query" else "key_value_down"
        return self.norm(self.project(x, down), down, QKNorm(eps=self.spec.latent.eps))

    def share(self, x: Array, heads: int) -> Array:
        """The part of latent keys that all heads share, for each of them: [b, n, r] -> [b, heads, n, r]."""
        return np.repeat(x[:, None], heads, axis=1)

    def project(self, x: ArrayLike, name: str) -> Array:
        """x Wᵀ + b, with W [out, in] as in `torch.nn.Linear`: [b, n, in] -> [b, n, out]; b is 0 without `name.bias`."""
        projected: Array = np.asarray(x, np.float64) @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)
        return projected

    @staticmethod
    def split_heads(x: Array, heads: int) -> Array:
        """[b, n, h*d] -> [b, h, n, d]: head i is columns i*d to (i+1)*d of every row."""
        b, n, width = x.shape
        return x.reshape(b, n, heads, width // heads).transpose(0, 2, 1, 3)

    @staticmethod
    def merge_heads(x: Array) -> Array:
        """[b, h, n, d] -> [b, n, h*d], the inverse of `split_heads`."""
        b, h, n, d = x.shape
        return x.transpose(0, 2, 1, 3).reshape(b, n, h * d)

    def repeat_kv_heads(self, x: Array) -> Array:
        """Grouped-query attention (Ainslie et al. 2023): [b, kv heads, n, d] -> [b, h, n, d], each kv head h / kv heads times in a row."""
        return np.repeat(x, self.spec.num_heads // x.shape[1], axis=1)

    def norm(self, x: Array, name: str, norm: QKNorm) -> Array:
        """`normalise` with the weight and bias of `name`_norm, [d] or [heads, d]; 1 and 0 if the layer has none."""
        return normalise(x, norm, self.norm_weight(f"{name}_norm.weight", 1.0), self.norm_weight(f"{name}_norm.bias", 0.0))

    def norm_weight(self, name: str, otherwise: float) -> ArrayLike:
        return self.weights[name][..., None, :] if name in self.weights else otherwise

    def gate_logits(self, query: Array) -> Array:
        """X W_θ, Qiu et al. 2025 (arXiv 2505.06708), equation 5: [b, q, d_model] -> [b, h, q, dv], or [b, h, q, 1] for a headwise gate."""
        return self.split_heads(self.project(query, "gate"), self.spec.num_heads)

    # Positions

    def positions(self, request: Request, shape: tuple[int, ...]) -> Positions:
        """Positions for scores of this shape. RoPE uses those of the request, where keys default to the queries', or else the indices."""
        needed = request.causal or request.window is not None or bool(self.spec.positional)
        indices, keys = request.query_indices(shape, needed), np.arange(shape[3])
        rotary = {"query": indices, "key": keys[None]}
        if request.positions is not None:
            rotary = {"query": request.positions, "key": request.positions if request.key_positions is None else request.key_positions}
        return Positions(indices, keys - indices[:, None, :, None], rotary)

    def at_positions(self, q: Array, k: Array, positions: Positions) -> tuple[Array, Array]:
        """Queries and keys after RoPE, a norm that comes after it, and the scale of queries by position."""
        spec = self.spec
        if spec.rope:
            q, k = (self.rotate(x, name, positions.rotary[name]) for x, name in ((q, "query"), (k, "key")))
        if spec.qk_norm and spec.qk_norm.after_rope:
            q, k = self.norm(q, "query", spec.qk_norm), self.norm(k, "key", spec.qk_norm)
        return q * query_factors(positions.indices, spec.query_scale) if spec.query_scale else q, k

    def rotate(self, x: Array, name: str, positions: Array) -> Array:
        """RoPE of queries or keys, in differential layers of each half."""
        assert self.spec.rope is not None
        return np.concatenate([rotate(part, positions, self.spec.rope) for part in self.softmax_parts(x)], axis=-1)

    def biases(self, request: Request, q: Array, positions: Positions) -> Array:
        """The sum of all biases, which are neither scaled nor capped, to be broadcast to [b, h, q, k]."""
        biases = self.position_bias(positions.ahead)
        if request.bias is not None:
            biases = biases + request.per_pair(np.asarray(request.bias, np.float64))
        if self.spec.grid_bias:
            biases = biases + grid_bias(self.spec.grid_bias, self.weights, q, positions.indices, positions.ahead.shape[3])
        return biases

    def position_bias(self, ahead: Array) -> Array:
        return position_bias(self.spec, self.weights, ahead)

    def blocked(self, request: Request, biases: Array, positions: Positions) -> Array:
        """The pairs that masks, lengths, segments, positions and the indexer block, and those with a bias of -inf.

        To be broadcast to [b, h, q, k].
        """
        spec, ahead = self.spec, positions.ahead
        blocked: Array = np.isneginf(biases) | request.blocked_by_masks() | (request.blocked_keys() | request.other_segments())[:, None]
        if request.causal:
            blocked = blocked | (ahead > 0)
        for window in (request.window or {}, spec.window.model_dump() if spec.window else {}):
            left, right = window.get("left"), window.get("right")
            if left is not None:
                blocked = blocked | (ahead < -left)
            if right is not None:
                blocked = blocked | (ahead > right)
        if spec.chunk_size:  # Llama 4
            blocked = blocked | (positions.indices[:, None, :, None] // spec.chunk_size != np.arange(ahead.shape[3]) // spec.chunk_size)
        if spec.indexer:
            blocked = blocked | ~self.indexed(request, positions, ~np.all(blocked, axis=1))[:, None]
        return blocked

    def indexed(self, request: Request, positions: Positions, allowed: Array) -> Array:
        """Whether a key is among the top_k allowed ones by index score: bool [b, q, k].

        I_ij = Σ_h w_ih relu(q_ih · k_j): DeepSeek-AI 2025, arXiv 2512.02556, equations 1 and 2. Ties go to the lower key. The models'
        positive factors on scores change no order.
        """
        indexer, rope = self.spec.indexer, self.spec.rope
        assert indexer is not None
        k = self.norm(self.project(request.key, "index_key")[:, None], "index_key", QKNorm(kind="layer", eps=indexer.eps))
        q = self.split_heads(self.project(self.compress("query", request.query), "index_query"), indexer.num_heads)
        if rope:
            rope = rope.model_copy(update={"interleaved": indexer.interleaved})
            q, k = rotate(q, positions.rotary["query"], rope), rotate(k, positions.rotary["key"], rope)
        head_weights = self.project(request.query, "index_head_weights")
        scores = np.einsum("bqh,bhqk->bqk", head_weights, np.maximum(q @ k.swapaxes(-1, -2), 0))
        best = np.argsort(np.where(allowed, -scores, np.inf), axis=-1, kind="stable")[..., : indexer.top_k]
        selected = np.zeros(scores.shape, bool)
        np.put_along_axis(selected, best, True, axis=-1)
        return selected

    # Scores and weights: [b, h, q, k]

    def scale(self, request: Request) -> float:
        return self.spec.scale if request.scale is None else request.scale

    def softcap(self, request: Request) -> float | None:
        return self.spec.softcap if request.softcap is None else request.softcap

    def softmax_parts(self, x: Array) -> list[Array]:
        """The queries or keys of each softmax: two halves of [b, h, n, d] in differential layers, otherwise x alone."""
        return np.split(x, 2, axis=-1) if self.spec.differential else [x]

    def raw_scores(self, q: Array, k: Array, ahead: Array) -> Array:
        """Q Kᵀ and the terms of the distance, before the scale."""
        products: Array = q @ k.swapaxes(-1, -2)
        return products + relative_terms(self.spec, self.weights, q, k, ahead) if self.spec.relative_scores else products

    def log_num_keys(self, blocked: Array) -> Array:
        """ln n for the n keys that a row may attend to: the factor on scores of scalable softmax (Nakanishi 2025, eq. 3), otherwise 1."""
        if self.spec.normalizer != "scalable_softmax":
            return np.ones(1)
        n: Array = (~blocked).sum(axis=-1, keepdims=True)
        return np.log(np.maximum(n, 1))

    def log_sequence_length(self, request: Request) -> Array:
        """ln n for the n real keys of the query's segment: what sigmoid attention subtracts (Ramapuram et al. 2024, eq. 3), otherwise 0."""
        if self.spec.normalizer != "sigmoid":
            return np.zeros(1)
        n: Array = (request.real_keys()[:, None] & ~request.other_segments()).sum(axis=-1)  # [b, 1 or q]
        return np.log(np.maximum(n, 1))[:, None, :, None]

    def normalise_scores(self, scores: Array) -> tuple[Array, Array]:
        """Weights, by softmax or sigmoid, and log Σ exp of the scores and the sink."""
        weights, log_sum_exp = self.softmax(scores, self.weights["sinks"][:, None] if self.spec.sinks else None)
        return sigmoid(scores) if self.spec.normalizer == "sigmoid" else weights, log_sum_exp

    def softmax(self, scores: Array, sinks: Array | None) -> tuple[Array, Array]:
        return softmax(scores, sinks)

    def softmax_factors(self) -> list[float]:
        """The factor of each softmax in the weights: 1 and -λ, with λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init (Ye et al., eq. 2)."""
        if not self.spec.differential:
            return [1.0]
        q1, k1, q2, k2 = (self.weights[name] for name in LAMBDAS)
        return [1.0, -(float(np.exp(q1 @ k1) - np.exp(q2 @ k2)) + self.spec.differential.lambda_init)]


def softmax(scores: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """exp(s_j - m) / Σ exp(s_j - m) over the last axis with m = max s, and log Σ exp(s_j): [..., k] -> [..., k], [...].

    Subtracting m avoids overflow of exp. A sink, broadcast to the rows, is one more score whose weight is dropped. A row of -inf has
    weights 0 and logarithm -inf, with or without a sink.
    """
    empty = np.isneginf(scores).all(axis=-1, keepdims=True)
    sink = -np.inf if sinks is None else sinks[..., None]
    highest = np.where(empty, 0.0, np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink))
    exponentials = np.exp(scores - highest)
    total = exponentials.sum(axis=-1, keepdims=True) + np.where(empty, 0.0, np.exp(sink - highest))
    with np.errstate(divide="ignore"):
        log_sum_exp = (highest + np.log(total))[..., 0]
    return exponentials / np.where(total == 0, 1.0, total), log_sum_exp


def normalise(x: Array, norm: QKNorm, weight: ArrayLike = 1.0, bias: ArrayLike = 0.0) -> Array:
    """x / √(mean x² + eps) · w + b (RMS norm, Zhang and Sennrich 2019); the layer norm subtracts the mean of x first.

    The mean is over the last axis, or over all heads of a row: axes 1 and 3 of [b, heads, n, d].
    """
    axes = (-1,) if norm.over == "head" else (1, 3)
    if norm.kind == "layer":
        x = x - x.mean(axis=axes, keepdims=True)
    normed: Array = x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + norm.eps) * weight + bias
    return normed


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def activate(logits: Array, gate: OutputGate) -> Array:
    """The sigmoid, or softplus ln(1 + exp(x))."""
    return np.logaddexp(0.0, logits) if gate.activation == "softplus" else sigmoid(logits)


def average_values(weights: Array, values: Array) -> Array:
    """Σ_j w_ij v_j: [b, h, q, k], [b, h, k, d] -> [b, h, q, d]. Terms with weight 0 are 0, even where v is NaN or infinite."""
    if np.isfinite(values).all():
        return weights @ values
    nonzero = np.where(weights[..., None] == 0, 0.0, values[:, :, None])  # [b, h, q, k, d]
    result: Array = (weights[..., None] * nonzero).sum(axis=3)
    return result


def dropout_multiplier(dropout: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """1/(1-p) for kept weights and 0 for dropped ones (inverted dropout, Srivastava et al. 2014): [b, h, q, k]."""
    drawn = np.random.RandomState(dropout["seed"]).random_sample(shape)
    multiplier: Array = (drawn >= dropout["p"]) / (1 - dropout["p"])
    return multiplier
