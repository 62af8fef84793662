"""Rotary position embedding, factors on queries by position, ALiBi, T5's relative bias and relative positions in a grid.

The position of query i is i + offset, that of key j is j.
"""

import math

import torch
from torch import Tensor

from service.attention.precision import at_least_float32
from service.spec_parts import GridBias, QueryScale, RelativeBias, Rope


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


def alibi_slopes(heads: int) -> list[float]:
    """m_h of Press et al. 2022: 2^(-8h/n) for a power of two; else those of the power below n, then every other one of twice that power."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]


def alibi(slopes: Tensor, positions: Tensor, keys: slice) -> Tensor:
    """-slope · |position - j| for slopes [h] and positions [b|1, rows]: [b|1, h, rows, keys]."""
    j = torch.arange(keys.start, keys.stop, device=positions.device)
    distance = (positions[:, None, :, None] - j).abs().to(slopes.dtype)
    return -slopes[:, None, None] * distance


def relative_bias(table: Tensor, spec: RelativeBias, positions: Tensor, keys: slice) -> Tensor:
    """T5's bias for a table [buckets, h] and positions [b|1, rows]: [b|1, h, rows, keys]."""
    j = torch.arange(keys.start, keys.stop, device=positions.device)
    buckets = _buckets(j - positions[:, :, None], spec)  # [b|1, rows, keys]
    return table[buckets].movedim(-1, 1)


def _buckets(distance: Tensor, spec: RelativeBias) -> Tensor:
    """T5's bucket of key minus query position (Raffel et al. 2020): exact for short distances, logarithmic up to max_distance."""
    buckets = spec.buckets
    offset = torch.zeros_like(distance)
    if spec.bidirectional:
        buckets //= 2
        offset = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # float32, as in T5: at the edges of buckets, another precision would choose the neighbouring bucket
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


def grid_bias(table: Tensor, grid: GridBias, positions: Tensor, keys: slice) -> Tensor:
    """The bias of a table [relative positions, h] for queries at positions [b|1, rows]: [b|1, h, rows, keys]."""
    down, across = _grid_distances(grid, positions, keys)
    index = down * (2 * grid.width - 1) + across
    if grid.class_token:
        of_query, of_key = positions[:, :, None] == 0, torch.arange(keys.start, keys.stop, device=positions.device) == 0
        index = torch.where(of_query, len(table) - 3, index)
        index = torch.where(of_key, len(table) - 2 + of_query.to(index.dtype), index)
    return table[index].movedim(-1, 1)


def decomposed_bias(query: Tensor, rows: Tensor, columns: Tensor, grid: GridBias, positions: Tensor, keys: slice) -> Tensor:
    """q · rows[dy] + q · columns[dx] for query [b, h, rows, d] at positions [b|1, rows]: [b, h, rows, keys] (Li et al. 2022, equation 4).

    Every query is multiplied with all vectors of an axis, of which each key then takes its own.
    """
    of_axes = [
        torch.gather(query @ vectors.T, -1, distances[:, None].expand(*query.shape[:3], -1))
        for vectors, distances in zip((rows, columns), _grid_distances(grid, positions, keys), strict=True)
    ]
    return of_axes[0] + of_axes[1]


def _grid_distances(grid: GridBias, positions: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """Row and column of the query less those of the key, each from 0 for the smallest, [b|1, rows, keys]; 0 for a class token's."""
    i, j = (x - int(grid.class_token) for x in (positions[:, :, None], torch.arange(keys.start, keys.stop, device=positions.device)))
    down = torch.div(i, grid.width, rounding_mode="floor") - torch.div(j, grid.width, rounding_mode="floor") + grid.height - 1
    across = i % grid.width - j % grid.width + grid.width - 1
    return (down.clamp(0, 2 * grid.height - 2), across) if grid.class_token else (down, across)
