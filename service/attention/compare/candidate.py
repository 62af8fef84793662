"""Prepares a candidate for calls: constructs a class, reads the weights, finds the roles of its parameters.

Torch is used only where the caller has imported it. A module runs in evaluation mode without gradients and is left as it was. In a module
that is constructed here, a parameter whose numbers are all equal gets random ones added: zeros would hide a forgotten bias, ones a
forgotten norm.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import numpy as np

from service.attention.compare.caller import Caller, CallFailed
from service.attention.compare.cases import BATCH, POSITIONAL_QUERIES, QUERIES, CheckCase
from service.attention.compare.convention import Convention, Polarity
from service.attention.compare.names import CALL, HEADS, constructor_arguments, find_roles, mask_polarity
from service.attention.compare.weights import complete_weights, is_matrix, multi_head, plain_spec, read_weights
from service.spec import LayerSpec
from service.spec_parts import PROJECTIONS
from service.tensors import Array


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prepared candidate: how to call it, and the spec and weights for the reference."""

    caller: Caller
    spec: LayerSpec
    weights: Mapping[str, Array]  # canonical names
    module: Any  # the torch module, or None

    def draw_cases(self, seed: int) -> Iterator[CheckCase]:
        return self.caller.draw_cases(self.spec, self.weights, seed)

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients during the `with` block; no effect unless the candidate is a module."""
        return nullcontext() if self.module is None else _evaluating(self.module)


def load_candidate(name: str) -> Any:
    """The object that `my_package.my_module:MyAttention` or `path/to/file.py:MyAttention` names.

    ValueError: a name of another pattern, no such file or attribute. ImportError: as in Python.
    """
    module, _, attribute = name.rpartition(":")
    is_file = module.endswith(".py")
    if not is_file and not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"expected my_package.my_module:MyAttention or my_file.py:MyAttention, got {name!r}")
    try:
        return attrgetter(attribute)(_import_file(Path(module))) if is_file else resolve_name(name)
    except AttributeError as error:
        raise ValueError(f"expected {name!r} to name something: {error}") from None


def _import_file(path: Path) -> ModuleType:
    """The module in this file, which is run once. It finds modules beside it, as a script does."""
    name, folder = str(path.resolve()), str(path.resolve().parent)
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ValueError(f"there is no file {path}")
        if folder not in sys.path:
            sys.path.insert(0, folder)
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def prepare(candidate: Any, spec: LayerSpec | None, convention: Convention, seed: int) -> Candidate:
    """A class, instance or function as a `Candidate`, without a spec one of plain multi-head attention.

    ValueError: something is ambiguous, and the message names the option that decides; or the weights are not those of the spec.
    """
    if spec is not None:
        convention = replace(convention, d_model=spec.d_model, num_heads=spec.num_heads)
    if isinstance(candidate, type):
        candidate, heads = _construct(candidate, spec, convention, seed)
        convention = replace(convention, num_heads=convention.num_heads or heads)
    heads = convention.num_heads or _heads_attribute(candidate)
    if _is_module(candidate):
        caller = _make_caller(candidate, convention, "torch", heads)
        if any(hasattr(p, "materialize") for p in candidate.parameters()):
            with _evaluating(candidate):
                caller.call(_shape_case(convention))
        return _add_weights(caller, spec, read_weights(candidate, True, convention), heads, candidate, seed)
    weights = read_weights(candidate, False, convention)
    if convention.framework is None and weights and (convention.weights is None or convention.names_weights):
        convention = replace(convention, framework="numpy")  # its weights are NumPy arrays
    frameworks = [convention.framework] if convention.framework else ["numpy", "torch"] if "torch" in sys.modules else ["numpy"]
    failures = []
    for framework in frameworks:
        prepared = _add_weights(_make_caller(candidate, convention, framework, heads), spec, weights, heads, None, seed)
        if len(frameworks) == 1:
            return prepared
        try:
            prepared.caller.call(next(prepared.draw_cases(seed)))
        except CallFailed as failure:
            failures.append(f"with {framework}, {failure}")
        else:
            return prepared
    raise ValueError(f'cannot call it on NumPy arrays or torch tensors: pass framework="torch" or "numpy"; {"; ".join(failures)}')


def _add_weights(
    caller: Caller, spec: LayerSpec | None, found: Mapping[str, Array], heads: int | None, module: Any, seed: int
) -> Candidate:
    """The candidate with its spec and weights: those found in it, or those passed to a function."""
    arguments = [role for role in caller.roles if role not in CALL]  # weights that the candidate takes as arguments
    if arguments or not found:
        spec, caller = _prepare_function(caller, spec, found, arguments, heads, seed)
        found = caller.matrices
    elif heads is None:
        raise ValueError("ambiguous: the number of heads; pass num_heads=…")
    spec = spec or plain_spec(found, heads or 1)
    weights = complete_weights(found, spec, caller.convention)
    _check_lengths(spec)
    return Candidate(replace(caller, heads=spec.num_heads, kv_heads=spec.num_kv_heads), spec, weights, module)


def _construct(cls: type, spec: LayerSpec | None, convention: Convention, seed: int) -> tuple[Any, int | None]:
    """An instance, and the number of heads it was constructed with."""
    spec = spec or multi_head(convention.d_model, convention.num_heads or 3)
    arguments = constructor_arguments(inspect.signature(cls), convention, spec)
    heads = next((n for name, n in arguments.items() if name.lower() in HEADS.split()), None)
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(cls, torch.nn.Module):
        return cls(**arguments), heads
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = cls(**arguments)
        for parameter in module.parameters():
            if not hasattr(parameter, "materialize") and bool((parameter == parameter.flatten()[:1]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        dtype = None if convention.dtype is None else getattr(torch, convention.dtype)
        return module.to(device=convention.device, dtype=dtype), heads


def _prepare_function(
    caller: Caller, spec: LayerSpec | None, found: Mapping[str, Array], arguments: Sequence[str], heads: int | None, seed: int
) -> tuple[LayerSpec, Caller]:
    """The spec of a candidate that takes projected heads, or its weights as arguments; and its caller, which passes these.

    Weights are those of the convention, or drawn here, uniform in ±1.
    """
    convention = caller.convention
    projects = any(is_matrix(name) for name in arguments)
    if projects and caller.framework == "torch" and convention.orientation is None:
        raise ValueError('ambiguous: how the matrices are applied; pass orientation="in,out" for x @ W or "out,in" for x @ W.T')
    if projects and "heads" not in caller.roles and heads is None:
        raise ValueError("ambiguous: the number of heads; pass num_heads=…")
    heads = 1 if convention.layout == "b,n,d" and not projects else heads or 3
    if spec is None:
        bias = {name: f"{name}.bias" in arguments for name in PROJECTIONS}
        spec = multi_head(convention.d_model, heads, projections=projects, bias=bias if projects else False)
    if spec.projections > projects:
        raise ValueError("found no weights of projections: pass weights={…}, arguments={…}, or a spec with projections false")
    rng = np.random.default_rng(seed)
    drawn = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in spec.weight_shapes().items() if name in arguments}
    matrices = found or {name: x.astype(np.float64) for name, x in drawn.items()}
    convention = replace(convention, orientation=convention.orientation or "in,out")
    return spec, replace(caller, heads_given=not projects, matrices=matrices, convention=convention)


def _check_lengths(spec: LayerSpec) -> None:
    """ValueError: a window or chunk that no case is long enough for."""
    lengths = [spec.chunk_size or 0, *(length or 0 for length in (spec.window.model_dump().values() if spec.window else ()))]
    if max(lengths) > (longest := POSITIONAL_QUERIES - 2):
        raise ValueError(f"expected a window or chunk of at most {longest} keys, so that it matters, got {max(lengths)}")


def _is_module(candidate: Any) -> bool:
    torch = sys.modules.get("torch")  # a module exists only where torch was imported
    return torch is not None and isinstance(candidate, torch.nn.Module)


def _heads_attribute(candidate: Any) -> int | None:
    """The number of heads of an instance with an attribute of one of the usual names."""
    found = {n for name in HEADS.split() if isinstance(n := getattr(candidate, name, None), int)}
    return found.pop() if len(found) == 1 else None


def _make_caller(candidate: Any, convention: Convention, framework: str, heads: int | None) -> Caller:
    torch = sys.modules.get("torch")
    polarity: Polarity | None = None  # of torch's own masks
    if torch is not None and candidate is torch.nn.functional.scaled_dot_product_attention:
        known = {"query": "query", "key": "key", "value": "value", "attn_mask": "mask"}
        convention, polarity = replace(convention, arguments=known | dict(convention.arguments)), "attend"
    elif torch is not None and isinstance(candidate, torch.nn.MultiheadAttention):
        polarity = "block"
    convention = replace(convention, mask_means=convention.mask_means or polarity, padding_means=convention.padding_means or polarity)
    function, signature = _function_and_signature(candidate, convention)
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


def _function_and_signature(candidate: Any, convention: Convention) -> tuple[Callable[..., Any], inspect.Signature]:
    """The function to call, and its parameters. A builtin has no signature: its parameters are those in the option `arguments`."""
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
        defaults = {
            name: inspect.Parameter.empty if role in ("query", "key", "value") else None for name, role in convention.arguments.items()
        }
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return function, inspect.Signature([inspect.Parameter(name, kind, default=default) for name, default in defaults.items()])


def _shape_case(convention: Convention) -> CheckCase:
    """A case of ones: the first call of a lazy module makes its weights."""
    x = np.ones((BATCH if convention.batched else 1, QUERIES, convention.d_model))
    everything = np.ones((*x.shape[:2], QUERIES), bool)
    return CheckCase("shapes", "plain", x, x, x, everything, everything)


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
