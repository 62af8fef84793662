"""The arithmetic of steps in NumPy float64, as its formulas say it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attend.tensors import Array


class NumpyArithmetic:
    """`Arithmetic` of a layer with these canonical weights. Narrow and wide numbers are float64."""

    xp: Any = np

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self.weights = {name: np.asarray(x, np.float64) for name, x in weights.items()}

    def exact(self, x: ArrayLike) -> Array:
        return np.asarray(x, np.float64)

    wide = widened = narrow = exact

    def like(self, x: ArrayLike, other: Array) -> Array:
        return np.asarray(x, np.float64)

    def single(self, x: Array) -> Array:
        return np.asarray(x, np.float32)

    def integer(self, x: Array) -> Array:
        return np.asarray(x).astype(np.int64)

    def constant(self, numbers: Sequence[float]) -> Array:
        return np.array(numbers, np.float64)

    def counting(self, stop: int, like: Array) -> Array:
        return np.arange(stop)

    def weight(self, name: str) -> Array | None:
        return self.weights.get(name)

    def project(self, x: ArrayLike, name: str) -> Array:
        """x Wᵀ + b, with W [out, in] as in `torch.nn.Linear`: [b, n, in] -> [b, n, out]; b is 0 without `name.bias`."""
        projected: Array = np.asarray(x, np.float64) @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)
        return projected

    def project_exactly(self, x: ArrayLike, name: str) -> Array:
        return self.project(x, name)

    @staticmethod
    def split_heads(x: Array, heads: int) -> Array:
        """[b, n, h*d] -> [b, h, n, d]: head i is columns i*d to (i+1)*d of every row."""
        b, n, width = x.shape
        return np.asarray(x, np.float64).reshape(b, n, heads, width // heads).transpose(0, 2, 1, 3)

    @staticmethod
    def merge_heads(x: Array) -> Array:
        """[b, h, n, d] -> [b, n, h*d], the inverse of `split_heads`."""
        b, h, n, d = x.shape
        return x.transpose(0, 2, 1, 3).reshape(b, n, h * d)

    def repeat_kv_heads(self, x: Array, heads: int) -> Array:
        """Grouped-query attention (Ainslie et al. 2023): [b, kv heads, n, d] -> [b, h, n, d], each kv head h / kv heads times in a row."""
        return np.repeat(x, heads // x.shape[1], axis=1)

    def share(self, x: Array, heads: int) -> Array:
        """A part of keys that all heads share, for each of them: [b, n, r] -> [b, heads, n, r]."""
        return np.repeat(x[:, None], heads, axis=1)

    def scores(self, query: Array, key: Array, scale: float) -> Array:
        return np.asarray(scale * (query @ self.repeat_kv_heads(key, query.shape[1]).swapaxes(-1, -2)))

    def where(self, condition: Array, x: Array, otherwise: float) -> Array:
        return np.where(condition, x, otherwise)

    def mask(self, scores: Array, visible: Array) -> Array:
        return np.where(visible, scores, -np.inf)

    def softmax(self, scores: Array, fully_masked: Array | None) -> Array:
        """exp(s_j - m) / Σ exp(s_j - m) with m = max s, which avoids overflow of exp. A row of -inf has weights 0."""
        return self.softmax_and_log_sum_exp(scores)[0]

    def log_sum_exp(self, scores: Array) -> Array:
        """m + ln Σ exp(s_j - m) with m = max s: [..., k] -> [...]; -inf for a row of -inf."""
        return self.softmax_and_log_sum_exp(scores)[1]

    def softmax_and_log_sum_exp(self, scores: Array) -> tuple[Array, Array]:
        """Both, of the same exponentials."""
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        highest = np.where(np.isneginf(highest), 0.0, highest)
        exponentials = np.exp(scores - highest)
        total = exponentials.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            return np.asarray(exponentials / np.where(total == 0, 1.0, total)), np.asarray((highest + np.log(total))[..., 0])

    def sigmoid(self, x: Array) -> Array:
        """1 / (1 + exp(-x)), without overflow."""
        return np.asarray(np.exp(-np.logaddexp(0.0, -x)))

    def softplus(self, x: Array) -> Array:
        """ln(1 + exp(x))."""
        return np.asarray(np.logaddexp(0.0, x))

    def weighted_values(self, weights: Array, value: Array) -> Array:
        value = self.repeat_kv_heads(value, weights.shape[1])
        if np.isfinite(value).all():
            return np.asarray(weights @ value)
        nonzero = np.where(weights[..., None] == 0, 0.0, value[:, :, None])  # [b, h, q, k, d]
        return np.asarray((weights[..., None] * nonzero).sum(axis=3))

    def gather(self, x: Array, index: Array) -> Array:
        shape = np.broadcast_shapes(x.shape[:-1], index.shape[:-1])
        rows, at = np.broadcast_to(x, (*shape, x.shape[-1])), np.broadcast_to(index, (*shape, index.shape[-1]))
        return np.take_along_axis(rows, at, axis=-1)

    def select_by_index(self, query: Array, key: Array, factors: Array, visible: Array, n: int) -> Array:
        products = np.maximum(query @ key[:, None].swapaxes(-1, -2), 0)  # [b, heads, q, k]
        scores = np.einsum("bhqk,bqh->bqk", products, factors)[:, None]
        return np.asarray(visible & self.largest(np.where(visible, scores, -np.inf), n))

    def largest(self, x: Array, n: int) -> Array:
        chosen = np.zeros(x.shape, bool)
        np.put_along_axis(chosen, np.argsort(-x, axis=-1, kind="stable")[..., :n], True, axis=-1)
        return chosen
