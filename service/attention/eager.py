"""Eager attention: scores, softmax and weighted values, computed for one block of query rows at a time.

    S = cap(scale · (Q Kᵀ + T)) + bias    [batch, heads, rows, keys], -inf where a key is masked; cap(s) = softcap · tanh(s / softcap)
    A = softmax(S)                        a masked key has exactly no influence
    O = A V                               [batch, heads, rows, value_head_dim]

A block has at most MAX_BLOCK_SCORES scores, or one row, so [queries, keys] is stored only if it is a requested output. An attention sink is
an extra score in the softmax of each row; it has no value vector. T are the terms of `relative_scores`. Other kinds of weights are computed
by subclasses, in `weightings.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.masks import Masks
from service.attention.positions import alibi, alibi_slopes, decomposed_bias, grid_bias, relative_bias
from service.attention.relative_scores import CallTerms, RelativeTerms
from service.attention.selection import of_heads, selection
from service.attention.weights import torch_dtype
from service.spec import LayerSpec

MAX_BLOCK_SCORES = 1 << 20  # in one block of query rows: 4 MB in float32, which fits into caches
DROPOUT_ROWS = 256  # rows between two saved states of the random generator (2.5 KB each)
Keep = Callable[[slice], Tensor]  # rows -> the weights that dropout keeps
PER_HEAD = frozenset({"output", "concatenated", "head_outputs"})  # outputs computed from the heads' outputs
LayerBias = Callable[[Tensor, Masks, slice, slice, Sequence[int] | None], Tensor]  # query, masks, rows, keys, heads -> [b|1, h, rows, keys]


class RowBlock(NamedTuple):
    """A block of query rows with all keys."""

    rows: slice
    visible: Tensor | None  # bool [b|1, h|1, rows|1, k|1]: the keys that each query may attend to; None: all
    scores: Tensor  # [b, h, rows, k]
    shift: Tensor | None  # float64 [b|1, h, rows]: to be added to all scores of a row; None: 0
    attention_weights: Callable[[], Tensor]  # computes softmax and dropout, [b, h, rows, k]


class Eager:
    """Eager attention of one layer, in float32, or in float64 for a float64 layer. Immutable."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.spec, self.weights, self.layer_dtype = spec, weights, torch_dtype(spec.dtype)
        self.dtype = torch.float64 if self.layer_dtype == torch.float64 else torch.float32
        self._slopes = torch.tensor(alibi_slopes(spec.num_heads) if spec.alibi else [], dtype=self.dtype, device=device)
        relative = spec.relative_scores
        self._relative = None if relative is None else RelativeTerms(spec, relative, weights, self.dtype)
        # whether torch's fused kernels compute such weights, and whether they do if sinks are added afterwards
        self.is_fusible_with_sinks = type(self) is Eager and not (relative or spec.indexer)
        self.is_fusible = self.is_fusible_with_sinks and not spec.sinks
        biases = ((spec.alibi, self._alibi), (spec.relative_bias, self._relative_bias), (spec.grid_bias, self._grid_bias))
        self.biases: list[LayerBias] = [bias for on, bias in biases if on]
        self._zero = torch.empty(1, 1, 1, dtype=self.dtype, device=device)  # the required addend of baddbmm, which beta=0 ignores

    def __call__(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None, wanted: Iterable[str]
    ) -> dict[str, Tensor]:
        """Compute those of `scores`, `log_sum_exp`, `head_outputs` and `attention_weights` (as from `selection`) that are in `wanted`.

        `query` is [b, h, q, d], `key` and `value` [b, kv heads, k, …], `fully_masked` [b, h, q].
        """
        assembly, value, sinks = Assembly(query.shape[2]), value.to(self.dtype), self.sinks(call.heads)
        for block in self.row_blocks(call, query, key, fully_masked):
            if "scores" in wanted:
                shifted = block.scores if block.shift is None else (block.scores + block.shift[..., None]).to(self.dtype)
                assembly.put("scores", block.rows, shifted)
            if "log_sum_exp" in wanted:
                total = log_sum_exp(block.scores, sinks, block.shift)
                assembly.put("log_sum_exp", block.rows, total.to(torch.float64 if call.part else self.dtype))
            if "head_outputs" not in wanted and "attention_weights" not in wanted:
                continue
            weights = block.attention_weights()
            if "head_outputs" in wanted:
                assembly.put("head_outputs", block.rows, apply_weights(weights, value, call.masks).to(self.layer_dtype))
            if "attention_weights" in wanted:
                for name, tensor in selection(weights, call).items():
                    assembly.put(name, block.rows, tensor)
        return assembly.tensors

    def row_blocks(
        self, call: Call, query: Tensor, key: Tensor, fully_masked: Tensor | None, blocks: Iterable[slice] | None = None
    ) -> Iterator[RowBlock]:
        """Compute the query rows of the call block by block; `blocks` are the rows of each block.

        If `call.heads` or `call.queries` is given, query, key and masks must have only these heads and queries. A caller that drops each
        block before the next needs memory for one block only.
        """
        batch, heads, num_queries, _ = query.shape
        sinks, keep = self.sinks(call.heads), _dropout(call, self.spec.num_heads)
        terms = None if self._relative is None else self._relative.of_call(call.masks, key, call.heads)
        for rows in row_blocks(batch * heads * key.shape[2], num_queries) if blocks is None else blocks:
            visible = call.masks.visible(rows)
            scores = self._scores(call, query[:, :, rows], key, rows, visible, terms)
            shift = self.alibi_shift(call.masks, rows, call.heads)
            masked = None if fully_masked is None else fully_masked[:, :, rows]
            yield RowBlock(rows, visible, scores, shift, partial(self._weights, call, scores, shift, sinks, masked, keep, rows))

    def _scores(self, call: Call, query: Tensor, key: Tensor, rows: slice, visible: Tensor | None, terms: CallTerms | None) -> Tensor:
        """Scores [b, h, rows, k] of the query rows, without `alibi_shift`.

        Query heads that share a key head are computed as additional rows of one product, so keys are not copied.
        """
        batch, heads, num_rows, head_dim = query.shape
        kv_heads, num_keys = key.shape[1:3]
        q = query.to(self.dtype).reshape(batch * kv_heads, heads // kv_heads * num_rows, head_dim)
        k = key.to(self.dtype).flatten(0, 1)
        scores = torch.baddbmm(self._zero, q, k.transpose(1, 2), beta=0, alpha=call.scale).view(batch, heads, num_rows, num_keys)
        if terms is not None:
            scores.add_(terms(query, rows), alpha=call.scale)
        if call.softcap:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if (bias := self.bias(query, call.masks, rows, slice(0, num_keys), call.heads)) is not None:
            scores = scores + bias
        return scores if visible is None else scores.masked_fill_(~visible, -torch.inf)

    def _weights(
        self, call: Call, scores: Tensor, shift: Tensor | None, sinks: Tensor | None, masked: Tensor | None, keep: Keep | None, rows: slice
    ) -> Tensor:
        fill = 1 / max(1, scores.shape[-1]) if call.fully_masked == "uniform" else 0
        weights = self._normalise(scores, sinks, masked, shift, fill)
        return weights if keep is None or call.dropout is None else weights * keep(rows).to(weights.device) / (1 - call.dropout[0])

    @staticmethod
    def _normalise(scores: Tensor, sinks: Tensor | None, fully_masked: Tensor | None, shift: Tensor | None, fill: float) -> Tensor:
        """Softmax over the last axis of scores + shift, for scores [b, h, rows, k], shift [b|1, h, rows] and sinks [heads, 1].

        The weights of fully masked rows, bool [b, h, rows], are `fill`. A row with keys whose scores all overflow is NaN.
        """
        if fully_masked is not None:
            fully_masked = fully_masked[..., None]
            scores = scores.masked_fill(fully_masked, 0)  # softmax of a row of -inf, and its derivative, would be NaN
        if sinks is None:
            weights = torch.softmax(scores, -1)
        else:
            sinks = sinks if shift is None else (sinks - shift).to(scores.dtype)
            beside = sinks[..., None].expand(*scores.shape[:-1], 1)
            weights = torch.softmax(torch.cat((scores, beside), -1), -1)[..., :-1]
        return weights if fully_masked is None else weights.masked_fill(fully_masked, fill)

    def bias(self, query: Tensor, masks: Masks, rows: slice, keys: slice, heads: Sequence[int] | None = None) -> Tensor | None:
        """The sum of the call's bias and those of the layer, for query [b, h, rows, d]: [b|1, h|1, rows|1, keys|1]; None if there are none.

        ALiBi is without `alibi_shift`. `heads` selects heads of the layer's biases; None: all.
        """
        total = masks.bias_at(rows, keys)
        for bias in self.biases:
            part = bias(query, masks, rows, keys, heads)
            total = part if total is None else total + part
        return total

    def _alibi(self, query: Tensor, masks: Masks, rows: slice, keys: slice, heads: Sequence[int] | None) -> Tensor:
        return alibi(of_heads(self._slopes, heads), masks.clamped_positions(rows), keys)

    def _relative_bias(self, query: Tensor, masks: Masks, rows: slice, keys: slice, heads: Sequence[int] | None) -> Tensor:
        assert self.spec.relative_bias is not None
        table = of_heads(self.weights["relative_bias"].T, heads).T
        return relative_bias(table, self.spec.relative_bias, masks.positions[:, rows], keys)

    def _grid_bias(self, query: Tensor, masks: Masks, rows: slice, keys: slice, heads: Sequence[int] | None) -> Tensor:
        grid, positions = self.spec.grid_bias, masks.positions[:, rows]
        assert grid is not None
        if grid.kind == "table":
            return grid_bias(of_heads(self.weights["grid_bias"].T, heads).T, grid, positions, keys)
        of_rows, of_columns = (self.weights[name].to(self.dtype) for name in ("grid_rows", "grid_columns"))
        return decomposed_bias(query.to(self.dtype), of_rows, of_columns, grid, positions, keys)

    def sinks(self, heads: Sequence[int] | None) -> Tensor | None:
        """The sinks' scores [heads, 1]; None if the layer has none."""
        return of_heads(self.weights["sinks"].to(self.dtype), heads)[:, None] if self.spec.sinks else None

    def alibi_shift(self, masks: Masks, rows: slice, heads: Sequence[int] | None) -> Tensor | None:
        """ALiBi of the key nearest to each query, float64 [b|1, heads, rows]; None if all are 0.

        For a query far outside the keys this is a large bias common to all keys. Softmax ignores it, but adding it to float32 scores would
        round them, so it is kept separate.
        """
        if not self.spec.alibi:
            return None
        distance = (masks.positions[:, rows] - masks.clamped_positions(rows)).abs()
        return -of_heads(self._slopes, heads).double()[:, None] * distance[:, None] if distance.any() else None


def log_sum_exp(scores: Tensor, sinks: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """ln Σ exp over each row and its sink, [b, h, rows]; -inf for fully masked rows, even with a sink. float64 if a shift is given."""
    total = torch.logsumexp(scores, -1)
    if shift is not None:
        total = total + shift
    return total if sinks is None else torch.where(total == -torch.inf, total, torch.logaddexp(total, sinks.to(total.dtype)))


def apply_weights(weights: Tensor, value: Tensor, masks: Masks) -> Tensor:
    """Weights [b, h, rows, k] times values [b, kv heads, k, d]: [b, h, rows, d]. A weight of 0 excludes even NaN and infinity."""
    batch, heads, rows, keys = weights.shape
    kv_heads = value.shape[1]
    shared = weights.reshape(batch * kv_heads, heads // kv_heads * rows, keys)  # heads that share values, as more rows
    value = value.flatten(0, 1)
    if masks.has_any and not torch.isfinite(value).all():
        finite = torch.isfinite(value)
        reached = (shared != 0).to(value.dtype) @ (~finite).to(value.dtype) > 0
        summed = (shared @ value.masked_fill(~finite, 0)).masked_fill(reached, torch.nan)
    else:
        summed = torch.bmm(shared, value)
    return summed.view(batch, heads, rows, value.shape[2])


class DropoutStream:
    """Seeded dropout: keeps the weights whose random number is at least p.

    The numbers are `numpy.random.RandomState(seed).random_sample((b, h, q, k))` for the shape of the call, so that clients can reproduce
    them. Each block of rows is drawn again from a saved state, so [b, h, q, k] is never stored.
    """

    def __init__(self, p: float, seed: int, shape: tuple[int, int, int, int]) -> None:
        self.p, self.shape = p, shape
        batch, heads, queries, keys = shape
        self._states: dict[tuple[int, int, int], Any] = {}
        self._stream = np.random.RandomState(seed)
        for b in range(batch):
            for h in range(heads):
                for start in range(0, queries, DROPOUT_ROWS):
                    self._states[b, h, start // DROPOUT_ROWS] = self._stream.get_state()
                    self._stream.random_sample((min(DROPOUT_ROWS, queries - start), keys))

    def keep(self, heads: Sequence[int], queries: Sequence[int]) -> Tensor:
        """bool [b, heads, queries, k] for these heads and queries, in the order given."""
        batch, _, total, keys = self.shape
        kept = np.empty((batch, len(heads), len(queries), keys), np.bool_)
        rows = np.asarray(queries, np.int64)
        for block in np.unique(rows // DROPOUT_ROWS):
            chosen = np.flatnonzero(rows // DROPOUT_ROWS == block)
            for b in range(batch):
                for i, h in enumerate(heads):
                    self._stream.set_state(self._states[b, h, int(block)])
                    drawn = self._stream.random_sample((min(DROPOUT_ROWS, total - int(block) * DROPOUT_ROWS), keys))
                    kept[b, i, chosen] = drawn[rows[chosen] - block * DROPOUT_ROWS] >= self.p
        return torch.from_numpy(kept)


def _dropout(call: Call, num_heads: int) -> Keep | None:
    """Dropout for the call's selected heads and queries; None without dropout."""
    if call.dropout is None:
        return None
    shape = (call.query.shape[0], num_heads, call.query.shape[1], call.key.shape[1])
    stream, heads, queries = DropoutStream(*call.dropout, shape), call.heads or range(shape[1]), call.queries or range(shape[2])
    return lambda rows: stream.keep(heads, queries[rows])


def row_blocks(scores_per_row: int, rows: int) -> Iterator[slice]:
    """The rows of each block; one empty block if there are no rows."""
    step = max(1, MAX_BLOCK_SCORES // max(1, scores_per_row))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


class Assembly:
    """Assembles tensors from blocks of rows. A block with all rows is stored without a copy."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, rows: slice, part: Tensor) -> None:
        """Add these rows of a tensor. Rows are its last axis but one; the last, for `log_sum_exp`."""
        if part.shape[axis := -1 if name == "log_sum_exp" else -2] == self.num_rows:
            self.tensors[name] = part
            return
        if name not in self.tensors:
            shape = list(part.shape)
            shape[axis] = self.num_rows
            self.tensors[name] = part.new_empty(shape)
        self.tensors[name].narrow(axis, rows.start, rows.stop - rows.start).copy_(part)
