"""Draws random layers and requests for comparison with an oracle, over all features of specs and requests.

Sizes of axes differ wherever they may, and are mostly primes, so that swapped axes cannot go unnoticed. A case depends only on its
generator, so its seed reproduces a failure. `matmul_precision` is never drawn, since it would only change the tolerance.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from service.spec import LAMBDAS, Init, LayerSpec
from service.spec_parts import PROJECTIONS
from service.tensors import BY_TORCH, Array

REQUEST_FEATURES = (
    "key",
    "value",
    "mask",
    "key_mask",
    "valid_lens",
    "segments",
    "bias",
    "causal",
    "window",
    "query_offset",
    "fully_masked",
    "head_scale",
    "dropout",
    "scale",
    "softcap",
    "positions",  # of layers with rope
)
LAYER_FEATURES = (
    "num_kv_heads",
    "head_dim",
    "value_head_dim",
    "output_dim",
    "biases",  # one for each projection
    "projections",  # false
    "layer_window",
    "rope",
    "alibi",
    "relative_bias",
    "qk_norm",
    "sinks",
    "weights",  # explicit ones, even if they could be seeded
    "output_gate",
    "latent",
    "chunk_size",
    "query_scale",
    "differential",
    "normalizer",
    "indexer",
    "axes",  # of layers with rope
    "grid_bias",
    "relative_scores",
)
FEATURES = (*REQUEST_FEATURES, *LAYER_FEATURES)


@dataclass(frozen=True, slots=True)
class Case:
    """A layer, and the keyword arguments of `reference.attend`: arrays, numbers, and small dictionaries of them."""

    spec: LayerSpec
    request: dict[str, Any]
    weights: dict[str, Array] | None = None  # all weights by canonical name; None: drawn from the spec's seed


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
    init = init or rng.choice(get_args(Init)).item()
    drawn = settle(drawn, init)
    sizes = draw_sizes(rng, drawn, batched)
    spec = draw_spec(rng, sizes, drawn, init, dtype or rng.choice(["float64", "float32"]).item())
    request: dict[str, Any] = {"query": rng.standard_normal(sizes.lead(sizes.queries, spec.query_dim))}
    if "key" in drawn:
        request["key"] = rng.standard_normal(sizes.lead(sizes.keys, spec.key_dim))
    if "value" in drawn:
        request["value"] = rng.standard_normal(sizes.lead(sizes.keys, spec.value_dim))
    request |= draw_options(rng, sizes, drawn, spec)
    request = {name: rounded(x, spec.dtype) if isinstance(x, np.ndarray) else x for name, x in request.items()}
    return Case(spec, request, draw_case_weights(rng, spec, drawn))


def draw_options(rng: np.random.Generator, sizes: Sizes, drawn: Collection[str], spec: LayerSpec) -> dict[str, Any]:
    """The drawn fields of a request besides query, key and value, with tensors in float64."""
    return _draw_masks(rng, sizes, drawn) | _draw_positions(rng, sizes, drawn, spec) | _draw_modifiers(rng, sizes, drawn)


def _draw_masks(rng: np.random.Generator, sizes: Sizes, drawn: Collection[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    share = rng.choice([0.1, 0.3, 0.8])  # probability that a pair is blocked; 0.8 leaves many rows without a key
    for feature, suffix, shape in (("mask", "mask", _mask_shape(rng, sizes, drawn)), ("key_mask", "keys", sizes.lead(sizes.keys))):
        if feature in drawn:
            blocked = rng.random(shape) < share
            meaning = rng.choice(["attend", "block"])
            ones = blocked if meaning == "block" else ~blocked
            fields[f"{meaning}_{suffix}"] = ones if rng.random() < 0.5 else ones.astype(np.int64)
    if "valid_lens" in drawn:
        shape = sizes.lead() if rng.random() < 0.5 else sizes.lead(sizes.queries)
        fields["valid_lens"] = rng.integers(0, sizes.keys + 1, shape) if shape else int(rng.integers(0, sizes.keys + 1))
    if "segments" in drawn:  # two, and padding
        for name, n in (("query_segments", sizes.queries), ("key_segments", sizes.keys)):
            fields[name] = rng.choice([-1, 0, 1], sizes.lead(n), p=[0.1, 0.5, 0.4])
    if "bias" in drawn:
        fields["bias"] = rng.standard_normal(shape := _mask_shape(rng, sizes, drawn))
        fields["bias"][rng.random(shape) < rng.choice([0, 0.2])] = -np.inf
    return fields


def _mask_shape(rng: np.random.Generator, sizes: Sizes, drawn: Collection[str]) -> tuple[int, ...]:
    """[q, k], [b, q, k] or [b, h, q, k], each axis 1 with probability 0.2; without a batch [q, k] or [h, q, k]. No h with an indexer."""
    pair = (sizes.queries, sizes.keys)
    shape = (pair, sizes.lead(*pair), sizes.lead(sizes.heads, *pair))[rng.integers(2 if "indexer" in drawn else 3)]
    return tuple(1 if rng.random() < 0.2 else n for n in shape)


def _draw_positions(rng: np.random.Generator, sizes: Sizes, drawn: Collection[str], spec: LayerSpec) -> dict[str, Any]:
    """Causality, window, query offset and RoPE's positions."""
    fields: dict[str, Any] = {}
    if "causal" in drawn:
        fields["causal"] = True
    if "window" in drawn:
        fields["window"] = draw_window(rng)
    if "query_offset" in drawn or ((fields or spec.positional) and sizes.queries != sizes.keys):
        lowest, highest = (-3, sizes.keys) if spec.grid_bias is None else (0, spec.grid_bias.num_tokens - sizes.queries + 1)
        per_item = rng.integers(lowest, highest, sizes.lead())
        one = int(rng.integers(lowest, highest))
        choices = [one, *(["end"] if spec.grid_bias is None else []), *([] if sizes.batch is None else [per_item])]
        fields["query_offset"] = choices[rng.integers(len(choices))]
    if "positions" in drawn and spec.rope is not None:
        axes = (spec.rope.num_axes,) if spec.rope.num_axes > 1 else ()
        for name, rows in (("positions", sizes.queries), ("key_positions", sizes.keys))[: 1 + ("key" in drawn)]:
            lead = sizes.lead() if rng.random() < 0.5 else (1,) * len(sizes.lead())
            fields[name] = rng.uniform(-9, 30, (*lead, rows, *axes))
    return fields


def _draw_modifiers(rng: np.random.Generator, sizes: Sizes, drawn: Collection[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "fully_masked" in drawn:
        fields["fully_masked"] = rng.choice(["zero", "uniform"]).item()
    if "head_scale" in drawn:
        shape = (sizes.heads,) if rng.random() < 0.5 else sizes.lead(sizes.heads)
        fields["head_scale"] = rng.choice([0.0, 0.5, 1.0, -2.0], shape)
    if "dropout" in drawn:
        fields["dropout"] = {"p": rng.choice([0.0, 0.1, 0.5]).item(), "seed": int(rng.integers(2**32))}
    if "scale" in drawn:
        fields["scale"] = float(rng.uniform(0.05, 0.5))
    if "softcap" in drawn:
        fields["softcap"] = float(rng.choice([0, rng.uniform(0.5, 5)]))
    return fields


def settle(drawn: Collection[str], init: str) -> set[str]:
    """The drawn features without those that do not fit the others, so that nothing has to be drawn twice."""
    settled = set(drawn)
    if "key" not in settled:
        settled.discard("value")
    if init == "torch_mha" or (init.startswith("numpy_") and "projections" not in settled):  # only square matrices
        settled -= {"num_kv_heads", "head_dim", "value_head_dim", "output_dim"}
    if init == "torch_mha" or init.startswith("numpy_"):
        settled.discard("biases")
    if "projections" in settled or init == "torch_mha" or init.startswith("numpy_"):
        settled -= {"output_gate", "latent", "relative_scores", "indexer"}
    if settled & {"rope", "query_scale", "differential"}:
        settled.discard("relative_scores")
    if "differential" in settled:
        settled -= {"qk_norm", "latent", "sinks", "dropout", "normalizer"}
    if "rope" not in settled:
        settled -= {"axes", "positions"}
    if "projections" in settled:  # widths follow from heads, and a missing key or value is as wide as the query or key it defaults to
        settled -= {"output_dim", "biases"}
        settled -= set() if "key" in settled else {"num_kv_heads"}
        settled -= set() if "value" in settled else {"value_head_dim"}
    return settled


def draw_sizes(rng: np.random.Generator, drawn: Collection[str], batched: bool | None) -> Sizes:
    """Draw sizes that are all different, except those that must be equal. A tenth of the calls has one query, as in a decoding step."""
    grouped, own_values, rotated = ("num_kv_heads" in drawn, "value_head_dim" in drawn, "rope" in drawn)
    while True:
        batch, head_dim, value_head_dim = map(int, rng.choice([2, 3, 5, 7], 3))
        head_dim += rotated and head_dim > 2 and rng.random() < 0.5  # an even head_dim can be rotated completely
        head_dim *= 1 + ("differential" in drawn)
        kv_heads = int(rng.choice([1, 2, 3] if grouped else [2, 3, 4, 5, 7]))
        heads = kv_heads * int(rng.choice([2, 3, 4])) if grouped else kv_heads
        queries, keys = map(int, rng.choice([2, 3, 5, 7, 11, 13], 2))
        sizes = [batch, head_dim, heads, queries, keys, *([value_head_dim] if own_values else []), *([kv_heads] if grouped else [])]
        if len(set(sizes)) == len(sizes):
            break
    if rng.random() < 0.1:
        queries = 1
    keep_batch = rng.random() < 0.8 if batched is None else batched
    keys = keys if "key" in drawn else queries
    return Sizes(batch if keep_batch else None, heads, kv_heads, head_dim, value_head_dim if own_values else head_dim, queries, keys)


def draw_spec(rng: np.random.Generator, sizes: Sizes, drawn: Collection[str], init: str, dtype: str) -> LayerSpec:
    fields: dict[str, Any] = {"num_heads": sizes.heads, "seed": int(rng.integers(2**32)), "init": init, "dtype": dtype}
    free = int(rng.choice([29, 31])) + ("relative_scores" in drawn)  # Transformer-XL's need an even width
    fields["d_model"] = free if "head_dim" in drawn else sizes.heads * sizes.head_dim
    settings = {"num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "value_head_dim": sizes.value_head_dim}
    settings |= {"output_dim": int(rng.choice([37, 41])), "projections": False, "alibi": True, "sinks": True}
    fields |= {name: setting for name, setting in settings.items() if name in drawn}
    if not init.startswith("numpy_") and "projections" not in drawn:  # the numpy schemes have square matrices and no bias
        fields["bias"] = {name: bool(rng.random() < 0.5) for name in PROJECTIONS} if "biases" in drawn else bool(rng.random() < 0.7)
        if "key" in drawn:
            fields["key_dim"] = fields["value_dim"] = int(rng.choice([17, 19]))
        if "value" in drawn:
            fields["value_dim"] = 23
    if rng.random() < 0.2:
        fields["scale"] = float(rng.uniform(0.05, 0.5))
    if rng.random() < 0.2:
        fields["softcap"] = float(rng.uniform(0.5, 5))
    if "layer_window" in drawn:
        fields["window"] = draw_window(rng)
    if "rope" in drawn:
        fields["rope"] = _draw_rope(rng, sizes.head_dim // (1 + ("differential" in drawn)), "axes" in drawn)
    if "relative_bias" in drawn:
        buckets, bidirectional = int(rng.choice([4, 7, 8, 9, 32])), bool(rng.random() < 0.5)
        exact = buckets // (4 if bidirectional else 2)
        fields["relative_bias"] = {
            "buckets": buckets,
            "bidirectional": bidirectional,
            "max_distance": exact + int(rng.integers(1, 12)),
        }
    if "qk_norm" in drawn:
        kinds = ["rms", "layer"] if sizes.head_dim > 2 else ["rms"]  # the layer norm of two numbers is only their signs
        few = min(sizes.head_dim, sizes.value_head_dim) < 5  # numbers may all be small, or near their mean, which magnifies rounding
        eps = rng.choice([0.01, 0.1] if few else [1e-6, 1e-5, 0.1]).item()
        fields["qk_norm"] = {"kind": rng.choice(kinds).item(), "eps": eps} | _draw_norm(rng)
    if "output_gate" in drawn:
        granularity, activation = rng.choice(["elementwise", "headwise"]).item(), rng.choice(["sigmoid", "softplus"]).item()
        fields["output_gate"] = {"granularity": granularity, "activation": activation, "bias": bool(rng.random() < 0.5)}
    if "latent" in drawn:
        fields["value_dim"] = fields.get("key_dim", fields["d_model"])
        ranks = {"query_rank": 11 if rng.random() < 0.5 else None, "key_value_rank": 13}
        fields["latent"] = ranks | {"rope_key_dim": int(rng.integers(1, sizes.head_dim)), "bias": bool(rng.random() < 0.5)}
        fields["latent"]["eps"] = rng.choice([1e-6, 0.1]).item()
    if "chunk_size" in drawn:
        fields["chunk_size"] = int(rng.integers(1, 6))
    if "relative_scores" in drawn:
        fields["relative_scores"] = _draw_relative_scores(rng, fields["d_model"])
    if "query_scale" in drawn:
        fields["query_scale"] = {"factor": float(rng.uniform(0.1, 1)), "length": int(rng.integers(1, 4)), "shift": int(rng.integers(2))}
    if "differential" in drawn:
        norm = {"eps": rng.choice([1e-5, 0.1]).item(), "norm_weights": bool(rng.random() < 0.5)}
        fields["differential"] = {"lambda_init": float(rng.uniform(0.2, 0.5)), **norm}
    if "indexer" in drawn:
        dims = (fields.get("rope") or {}).get("dims", sizes.head_dim)
        section = {"num_heads": int(rng.integers(1, 4)), "head_dim": dims + int(rng.integers(1, 4)), "top_k": int(rng.integers(1, 8))}
        fields["indexer"] = section | {"interleaved": bool(rng.random() < 0.5), "eps": rng.choice([1e-6, 0.1]).item()}
    if "normalizer" in drawn:
        fields["normalizer"] = rng.choice(["scalable_softmax", *([] if "sinks" in drawn else ["sigmoid"])]).item()
    if "grid_bias" in drawn:
        height, width = [(2, 11), (3, 5), (5, 3), (7, 2)][rng.integers(4)]  # more tokens than any call has
        kind = "table" if "differential" in drawn else rng.choice(["table", "decomposed"]).item()
        fields["grid_bias"] = {"height": height, "width": width, "kind": kind, "class_token": kind == "table" and bool(rng.random() < 0.5)}
    return LayerSpec.model_validate(fields)


def draw_window(rng: np.random.Generator) -> dict[str, int | None]:
    left, right = (int(n) if rng.random() < 0.7 else None for n in rng.integers(0, 5, 2))
    return {"left": left, "right": right}


def _draw_rope(rng: np.random.Generator, head_dim: int, has_axes: bool) -> dict[str, Any]:
    """Settings of RoPE. `dims` may be omitted if equal to head_dim. Short training contexts let llama3 scale some frequencies only."""
    dims = int(rng.choice(range(2, head_dim + 1, 2)))
    rope: dict[str, Any] = {"theta": rng.choice([10.0, 10000.0, 500000.0]).item(), "interleaved": bool(rng.random() < 0.5)}
    if dims < head_dim or rng.random() < 0.5:
        rope["dims"] = dims
    if has_axes:
        rope["axes"] = np.unique(rng.integers(0, 3, dims // 2), return_inverse=True)[1].tolist()  # numbered without gaps
    kind = rng.choice(["none", "linear", "llama3", "own"])
    if kind == "own":
        rope["frequencies"] = [0.0, *rng.uniform(0, 2, dims // 2 - 1).tolist()]
        rope["attention_factor"] = 1.25
    if kind == "linear":
        rope["scaling"] = {"type": "linear", "factor": 2.5}
    if kind == "llama3":
        rope["scaling"] = {"type": "llama3", "factor": 8.0, "original_max_position": rng.choice([16, 64, 8192]).item()}
    return rope


def _draw_norm(rng: np.random.Generator) -> dict[str, Any]:
    """The usual norm half of the time, else one over all heads, with weights of its own for each head, after RoPE, or of values too."""
    if rng.random() < 0.5:
        return {}
    over = rng.choice(["head", "all"]).item()
    weights = rng.choice(["shared", "own", "none"] if over == "head" else ["own", "none"]).item()
    after, values, bias = (bool(rng.random() < 0.5) for _ in range(3))
    return {"over": over, "weights": weights, "after_rope": after, "values": values, "bias": bias and weights != "none"}


def _draw_relative_scores(rng: np.random.Generator, d_model: int) -> dict[str, Any]:
    """Transformer-XL's if d_model is even, or else DeBERTa's. Bounds and buckets are so few that distances exceed them."""
    bound, has_bound, flag = int(rng.integers(1, 8)), bool(rng.random() < 0.5), bool(rng.random() < 0.5)
    if d_model % 2 == 0 and rng.random() < 0.7:
        return {"kind": "transformer_xl", "max_distance": bound if has_bound else None, "interleaved": flag}
    fields = {"kind": "disentangled", "max_distance": bound, "position_to_content": flag}
    if has_bound:
        buckets = int(rng.integers(4, 10))
        fields |= {"buckets": buckets, "max_distance": buckets // 2 + 1 + bound}
    return fields


def draw_case_weights(rng: np.random.Generator, spec: LayerSpec, drawn: Collection[str]) -> dict[str, Array] | None:
    """All weights of a layer; None if its seed draws all of them.

    Layers with norms, sinks, relative bias or scores, a gate, latents or lambdas always get explicit weights. Norms are not 1; biases,
    sinks and relative biases are not 0. Weights are values of the layer's dtype.
    """
    shapes = spec.weight_shapes()
    if "weights" not in drawn and shapes and all(name.partition(".")[0] in PROJECTIONS for name in shapes):
        return None
    weights: dict[str, Array] = {}
    for name, shape in shapes.items():
        normal = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            weights[name] = rng.uniform(0.5, 2, shape)
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
