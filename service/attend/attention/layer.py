"""Multi-head attention, batch first: project, attend, project back.

    Attention(Q, K, V) = softmax(mask(cap(scale · Q Kᵀ) + bias)) V        (Vaswani et al. 2017, equation 1; masks and cap as in ONNX)
    Y = Attention(Q, K, V) ∘ gate(X)                                      (layers with an output gate; Qiu et al. 2025, equation 5)

Kernels compute it, each of which declares what it can (`kernels/`): short calls in C, projections included; torch's fused kernels; steps of
a cache in C (`pages`); and `eager`, which computes everything else.
`nn.MultiheadAttention` is not used: some of its code paths ignore masks, and its results for fully masked rows depend on flags.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attend.attention.cache import KeyValueCache
from attend.attention.call import FROM_HEADS, SCORED, TOP_K, Call, Result, WeightBlock, replaced, select_heads_and_queries
from attend.attention.kernels.choose import Heads, Kernel, compute
from attend.attention.kernels.eager import Eager
from attend.attention.kernels.pages import PagesKernel
from attend.attention.kernels.sdpa import SdpaKernel
from attend.attention.kernels.short import ShortKernel
from attend.attention.numerics import torch_dtype
from attend.attention.operators.stages import Projected, methods_of
from attend.attention.projections import Projections, make_operators
from attend.attention.rows import row_slices
from attend.spec import LayerSpec


class MultiHeadAttention:
    """One layer on one device. Immutable; calls may run in any thread, but only one at a time."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.spec, self.device, self.dtype = spec, device, torch_dtype(spec.dtype)
        self.weights = dict(weights)  # by canonical name
        self.operators = make_operators(spec, self.weights, device)
        self.projections = Projections(spec, self.weights, self.operators)
        self.eager = Eager(spec, self.operators, device)
        self._selects, self._gates = methods_of(self.operators, "select"), methods_of(self.operators, "gate")
        short, sdpa = ShortKernel.make(spec, self.weights, device), SdpaKernel.make(self.eager, device)
        pages = PagesKernel.make(self.eager, device)
        self.call_kernels: tuple[Kernel[None], ...] = (short,) if short else ()  # of whole calls, projections included
        self.kernels: tuple[Kernel[Heads], ...] = (sdpa, self.eager) if sdpa else (self.eager,)
        self.cache_kernels: tuple[Kernel[tuple[Tensor, KeyValueCache]], ...] = (pages,) if pages else ()

    def forward(self, call: Call) -> Result:
        """Compute the call's outputs, in the layer's dtype; scores and weights of half-precision layers are float32."""
        if (tensors := compute(self.call_kernels, call, None, call.options.outputs)) is not None:
            return Result(tensors)
        with torch.inference_mode():
            if call.output_gradient is None:
                return self._forward(call)
            result = self._forward(replace(call, output_gradient=None))
            return replace(result, tensors=result.tensors | self._gradients(call))

    def _forward(self, call: Call) -> Result:
        call = self.select_keys(call)
        tensors, fully_masked = self.attend(call, *self.project(call))
        if "output" in call.options.outputs:
            tensors["output"] = self.project_back(tensors["concatenated"])
        return result_of(call, tensors, fully_masked)

    def attend(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Compute all outputs but `output`, and the fully masked rows, from query [b, h, q, d], key and value [b, kv heads, k, …]."""
        fully_masked = self.fully_masked(call)
        tensors = self._run_kernels(call, Heads(query, key, value, fully_masked))
        if "head_outputs" in tensors:
            tensors |= self.merge_heads(call, tensors["head_outputs"])
        return tensors | self.projections.outputs(call, (query, key, value)), fully_masked

    def _run_kernels(self, call: Call, heads: Heads) -> dict[str, Tensor]:
        """Compute those of `head_outputs`, `scores`, `log_sum_exp` and `attention_weights` that the call's outputs need."""
        outputs = call.options.outputs
        needed: frozenset[str] = outputs & SCORED | ({"head_outputs"} if FROM_HEADS & outputs else set())
        tensors: dict[str, Tensor] = {}
        if call.options.selects:  # weights of these heads and queries alone, everything else of all
            if "attention_weights" in needed:
                query, key, value, fully_masked = heads
                selected, query, key, fully_masked = select_heads_and_queries(call, query, key, fully_masked, self.eager.mixes_heads)
                tensors = self._computed(selected, Heads(query, key, value, fully_masked), frozenset({"attention_weights"}))
                needed -= {"attention_weights"}
            call = call.with_options(heads=None, queries=None)
        return tensors | self._computed(call, heads, needed) if needed else tensors

    def _computed(self, call: Call, heads: Heads, outputs: frozenset[str]) -> dict[str, Tensor]:
        """These outputs, from the first kernel that computes them; the last one, `eager`, computes all."""
        tensors = compute(self.kernels, call, heads, outputs)
        assert tensors is not None
        return tensors

    def merge_heads(self, call: Call, head_outputs: Tensor) -> dict[str, Tensor]:
        """`head_outputs` [b, h, q, d] times `head_scale` and the gate, or those of the call, and `concatenated` [b, q, h * d].

        The gate depends on the query alone, so it is left out of parts of a call and applied once, where they are merged.
        """
        if call.head_scale is not None:
            head_outputs = head_outputs * call.head_scale
        for gate in () if call.options.is_part else self._gates:
            head_outputs = head_outputs * gate(call, self.projections.product)
        head_outputs = replaced(head_outputs, call.head_outputs, call.head_output_rows)
        return {"head_outputs": head_outputs, "concatenated": head_outputs.transpose(1, 2).flatten(2)}

    def _gradients(self, call: Call) -> dict[str, Tensor]:
        """The requested gradients of <output_gradient, output> by query, key and value as three separate inputs, with torch's autograd.

        The output does not depend on inputs whose weights or heads' outputs are all replaced; their gradients are zeros.
        """
        assert call.output_gradient is not None
        with torch.inference_mode(False), torch.enable_grad():
            inputs = [x.clone().requires_grad_() for x in (call.query, call.key, call.value)]
            query, key, value = inputs
            separate = replace(call, query=query, key=key, value=value).with_options(
                outputs=frozenset({"output"}), self_attention=False, keys_as_values=False
            )
            output = self._forward(separate).tensors["output"]
            if output.requires_grad:
                gradients = torch.autograd.grad(output, inputs, call.output_gradient.to(output.dtype), materialize_grads=True)
            else:
                gradients = tuple(map(torch.zeros_like, inputs))
        named = zip(("query_gradient", "key_gradient", "value_gradient"), gradients, strict=True)
        return {name: x for name, x in named if name in call.options.outputs}

    def select_keys(self, call: Call) -> Call:
        """The call with a mask of the keys that the layer's operators select; the same call if none does."""
        for select in self._selects:
            with torch.no_grad():
                call = select(call)
        return call

    def fully_masked(self, call: Call) -> Tensor | None:
        """bool [b, h, q]: the rows without a key to attend to; None if there are none."""
        options, heads = call.options, self.spec.num_heads
        rows = call.masks.fully_masked(row_slices(options.items * heads * options.num_keys, options.num_queries))
        return None if rows is None or not rows.any() else rows.expand(options.items, heads, options.num_queries)

    def project(self, call: Call) -> Projected:
        """Project, norm and rotate: query [b, h, q, head_dim], key and value [b, kv heads, k, …]."""
        return self.projections.project(call)

    def project_back(self, concatenated: Tensor) -> Tensor:
        """The output projection: [b, q, h * value_head_dim] -> [b, q, output_dim]."""
        return self.projections.project_back(concatenated)

    def attention_weights(
        self, call: Call, query: Tensor, key: Tensor, fully_masked: Tensor | None, blocks: Iterable[slice] | None = None
    ) -> Iterator[WeightBlock]:
        """Yield the weights of the selected heads and queries after dropout, block by block, and the keys that each row may attend to.

        The call is from `select_keys`, `query` and `key` are from `project`, `fully_masked` from the method of that name, all for the same
        heads. `blocks` are the rows of each block. A caller that drops each block before the next needs memory for one block only.
        """
        mixes_heads = self.eager.mixes_heads
        call, query, key, fully_masked = select_heads_and_queries(call, query, key, fully_masked, mixes_heads)
        for block in self.eager.row_blocks(call, query, key, fully_masked, blocks):
            visible = block.visible
            if mixes_heads and call.options.heads is not None and visible is not None and visible.shape[1] > 1:
                visible = visible[:, list(call.options.heads)]
            yield WeightBlock(block.rows, self.eager.attention_weights(call, block), visible)


def result_of(call: Call, tensors: Mapping[str, Tensor], fully_masked: Tensor | None) -> Result:
    """The result with the requested ones of these tensors."""
    wanted = call.options.outputs | TOP_K
    return Result({name: tensor for name, tensor in tensors.items() if name in wanted}, fully_masked)
