"""Relative positions in a grid of tokens (Swin, BEiT, MViTv2, SAM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from attend.attention.operators.grid_bias import GridBias

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer, Positions
    from attend.attention.reference.request import Request
    from attend.tensors import Array


def bias(layer: Layer, request: Request, q: Array, positions: Positions) -> Array:
    """[b, h, q, k]."""
    assert layer.spec.grid_bias is not None
    return grid_bias(layer.spec.grid_bias, layer.weights, q, positions.indices, positions.ahead.shape[3])


def grid_bias(grid: GridBias, weights: Mapping[str, Array], queries: Array, indices: Array, num_keys: int) -> Array:
    """What relative positions in a grid add to the scores of queries [b, h, q, d] at indices [b, q]: [b, h, q, k].

    A table has a number for each relative position and head (Liu et al. 2021, equation 4, with the index of their code, which is also
    BEiT's). Decomposed, it is q_i · (R^row_ij + R^column_ij) (Li et al. 2022, equation 4, with a sum for the product of axes).
    """
    if grid.kind == "decomposed":
        decomposed: Array = np.einsum("bhid,bijd->bhij", queries, grid_vectors(grid, weights, indices, num_keys))
        return decomposed
    down, across = grid_distances(grid, indices, num_keys)
    cells = weights["grid_bias"]
    by_place = cells[: (2 * grid.height - 1) * (2 * grid.width - 1)].reshape(2 * grid.height - 1, 2 * grid.width - 1, -1)
    found: Array = by_place[down, across]  # [b, q, k, h]; for a class token any, replaced here
    if grid.class_token:
        of_query, of_key = indices[:, :, None, None] == 0, (np.arange(num_keys) == 0)[None, None, :, None]
        found = np.where(of_query & of_key, cells[-1], np.where(of_key, cells[-2], np.where(of_query, cells[-3], found)))
    return found.transpose(0, 3, 1, 2)


def grid_vectors(grid: GridBias, weights: Mapping[str, Array], indices: Array, num_keys: int) -> Array:
    """R^row + R^column of each query and key: [b, q, k, d]."""
    down, across = grid_distances(grid, indices, num_keys)
    vectors: Array = weights["grid_rows"][down] + weights["grid_columns"][across]
    return vectors


def grid_distances(grid: GridBias, indices: Array, num_keys: int) -> tuple[Array, Array]:
    """Row and column of the query less those of the key, each from 0 for the smallest: [b, q] -> [b, q, k] twice."""
    cells = np.array([[0, 0]] * grid.class_token + [[y, x] for y in range(grid.height) for x in range(grid.width)])  # [tokens, 2]
    distances = cells[indices][:, :, None] - cells[:num_keys]  # [b, q, k, 2]
    return distances[..., 0] + grid.height - 1, distances[..., 1] + grid.width - 1
