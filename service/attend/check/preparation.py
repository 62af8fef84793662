"""Prepares a candidate: constructs a class, makes the adapter that calls it, reads or draws its weights.

Torch is used only where the caller has imported it. A module runs in evaluation mode without gradients and is left as it was.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from attend.check.adapter import Adapter
from attend.check.arrays import is_module
from attend.check.called import make_adapter
from attend.check.candidate import Candidate, evaluation_of
from attend.check.cases import POSITIONAL_QUERIES, CheckCase
from attend.check.constructor import constructed
from attend.check.convention import CALL, HEADS, ROPE_TABLES, Ambiguous, Convention, Orientation, RopeTables
from attend.check.loading import load_candidate
from attend.check.rope_tables import with_rope
from attend.check.weights import complete_weights, distance_of_biases, eps_of_norms, is_matrix, multi_head, plain_spec, read_weights
from attend.check.windows import passing_window, with_window
from attend.checkpoints.reader import FLAGS, WITH_WEIGHTS
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array


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
        candidate, convention = constructed(candidate, spec, convention, seed, groups)
    heads = convention.num_heads or _heads_attribute(candidate)
    if is_module(candidate):
        candidate, left_out = _without(candidate, convention.left_out)
        adapter = make_adapter(candidate, convention, "torch", heads)
        adapter = replace(adapter, others=(*adapter.others, *left_out))
        if any(hasattr(p, "materialize") for p in candidate.parameters()):
            with evaluation_of(candidate):
                adapter.call(_shape_case(convention))
        return _add_weights(adapter, spec, read_weights(candidate, True, convention), heads, candidate, seed)
    weights = read_weights(candidate, False, convention)
    if convention.framework is None and weights and (convention.weights is None or convention.names_weights):
        convention = replace(convention, framework="numpy")  # its weights are NumPy arrays
    if (framework := convention.framework) is None:
        usual = ("numpy", *(name for name in ("torch", "mlx") if name in sys.modules))  # those of JAX take arrays of NumPy
        raise Ambiguous('whose arrays it takes; pass framework="torch" or "numpy"', "framework", usual)
    return _add_weights(make_adapter(candidate, convention, framework, heads), spec, weights, heads, None, seed)


def _add_weights(
    adapter: Adapter, spec: LayerSpec | None, found: Mapping[str, Array], heads: int | None, module: Any, seed: int
) -> Candidate:
    """The candidate with its spec and weights: those found in it, or those passed to a function."""
    is_given, adapter = spec is not None, passing_window(adapter, spec)
    arguments = [role for role in adapter.roles if role not in CALL]  # weights that the candidate takes as arguments
    if arguments or not found:
        spec, adapter = _prepare_function(adapter, spec, found, arguments, heads, seed)
        found = adapter.matrices
    elif heads is None:
        raise _heads_unknown(found)
    spec = spec or plain_spec(found, heads or 1, eps_of_norms(module), distance_of_biases(module))
    if names := [name for role, name in adapter.roles.items() if role in ROPE_TABLES]:
        if adapter.convention.rope_tables is None:
            raise Ambiguous(f"the axes of {' and '.join(names)}; pass rope_tables=…", "rope_tables", get_args(RopeTables))
        spec = spec if is_given else with_rope(spec)
    spec = spec if is_given else _with_softcap(with_window(spec, adapter.convention), adapter, module)
    weights = complete_weights(found, spec, adapter.convention)
    _check_lengths(spec)
    adapter = replace(adapter, heads=spec.num_heads, kv_heads=spec.num_kv_heads)
    with evaluation_of(module) if module is not None else nullcontext():
        adapter = replace(adapter, keeps_cache=adapter.keeps_rows(_shape_case(adapter.convention)))
    return Candidate(adapter, spec, weights, module)


def _with_softcap(spec: LayerSpec, adapter: Adapter, module: Any) -> LayerSpec:
    """The layer with the softcap that calls have by default, or that a module has as an attribute of one of its usual names."""
    values = [getattr(module, name, None) for name in CALL["softcap"].split()]
    values += [adapter.signature.parameters[adapter.roles["softcap"]].default] if "softcap" in adapter.roles else []
    default = next((x for x in reversed(values) if type(x) in (int, float) and x > 0), None)
    return spec if default is None else LayerSpec.model_validate(spec.model_dump(exclude_unset=True) | {"softcap": default})


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
    if spec is None and not projects and any(map(is_matrix, found)):
        names = [adapter.roles[role] for role in arguments]
        unused = json.dumps(dict.fromkeys(names, "unused"))
        raise ValueError(f"it has weights and takes {', '.join(names)}, too: pass arguments={unused} if that is optional, or a spec")
    if spec is None:
        bias = {name: f"{name}.bias" in arguments for name in PROJECTIONS}
        with_weights = {field: True for field in FLAGS if WITH_WEIGHTS[field] in arguments}
        spec = multi_head(convention.d_model, heads, projections=projects, bias=bias if projects else False, **with_weights)
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
        rows = f"since the short calls have {POSITIONAL_QUERIES} rows"
        raise ValueError(
            f"expected a window or chunk of at most {longest} keys, {rows}, got {max(lengths)}: construct or call it with less"
        )


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
