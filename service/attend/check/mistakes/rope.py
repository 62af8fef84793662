"""Mistakes in the formula of RoPE: x · cos(angles) + rotate_half(x) · sin(angles), with angles = position · theta^(-2i/d)."""

from collections.abc import Callable

import numpy as np

from attend.attention.operators.rope import Rope, frequencies
from attend.check.changes import Change, only_if, replace_steps
from attend.check.layer import Layer
from attend.check.low_precision import to_precision
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array

Function = Callable[[Array], Array]
Partners = Callable[[Array, Array], tuple[Array, Array]]
RIGHT = "x * cos(a) + rotate_half(x) * sin(a)"
PARTNERS: dict[str, Partners] = {  # what takes the place of rotate_half(x) = (-x2, x1)
    "(x2, x1)": lambda x1, x2: (x2, x1),
}


def rotate_half(x1: Array, x2: Array) -> tuple[Array, Array]:
    return -x2, x1


def rope_as(
    cos: Function = np.cos,
    sin: Function = np.sin,
    partners: Partners = rotate_half,
    frequency: Callable[[float, int], Array] | None = None,
) -> Change:
    """RoPE by another formula: x · cos(a) + partners(x) · sin(a), or with frequencies that are a function of theta and the width."""

    def rotate(layer: Layer, x: Array, name: str, positions: Array) -> Array:
        rope = layer.spec.rope
        assert rope is not None
        dims = rope.dims or x.shape[-1]
        of_points = frequencies(rope, dims) if frequency is None else frequency(rope.theta, dims)
        angles = positions[:, None, :, None] * of_points
        first, second = _points(rope, dims)
        rotated = x.copy()
        one, two = partners(x[..., first], x[..., second])
        rotated[..., first] = rope.attention_factor * (x[..., first] * cos(angles) + one * sin(angles))
        rotated[..., second] = rope.attention_factor * (x[..., second] * cos(angles) + two * sin(angles))
        return rotated

    return only_if(lambda c: c.spec.rope and not c.spec.rope.axes and c.spec.num_softmaxes == 1, replace_steps(rotate=rotate))


def _points(rope: Rope, dims: int) -> tuple[slice, slice]:
    """Where the two coordinates of each point are."""
    if rope.interleaved:
        return slice(0, dims, 2), slice(1, dims, 2)
    return slice(0, dims // 2), slice(dims // 2, dims)


FREQUENCIES: dict[str, Callable[[float, int], Array]] = {
    "theta^(2i/d)": lambda theta, d: theta ** (np.arange(0, d, 2) / d),
    "theta^(-i/d)": lambda theta, d: theta ** (-np.arange(0, d // 2) / d),
    "theta^(-4i/d)": lambda theta, d: theta ** (-2 * np.arange(0, d, 2) / d),
    "theta^(-2i/(d - 2))": lambda theta, d: theta ** (-np.arange(0, d, 2) / (d - 2)),
}


def _rounded(dtype: str, function: Function) -> Function:
    """A function of angles in few digits."""
    return lambda a: to_precision(function(to_precision(a, dtype)), dtype)


ROUNDED: dict[str, Callable[[str], Change]] = {  # what is rounded -> its change, by dtype
    "RoPE's frequencies are rounded to {dtype}": lambda dtype: rope_as(
        frequency=lambda theta, d: to_precision(theta ** (-np.arange(0, d, 2) / d), dtype)
    ),
    "RoPE's frequencies are 1 / theta^(2i/d), each step rounded to {dtype}": lambda dtype: rope_as(
        frequency=lambda theta, d: to_precision(1 / to_precision(theta ** to_precision(np.arange(0, d, 2) / d, dtype), dtype), dtype)
    ),
    "RoPE's angles are rounded to {dtype}": lambda dtype: rope_as(
        lambda a: np.cos(to_precision(a, dtype)), lambda a: np.sin(to_precision(a, dtype))
    ),
    "RoPE's sines and cosines are rounded to {dtype}": lambda dtype: rope_as(
        lambda a: to_precision(np.cos(a), dtype), lambda a: to_precision(np.sin(a), dtype)
    ),
    "RoPE's angles, sines and cosines are rounded to {dtype}": lambda dtype: rope_as(_rounded(dtype, np.cos), _rounded(dtype, np.sin)),
}

MISTAKES: dict[str, dict[str, Mistake]] = {
    "rope frequencies": computing(
        "frequencies theta^(-2i/d)",
        {
            f"RoPE's frequencies are {words} and not theta^(-2i/d)": (f"frequencies {words}", rope_as(frequency=of_theta))
            for words, of_theta in FREQUENCIES.items()
        }
        | {
            words.format(dtype=dtype): ("R in fewer digits", change(dtype))
            for words, change in ROUNDED.items()
            for dtype in ("bfloat16", "float16")
        },
    ),
    "rope formula": computing(
        RIGHT,
        {"RoPE's sines and cosines are exchanged": ("x * sin(a) + rotate_half(x) * cos(a)", rope_as(np.sin, np.cos))}
        | {
            f"RoPE's rotate_half(x) returns {words} and not (-x2, x1)": (f"rotate_half(x) = {words}", rope_as(partners=partners))
            for words, partners in PARTNERS.items()
        },
    ),
}
