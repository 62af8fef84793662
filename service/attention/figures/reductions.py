"""Reduces attention weights to the cells of a figure, block by block, so that the weights of a long sequence are never stored together."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.attention.call import Call, Result, WeightBlock
from service.attention.figures.spec import Pool
from service.attention.layer import MultiHeadAttention
from service.attention.metrics.heads import cosines

Reduction = Callable[[Iterable[WeightBlock]], dict[str, Tensor]]  # blocks of weights -> tensors by name


@dataclass(frozen=True, slots=True)
class WeightReduction:
    """The operation that reduces a call's weights block by block, instead of computing outputs. It reads the weights at the positions
    `queries` and `keys` (None: all)."""

    reduction: Reduction
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None

    @torch.inference_mode()
    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        """The reduction's tensors."""
        call = layer.select_keys(call)
        query, key, _ = layer.project(call)
        fully_masked = layer.fully_masked(call)
        blocks = layer.attention_weights(replace(call, queries=self.queries), query, key, fully_masked)
        return Result(self.reduction(map(self._selected, blocks)), fully_masked)

    def _selected(self, block: WeightBlock) -> WeightBlock:
        """The block with the keys that are read."""
        if self.keys is None:
            return block
        keys, visible = list(self.keys), block.visible
        if visible is not None:
            visible = visible.expand(*visible.shape[:-1], block.weights.shape[-1])[..., keys]
        return WeightBlock(block.rows, block.weights[..., keys], visible)

    def to(self, device: torch.device) -> "WeightReduction":
        return self


def mean_across(weights: Tensor) -> Tensor:
    """The mean over heads: [heads, rows, k] -> [1, rows, k]."""
    return weights.mean(0, keepdim=True)


def std_across(weights: Tensor) -> Tensor:
    """The standard deviation over heads, sqrt(mean_h (w_h - mean_h w)²) (divisor h, not h - 1): [heads, rows, k] -> [1, rows, k]."""
    return (weights - mean_across(weights)).square().mean(0, keepdim=True).sqrt()  # torch.std takes four times as long


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pools weights to cells of `query_step` queries by `key_step` keys: the mean or the maximum over the pairs that may attend.

    Returns `pooled`, float64 [heads or 1, cells, cells], NaN in cells where no pair may attend, infinity where a weight is not finite.
    """

    item: int
    shape: tuple[int, int]  # queries, keys
    query_step: int
    key_step: int
    pool: Pool = "mean"
    across: Callable[[Tensor], Tensor] | None = None  # reduces the heads to one before pooling

    def __call__(self, blocks: Iterable[WeightBlock]) -> dict[str, Tensor]:
        pooled = counts = torch.empty(0)
        cells = -(-self.shape[0] // self.query_step), -(-self.shape[1] // self.key_step)
        for rows, weights, visible in blocks:
            values, attended = _of_item(weights, visible, self.item)
            if self.across is not None:
                values, attended = self.across(values), attended.any(0, keepdim=True)
            if not pooled.numel():
                pooled = torch.zeros(values.shape[0], *cells, dtype=torch.float64, device=values.device)
                counts = torch.zeros(attended.shape[0], *cells, dtype=torch.float64, device=values.device)
            values, number = self._pool_keys(values.double(), self.pool), self._pool_keys(attended.double(), "mean")
            for cell in range(rows.start // self.query_step, (rows.stop - 1) // self.query_step + 1):
                part = slice(max(cell * self.query_step - rows.start, 0), (cell + 1) * self.query_step - rows.start)
                counts[:, cell] += number[:, part].sum(1)
                if self.pool == "max":
                    pooled[:, cell] = torch.maximum(pooled[:, cell], values[:, part].amax(1))
                else:
                    pooled[:, cell] += values[:, part].sum(1)
        pooled = pooled / counts if self.pool == "mean" else pooled
        return {"pooled": _nan_to_infinity(pooled).masked_fill(counts == 0, torch.nan)}

    def _pool_keys(self, values: Tensor, pool: Pool) -> Tensor:
        """[..., k] -> [..., cells]: the sum (for the mean) or the maximum over the keys of each cell."""
        if self.key_step == 1:
            return values
        padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % self.key_step))
        parts = padded.view(*padded.shape[:-1], -1, self.key_step)
        return parts.amax(-1) if pool == "max" else parts.sum(-1)


@dataclass(frozen=True, slots=True)
class Similarity:
    """Cosines between heads, <A_g, A_h> / (|A_g| |A_h|) over all pairs that may attend: `similarity` [h, h], NaN for a head of zeros."""

    item: int

    def __call__(self, blocks: Iterable[WeightBlock]) -> dict[str, Tensor]:
        products = torch.zeros(())
        for _, weights, visible in blocks:
            flat = _of_item(weights, visible, self.item)[0].double().flatten(1)
            products = products.to(flat.device) + flat @ flat.T
        return {"similarity": cosines(_nan_to_infinity(products))}


def pool_array(values: Tensor, row_step: int, column_step: int, pool: Pool) -> Tensor:
    """[rows, columns] -> cells: the mean or the maximum of each; values may be negative."""
    pooling = Pooling(0, (values.shape[0], values.shape[1]), row_step, column_step, pool)
    shift = values.min() if pool == "max" else values.new_zeros(())  # maxima start at 0
    return pooling([WeightBlock(slice(0, values.shape[0]), (values - shift)[None, None], None)])["pooled"][0] + shift


def _nan_to_infinity(numbers: Tensor) -> Tensor:
    """Replace NaN by infinity, since NaN marks cells without pairs."""
    return numbers.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _of_item(weights: Tensor, visible: Tensor | None, item: int) -> tuple[Tensor, Tensor]:
    """One item's weights [h, rows, k], 0 for pairs that may not attend, even in filled rows; and bool [h|1, rows, k], which pairs may."""
    values = weights[item]
    if visible is None:
        return values, torch.ones(1, 1, 1, dtype=torch.bool, device=values.device).expand(1, *values.shape[1:])
    visible = visible[item if visible.shape[0] > 1 else 0]
    visible = visible.expand(visible.shape[0], *values.shape[1:])
    return values.masked_fill(~visible, 0), visible
