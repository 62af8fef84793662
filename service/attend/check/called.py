"""The function that a candidate is called by, its parameters, and what they mean."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attend.check.adapter import Adapter
from attend.check.arrays import dtype_of, is_module
from attend.check.convention import Convention, find_roles, other_parameters
from attend.check.packed import INPUT, packed_in, taken_apart
from attend.check.signatures import FUNCTIONS, known_arguments, of_torch


def make_adapter(candidate: Any, convention: Convention, framework: str, heads: int | None) -> Adapter:
    """The adapter of an instance or function. ValueError: its parameters or masks are ambiguous."""
    function, signature = _function_and_signature(candidate, convention)
    packed = () if is_module(candidate) else packed_in(signature, convention)
    function, signature = taken_apart(function, signature, packed, convention, framework) if packed else (function, signature)
    convention = replace(convention, one_length=convention.one_length or INPUT in packed)
    roles = find_roles(signature, known_arguments(convention, signature))
    first = next(iter(candidate.parameters()), None) if is_module(candidate) else None
    dtype = convention.dtype or ("float64" if framework == "numpy" else "float32")
    return Adapter(
        function=function,
        signature=signature,
        roles=roles,
        required=frozenset(role for role, name in roles.items() if signature.parameters[name].default is inspect.Parameter.empty),
        convention=convention,
        framework=framework,
        dtype=dtype if first is None else dtype_of(first),
        device=convention.device if first is None else first.device,
        batch_first=(getattr(candidate, "batch_first", True) if convention.batch_first is None else convention.batch_first) is not False,
        heads=heads or 1,
        is_torch=of_torch(candidate),
        may_add_numbers=roles.get("mask") == "attn_mask",
        others=other_parameters(signature, roles),
        packed=packed,
    )


def _function_and_signature(candidate: Any, convention: Convention) -> tuple[Callable[..., Any], inspect.Signature]:
    """The function to call, and its parameters. A builtin has no signature: its parameters are those in the option `arguments`."""
    if convention.method is not None:
        function = described = getattr(candidate, convention.method)
    elif is_module(candidate):
        function, described = candidate, candidate.forward
    else:
        methods = [getattr(candidate, name) for name in ("forward", "call") if hasattr(candidate, name)]
        if not callable(candidate) and not methods:
            raise ValueError(f"expected something to call, got {candidate!r}: pass method=…")
        function = described = candidate if callable(candidate) else methods[0]
    if (schema := getattr(described, "schema", None)) is not None and hasattr(schema, "arguments"):  # of torch.jit.script
        return function, inspect.Signature([_scripted(x) for x in schema.arguments if x.name != "self"])
    try:
        return function, inspect.signature(described)
    except ValueError:
        arguments, inputs = known_arguments(convention, None), ("query", "key", "value")
        required, others = (FUNCTIONS[convention.like].required, FUNCTIONS[convention.like].others) if convention.like else ((), ())
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD if role in inputs else inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if role in inputs or name in required else None,
            )
            for name, role in arguments.items()
        ]
        parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False) for name in others if name not in arguments]
        return function, inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))


def _scripted(argument: Any) -> inspect.Parameter:
    """A parameter of a function that torch.jit.script compiled."""
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    return inspect.Parameter(argument.name, kind, default=default)
