"""Rotary position embedding, and factors on queries by position.

The position of query i is i + offset, that of key j is j, unless a call has positions of its own.
"""

import math

import torch
from torch import Tensor

from service.attention.precision import at_least_float32
from service.spec_parts import QueryScale, Rope


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotate pairs of the first `dims` numbers of x [b, heads, n, head_dim] by positions (Su et al. 2021, equation 34).

    Positions are [b|1, n], or [b|1, n, axes], of which each pair turns by that of its axis (Wang et al. 2024, section 2.1).

    Half-split pairs are (i, i + dims/2), as in GPT-NeoX and Llama; interleaved ones (2i, 2i + 1), as in GPT-J. Angles are computed in
    float64: the rounding of a float32 angle grows with the position (4e-5 of a pair's length at position 6,000). Cosines, sines and the
    products with x are then float32, or float64 if x is.
    """
    dims = rope.dims or x.shape[-1]
    exact = at_least_float32(x.dtype)
    of_pairs = positions[..., None] if positions.ndim == 2 else positions[..., list(rope.axes or ())]
    angles = of_pairs.to(torch.float64)[:, None] * _frequencies(rope, dims).to(x.device)  # [b|1, 1, n, dims/2]
    turned, rest = x[..., :dims].to(exact), x[..., dims:]
    cos, sin = ((rope.attention_factor * wave).to(exact) for wave in (angles.cos(), angles.sin()))
    if rope.interleaved:
        even, odd = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def rotate_halves(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotate each half of the heads of x [b, heads, n, head_dim] by itself, as differential attention does."""
    return torch.cat([rotate(half, positions, rope) for half in x.chunk(2, -1)], -1)


def _frequencies(rope: Rope, dims: int) -> Tensor:
    """theta^(-2i/dims) for each pair, scaled as `rope.scaling` says, or `rope.frequencies`: float64 [dims/2]."""
    if rope.frequencies is not None:
        return torch.tensor(rope.frequencies, dtype=torch.float64)
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    frequencies = 1.0 / torch.tensor(rope.theta, dtype=torch.float64) ** exponents
    if (scaling := rope.scaling) is not None:
        slowed = frequencies / scaling.factor
        if scaling.type == "linear":
            frequencies = slowed
        else:  # Llama 3: divides low frequencies by `factor`, keeps high ones, interpolates between
            waves = 2 * math.pi / frequencies
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            share = ((scaling.original_max_position / waves - low) / (high - low)).clamp(0, 1)
            frequencies = slowed * (1 - share) + frequencies * share
    return frequencies


def scale_queries(query: Tensor, positions: Tensor, scale: QueryScale) -> Tensor:
    """Multiply query [b, h, q, head_dim] at positions [b|1, q] by factors that grow with the position; before 0 they are those of 0."""
    lengths = torch.div(positions.clamp(min=0) + scale.shift, scale.length, rounding_mode="floor")
    factors = 1 + scale.factor * lengths.to(torch.float64).log1p()
    return (query * factors[:, None, :, None].to(at_least_float32(query.dtype))).to(query.dtype)
