"""Multi-head attention, batch first: project, attend, project back.

    Attention(Q, K, V) = softmax(mask(cap(scale · Q Kᵀ) + bias)) V        (Vaswani et al. 2017, equation 1; masks and cap as in ONNX)
    Y = Attention(Q, K, V) ∘ gate(X)                                      (layers with an output gate; Qiu et al. 2025, equation 5)

`forward` chooses the implementation: `short`, in C, for few rows without masks; `sdpa`, torch's fused kernels, if neither weights nor
scores are requested; `eager` for everything else.
`nn.MultiheadAttention` is not used: some of its code paths ignore masks, and its results for fully masked rows depend on flags.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from service.attention.call import Call, Result, WeightBlock
from service.attention.eager import PER_HEAD, row_blocks
from service.attention.indexer import KeyIndexer
from service.attention.linear import set_precision
from service.attention.projections import Projected, Projections
from service.attention.sdpa import sdpa
from service.attention.selection import select_heads_and_queries
from service.attention.short import Short
from service.attention.weightings import eager_for
from service.attention.weights import torch_dtype
from service.spec import LayerSpec
from service.tensors import Array

PROJECTED = frozenset({"query_projection", "key_projection", "value_projection", "latent", "rope_key"})
GRADIENTS = ("query_gradient", "key_gradient", "value_gradient")
SCORED = frozenset({"scores", "log_sum_exp", "attention_weights"})
SELECTED = frozenset({"keys", "values"})  # the tensors of attention weights under `top_k`


class MultiHeadAttention:
    """One layer on one device. Immutable; calls may run in any thread, but only one at a time."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.spec, self.device, self.dtype = spec, device, torch_dtype(spec.dtype)
        self.projections = Projections(spec, weights)
        self.eager = eager_for(spec)(spec, self.projections.weights, device)
        self.indexer = None if spec.indexer is None else KeyIndexer(spec, self.projections.weights)
        self.short = Short(spec, self.projections.weights) if Short.suits_layer(spec, device) else None

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights by canonical name."""
        return self.projections.weights

    def forward(self, call: Call) -> Result:
        """Compute the outputs named in `call.outputs`, in the layer's dtype; scores and weights of half-precision layers are float32."""
        if self.short is not None and self.short.suits(call) and (result := self.short(call)) is not None:
            return result
        with torch.inference_mode():
            result = self._forward(call)
            return result if call.output_gradient is None else replace(result, tensors=result.tensors | self._gradients(call))

    def _forward(self, call: Call) -> Result:
        set_precision(self.spec.matmul_precision)
        call = self.select_keys(call)
        tensors, fully_masked = self.attend(call, *self.projections.project(call))
        if "output" in call.outputs:
            tensors["output"] = self.projections.project_back(tensors["concatenated"])
        return result_of(call, tensors, fully_masked)

    def attend(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Compute all outputs but `output`, and the fully masked rows, from query [b, h, q, d], key and value [b, kv heads, k, …].

        Uses `sdpa` if it can compute the requested outputs, else `eager`.
        """
        fully_masked = self.fully_masked(call)
        wanted = call.outputs & SCORED | ({"head_outputs"} if PER_HEAD & call.outputs else set())
        tensors: dict[str, Tensor] = {}
        if "attention_weights" in wanted and call.selects:
            selected, some_queries, some_keys, some_rows = select_heads_and_queries(call, query, key, fully_masked)
            tensors |= self.eager(selected, some_queries, some_keys, value, some_rows, {"attention_weights"})
            wanted -= {"attention_weights"}
        outputs = sdpa(self.eager, call, query, key, value, fully_masked) if wanted == {"head_outputs"} else None
        if outputs is not None:
            tensors["head_outputs"] = outputs
        elif wanted:
            everything = replace(call, heads=None, queries=None) if call.selects else call
            tensors |= self.eager(everything, query, key, value, fully_masked, wanted)
        if "indexer_mask" in call.outputs and call.masks.attend_mask is not None:
            tensors["indexer_mask"] = call.masks.attend_mask[:, 0]
        if PROJECTED & call.outputs:
            tensors |= self.projections.outputs(call, (query, key, value))
        return self.merge_heads(call, tensors), fully_masked

    def merge_heads(self, call: Call, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Multiply `head_outputs` by `head_scale` and the gate, and add `concatenated` [b, q, h * d]. Without head outputs, no change.

        The gate depends on the query alone, so it is left out of parts of a call and applied once, where they are merged.
        """
        if (head_outputs := tensors.get("head_outputs")) is not None:
            if call.head_scale is not None:
                tensors["head_outputs"] = head_outputs = head_outputs * call.head_scale
            if self.spec.output_gate is not None and not call.part:
                tensors["head_outputs"] = head_outputs = head_outputs * self.projections.gate(call.query)
            tensors["concatenated"] = head_outputs.transpose(1, 2).flatten(2)
        return tensors

    def _gradients(self, call: Call) -> dict[str, Tensor]:
        """The requested gradients of <output_gradient, output> by query, key and value as three separate inputs, with torch's autograd."""
        assert call.output_gradient is not None
        with torch.inference_mode(False), torch.enable_grad():
            inputs = [x.clone().requires_grad_() for x in (call.query, call.key, call.value)]
            query, key, value = inputs
            eager = replace(call, query=query, key=key, value=value, outputs=frozenset({"output"}), reproducible=True)
            output = self._forward(eager).tensors["output"]
            gradients = torch.autograd.grad(output, inputs, call.output_gradient.to(output.dtype))
        return {name: x for name, x in zip(GRADIENTS, gradients, strict=True) if name in call.outputs}

    def select_keys(self, call: Call) -> Call:
        """The call with a mask of the keys that the layer's indexer selects; the same call if it has none."""
        return call if self.indexer is None else self.indexer.select_keys(call)

    def fully_masked(self, call: Call) -> Tensor | None:
        """bool [b, h, q]: the rows without a key to attend to; None if there are none."""
        (batch, num_queries), num_keys, heads = call.query.shape[:2], call.key.shape[1], self.spec.num_heads
        rows = call.masks.fully_masked(row_blocks(batch * heads * num_keys, num_queries))
        return None if rows is None or not rows.any() else rows.expand(batch, heads, num_queries)

    def project(self, call: Call) -> Projected:
        """Project, norm and rotate: query [b, h, q, head_dim], key and value [b, kv heads, k, …]."""
        set_precision(self.spec.matmul_precision)
        return self.projections.project(call)

    def project_back(self, concatenated: Tensor) -> Tensor:
        """The output projection: [b, q, h * value_head_dim] -> [b, q, output_dim]."""
        return self.projections.project_back(concatenated)

    def merge(self, head_outputs: Tensor, call: Call) -> dict[str, Tensor]:
        """`head_outputs`, `concatenated` and, if requested, `output`, from head outputs [b, h, q, d]."""
        tensors = self.merge_heads(call, {"head_outputs": head_outputs})
        return tensors | {"output": self.project_back(tensors["concatenated"])} if "output" in call.outputs else tensors

    def attention_weights(
        self, call: Call, query: Tensor, key: Tensor, fully_masked: Tensor | None, blocks: Iterable[slice] | None = None
    ) -> Iterator[WeightBlock]:
        """Yield the weights of the selected heads and queries after dropout, block by block, and the keys that each row may attend to.

        The call is from `select_keys`, `query` and `key` are from `project`, `fully_masked` from the method of that name, all for the same
        heads. `blocks` are the rows of each block. A caller that drops each block before the next needs memory for one block only.
        """
        for block in self.eager.row_blocks(*select_heads_and_queries(call, query, key, fully_masked), blocks):
            yield block.rows, block.attention_weights(), block.visible


def result_of(call: Call, tensors: Mapping[str, Tensor], fully_masked: Tensor | None) -> Result:
    """The result with the requested ones of these tensors."""
    wanted = call.outputs | SELECTED
    return Result({name: tensor for name, tensor in tensors.items() if name in wanted}, fully_masked)


class Operation(Protocol):
    """A computation on a layer and a call that replaces the layer's forward pass, such as metrics or the data of a figure."""

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        """Compute the operation's tensors; each is [b, …] unless the operation says otherwise."""
        ...

    def to(self, device: torch.device) -> Self:
        """The operation with its tensors on `device`."""
        ...


@dataclass(frozen=True, slots=True)
class ShortCall:
    """The numbers of a call that `Short` suits, float32 [b, n, width], as an operation: making tensors of them takes as long as computing.

    The tensors of its call have the right shapes, and no numbers.
    """

    query: Array
    key: Array
    value: Array

    def __call__(self, layer: MultiHeadAttention, call: Call) -> Result:
        result = None if layer.short is None else layer.short.compute(call, self.query, self.key, self.value)
        return layer.forward(self.with_numbers(call)) if result is None else result

    def with_numbers(self, call: Call) -> Call:
        """The call with these numbers."""
        query = torch.from_numpy(self.query)
        key = query if self.key is self.query else torch.from_numpy(self.key)
        return replace(call, query=query, key=key, value=key if self.value is self.key else torch.from_numpy(self.value))

    def to(self, device: torch.device) -> Self:
        """Itself: only layers on a CPU have short calls."""
        return self
