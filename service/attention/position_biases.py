"""Biases on scores by position: ALiBi, T5's relative bias, and relative positions in a grid.

The position of query i is i + offset, that of key j is j.
"""

import math

import torch
from torch import Tensor

from service.spec_parts import GridBias, RelativeBias


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
