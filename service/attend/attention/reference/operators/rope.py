"""RoPE (Su et al. 2021)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from attend.attention.operators.rope import Rope

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer
    from attend.tensors import Array


def rotate(layer: Layer, x: Array, name: str, positions: Array) -> Array:
    """RoPE of queries or keys, for layers with several softmaxes of the part of each."""
    assert layer.spec.rope is not None
    return np.concatenate([rotate_part(part, positions, layer.spec.rope) for part in layer.split(x)], axis=-1)


def rotate_part(x: Array, positions: Array, rope: Rope) -> Array:
    """RoPE, Su et al. 2021, equation 34: x [b, h, n, d] at positions [b, n] or [b, n, axes], whose b may be 1.

    The first `dims` numbers of a head are dims/2 points of the plane, and point i is rotated by the angle position · frequency_i. Its two
    coordinates are neighbours (interleaved: GPT-J) or dims/2 apart (GPT-NeoX, Llama). The rest of the head is unchanged. Points are also
    lengthened by `attention_factor` (yarn, Peng et al. 2023, section 3.4). Where positions have several axes (m-RoPE, Wang et al. 2024,
    section 2.1), `axes` has that of point i.
    """
    dims = rope.dims or x.shape[-1]
    if rope.interleaved:
        first, second = slice(0, dims, 2), slice(1, dims, 2)
    else:
        first, second = slice(0, dims // 2), slice(dims // 2, dims)
    of_points = positions[..., None] if positions.ndim == 2 else np.stack([positions[..., axis] for axis in rope.axes or ()], axis=-1)
    angles = of_points[:, None] * frequencies(rope, dims)  # [b, 1, n, dims/2]
    cos, sin = rope.attention_factor * np.cos(angles), rope.attention_factor * np.sin(angles)
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., first] * sin + x[..., second] * cos
    return rotated


def frequencies(rope: Rope, dims: int) -> Array:
    """theta^(-2i/dims) for i < dims/2, in radians per position, scaled for long contexts: [dims/2].

    "linear" divides every frequency by `factor`. "llama3" does so for frequencies of less than low_freq_factor turns within the training
    context, keeps those of more than high_freq_factor turns, and interpolates in between. `rope.frequencies` replaces all of this.
    """
    if rope.frequencies is not None:
        return np.array(rope.frequencies, np.float64)
    plain: Array = rope.theta ** (-np.arange(0, dims, 2) / dims)
    scaling = rope.scaling
    if scaling is None:
        return plain
    if scaling.type == "linear":
        return plain / scaling.factor
    turns = scaling.original_max_position * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    mixed: Array = kept * plain + (1 - kept) * plain / scaling.factor
    return mixed
