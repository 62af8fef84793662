"""Gradients of a torch candidate's inputs, compared with differences of the float64 reference.

The loss is the sum of the output times random numbers. The reference has no gradients of its own: each number of an input is moved up and
down by a little, and the losses of all these inputs are computed in one batch.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from attend.attention.reference.forward import value_of
from attend.check.calls import Calls
from attend.check.candidate import Candidate
from attend.check.cases import CheckCase
from attend.check.computation import largest_of
from attend.check.further.alignment import draw_alignments
from attend.check.further.backward import mistaken_gradients
from attend.check.further.look import Extent
from attend.check.further.side_outputs import SideOutput, add_results
from attend.check.low_precision import HALF
from attend.check.report import Disagreement
from attend.tensors import Array

LONGEST = 130  # keys of a call whose gradients are compared
STEP = 1e-5  # by which inputs are moved
RELATIVE = {"float64": 1e-7, "float32": 64 * 2.0**-23}  # errors of gradients, of the largest and for scores of at most 1
NAMES = {"query": "dQ", "key": "dK", "value": "dV"}


def look(called: Calls, extent: Extent) -> Disagreement | None:
    """The first wrong gradient of an input; of a candidate with a backward pass of its own, or wherever that is asked for."""
    prepared, longest = called.prepared, min(extent.longest, LONGEST)
    if not extent.backward and not _has_own_backward(prepared, called.compared[0].right.case):
        return None
    cases = prepared.draw_cases(extent.tried.seed, ("short", "parameters", "long"))
    short = (case for case in cases if case.group != "long" or case.key.shape[1] <= longest)
    pairs = zip(called.alignments, draw_alignments(prepared, extent.tried.seed, LONGEST), strict=False)
    aligned = (case for alignment, pair in pairs if (case := pair[alignment]).whole is None)
    return add_results(called, "gradients", _compare(prepared, chain(short, aligned)))


def _compare(candidate: Candidate, cases: Iterator[CheckCase]) -> Iterator[SideOutput | str]:
    """The gradients of every input, in those of the cases that have nothing but a mask or causality.

    Functions in half precision are called in float32.
    """
    if candidate.module is None and candidate.adapter.dtype in HALF:
        candidate = replace(candidate, adapter=replace(candidate.adapter, dtype="float32"))
    for case in cases:
        is_usual = (
            case.kind in ("plain", "mask", "causal") and not case.chunks and not case.undefined and not case.name.startswith("large logits")
        )
        if is_usual and not candidate.adapter.skip_reason(case):
            yield from _of_case(candidate, case)


def _of_case(candidate: Candidate, case: CheckCase) -> Iterator[SideOutput | str]:
    adapter, torch = candidate.adapter, sys.modules.get("torch")
    if torch is None or adapter.framework != "torch" or adapter.dtype not in RELATIVE:
        yield "gradients are compared of torch candidates in float32 and float64"
        return
    try:
        outside, got = _backward(candidate, case, torch)
    except Exception as error:  # whatever the backward pass raises
        yield f"its backward pass raised {error}"
        return
    scores = largest_of(case.reference(candidate.spec, candidate.weights).scores)
    for name, gradient in got.items():
        rows = _rows_of(case, name)
        expected, gradient = _differences(candidate, case, name, outside, [*got], rows), gradient[:, rows]
        tolerance = RELATIVE[adapter.dtype] * max(1.0, scores) * max(float(np.abs(expected).max()), 1e-30)
        found = SideOutput(case, NAMES[name] if len(got) > 1 else "dX", expected, gradient, tolerance)
        if found.error <= tolerance:
            yield found
            continue
        mistaken = mistaken_gradients(case.layer(candidate.spec), candidate.weights, case, outside, name) if len(got) == len(NAMES) else ()
        named = [
            words for words, x in mistaken if np.abs(x[:, rows] - gradient).max() <= tolerance + np.abs(x).max() * RELATIVE[adapter.dtype]
        ]
        yield replace(found, hints=tuple(_factor(expected, gradient, tolerance, candidate.spec.scale) or named))


def _has_own_backward(candidate: Candidate, case: CheckCase) -> bool:
    """Whether an output comes of a `torch.autograd.Function`, whose backward pass is not torch's."""
    torch = sys.modules.get("torch")
    if torch is None or candidate.adapter.framework != "torch" or candidate.adapter.dtype not in RELATIVE:
        return False
    with suppress(Exception), torch.enable_grad():  # whatever it raises
        output, _ = _differentiable(candidate, case)
        nodes, known = [output.grad_fn], set[Any]()
        while nodes:
            if (node := nodes.pop()) is not None and node not in known:
                known.add(node)
                nodes += [before for before, _ in node.next_functions]
        return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in known)
    return False


def _differentiable(candidate: Candidate, case: CheckCase) -> tuple[Any, dict[str, Any]]:
    """The output of a call as a tensor, and the inputs that it may be differentiated by, by their roles."""
    adapter, made = candidate.adapter, dict[str, Any]()
    parameters = {adapter.roles[role]: role for role in NAMES if role in adapter.roles}

    def differentiable(*args: Any, **kwargs: Any) -> Any:
        bound = adapter.signature.bind(*args, **kwargs)
        for name, role in parameters.items():
            bound.arguments[name] = made[role] = bound.arguments[name].detach().requires_grad_()
        returned = adapter.function(*bound.args, **bound.kwargs)
        result = adapter.without_residual(returned, made["query"])
        made["output"] = result[0] if isinstance(result, tuple | list) else result
        return returned

    replace(adapter, function=differentiable).call(case)
    return made.pop("output"), made


def _backward(candidate: Candidate, case: CheckCase, torch: Any) -> tuple[Array, dict[str, Array]]:
    """The random numbers of the loss [b, q, width], and the candidate's gradients by the role of the input."""
    adapter = candidate.adapter
    with torch.enable_grad():
        output, made = _differentiable(candidate, case)
        numbers = np.random.default_rng(0).standard_normal(tuple(output.shape))
        (output * torch.as_tensor(numbers, dtype=output.dtype, device=output.device)).sum().backward()
    outside = adapter.as_output(np.asarray(torch.as_tensor(numbers, dtype=output.dtype).double().numpy()))
    gradients = {}
    for role, x in made.items():
        shape = getattr(case, role).shape
        places = adapter.in_layout(np.arange(np.prod(shape)).reshape(shape), role, case)
        flat = np.zeros(int(np.prod(shape)))
        if x.grad is not None:
            flat[places.astype(int).ravel()] = x.grad.detach().cpu().double().numpy().ravel()
        gradients[role] = flat.reshape(shape)
    return outside, gradients


def _rows_of(case: CheckCase, name: str) -> list[int]:
    """The rows of an input of which the gradient is compared: all, or the first and the last ones of tiles."""
    count = getattr(case, name).shape[1]
    return [*range(count)] if case.group != "long" else [n for n in (0, 63, 64, 127, 128, count - 1) if n < count]


def _differences(candidate: Candidate, case: CheckCase, name: str, outside: Array, inputs: list[str], rows: list[int]) -> Array:
    """The gradient of the reference by rows of an input [b, rows, width]; an input that stands for others is moved in their places, too."""
    moved = {"query": ["query", *(x for x in ("key", "value") if "key" not in inputs)], "key": ["key"], "value": ["value"]}[name]
    moved += ["value"] if name == "key" and "value" not in inputs else []
    x = getattr(case, name)
    batch, width = len(x), x.shape[-1]

    def losses(row: int, sign: float) -> Array:
        arrays: dict[str, Any] = {part: np.tile(getattr(case, part), (width, 1, 1)) for part in (*NAMES, "mask", "visible")}
        for part in moved:
            arrays[part][:, row] += np.repeat(sign * STEP * np.eye(width), batch, axis=0)
        moved_case = replace(case, **arrays)
        output = value_of("output", case.layer(candidate.spec), candidate.weights, **moved_case.arguments)
        return np.asarray((output.reshape(width, *outside.shape) * outside).sum(axis=(2, 3)))  # [width, b]

    return np.stack([(losses(row, 1) - losses(row, -1)).T / (2 * STEP) for row in rows], axis=1)


def _factor(expected: Array, got: Array, tolerance: float, scale: float) -> list[str]:
    """What a wrong gradient is, if it is the right one times a factor, or nothing."""
    if not np.abs(got).max() > 0:
        return ["it is 0: no gradient reaches this input"]
    factor = float(np.sum(got * expected) / max(float(np.sum(expected**2)), 1e-300))
    if np.abs(got - factor * expected).max() > tolerance * max(1.0, abs(factor)):
        return []
    known = {1 / scale: ", as without the scale", scale: ", as with the scale twice"}
    words = next((words for number, words in known.items() if abs(factor - number) < 1e-3 * number), "")
    return [f"it is the right gradient times {factor:.4g}{words}"]
