"""Someone's own attention, made ready to be asked: constructed if it is a class, its weights read, its parameters understood.

It calls nothing but constructors (and once a module whose shapes come with its first call) and judges no answer. Torch is imported only
where the target is made of it. A module is run in evaluation mode without gradients and left as it was; only a module constructed here is
written to: its biases of zeros, which would hide a forgotten one, are drawn anew.
"""

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from service.attention.compare.caller import Caller
from service.attention.compare.cases import BATCH, QUERIES, CheckCase
from service.attention.compare.convention import HEADS, Convention, Polarity, constructor_arguments, find_roles, mask_polarity
from service.attention.compare.weight_reader import fit_spec, read_weights
from service.spec import PROJECTIONS, LayerSpec
from service.tensors import Array


@dataclass(frozen=True, slots=True)
class Candidate:
    caller: Caller
    spec: LayerSpec
    weights: Mapping[str, Array]  # canonical names
    module: Any  # the torch module, None if it is none

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Evaluation mode and no gradients, for as long as it is asked."""
        if self.module is None:
            yield
            return
        with _evaluating(self.module):
            yield


def load_candidate(name: str) -> Any:
    """What `my_package.my_module:MyAttention` names. ValueError: no colon, or nothing of that name there; ImportError as Python's own."""
    module_name, colon, path = name.partition(":")
    if not colon:
        raise ValueError(f"expected my_package.my_module:MyAttention, got {name!r}")
    held: Any = import_module(module_name)
    for part in path.split("."):
        if not hasattr(held, part):
            raise ValueError(f"expected {name!r} to name something, got nothing called {part!r} in {held!r}")
        held = getattr(held, part)
    return held


def prepare(candidate: Any, convention: Convention, seed: int) -> Candidate:
    """A class, an instance or a function as a target. ValueError: what cannot be told, and which option tells it."""
    if isinstance(candidate, type):
        candidate, heads = _construct(candidate, convention, seed)
        convention = replace(convention, num_heads=convention.num_heads or heads)
    module = candidate if _is_module(candidate) else None
    heads = convention.num_heads or _held_heads(candidate)
    if module is not None:
        caller = _make_caller(candidate, convention, "torch", heads)
        if any(hasattr(p, "materialize") for p in module.parameters()):
            with _evaluating(module):
                caller.ask(_first_trial(convention))
    weights = read_weights(candidate, module is not None, heads or 1, convention)
    if module is None:
        holds = weights and convention.weights is None
        caller = _make_caller(candidate, convention, "numpy" if holds else _framework(candidate, convention), heads)
    if taken := [role for role in caller.roles if "." in role]:
        return _function_of_matrices(caller, taken, weights, heads, seed)
    if not weights:  # nothing is projected: a function of heads
        heads = 1 if convention.layout == "b,n,d" else heads or 3
        weights = {f"{name}.weight": np.eye(convention.d_model) for name in PROJECTIONS}
        caller = replace(caller, heads=heads, splits=True)
    elif heads is None:
        raise ValueError("cannot tell the number of heads: pass num_heads=…")
    return Candidate(caller, fit_spec(weights, heads), weights, module)


def _construct(cls: type, convention: Convention, seed: int) -> tuple[Any, int | None]:
    """An instance, and the number of heads it was told."""
    arguments = constructor_arguments(inspect.signature(cls), convention)
    heads = next((n for name, n in arguments.items() if name.lower() in HEADS), None)
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(cls, torch.nn.Module):
        return cls(**arguments), heads
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = cls(**arguments)
        for parameter in module.parameters():
            if not hasattr(parameter, "materialize") and parameter.ndim == 1 and not parameter.any():
                parameter.normal_(std=0.3)
        dtype = None if convention.dtype is None else getattr(torch, convention.dtype)
        return module.to(device=convention.device, dtype=dtype), heads


def _function_of_matrices(caller: Caller, taken: Sequence[str], told: Mapping[str, Array], heads: int | None, seed: int) -> Candidate:
    """A target that takes its weights as arguments: they are told, or drawn here, uniform in ±1, and given to it."""
    convention, rng = caller.convention, np.random.default_rng(seed)
    if caller.framework == "torch" and convention.orientation is None:
        raise ValueError('cannot tell how the matrices are applied: pass orientation="in,out" for x @ W or "out,in" for x @ W.T')
    if "heads" not in caller.roles and heads is None:
        raise ValueError("cannot tell the number of heads: pass num_heads=…")
    d = convention.d_model
    drawn = {name: rng.uniform(-1, 1, (d, d) if name.endswith("weight") else d).astype(np.float32) for name in taken}
    weights = dict(told) or {name: x.astype(np.float64) for name, x in drawn.items()}
    if missing := [name for name in PROJECTIONS[:3] if f"{name}.weight" not in weights]:
        raise ValueError(f"found no weight of {', '.join(missing)} among the parameters: pass arguments={{…}} or weights={{…}}")
    given = {"output.weight": np.eye(len(weights["query.weight"]))} | weights
    caller = replace(
        caller, heads=heads or 3, matrices=weights, convention=replace(convention, orientation=convention.orientation or "in,out")
    )
    return Candidate(caller, fit_spec(given, heads or 3), given, None)


def _is_module(candidate: Any) -> bool:
    torch = sys.modules.get("torch")  # where torch was never imported, nothing is made of it
    return torch is not None and isinstance(candidate, torch.nn.Module)


def _held_heads(candidate: Any) -> int | None:
    """The number of heads that an instance keeps under one of the usual names."""
    held = {n for name in HEADS if isinstance(n := getattr(candidate, name, None), int)}
    return held.pop() if len(held) == 1 else None


def _make_caller(candidate: Any, convention: Convention, framework: str, heads: int | None) -> Caller:
    torch = sys.modules.get("torch")
    means: Polarity | None = None
    if torch is not None and candidate is torch.nn.functional.scaled_dot_product_attention:
        known = {"query": "query", "key": "key", "value": "value", "attn_mask": "mask"}
        convention, means = replace(convention, arguments=known | dict(convention.arguments)), "attend"
    elif torch is not None and isinstance(candidate, torch.nn.MultiheadAttention):
        means = "block"
    convention = replace(convention, mask_means=convention.mask_means or means, padding_means=convention.padding_means or means)
    function, signature = _callable(candidate, convention)
    roles = find_roles(signature, convention.arguments)
    polarities: dict[str, Polarity] = {
        r: mask_polarity(convention, roles[r], padding=r == "padding") for r in ("mask", "padding") if r in roles
    }
    first = next(iter(candidate.parameters()), None) if _is_module(candidate) else None
    dtype = convention.dtype or {"torch": "float32", "numpy": "float64"}[framework]
    return Caller(
        function=function,
        signature=signature,
        roles=roles,
        polarities=polarities,
        convention=convention,
        framework=framework,
        dtype=dtype if first is None else str(first.dtype).removeprefix("torch."),
        device=convention.device if first is None else first.device,
        batch_first=(getattr(candidate, "batch_first", True) if convention.batch_first is None else convention.batch_first) is not False,
        heads=heads or 1,
    )


def _callable(candidate: Any, convention: Convention) -> tuple[Callable[..., Any], inspect.Signature]:
    """What to call, and its parameters. A builtin has no signature: its parameters are those that `arguments` names."""
    if convention.method is not None:
        function = described = getattr(candidate, convention.method)
    elif _is_module(candidate):
        function, described = candidate, candidate.forward
    else:
        methods = [getattr(candidate, name) for name in ("forward", "call") if hasattr(candidate, name)]
        if not callable(candidate) and not methods:
            raise ValueError(f"expected something to call, got {candidate!r}: pass method=…")
        function = described = candidate if callable(candidate) else methods[0]
    try:
        return function, inspect.signature(described)
    except ValueError:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        inputs = ("query", "key", "value")
        told = convention.arguments.items()
        return function, inspect.Signature(
            [inspect.Parameter(n, kind, default=inspect.Parameter.empty if role in inputs else None) for n, role in told]
        )


def _framework(candidate: Any, convention: Convention) -> str:
    """Torch or NumPy, by what a function's own code mentions. ValueError: neither, or both."""
    if convention.framework is not None:
        return convention.framework
    function: Any = inspect.unwrap(_callable(candidate, convention)[0])
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    found = _mentioned(function, set()) & {"torch", "numpy"}
    if len(found) != 1:
        raise ValueError(f'cannot tell whether {candidate!r} takes torch tensors or NumPy arrays: pass framework="torch" or "numpy"')
    return found.pop()


def _mentioned(function: Any, seen: set[int]) -> set[str]:
    """The packages that a function's code names, and those of what it calls, down to torch and NumPy."""
    function = getattr(function, "__func__", function)
    package = (getattr(function, "__module__", None) or "").split(".")[0]
    if package in ("torch", "numpy") or id(function) in seen or not hasattr(function, "__code__"):
        return {package}
    seen.add(id(function))
    found = {package}
    codes = [function.__code__]
    for code in codes:  # grows by the comprehensions and inner functions that it finds
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}  # attributes are named alike
        for held in (function.__globals__[name] for name in names if name in function.__globals__):
            found |= {held.__name__.split(".")[0]} if isinstance(held, ModuleType) else _mentioned(held, seen)
    return found


def _first_trial(convention: Convention) -> CheckCase:
    x = np.ones((BATCH if convention.batched else 1, QUERIES, convention.d_model))
    everything = np.ones((*x.shape[:2], QUERIES), bool)
    return CheckCase("first call", "plain", x, x, x, everything, everything)


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    try:
        with sys.modules["torch"].no_grad():
            module.eval()
            yield
    finally:
        for part, training in modes:
            part.training = training
