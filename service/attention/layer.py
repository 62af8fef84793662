"""Multi-head attention, batch first, read from top to bottom: project, split, attend, merge, project back.

    Attention(Q, K, V) = softmax(mask(cap(scale · Q Kᵀ) + bias)) V        (Vaswani et al. 2017, equation 1; masks and cap as in ONNX)

There are two ways, and a short cut. `_form` makes the weights, block of query rows by block, of `scores` and `softmax`, and is the only
one that knows dropout, caps and log-sum-exp. `fused` hands the rows to torch's fused attention, which never makes them, and is taken when
nobody asked. Both leave a blocked key exactly no influence. Short calls without masks are one operation of torch's, in `whole`, or a few
of NumPy's, in `single`. Several calls share their projections' products, and attend each by itself.
`nn.MultiheadAttention` is not used: it ignores masks silently where it is fast, and what it does with fully masked rows depends on flags.
It serves as an oracle in the tests.

Knows no request: a `Call` is taken at its word.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Protocol, Self

import torch
from torch import Tensor

from service.attention.blocks import Assembly, row_blocks, rows_at_once
from service.attention.call import Call, Result, Rows
from service.attention.dropout import DropoutStream
from service.attention.linear import set_precision
from service.attention.projections import Projections
from service.attention.scores import Scores
from service.attention.sdpa import fused
from service.attention.selection import narrowed, selection
from service.attention.softmax import apply_weights, log_sum_exp, softmax
from service.attention.weights import torch_dtype
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
        self.whole = as_whole(self.projections, self.device, self._attend)

    @torch.inference_mode()
    def __call__(self, call: Call) -> Result:
        """What `call.outputs` asks for. Tensors come in the layer's dtype, scores and weights of half layers in float32."""
        set_precision(self.spec.matmul_precision)
        if self.whole is not None and self.whole.takes(call):
            return self.whole(call)
        result = self._attend(call)
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

    @torch.inference_mode()
    def together(self, calls: Sequence[Call]) -> list[Result]:
        """What each call gives by itself, the rows of many in one product at each projection. Everything else may differ between them:
        lengths, masks, what they ask for.

        They are such as `Projections.project` takes together, and want no gradients.
        """
        set_precision(self.spec.matmul_precision)
        if (whole := self.whole) is None:
            return self._attend_together(calls)
        taken = [whole.takes(call) for call in calls]
        plain, others = list(compress(calls, taken)), [call for call, takes in zip(calls, taken, strict=True) if not takes]
        short, long = iter(whole.together(plain) if plain else ()), iter(self._attend_together(others) if others else ())
        return [next(short if takes else long) for takes in taken]

    def _attend(self, call: Call) -> Result:
        return self._attend_together([call])[0]

    def _attend_together(self, calls: Sequence[Call]) -> list[Result]:
        projected = self.projections.project(calls)
        return self._project_back(calls, [self._inside(call, *parts) for call, parts in zip(calls, projected, strict=True)])

    def _project_back(self, calls: Sequence[Call], inside: Sequence[Result]) -> list[Result]:
        """What the calls want of all that was made inside, and their outputs."""
        merged = [made.tensors["concatenated"] for call, made in zip(calls, inside, strict=True) if "output" in call.outputs]
        outputs = iter(self.projections.project_back(merged, calls[0].reproducible) if merged else ())
        results = []
        for call, made in zip(calls, inside, strict=True):
            tensors = made.tensors | {"output": next(outputs)} if "output" in call.outputs else made.tensors
            wanted = call.outputs | {"keys", "values"} if call.top_k else call.outputs
            results.append(Result({name: tensor for name, tensor in tensors.items() if name in wanted}, made.empty))
        return results

    def _inside(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> Result:
        """Everything between the projections: what is wanted and what outputs are made of."""
        empty = self.empty_rows(call)
        made: dict[str, Tensor] = {}
        if PROJECTED & call.outputs:
            made |= {f"{name}_projection": t for name, t in zip(PROJECTIONS, (query, key, value), strict=False)}
        selected = "attention_weights" in call.outputs and call.selects
        formed = call.outputs - {"attention_weights"} if selected else call.outputs
        heads = None if FORMS & formed or not PER_HEAD & formed else fused(self.spec, self.scores, call, query, key, value, empty)
        if heads is not None:
            made["head_outputs"] = heads
        elif (FORMS | PER_HEAD) & formed:
            made |= self._form(call, query, key, value, empty, formed)
        if selected:
            made |= self._select(call, query, key, empty)
        if PER_HEAD & call.outputs:
            made |= _merged(made["head_outputs"], call)
        return Result(made, empty)

    def merge(self, head_outputs: Tensor, call: Call) -> dict[str, Tensor]:
        """[batch, heads, queries, head_dim] -> the heads side by side, and through the output projection."""
        made = _merged(head_outputs, call)
        return made | {"output": self.project_back(made["concatenated"], call)} if "output" in call.outputs else made

    def empty_rows(self, call: Call) -> Tensor | None:
        """bool [batch, heads, queries], None where no row lacks a key."""
        (batch, num_queries), k, heads = call.query.shape[:2], call.key.shape[1], self.spec.num_heads
        empty = call.masks.empty_rows(rows_at_once(batch * heads * k))
        return None if empty is None or not empty.any() else empty.expand(batch, heads, num_queries)

    def project(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Query [batch, heads, q, head_dim], key and value [batch, kv heads, k, …], as attention takes them."""
        set_precision(self.spec.matmul_precision)
        return self.projections.project([call])[0]

    def project_back(self, concatenated: Tensor, call: Call) -> Tensor:
        """[batch, queries, heads * value_head_dim] -> [batch, queries, output_dim]."""
        return self.projections.project_back([concatenated], call.reproducible)[0]

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
            shift = self.scores.alibi_shift(call.masks, rows, call.heads)
            yield rows, self._dropped(call, softmax(call, scores, sinks, _of(empty, rows), shift), kept, rows), visible

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
            shift = self.scores.alibi_shift(call.masks, rows)
            if "scores" in wanted:
                made.put("scores", rows, scores if shift is None else (scores + shift[..., None]).to(scores.dtype))
            if "log_sum_exp" in wanted:
                made.put("log_sum_exp", rows, log_sum_exp(scores, sinks, shift).to(torch.float64 if call.part else scores.dtype))
            if not (PER_HEAD | {"attention_weights"}) & wanted:
                continue
            weights = self._dropped(call, softmax(call, scores, sinks, _of(empty, rows), shift), kept, rows)
            if PER_HEAD & wanted:
                outputs = apply_weights(weights, value, call.masks)
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


class Operation(Protocol):
    """A computation on a layer and a call that runs in place of the layer's own forward pass, such as metrics or the data of a figure."""

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        """The operation's tensors by name, each [batch, …] unless the operation says otherwise."""
        ...

    def to(self, device: torch.device) -> Self:
        """The operation with its own tensors on `device`."""
        ...


def _merged(head_outputs: Tensor, call: Call) -> dict[str, Tensor]:
    """[batch, heads, queries, head_dim], weighed as the caller wants, and side by side, [batch, queries, heads * head_dim]."""
    if call.head_scale is not None:
        head_outputs = head_outputs * call.head_scale
    return {"head_outputs": head_outputs, "concatenated": head_outputs.transpose(1, 2).flatten(2)}


def _of(empty: Tensor | None, rows: slice) -> Tensor | None:
    """Which of these rows have no key; None where none of all is without."""
    return None if empty is None else empty[:, :, rows]
