"""The spec of canonical weights: what their shapes tell, beside what the caller said and what the layout assumes.

Shapes tell widths and, once the head count is known, everything about heads. What tensors tell and the caller contradicts is refused at
the caller's field; a tensor that does not fit the others is refused by its own name.
"""

from collections.abc import Mapping
from typing import Any

from service.checkpoints.layout import Fields, Found, Read, Weights
from service.checkpoints.problems import field_pointer, shape_of, weight_pointer
from service.errors import InvalidRequest
from service.spec import PROJECTIONS

WITH_WEIGHTS = {"qk_norm": "query_norm.weight", "relative_bias": "relative_bias", "sinks": "sinks"}


def settle(read: Read, found: Found, dtype: str) -> Fields:
    """Fields for LayerSpec. Raises InvalidRequest."""
    weights = read.weights
    told: Fields = _widths(weights, found, read.told) | read.told
    told |= {"bias": _biases(weights), "sinks": "sinks" in weights, "projections": True}
    absent = [field for field, weight in WITH_WEIGHTS.items() if weight not in weights]
    assumed: Fields = {"dtype": dtype} | {field: value for field, value in read.assumed.items() if field not in absent}
    _check_extras(found, assumed, absent)
    known = assumed | told
    given = {name: x for name, x in found.given.items() if x is not None or isinstance(known.get(name, {}), Mapping)}
    if isinstance(bias := given.get("bias"), Mapping) and set(bias) == set(PROJECTIONS) and len(set(map(str, bias.values()))) == 1:
        given["bias"] = bias["query"]
    _hold_against(told, given)
    return _overlaid(_overlaid(assumed, given), told)


def _check_extras(found: Found, assumed: Fields, absent: list[str]) -> None:
    """Norms, a table and sinks are where the spec has them and nowhere else; of what kind, a tensor alone does not say."""
    for field, weight in WITH_WEIGHTS.items():
        there, said = field not in absent, found.given.get(field)
        if field in found.given and (said is not None and said is not False) != there:
            raise InvalidRequest.where(field_pointer(field), "one" if there else "none, as no tensor is there", _brief(said))
        if there and field not in assumed and field not in found.given and field != "sinks":
            raise InvalidRequest.where(field_pointer(field), f"what kind the tensor {weight} is of", "nothing")


def _widths(weights: Weights, found: Found, told: Mapping[str, Any]) -> Fields:
    """Every width and head count: from matrices [out, in] and one of head count or head width."""
    (q_out, q_in), (k_out, k_in), (v_out, v_in), (o_out, o_in) = (weights[f"{name}.weight"].shape for name in PROJECTIONS)
    heads = _heads(weights, found, told, q_out)
    head_dim = q_out // heads
    kv_heads, rest = divmod(k_out, head_dim)
    if rest or not kv_heads or heads % kv_heads:
        raise _unfit(found, "key.weight", f"a number of heads that divides {heads} for the keys, {head_dim} wide each")
    value_head_dim, rest = divmod(v_out, kv_heads)
    if rest or not value_head_dim:
        raise _unfit(found, "value.weight", f"{kv_heads} heads of one width for the values")
    if o_in != heads * value_head_dim:
        raise _unfit(found, "output.weight", f"{heads} x {value_head_dim} inputs of the output projection, the heads' values")
    _check_others(weights, found, heads, head_dim)
    fields = {"d_model": q_in, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim}
    return fields | {"key_dim": k_in, "value_dim": v_in, "output_dim": o_out}


def _heads(weights: Weights, found: Found, told: Mapping[str, Any], rows: int) -> int:
    """The head count: from an axis of the layout, sinks, a table or the width of a norm; else the caller's, or by the caller's head_dim."""
    counts: list[int | None] = [told.get("num_heads")]
    if (norm := weights.get("query_norm.weight")) is not None:
        if not len(norm) or rows % len(norm):
            raise _unfit(found, "query_norm.weight", f"a width that divides {rows}, the queries' rows")
        if len(norm) == rows and 1 not in (told.get("num_heads"), found.number("num_heads")) and found.number("head_dim") != rows:
            expected = "a norm as wide as one head. One as wide as all heads (OLMo-2, OLMo-3, MiniMax-M2) is not read here; "
            raise _unfit(found, "query_norm.weight", expected + "of a layer of a single head, num_heads 1 must be said")
        counts.append(rows // len(norm))
    counts += [weights[name].shape[-1] for name in ("relative_bias", "sinks") if name in weights]
    heads = next((count for count in counts if count), None)
    if heads and rows and rows % heads == 0:
        return heads
    if heads:
        raise _unfit(found, "query.weight", f"rows for {heads} heads")
    heads, head_dim = found.number("num_heads"), found.number("head_dim")
    if heads is None and head_dim is None:
        raise InvalidRequest.where(field_pointer("num_heads"), "the number of heads, which these tensors do not tell", "nothing")
    field, divisor = ("head_dim", head_dim) if heads is None else ("num_heads", heads)
    if not rows or not divisor or rows % divisor:
        raise InvalidRequest.where(field_pointer(field), f"a divisor of {rows}, the queries' rows", str(divisor))
    return divisor if field == "num_heads" else rows // divisor


def _check_others(weights: Weights, found: Found, heads: int, head_dim: int) -> None:
    """Biases as long as their matrix has rows, norms as wide as a head, a number for each head."""
    lengths = {f"{name}.bias": len(weights[f"{name}.weight"]) for name in PROJECTIONS}
    lengths |= {"query_norm.weight": head_dim, "key_norm.weight": head_dim, "sinks": heads}
    for name, length in lengths.items():
        if name in weights and weights[name].shape != (length,):
            raise _unfit(found, name, f"{length} numbers for {name}")
    if "relative_bias" in weights and weights["relative_bias"].shape[1] != heads:
        raise _unfit(found, "relative_bias", f"shape [buckets, {heads}]")


def _unfit(found: Found, canonical: str, expected: str) -> InvalidRequest:
    """A refusal of the tensor that a canonical weight came from: of that name, or the packed one that held it."""
    kind = canonical.rpartition(".")[2]
    part = next((part for part in (canonical, f"qkv.{kind}", f"kv.{kind}") if found.has(part)), None)
    if part is None:  # from elsewhere in the checkpoint
        return InvalidRequest.where(weight_pointer(canonical), expected, "another")
    return InvalidRequest.where(weight_pointer(found.names[part]), expected, shape_of(found.arrays[part]))


def _biases(weights: Weights) -> bool | dict[str, bool]:
    has = {name: f"{name}.bias" in weights for name in PROJECTIONS}
    return has["query"] if len(set(has.values())) == 1 else has


def _hold_against(told: Mapping[str, Any], given: Mapping[str, Any], *path: str) -> None:
    """Raises InvalidRequest where the caller says otherwise than the tensors, at any depth."""
    for name, value in told.items():
        said = given.get(name, value)
        if isinstance(said, Mapping) and isinstance(value, Mapping):
            _hold_against(value, said, *path, name)
        elif said != value or isinstance(said, bool) != isinstance(value, bool):
            raise InvalidRequest.where(field_pointer(*path, name), f"{_brief(value)}, as the tensors tell", _brief(said))


def _overlaid(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Fields:
    """The upper over the lower, and so within what is a mapping in both."""
    both = {name for name, x in upper.items() if isinstance(x, Mapping) and isinstance(lower.get(name), Mapping)}
    return {**lower, **{name: _overlaid(lower[name], x) if name in both else x for name, x in upper.items()}}


def _brief(value: Any) -> str:
    """A value in JSON's words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_brief(x)}" for name, x in value.items())[:100] or "{}"
    return str(value)[:60]
