"""Draws random layers and requests for comparison with an oracle, over all features of specs and requests.

A case depends only on its generator, so its seed reproduces a failure. Sizes of axes differ wherever they may, and are mostly primes, so
that swapped axes cannot go unnoticed. `matmul_precision` is never drawn, since it would only change the tolerance.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args
from zlib import crc32

import numpy as np

from attend.attention.operators import OPERATORS, num_softmaxes
from attend.attention.operators.operator import Operator
from attend.attention.operators.window import WindowOperator
from attend.axes import OF_HEADS, PROGRAM_TENSORS
from attend.spec import Init, LayerSpec
from attend.spec_parts import PROJECTIONS
from attend.tensors import BY_TORCH, Array

FACTORS = tuple(name for name, field in PROGRAM_TENSORS.items() if field.adds_step and field.text == OF_HEADS)  # numbers of heads
REQUEST_FEATURES = (
    *("key", "value", "mask", "key_mask", "valid_lens", "segments", "bias", "causal", "window", "query_offset", "fully_masked"),
    *(*FACTORS, "dropout", "scale", "softcap", "positions"),
)
FEATURE_OF = {operator.field: f"layer_{operator.field}" if operator.of_calls else operator.field for operator in OPERATORS}
BY_FIELD = {field: [operator for operator in OPERATORS if operator.field == field] for field in FEATURE_OF}
LAYER_FEATURES = (  # "biases": one for each projection; "projections": none; "weights": explicit ones, even if they could be seeded
    *("num_kv_heads", "head_dim", "value_head_dim", "output_dim", "biases", "projections", "weights", "axes"),
    *FEATURE_OF.values(),
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
    always: Collection[str] = (),
    rate: float = 0.35,
    init: Init | None = None,
    dtype: str | None = None,
    batched: bool | None = None,
) -> Case:
    """A spec, its weights, and a request that fits it.

    Each of `features` is drawn with probability `rate`, those of `always` in every case, and dropped if it does not fit the others;
    "query_offset" is also drawn whenever it is required. Without "key", every call is self-attention. Without LAYER_FEATURES, layers are
    seeded and plain. `init`, `dtype` (float64 or float32; half precision where a caller asks for it) and `batched` are drawn if None. No
    number of a float16 case comes near 65,504: inputs and weights are of order 1, and widths small. Tensors are values of the layer's
    dtype, so oracles need not round them.

    Raises ValueError for an unknown feature.
    """
    if unknown := {*features, *always} - set(FEATURES):
        raise ValueError(f"expected features among {', '.join(FEATURES)}, got {', '.join(sorted(unknown))}")
    flags = int(rng.integers(2**32))  # each feature has its own, so that a new one does not change the cases without it
    drawn = {name for name in features if np.random.default_rng((flags, crc32(name.encode()))).random() < rate} | {*always}
    draw = Draw(rng)
    init = init or draw.one_of(*get_args(Init))
    drawn = drop_conflicts(drawn, init)
    if dtype in ("float16", "bfloat16") and "block_selection" not in always:
        drawn.discard("block_selection")  # which blocks are selected depends on rounding
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
    unprojected = "projections" in kept or init == "torch_mha" or init.startswith("numpy_")
    for field in BY_FIELD:
        fitting = [operator for operator in _fitting(field, kept) if not (operator.needs_projections and unprojected)]
        if not fitting:
            kept.discard(field)
        if field in kept:
            kept.difference_update(*(operator.undefined_options for operator in fitting))
    for operator in OPERATORS:
        if FEATURE_OF[operator.field] not in kept:
            kept.difference_update(operator.case_features)
    if "projections" in kept:  # widths follow from heads, and a missing key or value is as wide as the query or key it defaults to
        kept -= {"output_dim", "biases"}
        kept -= set() if "key" in kept else {"num_kv_heads"}
        kept -= set() if "value" in kept else {"value_head_dim"}
    return kept


def excluded_by(operator: type[Operator]) -> set[str]:
    """The features for which an operator is dropped: of two that conflict, one that survives conflicts, or the one that declares none."""
    declared = set() if operator.survives_conflicts else {*operator.conflicts}
    return declared | {other.field for other in OPERATORS if other.survives_conflicts and operator.field in other.conflicts}


def _fitting(field: str, drawn: Collection[str]) -> list[type[Operator]]:
    """The operators of a field that no drawn feature excludes."""
    return [operator for operator in BY_FIELD[field] if not {*drawn} & excluded_by(operator)]


def _even_widths(drawn: Collection[str]) -> set[str]:
    return {width for operator in OPERATORS if operator.field in drawn for width in operator.even_widths}


def draw_sizes(draw: Draw, drawn: Collection[str], batched: bool | None) -> Sizes:
    """Draw sizes that are all different, except those that must be equal. A tenth of the calls has one query, as in a decoding step."""
    grouped, own_values, even = ("num_kv_heads" in drawn, "value_head_dim" in drawn, "head_dim" in _even_widths(drawn))
    while True:
        batch, head_dim, value_head_dim = map(int, draw.rng.choice([2, 3, 5, 7], 3))
        head_dim += even and head_dim > 2 and draw.flag()  # an even head_dim can be rotated completely
        head_dim *= num_softmaxes(drawn)
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
    free = draw.one_of(29, 31) + ("d_model" in _even_widths(drawn))
    fields["d_model"] = free if "head_dim" in drawn else sizes.heads * sizes.head_dim
    settings = {"num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "value_head_dim": sizes.value_head_dim}
    settings |= {"output_dim": draw.one_of(37, 41), "projections": False}
    fields |= {name: setting for name, setting in settings.items() if name in drawn}
    if not init.startswith("numpy_") and "projections" not in drawn:  # the numpy schemes have square matrices and no bias
        fields["bias"] = {name: draw.flag() for name in PROJECTIONS} if "biases" in drawn else draw.flag(0.7)
        if "key" in drawn:
            fields["key_dim"] = fields["value_dim"] = draw.one_of(17, 19)
        if "value" in drawn:
            fields["value_dim"] = 23
    if draw.flag(0.2):
        fields["scale"] = draw.number(0.05, 0.5)
    for field, feature in FEATURE_OF.items():
        if feature in drawn:
            operator = draw.one_of(*_fitting(field, drawn))
            fields[field] = operator.random(draw, {**fields, "drawn": drawn, "num_softmaxes": num_softmaxes(drawn)})
    if any(operator.equal_inputs for operator in OPERATORS if operator.field in drawn):
        fields["value_dim"] = fields.get("key_dim", fields["d_model"])
    return LayerSpec.model_validate(fields)


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
        else:
            owner = next((operator for operator in spec.operators if name in operator.axes), Operator)
            weights[name] = owner.random_weight(name, normal)
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
    """[q, k], [b, q, k] or [b, h, q, k], each axis 1 with probability 0.2; without a batch [q, k] or [h, q, k].

    There is no h where all heads keep the same keys.
    """
    pair, alike = (sizes.queries, sizes.keys), any(operator.same_keys_for_all_heads and operator.field in drawn for operator in OPERATORS)
    shape = (pair, sizes.lead(*pair), sizes.lead(sizes.heads, *pair))[draw.rng.integers(2 if alike else 3)]
    return tuple(1 if draw.flag(0.2) else n for n in shape)


def _draw_positions(draw: Draw, sizes: Sizes, drawn: Collection[str], spec: LayerSpec) -> dict[str, Any]:
    """Causality, window, query offset and RoPE's positions."""
    fields: dict[str, Any] = {}
    if "causal" in drawn:
        fields["causal"] = True
    if "window" in drawn:
        fields["window"] = WindowOperator.random(draw, {})
    if "query_offset" in drawn or ((fields or spec.positional) and sizes.queries != sizes.keys):
        extent = next((extent for extent in spec.extents if not extent.negative), None)
        lowest, highest = (-3, sizes.keys) if extent is None else (0, extent.stop - sizes.queries + 1)
        per_item = draw.rng.integers(lowest, highest, sizes.lead())
        one = draw.integer(lowest, highest)
        choices = [one, *(["end"] if extent is None else []), *([] if sizes.batch is None else [per_item])]
        fields["query_offset"] = draw.one_of(*choices)
    if "positions" in drawn and (coordinates := spec.coordinates) is not None:
        axes = (coordinates.axes,) if coordinates.axes > 1 else ()
        for name, rows in (("positions", sizes.queries), ("key_positions", sizes.keys))[: 1 + ("key" in drawn)]:
            lead = sizes.lead() if draw.flag() else (1,) * len(sizes.lead())
            fields[name] = draw.rng.uniform(-9, 30, (*lead, rows, *axes))
    return fields


def _draw_modifiers(draw: Draw, sizes: Sizes, drawn: Collection[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "fully_masked" in drawn:
        fields["fully_masked"] = draw.one_of("zero", "uniform")
    for name in FACTORS:
        if name in drawn:
            shape = (sizes.heads,) if draw.flag() else sizes.lead(sizes.heads)
            fields[name] = draw.rng.choice([0.0, 0.5, 1.0, -2.0], shape)
    if "dropout" in drawn:
        fields["dropout"] = {"p": draw.one_of(0.0, 0.1, 0.5), "seed": draw.integer(0, 2**32)}
    if "scale" in drawn:
        fields["scale"] = draw.number(0.05, 0.5)
    if "softcap" in drawn:
        fields["softcap"] = float(draw.one_of(0, draw.rng.uniform(0.5, 5)))
    return fields
