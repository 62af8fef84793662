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

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from service.attention.call import Call, Result
from service.attention.dropout import DropoutStream
from service.attention.masks import Masks
from service.attention.products import choose, linear, set_precision
from service.spec import PROJECTIONS, LayerSpec

BLOCK = 1 << 20  # scores held at once where [q, k] is not asked for: 4 MB in float32, which caches hold
PROJECTED = {f"{name}_projection" for name in PROJECTIONS[:3]}
PER_HEAD = {"output", "concatenated", "head_outputs"}
FORMS = {"scores", "log_sum_exp", "attention_weights"}
Kept = Callable[[slice], Tensor]  # which weights a dropout keeps in a block of rows


class MultiHeadAttention:
    """A layer's weights on one device. Immutable; calls may run in any thread, one at a time."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.weights = dict(weights)
        tensor = weights["query.weight"]
        self.device, self.dtype = tensor.device, tensor.dtype
        self.accumulate = torch.float64 if tensor.dtype == torch.float64 else torch.float32  # softmax in float32 or better
        self._nothing = tensor.new_empty(1, 1, 1, dtype=self.accumulate)  # what a product with beta=0 is added to
        if spec.d_model == spec.key_dim == spec.value_dim:
            self._pack("query", "key", "value")
            self._pack("key", "value", packed_in="query+key+value")
        elif spec.key_dim == spec.value_dim:
            self._pack("key", "value")

    def _pack(self, *names: str, packed_in: str = "") -> None:
        """Lays the weights of projections that may share an input side by side, so that one product serves them all.

        The single weights become views of the packed one; nothing is held twice.
        """
        for part in ("weight", "bias"):
            tensors = [self.weights[f"{name}.{part}"] for name in names if f"{name}.{part}" in self.weights]
            if tensors:
                rows = sum(map(len, tensors))
                packed = self.weights[f"{packed_in}.{part}"][-rows:] if packed_in else torch.cat(tensors)
                self.weights["+".join(names) + f".{part}"] = packed
                views = torch.split(packed, [len(tensor) for tensor in tensors])
                self.weights |= {f"{name}.{part}": view for name, view in zip(names, views, strict=True)}

    @torch.inference_mode()
    def __call__(self, call: Call) -> Result:
        """What `call.outputs` asks for. Tensors come in the layer's dtype, scores and weights of half layers in float32."""
        set_precision(self.spec.matmul_precision)
        query, key, value = self.project(call)
        empty = self._empty_rows(call)
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

    @torch.inference_mode()
    def tune(self) -> None:
        """Chooses the products for this layer's weights. Slow the first time a shape is seen; not while another call computes."""
        for name, weight in self.weights.items():
            if name.endswith(".weight"):
                choose(weight)

    def project(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, projected and split into heads: each [batch, heads, n, head_dim]."""
        if call.value is call.key and "key+value.weight" in self.weights:
            if call.key is call.query and "query+key+value.weight" in self.weights:
                projected = self._linear(call.query, "query+key+value").chunk(3, -1)
            else:
                projected = (self._linear(call.query, "query"), *self._linear(call.key, "key+value").chunk(2, -1))
        else:
            projected = tuple(self._linear(x, name) for name, x in zip(PROJECTIONS, (call.query, call.key, call.value), strict=False))
        shape = (self.spec.num_heads, self.spec.head_dim)
        split = (x.view(*x.shape[:2], *shape) for x in projected)
        query, key, value = (x.transpose(1, 2) for x in split)
        return query, key, value

    def merge(self, head_outputs: Tensor, call: Call) -> dict[str, Tensor]:
        """[batch, heads, queries, head_dim] -> the heads side by side, and through the output projection."""
        if call.head_scale is not None:
            head_outputs = head_outputs * call.head_scale
        concatenated = head_outputs.transpose(1, 2).flatten(2)  # [batch, queries, heads * head_dim]
        made = {"head_outputs": head_outputs, "concatenated": concatenated}
        if "output" in call.outputs:
            made["output"] = self._linear(concatenated, "output")
        return made

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _empty_rows(self, call: Call) -> Tensor | None:
        """bool [batch, heads, queries], None where no row lacks a key."""
        (batch, num_queries), k, heads = call.query.shape[:2], call.key.shape[1], self.spec.num_heads
        empty = call.masks.empty_rows(max(1, BLOCK // max(1, batch * heads * k)))
        return None if empty is None or not empty.any() else empty.expand(batch, heads, num_queries)

    # The way that makes the weights

    def _form(self, call: Call, query: Tensor, key: Tensor, value: Tensor, wanted: frozenset[str], kept: Kept | None) -> dict[str, Tensor]:
        """Scores, log-sum-exp, weights and head outputs, as far as wanted: query rows in blocks, so that [q, k] is held only if asked."""
        batch, heads, num_queries, _ = query.shape
        value = value.to(self.accumulate)
        made = _Rows(num_queries)
        for rows in _blocks(batch * heads * key.shape[2], num_queries):
            scores = self._scores(call, query[:, :, rows], key, rows)
            if "scores" in wanted:
                made.put("scores", rows, scores)
            if "log_sum_exp" in wanted:
                made.put("log_sum_exp", rows, torch.logsumexp(scores, -1))
            if not (PER_HEAD | {"attention_weights"}) & wanted:
                continue
            weights = self._weights(call, scores, rows)
            if kept is not None and call.dropout is not None:
                weights = weights.mul_(kept(rows).to(weights.device)).div_(1 - call.dropout[0])
            if PER_HEAD & wanted:
                made.put("head_outputs", rows, _weighted(weights, value, call.masks).to(self.dtype))
            if "attention_weights" in wanted:
                for name, tensor in _selection(weights, call).items():
                    made.put(name, rows, tensor)
        return made.tensors

    def _form_selected(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """The selected weights alone: the weights of the smaller problem that has only the selected heads and queries."""
        heads = call.heads or tuple(range(query.shape[1]))
        queries = call.queries or tuple(range(query.shape[2]))
        at = torch.tensor(heads, device=query.device)
        query = query.index_select(1, at).index_select(2, torch.tensor(queries, device=query.device))
        narrow = replace(call, masks=call.masks.narrowed(call.heads, call.queries))
        kept = self._kept(call, heads, queries)
        return self._form(narrow, query, key.index_select(1, at), value, frozenset({"attention_weights"}), kept)

    def _kept(self, call: Call, heads: Sequence[int], queries: Sequence[int]) -> Kept | None:
        """What the dropout keeps of these heads and queries, to be asked for a block of rows at a time."""
        if call.dropout is None:
            return None
        stream = DropoutStream(*call.dropout, (call.query.shape[0], self.spec.num_heads, call.query.shape[1], call.key.shape[1]))
        return lambda rows: stream.keep(heads, queries[rows])

    def _scores(self, call: Call, query: Tensor, key: Tensor, rows: slice) -> Tensor:
        """[batch, heads, rows, keys]: scale, softcap, then everything added, then everything blocked."""
        q, k = (x.to(self.accumulate).flatten(0, 1) for x in (query, key))
        scores = torch.baddbmm(self._nothing, q, k.transpose(1, 2), beta=0, alpha=call.scale).view(*query.shape[:3], key.shape[2])
        if call.softcap:
            scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
        if (bias := call.masks.added(rows, slice(0, key.shape[2]))) is not None:
            scores = scores.add_(bias)
        if (visible := call.masks.visible(rows)) is not None:
            scores = scores.masked_fill_(~visible, -torch.inf)
        return scores

    def _weights(self, call: Call, scores: Tensor, rows: slice) -> Tensor:
        """Softmax over keys; a row without keys gets zeros, or 1/k where the caller wants that."""
        weights = torch.softmax(scores, -1)
        if call.masks.blocks and scores.shape[-1]:
            empty = scores.amax(-1, keepdim=True) == -torch.inf
            weights = weights.masked_fill_(empty, 1 / scores.shape[-1] if call.fully_masked == "uniform" else 0)
        return weights

    # The way that does not

    def _fuse(self, call: Call, query: Tensor, key: Tensor, value: Tensor, empty: Tensor | None) -> Tensor | None:
        """[batch, heads, queries, head_dim] without ever holding [q, k]; None where that cannot give exactly what is asked.

        A kernel adds -inf to the scores of blocked keys, and so lets NaN, or a score that overflows, through: seen in the result.
        """
        plain = not (call.softcap or call.dropout or call.reproducible or (empty is not None and call.fully_masked == "uniform"))
        if not plain or 0 in call.query.shape or 0 in call.key.shape:
            return None
        heads = self._fuse_blocks(call, query, key, value, empty)
        return heads if not call.masks.blocks or torch.isfinite(heads).all() else None

    def _fuse_blocks(self, call: Call, query: Tensor, key: Tensor, value: Tensor, empty: Tensor | None) -> Tensor:
        """Masks are made for a block of query rows at a time, and keys that no row of it sees are cut off."""
        masks, (batch, heads, num_queries, _), num_keys = call.masks, query.shape, key.shape[2]
        if masks.plainly_causal or not (masks.blocks or masks.bias is not None):
            return F.scaled_dot_product_attention(query, key, value, is_causal=masks.blocks, scale=call.scale)
        if (keys := masks.same_keys()) is not None:
            return F.scaled_dot_product_attention(query, key[:, :, keys], value[:, :, keys], scale=call.scale)
        made = _Rows(num_queries)
        for rows in _blocks(batch * heads * num_keys, num_queries):
            keys = _reach(masks, rows)
            mask, bias = masks.visible(rows, keys), masks.added(rows, keys)
            if bias is not None:
                mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
            if mask is not None:
                mask = mask.expand(-1, -1, rows.stop - rows.start, keys.stop - keys.start)
            part = F.scaled_dot_product_attention(query[:, :, rows], key[:, :, keys], value[:, :, keys], mask, scale=call.scale)
            made.put("head_outputs", rows, part if empty is None else part.masked_fill(empty[:, :, rows, None], 0))
        return made.tensors["head_outputs"]


def _blocks(per_row: int, rows: int) -> Iterator[slice]:
    """Blocks of query rows, each with at most BLOCK scores; one empty block where there are no rows."""
    step = max(1, BLOCK // max(1, per_row))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


def _weighted(weights: Tensor, value: Tensor, masks: Masks) -> Tensor:
    """Weights times values, where a weight of 0 means no contribution even from a value of NaN or infinity."""
    if masks.blocks and not torch.isfinite(value).all():
        finite = torch.isfinite(value)
        spoilt = (weights != 0).to(value.dtype) @ (~finite).to(value.dtype) > 0
        return (weights @ value.masked_fill(~finite, 0)).masked_fill(spoilt, torch.nan)
    return torch.matmul(weights, value)


def _selection(weights: Tensor, call: Call) -> dict[str, Tensor]:
    """The weights as asked for: averaged over heads, or the largest of each row with their keys."""
    if call.average:
        weights = weights.mean(1)
    if call.top_k is None:
        return {"attention_weights": weights}
    values, keys = torch.sort(weights, dim=-1, descending=True, stable=True)  # stable: ties go to the lower key
    n = min(call.top_k, weights.shape[-1])
    return {"values": values[..., :n], "keys": keys[..., :n]}


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
