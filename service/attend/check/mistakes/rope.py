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
FACTORS: dict[str, Function] = {
    " * cos(a)": np.cos,
    " * sin(a)": np.sin,
    "": np.ones_like,
    " / cos(a)": lambda a: 1 / np.cos(a),
    " / sin(a)": lambda a: 1 / np.sin(a),
    " * a": lambda a: a,
}
WRONG_FACTORS = [(" * sin(a)", " * cos(a)")] + [
    pair for wrong in FACTORS for pair in ((wrong, " * sin(a)"), (" * cos(a)", wrong)) if pair != (" * cos(a)", " * sin(a)")
]
PARTNERS: dict[str, Partners] = {  # what takes the place of rotate_half(x) = (-x2, x1)
    "(x2, x1)": lambda x1, x2: (x2, x1),
    "(x1, -x2)": lambda x1, x2: (x1, -x2),
    "(-x1, x1)": lambda x1, x2: (-x1, x1),
    "(-x2, x2)": lambda x1, x2: (-x2, x2),
    "(x1, x2)": lambda x1, x2: (x1, x2),
    "(-x1, x2)": lambda x1, x2: (-x1, x2),
}


def rotate_half(x1: Array, x2: Array) -> tuple[Array, Array]:
    return -x2, x1


def rope_as(
    cos: Function = np.cos,
    sin: Function = np.sin,
    partners: Partners = rotate_half,
    frequency: Callable[[float, int], Array] | None = None,
    names: tuple[str, ...] = ("query", "key"),
) -> Change:
    """RoPE by another formula: x · cos(a) + partners(x) · sin(a), or with frequencies that are a function of theta and the width."""

    def rotate(layer: Layer, x: Array, name: str, positions: Array) -> Array:
        rope = layer.spec.rope
        assert rope is not None
        if name not in names:
            return Layer.rotate(layer, x, name, positions)
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


def _signed(sign: float, function: Function) -> Function:
    return lambda a: sign * function(a)


def _frequencies(times: float = 1.0, theta_times: float = 1.0) -> Callable[[float, int], Array]:
    return lambda theta, d: np.asarray(times * (theta * theta_times) ** (-np.arange(0, d, 2) / d))


FREQUENCIES: dict[str, Callable[[float, int], Array]] = {
    "theta^(2i/d)": lambda theta, d: theta ** (np.arange(0, d, 2) / d),
    "theta^(-i/d)": lambda theta, d: theta ** (-np.arange(0, d // 2) / d),
    "theta^(-4i/d)": lambda theta, d: theta ** (-2 * np.arange(0, d, 2) / d),
    "theta^(-(2i + 1)/d)": lambda theta, d: theta ** (-np.arange(1, d + 1, 2) / d),
    "theta^(-2i/(d - 2))": lambda theta, d: theta ** (-np.arange(0, d, 2) / (d - 2)),
    "theta^(-2i)": lambda theta, d: theta ** -np.arange(0.0, d, 2),
    "theta^(-2i * d)": lambda theta, d: theta ** (-np.arange(0.0, d, 2) * d),
    "theta^(-d/2i)": lambda theta, d: theta ** (-d / np.arange(0, d, 2)),
    "1 / (theta * 2i / d)": lambda theta, d: 1 / (theta * np.arange(0, d, 2) / d),
    "theta * 2i / d": lambda theta, d: theta * np.arange(0, d, 2) / d,
    "(2i/d)^-theta": lambda theta, d: (np.arange(0, d, 2) / d) ** -theta,
    "1 / theta": lambda theta, d: np.full(d // 2, 1 / theta),
    "1": lambda theta, d: np.ones(d // 2),
    "2i/d": lambda theta, d: np.arange(0, d, 2) / d,
    "1 - 2i/d": lambda theta, d: 1 - np.arange(0, d, 2) / d,
    "theta^(-2i/d) in the reverse order": lambda theta, d: theta ** (-np.arange(0, d, 2)[::-1] / d),
}
OTHER_THETAS = (2.0, 0.5, 10.0, 0.1, 100.0, 0.01)
OTHER_FACTORS = (2.0, 0.5, 0.1, 10.0, 2 * np.pi)


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
            f"RoPE has theta times {factor:g}": (
                f"frequencies ({factor:g} theta)^(-2i/d)",
                rope_as(frequency=_frequencies(theta_times=factor)),
            )
            for factor in OTHER_THETAS
        }
        | {
            f"RoPE's frequencies are multiplied by {factor:.4g}": (
                f"frequencies {factor:.4g} theta^(-2i/d)",
                rope_as(frequency=_frequencies(times=factor)),
            )
            for factor in OTHER_FACTORS
        }
        | {
            words.format(dtype=dtype): ("R in fewer digits", change(dtype))
            for words, change in ROUNDED.items()
            for dtype in ("bfloat16", "float16")
        },
    ),
    "rope formula": computing(
        RIGHT,
        {
            f"RoPE computes x{one} {sign} rotate_half(x){two} and not {RIGHT}": (
                f"x{one} {sign} rotate_half(x){two}",
                rope_as(FACTORS[one], _signed(s, FACTORS[two])),
            )
            for one, two in WRONG_FACTORS
            for sign, s in (("+", 1.0), ("-", -1.0))
            if one != two or sign == "+"  # which gives the same products
        }
        | {f"RoPE computes x{one} and not {RIGHT}": (f"x{one}", rope_as(cos, np.zeros_like)) for one, cos in FACTORS.items() if one}
        | {
            f"RoPE's rotate_half(x) returns {words} and not (-x2, x1)": (f"rotate_half(x) = {words}", rope_as(partners=partners))
            for words, partners in PARTNERS.items()
        },
    ),
}
