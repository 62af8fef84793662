"""Multi-head attention, batch first, read from top to bottom: project, split, attend, merge, project back.

    Attention(Q, K, V) = softmax(mask(cap(scale · Q Kᵀ) + bias)) V        (Vaswani et al. 2017, equation 1; masks and cap as in ONNX)

There are two ways, and a short cut. `_form` makes the weights, block of query rows by block, of `scores` and `softmax`, and is the only
one that knows dropout, caps and log-sum-exp. `_fuse` hands the rows to torch's fused attention, which never makes them, and is taken when
nobody asked. Both leave a blocked key exactly no influence. Short calls without masks are one operation of torch's, in `whole`, or one by
itself a few of NumPy's, in `single`.
`nn.MultiheadAttention` is not used: it ignores masks silently where it is fast, and what it does with fully masked rows depends on flags.
It serves as an oracle in the tests.

Knows no request: a `Call` is taken at its word.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from service.attention.blocks import Assembly, reach, row_blocks, rows_at_once
from service.attention.call import Call, Result, Rows
from service.attention.dropout import DropoutStream
from service.attention.initialise import torch_dtype
from service.attention.products import set_precision
from service.attention.projections import Projections
from service.attention.scores import Scores
from service.attention.selection import narrowed, selection
from service.attention.softmax import log_sum_exp, softmax, weighted
from service.attention.whole import Whole, as_whole
from service.spec import PROJECTIONS, LayerSpec

PROJECTED = {f"{name}_projection" for name in PROJECTIONS[:3]}
GRADIENTS = ("query_gradient", "key_gradient", "value_gradient")
PER_HEAD = {"output", "concatenated", "head_outputs"}
FORMS = {"scores", "log_sum_exp", "attention_weights"}
Kept = Callable[[slice], Tensor]  # which weights a dropout keeps in a block of rows


class MultiHeadAttention:
    """A layer's weights on one device. Immutable; calls may run in any thread, one at a time."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.spec, self.device, self.dtype = spec, device, torch_dtype(spec.dtype)
        self.projections = Projections(spec, weights)
        self.scores = Scores(spec, self.projections.weights, device)
        self.groups = spec.num_heads // spec.num_kv_heads  # query heads that share a head of keys and values
        self.whole: Whole | None = None  # what takes short and plain calls, once tuned

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """By canonical name; some are views of others."""
        return self.projections.weights

    @torch.inference_mode()
    def tune(self) -> None:
        """Chooses the products for this layer's weights. Slow the first time a shape is seen; not while another call computes."""
        self.projections.tune()
        self.whole = as_whole(self.spec, self.weights, self.device, self._attend)

    @torch.inference_mode()
    def __call__(self, call: Call) -> Result:
        """What `call.outputs` asks for. Tensors come in the layer's dtype, scores and weights of half layers in float32."""
        set_precision(self.spec.matmul_precision)
        if self.whole is not None and self.whole.takes(call):
            return self.whole(call)
        result = self._attend(call)
        if call.reduction is not None:
            query, key, _ = self.projections.project(call)
            result = replace(result, tensors=result.tensors | call.reduction(self.weigh(call, query, key, result.empty)))
        return result if call.output_gradient is None else replace(result, tensors=result.tensors | self._gradients(call))

    def _gradients(self, call: Call) -> dict[str, Tensor]:
        """Of <output_gradient, output> by query, key and value, each as an input of its own, by torch's autograd."""
        assert call.output_gradient is not None
        with torch.inference_mode(False), torch.enable_grad():
            inputs = [x.clone().requires_grad_() for x in (call.query, call.key, call.value)]
            query, key, value = inputs
            formed = replace(call, query=query, key=key, value=value, outputs=frozenset({"output"}), reproducible=True)
            output = self._attend(formed).tensors["output"]
            gradients = torch.autograd.grad(output, inputs, call.output_gradient.to(output.dtype))
        return {name: x for name, x in zip(GRADIENTS, gradients, strict=True) if name in call.outputs}

    def _attend(self, call: Call) -> Result:
        query, key, value = self.projections.project(call)
        empty = self.empty_rows(call)
        made: dict[str, Tensor] = {}
        if PROJECTED & call.outputs:
            made |= {f"{name}_projection": t for name, t in zip(PROJECTIONS, (query, key, value), strict=False)}
        selected = "attention_weights" in call.outputs and call.selects
        formed = call.outputs - {"attention_weights"} if selected else call.outputs
        fused = None if FORMS & formed or not PER_HEAD & formed else self._fuse(call, query, key, value, empty)
        if fused is not None:
            made["head_outputs"] = fused
        elif (FORMS | PER_HEAD) & formed:
            made |= self._form(call, query, key, value, empty, formed)
        if selected:
            made |= self._select(call, query, key, empty)
        if PER_HEAD & call.outputs:
            made |= self.merge(made["head_outputs"], call)
        wanted = call.outputs | {"keys", "values"} if call.top_k else call.outputs
        return Result({name: tensor for name, tensor in made.items() if name in wanted}, empty)

    def merge(self, head_outputs: Tensor, call: Call) -> dict[str, Tensor]:
        """[batch, heads, queries, head_dim] -> the heads side by side, and through the output projection."""
        if call.head_scale is not None:
            head_outputs = head_outputs * call.head_scale
        concatenated = head_outputs.transpose(1, 2).flatten(2)  # [batch, queries, heads * head_dim]
        made = {"head_outputs": head_outputs, "concatenated": concatenated}
        if "output" in call.outputs:
            made["output"] = self.projections.project_back(concatenated)
        return made

    def empty_rows(self, call: Call) -> Tensor | None:
        """bool [batch, heads, queries], None where no row lacks a key."""
        (batch, num_queries), k, heads = call.query.shape[:2], call.key.shape[1], self.spec.num_heads
        empty = call.masks.empty_rows(rows_at_once(batch * heads * k))
        return None if empty is None or not empty.any() else empty.expand(batch, heads, num_queries)

    def project(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Query [batch, heads, q, head_dim], key and value [batch, kv heads, k, …], as attention takes them."""
        set_precision(self.spec.matmul_precision)
        return self.projections.project(call)

    def project_back(self, concatenated: Tensor) -> Tensor:
        """[batch, queries, heads * value_head_dim] -> [batch, queries, output_dim]."""
        return self.projections.project_back(concatenated)

    # The way that makes the weights

    def weigh(self, call: Call, query: Tensor, key: Tensor, empty: Tensor | None, blocks: Iterable[slice] | None = None) -> Rows:
        """The weights of the call's heads and queries after dropout, with what they may see, a block of query rows at a time.

        `query` and `key` are as `project` returns them, `empty` as `empty_rows` does, or of as many heads as they have. All blocks together
        take no more memory than the largest; the caller may say which they are.
        """
        call, query, key, empty = narrowed(call, query, key, empty)
        batch, heads, num_queries, _ = query.shape
        sinks, kept = self.scores.sinks(call.heads), self._kept(call)
        for rows in row_blocks(batch * heads * key.shape[2], num_queries) if blocks is None else blocks:
            visible = call.masks.visible(rows)
            scores = self.scores(call, query[:, :, rows], key, rows, visible, call.heads)
            yield rows, self._dropped(call, softmax(call, scores, sinks, _of(empty, rows)), kept, rows), visible

    def _form(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, empty: Tensor | None, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        """Scores, log-sum-exp, weights and head outputs, as far as wanted: query rows in blocks, so that [q, k] is held only if asked."""
        batch, heads, num_queries, _ = query.shape
        call = replace(call, heads=None, queries=None) if call.selects else call  # a selection is of the weights alone, and made apart
        value, sinks, kept = self.scores.widened(value), self.scores.sinks(), self._kept(call)
        made = Assembly(num_queries)
        for rows in row_blocks(batch * heads * key.shape[2], num_queries):
            some = query if rows == slice(0, num_queries) else query[:, :, rows]
            scores = self.scores(call, some, key, rows, call.masks.visible(rows))
            if "scores" in wanted:
                made.put("scores", rows, scores)
            if "log_sum_exp" in wanted:
                made.put("log_sum_exp", rows, log_sum_exp(scores, sinks))
            if not (PER_HEAD | {"attention_weights"}) & wanted:
                continue
            weights = self._dropped(call, softmax(call, scores, sinks, _of(empty, rows)), kept, rows)
            if PER_HEAD & wanted:
                outputs = weighted(weights, value, call.masks)
                made.put("head_outputs", rows, outputs if self.scores.dtype == self.dtype else outputs.to(self.dtype))
            if "attention_weights" in wanted:
                for name, tensor in selection(weights, call).items():
                    made.put(name, rows, tensor)
        return made.tensors

    def _select(self, call: Call, query: Tensor, key: Tensor, empty: Tensor | None) -> dict[str, Tensor]:
        """The selected weights alone."""
        made = Assembly(len(call.queries or range(query.shape[2])))
        for rows, weights, _ in self.weigh(call, query, key, empty):
            for name, tensor in selection(weights, call).items():
                made.put(name, rows, tensor)
        return made.tensors

    def _kept(self, call: Call) -> Kept | None:
        """What the dropout keeps of the call's heads and queries, to be asked for a block of rows at a time."""
        if call.dropout is None:
            return None
        shape = (call.query.shape[0], self.spec.num_heads, call.query.shape[1], call.key.shape[1])
        stream, heads, queries = DropoutStream(*call.dropout, shape), call.heads or range(shape[1]), call.queries or range(shape[2])
        return lambda rows: stream.keep(heads, queries[rows])

    def _dropped(self, call: Call, weights: Tensor, kept: Kept | None, rows: slice) -> Tensor:
        """The weights of these rows after dropout."""
        if kept is None or call.dropout is None:
            return weights
        return weights * kept(rows).to(weights.device) / (1 - call.dropout[0])

    # The way that does not

    def _fuse(self, call: Call, query: Tensor, key: Tensor, value: Tensor, empty: Tensor | None) -> Tensor | None:
        """[batch, heads, queries, head_dim] without ever holding [q, k]; None where that cannot give exactly what is asked.

        A kernel adds -inf to the scores of blocked keys, and so lets NaN, or a score that overflows, through: seen in the result.
        """
        plain = not (
            self.spec.sinks or call.softcap or call.dropout or call.reproducible or (empty is not None and call.fully_masked == "uniform")
        )
        if not plain or 0 in call.query.shape or 0 in call.key.shape:
            return None
        heads = self._fuse_blocks(call, query, key, value, empty)
        return heads if not call.masks.blocks or torch.isfinite(heads).all() else None

    def _fuse_blocks(self, call: Call, query: Tensor, key: Tensor, value: Tensor, empty: Tensor | None) -> Tensor:
        """Masks are made for a block of query rows at a time, and keys that no row of it sees are cut off."""
        masks, (batch, heads, num_queries, _), num_keys = call.masks, query.shape, key.shape[2]
        fused = partial(F.scaled_dot_product_attention, scale=call.scale, enable_gqa=self.groups > 1)
        if not (self.spec.alibi or self.spec.relative_bias):
            if masks.plainly_causal or not (masks.blocks or masks.bias is not None):
                return fused(query, key, value, is_causal=masks.blocks)
            if (keys := masks.same_keys()) is not None:
                return fused(query, key[:, :, keys], value[:, :, keys])
        made = Assembly(num_queries)
        for rows in row_blocks(batch * heads * num_keys, num_queries):
            keys = reach(masks, rows)
            mask, bias = masks.visible(rows, keys), self.scores.added(masks, rows, keys)
            if bias is not None:
                mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).to(self.dtype)
            if mask is not None:
                mask = mask.expand(-1, -1, rows.stop - rows.start, keys.stop - keys.start)
            part = fused(query[:, :, rows], key[:, :, keys], value[:, :, keys], mask)
            made.put("head_outputs", rows, part if empty is None else part.masked_fill(empty[:, :, rows, None], 0))
        return made.tensors["head_outputs"]


def _of(empty: Tensor | None, rows: slice) -> Tensor | None:
    """Which of these rows have no key; None where none of all is without."""
    return None if empty is None else empty[:, :, rows]
