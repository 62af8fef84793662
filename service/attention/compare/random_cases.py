"""Draws random layers and requests for comparison with an oracle, over all features of specs and requests.

A case depends only on its generator, so its seed reproduces a failure.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from service.attention.compare import random_layers
from service.attention.compare.random_layers import LAYER_FEATURES, Draw, Sizes, draw_window
from service.spec import Init, LayerSpec
from service.tensors import Array

REQUEST_FEATURES = (
    *("key", "value", "mask", "key_mask", "valid_lens", "segments", "bias", "causal", "window", "query_offset", "fully_masked"),
    *("head_scale", "dropout", "scale", "softcap", "positions"),
)
FEATURES = (*REQUEST_FEATURES, *LAYER_FEATURES)


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
    drawn = random_layers.drop_conflicts(drawn, init)
    sizes = random_layers.draw_sizes(draw, drawn, batched)
    spec = random_layers.draw_spec(draw, sizes, drawn, init, dtype or draw.one_of("float64", "float32"))
    widths = {"query": (sizes.queries, spec.query_dim), "key": (sizes.keys, spec.key_dim), "value": (sizes.keys, spec.value_dim)}
    request: dict[str, Any] = {
        name: rng.standard_normal(sizes.lead(*shape)) for name, shape in widths.items() if name == "query" or name in drawn
    }
    request |= draw_options(draw, sizes, drawn, spec)
    request = {name: random_layers.rounded(x, spec.dtype) if isinstance(x, np.ndarray) else x for name, x in request.items()}
    return Case(spec, request, random_layers.draw_weights(draw, spec, drawn))


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
