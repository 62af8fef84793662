"""Reads one layer of a checkpoint: checks the names of its tensors, converts them, and infers its spec.

Only tensors of the selected layer are read; those that need no conversion stay views of the checkpoint's memory.

The spec follows from the shapes of the canonical weights, the caller's spec and the defaults of the layout. Shapes determine the widths
and, once the number of heads is known, all other fields about heads. An InvalidRequest points to the field of the caller's spec that
contradicts the tensors, or to the tensor that does not fit the others, by its name in the checkpoint.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from attend.attention.operators import OPERATORS, shared_key_dim
from attend.checkpoints.config import brief
from attend.checkpoints.configured_conversions import as_configured
from attend.checkpoints.detection import Match, listed, normalised, refusal_of_weights, select
from attend.checkpoints.layout import AXES, Converted, Fields, LayerTensors, Layout, Weights
from attend.checkpoints.layouts import OWN, ROPE
from attend.errors import InvalidRequest, pointer
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array, datatype_of

FLOATS = ("float64", "float32", "bfloat16", "float16")
# Field of a spec -> a weight that only layers with this field have
WITH_WEIGHTS = {operator.field: operator.identifying_weight for operator in OPERATORS if operator.identifying_weight}
FLAGS = [field for field in WITH_WEIGHTS if LayerSpec.model_fields[field].default is False]  # which that weight alone determines
# Fields of operators that a layer may have although its tensors do not show it -> their weights, which are 0 then
UNSEEN = {operator.field: operator.axes for operator in OPERATORS if operator.zeros_without_weights}
WITHOUT_INPUTS = [name for operator in OPERATORS if not operator.needs_projections for name in operator.axes]  # weights beside projections


def read_layer(
    tensors: Mapping[str, Array], *, layout: str | None = None, prefix: str = "", spec: Mapping[str, Any] | None = None
) -> tuple[Fields, Weights]:
    """Fields for `LayerSpec` and canonical weights (`query.weight` [out, in], …) of one layer of a checkpoint.

    `tensors`: name -> array, a checkpoint or part of one. `layout`: one of `layouts.NAMES`; needed only if the names fit several.
    `prefix`: the layer's name in the checkpoint, or enough of its beginning to select one (`encoder.layer.3`), with `.` or `/`. `spec`: the
    fields that tensors do not determine (num_heads, rope, window, scale, …); other fields must agree with the tensors. The default dtype is
    that of the tensors; if they differ, float64 if any has it, else float32. `layouts.py` documents other defaults.

    Raises InvalidRequest: an unknown layout, none or several that match, none or several layers below the prefix, tensors that are missing,
    unknown, or of a wrong shape or dtype, a spec that contradicts the tensors or lacks a field.
    """
    return read_match(find_layer(tensors, layout, prefix, given := dict(spec or {})), tensors, given)


def find_layer(tensors: Mapping[str, Array], layout: str | None, prefix: str, given: Mapping[str, Any]) -> Match:
    """The layer that `read_layer` reads. Raises InvalidRequest."""
    if given.get("projections") is False and layout in (None, OWN.name):
        return _without_projections(tensors, prefix)
    return select(tensors, layout, prefix)


def read_match(match: Match, tensors: Mapping[str, Array], given: Fields, conversion: Fields | None = None) -> tuple[Fields, Weights]:
    """`read_layer` for a layer that was found. Raises InvalidRequest.

    `conversion`: what a model's config says about the conversion; `given` then has all fields. Without it, the layout gives defaults.
    """
    if match.layout is OWN and given.get("projections") is False:
        weights = {role: tensors[name] for role, name in match.names.items()}
        return given if "dtype" in given or not weights else {**given, "dtype": _dtype(weights, match.names)}, weights
    if problems := list(_incomplete_groups(match)) or list(_unknown_tensors(match, tensors)):
        raise refusal_of_weights(problems)
    arrays = {role: tensors[name] for role, name in match.names.items()}
    dtype = _dtype(arrays, match.names)
    layer = LayerTensors(arrays, match.names, match.stem, given, conversion or {})
    converted = match.layout.convert(layer)
    if conversion is not None:
        converted = as_configured(layer, converted)
    else:
        _require_fields(match, converted, given)
        weights = converted.weights | _unseen_weights(match.layout, layer, converted)
        converted = replace(converted, weights=weights, assumed=overlaid(match.layout.assumed, converted.assumed))
    flags = [field for field in FLAGS if _shows(match.layout, field)]
    return _infer_spec(converted, layer, dtype, flags), converted.weights


def _unseen_weights(layout: Layout, tensors: LayerTensors, converted: Converted) -> Weights:
    """Weights of 0 of the operators in the caller's spec that frameworks compute without a tensor, if the layout has no names for them."""
    wanted = [axes for field, axes in UNSEEN.items() if tensors.given.get(field) is True and not _shows(layout, field)]
    if not wanted:
        return {}
    heads = _heads(converted.weights, tensors, converted.known, len(converted.weights["query.weight"]))
    return {name: np.zeros([{"heads": heads}[axis] for axis in own], np.float32) for axes in wanted for name, own in axes.items()}


def _shows(layout: Layout, field: str) -> bool:
    """Whether the tensors of a layer of this layout show that its spec has the field."""
    return field not in UNSEEN or WITH_WEIGHTS[field] in layout.roles.values()


def _require_fields(match: Match, converted: Converted, given: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if the spec lacks a field that the layout requires, unless the tensors determine it."""
    required = {"rope": ROPE} if {"inv_freq", "rotary"} & match.names.keys() else {}
    for path, expected in {**required, **match.layout.required_fields}.items():
        name, _, inner = path.partition(".")
        fields, known = given.get(name), converted.known.get(name, {})
        is_absent = name not in given
        if inner:  # required only within a section that is given
            is_absent = isinstance(fields, Mapping) and inner not in known and fields.get(inner) is None
        if is_absent:
            raise InvalidRequest.where(f"/spec/{path.replace('.', '/')}", expected, "nothing")


def _incomplete_groups(match: Match) -> Iterator[tuple[str, str, str]]:
    """(name, expected, got) of each missing tensor of a group of optional tensors that is there in part."""
    by_role = {role: name for name, role in match.layout.roles.items()}
    for group in match.layout.optional:
        present = [role for role in group if role in match.names]
        if present and len(present) < len(group):
            expected = f"a tensor, as beside {listed(match.names[role] for role in present)}"
            yield from ((match.full_name(by_role[role]), expected, "nothing") for role in group if role not in present)


def _unknown_tensors(match: Match, tensors: Mapping[str, Array]) -> Iterator[tuple[str, str, str]]:
    """(name, expected, got) of each tensor below the stem that the layout refuses, or neither has nor ignores."""
    start = f"{match.stem}." if match.stem else ""
    known = set(match.names.values())
    for name in tensors:
        below = normalised(name).removeprefix(start)
        if name in known or not normalised(name).startswith(start):
            continue
        ranks = [rank for pattern, rank in match.layout.ignored.items() if fnmatchcase(below, pattern)]
        if below in match.layout.refused:
            yield name, match.layout.refused[below], f'"{name}"'
        elif None not in ranks and tensors[name].ndim not in ranks:
            yield name, f"only what a layer of layout {match.layout.name} has ({listed(match.layout.roles)})", f'"{name}"'


def _dtype(arrays: Mapping[str, Array], names: Mapping[str, str]) -> str:
    """The dtype of all tensors, or float32 or float64 if they differ. Raises InvalidRequest for integers and empty tensors."""
    kinds = set()
    for role, array in arrays.items():
        if not array.size:
            raise refusal_of_weights([(names[role], "numbers", f"shape {list(array.shape)}")])
        try:
            kind = datatype_of(array).torch
        except KeyError:
            kind = str(array.dtype)
        if kind not in FLOATS:
            raise refusal_of_weights([(names[role], "floating-point numbers: " + ", ".join(FLOATS), kind)])
        kinds.add(kind)
    return kinds.pop() if len(kinds) == 1 else "float64" if "float64" in kinds else "float32"


def _without_projections(tensors: Mapping[str, Array], prefix: str) -> Match:
    """A layer of layout `attend` without projections. It can only have weights that are not applied to inputs."""
    root = prefix.rstrip("./")
    start = f"{normalised(root)}." if root else ""
    names = {normalised(name).removeprefix(start): name for name in tensors if normalised(name).startswith(start)}
    if unknown := [name for plain, name in names.items() if plain not in WITHOUT_INPUTS]:
        raise refusal_of_weights(
            [(name, f"none but {', '.join(WITHOUT_INPUTS)}, since nothing is projected", f'"{name}"') for name in unknown]
        )
    return Match(OWN, normalised(root), root, names, identified=True)


def _infer_spec(converted: Converted, tensors: LayerTensors, dtype: str, flags: list[str]) -> Fields:
    """Fields for LayerSpec. `flags`: those of FLAGS that the tensors determine. Raises InvalidRequest."""
    weights = converted.weights
    known: Fields = _widths(weights, tensors, converted.known) | converted.known
    known |= {"bias": biases_of(weights), "projections": True} | {field: WITH_WEIGHTS[field] in weights for field in flags}
    absent = [field for field, weight in WITH_WEIGHTS.items() if weight not in weights]
    assumed: Fields = {"dtype": dtype} | {field: value for field, value in converted.assumed.items() if field not in absent}
    _check_features(tensors, assumed, absent)
    inferred = assumed | known
    # null leaves a number to be inferred; for a section, such as `rope`, it says that there is none
    given = {name: x for name, x in tensors.given.items() if x is not None or isinstance(inferred.get(name, {}), Mapping)}
    # `known` has one bias where all projections have the same
    if isinstance(bias := given.get("bias"), Mapping) and set(bias) == set(PROJECTIONS) and len(set(map(str, bias.values()))) == 1:
        given["bias"] = bias["query"]
    _check_agreement(known, given)
    fields = overlaid(overlaid(assumed, given), known)
    _check_shapes(weights, tensors, fields)
    return fields


def _widths(weights: Weights, tensors: LayerTensors, known: Mapping[str, Any]) -> Fields:
    """Every width and number of heads, from the matrices [out, in] and the number of heads or their width."""
    (q_out, q_in), (k_out, k_in), (v_out, v_in), (o_out, o_in) = (weights[f"{name}.weight"].shape for name in PROJECTIONS)
    heads = _heads(weights, tensors, known, q_out)
    head_dim = q_out // heads
    inferred: Fields = {}
    for operator in OPERATORS:
        if operator.identifying_weight in weights:
            inferred |= operator.infer_fields(weights, heads, tensors.misfit)
    kv_heads, rest = divmod(k_out, head_dim - shared_key_dim(inferred))
    if rest or not kv_heads or heads % kv_heads:
        raise tensors.misfit("key.weight", f"a number of heads that divides {heads} for the keys, {head_dim} wide each")
    value_head_dim, rest = divmod(v_out, kv_heads)
    if rest or not value_head_dim:
        raise tensors.misfit("value.weight", f"{kv_heads} heads of one width for the values")
    if o_in != heads * value_head_dim:
        raise tensors.misfit("output.weight", f"{heads} x {value_head_dim} inputs of the output projection, the heads' values")
    fields: Fields = {"d_model": q_in, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim}
    return fields | {"key_dim": k_in, "value_dim": v_in, "output_dim": o_out} | inferred


def _heads(weights: Weights, tensors: LayerTensors, known: Mapping[str, Any], rows: int) -> int:
    """The number of heads: from an axis of the layout or of a weight, or a norm; else from the caller's num_heads or head_dim."""
    counts: list[int | None] = [known.get("num_heads")]
    if (norm := weights.get("query_norm.weight")) is not None:
        if not len(norm) or rows % len(norm):
            raise tensors.misfit("query_norm.weight", f"a width that divides {rows}, the queries' rows")
        is_single = 1 in (known.get("num_heads"), tensors.number("num_heads")) or tensors.number("head_dim") == rows
        if len(norm) == rows and not is_single:
            expected = "a norm as wide as one head. One as wide as all heads (OLMo-2, OLMo-3, MiniMax-M2) is not read here; "
            raise tensors.misfit("query_norm.weight", expected + "a layer of a single head needs num_heads 1")
        counts.append(rows // len(norm))
    counts += [weights[name].shape[axes.index("heads")] for name, axes in AXES.items() if "heads" in axes and name in weights]
    heads = next((count for count in counts if count), None)
    if heads and rows and rows % heads == 0:
        return heads
    if heads:
        raise tensors.misfit("query.weight", f"rows for {heads} heads")
    heads, head_dim = tensors.number("num_heads"), tensors.number("head_dim")
    if heads is None and head_dim is None:
        raise InvalidRequest.where("/spec/num_heads", "the number of heads, which these tensors do not determine", "nothing")
    field, divisor = ("head_dim", head_dim) if heads is None else ("num_heads", heads)
    if not rows or not divisor or rows % divisor:
        raise InvalidRequest.where(f"/spec/{field}", f"a divisor of {rows}, the queries' rows", str(divisor))
    return heads or rows // divisor


def biases_of(weights: Mapping[str, Array]) -> bool | dict[str, bool]:
    """The field `bias` of the spec that canonical weights have."""
    has = {name: f"{name}.bias" in weights for name in PROJECTIONS}
    return has["query"] if len(set(has.values())) == 1 else has


def _check_shapes(weights: Weights, tensors: LayerTensors, fields: Fields) -> None:
    """Raises InvalidRequest for a weight that a layer of these fields does not have, or has in another shape."""
    try:
        shapes = LayerSpec.model_validate(fields).weight_shapes()
    except ValueError:  # pydantic's: the caller's spec has another error, which is found where it is read
        return
    for name, array in weights.items():
        if array.shape != shapes.get(name):
            raise tensors.misfit(name, f"shape {list(shapes[name])}" if name in shapes else "none, by the other tensors and the spec")


def _check_features(tensors: LayerTensors, assumed: Fields, absent: list[str]) -> None:
    """Raises InvalidRequest if the spec and the tensors disagree on norms, table or sinks, or if the spec lacks the kind of a tensor."""
    for field, weight in WITH_WEIGHTS.items():
        present, value = field not in absent, tensors.given.get(field)
        if isinstance(value, Mapping) and value.get("weights") == "none" and not present:
            continue
        if field in tensors.given and (value is not None and value is not False) != present:
            raise InvalidRequest.where(
                f"/spec/{field}", f"one, as the tensor {weight} is there" if present else "none, as no tensor is there", brief(value)
            )
        if present and field not in assumed and field not in tensors.given and field not in FLAGS:
            raise InvalidRequest.where(f"/spec/{field}", f"the kind of the tensor {weight}", "nothing")


def _check_agreement(known: Mapping[str, Any], given: Mapping[str, Any], *path: str) -> None:
    """Raises InvalidRequest if a given field, at any depth, contradicts the tensors."""
    for name, value in known.items():
        other = given.get(name, value)
        if isinstance(other, Mapping) and isinstance(value, Mapping):
            _check_agreement(value, other, *path, name)
        elif other != value or isinstance(other, bool) != isinstance(value, bool):
            raise InvalidRequest.where(pointer(["spec", *path, name]), f"{brief(value)}, as the tensors have it", brief(other))


def overlaid(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Fields:
    """The fields of both, merged at every depth; `upper` wins."""
    both = {name for name, x in upper.items() if isinstance(x, Mapping) and isinstance(lower.get(name), Mapping)}
    return {**lower, **{name: overlaid(lower[name], x) if name in both else x for name, x in upper.items()}}
