"""Mistakes in RoPE and in relative biases."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attend.attention.operators.alibi import slopes
from attend.attention.operators.rope import Rope
from attend.attention.program import parts_of
from attend.check.changes import (
    Change,
    Impossible,
    change_part,
    change_spec,
    map_weights,
    only_if,
    replace_steps,
    rotate_with_angles_of_other_pairs,
)
from attend.check.computation import Computation
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array


def _with_linear_scaling(rope: Rope | None) -> Rope | None:
    return rope and rope.model_copy(update={"scaling": rope.scaling and rope.scaling.model_copy(update={"type": "linear"})})


def rotate_at(places: Callable[[str, Array], Array | None]) -> Change:
    """RoPE at other positions, a function of "query" or "key" and the right ones; None: these are not rotated.

    The rotation itself may be wrong, too: its mistakes are made first.
    """

    def change(c: Computation) -> Computation:
        steps = c.layer

        def rotate(layer: Layer, x: Array, name: str, positions: Array) -> Array:
            other = places(name, positions)
            return x if other is None else steps.rotate(layer, x, name, other)

        return replace_steps(rotate=rotate)(c)

    return change


def rotate_alone(rotated: str) -> Change:
    """RoPE of the queries or keys alone."""
    return rotate_at(lambda name, positions: positions if name == rotated else None)


def shift_keys(by: int) -> Change:
    """Takes the relative bias of another key."""

    def position_bias(layer: Layer, request: Any, q: Any, at: Any) -> Any:
        return Layer.position_bias(layer, request, q, replace(at, ahead=at.ahead + by))

    return only_if(lambda c: c.spec.relative_bias, replace_steps(position_bias=position_bias))


def change_slopes(wrong: Callable[[int], Array]) -> Change:
    """Replaces ALiBi's slopes by others of this number of heads: [h]. Impossible if they are the same."""

    def change(c: Computation) -> Computation:
        difference = wrong(c.spec.num_heads) - _right_slopes(c.spec.num_heads)
        if not c.spec.alibi or not difference.any():
            raise Impossible
        steps = c.layer

        def position_bias(layer: Layer, request: Any, q: Any, at: Any) -> Any:
            return steps.position_bias(layer, request, q, at) - difference[:, None, None] * np.abs(at.ahead)

        return replace_steps(position_bias=position_bias)(c)

    return change


def _right_slopes(heads: int) -> Array:
    """Those of ALiBi: [h]."""
    return np.array(slopes(heads))


def _powers(heads: int, first: int) -> Array:
    """2^(-8i/n) for n heads, i from `first` on: [h]."""
    return np.asarray(2.0 ** (-8 * (first + np.arange(heads)) / heads))


def _scale_biases(c: Computation) -> Computation:
    """Multiplies the biases of positions by the scale of the scores."""
    steps = c.layer

    def position_bias(layer: Layer, request: Any, q: Any, at: Any) -> Any:
        return c.spec.scale * steps.position_bias(layer, request, q, at)

    return replace_steps(position_bias=position_bias)(c)


SCALE_BIASES = only_if(lambda c: c.spec.scale != 1 and parts_of(c.spec)["biases"], _scale_biases)


def shift_positions(shifted: str, by: int) -> Change:
    """RoPE of the queries or keys (`shifted`) at other positions."""
    return rotate_at(lambda name, positions: positions + by if name == shifted else positions)


def turn(queries: int, keys: int) -> Change:
    """RoPE of queries and keys at these multiples of their positions."""
    times = {"query": queries, "key": keys}
    return rotate_at(lambda name, positions: times[name] * positions)


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
                shift_keys(by),
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
    )
    | computing(
        "S_ij - slope · |j - i|",
        {
            "ALiBi's biases have the opposite sign: farther keys get higher scores": (
                "S_ij + slope · |j - i|",
                change_slopes(lambda heads: -_right_slopes(heads)),
            ),
        },
    ),
    "bias scale": computing(
        "softmax(Q Kᵀ{scale} + B), B: biases of positions",
        {
            "the biases of positions are added before the scores are scaled": (
                "softmax((Q Kᵀ + B){scale}), B: biases of positions",
                SCALE_BIASES,
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
        "RoPE has theta 10000 and not the layer's": Mistake(change_part("rope", theta=10000.0), "10000^(-2i/d)", "theta^(-2i/d)")
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
            "RoPE turns the other way: its sines have the opposite sign": ("R(-i) q_i · R(-j) k_j", turn(-1, -1)),
            "RoPE rotates the queries and not the keys": ("R(i) q_i · k_j", rotate_alone("query")),
            "RoPE rotates the keys and not the queries": ("q_i · R(j) k_j", rotate_alone("key")),
            "RoPE turns the queries the other way, and the keys as it should": ("R(-i) q_i · R(j) k_j", turn(-1, 1)),
            "RoPE's angles are repeated as for neighbours and applied to halves (repeat_interleave for cat), or the reverse": (
                "cos and sin of f0 f0 f1 f1 … where f0 f1 … f0 f1 … fit",
                replace_steps(rotate=rotate_with_angles_of_other_pairs),
            ),
            **{
                f"RoPE's positions of the keys are one too {words}": (
                    f"R(i) q_i · R(j {sign} 1) k_j",
                    shift_positions("key", by),
                )
                for words, sign, by in (("high", "+", 1), ("low", "-", -1))
            },
            "RoPE's positions are doubled": ("R(2i) q_i · R(2j) k_j", turn(2, 2)),
        },
    ),
}
