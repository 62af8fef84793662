"""Multi-head attention, batch first: project, attend, project back.

    Attention(Q, K, V) = softmax(mask(cap(scale · Q Kᵀ) + bias)) V        (Vaswani et al. 2017, equation 1; masks and cap as in ONNX)
    Y = Attention(Q, K, V) ∘ gate(X)                                      (layers with an output gate; Qiu et al. 2025, equation 5)

Three implementations compute it. `forward` gives calls of few rows without masks to `short`, in C, which projects too. For all others,
`_run_kernels` chooses `sdpa`, torch's fused kernels, or `eager`, which computes weights and scores.
`nn.MultiheadAttention` is not used: some of its code paths ignore masks, and its results for fully masked rows depend on flags.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from service.attention.call import FROM_HEADS, GRADIENTS, PROJECTED, SCORED, TOP_K, Call, Result, WeightBlock, select_heads_and_queries
from service.attention.eager import make_eager, row_slices
from service.attention.indexer import KeyIndexer
from service.attention.numerics import set_precision, torch_dtype
from service.attention.projections import Projected, Projections
from service.attention.sdpa import sdpa
from service.attention.short import ShortKernel
from service.spec import LayerSpec


class MultiHeadAttention:
    """One layer on one device. Immutable; calls may run in any thread, but only one at a time."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.spec, self.device, self.dtype = spec, device, torch_dtype(spec.dtype)
        self.weights = dict(weights)  # by canonical name
        self.projections = Projections(spec, self.weights)
        self.eager = make_eager(spec, self.weights, device)
        self.indexer = None if spec.indexer is None else KeyIndexer(spec, self.weights)
        self.short = ShortKernel(spec, self.weights) if ShortKernel.suits_layer(spec, device) else None

    def forward(self, call: Call) -> Result:
        """Compute the outputs named in `call.outputs`, in the layer's dtype; scores and weights of half-precision layers are float32."""
        if self.short is not None and self.short.suits(call) and (result := self.short.forward(call)) is not None:
            return result
        with torch.inference_mode():
            result = self._forward(call)
            return result if call.output_gradient is None else replace(result, tensors=result.tensors | self._gradients(call))

    def _forward(self, call: Call) -> Result:
        call = self.select_keys(call)
        tensors, fully_masked = self.attend(call, *self.project(call))
        if "output" in call.outputs:
            tensors["output"] = self.project_back(tensors["concatenated"])
        return result_of(call, tensors, fully_masked)

    def attend(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Compute all outputs but `output`, and the fully masked rows, from query [b, h, q, d], key and value [b, kv heads, k, …]."""
        fully_masked = self.fully_masked(call)
        tensors = self._run_kernels(call, query, key, value, fully_masked)
        if "head_outputs" in tensors:
            tensors |= self.merge_heads(call, tensors["head_outputs"])
        if "indexer_mask" in call.outputs and call.masks.attend_mask is not None:
            tensors["indexer_mask"] = call.masks.attend_mask[:, 0]
        if PROJECTED & call.outputs:
            tensors |= self.projections.outputs(call, (query, key, value))
        return tensors, fully_masked

    def _run_kernels(self, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None) -> dict[str, Tensor]:
        """Compute those of `head_outputs`, `scores`, `log_sum_exp` and `attention_weights` that the call's outputs need.

        `sdpa` computes head outputs, if they alone are needed and it can compute them exactly; `eager` computes everything else.
        """
        needed = call.outputs & SCORED | ({"head_outputs"} if FROM_HEADS & call.outputs else set())
        tensors: dict[str, Tensor] = {}
        if call.selects:  # weights of these heads and queries alone, everything else of all
            if "attention_weights" in needed:
                selected, some_queries, some_keys, some_rows = select_heads_and_queries(call, query, key, fully_masked)
                tensors = self.eager.compute(selected, some_queries, some_keys, value, some_rows, {"attention_weights"})
                needed -= {"attention_weights"}
            call = replace(call, heads=None, queries=None)
        if needed == {"head_outputs"} and (outputs := sdpa(self.eager, call, query, key, value, fully_masked)) is not None:
            tensors["head_outputs"] = outputs
        elif needed:
            tensors |= self.eager.compute(call, query, key, value, fully_masked, needed)
        return tensors

    def merge_heads(self, call: Call, head_outputs: Tensor) -> dict[str, Tensor]:
        """`head_outputs` [b, h, q, d] times `head_scale` and the gate, and `concatenated` [b, q, h * d].

        The gate depends on the query alone, so it is left out of parts of a call and applied once, where they are merged.
        """
        if call.head_scale is not None:
            head_outputs = head_outputs * call.head_scale
        if self.spec.output_gate is not None and not call.is_part:
            head_outputs = head_outputs * self.projections.gate(call.query)
        return {"head_outputs": head_outputs, "concatenated": head_outputs.transpose(1, 2).flatten(2)}

    def _gradients(self, call: Call) -> dict[str, Tensor]:
        """The requested gradients of <output_gradient, output> by query, key and value as three separate inputs, with torch's autograd."""
        assert call.output_gradient is not None
        with torch.inference_mode(False), torch.enable_grad():
            inputs = [x.clone().requires_grad_() for x in (call.query, call.key, call.value)]
            query, key, value = inputs
            eager_call = replace(call, query=query, key=key, value=value, outputs=frozenset({"output"}), reproducible=True)
            output = self._forward(eager_call).tensors["output"]
            gradients = torch.autograd.grad(output, inputs, call.output_gradient.to(output.dtype))
        return {name: x for name, x in zip(GRADIENTS, gradients, strict=True) if name in call.outputs}

    def select_keys(self, call: Call) -> Call:
        """The call with a mask of the keys that the layer's indexer selects; the same call if it has none."""
        return call if self.indexer is None else self.indexer.select_keys(call)

    def fully_masked(self, call: Call) -> Tensor | None:
        """bool [b, h, q]: the rows without a key to attend to; None if there are none."""
        (batch, num_queries), num_keys, heads = call.query.shape[:2], call.key.shape[1], self.spec.num_heads
        rows = call.masks.fully_masked(row_slices(batch * heads * num_keys, num_queries))
        return None if rows is None or not rows.any() else rows.expand(batch, heads, num_queries)

    def project(self, call: Call) -> Projected:
        """Project, norm and rotate: query [b, h, q, head_dim], key and value [b, kv heads, k, …]."""
        set_precision(self.spec.matmul_precision)
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
        call, query, key, fully_masked = select_heads_and_queries(call, query, key, fully_masked)
        for block in self.eager.row_blocks(call, query, key, fully_masked, blocks):
            yield WeightBlock(block.rows, self.eager.attention_weights(call, block), block.visible)


def result_of(call: Call, tensors: Mapping[str, Tensor], fully_masked: Tensor | None) -> Result:
    """The result with the requested ones of these tensors."""
    wanted = call.outputs | TOP_K
    return Result({name: tensor for name, tensor in tensors.items() if name in wanted}, fully_masked)
