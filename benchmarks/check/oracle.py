"""Multi-head attention in float64 by plain loops over queries and keys, without any code of the check or of the service."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Visible = Callable[[int, int, int], bool]  # of an item, a query and a key


def attention(query: Array, key: Array, value: Array, visible: Visible, scale: float | None = None) -> tuple[Array, Array]:
    """The output [batch, heads, queries, d] and the weights of heads [batch, heads, length, d]. Rows without a visible key are 0."""
    batch, heads, queries, d = query.shape
    group = heads // key.shape[1]
    factor = 1 / math.sqrt(d) if scale is None else scale
    weights = np.zeros((batch, heads, queries, key.shape[2]))
    for b in range(batch):
        for h in range(heads):
            rows, columns = query[b, h].tolist(), key[b, h // group].tolist()
            for i, row in enumerate(rows):
                weights[b, h, i] = _weights(row, columns, factor, [visible(b, i, j) for j in range(len(columns))])
    output = np.stack([weights[:, h] @ value[:, h // group] for h in range(heads)], axis=1)
    return output, weights


def _weights(row: Sequence[float], columns: Sequence[Sequence[float]], factor: float, seen: Sequence[bool]) -> list[float]:
    scores = [
        factor * sum(a * c for a, c in zip(row, column, strict=True)) if ok else -math.inf for column, ok in zip(columns, seen, strict=True)
    ]
    largest = max(scores, default=-math.inf)
    if largest == -math.inf:
        return [0.0] * len(scores)
    exponentials = [math.exp(s - largest) for s in scores]
    total = math.fsum(exponentials)
    return [e / total for e in exponentials]


def heads_of(x: Array, heads: int) -> Array:
    """[batch, length, heads * d] as [batch, heads, length, d]."""
    return np.stack(np.split(x, heads, axis=2), axis=1)


def side_by_side(x: Array) -> Array:
    return np.concatenate([x[:, h] for h in range(x.shape[1])], axis=2)


def rotated(x: Array, theta: float = 10000.0) -> Array:
    """Heads after RoPE on halves: (a, b) at position n is the complex number a + ib times e^(i n theta^(-2j/d))."""
    half = x.shape[3] // 2
    turned = np.empty_like(x)
    for n in range(x.shape[2]):
        for j in range(half):
            angle = n * theta ** (-2 * j / x.shape[3])
            a, b = x[:, :, n, j], x[:, :, n, j + half]
            turned[:, :, n, j] = a * math.cos(angle) - b * math.sin(angle)
            turned[:, :, n, j + half] = a * math.sin(angle) + b * math.cos(angle)
    return turned


def rms_normed(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=3, keepdims=True) + eps) * weight
