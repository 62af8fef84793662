"""A function that takes several arrays in one is called by a function that takes them apart, and packs them.

Queries, keys and values in `qkv` have an axis of three before that of the heads, as in flash_attn_qkvpacked; weights such as `w_qkv` have
their rows in this order.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

from attend.check.convention import CALL, Convention, parse_weight_name
from attend.spec_parts import PROJECTIONS

INPUT = "qkv"
PACKED = {"qkv": PROJECTIONS[:3], "in_proj": PROJECTIONS[:3], "kv": PROJECTIONS[1:3]}
NAMESPACES = {"jax": "jax.numpy", "mlx": "mlx.core"}  # of other frameworks, their own name


def packed_in(signature: inspect.Signature, convention: Convention) -> tuple[str, ...]:
    """The parameters that stand for several."""
    return tuple(name for name in signature.parameters if name not in convention.arguments and _parts(name))


def taken_apart(
    function: Callable[..., Any], signature: inspect.Signature, packed: Sequence[str], convention: Convention, framework: str
) -> tuple[Callable[..., Any], inspect.Signature]:
    """The function that takes the packed parameters apart, and its signature."""
    packs = {name: _parts(name) for name in packed}
    arrays = import_module(NAMESPACES.get(framework, framework))
    before_heads = convention.layout.split(",").index("h" if "h" in convention.layout else "d") - (not convention.batched)
    apart = inspect.Signature([*_parameters(signature, packs)])

    @wraps(function)
    def packing(*args: Any, **kwargs: Any) -> Any:
        given = apart.bind(*args, **kwargs).arguments
        for name, parts in packs.items():
            values = [given.pop(part) for part in parts if part in given]
            is_matrix = values and values[0].ndim == 2 and name != INPUT
            axis = -1 if is_matrix and convention.orientation == "in,out" else 0
            if values:
                given[name] = arrays.stack(values, before_heads) if name == INPUT else arrays.concatenate(values, axis)
        bound = inspect.BoundArguments(signature, {name: given[name] for name in signature.parameters if name in given})
        return function(*bound.args, **bound.kwargs)

    return packing, apart


def _parts(name: str) -> Sequence[str]:
    """The names of the parameters that one parameter stands for; empty for a usual one."""
    if name == INPUT:
        return PROJECTIONS[:3]
    role, _, kind = (parse_weight_name(name) or "").partition(".") if name.lower() not in CALL["key"].split() else ("", "", "")
    return [f"{'b' if kind == 'bias' else 'w'}_{part}" for part in PACKED.get(role, ())]


def _parameters(signature: inspect.Signature, packs: Mapping[str, Sequence[str]]) -> Iterator[inspect.Parameter]:
    for name, parameter in signature.parameters.items():
        yield from (parameter.replace(name=part) for part in packs.get(name, [name]))
