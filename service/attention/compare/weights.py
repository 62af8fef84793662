"""Reads the weights of a candidate under canonical names, from a module's parameters or an object's attributes.

The orientation of torch.nn.Linear and the packing of torch and GPT-2 are known; for other matrices, `Convention` must state them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.attention.compare.convention import BARE, Convention, parse_weight_name
from service.spec import PROJECTIONS, LayerSpec
from service.tensors import Array

_Tensor = tuple[Array, str | None]  # an array, and how a matrix is applied: "in,out", "out,in" or unknown


@dataclass(frozen=True, slots=True)
class _Found:
    path: str
    role: str  # query, key, value, output; qkv; or in_proj: q, k, v in this order
    kind: str  # weight or bias
    array: Array  # a weight as [out, in]


def read_weights(owner: Any, is_module: bool, heads: int, convention: Convention) -> dict[str, Array]:
    """Canonical name -> float64 array; empty if the object has no weights. A missing output projection is the identity.

    ValueError: a parameter of unknown name, a projection missing or found twice, or an unknown order or orientation.
    """
    if convention.weights is not None and not convention.names_weights:
        return {name: np.asarray(array, np.float64) for name, array in convention.weights.items()}
    tensors = dict(_of_module(owner, convention) if is_module else _of_attributes(owner, convention))
    given, found = _given_names(convention, tensors), list[_Found]()
    for path, (array, orientation) in tensors.items():
        # of an object without layers, `q` or `output` alone is a result of the last call
        known = is_module or path.lower() not in BARE
        if name := given.get(path) or (parse_weight_name(path) if known else None):
            found.append(_found(path, *name, array, orientation))
        elif is_module:
            raise _unknown(f"the meaning of {path!r}", tensors, "pass the attention alone, or ")
    if not found:
        if any(array.ndim == 2 and path.lower() not in BARE for path, (array, _) in tensors.items()):
            raise _unknown("which arrays are the weights", tensors, "pass weights={} if none are, or ")
        return {}
    weights: dict[str, Array] = {}
    for role, kind in {(x.role, x.kind): None for x in found}:
        same = [x for x in found if (x.role, x.kind) == (role, kind)]
        if len({re.sub(r"\d+", "#", x.path) for x in same}) > 1:
            raise _unknown(f"which is the {kind} of {role}, {' or '.join(repr(x.path) for x in same)}", tensors)
        whole = np.concatenate([x.array for x in same], axis=1 if (role, kind) == ("output", "weight") else 0)  # one per head
        if role in ("qkv", "in_proj"):
            order = "q,k,v" if role == "in_proj" else convention.fused
            weights |= {
                f"{name}.{kind}": part for name, part in zip(PROJECTIONS, cut_packed(same[0].path, whole, heads, order), strict=False)
            }
        else:
            weights[f"{role}.{kind}"] = whole
    if missing := [name for name in PROJECTIONS[:3] if f"{name}.weight" not in weights]:
        raise _unknown(f"found no weight of {', '.join(missing)}", tensors)
    weights.setdefault("output.weight", np.eye(len(weights["query.weight"])))
    return weights


def _given_names(convention: Convention, tensors: Mapping[str, _Tensor]) -> dict[str, tuple[str, str]]:
    """Path -> (role, kind) as the option `weights` names them. A role without a kind names a layer, or a matrix."""
    names: dict[str, tuple[str, str]] = {}
    for ours, path in (convention.weights or {}).items():
        role, _, kind = ours.partition(".")
        places = {path: kind} if kind else {path: "weight", f"{path}.weight": "weight", f"{path}.bias": "bias"}
        here = {place: (role, kind) for place, kind in places.items() if place in tensors}
        if not here or role not in (*PROJECTIONS, "qkv") or kind not in ("", "weight", "bias"):
            raise _unknown(f"what {ours!r}: {path!r} in weights names", tensors)
        names |= here
    return names


def _unknown(subject: str, tensors: Mapping[str, _Tensor], otherwise: str = "") -> ValueError:
    """The error that asks for the names of the weights."""
    example = 'weights={"query": NAME, "key": NAME, "value": NAME, "output": NAME} (or "qkv", or "query.bias" alone)'
    listed = ", ".join(f"{path} {list(array.shape)}" for path, (array, _) in tensors.items())
    return ValueError(f"ambiguous: {subject}; {otherwise}pass {example}, with names among {listed}")


def fit_spec(weights: Mapping[str, Array], heads: int) -> LayerSpec:
    """The spec of these weights. ValueError: their shapes do not fit together."""
    d_model = weights["query.weight"].shape[1]
    if d_model % heads:
        raise ValueError(f"expected a number of heads that divides {d_model}, got {heads}: pass num_heads=…")
    widths = {"key_dim": weights["key.weight"].shape[1], "value_dim": weights["value.weight"].shape[1]}
    bias = any(name.endswith(".bias") for name in weights)
    spec = LayerSpec.model_validate({"d_model": d_model, "num_heads": heads, "bias": bias, "dtype": "float64"} | widths)
    for name, array in weights.items():
        expected = spec.weight_shapes().get(name)
        if array.shape != expected:
            raise ValueError(f"expected {name} {expected}, got {array.shape}: pass weights={{…}}, num_heads=… or orientation=…")
    return spec


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
        if isinstance(array, list | tuple) and array and all(isinstance(x, np.ndarray) and x.ndim for x in array):
            array = np.stack(array)  # one per head
        if isinstance(array, np.ndarray) and array.dtype.kind in "iuf":
            yield str(name), (array.astype(np.float64), convention.orientation or "in,out")


def _found(path: str, role: str, kind: str, array: Array, orientation: str | None) -> _Found:
    if kind == "bias":
        return _Found(path, role, kind, array.reshape(-1))
    if array.ndim not in (2, 3):
        raise ValueError(f"expected the weight {path!r} to be a matrix, or one per head, got {array.shape}: pass weights={{…}}")
    if orientation is None:
        raise ValueError(f'ambiguous: how the matrix {path!r} is applied; pass orientation="in,out" for x @ W or "out,in" for x @ W.T')
    matrices = array.swapaxes(-1, -2) if orientation == "in,out" else array
    if matrices.ndim == 3:  # one per head, concatenated along the heads' axis
        matrices = np.concatenate(list(matrices), axis=1 if role == "output" else 0)
    return _Found(path, role, kind, matrices)


def cut_packed(path: str, whole: Array, heads: int, order: str | None) -> list[Array]:
    """Query, key and value out of one packed weight [3*d, in] or bias [3*d]. ValueError: unknown order, or another number of rows."""
    if order is None:
        raise ValueError(f'ambiguous: how {path!r} is cut; pass fused="q,k,v" for rows [3, h, d] or fused="per_head" for [h, 3, d]')
    if whole.shape[0] % (3 * heads):
        raise ValueError(f"expected {path!r} to have 3 x {heads} x head_dim rows, got {whole.shape[0]}: pass num_heads=… or weights={{…}}")
    if order == "q,k,v":
        return list(np.split(whole, 3))
    per_head = whole.reshape(heads, 3, -1, *whole.shape[1:])
    return [per_head[:, i].reshape(-1, *whole.shape[1:]) for i in range(3)]
