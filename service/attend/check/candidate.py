"""Prepares a candidate: constructs a class, makes the adapter that calls it, reads or draws its weights.

Torch is used only where the caller has imported it. A module runs in evaluation mode without gradients and is left as it was. In a module
that is constructed here, a parameter whose numbers are all equal gets random ones added: zeros would hide a forgotten bias, ones a
forgotten norm. So does a copy of another parameter, which would hide that one is used for the other.
"""

import inspect
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, get_args

import numpy as np

from attend.check.adapter import Adapter
from attend.check.alignment import draw_alignments
from attend.check.arrays import is_module
from attend.check.called import make_adapter
from attend.check.cases import (
    POSITIONAL_QUERIES,
    CaseKind,
    CheckCase,
    Draw,
    Group,
    Lengths,
    draw_long_cases,
    draw_partial_cases,
    draw_short_cases,
    lengths_for,
)
from attend.check.constructor import Configuration, constructor_arguments, meaning_of
from attend.check.convention import CALL, HEADS, Alignment, Ambiguous, Convention, Orientation
from attend.check.lengths import Sweep, draw_sweeps
from attend.check.parameters import draw_parameter_cases
from attend.check.weights import complete_weights, is_matrix, multi_head, plain_spec, read_weights
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array

GROUPS: tuple[Group, ...] = ("short", "parameters", "long")
OF_CALLS = (  # conventions of calls alone
    *("mask_means", "mask_shape", "mask_dtype", "mask_replaces_causality", "padding_means", "causal", "query_offset", "residual"),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prepared candidate: how to call it, and the spec and weights for the reference."""

    adapter: Adapter
    spec: LayerSpec
    weights: Mapping[str, Array]  # canonical names
    module: Any  # the torch module, or None

    def called_by(self, convention: Convention) -> "Candidate":
        """The same candidate, called by a convention that differs in OF_CALLS alone."""
        changed = {name: getattr(convention, name) for name in OF_CALLS}
        changed = {
            name: value for name, value in changed.items() if value is not None or not name.endswith("_means")
        }  # torch's own are known
        return replace(self, adapter=replace(self.adapter, convention=replace(self.adapter.convention, **changed)))

    def draw_cases(self, seed: int, groups: Collection[Group] = GROUPS, lengths: Lengths | None = None) -> Iterator[CheckCase]:
        """The cases of these groups; the adapter cannot call the candidate on those with a `skip_reason`."""
        adapter, roles = self.adapter, self.adapter.roles
        draw = self.draw(seed, lengths)
        decodes = not roles.keys().isdisjoint({"cache", "first_position"})
        drawn = [draw_short_cases(draw, decodes=decodes, packs_keys="key_boundaries" in roles)] if "short" in groups else []
        if "parameters" in groups:
            adds = adapter.adds_numbers or adapter.may_add_numbers
            kinds = [kind for kind in get_args(CaseKind) if kind != "numbers" or adds]
            mask_of = {kind: role for kind in kinds if (role := adapter.mask_role(kind)) is not None and role != "causal"}
            more = {"is_torch": adapter.is_torch, "adds_numbers": adapter.adds_numbers, "moves": adapter.aligned == "bottom-right"}
            drawn.append(draw_parameter_cases(draw, roles, mask_of, **more))
        if "long" in groups:
            drawn.append(draw_long_cases(draw, decodes=decodes))
        yield from map(self._as_passed, chain(*drawn))

    def draw_partial_cases(self, seed: int) -> Iterator[CheckCase]:
        """Cases on which most mistakes change nothing."""
        yield from map(self._as_passed, draw_partial_cases(self.draw(seed)))

    def draw_sweeps(self, seed: int, longest: int) -> Iterator[Sweep]:
        """Calls of many lengths and widths, with at most `longest` rows."""
        adapter, longest = self.adapter, longest if "mask" not in self.adapter.required else 0
        for sweep in draw_sweeps(self.draw(seed), adapter.roles, longest, widths=adapter.heads_given):
            yield replace(sweep, cases=tuple(map(self._as_passed, sweep.cases)))

    def draw_alignments(self, seed: int) -> Iterator[dict[Alignment, CheckCase]]:
        """Causal calls with fewer and with more queries than keys, if a parameter makes them causal."""
        roles, causal = self.adapter.roles, self.adapter.convention.causal
        if {"causal", "key"} <= roles.keys() and not causal and not self.spec.positional and "mask" not in self.adapter.required:
            for cases in draw_alignments(self.draw(seed), roles["causal"]):
                if not self.adapter.skip_reason(cases["top-left"]):
                    yield {alignment: self._as_passed(case) for alignment, case in cases.items()}

    def draw(self, seed: int, lengths: Lengths | None = None) -> Draw:
        """What draws the cases of this candidate."""
        roles, convention = self.adapter.roles.keys(), self.adapter.convention
        per_item = convention.mask_shape.startswith("b")
        masks: dict[CaseKind, bool] = {
            "mask": per_item,
            "numbers": per_item,
            "causal": False,
            "padding": per_item or bool(roles & {"padding", "lengths"}),
            "segments": per_item or "segments" in roles,
        }
        return Draw(
            spec=self.spec,
            weights=self.weights,
            rng=np.random.default_rng(seed),
            lengths=lengths or lengths_for(self.spec, batched=convention.batched),
            dtype=self.adapter.dtype,
            causal=convention.causal,
            masks_alone=[kind for kind in masks if convention.mask_replaces_causality and self.adapter.mask_role(kind) == "mask"],
            at_end=convention.query_offset == "end",
            inputs=[name for name in ("query", "key", "value") if name in roles],
            masks_per_item=[kind for kind, differs in masks.items() if differs],
        )

    def _as_passed(self, case: CheckCase) -> CheckCase:
        """The case with what each call has to pass: segments, and fields of the layer that are no defaults."""
        roles, spec = self.adapter.roles.keys(), case.layer(self.spec)
        one = np.ones(case.query.shape[:2], int) if case.segments is None else case.segments
        layer = {"scale": spec.scale, "softcap": spec.softcap or 0.0, "window": _sides(spec)}
        is_usual = {
            "scale": math.isclose(spec.scale, spec.head_dim**-0.5),
            "softcap": not spec.softcap,
            "window": not spec.window,
        }
        needed = {role for role in layer if role in self.adapter.required or not is_usual[role]}
        passed = {role: value for role, value in layer.items() if role in roles & needed} | dict(case.passed)
        whole = None if case.whole is None else self._as_passed(case.whole)
        return replace(case, passed=passed, segments=one if roles & {"segments", "boundaries"} else None, whole=whole)

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients during the `with` block; no effect unless the candidate is a module."""
        return nullcontext() if self.module is None else _evaluating(self.module)


def _sides(spec: LayerSpec) -> tuple[int, int]:
    """The window as FlashAttention takes it: keys before and after the query's own, -1 for all."""
    sides = (spec.window.left, spec.window.right) if spec.window else (None, None)
    left, right = (-1 if side is None else side for side in sides)
    return left, right


class NoSuchCandidate(ValueError):
    """A name of a wrong pattern, of a missing file, or of nothing in a module."""


def load_candidate(name: str) -> Any:
    """The object that `my_package.my_module:MyAttention` or `path/to/file.py:MyAttention` names. Raises NoSuchCandidate and ImportError."""
    module, _, attribute = name.rpartition(":")
    is_file = module.endswith(".py")
    if not is_file and not all(part.isidentifier() for part in module.split(".")):
        raise NoSuchCandidate(f"expected my_package.my_module:MyAttention or my_file.py:MyAttention, got {name!r}")
    try:
        return attrgetter(attribute)(_import_file(Path(module))) if is_file else resolve_name(name)
    except AttributeError as error:
        raise NoSuchCandidate(f"expected {name!r} to name something: {error}") from None


def _import_file(path: Path) -> ModuleType:
    """The module in this file, which is run once. It finds modules beside it, as a script does."""
    name, folder = str(path.resolve()), str(path.resolve().parent)
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise NoSuchCandidate(f"there is no file {path}")
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
    try:
        prepared = _prepare(candidate, spec, convention, seed)
    except ValueError:
        if spec is not None or not isinstance(candidate, type):
            raise
        prepared = _prepare(candidate, spec, convention, seed, groups=False)  # packed weights of grouped heads cannot be told apart
    if (name := convention.new_cache) is None:
        return prepared
    made = {"list": list, "dict": dict}.get(name) or load_candidate(name)
    return replace(prepared, adapter=replace(prepared.adapter, new_cache=made))


def _prepare(candidate: Any, spec: LayerSpec | None, convention: Convention, seed: int, *, groups: bool = True) -> Candidate:
    if spec is not None:
        convention = replace(convention, d_model=spec.d_model, num_heads=spec.num_heads)
    if isinstance(candidate, type):
        candidate, convention = _construct(candidate, spec, convention, seed, groups)
    heads = convention.num_heads or _heads_attribute(candidate)
    if is_module(candidate):
        candidate, left_out = _without(candidate, convention.left_out)
        adapter = make_adapter(candidate, convention, "torch", heads)
        adapter = replace(adapter, others=(*adapter.others, *left_out))
        if any(hasattr(p, "materialize") for p in candidate.parameters()):
            with _evaluating(candidate):
                adapter.call(_shape_case(convention))
        return _add_weights(adapter, spec, read_weights(candidate, True, convention), heads, candidate, seed)
    weights = read_weights(candidate, False, convention)
    if convention.framework is None and weights and (convention.weights is None or convention.names_weights):
        convention = replace(convention, framework="numpy")  # its weights are NumPy arrays
    if (framework := convention.framework) is None:
        usual = ("numpy", "torch") if "torch" in sys.modules else ("numpy",)
        raise Ambiguous('whose arrays it takes; pass framework="torch" or "numpy"', "framework", usual)
    return _add_weights(make_adapter(candidate, convention, framework, heads), spec, weights, heads, None, seed)


def _add_weights(
    adapter: Adapter, spec: LayerSpec | None, found: Mapping[str, Array], heads: int | None, module: Any, seed: int
) -> Candidate:
    """The candidate with its spec and weights: those found in it, or those passed to a function."""
    arguments = [role for role in adapter.roles if role not in CALL]  # weights that the candidate takes as arguments
    if arguments or not found:
        spec, adapter = _prepare_function(adapter, spec, found, arguments, heads, seed)
        found = adapter.matrices
    elif heads is None:
        raise _heads_unknown(found)
    spec = spec or plain_spec(found, heads or 1, _eps_of_norms(module))
    weights = complete_weights(found, spec, adapter.convention)
    _check_lengths(spec)
    return Candidate(replace(adapter, heads=spec.num_heads, kv_heads=spec.num_kv_heads), spec, weights, module)


def _eps_of_norms(module: Any) -> float:
    """The eps of a module's first norm; where none is known by a usual name, 1e-6, as most RMS norms have it."""
    norms = () if module is None else (x for x in module.modules() if "norm" in type(x).__name__.lower())
    found = (getattr(norm, name, None) for norm in norms for name in ("eps", "variance_epsilon", "epsilon"))
    return next((float(x) for x in found if isinstance(x, int | float)), 1e-6)


def _construct(cls: type, spec: LayerSpec | None, convention: Convention, seed: int, groups: bool) -> tuple[Any, Convention]:
    """An instance, and the convention with the sizes it was constructed with.

    Without a spec, and with `groups`, a class that has a number of heads of keys gets fewer of them than of queries, so that the order of
    groups shows. Ambiguous: its constructor refuses all that is known to be tried.
    """
    heads = convention.num_heads or 3
    sizes = spec or multi_head(convention.d_model, heads, num_kv_heads=heads if heads % 2 or not groups else heads // 2)
    torch = sys.modules.get("torch")
    makes_modules = torch is not None and issubclass(cls, torch.nn.Module)
    arguments = constructor_arguments(inspect.signature(cls), convention, sizes, evaluates=makes_modules)
    if torch is None or not makes_modules:
        made = cls(**arguments)
    else:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            module = cls(**arguments)
            _tell_parameters_apart([parameter for parameter in module.parameters() if not hasattr(parameter, "materialize")])
            dtype = None if convention.dtype is None else getattr(torch, convention.dtype)
            made = module.to(device=convention.device, dtype=dtype)
    meanings = _sizes_constructed(arguments, convention, sizes)
    if groups and spec is None and convention.num_heads is None and {"num_heads", "num_kv_heads"} <= meanings.keys():
        with suppress(Exception):  # it may take as many alone
            return _construct(cls, spec, replace(convention, d_model=2 * convention.d_model, num_heads=2 * heads), seed, groups)
    return made, replace(convention, num_heads=convention.num_heads or meanings.get("num_heads"))


def _without(module: Any, names: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """A copy of a torch module in which these submodules return their input, and the names of their parameters."""
    if not names:
        return module, ()
    module, left_out = deepcopy(module), []
    for name in names:
        left_out += [f"{name}.{parameter}" for parameter, _ in module.get_submodule(name).named_parameters()]
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, sys.modules["torch"].nn.Identity())
    return module, tuple(left_out)


def _sizes_constructed(arguments: Mapping[str, Any], convention: Convention, spec: LayerSpec) -> dict[str, Any]:
    """The sizes that a constructor was given, by parameters or a configuration, by their meanings."""
    meanings = {convention.sizes.get(name) or meaning_of(name) or "": value for name, value in arguments.items()}
    asked = {meaning for value in arguments.values() if isinstance(value, Configuration) for meaning in value.asked.values()}
    fields = {meaning_of(name) for value in arguments.values() for name in getattr(value, "__dataclass_fields__", ())}
    return meanings | {meaning: getattr(spec, meaning) for meaning in ("num_heads", "num_kv_heads") if meaning in asked | fields}


def _tell_parameters_apart(parameters: Sequence[Any]) -> None:
    """Adds random numbers to parameters whose numbers are all equal, which hide mistakes, and to copies of earlier parameters, which hide
    that one is used for the other."""
    randn_like = sys.modules["torch"].randn_like
    for i, parameter in enumerate(parameters):
        is_copy = any(x.shape == parameter.shape and bool((x == parameter).all()) for x in parameters[:i])
        if is_copy or bool((parameter == parameter.flatten()[:1]).all()):
            parameter.add_(randn_like(parameter), alpha=0.3)


def _prepare_function(
    adapter: Adapter, spec: LayerSpec | None, found: Mapping[str, Array], arguments: Sequence[str], heads: int | None, seed: int
) -> tuple[LayerSpec, Adapter]:
    """The spec of a candidate that takes projected heads, or its weights as arguments; and its adapter, which passes these.

    Weights are those of the convention, or drawn here, uniform in ±1.
    """
    convention = adapter.convention
    projects = any(is_matrix(name) for name in arguments)
    if projects and convention.orientation is None:
        message = 'how the matrices are applied; pass orientation="in,out" for x @ W or "out,in" for x @ W.T'
        raise Ambiguous(message, "orientation", get_args(Orientation))
    if projects and "heads" not in adapter.roles and heads is None:
        raise _heads_unknown({})
    heads = 1 if convention.layout == "b,n,d" and not projects else heads or 3
    if spec is None:
        bias = {name: f"{name}.bias" in arguments for name in PROJECTIONS}
        spec = multi_head(convention.d_model, heads, projections=projects, bias=bias if projects else False)
    if spec.projections > projects:
        raise ValueError("found no weights of projections: pass weights={…}, arguments={…}, or a spec with projections false")
    rng = np.random.default_rng(seed)
    drawn = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in spec.weight_shapes().items() if name in arguments}
    matrices = found or {name: x.astype(np.float64) for name, x in drawn.items()}
    return spec, replace(adapter, heads_given=not projects, matrices=matrices, convention=convention)


def _heads_unknown(found: Mapping[str, Array]) -> Ambiguous:
    """The error that asks for the number of heads, which divides the width of the queries."""
    rows = len(found["query.weight"]) if "query.weight" in found else 12
    return Ambiguous("the number of heads; pass num_heads=…", "num_heads", [n for n in range(1, min(rows, 64) + 1) if rows % n == 0])


def _check_lengths(spec: LayerSpec) -> None:
    """ValueError: a window or chunk that no case is long enough for."""
    lengths = [length or 0 for interval in spec.intervals for length in interval]
    if max(lengths, default=0) > (longest := POSITIONAL_QUERIES - 2):
        raise ValueError(f"expected a window or chunk of at most {longest} keys, so that it matters, got {max(lengths)}")


def _heads_attribute(candidate: Any) -> int | None:
    """The number of heads of an instance, by an attribute of one of the usual names, or one whose name speaks of heads."""
    attributes = {name: n for name, n in getattr(candidate, "__dict__", {}).items() if type(n) is int and n > 0}
    usual = {n for name, n in attributes.items() if name in HEADS.split()}
    found = usual or {n for name, n in attributes.items() if re.search("head", name.lower()) and not re.search("dim|size|kv", name.lower())}
    return found.pop() if len(found) == 1 else None


def _shape_case(convention: Convention) -> CheckCase:
    """A case of ones: the first call of a lazy module makes its weights."""
    x = np.ones((2 if convention.batched else 1, 5, convention.d_model))
    everything = np.ones((*x.shape[:2], 5), bool)
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
