"""Draws random layers and requests for comparison with an oracle, over all features of specs and requests.

A case depends only on its generator, so its seed reproduces a failure. Sizes of axes differ wherever they may, and are mostly primes, so
that swapped axes cannot go unnoticed. `matmul_precision` is never drawn, since it would only change the tolerance.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from service.spec import LAMBDAS, Init, LayerSpec
from service.spec_parts import PROJECTIONS
from service.tensors import BY_TORCH, Array

REQUEST_FEATURES = (
    *("key", "value", "mask", "key_mask", "valid_lens", "segments", "bias", "causal", "window", "query_offset", "fully_masked"),
    *("head_scale", "dropout", "scale", "softcap", "positions"),
)
LAYER_FEATURES = (  # "biases": one for each projection; "projections": none; "weights": explicit ones, even if they could be seeded
    *("num_kv_heads", "head_dim", "value_head_dim", "output_dim", "biases", "projections", "layer_window", "rope", "alibi"),
    *("relative_bias", "qk_norm", "sinks", "weights", "output_gate", "latent", "chunk_size", "query_scale", "differential"),
    *("normalizer", "indexer", "axes", "grid_bias", "relative_scores"),
)
FEATURES = REQUEST_FEATURES + LAYER_FEATURES


@dataclass(frozen=True, slots=True)
class Draw:
    """Draws plain Python values."""

    rng: np.random.Generator

    def flag(self, probability: float = 0.5) -> bool:
        return bool(self.rng.random() < probability)

    def one_of(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high` - 1."""
        return int(self.rng.integers(low, high))

    def number(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The axes of one call."""

    batch: int | None  # None: the call has no batch
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    queries: int
    keys: int

    def lead(self, *rest: int) -> tuple[int, ...]:
        """[b, *rest], or [*rest] without a batch."""
        return rest if self.batch is None else (self.batch, *rest)


@dataclass(frozen=True, slots=True)
class Case:
    """A layer, and the keyword arguments of `reference.attend`: arrays, numbers, and small dictionaries of them."""

    spec: LayerSpec
    request: dict[str, Any]
    weights: dict[str, Array] | None = None  # all weights by canonical name; None: drawn from the spec's seed


def random_case(
    rng: np.random.Generator,
    *,
    features: Collection[str] = FEATURES,
    rate: float = 0.35,
    init: Init | None = None,
    dtype: str | None = None,
    batched: bool | None = None,
) -> Case:
    """A spec, its weights, and a request that fits it.

    Each of `features` is drawn with probability `rate`, and dropped if it does not fit the others; "query_offset" is also drawn whenever it
    is required. Without "key", every call is self-attention. Without LAYER_FEATURES, layers are seeded and plain. `init`, `dtype` (float64
    or float32) and `batched` are drawn if None. Tensors are values of the layer's dtype, so oracles need not round them.

    Raises ValueError for an unknown feature.
    """
    if unknown := set(features) - set(FEATURES):
        raise ValueError(f"expected features among {', '.join(FEATURES)}, got {', '.join(sorted(unknown))}")
    drawn = {name for name in FEATURES if rng.random() < rate and name in features}
    draw = Draw(rng)
    init = init or draw.one_of(*get_args(Init))
    drawn = drop_conflicts(drawn, init)
    sizes = draw_sizes(draw, drawn, batched)
    spec = draw_spec(draw, sizes, drawn, init, dtype or draw.one_of("float64", "float32"))
    widths = {"query": (sizes.queries, spec.query_dim), "key": (sizes.keys, spec.key_dim), "value": (sizes.keys, spec.value_dim)}
    request: dict[str, Any] = {
        name: rng.standard_normal(sizes.lead(*shape)) for name, shape in widths.items() if name == "query" or name in drawn
    }
    request |= draw_options(draw, sizes, drawn, spec)
    request = {name: rounded(x, spec.dtype) if isinstance(x, np.ndarray) else x for name, x in request.items()}
    return Case(spec, request, draw_weights(draw, spec, drawn))


def drop_conflicts(drawn: Collection[str], init: str) -> set[str]:
    """The drawn features without those that conflict with others, so that nothing has to be drawn twice."""
    kept = set(drawn)
    if "key" not in kept:
        kept.discard("value")
    if init == "torch_mha" or (init.startswith("numpy_") and "projections" not in kept):  # only square matrices
        kept -= {"num_kv_heads", "head_dim", "value_head_dim", "output_dim"}
    if init == "torch_mha" or init.startswith("numpy_"):
        kept.discard("biases")
    if "projections" in kept or init == "torch_mha" or init.startswith("numpy_"):
        kept -= {"output_gate", "latent", "relative_scores", "indexer"}
    if kept & {"rope", "query_scale", "differential"}:
        kept.discard("relative_scores")
    if "differential" in kept:
        kept -= {"qk_norm", "latent", "sinks", "dropout", "normalizer"}
    if "rope" not in kept:
        kept -= {"axes", "positions"}
    if "projections" in kept:  # widths follow from heads, and a missing key or value is as wide as the query or key it defaults to
        kept -= {"output_dim", "biases"}
        kept -= set() if "key" in kept else {"num_kv_heads"}
        kept -= set() if "value" in kept else {"value_head_dim"}
    return kept


def draw_sizes(draw: Draw, drawn: Collection[str], batched: bool | None) -> Sizes:
    """Draw sizes that are all different, except those that must be equal. A tenth of the calls has one query, as in a decoding step."""
    grouped, own_values, rotated = ("num_kv_heads" in drawn, "value_head_dim" in drawn, "rope" in drawn)
    while True:
        batch, head_dim, value_head_dim = map(int, draw.rng.choice([2, 3, 5, 7], 3))
        head_dim += rotated and head_dim > 2 and draw.flag()  # an even head_dim can be rotated completely
        head_dim *= 1 + ("differential" in drawn)
        kv_heads = draw.one_of(*((1, 2, 3) if grouped else (2, 3, 4, 5, 7)))
        heads = kv_heads * draw.one_of(2, 3, 4) if grouped else kv_heads
        queries, keys = map(int, draw.rng.choice([2, 3, 5, 7, 11, 13], 2))
        sizes = [batch, head_dim, heads, queries, keys, *([value_head_dim] if own_values else []), *([kv_heads] if grouped else [])]
        if len(set(sizes)) == len(sizes):
            break
    if draw.flag(0.1):
        queries = 1
    keep_batch = draw.flag(0.8) if batched is None else batched
    keys = keys if "key" in drawn else queries
    return Sizes(batch if keep_batch else None, heads, kv_heads, head_dim, value_head_dim if own_values else head_dim, queries, keys)


def draw_spec(draw: Draw, sizes: Sizes, drawn: Collection[str], init: str, dtype: str) -> LayerSpec:
    fields: dict[str, Any] = {"num_heads": sizes.heads, "seed": draw.integer(0, 2**32), "init": init, "dtype": dtype}
    free = draw.one_of(29, 31) + ("relative_scores" in drawn)  # Transformer-XL's need an even width
    fields["d_model"] = free if "head_dim" in drawn else sizes.heads * sizes.head_dim
    settings = {"num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "value_head_dim": sizes.value_head_dim}
    settings |= {"output_dim": draw.one_of(37, 41), "projections": False, "alibi": True, "sinks": True}
    fields |= {name: setting for name, setting in settings.items() if name in drawn}
    if not init.startswith("numpy_") and "projections" not in drawn:  # the numpy schemes have square matrices and no bias
        fields["bias"] = {name: draw.flag() for name in PROJECTIONS} if "biases" in drawn else draw.flag(0.7)
        if "key" in drawn:
            fields["key_dim"] = fields["value_dim"] = draw.one_of(17, 19)
        if "value" in drawn:
            fields["value_dim"] = 23
    if draw.flag(0.2):
        fields["scale"] = draw.number(0.05, 0.5)
    if draw.flag(0.2):
        fields["softcap"] = draw.number(0.5, 5)
    _draw_parts(draw, sizes, drawn, fields)
    return LayerSpec.model_validate(fields)


def _draw_parts(draw: Draw, sizes: Sizes, drawn: Collection[str], fields: dict[str, Any]) -> None:
    """Adds the parts of the spec to the fields of its sizes."""
    if "layer_window" in drawn:
        fields["window"] = draw_window(draw)
    if "rope" in drawn:
        fields["rope"] = _draw_rope(draw, sizes.head_dim // (1 + ("differential" in drawn)), "axes" in drawn)
    if "relative_bias" in drawn:
        buckets, bidirectional = draw.one_of(4, 7, 8, 9, 32), draw.flag()
        longest = buckets // (4 if bidirectional else 2) + draw.integer(1, 12)
        fields["relative_bias"] = {"buckets": buckets, "bidirectional": bidirectional, "max_distance": longest}
    if "qk_norm" in drawn:
        fields["qk_norm"] = _draw_norm(draw, sizes)
    if "output_gate" in drawn:
        gate = {"granularity": draw.one_of("elementwise", "headwise"), "activation": draw.one_of("sigmoid", "softplus")}
        fields["output_gate"] = {**gate, "bias": draw.flag()}
    if "latent" in drawn:
        fields["value_dim"] = fields.get("key_dim", fields["d_model"])
        ranks = {"query_rank": 11 if draw.flag() else None, "key_value_rank": 13, "rope_key_dim": draw.integer(1, sizes.head_dim)}
        fields["latent"] = {**ranks, "bias": draw.flag(), "eps": draw.one_of(1e-6, 0.1)}
    if "chunk_size" in drawn:
        fields["chunk_size"] = draw.integer(1, 6)
    if "relative_scores" in drawn:
        fields["relative_scores"] = _draw_relative_scores(draw, fields["d_model"])
    if "query_scale" in drawn:
        fields["query_scale"] = {"factor": draw.number(0.1, 1), "length": draw.integer(1, 4), "shift": draw.integer(0, 2)}
    if "differential" in drawn:
        norm = {"eps": draw.one_of(1e-5, 0.1), "norm_weights": draw.flag()}
        fields["differential"] = {**norm, "lambda_init": draw.number(0.2, 0.5)}
    if "indexer" in drawn:
        dims = (fields.get("rope") or {}).get("dims", sizes.head_dim)
        indexer = {"num_heads": draw.integer(1, 4), "head_dim": dims + draw.integer(1, 4), "top_k": draw.integer(1, 8)}
        fields["indexer"] = {**indexer, "interleaved": draw.flag(), "eps": draw.one_of(1e-6, 0.1)}
    if "normalizer" in drawn:
        fields["normalizer"] = draw.one_of("scalable_softmax", *([] if "sinks" in drawn else ["sigmoid"]))
    if "grid_bias" in drawn:
        height, width = draw.one_of((2, 11), (3, 5), (5, 3), (7, 2))  # more tokens than any call has
        kind = "table" if "differential" in drawn else draw.one_of("table", "decomposed")
        fields["grid_bias"] = {"height": height, "width": width, "kind": kind, "class_token": kind == "table" and draw.flag()}


def draw_window(draw: Draw) -> dict[str, int | None]:
    left, right = (int(n) if draw.flag(0.7) else None for n in draw.rng.integers(0, 5, 2))
    return {"left": left, "right": right}


def _draw_rope(draw: Draw, head_dim: int, has_axes: bool) -> dict[str, Any]:
    """`dims` may be omitted if equal to head_dim. Short training contexts let llama3 scale some frequencies only."""
    dims = draw.one_of(*range(2, head_dim + 1, 2))
    rope: dict[str, Any] = {"theta": draw.one_of(10.0, 10000.0, 500000.0), "interleaved": draw.flag()}
    if dims < head_dim or draw.flag():
        rope["dims"] = dims
    if has_axes:
        rope["axes"] = np.unique(draw.rng.integers(0, 3, dims // 2), return_inverse=True)[1].tolist()  # numbered without gaps
    kind = draw.one_of("none", "linear", "llama3", "own")
    if kind == "own":
        rope |= {"frequencies": [0.0, *draw.rng.uniform(0, 2, dims // 2 - 1).tolist()], "attention_factor": 1.25}
    if kind == "linear":
        rope["scaling"] = {"type": "linear", "factor": 2.5}
    if kind == "llama3":
        rope["scaling"] = {"type": "llama3", "factor": 8.0, "original_max_position": draw.one_of(16, 64, 8192)}
    return rope


def _draw_norm(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    """The usual norm half of the time, else one over all heads, with weights of its own for each head, after RoPE, or of values too."""
    few = min(sizes.head_dim, sizes.value_head_dim) < 5  # numbers may all be small, or near their mean, which magnifies rounding
    eps = draw.one_of(*((0.01, 0.1) if few else (1e-6, 1e-5, 0.1)))
    kinds = ("rms", "layer") if sizes.head_dim > 2 else ("rms",)  # the layer norm of two numbers is only their signs
    norm = {"kind": draw.one_of(*kinds), "eps": eps}
    if draw.flag():
        return norm
    over = draw.one_of("head", "all")
    weights = draw.one_of(*(("shared", "own", "none") if over == "head" else ("own", "none")))
    after, values, bias = (draw.flag() for _ in range(3))
    return norm | {"over": over, "weights": weights, "after_rope": after, "values": values, "bias": bias and weights != "none"}


def _draw_relative_scores(draw: Draw, d_model: int) -> dict[str, Any]:
    """Transformer-XL's if d_model is even, or else DeBERTa's. Bounds and buckets are so few that distances exceed them."""
    bound, has_bound, flag = draw.integer(1, 8), draw.flag(), draw.flag()
    if d_model % 2 == 0 and draw.flag(0.7):
        return {"kind": "transformer_xl", "max_distance": bound if has_bound else None, "interleaved": flag}
    relative = {"kind": "disentangled", "max_distance": bound, "position_to_content": flag}
    if has_bound:
        buckets = draw.integer(4, 10)
        relative |= {"buckets": buckets, "max_distance": buckets // 2 + 1 + bound}
    return relative


def draw_weights(draw: Draw, spec: LayerSpec, drawn: Collection[str]) -> dict[str, Array] | None:
    """All weights of a layer; None if its seed draws all of them.

    Layers with norms, sinks, relative bias or scores, a gate, latents or lambdas always get explicit weights. Norms are not 1; biases,
    sinks and relative biases are not 0. Weights are values of the layer's dtype.
    """
    shapes = spec.weight_shapes()
    if "weights" not in drawn and shapes and all(name.partition(".")[0] in PROJECTIONS for name in shapes):
        return None
    weights: dict[str, Array] = {}
    for name, shape in shapes.items():
        normal = draw.rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            weights[name] = draw.rng.uniform(0.5, 2, shape)
        elif name.endswith(".weight"):
            weights[name] = 1.5 * normal / np.sqrt(shape[1])
        elif name in LAMBDAS:
            weights[name] = 0.5 * normal / np.sqrt(shape[0])
        else:
            weights[name] = normal
    return {name: rounded(x, spec.dtype) for name, x in weights.items()}


def rounded(x: Array, dtype: str) -> Array:
    """Round to the layer's dtype; half precision is stored as float32."""
    if x.dtype.kind != "f":
        return x
    values = x.astype(BY_TORCH[dtype].numpy)
    return values if dtype in ("float64", "float32") else values.astype(np.float32)


def draw_options(draw: Draw, sizes: Sizes, drawn: Collection[str], spec: LayerSpec) -> dict[str, Any]:
    """The drawn fields of a request besides query, key and value, with tensors in float64."""
    return _draw_masks(draw, sizes, drawn) | _draw_positions(draw, sizes, drawn, spec) | _draw_modifiers(draw, sizes, drawn)


def _draw_masks(draw: Draw, sizes: Sizes, drawn: Collection[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    share = draw.one_of(0.1, 0.3, 0.8)  # probability that a pair is blocked; 0.8 leaves many rows without a key
    for feature, suffix, shape in (("mask", "mask", _mask_shape(draw, sizes, drawn)), ("key_mask", "keys", sizes.lead(sizes.keys))):
        if feature in drawn:
            blocked = draw.rng.random(shape) < share
            meaning = draw.one_of("attend", "block")
            ones = blocked if meaning == "block" else ~blocked
            fields[f"{meaning}_{suffix}"] = ones if draw.flag() else ones.astype(np.int64)
    if "valid_lens" in drawn:
        shape = sizes.lead() if draw.flag() else sizes.lead(sizes.queries)
        fields["valid_lens"] = draw.rng.integers(0, sizes.keys + 1, shape) if shape else draw.integer(0, sizes.keys + 1)
    if "segments" in drawn:  # two, and padding
        for name, n in (("query_segments", sizes.queries), ("key_segments", sizes.keys)):
            fields[name] = draw.rng.choice([-1, 0, 1], sizes.lead(n), p=[0.1, 0.5, 0.4])
    if "bias" in drawn:
        fields["bias"] = draw.rng.standard_normal(shape := _mask_shape(draw, sizes, drawn))
        fields["bias"][draw.rng.random(shape) < draw.one_of(0, 0.2)] = -np.inf
    return fields


def _mask_shape(draw: Draw, sizes: Sizes, drawn: Collection[str]) -> tuple[int, ...]:
    """[q, k], [b, q, k] or [b, h, q, k], each axis 1 with probability 0.2; without a batch [q, k] or [h, q, k]. No h with an indexer."""
    pair = (sizes.queries, sizes.keys)
    shape = (pair, sizes.lead(*pair), sizes.lead(sizes.heads, *pair))[draw.rng.integers(2 if "indexer" in drawn else 3)]
    return tuple(1 if draw.flag(0.2) else n for n in shape)


def _draw_positions(draw: Draw, sizes: Sizes, drawn: Collection[str], spec: LayerSpec) -> dict[str, Any]:
    """Causality, window, query offset and RoPE's positions."""
    fields: dict[str, Any] = {}
    if "causal" in drawn:
        fields["causal"] = True
    if "window" in drawn:
        fields["window"] = draw_window(draw)
    if "query_offset" in drawn or ((fields or spec.positional) and sizes.queries != sizes.keys):
        lowest, highest = (-3, sizes.keys) if spec.grid_bias is None else (0, spec.grid_bias.num_tokens - sizes.queries + 1)
        per_item = draw.rng.integers(lowest, highest, sizes.lead())
        one = draw.integer(lowest, highest)
        choices = [one, *(["end"] if spec.grid_bias is None else []), *([] if sizes.batch is None else [per_item])]
        fields["query_offset"] = draw.one_of(*choices)
    if "positions" in drawn and spec.rope is not None:
        axes = (spec.rope.num_axes,) if spec.rope.num_axes > 1 else ()
        for name, rows in (("positions", sizes.queries), ("key_positions", sizes.keys))[: 1 + ("key" in drawn)]:
            lead = sizes.lead() if draw.flag() else (1,) * len(sizes.lead())
            fields[name] = draw.rng.uniform(-9, 30, (*lead, rows, *axes))
    return fields


def _draw_modifiers(draw: Draw, sizes: Sizes, drawn: Collection[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "fully_masked" in drawn:
        fields["fully_masked"] = draw.one_of("zero", "uniform")
    if "head_scale" in drawn:
        shape = (sizes.heads,) if draw.flag() else sizes.lead(sizes.heads)
        fields["head_scale"] = draw.rng.choice([0.0, 0.5, 1.0, -2.0], shape)
    if "dropout" in drawn:
        fields["dropout"] = {"p": draw.one_of(0.0, 0.1, 0.5), "seed": draw.integer(0, 2**32)}
    if "scale" in drawn:
        fields["scale"] = draw.number(0.05, 0.5)
    if "softcap" in drawn:
        fields["softcap"] = float(draw.one_of(0, draw.rng.uniform(0.5, 5)))
    return fields
