"""Draws random layers and requests for comparison with an oracle, over all features of specs and requests.

Sizes of axes differ wherever they may, and are mostly primes, so that swapped axes cannot go unnoticed. A case depends only on its
generator, so its seed reproduces a failure.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from service.attention.random_layers import LAYER_FEATURES, Sizes, draw_case_weights, draw_sizes, draw_spec, draw_window, rounded, settle
from service.spec import Init, LayerSpec
from service.tensors import Array

REQUEST_FEATURES = (
    "key",
    "value",
    "mask",
    "key_mask",
    "valid_lens",
    "bias",
    "causal",
    "window",
    "query_offset",
    "fully_masked",
    "head_scale",
    "dropout",
    "scale",
    "softcap",
)
FEATURES = (*REQUEST_FEATURES, *LAYER_FEATURES)


@dataclass(frozen=True, slots=True)
class Case:
    """A layer, and the keyword arguments of `reference.attend`: arrays, numbers, and small dictionaries of them."""

    spec: LayerSpec
    request: dict[str, Any]
    weights: dict[str, Array] | None = None  # all weights by canonical name; None: drawn from the spec's seed

    def body(self) -> dict[str, Any]:
        """The request as the body of POST /attend without `layer`: nested lists, with -inf as the string "-inf"."""
        return {name: _plain(x.tolist()) if isinstance(x, np.ndarray) else x for name, x in self.request.items()}


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
    request |= _draw_masks(rng, sizes, drawn)
    request |= _draw_positions(rng, sizes, drawn, positional=bool(spec.positional))
    request |= _draw_modifiers(rng, sizes, drawn)
    request = {name: rounded(x, spec.dtype) if isinstance(x, np.ndarray) else x for name, x in request.items()}
    return Case(spec, request, draw_case_weights(rng, spec, drawn))


def _draw_masks(rng: np.random.Generator, sizes: Sizes, drawn: Collection[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    share = rng.choice([0.1, 0.3, 0.8])  # probability that a pair is blocked; 0.8 leaves many rows without a key
    for feature, suffix, shape in (("mask", "mask", _mask_shape(rng, sizes)), ("key_mask", "keys", sizes.lead(sizes.keys))):
        if feature in drawn:
            blocked = rng.random(shape) < share
            meaning = rng.choice(["attend", "block"])
            ones = blocked if meaning == "block" else ~blocked
            fields[f"{meaning}_{suffix}"] = ones if rng.random() < 0.5 else ones.astype(np.int64)
    if "valid_lens" in drawn:
        shape = sizes.lead() if rng.random() < 0.5 else sizes.lead(sizes.queries)
        fields["valid_lens"] = rng.integers(0, sizes.keys + 1, shape) if shape else int(rng.integers(0, sizes.keys + 1))
    if "bias" in drawn:
        fields["bias"] = rng.standard_normal(shape := _mask_shape(rng, sizes))
        fields["bias"][rng.random(shape) < rng.choice([0, 0.2])] = -np.inf
    return fields


def _mask_shape(rng: np.random.Generator, sizes: Sizes) -> tuple[int, ...]:
    """[q, k], [b, q, k] or [b, h, q, k], each axis 1 with probability 0.2; without a batch [q, k] or [h, q, k]."""
    pair = (sizes.queries, sizes.keys)
    shape = (pair, sizes.lead(*pair), sizes.lead(sizes.heads, *pair))[rng.integers(3)]
    return tuple(1 if rng.random() < 0.2 else n for n in shape)


def _draw_positions(rng: np.random.Generator, sizes: Sizes, drawn: Collection[str], positional: bool) -> dict[str, Any]:
    """Causality, window and query offset. `positional`: the layer depends on positions."""
    fields: dict[str, Any] = {}
    if "causal" in drawn:
        fields["causal"] = True
    if "window" in drawn:
        fields["window"] = draw_window(rng)
    if "query_offset" in drawn or ((fields or positional) and sizes.queries != sizes.keys):
        per_item = rng.integers(-3, sizes.keys, sizes.lead())
        one = int(rng.integers(-3, sizes.keys))
        choices = ["end", one] if sizes.batch is None else ["end", one, per_item]
        fields["query_offset"] = choices[rng.integers(len(choices))]
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


def _plain(x: Any) -> Any:
    if isinstance(x, list):
        return [_plain(item) for item in x]
    return "-inf" if x == -np.inf else x
