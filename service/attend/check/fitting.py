"""Constant factors, fitted to what a candidate returned: one on the scores, one on what comes after them."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np

from attend.check.changes import Change, change_scale, replace_steps
from attend.check.computation import Computation
from attend.check.layer import Layer
from attend.check.low_precision import HALF
from attend.check.mistakes.mistake import Mistake, Named, attention
from attend.tensors import Array

IN_HALF = 5e-3  # how near a factor that is fitted to numbers in half precision is to the candidate's
MOST_STEPS = 30  # of Newton's method, which needs about 5
SMALLEST = 1e-6  # factor that is fitted; below it, all visible keys have the same weight


def fitted_scale(right: Computation, results: Mapping[str, Array]) -> Named | None:
    """The mistake of another constant factor on the scores than that of `right`; None if none is found. A caller tests whether it fits."""
    with suppress(ValueError, IndexError):
        factor = _factor_of_output(right, results["output"])
        return None if factor is None else _other_scale(factor, right.scale, right.dtype)
    return None


def _other_scale(factor: float, expected: float, dtype: str) -> Named | None:
    """The mistake of this factor on the scores; None if it is the expected one, or hardly any."""
    if dtype in HALF and math.isfinite(factor):
        factor = _short(factor, IN_HALF)
    if abs(factor) < SMALLEST or math.isclose(factor, expected, rel_tol=IN_HALF if dtype in HALF else 1e-4):
        return None
    change, about = change_scale(lambda c: factor), _about(dtype)
    if abs(factor) < 1 and abs(expected) < 1:
        name = f"the scores are divided by {about}{1 / factor:.4g} and not by {1 / expected:.4g}"
        return name, Mistake(change, attention(f"Q Kᵀ / {1 / factor:.4g}"), attention())
    name = f"the scores are multiplied by {about}{factor:.4g} and not by {expected:.4g}"
    return name, Mistake(change, attention(f"Q Kᵀ · {factor:.4g}"), attention())


def ratio_of_scales(factor: float, expected: float, dtype: str) -> Named:
    """The mistake of a factor on the scores besides the layer's own, whatever that is."""
    ratio = _short(factor / expected, IN_HALF if dtype in HALF else 1e-6)
    words = f"{_about(dtype)}{ratio:.4g}"
    name = f"the scores are multiplied by {words}, besides their scale"
    return name, Mistake(change_scale(lambda c: ratio * c.scale), attention(f"{ratio:.4g} · Q Kᵀ{{scale}}"), attention())


def width_of_scale(made: Mistake | None, right: Computation) -> int | None:
    """The width of heads, a multiple of 8, whose usual scale the scores have with this mistake; None if it is none, or the right one."""
    with suppress(ValueError, IndexError):
        scale = right.scale if made is None else made.change(right).scale
        width = 8 * round(scale**-2 / 8) if scale > SMALLEST else 0
        if width and math.isclose(scale, width**-0.5, rel_tol=1e-6) and not math.isclose(scale, right.scale, rel_tol=1e-6):
            return width
    return None


def _about(dtype: str) -> str:
    """What is said before a factor that is fitted to numbers in half precision."""
    return "about " if dtype in HALF else ""


def fitted_factors(right: Computation, results: Mapping[str, Array]) -> Iterator[Named]:
    """The mistakes of a constant factor on the weights, on the outputs of the heads, and on the output. A caller tests whether they fit."""
    expected = right.outputs()["output"]
    if results["output"].shape != expected.shape:
        return
    bias = right.weights.get("output.bias", np.zeros(1))
    for place, change, wrong, shift in (
        ("the weights", lambda by: _times(by, "mixed_weights"), "({factor} · softmax(S)) V", bias),
        ("the outputs of the heads", lambda by: _times(by, "apply_weights"), "{factor} · softmax(S) V", bias),
        ("the output", lambda by: lambda c: replace(c, factor=by), "{factor} · (concat(o) W_o + b_o)", np.zeros(1)),
    ):
        one, other = expected - shift, results["output"] - shift
        near = IN_HALF if right.dtype in HALF else 1e-5
        factor = _short(float(np.sum(one * other) / np.sum(one * one)), near)
        if math.isfinite(factor) and abs(factor) > SMALLEST and not math.isclose(factor, 1, rel_tol=10 * near):
            verb = "is" if place == "the output" else "are"
            right_sum = "concat(o) W_o + b_o" if place == "the output" else "softmax(S) V"
            name = f"{place} {verb} multiplied by {_about(right.dtype)}{factor:.4g}"
            yield name, Mistake(change(factor), wrong.format(factor=f"{factor:.4g}"), right_sum)


def _short(factor: float, near: float) -> float:
    """The shortest decimal number whose relative distance from a factor is at most `near`, or the reciprocal of a shorter one."""
    if not math.isfinite(factor) or not factor:
        return factor
    found = [
        (digits + (value != made), made)
        for digits in range(1, 7)
        for value in (float(f"{factor:.{digits}g}"), float(f"{1 / factor:.{digits}g}"))
        for made in (value, 1 / value)
        if math.isclose(made, factor, rel_tol=near)
    ]
    return min(found, key=lambda x: (x[0], abs(x[1] - factor)))[1] if found else factor


def _times(factor: float, method: str) -> Change:
    return replace_steps(**{method: lambda layer, *operands: factor * getattr(Layer, method)(layer, *operands)})


def _factor_of_output(right: Computation, output: Array) -> float | None:
    """The factor whose output is nearest to the observed one: of a grid of factors, and then by halving steps."""
    if not np.isfinite(output).all():
        return None

    def distance(factor: float) -> float:
        error = float(np.abs(errors(factor)).max())
        return error if math.isfinite(error) else math.inf

    def errors(factor: float) -> Array:
        return right.with_scale(factor).outputs()["output"] - output

    grid = [sign * abs(right.scale) * 2.0**power for sign in (1, -1) for power in range(-6, 7)]
    best = min(grid, key=distance)
    if distance(best) > 0.5 * float(np.abs(output).max()):  # not even near
        return None
    best = least_squares(errors, best)
    short = _short(best, 1e-6)  # what people write in a program
    return short if distance(short) <= 1.5 * distance(best) else best


def least_squares(errors: Callable[[float], Array], factor: float) -> float:
    """The factor near this one with the smallest errors, by Newton's method on their squares."""
    at = errors(factor)
    for _ in range(MOST_STEPS):
        slope = (errors(factor * (1 + 1e-6)) - at) / (factor * 1e-6)
        step = float(np.sum(at * slope) / np.sum(slope * slope))
        while abs(step) > 1e-15 * abs(factor):
            after = errors(factor - step)
            if np.sum(after**2) < np.sum(at**2):
                factor, at = factor - step, after
                break
            step /= 4
        else:
            break
    return factor
