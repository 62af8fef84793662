"""Mistakes in RoPE and in relative biases."""

from collections.abc import Callable
from functools import partial

import numpy as np

from attend.attention.operators.alibi import slopes
from attend.attention.operators.rope import Rope
from attend.attention.program import sections_of
from attend.check.changes import (
    Change,
    at_step,
    at_steps,
    change_part,
    change_spec,
    impossible,
    map_weights,
    only_if,
    replace_steps,
    rotate_with_angles_of_other_pairs,
)
from attend.check.computation import Computation
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array


def _with_linear_scaling(rope: Rope | None) -> Rope | None:
    return rope and rope.model_copy(update={"scaling": rope.scaling and rope.scaling.model_copy(update={"type": "linear"})})


def _with_theta_to(rope: Rope | None, power: float) -> Rope | None:
    return rope and rope.model_copy(update={"theta": rope.theta**power})


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


MISTAKES: dict[str, dict[str, Mistake]] = {
    "buckets": computing(
        "softmax(S + B), B_ij = b[bucket(j - i)]",
        {
            f"relative biases are off by one: each is that of the bucket {words}": (
                f"softmax(S + B), B_ij = b[bucket(j - i) {sign} 1]",
                map_weights("relative_bias", partial(np.roll, shift=by, axis=0)),
            )
            for words, sign, by in (("before", "-", 1), ("after", "+", -1))
        }
        | {
            f"relative biases are off by one: each is that of the key {words}": (
                f"softmax(S + B), B_ij = b[bucket(j - i {sign} 1)]",
                only_if(
                    lambda c: c.spec.relative_bias,
                    at_step("t5_bias", lambda compute, at, keys, table, by=by: compute(at, keys + by, table)),
                ),
            )
            for words, sign, by in (("after", "+", 1), ("before", "-", -1))
        },
    ),
    "alibi + slopes": computing(  # not combined with "alibi", which leaves it out
        "{slopes} (ALiBi)",
        {
            "ALiBi's slopes begin at 1, that of i = 0": (
                "slopes 2^(-8i/n), i from 0, of n heads (ALiBi)",
                change_slopes(lambda heads: _powers(heads, 0)),
            ),
        },
    )
    | computing(
        "slopes of 2^m heads, then every other of 2^(m+1) heads (ALiBi)",
        {
            "ALiBi's slopes for a number of heads that is not a power of 2 are powers of 2^(-8/n)": (
                "slopes 2^(-8i/n), i from 1, of n heads (ALiBi)",
                change_slopes(lambda heads: _powers(heads, 1)),
            ),
        },
    ),
    "bias scale": computing(
        "softmax(Q Kᵀ{scale} + B), B: biases of positions",
        {
            "the biases of positions are added before the scores are scaled": (
                "softmax((Q Kᵀ + B){scale}), B: biases of positions",
                scale_biases,
            ),
        },
    ),
    "rope scaling": computing(
        "frequencies theta^(-2i/d), scaled",
        {
            "the scaling of RoPE's frequencies is ignored": (
                "frequencies theta^(-2i/d)",
                change_part("rope", scaling=None, frequencies=None, attention_factor=1.0),
            ),
            "every frequency of RoPE is divided by the factor, and not the low ones alone": (
                "frequencies theta^(-2i/d) / factor",
                change_spec(rope=lambda spec: _with_linear_scaling(spec.rope)),
            ),
        },
    ),
    "rope factor": {
        "RoPE's attention_factor is ignored": Mistake(change_part("rope", attention_factor=1.0), "R(i) q_i", "attention_factor · R(i) q_i")
    },
    "rope theta": {
        "RoPE has theta 10000 and not the layer's": Mistake(change_part("rope", theta=10000.0), "10000^(-2i/d)", "theta^(-2i/d)"),
        "RoPE's frequencies are theta^(-2i/d_model), of the width of all heads and not of one": Mistake(
            change_spec(rope=lambda spec: _with_theta_to(spec.rope, spec.head_dim / spec.d_model)), "theta^(-2i/d_model)", "theta^(-2i/d)"
        ),
    },
    "rope pairs": {
        "RoPE rotates halves of each head and not neighbouring pairs": Mistake(
            change_part("rope", interleaved=False), "rotates (x[i], x[i + d/2])", "rotates (x[2i], x[2i + 1])"
        ),
        "RoPE rotates neighbouring pairs and not halves of each head": Mistake(
            change_part("rope", interleaved=True), "rotates (x[2i], x[2i + 1])", "rotates (x[i], x[i + d/2])"
        ),
    },
    "rope turn": computing(
        "R(i) q_i · R(j) k_j",
        {
            "RoPE's angles are repeated as for neighbours and applied to halves (repeat_interleave for cat), or the reverse": (
                "cos and sin of f0 f0 f1 f1 … where f0 f1 … f0 f1 … fit",
                replace_steps(rotate=rotate_with_angles_of_other_pairs),
            ),
        },
    ),
}
