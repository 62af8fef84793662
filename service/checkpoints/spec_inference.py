"""Infers the spec of a layer from the shapes of its canonical weights, the caller's spec and the defaults of the layout.

Shapes determine the widths and, once the number of heads is known, all other fields about heads. An InvalidRequest points to the field of
the caller's spec that contradicts the tensors, or to the tensor that does not fit the others, by its name in the checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from service.checkpoints.layout import Converted, Fields, LayerTensors, Weights
from service.checkpoints.refusals import field_pointer, shape_of, weight_pointer
from service.errors import InvalidRequest
from service.spec_parts import PROJECTIONS

WITH_WEIGHTS = {"qk_norm": "query_norm.weight", "relative_bias": "relative_bias", "sinks": "sinks", "output_gate": "gate.weight"}
WITH_WEIGHTS |= {"latent": "key_value_down.weight", "differential": "lambda_q1", "relative_scores": "position_key.weight"}
WITH_WEIGHTS |= {"indexer": "index_key.weight"}


def infer_spec(converted: Converted, tensors: LayerTensors, dtype: str) -> Fields:
    """Fields for LayerSpec. Raises InvalidRequest."""
    weights = converted.weights
    known_fields: Fields = _widths(weights, tensors, converted.known) | converted.known
    known_fields |= {"bias": _biases(weights), "sinks": "sinks" in weights, "projections": True}
    absent = [field for field, weight in WITH_WEIGHTS.items() if weight not in weights]
    assumed: Fields = {"dtype": dtype} | {field: value for field, value in converted.assumed.items() if field not in absent}
    _check_extras(tensors, assumed, absent)
    known = assumed | known_fields
    given = {name: x for name, x in tensors.given.items() if x is not None or isinstance(known.get(name, {}), Mapping)}
    if isinstance(bias := given.get("bias"), Mapping) and set(bias) == set(PROJECTIONS) and len(set(map(str, bias.values()))) == 1:
        given["bias"] = bias["query"]
    _check_agreement(known_fields, given)
    return _overlaid(_overlaid(assumed, given), known_fields)


def _check_extras(tensors: LayerTensors, assumed: Fields, absent: list[str]) -> None:
    """Raises InvalidRequest if the spec and the tensors disagree on norms, table or sinks, or if the spec lacks the kind of a tensor."""
    for field, weight in WITH_WEIGHTS.items():
        present, value = field not in absent, tensors.given.get(field)
        if isinstance(value, Mapping) and value.get("weights") == "none" and not present:
            continue
        if field in tensors.given and (value is not None and value is not False) != present:
            raise InvalidRequest.where(
                field_pointer(field), f"one, as the tensor {weight} is there" if present else "none, as no tensor is there", _brief(value)
            )
        if present and field not in assumed and field not in tensors.given and field != "sinks":
            raise InvalidRequest.where(field_pointer(field), f"the kind of the tensor {weight}", "nothing")


def _widths(weights: Weights, tensors: LayerTensors, known_fields: Mapping[str, Any]) -> Fields:
    """Every width and number of heads, from the matrices [out, in] and the number of heads or their width."""
    (q_out, q_in), (k_out, k_in), (v_out, v_in), (o_out, o_in) = (weights[f"{name}.weight"].shape for name in PROJECTIONS)
    heads = _heads(weights, tensors, known_fields, q_out)
    head_dim = q_out // heads
    latent = _latent(weights, tensors, head_dim)
    kv_heads, rest = divmod(k_out, head_dim - latent.get("rope_key_dim", 0))
    if rest or not kv_heads or heads % kv_heads:
        raise _unfit(tensors, "key.weight", f"a number of heads that divides {heads} for the keys, {head_dim} wide each")
    value_head_dim, rest = divmod(v_out, kv_heads)
    if rest or not value_head_dim:
        raise _unfit(tensors, "value.weight", f"{kv_heads} heads of one width for the values")
    if o_in != heads * value_head_dim:
        raise _unfit(tensors, "output.weight", f"{heads} x {value_head_dim} inputs of the output projection, the heads' values")
    _check_others(weights, tensors, heads, head_dim)
    fields: Fields = _gate(weights, tensors, heads, value_head_dim)
    fields |= {"d_model": q_in, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim}
    fields |= {"key_dim": k_in, "value_dim": v_in, "output_dim": o_out}
    if latent:
        (_, of_queries), (_, of_keys) = (
            weights.get(f"{name}_down.weight", weights["query.weight"]).shape for name in ("query", "key_value")
        )
        fields |= {"latent": latent, "d_model": of_queries, "key_dim": of_keys, "value_dim": of_keys}
    return fields


def _latent(weights: Weights, tensors: LayerTensors, head_dim: int) -> Fields:
    """What the tensors of multi-head latent attention show of it; {} for other layers. Raises InvalidRequest for shapes that do not fit."""
    if "key_value_down.weight" not in weights:
        return {}
    if (shared := weights.get("rope_key.weight")) is None or shared.ndim != 2 or not 0 < len(shared) < head_dim:
        raise _unfit(tensors, "rope_key.weight", f"1 to {head_dim - 1} rows, for heads of {head_dim} numbers")
    for name in ("query_down", "key_value_down"):
        if f"{name}.weight" in weights and weights[f"{name}.weight"].ndim != 2:
            raise _unfit(tensors, f"{name}.weight", "shape [rank, in]")
    rank = len(weights["query_down.weight"]) if "query_down.weight" in weights else None
    ranks = {"query_rank": rank, "key_value_rank": len(weights["key_value_down.weight"])}
    return ranks | {"rope_key_dim": len(shared), "bias": "key_value_down.bias" in weights}


def _gate(weights: Weights, tensors: LayerTensors, heads: int, value_head_dim: int) -> Fields:
    """What the tensors of an output gate show of it. Raises InvalidRequest for a shape that is not that of a gate."""
    if (matrix := weights.get("gate.weight")) is None:
        return {}
    widths, inputs = {heads * value_head_dim: "elementwise", heads: "headwise"}, weights["query.weight"].shape[1]
    if matrix.ndim != 2 or matrix.shape[0] not in widths or matrix.shape[1] != inputs:
        raise _unfit(tensors, "gate.weight", f"shape [{heads * value_head_dim}, {inputs}], or [{heads}, {inputs}] for one gate per head")
    bias = weights.get("gate.bias")
    if bias is not None and bias.shape != matrix.shape[:1]:
        raise _unfit(tensors, "gate.bias", f"{len(matrix)} numbers")
    return {"output_gate": {"bias": bias is not None} | ({"granularity": widths[len(matrix)]} if value_head_dim > 1 else {})}


def _heads(weights: Weights, tensors: LayerTensors, known_fields: Mapping[str, Any], rows: int) -> int:
    """The number of heads: from an axis of the layout, sinks, a table or a norm; else from the caller's num_heads or head_dim."""
    counts: list[int | None] = [known_fields.get("num_heads")]
    if (norm := weights.get("query_norm.weight")) is not None:
        if not len(norm) or rows % len(norm):
            raise _unfit(tensors, "query_norm.weight", f"a width that divides {rows}, the queries' rows")
        if (
            len(norm) == rows
            and 1 not in (known_fields.get("num_heads"), tensors.number("num_heads"))
            and tensors.number("head_dim") != rows
        ):
            expected = "a norm as wide as one head. One as wide as all heads (OLMo-2, OLMo-3, MiniMax-M2) is not read here; "
            raise _unfit(tensors, "query_norm.weight", expected + "a layer of a single head needs num_heads 1")
        counts.append(rows // len(norm))
    counts += [weights[name].shape[-1] for name in ("relative_bias", "sinks") if name in weights]
    heads = next((count for count in counts if count), None)
    if heads and rows and rows % heads == 0:
        return heads
    if heads:
        raise _unfit(tensors, "query.weight", f"rows for {heads} heads")
    heads, head_dim = tensors.number("num_heads"), tensors.number("head_dim")
    if heads is None and head_dim is None:
        raise InvalidRequest.where(field_pointer("num_heads"), "the number of heads, which these tensors do not determine", "nothing")
    field, divisor = ("head_dim", head_dim) if heads is None else ("num_heads", heads)
    if not rows or not divisor or rows % divisor:
        raise InvalidRequest.where(field_pointer(field), f"a divisor of {rows}, the queries' rows", str(divisor))
    return divisor if field == "num_heads" else rows // divisor


def _check_others(weights: Weights, tensors: LayerTensors, heads: int, head_dim: int) -> None:
    """Raises InvalidRequest for a bias, norm, sinks or table whose shape does not fit the matrices and heads."""
    lengths = {f"{name}.bias": len(weights[f"{name}.weight"]) for name in PROJECTIONS}
    lengths |= {"query_norm.weight": head_dim, "key_norm.weight": head_dim, "sinks": heads}
    for name, length in lengths.items():
        if name in weights and weights[name].shape != (length,) and not (weights[name].ndim == 2 and "norm" in name):
            raise _unfit(tensors, name, f"{length} numbers for {name}")
    if "relative_bias" in weights and weights["relative_bias"].shape[1] != heads:
        raise _unfit(tensors, "relative_bias", f"shape [buckets, {heads}]")


def _unfit(tensors: LayerTensors, canonical: str, expected: str) -> InvalidRequest:
    """The error about the checkpoint's tensor from which a canonical weight was made."""
    kind = canonical.rpartition(".")[2]
    part = next((part for part in (canonical, f"qkv.{kind}", f"kv.{kind}") if tensors.has(part)), None)
    if part is None:  # T5's table of another block
        return InvalidRequest.where(weight_pointer(canonical), expected, "another")
    return InvalidRequest.where(weight_pointer(tensors.names[part]), expected, shape_of(tensors.arrays[part]))


def _biases(weights: Weights) -> bool | dict[str, bool]:
    has = {name: f"{name}.bias" in weights for name in PROJECTIONS}
    return has["query"] if len(set(has.values())) == 1 else has


def _check_agreement(known_fields: Mapping[str, Any], given: Mapping[str, Any], *path: str) -> None:
    """Raises InvalidRequest if a given field, at any depth, contradicts the tensors."""
    for name, value in known_fields.items():
        other = given.get(name, value)
        if isinstance(other, Mapping) and isinstance(value, Mapping):
            _check_agreement(value, other, *path, name)
        elif other != value or isinstance(other, bool) != isinstance(value, bool):
            raise InvalidRequest.where(field_pointer(*path, name), f"{_brief(value)}, as the tensors have it", _brief(other))


def _overlaid(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Fields:
    """The fields of both, merged at every depth; `upper` wins."""
    both = {name for name, x in upper.items() if isinstance(x, Mapping) and isinstance(lower.get(name), Mapping)}
    return {**lower, **{name: _overlaid(lower[name], x) if name in both else x for name, x in upper.items()}}


def _brief(value: Any) -> str:
    """A value as JSON."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_brief(x)}" for name, x in value.items())[:100] or "{}"
    return str(value)[:60]
