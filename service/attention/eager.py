"""Eager attention: scores, softmax and weighted values, computed for one block of query rows at a time.

    S = cap(scale · (Q Kᵀ + T)) + bias    [batch, heads, rows, keys], -inf where a key is masked; cap(s) = softcap · tanh(s / softcap)
    A = softmax(S)                        a masked key has exactly no influence
    O = A V                               [batch, heads, rows, value_head_dim]

A block has at most MAX_BLOCK_SCORES scores, or one row, so [queries, keys] is stored only if it is a requested output. An attention sink
is an extra score in the softmax of each row; it has no value vector. T are the terms of content and distance in layers
with `relative_scores` (`positions.py`). Subclasses compute weights that are not one softmax of the scores: scalable softmax, sigmoid, and
the difference of two softmaxes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from service.attention.call import Call, reduce_weights, select_heads
from service.attention.masks import Masks, real_keys
from service.attention.numerics import at_least_float32, torch_dtype
from service.attention.positions import CallTerms, RelativeTerms, alibi, alibi_slopes, decomposed_bias, grid_bias, relative_bias
from service.spec import LAMBDAS, LayerSpec

MAX_BLOCK_SCORES = 1 << 20  # 4 MB in float32, which fits into caches
SAVED_ROWS = 256  # rows between two saved states of the random generator (2.5 KB each)


class RowBlock(NamedTuple):
    """A block of query rows with all keys: what their attention weights are computed from."""

    rows: slice
    visible: Tensor | None  # bool [b|1, h|1, rows|1, k|1]: the keys that each query may attend to; None: all
    fully_masked: Tensor | None  # bool [b, h, rows]: the rows without a visible key; None: none
    scores: Tensor  # [b, h, rows, k]
    shift: Tensor | None  # float64 [b|1, h, rows]: to be added to all scores of a row; None: 0
    dropout: "Dropout | None"
    second: "RowBlock | None" = None  # the same rows in the second softmax of differential attention


class Eager:
    """Eager attention of one layer, in float32, or in float64 for a float64 layer. Immutable."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.spec, self.weights, self.layer_dtype = spec, weights, torch_dtype(spec.dtype)
        self.dtype = at_least_float32(self.layer_dtype)
        self._slopes = torch.tensor(alibi_slopes(spec.num_heads) if spec.alibi else [], dtype=self.dtype, device=device)
        relative = spec.relative_scores
        self._relative = None if relative is None else RelativeTerms(spec, relative, weights, self.dtype)
        self.has_bias = bool(spec.alibi or spec.relative_bias or spec.grid_bias)
        # whether torch's fused kernels compute such weights, and whether they do if sinks are added afterwards
        is_softmax = spec.normalizer == "softmax" and not spec.differential
        self.is_fusible_with_sinks = is_softmax and not (relative or spec.indexer)
        self.is_fusible = self.is_fusible_with_sinks and not spec.sinks
        self._zero = torch.empty(1, 1, 1, dtype=self.dtype, device=device)  # the required addend of baddbmm, which beta=0 ignores

    def compute(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None, wanted: Iterable[str]
    ) -> dict[str, Tensor]:
        """Compute those of `scores`, `log_sum_exp`, `head_outputs` and `attention_weights` (as from `reduce_weights`) that are in `wanted`.

        `query` is [b, h, q, d], `key` and `value` [b, kv heads, k, …], `fully_masked` [b, h, q].
        """
        assembly, value, sinks = Assembly(query.shape[2]), value.to(self.dtype), self.sinks(call.heads)
        for block in self.row_blocks(call, query, key, fully_masked):
            if "scores" in wanted:
                shifted = block.scores if block.shift is None else (block.scores + block.shift[..., None]).to(self.dtype)
                assembly.put("scores", block.rows, shifted)
            if "log_sum_exp" in wanted:
                total = log_sum_exp(block.scores, sinks, block.shift)
                assembly.put("log_sum_exp", block.rows, total.to(torch.float64 if call.is_part else self.dtype))
            if "head_outputs" not in wanted and "attention_weights" not in wanted:
                continue
            weights = self.attention_weights(call, block)
            if "head_outputs" in wanted:
                assembly.put("head_outputs", block.rows, apply_weights(weights, value, call.masks).to(self.layer_dtype))
            if "attention_weights" in wanted:
                for name, tensor in reduce_weights(weights, call).items():
                    assembly.put(name, block.rows, tensor)
        return assembly.tensors

    def row_blocks(
        self, call: Call, query: Tensor, key: Tensor, fully_masked: Tensor | None, blocks: Iterable[slice] | None = None
    ) -> Iterator[RowBlock]:
        """Compute the scores of the call block by block; `blocks` are the rows of each block.

        If `call.heads` or `call.queries` is given, query, key and masks must have only these heads and queries. A caller that drops each
        block before the next needs memory for one block only.
        """
        batch, heads, num_queries, _ = query.shape
        dropout = None if call.dropout is None else Dropout(call, self.spec.num_heads)
        terms = None if self._relative is None else self._relative.of_call(call.masks, key, call.heads)
        for rows in row_slices(batch * heads * key.shape[2], num_queries) if blocks is None else blocks:
            visible = call.masks.visible(rows)
            scores = self._scores(call, query[:, :, rows], key, rows, visible, terms)
            masked = None if fully_masked is None else fully_masked[:, :, rows]
            yield RowBlock(rows, visible, masked, scores, self.alibi_shift(call.masks, rows, call.heads), dropout)

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
            scores.add_(terms.of_rows(query, rows), alpha=call.scale)
        if call.softcap:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if (bias := self.bias(query, call.masks, rows, slice(0, num_keys), call.heads)) is not None:
            scores = scores + bias
        scores = self._adjust(scores, call, rows, visible)
        return scores if visible is None else scores.masked_fill_(~visible, -torch.inf)

    def _adjust(self, scores: Tensor, call: Call, rows: slice, visible: Tensor | None) -> Tensor:
        """The scores [b, h, rows, k] as the normalizer needs them, before masked keys are set to -inf; unchanged for softmax."""
        return scores

    def attention_weights(self, call: Call, block: RowBlock) -> Tensor:
        """The weights of a block after dropout: [b, h, rows, k]."""
        weights = self._normalise(block, self.sinks(call.heads))
        if block.fully_masked is not None:
            fill = 1 / max(1, weights.shape[-1]) if call.fully_masked == "uniform" else 0
            weights = weights.masked_fill(block.fully_masked[..., None], fill)
        return weights if block.dropout is None else block.dropout.apply(weights, block.rows)

    def _normalise(self, block: RowBlock, sinks: Tensor | None) -> Tensor:
        """Softmax over the keys of scores + shift, with sinks [heads, 1]: [b, h, rows, k]. Fully masked rows are finite, and filled later.

        A row with keys whose scores all overflow is NaN.
        """
        scores = block.scores
        if block.fully_masked is not None:
            scores = scores.masked_fill(block.fully_masked[..., None], 0)  # softmax of a row of -inf, and its derivative, would be NaN
        if sinks is None:
            return torch.softmax(scores, -1)
        sinks = sinks if block.shift is None else (sinks - block.shift).to(scores.dtype)
        sink_column = sinks[..., None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, sink_column), -1), -1)[..., :-1]

    def bias(self, query: Tensor, masks: Masks, rows: slice, keys: slice, heads: Sequence[int] | None = None) -> Tensor | None:
        """The sum of the call's bias and those of the layer, for query [b, h, rows, d]: [b|1, h|1, rows|1, keys|1]; None if there are none.

        ALiBi is without `alibi_shift`. `heads` selects heads of the layer's biases; None: all.
        """
        spec, positions = self.spec, masks.positions[:, rows]
        biases = [] if (of_call := masks.bias_at(rows, keys)) is None else [of_call]
        if spec.alibi:
            biases.append(alibi(select_heads(self._slopes, heads), masks.clamped_positions(rows), keys))
        if spec.relative_bias is not None:
            biases.append(relative_bias(self._table("relative_bias", heads), spec.relative_bias, positions, keys))
        if spec.grid_bias is not None and spec.grid_bias.kind == "table":
            biases.append(grid_bias(self._table("grid_bias", heads), spec.grid_bias, positions, keys))
        elif spec.grid_bias is not None:
            grid_rows, grid_columns = (self.weights[name].to(self.dtype) for name in ("grid_rows", "grid_columns"))
            biases.append(decomposed_bias(query.to(self.dtype), grid_rows, grid_columns, spec.grid_bias, positions, keys))
        return reduce(torch.add, biases) if biases else None

    def _table(self, name: str, heads: Sequence[int] | None) -> Tensor:
        """The columns of a bias table [entries, h] for the selected heads."""
        return select_heads(self.weights[name].T, heads).T

    def sinks(self, heads: Sequence[int] | None) -> Tensor | None:
        """The sinks' scores [heads, 1]; None if the layer has none."""
        return select_heads(self.weights["sinks"].to(self.dtype), heads)[:, None] if self.spec.sinks else None

    def alibi_shift(self, masks: Masks, rows: slice, heads: Sequence[int] | None) -> Tensor | None:
        """ALiBi of the key nearest to each query, float64 [b|1, heads, rows]; None if all are 0.

        For a query far outside the keys this is a large bias common to all keys. Softmax ignores it, but adding it to float32 scores would
        round them, so it is kept separate.
        """
        if not self.spec.alibi:
            return None
        distance = (masks.positions[:, rows] - masks.clamped_positions(rows)).abs()
        return -select_heads(self._slopes, heads).double()[:, None] * distance[:, None] if distance.any() else None


class ScalableSoftmax(Eager):
    """Softmax of the scores times ln n, for a row that may attend to n keys (Nakanishi 2025, equation 3, with s in the scale)."""

    def _adjust(self, scores: Tensor, call: Call, rows: slice, visible: Tensor | None) -> Tensor:
        return scores * self._log_count(call.masks, visible)

    def alibi_shift(self, masks: Masks, rows: slice, heads: Sequence[int] | None) -> Tensor | None:
        shift = super().alibi_shift(masks, rows, heads)
        return None if shift is None else shift * self._log_count(masks, masks.visible(rows))[..., 0]

    def _log_count(self, masks: Masks, visible: Tensor | None) -> Tensor:
        """ln n of each row, [b|1, h|1, rows|1, 1]; 0 for fully masked rows."""
        if visible is None:
            count = torch.full((1, 1, 1, 1), masks.num_keys, device=masks.positions.device)
        else:
            count = visible.expand(*visible.shape[:-1], masks.num_keys).sum(-1, keepdim=True)
        return count.clamp(min=1).to(self.dtype).log()


class Sigmoid(Eager):
    """The sigmoid of each score less ln n, for n keys in the query's sequence (Ramapuram et al. 2024, equation 3)."""

    def _adjust(self, scores: Tensor, call: Call, rows: slice, visible: Tensor | None) -> Tensor:
        if (shift := super().alibi_shift(call.masks, rows, call.heads)) is not None:
            scores = scores + shift[..., None].to(self.dtype)
        return scores - self._log_count(call.masks, rows, scores.shape[0])

    def _normalise(self, block: RowBlock, sinks: Tensor | None) -> Tensor:
        """The sigmoid of the scores, [b, h, rows, k]; 0 for -inf. There are no sinks."""
        return torch.sigmoid(block.scores)

    def alibi_shift(self, masks: Masks, rows: slice, heads: Sequence[int] | None) -> None:
        """None: the shift is in the scores, since a sigmoid depends on it."""

    def _log_count(self, masks: Masks, rows: slice, batch: int) -> Tensor:
        """ln of the number of keys that are neither padding nor of other segments, [b, 1, rows|1, 1]; 0 without such keys."""
        keys = real_keys(masks, batch)[:, None]
        if (queries := masks.query_segments) is not None and masks.key_segments is not None:
            queries = queries[:, rows] if queries.shape[1] > 1 else queries
            keys = keys & (queries[:, :, None] == masks.key_segments[:, None])
        return keys.sum(-1).clamp(min=1).to(self.dtype).log()[:, None, :, None]


class DifferentialAttention(Eager):
    """Weights softmax(q1 k1) - lambda softmax(q2 k2) of the halves of queries and keys, and a norm of each head's output (Ye et al. 2024).

    Blocks have the scores of the first softmax; requests cannot ask for scores.
    """

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__(spec, weights, device)
        assert spec.differential is not None
        q1, k1, q2, k2 = (weights[name].double() for name in LAMBDAS)
        self._lambda = float(torch.exp(q1 @ k1) - torch.exp(q2 @ k2)) + spec.differential.lambda_init
        self._eps, self._factor = spec.differential.eps, torch.tensor(1 - spec.differential.lambda_init, dtype=self.dtype, device=device)
        if spec.differential.norm_weights:
            self._factor = self._factor * weights["head_norm.weight"].to(self.dtype)

    def compute(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None, wanted: Iterable[str]
    ) -> dict[str, Tensor]:
        tensors = super().compute(call, query, key, value, fully_masked, wanted)
        if (outputs := tensors.get("head_outputs")) is not None:
            exact = outputs.to(self.dtype)
            exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._eps)
            tensors["head_outputs"] = (exact * self._factor).to(self.layer_dtype)
        return tensors

    def row_blocks(
        self, call: Call, query: Tensor, key: Tensor, fully_masked: Tensor | None, blocks: Iterable[slice] | None = None
    ) -> Iterator[RowBlock]:
        blocks = None if blocks is None else tuple(blocks)
        (q1, q2), (k1, k2) = query.chunk(2, -1), key.chunk(2, -1)
        first_blocks = super().row_blocks(call, q1, k1, fully_masked, blocks)
        second_blocks = super().row_blocks(call, q2, k2, fully_masked, blocks)
        for first, second in zip(first_blocks, second_blocks, strict=True):
            yield first._replace(second=second)

    def attention_weights(self, call: Call, block: RowBlock) -> Tensor:
        assert block.second is not None
        return super().attention_weights(call, block) - self._lambda * super().attention_weights(call, block.second)


NORMALIZERS: dict[str, type[Eager]] = {"softmax": Eager, "scalable_softmax": ScalableSoftmax, "sigmoid": Sigmoid}


def make_eager(spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> Eager:
    """The eager attention of a layer, of the class that computes its kind of weights."""
    cls = DifferentialAttention if spec.differential else NORMALIZERS[spec.normalizer]
    return cls(spec, weights, device)


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


def row_slices(scores_per_row: int, rows: int) -> Iterator[slice]:
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
        axis = -1 if name == "log_sum_exp" else -2
        if part.shape[axis] == self.num_rows:
            self.tensors[name] = part
            return
        if name not in self.tensors:
            shape = list(part.shape)
            shape[axis] = self.num_rows
            self.tensors[name] = part.new_empty(shape)
        self.tensors[name].narrow(axis, rows.start, rows.stop - rows.start).copy_(part)


class Dropout:
    """Dropout of one call: keeps the weights whose random number is at least p, and divides them by 1 - p.

    The numbers are `numpy.random.RandomState(seed).random_sample((b, h, q, k))` for all heads, queries and keys of the call. Each block of
    rows is drawn again from a saved state, so [b, h, q, k] is never stored.
    """

    def __init__(self, call: Call, num_heads: int) -> None:
        assert call.dropout is not None
        self.p, seed = call.dropout
        self.batch, self.num_queries, self.num_keys = call.query.shape[0], call.query.shape[1], call.key.shape[1]
        self.heads, self.queries = call.heads or range(num_heads), call.queries or range(self.num_queries)
        self._states: dict[tuple[int, int, int], Any] = {}  # by item, head, and index of a run of SAVED_ROWS rows
        self._stream = np.random.RandomState(seed)
        for item in range(self.batch):
            for head in range(num_heads):
                for start in range(0, self.num_queries, SAVED_ROWS):
                    self._states[item, head, start // SAVED_ROWS] = self._stream.get_state()
                    self._stream.random_sample((min(SAVED_ROWS, self.num_queries - start), self.num_keys))

    def apply(self, weights: Tensor, rows: slice) -> Tensor:
        """Drop out weights [b, heads, rows, k] of these rows of the call's selected heads and queries."""
        return weights * self._kept(rows).to(weights.device) / (1 - self.p)

    def _kept(self, rows: slice) -> Tensor:
        """Which weights are kept: bool [b, heads, rows, k]."""
        queries = np.asarray(self.queries[rows], np.int64)
        kept = np.empty((self.batch, len(self.heads), len(queries), self.num_keys), np.bool_)
        for run in np.unique(queries // SAVED_ROWS):
            start = int(run) * SAVED_ROWS
            here = np.flatnonzero(queries // SAVED_ROWS == run)
            for item in range(self.batch):
                for i, head in enumerate(self.heads):
                    self._stream.set_state(self._states[item, head, int(run)])
                    drawn = self._stream.random_sample((min(SAVED_ROWS, self.num_queries - start), self.num_keys))
                    kept[item, i, here] = drawn[queries[here] - start] >= self.p
        return torch.from_numpy(kept)
