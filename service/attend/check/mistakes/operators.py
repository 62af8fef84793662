"""Mistakes in operators: one that is left out, that has another value in a field of the spec, or that is computed by another formula."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attend.attention.operators import OPERATORS
from attend.attention.operators.alibi import slopes
from attend.attention.operators.rope import Rope, frequencies
from attend.attention.program import sections_of
from attend.check.changes import Change, at_step, at_steps, change_part, change_spec, impossible, map_weights, only_if
from attend.check.computation import Computation
from attend.check.low_precision import to_precision
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array

Function = Callable[[Array], Array]


def change_slopes(wrong: Callable[[int], Array]) -> Change:
    """Replaces ALiBi's slopes by others of this number of heads: [h]. Impossible if they are the same."""
    change = at_step("alibi", lambda compute, positions, keys, right: compute(positions, keys, wrong(len(right))))
    return only_if(lambda c: c.spec.alibi and not np.array_equal(wrong(c.spec.num_heads), slopes(c.spec.num_heads)), change)


def _powers(heads: int, first: int) -> Array:
    """2^(-8i/n) for n heads, i from `first` on: [h]."""
    return np.asarray(2.0 ** (-8 * (first + np.arange(heads)) / heads))


def scale_biases(c: Computation) -> Computation:
    """Multiplies the biases of positions by the scale of the scores. Impossible if that is 1, or there are none."""
    names = [step.name for step in sections_of(c.spec)["biases"] if c.scale != 1]
    return at_steps(names, lambda compute, *operands: c.scale * compute(*operands))(c) if names else impossible()


def rope_as(
    cos: Function = np.cos,
    sin: Function = np.sin,
    frequency: Callable[[float, int], Array] | None = None,
    *,
    sign: int = -1,
    other_pairs: bool = False,
) -> Change:
    """RoPE by another formula: x · cos(a) + (sign · x2, x1) · sin(a), or with frequencies that are a function of theta and the width.

    `other_pairs`: numbers have the angles f0 f0 f1 f1 … of neighbours where those of halves fit, f0 f1 … f0 f1 …, or the reverse.
    """

    def rotate(rope: Rope, compute: Any, x: Array, positions: Array, *others: Any) -> Array:
        dims, rotated = rope.dims or x.shape[-1], x.copy()
        of_pairs = np.array(frequencies(rope, dims)) if frequency is None else frequency(rope.theta, dims)
        of_numbers = np.repeat(of_pairs, 2) if rope.interleaved is not other_pairs else np.tile(of_pairs, 2)
        half = dims // 2
        first, second = (slice(0, dims, 2), slice(1, dims, 2)) if rope.interleaved else (slice(0, half), slice(half, dims))
        for at, partner, factor in ((first, second, sign), (second, first, 1)):
            angles = positions[:, None, :, None] * of_numbers[at]
            rotated[..., at] = rope.attention_factor * (x[..., at] * cos(angles) + factor * x[..., partner] * sin(angles))
        return rotated

    def change(c: Computation) -> Computation:
        rope = c.spec.rope
        if rope is None or rope.axes or c.spec.num_softmaxes > 1:
            impossible()
        return at_steps(("rotate_query", "rotate_key"), partial(rotate, rope))(c)

    return change


FREQUENCIES: dict[str, Callable[[float, int], Array]] = {
    "theta^(2i/d)": lambda theta, d: theta ** (np.arange(0, d, 2) / d),
    "theta^(-i/d)": lambda theta, d: theta ** (-np.arange(0, d // 2) / d),
    "theta^(-4i/d)": lambda theta, d: theta ** (-2 * np.arange(0, d, 2) / d),
    "theta^(-2i/(d - 2))": lambda theta, d: theta ** (-np.arange(0, d, 2) / (d - 2)),
}
ROUNDED: dict[str, Callable[[Function], Change]] = {  # what is rounded -> its change, by what rounds
    "frequencies are": lambda to: rope_as(frequency=lambda theta, d: to(theta ** (-np.arange(0, d, 2) / d))),
    "frequencies are 1 / theta^(2i/d), each step": lambda to: rope_as(
        frequency=lambda theta, d: to(1 / to(theta ** to(np.arange(0, d, 2) / d)))
    ),
    "angles are": lambda to: rope_as(lambda a: np.cos(to(a)), lambda a: np.sin(to(a))),
    "sines and cosines are": lambda to: rope_as(lambda a: to(np.cos(a)), lambda a: to(np.sin(a))),
    "angles, sines and cosines are": lambda to: rope_as(lambda a: to(np.cos(to(a))), lambda a: to(np.sin(to(a)))),
}

MISTAKES: dict[str, Mistake] = {
    **{
        f"{left_out.name} is left out": Mistake(
            change_spec(**{operator.field: lambda spec, field=operator.field: False if getattr(spec, field) is True else None}),
            left_out.computed,
            left_out.expected,
        )
        for operator in OPERATORS
        if (left_out := operator.left_out) is not None
    },
    "the scores are normalised by a plain softmax": Mistake(
        change_spec(normalizer=lambda spec: "softmax"), "P = softmax(S)", "P = sigmoid(S)"
    ),
    **computing(
        "query i sees the keys j ≥ i - left",
        {
            f"the window has one key {words}": (
                f"query i sees the keys j ≥ i - left {sign} 1",
                change_part("window", left=lambda window, by=by: None if window.left is None else max(window.left + by, 0)),
            )
            for words, sign, by in (("more", "-", 1), ("less", "+", -1))
        },
    ),
    **computing(
        "softmax(S + B), B_ij = b[bucket(j - i)]",
        {
            f"relative biases are off by one: each is that of the bucket {words}": (
                f"softmax(S + B), B_ij = b[bucket(j - i) {sign} 1]",
                map_weights("relative_bias", partial(np.roll, shift=by, axis=0)),
            )
            for words, sign, by in (("before", "-", 1), ("after", "+", -1))
        },
    ),
    "ALiBi's slopes begin at 1, that of i = 0": Mistake(
        change_slopes(lambda heads: _powers(heads, 0)), "slopes 2^(-8i/n), i from 0, of n heads (ALiBi)", "{slopes} (ALiBi)"
    ),
    "ALiBi's slopes for a number of heads that is not a power of 2 are powers of 2^(-8/n)": Mistake(
        change_slopes(lambda heads: _powers(heads, 1)),
        "slopes 2^(-8i/n), i from 1, of n heads (ALiBi)",
        "slopes of 2^m heads, then every other of 2^(m+1) heads (ALiBi)",
    ),
    "the biases of positions are added before the scores are scaled": Mistake(
        scale_biases, "softmax((Q Kᵀ + B){scale}), B: biases of positions", "softmax(Q Kᵀ{scale} + B), B: biases of positions"
    ),
    **computing(
        "frequencies theta^(-2i/d), scaled",
        {
            "the scaling of RoPE's frequencies is ignored": (
                "frequencies theta^(-2i/d)",
                change_part("rope", scaling=None, frequencies=None, attention_factor=1.0),
            ),
            "every frequency of RoPE is divided by the factor, and not the low ones alone": (
                "frequencies theta^(-2i/d) / factor",
                change_part("rope", scaling=lambda rope: rope.scaling and rope.scaling.model_copy(update={"type": "linear"})),
            ),
        },
    ),
    "RoPE's attention_factor is ignored": Mistake(change_part("rope", attention_factor=1.0), "R(i) q_i", "attention_factor · R(i) q_i"),
    "RoPE has theta 10000 and not the layer's": Mistake(change_part("rope", theta=10000.0), "10000^(-2i/d)", "theta^(-2i/d)"),
    "RoPE's frequencies are theta^(-2i/d_model), of the width of all heads and not of one": Mistake(
        change_spec(rope=lambda spec: (x := spec.rope) and x.model_copy(update={"theta": x.theta ** (spec.head_dim / spec.d_model)})),
        "theta^(-2i/d_model)",
        "theta^(-2i/d)",
    ),
    "RoPE rotates halves of each head and not neighbouring pairs": Mistake(
        change_part("rope", interleaved=False), "rotates (x[i], x[i + d/2])", "rotates (x[2i], x[2i + 1])"
    ),
    "RoPE rotates neighbouring pairs and not halves of each head": Mistake(
        change_part("rope", interleaved=True), "rotates (x[2i], x[2i + 1])", "rotates (x[i], x[i + d/2])"
    ),
    "RoPE's angles are repeated as for neighbours and applied to halves (repeat_interleave for cat), or the reverse": Mistake(
        rope_as(other_pairs=True), "cos and sin of f0 f0 f1 f1 … where f0 f1 … f0 f1 … fit", "R(i) q_i · R(j) k_j"
    ),
    "RoPE's rotate_half(x) returns (x2, x1) and not (-x2, x1)": Mistake(
        rope_as(sign=1), "rotate_half(x) = (x2, x1)", "x * cos(a) + rotate_half(x) * sin(a)"
    ),
    **computing(
        "frequencies theta^(-2i/d)",
        {
            f"RoPE's frequencies are {words} and not theta^(-2i/d)": (f"frequencies {words}", rope_as(frequency=of_theta))
            for words, of_theta in FREQUENCIES.items()
        }
        | {
            f"RoPE's {words} rounded to {dtype}": ("R in fewer digits", change(partial(to_precision, dtype=dtype)))
            for words, change in ROUNDED.items()
            for dtype in ("bfloat16", "float16")
        },
    ),
    "the norm is taken per head and not over the full width of all heads": Mistake(
        change_part("qk_norm", over="head"), "mean(x²) over each head", "mean(x²) over all heads of a row"
    ),
    "the norm is taken over the full width of all heads and not per head": Mistake(
        change_part("qk_norm", over="all"), "mean(x²) over all heads of a row", "mean(x²) over each head"
    ),
    "1 + w is forgotten: norms multiply by their parameter w (see norm_weights)": Mistake(
        map_weights("_norm.weight", lambda w: w - 1), "w * x / sqrt(mean(x²))", "(1 + w) * x / sqrt(mean(x²))"
    ),
    "norms multiply by 1 + w and not by their parameter w (see norm_weights)": Mistake(
        map_weights("_norm.weight", lambda w: w + 1), "(1 + w) * x / sqrt(mean(x²))", "w * x / sqrt(mean(x²))"
    ),
    "norms ignore their parameter w": Mistake(map_weights("_norm.weight", np.ones_like), "x / sqrt(mean(x²))", "w * x / sqrt(mean(x²))"),
}
