"""Multi-head attention, batch first, read from top to bottom: project, split, attend, merge, project back.

    Attention(Q, K, V) = softmax(mask(cap(scale · Q Kᵀ) + bias)) V        (Vaswani et al. 2017, equation 1; masks and cap as in ONNX)

There are two ways. `_form` makes the weights, block of query rows by block, and is the only one that knows scores, dropout, caps
and log-sum-exp. `_fuse` hands the rows to torch's fused attention, which never makes them, and is taken when nobody asked.
Both leave a blocked key exactly no influence. torch's own `nn.MultiheadAttention` is not used: its fast path ignores masks
silently, and what it does with fully masked rows depends on flags; it serves as an oracle in the tests.

Knows no request: a `Call` is taken at its word.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from service.attention.call import Call, Result, Rows
from service.attention.dropout import DropoutStream
from service.attention.initialise import torch_dtype
from service.attention.masks import Masks
from service.attention.positions import alibi, alibi_slopes, relative_bias
from service.attention.products import set_precision
from service.attention.projections import Projections
from service.spec import PROJECTIONS, LayerSpec

BLOCK = 1 << 20  # scores held at once where [q, k] is not asked for: 4 MB in float32, which caches hold
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
        self.accumulate = torch.float64 if self.dtype == torch.float64 else torch.float32  # softmax in float32 or better
        self.groups = spec.num_heads // spec.num_kv_heads  # query heads that share a head of keys and values
        slopes = alibi_slopes(spec.num_heads) if spec.alibi else []
        self.slopes = torch.tensor(slopes, dtype=self.accumulate, device=device)
        self._nothing = torch.empty(1, 1, 1, dtype=self.accumulate, device=device)  # what a product with beta=0 is added to

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """By canonical name; some are views of others."""
        return self.projections.weights

    @torch.inference_mode()
    def tune(self) -> None:
        """Chooses the products for this layer's weights. Slow the first time a shape is seen; not while another call computes."""
        self.projections.tune()

    @torch.inference_mode()
    def __call__(self, call: Call) -> Result:
        """What `call.outputs` asks for. Tensors come in the layer's dtype, scores and weights of half layers in float32."""
        set_precision(self.spec.matmul_precision)
        result = self._attend(call)
        if call.reduction is not None:
            result = replace(result, tensors=result.tensors | call.reduction(self._weigh(call)))
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
            kept = self._kept(call, range(self.spec.num_heads), range(call.query.shape[1]))
            made |= self._form(call, query, key, value, formed, kept)
        if selected:
            made |= self._form_selected(call, query, key, value)
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
        empty = call.masks.empty_rows(max(1, BLOCK // max(1, batch * heads * k)))
        return None if empty is None or not empty.any() else empty.expand(batch, heads, num_queries)

    def project(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Query [batch, heads, q, head_dim], key and value [batch, kv heads, k, …], as attention takes them."""
        set_precision(self.spec.matmul_precision)
        return self.projections.project(call)

    def project_back(self, concatenated: Tensor) -> Tensor:
        """[batch, queries, heads * value_head_dim] -> [batch, queries, output_dim]."""
        return self.projections.project_back(concatenated)

    # The way that makes the weights

    def weigh(self, call: Call, query: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Weights before dropout, a block of query rows at a time: which rows, and [batch, heads, rows, keys].

        `query` and `key` are as `project` returns them. All blocks together take no more memory than the largest.
        """
        sinks = self.weights["sinks"].to(self.accumulate)[:, None] if self.spec.sinks else None
        for rows in _blocks(call.query.shape[0] * self.spec.num_heads * key.shape[2], query.shape[2]):
            yield rows, self._weights(call, self._scores(call, query[:, :, rows], key, rows), sinks)

    def _form(
        self,
        call: Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        wanted: frozenset[str],
        kept: Kept | None,
        chosen: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Scores, log-sum-exp, weights and head outputs, as far as wanted: query rows in blocks, so that [q, k] is held only if asked."""
        batch, heads, num_queries, _ = query.shape
        value = value.to(self.accumulate)
        sinks = self._of_heads(self.weights["sinks"].to(self.accumulate), chosen)[:, None] if self.spec.sinks else None
        made = _Rows(num_queries)
        for rows in _blocks(batch * heads * key.shape[2], num_queries):
            some = query if rows == slice(0, num_queries) else query[:, :, rows]
            scores = self._scores(call, some, key, rows, chosen)
            if "scores" in wanted:
                made.put("scores", rows, scores)
            if "log_sum_exp" in wanted:
                made.put("log_sum_exp", rows, _log_sum_exp(scores, sinks))
            if not (PER_HEAD | {"attention_weights"}) & wanted:
                continue
            weights = self._dropped(call, self._weights(call, scores, sinks), kept, rows)
            if PER_HEAD & wanted:
                made.put("head_outputs", rows, _weighted(weights, value, call.masks).to(self.dtype))
            if "attention_weights" in wanted:
                for name, tensor in selection(weights, call).items():
                    made.put(name, rows, tensor)
        return made.tensors

    def _weigh(self, call: Call) -> Rows:
        """The weights of the call's heads, a block of query rows at a time, with what they may see: nothing holds [q, k]."""
        query, key, _ = self.projections.project(call)
        heads = call.heads or tuple(range(query.shape[1]))
        at = torch.tensor(heads, device=query.device)
        query, key = query.index_select(1, at), key.index_select(1, at // self.groups)
        masks = call.masks.narrowed(call.heads, None)
        narrow = replace(call, masks=masks)
        sinks = self._of_heads(self.weights["sinks"].to(self.accumulate), heads)[:, None] if self.spec.sinks else None
        kept = self._kept(call, heads, range(query.shape[2]))
        for rows in _blocks(query.shape[0] * len(heads) * key.shape[2], query.shape[2]):
            weights = self._weights(narrow, self._scores(narrow, query[:, :, rows], key, rows, heads), sinks)
            yield rows, self._dropped(call, weights, kept, rows), masks.visible(rows)

    def _dropped(self, call: Call, weights: Tensor, kept: Kept | None, rows: slice) -> Tensor:
        """The weights of these rows after dropout."""
        if kept is None or call.dropout is None:
            return weights
        return weights * kept(rows).to(weights.device) / (1 - call.dropout[0])

    def _form_selected(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """The selected weights alone: the weights of the smaller problem that has only the selected heads and queries."""
        heads = call.heads or tuple(range(query.shape[1]))
        queries = call.queries or tuple(range(query.shape[2]))
        at = torch.tensor(heads, device=query.device)
        query = query.index_select(1, at).index_select(2, torch.tensor(queries, device=query.device))
        narrow = replace(call, masks=call.masks.narrowed(call.heads, call.queries))
        kept = self._kept(call, heads, queries)
        return self._form(narrow, query, key.index_select(1, at // self.groups), value, frozenset({"attention_weights"}), kept, heads)

    def _kept(self, call: Call, heads: Sequence[int], queries: Sequence[int]) -> Kept | None:
        """What the dropout keeps of these heads and queries, to be asked for a block of rows at a time."""
        if call.dropout is None:
            return None
        stream = DropoutStream(*call.dropout, (call.query.shape[0], self.spec.num_heads, call.query.shape[1], call.key.shape[1]))
        return lambda rows: stream.keep(heads, queries[rows])

    def _scores(self, call: Call, query: Tensor, key: Tensor, rows: slice, chosen: Sequence[int] | None = None) -> Tensor:
        """[batch, heads, rows, keys]: scale, softcap, then everything added, then everything blocked.

        Query heads that share a key head are more rows of the same product, so keys are never repeated.
        """
        batch, heads, num_rows, head_dim = query.shape
        kv = key.shape[1]
        q = query.to(self.accumulate).reshape(batch * kv, heads // kv * num_rows, head_dim)
        k = key.to(self.accumulate).flatten(0, 1)
        scores = torch.baddbmm(self._nothing, q, k.transpose(1, 2), beta=0, alpha=call.scale).view(*query.shape[:3], key.shape[2])
        if call.softcap:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if (bias := self._added(call.masks, rows, slice(0, key.shape[2]), chosen)) is not None:
            scores = scores + bias
        if (visible := call.masks.visible(rows)) is not None:
            scores = scores.masked_fill_(~visible, -torch.inf)
        return scores

    def _added(self, masks: Masks, rows: slice, keys: slice, chosen: Sequence[int] | None) -> Tensor | None:
        """Everything that is added to the scores, [b|1, h|1, rows|1, keys|1]: the call's bias, ALiBi, T5's table."""
        added, positions = masks.added(rows, keys), masks.positions[:, rows]
        if self.spec.alibi:
            slopes = alibi(self._of_heads(self.slopes, chosen), positions, keys)
            added = slopes if added is None else added + slopes
        if self.spec.relative_bias is not None:
            table = self._of_heads(self.weights["relative_bias"].T, chosen).T
            relative = relative_bias(table, self.spec.relative_bias, positions, keys)
            added = relative if added is None else added + relative
        return added

    def _of_heads(self, per_head: Tensor, chosen: Sequence[int] | None) -> Tensor:
        """The rows of the chosen heads; all where none are chosen."""
        return per_head if chosen is None else per_head[list(chosen)]

    def _weights(self, call: Call, scores: Tensor, sinks: Tensor | None) -> Tensor:
        """Softmax over keys, with the sink beside them; a row without keys gets zeros, or 1/k where the caller wants that."""
        empty = scores.amax(-1, keepdim=True) == -torch.inf if call.masks.blocks and scores.shape[-1] else None
        if empty is not None:
            empty = empty if empty.any() else None
        if empty is not None:
            scores = scores.masked_fill(empty, 0)  # -inf throughout has no softmax, nor a derivative
        if sinks is None:
            weights = torch.softmax(scores, -1)
        else:
            beside = sinks[..., None].expand(*scores.shape[:-1], 1)
            weights = torch.softmax(torch.cat((scores, beside), -1), -1)[..., :-1]
        if empty is not None:
            weights = weights.masked_fill(empty, 1 / scores.shape[-1] if call.fully_masked == "uniform" else 0)
        return weights

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
        made = _Rows(num_queries)
        for rows in _blocks(batch * heads * num_keys, num_queries):
            keys = _reach(masks, rows)
            mask, bias = masks.visible(rows, keys), self._added(masks, rows, keys, None)
            if bias is not None:
                mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).to(self.dtype)
            if mask is not None:
                mask = mask.expand(-1, -1, rows.stop - rows.start, keys.stop - keys.start)
            part = fused(query[:, :, rows], key[:, :, keys], value[:, :, keys], mask)
            made.put("head_outputs", rows, part if empty is None else part.masked_fill(empty[:, :, rows, None], 0))
        return made.tensors["head_outputs"]


def _blocks(per_row: int, rows: int) -> Iterator[slice]:
    """Blocks of query rows, each with at most BLOCK scores; one empty block where there are no rows."""
    step = max(1, BLOCK // max(1, per_row))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


def _weighted(weights: Tensor, value: Tensor, masks: Masks) -> Tensor:
    """Weights times values, where a weight of 0 means no contribution even from a value of NaN or infinity."""
    batch, heads, rows, keys = weights.shape
    kv = value.shape[1]
    shared = weights.reshape(batch * kv, heads // kv * rows, keys)  # heads that share values, as more rows
    value = value.flatten(0, 1)
    if masks.blocks and not torch.isfinite(value).all():
        finite = torch.isfinite(value)
        spoilt = (shared != 0).to(value.dtype) @ (~finite).to(value.dtype) > 0
        summed = (shared @ value.masked_fill(~finite, 0)).masked_fill(spoilt, torch.nan)
    else:
        summed = torch.bmm(shared, value)
    return summed.view(batch, heads, rows, value.shape[2])


def _log_sum_exp(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Of each row, the sink among the terms; -inf for a row without keys, which a sink does not fill."""
    total = torch.logsumexp(scores, -1)
    return total if sinks is None else torch.where(total == -torch.inf, total, torch.logaddexp(total, sinks))


def selection(weights: Tensor, call: Call) -> dict[str, Tensor]:
    """The weights as asked for: averaged over heads, or the largest of each row with their keys."""
    if call.average:
        weights = weights.mean(1)
    if call.top_k is None:
        return {"attention_weights": weights}
    values, keys = _largest(weights, min(call.top_k, weights.shape[-1]))
    return {"values": values, "keys": keys}


def _largest(weights: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row and their keys, ties to the lower key.

    torch.topk is faster than a stable sort but breaks ties as it likes: only rows in which there are any, up to the one that just misses,
    are sorted.
    """
    if 2 * n >= weights.shape[-1]:
        values, keys = torch.sort(weights, dim=-1, descending=True, stable=True)
    else:
        values, keys = torch.topk(weights, n + 1, dim=-1)
        tied = (values[..., 1:] == values[..., :-1]).any(-1)
        if tied.any():
            exact, places = torch.sort(weights[tied], dim=-1, descending=True, stable=True)
            values[tied], keys[tied] = exact[..., : n + 1], places[..., : n + 1]
    return values[..., :n], keys[..., :n]


def _reach(masks: Masks, rows: slice) -> slice:
    """The keys that any of these rows can see, as one range; at least one, since torch wants no empty axis."""
    if not masks.intervals:
        return slice(0, masks.num_keys)
    first, last = masks.interval(rows)
    start = min(max(int(first.min()), 0), masks.num_keys - 1)
    return slice(start, max(int(last.max()) + 1, start + 1))


class _Rows:
    """Results put together block by block. One block is passed on as it is; of several, each is written into its place."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, rows: slice, part: Tensor) -> None:
        if part.shape[axis := -1 if name == "log_sum_exp" else -2] == self.num_rows:
            self.tensors[name] = part
            return
        if name not in self.tensors:
            shape = list(part.shape)
            shape[axis] = self.num_rows
            self.tensors[name] = part.new_empty(shape)
        self.tensors[name].narrow(axis, rows.start, rows.stop - rows.start).copy_(part)
