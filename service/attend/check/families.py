"""The layer that a candidate is compared with, by the name of a family of models: `spec="llama"`; and those it may be without a name."""

from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from itertools import product
from typing import Any

from attend.checkpoints.families.examples import Example, examples
from attend.spec import LayerSpec

OF_HEADS = ("num_heads", "num_kv_heads", "head_dim", "value_head_dim", "scale", "softcap", "window")  # fields that a function of heads has
AROUND = ("d_model", "key_dim", "value_dim", "output_dim", "bias", "rope", "qk_norm", "latent", "output_gate")  # and that it has not
WIDTHS = ("d_model", "key_dim", "value_dim", "output_dim")
POSITIONS: dict[str, dict[str, Any]] = {  # what layers add to plain attention inside of their modules, the most common first
    "ALiBi": {"alibi": True},
    **{
        f"RoPE on {pairs} with theta {theta:g}": {"rope": {"theta": theta, "interleaved": pairs == "pairs"}}
        for theta, pairs in product((1e4, 5e5, 1e6), ("halves", "pairs"))
    },
}
MOST_COMMON = 3  # of these


def layer_of(spec: LayerSpec | str | None, *, takes_heads: bool) -> tuple[LayerSpec | None, bool]:
    """The spec, and whether its layer is always causal: that of a family, such as "llama" or "gemma2:full_attention".

    `takes_heads`: the candidate is a function that gets queries, keys and values after projections, norms and RoPE, causal or not.
    ValueError: no such family, or one whose heads such a function does not compute.
    """
    if not isinstance(spec, str):
        return spec, False
    example = _example(spec)
    fields: dict[str, Any] = dict(example["spec"])
    if takes_heads:
        if others := ", ".join(name for name in fields if name not in OF_HEADS + AROUND):
            raise ValueError(f"expected a family whose heads such a function computes, got {spec}, which has {others}")
        fields = {name: fields[name] for name in OF_HEADS if name in fields} | {"d_model": fields["d_model"], "projections": False}
    elif "latent" not in fields and len({fields[name] for name in WIDTHS}) == 1:  # as in most models, d_model is the width of all heads
        fields |= dict.fromkeys(WIDTHS, fields["num_heads"] * fields["head_dim"])
    return LayerSpec.model_validate(fields | {"dtype": "float64"}), bool(example["causal"]) and not takes_heads


def with_positions(spec: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    """The layer with each kind of positions that it may have, the most common first; and its name."""
    for words, fields in POSITIONS.items():
        with suppress(ValueError):
            yield words, LayerSpec.model_validate(spec.model_dump(exclude_unset=True) | fields)


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
