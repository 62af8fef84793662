"""Reads one layer of a checkpoint: selects it, checks and converts its tensors, and infers its spec.

Only tensors of the selected layer are read; those that need no conversion stay views of the checkpoint's memory. If several layers or
layouts match, `read_layer` refuses until the caller selects one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from service.checkpoints.detection import Match, complementary_match, complete_matches, find_matches, natural, normalised, readable_matches
from service.checkpoints.layout import Converted, Fields, LayerTensors, Weights
from service.checkpoints.layouts import LAYOUTS, ROPE
from service.checkpoints.refusals import field_pointer, listed, refuse_weights, shape_of
from service.checkpoints.spec_inference import infer_spec, overlaid
from service.errors import InvalidRequest
from service.tensors import Array, datatype_of

FLOATS = ("float64", "float32", "bfloat16", "float16")
MIN_SHARE = 0.5  # of the required tensors, for a layer to count as incomplete


def read_layer(
    tensors: Mapping[str, Array], *, layout: str | None = None, prefix: str = "", spec: Mapping[str, Any] | None = None
) -> tuple[Fields, Weights]:
    """Fields for `LayerSpec` and canonical weights (`query.weight` [out, in], …) of one layer of a checkpoint.

    `tensors`: name -> array, a checkpoint or part of one. `layout`: one of `LAYOUTS`; needed only if the names fit several.
    `prefix`: the layer's name in the checkpoint, or enough of its beginning to select one (`encoder.layer.3`), with `.` or `/`. `spec`: the
    fields that tensors do not determine (num_heads, rope, window, scale, …); other fields must agree with the tensors. The default dtype is
    that of the tensors; if they differ, float64 if any has it, else float32. The modules of layouts document other defaults.

    Raises InvalidRequest: an unknown layout, none or several that match, none or several layers below the prefix, tensors that are missing,
    unknown, or of a wrong shape or dtype, a spec that contradicts the tensors or lacks a field.
    """
    given = dict(spec or {})
    if given.get("projections") is False and layout in (None, "attend"):
        return _without_projections(tensors, prefix, given)
    return read_match(_select(tensors, layout, prefix), tensors, given)


def read_match(match: Match, tensors: Mapping[str, Array], given: Fields, conversion: Fields | None = None) -> tuple[Fields, Weights]:
    """`read_layer` for a layer that was found. Raises InvalidRequest.

    `conversion`: what a model's config says about the conversion. `given` then has all fields; without it the layout has defaults.
    """
    _check_names(match, tensors)
    arrays = {part: tensors[name] for part, name in match.names.items()}
    plain = {normalised(name): name for name in tensors}
    dtype = _dtype(arrays, match.names)
    layer = LayerTensors(
        arrays, match.names, match.stem, given, lambda name: tensors[plain[name]] if name in plain else None, conversion or {}
    )
    converted = match.layout.convert(layer)
    if conversion is not None:
        converted = replace(converted, known=converted.known | {"num_heads": given["num_heads"]}, assumed={})
    else:
        _require_fields(match, converted, given)
        converted = replace(converted, assumed=overlaid(match.layout.assumed, converted.assumed))
    return infer_spec(converted, layer, dtype), converted.weights


def _require_fields(match: Match, converted: Converted, given: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if the spec lacks a field that the layout requires, unless the tensors determine it."""
    required = {"rope": ROPE} if {"inv_freq", "rotary"} & match.names.keys() else {}
    for path, expected in {**required, **match.layout.required_fields}.items():
        name, _, inner = path.partition(".")
        fields, known = given.get(name), converted.known.get(name, {})
        if isinstance(fields, Mapping) and inner not in known and fields.get(inner) is None if inner else name not in given:
            raise InvalidRequest.where(field_pointer(*path.split(".")), expected, "nothing")


def _check_names(match: Match, tensors: Mapping[str, Array]) -> None:
    """Raises InvalidRequest for refused or unknown tensors below the stem, and for incomplete groups of optional tensors."""
    problems = list(_incomplete_groups(match)) or list(_unknown_tensors(match, tensors))
    if problems:
        raise refuse_weights(problems)


def _incomplete_groups(match: Match) -> Iterator[tuple[str, str, str]]:
    by_part = {part: name for name, part in match.layout.names.items()}
    for group in match.layout.optional:
        there = [part for part in group if part in match.names]
        if there and len(there) < len(group):
            beside = listed(match.names[part] for part in there)
            for part in group:
                if part not in there:
                    yield match.full_name(by_part[part]), f"a tensor, as beside {beside}", "nothing"


def _unknown_tensors(match: Match, tensors: Mapping[str, Array]) -> Iterator[tuple[str, str, str]]:
    start = f"{match.stem}." if match.stem else ""
    known = set(match.names.values())
    for name in tensors:
        plain = normalised(name)
        if name in known or not plain.startswith(start):
            continue
        below = plain.removeprefix(start)
        if below in match.layout.refused:
            yield name, match.layout.refused[below], f'"{name}"'
        elif not _is_ignored(match, below, tensors, name):
            yield name, f"only what a layer of layout {match.layout.name} has ({listed(match.layout.names)})", f'"{name}"'


def _is_ignored(match: Match, below: str, tensors: Mapping[str, Array], name: str) -> bool:
    """Whether the tensor is a buffer that the layout ignores, by name and rank."""
    ranks = [rank for pattern, rank in match.layout.ignored.items() if fnmatchcase(below, pattern)]
    return any(rank is None or tensors[name].ndim == rank for rank in ranks)


def _dtype(arrays: Mapping[str, Array], names: Mapping[str, str]) -> str:
    """The dtype of all tensors, or float32 or float64 if they differ. Raises InvalidRequest for integers and empty tensors."""
    kinds = set()
    for part, array in arrays.items():
        if not array.size:
            raise refuse_weights([(names[part], "numbers", shape_of(array))])
        try:
            kind = datatype_of(array).torch
        except KeyError:
            kind = str(array.dtype)
        if kind not in FLOATS:
            raise refuse_weights([(names[part], "floating-point numbers: " + ", ".join(FLOATS), kind)])
        kinds.add(kind)
    if len(kinds) == 1:
        return kinds.pop()
    return "float64" if "float64" in kinds else "float32"


def _without_projections(tensors: Mapping[str, Array], prefix: str, given: Fields) -> tuple[Fields, Weights]:
    """A layer of layout `attend` without projections. It can have only sinks, norm weights and a table of relative biases."""
    start = f"{normalised(prefix).rstrip('.')}." if prefix.strip("./") else ""
    names = {normalised(name).removeprefix(start): name for name in tensors if normalised(name).startswith(start)}
    understood = ("query_norm.weight", "key_norm.weight", "sinks", "relative_bias")
    if unknown := [name for plain, name in names.items() if plain not in understood]:
        raise refuse_weights([(name, f"none but {', '.join(understood)}, since nothing is projected", f'"{name}"') for name in unknown])
    weights = {plain: tensors[name] for plain, name in names.items()}
    if "dtype" not in given and weights:
        given["dtype"] = _dtype(weights, names)
    return given, weights


def _select(tensors: Mapping[str, Array], layout: str | None, prefix: str) -> Match:
    """The only layer below the prefix, in `layout` if given. Raises InvalidRequest with the choices if there is not exactly one."""
    if layout is not None and layout not in LAYOUTS:
        raise InvalidRequest.where("/layout", "one of " + ", ".join(sorted(LAYOUTS)), f'"{layout[:60]}"')
    below = _below(find_matches(tensors), prefix)
    of_layout = [match for match in below if match.layout.name == layout]
    candidates = readable_matches(below) if layout is None else complete_matches(of_layout)
    if not candidates:
        raise _no_layer(below if layout is None else of_layout, below, layout, tensors)
    stems = {match.stem: match.prefix for match in candidates}
    if len(stems) > 1:
        expected = "a prefix that selects one layer: " + listed(stems.values())
        raise InvalidRequest.where("/prefix", expected, f'"{prefix}"' if prefix else "none")
    if len(candidates) > 1 or not (candidates[0].identified or layout):
        raise _ambiguous(candidates)
    return candidates[0]


def _normal(prefix: str) -> str:
    return normalised(prefix).rstrip(".")


def _below(matches: Sequence[Match], prefix: str) -> list[Match]:
    """Matches whose stem is the prefix or below it; layer.1 does not select layer.10. Raises InvalidRequest if there are none."""
    wanted = f"{_normal(prefix)}.".lstrip(".")
    below = [match for match in matches if f"{match.stem}.".startswith(wanted)]
    every = readable_matches(matches)
    inside = any(wanted.startswith(f"{match.stem}.") and match.stem != _normal(prefix) for match in every)
    if wanted and every and (not below or (inside and not readable_matches(below))):
        prefixes = [match.prefix for match in every]
        near = [p for p in prefixes if _normal(p).endswith(f".{_normal(prefix)}")] + get_close_matches(prefix, prefixes, n=1, cutoff=0)
        raise InvalidRequest.where("/prefix", f"one of {listed(near + prefixes)}", f'"{prefix}"')
    return below


def _no_layer(partial: Sequence[Match], below: Sequence[Match], layout: str | None, tensors: Mapping[str, Array]) -> InvalidRequest:
    """The error if no layer is complete: the missing tensors of the nearest layout, or the layouts that the names fit."""
    nearest = max(partial, key=lambda match: (match.share, match.identified, len(match.names)), default=None)
    if nearest is not None and (other := complementary_match(nearest, below)) is not None:
        return _mixed(nearest, other)
    if nearest is not None and nearest.share >= MIN_SHARE and (layout or nearest.identified):
        return refuse_weights([(nearest.full_name(name), f"a tensor, as {nearest} has it", "nothing") for name in nearest.missing])
    wanted = f"a layer of layout {layout}" if layout else f"the names of a known layout ({', '.join(sorted(LAYOUTS))})"
    if others := readable_matches(below):
        return InvalidRequest.where("/layout", wanted, listed(map(str, others)))
    if below:
        nearest = max(below, key=lambda match: (match.share, match.identified, len(match.names)))
        missing = listed(nearest.full_name(name) for name in nearest.missing)
        return InvalidRequest.where("/layout", wanted, f"nearest {nearest}, without {missing}")
    return InvalidRequest.where("/layout", wanted, f"tensors {listed(sorted(tensors, key=natural))}")


def _mixed(match: Match, other: Match) -> InvalidRequest:
    """The refusal of a layer whose tensors have names of two layouts."""
    expected = " or ".join(f"{one.layout.name} ({listed(map(one.full_name, one.required))})" for one in (match, other))
    got = " and ".join(listed(sorted(one.names.values())) for one in (match, other))
    return InvalidRequest.where("/weights", f"the names of one layout: {expected}", f"{got} together")


def _ambiguous(candidates: Sequence[Match]) -> InvalidRequest:
    """The refusal of names that several layouts share."""
    choices = "; ".join(f"{name} ({LAYOUTS[name]})" for name in sorted({match.layout.name for match in candidates}))
    at = candidates[0].prefix or "the root"
    return InvalidRequest.where("/layout", f"a layout, since the names at {at} fit several: {choices}", "none")
