"""One layer out of a checkpoint: the choice of the layer, its tensors by part, their conversion, and the spec that belongs to them.

Only tensors of the chosen layer are touched; those that need no transposing or cutting stay views of the checkpoint's memory.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from service.checkpoints.choice import choose
from service.checkpoints.detection import Match, normalised
from service.checkpoints.layout import Fields, Found, Weights
from service.checkpoints.problems import field_pointer, listed, refuse_weights, shape_of
from service.checkpoints.spec_inference import settle
from service.errors import InvalidRequest
from service.tensors import Array, datatype_of

FLOATS = ("float64", "float32", "bfloat16", "float16")


def read_layer(
    tensors: Mapping[str, Array], *, layout: str | None = None, prefix: str = "", spec: Mapping[str, Any] | None = None
) -> tuple[Fields, Weights]:
    """Fields for `LayerSpec` and canonical weights (`query.weight` [out, in], …) of one layer of a checkpoint.

    `tensors`: name -> array, a whole checkpoint or part of one. `layout`: one of `LAYOUTS`; may be left out where the names tell it.
    `prefix`: the layer's name in the checkpoint, or as much of it as selects one (`encoder.layer.3`); `.` and `/` are the same, at its end
    too. `spec`: what tensors cannot tell (num_heads, rope, window, scale, …), held against what they do tell; without a dtype the layer has
    that of its tensors (float32 where they differ). What each layout assumes stands at the head of its module.

    Raises InvalidRequest: an unknown layout, none or several that match, none or several layers below the prefix, tensors that are missing,
    not understood, or of a shape or dtype that does not fit, a spec that contradicts the tensors or lacks what they do not tell.
    """
    given = dict(spec or {})
    if given.get("projections") is False and layout in (None, "attend"):
        return _without_projections(tensors, prefix, given)
    match = choose(tensors, layout, prefix)
    _check_names(match, tensors)
    for name, expected in match.form.needs.items():
        if name not in given:
            raise InvalidRequest.where(field_pointer(name), expected, "nothing")
    found = _fetch(match, tensors, given)
    dtype = _dtype(found.arrays, found.names)
    read = match.form.convert(found)
    return settle(read, found, dtype), read.weights


def _fetch(match: Match, tensors: Mapping[str, Array], given: Mapping[str, Any]) -> Found:
    arrays = {part: tensors[name] for part, name in match.names.items()}
    elsewhere = {normalised(name): name for name in tensors}

    def find(plain: str) -> Array | None:
        return tensors[elsewhere[plain]] if plain in elsewhere else None

    return Found(arrays, match.names, match.stem, given, find)


def _check_names(match: Match, tensors: Mapping[str, Array]) -> None:
    """Raises InvalidRequest where tensors below the stem are refused or not understood, or one of a group is there without the others."""
    problems = list(_half_groups(match)) or list(_surplus(match, tensors))
    if problems:
        raise refuse_weights(problems)


def _half_groups(match: Match) -> Iterator[tuple[str, str, str]]:
    by_part = {part: name for name, part in match.form.names.items()}
    for group in match.form.optional:
        there = [part for part in group if part in match.names]
        if there and len(there) < len(group):
            beside = listed(match.names[part] for part in there)
            for part in group:
                if part not in there:
                    yield match.full_name(by_part[part]), f"a tensor, as beside {beside}", "nothing"


def _surplus(match: Match, tensors: Mapping[str, Array]) -> Iterator[tuple[str, str, str]]:
    start = f"{match.stem}." if match.stem else ""
    known = set(match.names.values())
    for name in tensors:
        plain = normalised(name)
        if name in known or not plain.startswith(start):
            continue
        below = plain.removeprefix(start)
        if below in match.form.refused:
            yield name, match.form.refused[below], f'"{name}"'
        elif not _run_in_thread(match, below, tensors, name):
            yield name, f"only what a layer of layout {match.form.layout} has ({listed(match.form.names)})", f'"{name}"'


def _run_in_thread(match: Match, below: str, tensors: Mapping[str, Array], name: str) -> bool:
    """Whether it is known to be no weight of the layer, by its name and, where a weight could have that, by its rank."""
    ranks = [rank for pattern, rank in match.form.aside.items() if fnmatchcase(below, pattern)]
    return any(rank is None or tensors[name].ndim == rank for rank in ranks)


def _dtype(arrays: Mapping[str, Array], names: Mapping[str, str]) -> str:
    """The dtype that holds all of them; of two 16-bit ones float32. Raises InvalidRequest where one holds no floats, or nothing."""
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
    """Our own layer that projects nothing: only sinks, norms or a table can be there, and the spec says which."""
    start = f"{normalised(prefix).rstrip('.')}." if prefix.strip("./") else ""
    names = {normalised(name).removeprefix(start): name for name in tensors if normalised(name).startswith(start)}
    understood = ("query_norm.weight", "key_norm.weight", "sinks", "relative_bias")
    if unknown := [name for plain, name in names.items() if plain not in understood]:
        raise refuse_weights([(name, f"none but {', '.join(understood)}, since nothing is projected", f'"{name}"') for name in unknown])
    weights = {plain: tensors[name] for plain, name in names.items()}
    if "dtype" not in given and weights:
        given["dtype"] = _dtype(weights, names)
    return given, weights
