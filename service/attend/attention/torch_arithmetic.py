"""The arithmetic of steps in torch: what torch has under other names than NumPy, or computes fast only if it is written otherwise."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from attend.attention.index_scores import LEAST_PRODUCTS, index_scores, select_in_float32
from attend.attention.linear import Linear
from attend.attention.numerics import at_least_float32


class TorchArithmetic:
    """`Arithmetic` for one layer on one device. Wide numbers are float32, or float64 for a float64 layer."""

    xp: Any = torch

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.dtype, self.wide_dtype, self.device = weights, dtype, at_least_float32(dtype), device
        self._linear: dict[str, Linear] = {}  # created when first needed, since each may store its weight a second time
        self._exact: dict[str, Tensor] = {}
        self._zero = torch.empty(1, 1, 1, dtype=self.wide_dtype, device=device)  # the required addend of baddbmm, which beta=0 ignores

    def wide(self, x: Tensor) -> Tensor:
        return x.to(self.wide_dtype)

    def widened(self, x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else x.to(self.wide_dtype)

    def narrow(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def single(self, x: Tensor) -> Tensor:
        return x.to(torch.float32)

    def like(self, x: Tensor, other: Tensor) -> Tensor:
        return x.to(other.dtype)

    def exact(self, x: Tensor) -> Tensor:
        return x.to(torch.float64)

    def integer(self, x: Tensor) -> Tensor:
        return x.to(torch.int64)

    def constant(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def counting(self, stop: int, like: Tensor) -> Tensor:
        return torch.arange(stop, device=like.device)

    def weight(self, name: str) -> Tensor | None:
        return self.weights.get(name)

    def project(self, x: Tensor, name: str) -> Tensor:
        if (linear := self._linear.get(name)) is None:
            linear = self._linear[name] = Linear(self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        return linear(x)

    def project_exactly(self, x: Tensor, name: str) -> Tensor:
        bias = self._exact_weight(f"{name}.bias") if f"{name}.bias" in self.weights else None
        return F.linear(x, self._exact_weight(f"{name}.weight"), bias)

    def _exact_weight(self, name: str) -> Tensor:
        """A weight in float64, which autograd may use too."""
        if (weight := self._exact.get(name)) is None:
            with torch.inference_mode(False), torch.no_grad():
                weight = self._exact[name] = self.weights[name].double()
        return weight

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def share(self, x: Tensor, heads: int) -> Tensor:
        return x[:, None].expand(-1, heads, -1, -1)

    def scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Query heads that share a key head are computed as additional rows of one product, so keys are not copied."""
        batch, heads, num_rows, head_dim = query.shape
        kv_heads, num_keys = key.shape[1:3]
        q = self.wide(query).reshape(batch * kv_heads, heads // kv_heads * num_rows, head_dim)
        k = self.wide(key).flatten(0, 1)
        return torch.baddbmm(self._zero, q, k.transpose(1, 2), beta=0, alpha=scale).view(batch, heads, num_rows, num_keys)

    def where(self, condition: Tensor, x: Tensor, otherwise: float) -> Tensor:
        return x.masked_fill(~condition, otherwise)

    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill_(~visible, -torch.inf)

    def softmax(self, scores: Tensor, fully_masked: Tensor | None) -> Tensor:
        """The weights of a row that has keys, and whose scores all overflow, are NaN."""
        if fully_masked is None:
            return torch.softmax(scores, -1)
        rows = fully_masked[..., None]
        weights = torch.softmax(scores.masked_fill(rows, 0), -1)  # that of a row of -inf, and its derivative, would be NaN
        return weights.masked_fill(rows, 0)

    def log_sum_exp(self, scores: Tensor) -> Tensor:
        return torch.logsumexp(scores, -1)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x)

    def weighted_values(self, weights: Tensor, value: Tensor) -> Tensor:
        batch, heads, rows, keys = weights.shape
        kv_heads = value.shape[1]
        shared = weights.reshape(batch * kv_heads, heads // kv_heads * rows, keys)  # heads that share values, as more rows
        value = self.wide(value).flatten(0, 1)
        summed = torch.bmm(shared, value)
        if not all_finite(summed):
            finite = torch.isfinite(value)
            reached = (shared != 0).to(value.dtype) @ (~finite).to(value.dtype) > 0
            summed = (shared @ value.masked_fill(~finite, 0)).masked_fill(reached, torch.nan)
        return self.narrow(summed.view(batch, heads, rows, value.shape[2]))

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        shape = tuple(max(n, m) if n and m else 0 for n, m in zip(x.shape[:-1], index.shape[:-1], strict=True))
        return x.expand(*shape, -1).gather(-1, index.expand(*shape, -1))

    def select_by_index(self, query: Tensor, key: Tensor, factors: Tensor, visible: Tensor, n: int) -> Tensor:
        """On a CPU mostly in float32; elsewhere, the host would wait for the numbers of open pairs."""
        suits = query.device.type == "cpu" and query.numel() and query.shape[1] * query.shape[3] >= LEAST_PRODUCTS
        if suits and (chosen := select_in_float32(query, key, factors, visible, n)) is not None:
            return chosen
        scores = index_scores(query, key, factors)[:, None]
        return visible & self.largest(scores.masked_fill(~visible, -torch.inf), n)

    def largest(self, x: Tensor, n: int) -> Tensor:
        """Numbers are compared with the n-th largest, which takes a third of the time of sorting the n largest for their indices."""
        if not 0 < n < x.shape[-1]:
            return torch.full_like(x, n > 0, dtype=torch.bool)
        least = x.topk(n, sorted=False).values.amin(-1, keepdim=True)
        chosen = x >= least
        tied = (chosen.sum(-1) > n) & ~torch.isneginf(least[..., 0])
        if tied.any():
            chosen[tied] = _first_largest(x[tied], least[tied], n)
        return chosen


def all_finite(x: Tensor) -> bool:
    """Whether all numbers are finite. Their sum, which may overflow although they are, mostly tells it in one pass, without a copy."""
    return math.isfinite(x.detach().sum().item()) or bool(x.isfinite().all())


def top_k(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest numbers along the last axis and their indices, [..., n], largest first; ties go to the lower index.

    torch.topk returns ties in any order, and a stable sort of all numbers is slow. So only rows with ties among the n + 1 largest are
    computed again: all numbers above the n-th largest, and the first of those equal to it.
    """
    if 2 * n >= values.shape[-1]:
        largest, indices = torch.sort(values, dim=-1, descending=True, stable=True)
        return largest[..., :n], indices[..., :n]
    largest, indices = torch.topk(values, n + 1, dim=-1)
    tied = (largest[..., 1:] == largest[..., :-1]).any(-1)
    largest, indices = largest[..., :n], indices[..., :n]
    if n and tied.any():
        rows = values[tied].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)  # topk treats NaN as the largest, too
        taken = _first_largest(rows, rows.topk(n, -1).values[:, -1:], n)
        taken_indices = taken.nonzero()[:, 1].view(-1, n)  # in ascending order
        order = rows.gather(1, taken_indices).sort(dim=1, descending=True, stable=True).indices
        indices[tied] = taken_indices.gather(1, order)
        largest[tied] = values[tied].gather(1, indices[tied])
    return largest, indices


def _first_largest(rows: Tensor, least: Tensor, n: int) -> Tensor:
    """The n largest of each row [..., k]: those above the n-th largest, `least` [..., 1], and the first of those equal to it: bool."""
    above, equal = rows > least, rows == least
    return above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
