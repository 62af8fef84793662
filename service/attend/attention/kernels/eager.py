"""Eager attention: scores, softmax and weighted values, computed for one block of query rows at a time.

    S = cap(scale · (Q Kᵀ + T)) + bias    [batch, heads, rows, keys], -inf where a key is masked; cap(s) = softcap · tanh(s / softcap)
    A = softmax(S)                        a masked key has exactly no influence
    O = A V                               [batch, heads, rows, value_head_dim]

A block has at most MAX_BLOCK_SCORES scores, or one row, so [queries, keys] is stored only if it is a requested output. An attention sink
is an extra score in the softmax of each row; it has no value vector. T are terms of content and distance. The operators of a layer
(`operators/`) add terms and biases, and may replace the softmax or combine several.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attend.attention.call import SCORED, Call, reduce_weights, replaced
from attend.attention.kernels.choose import Heads
from attend.attention.kernels.declaration import Declaration
from attend.attention.masks import block_of
from attend.attention.numerics import at_least_float32, torch_dtype
from attend.attention.operators.operator import Operator
from attend.attention.operators.stages import RowTerms, methods_of
from attend.attention.rows import row_slices
from attend.axes import OUTPUTS
from attend.spec import LayerSpec
from attend.tensors import Array

SAVED_ROWS = 256  # rows between two saved states of the random generator (2.5 KB each)


class RowBlock(NamedTuple):
    """A block of query rows with all keys: what their attention weights are computed from."""

    rows: slice
    visible: Tensor | None  # bool [b|1, h|1, rows|1, k|1]: the keys that each query may attend to; None: all
    fully_masked: Tensor | None  # bool [b, h, rows]: the rows without a visible key; None: none
    scores: Tensor  # [b, h, rows, k]
    shift: Tensor | None  # float64 [b|1, h, rows]: to be added to all scores of a row; None: 0
    dropout: "Dropout | None"
    others: tuple[Tensor, ...] = ()  # scores of the other softmaxes of a layer that has several


class Eager:
    """Eager attention of one layer, in float32, or in float64 for a float64 layer. Immutable."""

    declaration = Declaration(fields=None, options=None, outputs=SCORED | {"head_outputs"})

    def __init__(self, spec: LayerSpec, operators: Sequence[Operator], device: torch.device) -> None:
        self.spec, self.layer_dtype = spec, torch_dtype(spec.dtype)
        self.dtype = at_least_float32(self.layer_dtype)
        self._terms, self._score, self._biases = (methods_of(operators, name) for name in ("terms", "score", "bias"))
        self._shifts, self._normalise_inputs = methods_of(operators, "shift"), methods_of(operators, "normalise_input")
        self._normaliser, self._sinks = methods_of(operators, "normalise"), methods_of(operators, "sinks")
        self._factors, self._mixes, self._values = (methods_of(operators, name) for name in ("factors", "mix_weights", "value"))
        self._biases_of_visible = methods_of(operators, "bias_of_visible")
        self.mixes_heads = any(operator.mixes_heads for operator in operators)
        self.has_bias, self._num_softmaxes = bool(self._biases), spec.num_softmaxes
        self._zero = torch.empty(1, 1, 1, dtype=self.dtype, device=device)  # the required addend of baddbmm, which beta=0 ignores

    def suits(self, call: Call) -> bool:
        """Always."""
        return True

    def compute(self, call: Call, inputs: Heads, outputs: frozenset[str]) -> dict[str, Tensor]:
        """Those of `scores`, `log_sum_exp`, `head_outputs` and `attention_weights` (as from `reduce_weights`) that are in `outputs`."""
        query, key, value, fully_masked = inputs
        assembly, value, sinks = Assembly(query.shape[2]), value.to(self.dtype), self._sinks_of(call)
        for block in self.row_blocks(call, query, key, fully_masked):
            if "scores" in outputs:
                shifted = block.scores if block.shift is None else (block.scores + block.shift[..., None]).to(self.dtype)
                assembly.put("scores", block.rows, shifted)
            if "log_sum_exp" in outputs:
                total = log_sum_exp(block.scores, sinks, block.shift)
                assembly.put("log_sum_exp", block.rows, total.to(torch.float64 if call.options.is_part else self.dtype))
            if "head_outputs" not in outputs and "attention_weights" not in outputs:
                continue
            weights = self.attention_weights(call, block)
            if "head_outputs" in outputs:
                assembly.put("head_outputs", block.rows, apply_weights(weights, value).to(self.layer_dtype))
            if "attention_weights" in outputs:
                for name, tensor in reduce_weights(weights, call).items():
                    assembly.put(name, block.rows, tensor)
        for apply in self._values if "head_outputs" in outputs else ():
            assembly.tensors["head_outputs"] = apply(assembly.tensors["head_outputs"])
        return assembly.tensors

    def row_blocks(
        self, call: Call, query: Tensor, key: Tensor, fully_masked: Tensor | None, blocks: Iterable[slice] | None = None
    ) -> Iterator[RowBlock]:
        """Compute the scores of the call block by block; `blocks` are the rows of each block.

        If some heads or queries are selected, query, key and masks must have only these heads and queries, or all heads if the layer mixes
        them. A caller that drops each block before the next needs memory for one block only.
        """
        call = self._computed(call)
        batch, heads, num_queries, _ = query.shape
        dropout = None if call.options.dropout is None else Dropout(call, self.spec.num_heads)
        count = self._num_softmaxes
        parts = [(query, key)] if count == 1 else list(zip(query.chunk(count, -1), key.chunk(count, -1), strict=True))
        biases = [make(call) for make in self._biases_of_visible]
        terms = [[terms for make in self._terms if (terms := make(call, k)) is not None] for _, k in parts]
        for rows in row_slices(batch * heads * key.shape[2], num_queries) if blocks is None else blocks:
            visible = call.masks.visible(rows)
            masked = None if fully_masked is None else fully_masked[:, :, rows]
            scored = [self._scores(call, q[:, :, rows], k, rows, visible, own, biases) for (q, k), own in zip(parts, terms, strict=True)]
            (scores, shift), others = scored[0], tuple(scores for scores, _ in scored[1:])
            yield RowBlock(rows, visible, masked, scores, shift, dropout, others)

    def _scores(
        self,
        call: Call,
        query: Tensor,
        key: Tensor,
        rows: slice,
        visible: Tensor | None,
        terms: Sequence[RowTerms],
        biases: Sequence[RowTerms],
    ) -> tuple[Tensor, Tensor | None]:
        """Scores [b, h, rows, k] of the query rows, and the shift [b|1, h, rows] to be added to all scores of a row.

        Query heads that share a key head are computed as additional rows of one product, so keys are not copied.
        """
        batch, heads, num_rows, head_dim = query.shape
        kv_heads, num_keys = key.shape[1:3]
        q = query.to(self.dtype).reshape(batch * kv_heads, heads // kv_heads * num_rows, head_dim)
        k = key.to(self.dtype).flatten(0, 1)
        scores = torch.baddbmm(self._zero, q, k.transpose(1, 2), beta=0, alpha=call.options.scale).view(batch, heads, num_rows, num_keys)
        for own in terms:
            scores.add_(own.terms_of_rows(query, rows), alpha=call.options.scale)
        for apply in self._score:
            scores = apply(scores, call)
        if (bias := self.bias(query, call, rows, slice(0, num_keys))) is not None:
            scores = scores + bias
        for own in biases:
            scores = scores + own.terms_of_rows(query, rows)
        shift = self.shift(call, rows)
        for normalise in self._normalise_inputs:
            scores, shift = normalise(scores, shift, call, rows, visible)
        return (scores if visible is None else scores.masked_fill_(~visible, -torch.inf)), shift

    def attention_weights(self, call: Call, block: RowBlock) -> Tensor:
        """The weights of a block after dropout, of the call's heads: [b, h, rows, k]."""
        computed = self._computed(call)
        weights = self._fill(computed, block, self._normalise(computed, block, block.scores))
        for factor, scores in zip(self._factors[0]()[1:], block.others, strict=True) if block.others else ():
            weights = weights + factor * self._fill(computed, block, self._normalise(computed, block, scores))
        for mix in self._mixes:
            weights = mix(weights if block.fully_masked is None else weights.masked_fill(block.fully_masked[..., None], 0))
            weights = self._fill(computed, block, weights if block.visible is None else weights.masked_fill(~block.visible, 0))
        if call.pattern is not None:
            given, rows = (None if x is None else block_of(x, block.rows, slice(None)) for x in (call.pattern, call.pattern_rows))
            weights = replaced(weights, given, rows)
        weights = weights if block.dropout is None else block.dropout.apply(weights, block.rows)
        return weights if computed is call or call.options.heads is None else weights[:, list(call.options.heads)]

    def _computed(self, call: Call) -> Call:
        """The call whose scores are computed: one for all heads if the layer mixes them."""
        return call.with_options(heads=None) if self.mixes_heads and call.options.heads is not None else call

    def _normalise(self, call: Call, block: RowBlock, scores: Tensor) -> Tensor:
        """The weights of scores + shift: [b, h, rows, k], by softmax unless an operator replaces it.

        The weights of a row that has keys, and whose scores all overflow, are NaN.
        """
        if self._normaliser:
            weights: Tensor = self._normaliser[0](scores)
        else:
            if block.fully_masked is not None:
                scores = scores.masked_fill(block.fully_masked[..., None], 0)  # softmax of a row of -inf, and its derivative, would be NaN
            weights = self._softmax(scores, self._sinks_of(call), block.shift)
        return weights

    def _fill(self, call: Call, block: RowBlock, weights: Tensor) -> Tensor:
        """The weights with those of fully masked rows."""
        if block.fully_masked is None:
            return weights
        return weights.masked_fill(
            block.fully_masked[..., None], 1 / max(1, weights.shape[-1]) if call.options.fully_masked == "uniform" else 0
        )

    def _softmax(self, scores: Tensor, sinks: Tensor | None, shift: Tensor | None) -> Tensor:
        """Softmax over the keys of scores + shift, with sinks [heads, 1]."""
        if sinks is None:
            return torch.softmax(scores, -1)
        sinks = sinks if shift is None else (sinks - shift).to(scores.dtype)
        sink_column = sinks[..., None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, sink_column), -1), -1)[..., :-1]

    def bias(self, query: Tensor, call: Call, rows: slice, keys: slice) -> Tensor | None:
        """The sum of the call's bias and those of the layer, for query [b, h, rows, d]: [b|1, h|1, rows|1, keys|1]; None if there are none.

        It is without the `shift`. If heads are selected, query and masks must have only these heads.
        """
        biases = [] if (own := call.masks.bias_at(rows, keys)) is None else [own]
        biases += [bias(query, call, rows, keys) for bias in self._biases]
        if len(biases) > 1:  # the sum of two biases in half precision would be rounded
            biases = [bias.to(self.dtype) for bias in biases]
        return reduce(torch.add, biases) if biases else None

    def sinks(self, heads: Sequence[int] | None) -> Tensor | None:
        """The sinks' scores [heads, 1]; None if the layer has none."""
        sinks: Tensor | None = self._sinks[0](heads) if self._sinks else None
        return sinks

    def _sinks_of(self, call: Call) -> Tensor | None:
        """The sinks of the call's heads; none for a part of a call, since they are added where parts are merged."""
        return None if call.options.is_part else self.sinks(call.options.heads)

    def shift(self, call: Call, rows: slice) -> Tensor | None:
        """A bias common to all keys of a row, float64 [b|1, heads, rows]; None if all are 0."""
        shift: Tensor | None = self._shifts[0](call.masks, rows, call.options.heads) if self._shifts else None
        return shift


def log_sum_exp(scores: Tensor, sinks: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """ln Σ exp over each row and its sink, [b, h, rows]; -inf for fully masked rows, even with a sink. float64 if a shift is given."""
    total = torch.logsumexp(scores, -1)
    if shift is not None:
        total = total + shift
    return total if sinks is None else with_sinks(total, sinks)


def with_sinks(total: Tensor, sinks: Tensor) -> Tensor:
    """Log-sum-exps [b, h, rows] with those of sinks [h, 1]; fully masked rows remain -inf."""
    return torch.where(total == -torch.inf, total, torch.logaddexp(total, sinks.to(total)))


def apply_weights(weights: Tensor, value: Tensor) -> Tensor:
    """Weights [b, h, rows, k] times values [b, kv heads, k, d]: [b, h, rows, d]. A weight of 0 excludes even NaN and infinity."""
    batch, heads, rows, keys = weights.shape
    kv_heads = value.shape[1]
    shared = weights.reshape(batch * kv_heads, heads // kv_heads * rows, keys)  # heads that share values, as more rows
    value = value.flatten(0, 1)
    summed = torch.bmm(shared, value)
    if not all_finite(summed):
        finite = torch.isfinite(value)
        reached = (shared != 0).to(value.dtype) @ (~finite).to(value.dtype) > 0
        summed = (shared @ value.masked_fill(~finite, 0)).masked_fill(reached, torch.nan)
    return summed.view(batch, heads, rows, value.shape[2])


def all_finite(x: Tensor) -> bool:
    """Whether all numbers are finite. Their sum tells it in most cases, in one pass and without a copy."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


class Assembly:
    """Assembles tensors from blocks of rows. A block with all rows is stored without a copy."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, rows: slice, part: Tensor) -> None:
        """Add these rows of a tensor. Rows are its axis of queries; of the largest weights, the last but one."""
        axis = OUTPUTS[name].row_axis if name in OUTPUTS else -2
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

    The numbers are `numpy.random.RandomState(seed).random_sample((b, h, q, k))` for all heads, queries and keys of the call. They are drawn
    twice, so that [b, h, q, k] is never stored: first to save the generator's state before every run of SAVED_ROWS rows, and again for each
    block of rows, which continues after the rows of the block before it.
    """

    def __init__(self, call: Call, num_heads: int) -> None:
        options = call.options
        assert options.dropout is not None
        self.p, seed = options.dropout
        self.batch, self.num_queries, self.num_keys = options.items, options.num_queries, options.num_keys
        self.heads, self.queries = options.heads or range(num_heads), options.queries or range(self.num_queries)
        self._saved: dict[tuple[int, int], list[Any]] = {}  # by item and head, the state before each run of rows
        self._next: dict[tuple[int, int], tuple[int, Any]] = {}  # by item and head, the row after those last drawn, and the state there
        self._stream = np.random.RandomState(seed)
        for item in range(self.batch):
            for head in range(num_heads):
                states = self._saved[item, head] = []
                for start in range(0, self.num_queries, SAVED_ROWS):
                    states.append(self._stream.get_state())
                    self._draw(min(SAVED_ROWS, self.num_queries - start))

    def apply(self, weights: Tensor, rows: slice) -> Tensor:
        """Drop out weights [b, heads, rows, k] of these rows of the call's selected heads and queries."""
        return weights * self._kept(rows).to(weights.device) / (1 - self.p)

    def _kept(self, rows: slice) -> Tensor:
        """Which weights are kept: bool [b, heads, rows, k]."""
        queries, places = np.unique(np.asarray(self.queries[rows], np.int64), return_inverse=True)
        kept = np.empty((self.batch, len(self.heads), len(queries), self.num_keys), np.bool_)
        for item in range(self.batch):
            for i, head in enumerate(self.heads):
                for start, stop in _runs(queries):
                    kept[item, i, start:stop] = self._rows(item, head, int(queries[start]), stop - start) >= self.p
        return torch.from_numpy(kept if np.array_equal(places, np.arange(len(queries))) else kept[:, :, places])

    def _rows(self, item: int, head: int, first: int, count: int) -> Array:
        """The random numbers of consecutive rows, [count, k]."""
        row, state = self._next.get((item, head), (0, None))
        run = first // SAVED_ROWS
        if state is None or not run * SAVED_ROWS <= row <= first:
            row, state = run * SAVED_ROWS, self._saved[item, head][run]
        self._stream.set_state(state)
        self._draw(first - row)
        drawn = self._draw(count)
        self._next[item, head] = first + count, self._stream.get_state()
        return drawn

    def _draw(self, rows: int) -> Array:
        return self._stream.random_sample((rows, self.num_keys))


def _runs(numbers: Array) -> Iterator[tuple[int, int]]:
    """The index of the first, and after the last, of each run of consecutive ascending numbers; none of no numbers."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    yield from zip((0, *breaks), (*breaks, len(numbers)), strict=True) if len(numbers) else ()
