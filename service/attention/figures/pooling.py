"""Attention weights -> what a picture needs of them, taken from blocks of query rows as they are made: the weights of a long sequence
are never held together. Shapes and sums; knows no words and no colours.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from service.attention.call import Rows
from service.attention.figures.picture import Pool

Across = Callable[[Tensor], Tensor]  # [heads, rows, k] -> [heads or 1, rows, k]


def mean_across(weights: Tensor) -> Tensor:
    """The mean over heads."""
    return weights.mean(0, keepdim=True)


def deviation_across(weights: Tensor) -> Tensor:
    """The standard deviation over heads, sqrt(mean_h (w_h - mean_h w)²): of all the heads there are, so divided by their number."""
    return (weights - mean_across(weights)).square().mean(0, keepdim=True).sqrt()  # torch.std takes four times as long


@dataclass(frozen=True, slots=True)
class Raster:
    """Pools weights to cells of `query_step` queries by `key_step` keys: the mean or the maximum over the pairs that may attend.

    Called with the rows of a call it gives `raster` [heads or 1, cells, cells], NaN in cells where no pair may.
    """

    item: int
    shape: tuple[int, int]  # queries, keys
    query_step: int
    key_step: int
    pool: Pool = "mean"
    across: Across | None = None

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        raster = counts = torch.empty(0)
        cells = -(-self.shape[0] // self.query_step), -(-self.shape[1] // self.key_step)
        for block, weights, visible in rows:
            values, seen = _of_item(weights, visible, self.item)
            if self.across is not None:
                values, seen = self.across(values), seen.any(0, keepdim=True)
            if not raster.numel():
                raster = torch.zeros(values.shape[0], *cells, dtype=torch.float64, device=values.device)
                counts = torch.zeros(seen.shape[0], *cells, dtype=torch.float64, device=values.device)
            summed = self._keys(values.double())
            number = self._keys(seen.double(), "mean")
            for cell, part in self._cells(block):
                counts[:, cell] += number[:, part].sum(1)
                if self.pool == "max":
                    raster[:, cell] = torch.maximum(raster[:, cell], summed[:, part].amax(1))
                else:
                    raster[:, cell] += summed[:, part].sum(1)
        pooled = raster / counts if self.pool == "mean" else raster
        return {"raster": _no_nan(pooled).masked_fill(counts == 0, torch.nan)}

    def _keys(self, values: Tensor, pool: str | None = None) -> Tensor:
        """[..., k] -> [..., cells]: the sum over the keys of each cell, or their maximum."""
        if self.key_step == 1:
            return values
        short = -values.shape[-1] % self.key_step
        padded = torch.nn.functional.pad(values, (0, short))
        parts = padded.view(*padded.shape[:-1], -1, self.key_step)
        return parts.amax(-1) if (pool or self.pool) == "max" else parts.sum(-1)

    def _cells(self, block: slice) -> Iterator[tuple[int, slice]]:
        """The cells that a block of rows touches, each with its rows in the block."""
        for cell in range(block.start // self.query_step, (block.stop - 1) // self.query_step + 1):
            first, last = max(block.start, cell * self.query_step), min(block.stop, (cell + 1) * self.query_step)
            yield cell, slice(first - block.start, last - block.start)


@dataclass(frozen=True, slots=True)
class Similarity:
    """Cosines between heads, <A_g, A_h> / (|A_g| |A_h|) over all pairs that may attend: `similarity` [h, h], NaN for a head that is 0."""

    item: int

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        products = torch.zeros(())
        for _, weights, visible in rows:
            values, _ = _of_item(weights, visible, self.item)
            flat = values.double().flatten(1)
            products = products.to(flat.device) + flat @ flat.T
        products = _no_nan(products)
        lengths = products.diagonal().sqrt()
        cosines = products / (lengths[:, None] * lengths)
        return {"similarity": cosines.clamp(max=1)}


def _no_nan(numbers: Tensor) -> Tensor:
    """Infinity for NaN, which here means a cell without pairs."""
    return numbers.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _of_item(weights: Tensor, visible: Tensor | None, item: int) -> tuple[Tensor, Tensor]:
    """Weights [h, rows, k] of one batch item, 0 where a pair may not attend (rows without keys may have been filled), and what may."""
    values = weights[item]
    if visible is None:
        return values, torch.ones(1, 1, 1, dtype=torch.bool, device=values.device).expand(1, *values.shape[1:])
    seen = visible[item if visible.shape[0] > 1 else 0]
    seen = seen.expand(seen.shape[0], *values.shape[1:])
    return values.masked_fill(~seen, 0), seen


def pool_array(values: Tensor, row_step: int, column_step: int, pool: Pool) -> Tensor:
    """[rows, columns] -> cells, by the mean or the maximum of what each holds."""
    whole = Raster(0, (values.shape[0], values.shape[1]), row_step, column_step, pool)
    shift = values.min() if pool == "max" else values.new_zeros(())  # weights are never negative, numbers may be
    rows = iter([(slice(0, values.shape[0]), (values - shift)[None, None], None)])
    return whole(rows)["raster"][0] + shift
