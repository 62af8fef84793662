"""Cosines and sines of RoPE's angles, for candidates that take them as arguments."""

import numpy as np

from attend.attention.operators.rope import Rope, frequencies
from attend.spec import LayerSpec
from attend.tensors import Array


def with_rope(spec: LayerSpec) -> LayerSpec:
    """The layer with RoPE of whole heads, on halves."""
    return LayerSpec.model_validate(spec.model_dump(exclude_unset=True) | {"rope": {}})


def rope_of(spec: LayerSpec) -> Rope:
    """The layer's RoPE; if it has none, one whose angles are 0."""
    pairs = spec.head_dim // 2
    return spec.rope or Rope(dims=2 * pairs, frequencies=(0.0,) * pairs)


def turns(rope: Rope, positions: Array, axes: str, items: int) -> Array:
    """Complex numbers, cosine + i sine, of the angles at these positions [n], in these axes (`RopeTables`) for so many items.

    The last axis has one number for each pair ("d/2"), or for each number of what RoPE rotates ("d").
    """
    *leading, last = axes.split(",")
    angles = np.outer(positions, frequencies(rope, rope.dims or 0))
    if last == "d":
        angles = np.repeat(angles, 2, axis=-1) if rope.interleaved else np.concatenate((angles, angles), axis=-1)
    lengths = {"b": items, "1": 1, "n": len(angles)}
    angles = angles[:, None] if leading[-1] == "1" else angles
    return rope.attention_factor * np.exp(1j * np.broadcast_to(angles, (*(lengths[axis] for axis in leading), angles.shape[-1])))
