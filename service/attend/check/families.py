"""The layer that a candidate is compared with, by the name of a family of models: `spec="llama"`; and those it may be without a name."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any

from attend.attention.operators.t5_bias import RelativeBias
from attend.checkpoints.families.examples import Example, examples
from attend.spec import LayerSpec

OF_HEADS = ("num_heads", "num_kv_heads", "head_dim", "value_head_dim", "scale", "softcap", "window")  # fields that a function of heads has
AROUND = ("d_model", "key_dim", "value_dim", "output_dim", "bias", "rope", "qk_norm", "latent", "output_gate")  # and that it has not
OTHER_THETA = 0.05  # times as large
WIDTHS = ("d_model", "key_dim", "value_dim", "output_dim")


def layer_of(spec: LayerSpec | Mapping[str, Any] | str | None, *, takes_heads: bool) -> tuple[LayerSpec | None, bool]:
    """The spec, and whether its layer is always causal: that of a family, such as "llama" or "gemma2:full_attention".

    `takes_heads`: the candidate is a function that gets queries, keys and values after projections, norms and RoPE, causal or not.
    ValueError: no such family, or one whose heads such a function does not compute.
    """
    if not isinstance(spec, str):
        return LayerSpec.model_validate(spec) if isinstance(spec, Mapping) else spec, False
    example = _example(spec)
    fields: dict[str, Any] = dict(example["spec"])
    if takes_heads:
        if others := ", ".join(name for name in fields if name not in OF_HEADS + AROUND):
            raise ValueError(f"expected a family whose heads such a function computes, got {spec}, which has {others}")
        fields = {name: fields[name] for name in OF_HEADS if name in fields} | {"d_model": fields["d_model"], "projections": False}
    elif "latent" not in fields and len({fields[name] for name in WIDTHS}) == 1:  # as in most models, d_model is the width of all heads
        fields |= dict.fromkeys(WIDTHS, fields["num_heads"] * fields["head_dim"])
    return LayerSpec.model_validate(fields | {"dtype": "float64"}), bool(example["causal"]) and not takes_heads


def sizes_in_words(name: str, spec: LayerSpec) -> str:
    """The family, and the sizes that its small layer has: "mistral: d_model 32, 4 heads of 8 numbers, 2 of keys, window 4 before"."""
    groups = f", {spec.num_kv_heads} of keys" if spec.num_kv_heads != spec.num_heads else ""
    window = [operator.summary(spec) for operator in spec.operators if any(side is not None for side in operator.interval(spec))]
    return ", ".join([f"{name}: d_model {spec.d_model}, {spec.num_heads} heads of {spec.head_dim} numbers{groups}", *window])


def with_positions(spec: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    """The layer with the positions of each family that has RoPE without scaling, or ALiBi, the most common first; and their name.

    One with T5's biases has these alone, for both directions or one, with scores that are scaled or not.
    """
    if spec.relative_bias:
        yield from _with_t5_biases(spec, spec.relative_bias)
        return
    for words, fraction, fields in _positions():
        fields = fields if fraction == 1 else fields | {"rope": fields["rope"] | {"dims": int(spec.head_dim * fraction)}}
        with suppress(ValueError):
            yield words, LayerSpec.model_validate(spec.model_dump(exclude_unset=True) | fields)


def _with_t5_biases(spec: LayerSpec, bias: RelativeBias) -> Iterator[tuple[str, LayerSpec]]:
    for scale, scaled in ((1.0, ""), (spec.head_dim**-0.5, ", and scores divided by sqrt(head_dim)")):
        for bidirectional, keys in ((True, "earlier and later keys"), (False, "earlier keys alone")):
            with suppress(ValueError):
                fields = {"relative_bias": bias.model_dump() | {"bidirectional": bidirectional}, "scale": scale}
                yield f"T5's biases of {keys}{scaled}", LayerSpec.model_validate(spec.model_dump(exclude_unset=True) | fields)


def turns_few(spec: LayerSpec) -> bool:
    """Whether RoPE turns so few numbers of a head that it has one frequency."""
    return spec.rope is not None and (spec.rope.dims or spec.head_dim) < 4


def with_other_theta(spec: LayerSpec) -> tuple[str, dict[str, Any]]:
    """Both thetas in words, and the field of a layer whose RoPE has another one; empty without RoPE."""
    if spec.rope is None:
        return "", {}
    theta = OTHER_THETA * spec.rope.theta
    return f"theta {spec.rope.theta:g} and {theta:g}", {"rope": spec.rope.model_dump(exclude_unset=True) | {"theta": theta}}


def most_common_of_each_kind(positions: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The first layer with ALiBi, with RoPE on halves, and with RoPE on pairs."""
    first: dict[bool | None, LayerSpec] = {}
    for spec in positions:
        first.setdefault(spec.rope.interleaved if spec.rope else None, spec)
    return [*first.values()]


@cache
def _positions() -> Sequence[tuple[str, float, dict[str, Any]]]:
    """The positions of all families, in words; which part of a head is rotated; and the fields of a spec."""
    found = Counter[str]()
    for every in examples().values():
        found.update({json.dumps(x, sort_keys=True) for example in every if (x := _positions_of(example["spec"]))})
    return [(_words(x), x.pop("fraction"), x) for x in map(json.loads, (key for key, _ in found.most_common()))]


def _positions_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of positions of a family's spec, and the part of a head that RoPE rotates; empty if it has none, or scaled RoPE."""
    rope = spec.get("rope")
    if rope and rope.keys() <= {"dims", "theta", "interleaved"} and "latent" not in spec:
        theta, interleaved = rope.get("theta", 1e4), rope.get("interleaved", False)
        return {"rope": {"theta": theta, "interleaved": interleaved}, "fraction": rope["dims"] / spec["head_dim"]}
    return {"alibi": True, "fraction": 1} if spec.get("alibi") is True else {}


def _words(positions: Mapping[str, Any]) -> str:
    if "alibi" in positions:
        return "ALiBi"
    rope, fraction = positions["rope"], positions["fraction"]
    part = "" if fraction == 1 else f" of {fraction:g} of each head"
    return f"RoPE on {'pairs' if rope['interleaved'] else 'halves'}{part} with theta {rope['theta']:g}"


def _example(name: str) -> Example:
    """The first layer of a family, or the one of the type or part after the colon. ValueError: there is none."""
    every, (family, _, kind) = examples(), name.partition(":")
    if family not in every:
        near = get_close_matches(family, every, 1)
        raise ValueError(f"expected a family of `attend families`{f', such as {near[0]}' if near else ''}, got {family!r}")
    found = [example for example in every[family] if kind in ("", example["type"], example["part"])]
    if not found:
        kinds = dict.fromkeys(kind for example in every[family] for kind in (example["type"], example["part"]))
        raise ValueError(f"expected a layer of {family} among {', '.join(kinds)}, got {kind!r}")
    return found[0]
