"""Multi-head attention in NumPy float64: the reference that the layer of the service is compared with.

It shares no code with that layer and prefers clarity to speed: arrays of shape [batch, heads, queries, keys] are formed at once. The steps
are project, norm, RoPE, scales of queries by position, terms of the distance, scale, softcap, add biases, block, softmax, dropout, gate, in
this order. What an operator does at these steps is in its file in `operators/`.

Vaswani et al. 2017, "Attention Is All You Need", section 3.2:
    Attention(Q, K, V) = softmax(Q Kᵀ / √d) V
    MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O   where head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attend.attention.operators.qk_norm import QKNorm
from attend.attention.reference.operators import Step, steps
from attend.attention.reference.request import Request
from attend.spec import LayerSpec
from attend.tensors import Array


@dataclass(frozen=True, slots=True)
class Outputs:
    """Every output of one call in float64; a call without a batch drops the leading b of each."""

    output: Array  # [b, q, output_dim]; without projections, concatenated
    attention_weights: Array  # [b, h, q, k], after dropout
    scores: Array  # [b, h, q, k], after everything added and blocked, before the softmax; with several before the first
    log_sum_exp: Array  # [b, h, q], of the scores and the sink
    normalised: Array  # [b, n, h, q, k], each softmax or sigmoid, before dropout, 0 in fully masked rows; n softmaxes
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
    coordinates: Mapping[str, Array]  # of "query" and "key", by which RoPE rotates: [b, n] or [b, n, axes]; b may be 1


def attend(spec: LayerSpec, weights: Mapping[str, Array], **arguments: Any) -> Outputs:
    """Every output of the layer `spec` with these canonical weights. The arguments are the fields of `Request`.

    ValueError: a value without a key; q != k without query_offset where positions matter; fully masked rows with fully_masked="error".
    """
    request = Request(**arguments)
    outputs = Layer(spec, weights).attend(request)
    return outputs if request.batched else Outputs(**{field.name: getattr(outputs, field.name)[0] for field in fields(Outputs)})


class Layer:
    """A layer; each method is a step of its computation. `check/changes.py` replaces steps in subclasses to make mistakes."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Array]) -> None:
        self.spec = spec
        self.weights = {name: np.asarray(x, np.float64) for name, x in weights.items()}  # by canonical name

    def steps(self, stage: str) -> Sequence[Step]:
        """The steps of this stage that the layer's operators have (`operators/`)."""
        return steps(self.spec, stage)

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
        for step in self.steps("bias_of_visible"):
            biases = biases + step(self, request, positions, blocked)
        if request.fully_masked == "error" and fully_masked.any():
            raise ValueError(f"expected a key for every query, got none at [b, h, q] = {np.argwhere(fully_masked)[0].tolist()}")

        all_scores = []
        for queries, keys in zip(self.split(q), self.split(self.repeat_kv_heads(k)), strict=True):
            scores = self.mixed_scores(request, queries, keys, positions.ahead) + biases
            for step in self.steps("normalise_input"):
                scores = step(self, request, scores, blocked)
            all_scores.append(np.where(blocked, -np.inf, scores))
        results = [self.normalise_scores(scores) for scores in all_scores]
        normalised, log_sum_exp = [weights for weights, _ in results], results[0][1]
        fill = np.where(fully_masked, 1 / max(shape[3], 1) if request.fully_masked == "uniform" else 0.0, 0.0)[..., None]
        mixed = [self.mixed_weights(weights, blocked) + fill for weights in normalised]
        attention_weights = np.sum([factor * x for factor, x in zip(self.factors(), mixed, strict=True)], axis=0)
        attention_weights = request.replaced(attention_weights, request.pattern, request.pattern_rows)
        if request.dropout is not None:
            attention_weights = attention_weights * dropout_multiplier(request.dropout, shape)

        heads = self.apply_weights(attention_weights, self.repeat_kv_heads(v))
        for step in self.steps("value"):
            heads = step(self, heads)
        if request.head_scale is not None:
            heads = heads * np.asarray(request.head_scale, np.float64)[..., None, None]  # [h, 1, 1] or [b, h, 1, 1]
        for step in self.steps("gate"):
            heads = heads * step(self, request.query)
        heads = request.replaced(heads, request.head_outputs, request.head_output_rows)
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
        if replaced := self.steps("project"):
            split = replaced[0](self, name, x, heads)
        else:
            projected = self.project(x, name) if spec.projections else x.astype(np.float64)
            if projected.shape[-1] != heads * width:
                raise ValueError(f"expected a {name} of {heads} heads of {width} numbers, got {projected.shape[-1]} numbers")
            split = self.split_heads(projected, heads)
        for step in self.steps("norm"):
            split = step(self, split, name)
        return np.asarray(split)

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

    # Positions

    def positions(self, request: Request, shape: tuple[int, ...]) -> Positions:
        """Positions for scores of this shape. RoPE uses those of the request, where keys default to the queries', or else the indices."""
        needed = request.causal or request.window is not None or bool(self.spec.positional)
        indices, keys = request.query_indices(shape, needed), np.arange(shape[3])
        coordinates = {"query": indices, "key": keys[None]}
        if request.positions is not None:
            coordinates = {"query": request.positions, "key": request.positions if request.key_positions is None else request.key_positions}
        return Positions(indices, keys - indices[:, None, :, None], coordinates)

    def at_positions(self, q: Array, k: Array, positions: Positions) -> tuple[Array, Array]:
        """Queries and keys after RoPE, a norm that comes after it, and the scale of queries by position."""
        if self.spec.rope:
            q, k = (self.rotate(x, name, positions.coordinates[name]) for x, name in ((q, "query"), (k, "key")))
        for step in self.steps("rescale"):
            q, k = step(self, q, k, positions)
        return q, k

    def rotate(self, x: Array, name: str, positions: Array) -> Array:
        """Queries or keys at their positions."""
        for step in self.steps("rotate"):
            x = step(self, x, name, positions)
        return x

    def biases(self, request: Request, q: Array, positions: Positions) -> Array:
        """The sum of all biases, which are neither scaled nor capped, to be broadcast to [b, h, q, k]."""
        biases = self.position_bias(request, q, positions)
        return biases if request.bias is None else biases + request.per_pair(np.asarray(request.bias, np.float64))

    def position_bias(self, request: Request, q: Array, positions: Positions) -> Array:
        """The sum of the biases of the layer, to be broadcast to [b, h, q, k]."""
        bias: Array = np.zeros((1, self.spec.num_heads, 1, 1))
        for step in self.steps("bias"):
            bias = bias + step(self, request, q, positions)
        return bias

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
        for step in self.steps("blocked"):
            blocked = blocked | step(self, positions)
        return blocked if not self.steps("select") else blocked | ~self.selected(request, positions, ~np.all(blocked, axis=1))[:, None]

    def selected(self, request: Request, positions: Positions, allowed: Array) -> Array:
        """The keys that an operator selects of those that are allowed: bool [b, q, k]."""
        for step in self.steps("select"):
            allowed = step(self, request, positions, allowed)
        return allowed

    # Scores and weights: [b, h, q, k]

    def scale(self, request: Request) -> float:
        return self.spec.scale if request.scale is None else request.scale

    def softcap(self, request: Request) -> float | None:
        return self.spec.softcap if request.softcap is None else request.softcap

    def split(self, x: Array) -> list[Array]:
        """The queries or keys of each softmax, from [b, h, n, d]: x alone, unless the layer has several."""
        return np.split(x, self.spec.num_softmaxes, axis=-1)

    def raw_scores(self, q: Array, k: Array, ahead: Array) -> Array:
        """Q Kᵀ and the terms of the distance, before the scale."""
        scores: Array = q @ k.swapaxes(-1, -2)
        for step in self.steps("terms"):
            scores = scores + step(self, q, k, ahead)
        return scores

    def capped_scores(self, request: Request, q: Array, k: Array, ahead: Array) -> Array:
        """Scores after scale and softcap."""
        scores, cap = self.scale(request) * self.raw_scores(q, k, ahead), self.softcap(request)
        return cap * np.tanh(scores / cap) if cap else scores

    def mixed_scores(self, request: Request, q: Array, k: Array, ahead: Array) -> Array:
        """Scores before biases."""
        scores = self.capped_scores(request, q, k, ahead)
        for step in self.steps("score"):
            scores = step(self, scores)
        return scores

    def normalise_scores(self, scores: Array) -> tuple[Array, Array]:
        """Weights, by softmax or what replaces it, and log Σ exp of the scores and the sink."""
        sinks, replaced = self.steps("sinks"), self.steps("normalise")
        weights, log_sum_exp = self.softmax(scores, sinks[0](self) if sinks else None)
        return replaced[0](self, scores) if replaced else weights, log_sum_exp

    def mixed_weights(self, weights: Array, blocked: Array) -> Array:
        """Weights before fully masked rows are filled."""
        for step in self.steps("mix_weights"):
            weights = step(self, weights, blocked)
        return weights

    def softmax(self, scores: Array, sinks: Array | None) -> tuple[Array, Array]:
        return softmax(scores, sinks)

    def apply_weights(self, weights: Array, values: Array) -> Array:
        return average_values(weights, values)

    def factors(self) -> list[float]:
        """The factor of each softmax in the weights."""
        factors = self.steps("factors")
        return factors[0](self) if factors else [1.0]


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
    result: Array = x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + norm.eps) * weight + bias
    return result


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
