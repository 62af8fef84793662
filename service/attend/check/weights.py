"""Reads the weights of a candidate under canonical names, from a module's parameters or an object's attributes.

The orientation of torch.nn.Linear and the packing of torch, GPT-2 and DeepSeek are known; for other matrices, `Convention` must state them.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, get_args

import numpy as np

from attend.attention.operators import OPERATORS
from attend.check.convention import BARE, UNTYPED, WEIGHT_ROLES, Ambiguous, Convention, Fused, Orientation, parse_weight_name
from attend.checkpoints.reader import FLAGS, WITH_WEIGHTS
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array

QKV, QUERY_GATE = PROJECTIONS[:3], ("query", "gate")
HINTS = {  # what the unusual name of a weight has that speaks for a role
    "query": r"quer|q(?!kv|vk)(?!uv)(_|$|\.)|(^|_|\.)q(_|$|\.)|q_?in|toq",
    "key": r"key|k(_|$|\.)|k_?in",
    "value": r"val|v(_|$|\.)|v_?in",
    "output": r"out|proj|final|unify|merge|combine|fc|o(_|$|\.)|0$",
    "qkv": r"qkv|kqv|qvk|vqk|vkq|kvq|query.*key.*value|in_?proj|attn",
    "kv": r"kv|key.*val",
}
_Tensor = tuple[Array, str | None]  # an array, and how a matrix is applied: "in,out", "out,in" or unknown


def read_weights(owner: Any, is_module: bool, convention: Convention) -> dict[str, Array]:
    """Canonical name -> float64 array, matrices [out, in]; empty if the object has no weights. Packed matrices are not split yet.

    ValueError: a parameter of unknown name, one found twice, or an unknown orientation.
    """
    if convention.weights is not None and not convention.names_weights:
        return {name: np.asarray(array, np.float64) for name, array in convention.weights.items()}
    tensors = dict(_of_module(owner, convention) if is_module else _of_attributes(owner, convention))
    given, paths = _given_names(convention, tensors), dict[str, list[str]]()
    for path in tensors:
        # of an object without layers, `q` or `output` alone is a result of the last call
        known = is_module or path.lower() not in BARE
        if name := given.get(path) or (parse_weight_name(path) if known else None):
            paths.setdefault(name, []).append(path)
        elif is_module and (norm := _norm_at(owner, path)):
            raise Ambiguous(f"the meaning of {path!r}; pass the attention alone", "left_out", [(*convention.left_out, norm)])
        elif is_module:
            raise _unknown(f"the meaning of {path!r}", tensors, "pass the attention alone, or ")
    if not paths and any(array.ndim == 2 and path.lower() not in BARE for path, (array, _) in tensors.items()):
        raise _unknown("which arrays are the weights", tensors, "pass weights={} if none are, or ")
    weights: dict[str, Array] = {}
    for name, same in paths.items():
        if len({re.sub(r"\d+", "#", path) for path in same}) > 1:
            role, _, kind = name.partition(".")
            raise _unknown(f"which is the {kind} of {role}, {' or '.join(map(repr, same))}", tensors)
        arrays = [_oriented(name, path, *tensors[path]) for path in same]  # several: one per head
        weights[name] = np.concatenate(arrays, axis=1 if name == "output.weight" else 0)
    return weights


def _given_names(convention: Convention, tensors: Mapping[str, _Tensor]) -> dict[str, str]:
    """Path -> canonical name as the option `weights` has it. A role without a kind names a layer, or a matrix."""
    names: dict[str, str] = {}
    for name, path in (convention.weights or {}).items():
        role, _, kind = name.partition(".")
        places = {path: kind or "weight"} if kind else {path: "weight", f"{path}.weight": "weight", f"{path}.bias": "bias"}
        found = {place: role if role in UNTYPED else f"{role}.{kind}" for place, kind in places.items() if place in tensors}
        if not found or role not in WEIGHT_ROLES or kind not in ("", "weight", "bias"):
            raise _unknown(f"what {name!r}: {path!r} in weights names", tensors)
        names |= found
    return names


def _unknown(subject: str, tensors: Mapping[str, _Tensor], otherwise: str = "") -> Ambiguous:
    """The error that asks for the names of the weights."""
    example = 'weights={"query": NAME, "key": NAME, "value": NAME, "output": NAME} (or "qkv", or "query.bias" alone)'
    listed = ", ".join(f"{path} {list(array.shape)}" for path, (array, _) in tensors.items())
    message = f"{subject}; {otherwise}pass {example}, with names among {listed}"
    return Ambiguous(message, "weights", list(_guessed_names(tensors)))


def _guessed_names(tensors: Mapping[str, _Tensor]) -> Iterator[dict[str, str]]:
    """What layers or matrices of unknown names may be: all that their names speak for equally. Others keep what their names say.

    A layer is not tried as what another one is called, since a layer that is used for another by mistake would then count as right.
    """
    layers = dict.fromkeys(re.sub(r"\.(weight|bias)$", "", path) for path, (array, _) in tensors.items() if array.ndim > 1)
    by_role: dict[str, list[str]] = {}
    for layer in layers:
        by_role.setdefault((parse_weight_name(layer) or "").partition(".")[0], []).append(layer)
    known = {role for role, same in by_role.items() if role and len({re.sub(r"\d+", "#", layer) for layer in same}) == 1}
    loose = [layer for role, same in by_role.items() if role not in known for layer in same]
    guesses = []
    for roles in (QKV, (*QKV, "output"), ("qkv",), ("qkv", "output"), ("query", "kv"), ("query", "kv", "output")):
        missing = [role for role in roles if role not in known]
        if known <= {*roles} and len(missing) == len(loose):
            guesses += [dict(zip(order, loose, strict=True)) for order in permutations(missing)]
    scores = [sum(_speaks_for(role, layer) for role, layer in guess.items()) for guess in guesses]
    yield from (guess for guess, score in zip(guesses, scores, strict=True) if score == max(scores))


def names_speak_for(guess: Mapping[str, str]) -> bool:
    """Whether the name of each weight speaks for its role."""
    return all(_speaks_for(role, layer) for role, layer in guess.items())


def _speaks_for(role: str, layer: str) -> bool:
    return re.search(HINTS[role], layer.lower()) is not None


def _norm_at(module: Any, path: str) -> str | None:
    """The submodule that has the parameter at this path, if it is a norm."""
    name = path.rpartition(".")[0]
    return name if name and "norm" in type(module.get_submodule(name)).__name__.lower() else None


def _of_module(module: Any, convention: Convention) -> Iterator[tuple[str, _Tensor]]:
    """Path -> parameter and its orientation."""
    import torch

    for path, parameter in module.named_parameters(remove_duplicate=False):
        owner = module.get_submodule(path.rpartition(".")[0])
        orientation: str | None = "in,out" if type(owner).__name__ == "Conv1D" else convention.orientation
        if isinstance(owner, torch.nn.Linear | torch.nn.MultiheadAttention):
            orientation = "out,in"
        yield path, (parameter.detach().cpu().double().numpy(), orientation)


def _of_attributes(owner: Any, convention: Convention) -> Iterator[tuple[str, _Tensor]]:
    """Name -> array and its orientation, of the attributes and of those in dictionaries."""
    attributes: dict[str, Any] = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        attributes |= value if isinstance(value, dict) else {name: value}
    for name, array in attributes.items():
        if not isinstance(array, np.ndarray) and hasattr(array, "__array__") and hasattr(array, "shape"):
            array = np.asarray(array)  # of JAX, MLX, …
        if isinstance(array, list | tuple) and array and all(isinstance(x, np.ndarray) and x.ndim for x in array):
            array = np.stack(array)  # one per head
        if isinstance(array, np.ndarray) and array.dtype.kind in "iuf":
            yield str(name), (array.astype(np.float64), convention.orientation)


def is_matrix(name: str) -> bool:
    """Whether the weight of this canonical name is applied to a vector, so that it has an orientation."""
    return name.endswith(".weight") and not name.endswith("norm.weight")


def _oriented(name: str, path: str, array: Array, orientation: str | None) -> Array:
    """The array with matrices as [out, in]."""
    if not is_matrix(name):
        return array.reshape(-1) if name.endswith(".bias") else array
    if array.ndim not in (2, 3):
        raise ValueError(f"expected the weight {path!r} to be a matrix, or one per head, got {array.shape}: pass weights={{…}}")
    if orientation is None:
        message = f'how the matrix {path!r} is applied; pass orientation="in,out" for x @ W or "out,in" for x @ W.T'
        raise Ambiguous(message, "orientation", get_args(Orientation))
    matrices = array.swapaxes(-1, -2) if orientation == "in,out" else array
    if matrices.ndim == 3:  # one per head, concatenated along the heads' axis
        matrices = np.concatenate(list(matrices), axis=1 if name == "output.weight" else 0)
    return matrices


def plain_spec(found: Mapping[str, Array], heads: int, eps: float, max_distance: int) -> LayerSpec:
    """Multi-head attention with these weights, and what they alone show: norms, with this eps, T5's biases, up to this distance, sinks and
    the like.

    ValueError: no weight of queries, or heads that do not divide its width.
    """
    shapes = {role: found[f"{role}.weight"].shape for role in ("qkv", "in_proj", "kv", *PROJECTIONS) if f"{role}.weight" in found}
    d_model = next((shapes[role][1] for role in ("query", "qkv", "in_proj") if role in shapes), None)
    if d_model is None:
        raise ValueError("found no weight of query: pass weights={…}")
    packed = {"query": ("qkv", "in_proj"), "key": ("kv", "qkv", "in_proj"), "value": ("kv", "qkv", "in_proj"), "output": ()}
    bias = {role: not found.keys().isdisjoint(f"{name}.bias" for name in (role, *packed[role])) for role in PROJECTIONS}
    rows = shapes["query"][0] if "query" in shapes else shapes["qkv" if "qkv" in shapes else "in_proj"][0]
    of_keys = 0
    if "query" not in shapes:
        rows, of_keys = _rows_of_packed(rows, shapes["output"][1] if "output" in shapes else 0)
    if rows % heads:
        raise ValueError(f"expected a number of heads that divides {rows}, got {heads}: pass num_heads=… or d_model=…")
    head_dim, fields = rows // heads, dict[str, Any]()
    if of_keys not in (0, rows) and of_keys % head_dim == 0:
        fields["num_kv_heads"] = of_keys // head_dim
    elif {"key", "value"} <= shapes.keys() and shapes["key"][0] % head_dim == 0:
        fields["num_kv_heads"] = kv_heads = shapes["key"][0] // head_dim
        fields["value_head_dim"] = max(1, shapes["value"][0] // kv_heads)
    fields |= {field: True for field in FLAGS if WITH_WEIGHTS[field] in found}
    fields |= _norm_of_queries_and_keys(found, heads * head_dim, eps)
    if "relative_bias" in found:  # T5 does not scale its scores
        fields |= {"relative_bias": {"buckets": len(found["relative_bias"]), "max_distance": max_distance}, "scale": 1.0}
    if "output" not in shapes:
        fields["output_dim"] = heads * fields.get("value_head_dim", head_dim)
    widths = {f"{role}_dim": shapes[name][1] for role in ("key", "value") for name in ("kv", role) if name in shapes}
    return multi_head(d_model, heads, bias=bias, head_dim=head_dim, **widths, **fields)


def _rows_of_packed(rows: int, heads_width: int) -> tuple[int, int]:
    """The rows of queries, and of keys, of a matrix for queries, keys and values: as many as each other, or fewer of keys if the heads that
    the output's matrix takes have another width."""
    equal, of_keys = rows // 3, (rows - heads_width) // 2
    return (heads_width, of_keys) if 0 < of_keys < heads_width else (equal, equal)


def _norm_of_queries_and_keys(found: Mapping[str, Array], width: int, eps: float) -> dict[str, Any]:
    """The field of a spec for the norm whose weights are `query_norm`: over one head, or as wide as all. Empty without them."""
    if (weight := found.get("query_norm.weight")) is None:
        return {}
    bias = "query_norm.bias" in found
    own = {"over": "all" if weight.ndim == 1 else "head", "weights": "own"} if weight.size == width else {}
    return {"qk_norm": {"kind": "layer" if bias else "rms", "bias": bias, "eps": eps, **own}}


def eps_of_norms(module: Any) -> float:
    """The eps of a module's first norm; where none is known by a usual name, 1e-6, as most RMS norms have it."""
    norms = () if module is None else (x for x in module.modules() if "norm" in type(x).__name__.lower())
    found = (getattr(norm, name, None) for norm in norms for name in ("eps", "variance_epsilon", "epsilon"))
    return next((float(x) for x in found if isinstance(x, int | float)), 1e-6)


def distance_of_biases(module: Any) -> int:
    """The distance from which on T5's biases are one, by a module's attribute of a usual name; without one, 128, as in T5."""
    found = (getattr(module, name, None) for name in ("max_distance", "relative_attention_max_distance"))
    return next((x for x in found if type(x) is int), 128)


def multi_head(d_model: int, heads: int, **fields: Any) -> LayerSpec:
    """Multi-head attention with these fields. ValueError: heads that do not divide d_model, without a width of a head."""
    if d_model % heads and "head_dim" not in fields:
        raise ValueError(f"expected a number of heads that divides {d_model}, got {heads}: pass num_heads=… or d_model=…")
    return LayerSpec.model_validate({"d_model": d_model, "num_heads": heads, "dtype": "float64", **fields})


def complete_weights(found: Mapping[str, Array], spec: LayerSpec, convention: Convention) -> dict[str, Array]:
    """All weights of the layer: packed ones are split, norms are as the layer applies them, a missing output is the identity.

    ValueError: weights that are missing, surplus or of another shape, or packed in an unknown order.
    """
    weights: dict[str, Array] = {}
    for name, array in found.items():
        role, _, kind = name.partition(".")
        weights |= {f"{part}.{kind}" if kind else part: rows for part, rows in _unpack(role, array, found, spec, convention).items()}
    expected = spec.weight_shapes()
    if expected.get("output.weight") == (spec.concatenated_dim, spec.concatenated_dim):
        weights.setdefault("output.weight", np.eye(spec.concatenated_dim))
    for name, array in weights.items():
        if "_norm." in name and array.size == math.prod(expected.get(name, ())):
            array = array.reshape(expected[name])
            weights[name] = array + 1 if name.endswith(".weight") and convention.norm_weights == "1 + w" else array
    _check_shapes(weights, expected)
    return weights


def _check_shapes(weights: Mapping[str, Array], expected: Mapping[str, tuple[int, ...]]) -> None:
    if surplus := ", ".join(name for name in weights if name not in expected):
        named = _fields_of(name for name in weights if name not in expected)
        raise ValueError(f"found {surplus}, which the layer does not have: pass a spec with {named}, or weights={{…}}")
    if missing := ", ".join(name.removesuffix(".weight") for name in expected if name not in weights):
        named = _fields_of(name for name in expected if name not in weights)
        raise ValueError(f"found no weight of {missing}: pass weights={{…}}, or a spec with another {named}")
    for name, array in weights.items():
        if array.shape != expected[name]:
            raise ValueError(
                f"expected {name} {expected[name]}, got {array.shape}: pass weights={{…}}, num_heads=…, orientation=… or a spec"
            )


def _fields_of(names: Iterable[str]) -> str:
    """The fields of a spec that say whether a layer has these weights."""
    of_operators = {name: operator.field for operator in OPERATORS for name in operator.axes}
    others = {"bias": "bias", "weight": "projections"}
    return " and ".join(dict.fromkeys(of_operators.get(name) or others.get(name.rpartition(".")[2], "widths") for name in names))


def _unpack(role: str, array: Array, found: Mapping[str, Array], spec: LayerSpec, convention: Convention) -> dict[str, Array]:
    """Role -> rows of one tensor."""
    if role == "kv":
        return split_packed(QKV[1:], array, spec, convention.fused)
    if role in ("qkv", "in_proj"):
        return split_packed(QKV, array, spec, "q,k,v" if role == "in_proj" else convention.fused)
    if role == "query" and spec.output_gate and "gate.weight" not in found:
        return split_packed(QUERY_GATE, array, spec, convention.fused)
    if spec.latent is None:
        return {role: array}
    rank, shared = spec.latent.key_value_rank, spec.latent.rope_key_dim
    own = spec.head_dim - shared
    if role == "kv_a":
        if len(array) == rank + spec.num_heads * shared:
            raise ValueError(
                f"expected kv_a_proj_with_mqa to have {rank} + {shared} rows, got {rank} + {spec.num_heads} x {shared}: "
                "the rotary part of latent keys is shared across heads, and has no rows for each of them"
            )
        return split_rows(array, 1, {"key_value_down": rank, "rope_key": shared})
    if role == "kv_b":
        return split_rows(array, spec.num_heads, {"key": own, "value": spec.value_head_dim})
    if role == "query" and "kv_b.weight" in found:  # the rotary part is last in DeepSeek's queries, first in ours
        parts = split_rows(array, spec.num_heads, {"own": own, "shared": shared})
        return {role: join_rows([parts["shared"], parts["own"]], spec.num_heads)}
    return {role: array}


def split_packed(roles: Sequence[str], array: Array, spec: LayerSpec, order: str | None) -> dict[str, Array]:
    """The parts of a weight or bias that is one for these roles. ValueError: unknown order, or another number of rows."""
    if order is None:
        what, cut = f"one matrix for {', '.join(roles)}", f"[{len(roles)}, h, d]"
        message = f'how {what} is cut; pass fused="q,k,v" for rows {cut} or fused="per_head" for [h, {len(roles)}, d]'
        raise Ambiguous(message, "fused", get_args(Fused))
    if order == "per_number":
        array = _heads_first(array, len(roles), spec.num_heads)
        order = "q,k,v"
    groups = _groups(roles, spec, order)
    parts = split_rows(array, groups, {role: _rows(spec, role) // groups for role in _ordered(roles, order)})
    return {role: parts[role] for role in roles}


def _ordered(roles: Sequence[str], order: str) -> Sequence[str]:
    """The roles in the order in which the parts of one matrix have them."""
    letters = order.split(",")
    return sorted(roles, key=lambda role: letters.index(role[0])) if {role[0] for role in roles} <= {*letters} else roles


def _heads_first(array: Array, parts: int, heads: int) -> Array:
    """Rows [d, parts, h] as [parts, h, d]. ValueError: another number of rows."""
    if len(array) % (parts * heads):
        raise ValueError(f"expected one matrix of rows for {parts} x {heads} heads, got {len(array)}")
    return array.reshape(-1, parts, heads, *array.shape[1:]).transpose(1, 2, 0, *range(3, array.ndim + 2)).reshape(array.shape)


def pack(weights: Sequence[Array], roles: Sequence[str], spec: LayerSpec, order: str) -> Array:
    """The inverse of `split_packed` in one of its two usual orders."""
    return join_rows(weights, _groups(roles, spec, order))


def _groups(roles: Sequence[str], spec: LayerSpec, order: str) -> int:
    """The number of groups of rows that have a part for each role: one, or one for each head of keys (or of queries and gates)."""
    return 1 if order != "per_head" else spec.num_kv_heads if "key" in roles else spec.num_heads


def _rows(spec: LayerSpec, role: str) -> int:
    return spec.weight_shapes()[f"{role}.weight"][0]


def split_rows(array: Array, groups: int, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Role -> its rows of a weight or bias [groups, all sizes, …]. ValueError: another number of rows."""
    if len(array) != groups * sum(sizes.values()):
        expected = " + ".join(f"{groups * size} of {role}" for role, size in sizes.items())
        raise ValueError(f"expected one matrix of {expected} rows, got {len(array)}: pass num_heads=…, weights={{…}} or a spec")
    ends = np.cumsum(list(sizes.values()))[:-1]
    parts = np.split(array.reshape(groups, -1, *array.shape[1:]), ends, axis=1)
    return {role: part.reshape(-1, *array.shape[1:]) for role, part in zip(sizes, parts, strict=True)}


def join_rows(parts: Sequence[Array], groups: int) -> Array:
    """The inverse of `split_rows`."""
    joined = np.concatenate([part.reshape(groups, -1, *part.shape[1:]) for part in parts], axis=1)
    return joined.reshape(-1, *joined.shape[2:])
