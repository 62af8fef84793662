"""Infers the spec of a layer from the shapes of its canonical weights, the caller's spec and the defaults of the layout.

Shapes determine the widths and, once the number of heads is known, all other fields about heads. An InvalidRequest points to the field of
the caller's spec that contradicts the tensors, or to the tensor that does not fit the others, by its name in the checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from service.checkpoints.config import brief
from service.checkpoints.layout import Converted, Fields, LayerTensors, Weights
from service.checkpoints.refusals import field_pointer
from service.errors import InvalidRequest
from service.spec import LayerSpec
from service.spec_parts import PROJECTIONS

WITH_WEIGHTS = {  # field of a spec -> a weight that only layers with this field have
    "qk_norm": "query_norm.weight",
    "relative_bias": "relative_bias",
    "sinks": "sinks",
    "output_gate": "gate.weight",
    "latent": "key_value_down.weight",
    "differential": "lambda_q1",
    "relative_scores": "position_key.weight",
    "indexer": "index_key.weight",
}


def infer_spec(converted: Converted, tensors: LayerTensors, dtype: str) -> Fields:
    """Fields for LayerSpec. Raises InvalidRequest."""
    weights = converted.weights
    known: Fields = _widths(weights, tensors, converted.known) | converted.known
    known |= {"bias": _biases(weights), "sinks": "sinks" in weights, "projections": True}
    absent = [field for field, weight in WITH_WEIGHTS.items() if weight not in weights]
    assumed: Fields = {"dtype": dtype} | {field: value for field, value in converted.assumed.items() if field not in absent}
    _check_features(tensors, assumed, absent)
    inferred = assumed | known
    given = {name: x for name, x in tensors.given.items() if x is not None or isinstance(inferred.get(name, {}), Mapping)}
    if isinstance(bias := given.get("bias"), Mapping) and set(bias) == set(PROJECTIONS) and len(set(map(str, bias.values()))) == 1:
        given["bias"] = bias["query"]
    _check_agreement(known, given)
    fields = overlaid(overlaid(assumed, given), known)
    _check_shapes(weights, tensors, fields)
    return fields


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
                field_pointer(field), f"one, as the tensor {weight} is there" if present else "none, as no tensor is there", brief(value)
            )
        if present and field not in assumed and field not in tensors.given and field != "sinks":
            raise InvalidRequest.where(field_pointer(field), f"the kind of the tensor {weight}", "nothing")


def _widths(weights: Weights, tensors: LayerTensors, known: Mapping[str, Any]) -> Fields:
    """Every width and number of heads, from the matrices [out, in] and the number of heads or their width."""
    (q_out, q_in), (k_out, k_in), (v_out, v_in), (o_out, o_in) = (weights[f"{name}.weight"].shape for name in PROJECTIONS)
    heads = _heads(weights, tensors, known, q_out)
    head_dim = q_out // heads
    latent = _latent(weights, tensors, head_dim)
    kv_heads, rest = divmod(k_out, head_dim - latent.get("rope_key_dim", 0))
    if rest or not kv_heads or heads % kv_heads:
        raise tensors.misfit("key.weight", f"a number of heads that divides {heads} for the keys, {head_dim} wide each")
    value_head_dim, rest = divmod(v_out, kv_heads)
    if rest or not value_head_dim:
        raise tensors.misfit("value.weight", f"{kv_heads} heads of one width for the values")
    if o_in != heads * value_head_dim:
        raise tensors.misfit("output.weight", f"{heads} x {value_head_dim} inputs of the output projection, the heads' values")
    fields: Fields = {"d_model": q_in, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim}
    fields |= {"key_dim": k_in, "value_dim": v_in, "output_dim": o_out}
    if (gate := weights.get("gate.weight")) is not None:
        kinds = {heads: "headwise", heads * value_head_dim: "elementwise"}
        granularity = {"granularity": kinds[len(gate)]} if len(gate) in kinds and value_head_dim > 1 else {}
        fields["output_gate"] = {"bias": "gate.bias" in weights, **granularity}
    if "relative_bias" in weights:
        fields["relative_bias"] = {"buckets": len(weights["relative_bias"])}
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
    if (shared := weights.get("rope_key.weight")) is None or not 0 < len(shared) < head_dim:
        raise tensors.misfit("rope_key.weight", f"1 to {head_dim - 1} rows, for heads of {head_dim} numbers")
    rank = len(weights["query_down.weight"]) if "query_down.weight" in weights else None
    ranks = {"query_rank": rank, "key_value_rank": len(weights["key_value_down.weight"])}
    return ranks | {"rope_key_dim": len(shared), "bias": "key_value_down.bias" in weights}


def _heads(weights: Weights, tensors: LayerTensors, known: Mapping[str, Any], rows: int) -> int:
    """The number of heads: from an axis of the layout, sinks, a table or a norm; else from the caller's num_heads or head_dim."""
    counts: list[int | None] = [known.get("num_heads")]
    if (norm := weights.get("query_norm.weight")) is not None:
        if not len(norm) or rows % len(norm):
            raise tensors.misfit("query_norm.weight", f"a width that divides {rows}, the queries' rows")
        is_single = 1 in (known.get("num_heads"), tensors.number("num_heads")) or tensors.number("head_dim") == rows
        if len(norm) == rows and not is_single:
            expected = "a norm as wide as one head. One as wide as all heads (OLMo-2, OLMo-3, MiniMax-M2) is not read here; "
            raise tensors.misfit("query_norm.weight", expected + "a layer of a single head needs num_heads 1")
        counts.append(rows // len(norm))
    counts += [weights[name].shape[-1] for name in ("relative_bias", "sinks") if name in weights]
    heads = next((count for count in counts if count), None)
    if heads and rows and rows % heads == 0:
        return heads
    if heads:
        raise tensors.misfit("query.weight", f"rows for {heads} heads")
    heads, head_dim = tensors.number("num_heads"), tensors.number("head_dim")
    if heads is None and head_dim is None:
        raise InvalidRequest.where(field_pointer("num_heads"), "the number of heads, which these tensors do not determine", "nothing")
    field, divisor = ("head_dim", head_dim) if heads is None else ("num_heads", heads)
    if not rows or not divisor or rows % divisor:
        raise InvalidRequest.where(field_pointer(field), f"a divisor of {rows}, the queries' rows", str(divisor))
    return divisor if field == "num_heads" else rows // divisor


def _biases(weights: Weights) -> bool | dict[str, bool]:
    has = {name: f"{name}.bias" in weights for name in PROJECTIONS}
    return has["query"] if len(set(has.values())) == 1 else has


def _check_agreement(known: Mapping[str, Any], given: Mapping[str, Any], *path: str) -> None:
    """Raises InvalidRequest if a given field, at any depth, contradicts the tensors."""
    for name, value in known.items():
        other = given.get(name, value)
        if isinstance(other, Mapping) and isinstance(value, Mapping):
            _check_agreement(value, other, *path, name)
        elif other != value or isinstance(other, bool) != isinstance(value, bool):
            raise InvalidRequest.where(field_pointer(*path, name), f"{brief(value)}, as the tensors have it", brief(other))


def overlaid(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Fields:
    """The fields of both, merged at every depth; `upper` wins."""
    both = {name for name, x in upper.items() if isinstance(x, Mapping) and isinstance(lower.get(name), Mapping)}
    return {**lower, **{name: overlaid(lower[name], x) if name in both else x for name, x in upper.items()}}
