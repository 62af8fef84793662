"""A layer as one operation of torch's, for short calls that want nothing but the output and the weights.

Two dozen small operations cost a call of a few rows three times its arithmetic; this one, on which `nn.MultiheadAttention` rests where
it is fast, does the same steps in the same order. What it gets wrong (masks, above all) cannot happen here, since no such call is taken.
It is an internal operation: a release may lack it, so it is tried against the layer's own way before it is used.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from service.attention.call import Call, Result
from service.attention.masks import Masks
from service.attention.products import rows_for_onednn
from service.attention.selection import chosen, selection
from service.attention.single import Single
from service.spec import LayerSpec

ROWS = 64  # of one item: beyond, arithmetic outweighs the steps around it
OUTPUTS = frozenset({"output", "attention_weights"})
TRIED = ((2, 5), (1, 17))  # batch and rows of the calls that must agree before it is trusted
TOLERANCE = {"float32": 1e-6, "float64": 1e-14}


class Whole:
    """One layer's weights as the operation takes them. Immutable."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.rows = min(ROWS, rows_for_onednn(weights["query.weight"]) - 1)
        self._packed = weights["query+key+value.weight"], weights["query+key+value.bias"]
        self._output = weights["output.weight"], weights["output.bias"]
        self._single = Single(spec, weights) if Single.suits(spec) else None

    def takes(self, call: Call) -> bool:
        """Whether the call asks for no more than this can do. Of any other item in its batch it does not depend."""
        masks, length = call.masks, call.query.shape[1]
        return not (
            length > self.rows
            or length != call.key.shape[1]
            or 0 in call.query.shape
            or call.scale != self.spec.scale
            or not call.outputs <= OUTPUTS
            or call.softcap
            or call.reproducible
            or call.dropout is not None
            or call.head_scale is not None
            or call.reduction is not None
            or masks.bias is not None
            or masks.blocks
        )

    def __call__(self, call: Call) -> Result:
        """The result of a call that it takes."""
        batch, length, _ = call.query.shape
        single = self._single if batch == 1 and Single.suits(self.spec, length) else None
        output, weights = self._together(call) if single is None else single(call)
        made = {"output": output} if "output" in call.outputs else {}
        if "attention_weights" in call.outputs:
            made |= selection(chosen(weights, call), call)
        return Result(made)

    def _together(self, call: Call) -> tuple[Tensor, Tensor]:
        sizes, (packed, biases), (weight, bias) = (self.spec.d_model, self.spec.num_heads), self._packed, self._output
        output, weights = torch._native_multi_head_attention(
            call.query, call.key, call.value, *sizes, packed, biases, weight, bias, None, True, False, None
        )  # no mask, weights wanted, of each head
        return output, weights


def as_whole(spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device, own: Callable[[Call], Result]) -> Whole | None:
    """The layer as one operation; None where it is not such a layer, or where that does not give what its `own` way gives."""
    if device.type != "cpu" or spec.dtype not in TOLERANCE or not _is_plain(spec) or "query+key+value.bias" not in weights:
        return None
    whole = Whole(spec, weights)
    try:
        agrees = all(_agree(whole(call), own(call), TOLERANCE[spec.dtype]) for call in _trials(spec))
    except (AttributeError, RuntimeError, TypeError):  # not in this release, or not with these arguments
        return None
    return whole if agrees else None


def _is_plain(spec: LayerSpec) -> bool:
    """Whether the layer is that of Vaswani et al. (2017): as many heads everywhere, of the usual width, and nothing else."""
    usual = spec.num_heads * spec.head_dim == spec.d_model and spec.head_dim == spec.value_head_dim and spec.num_kv_heads == spec.num_heads
    widths = {spec.d_model, spec.key_dim, spec.value_dim, spec.output_dim}
    more = spec.alibi or spec.relative_bias or spec.rope or spec.qk_norm or spec.sinks or spec.softcap or spec.window
    scale = abs(spec.scale * spec.head_dim**0.5 - 1) < 1e-15
    return spec.projections and usual and len(widths) == 1 and spec.has_bias("output") and scale and not more


def _trials(spec: LayerSpec) -> list[Call]:
    generator = torch.Generator().manual_seed(0)
    calls = []
    for batch, rows in TRIED:
        query, key, value = torch.randn(3, batch, rows, spec.d_model, generator=generator, dtype=getattr(torch, spec.dtype)).unbind(0)
        calls.append(Call(query, key, value, Masks(torch.arange(rows)[None], rows, aligned=True), spec.scale, OUTPUTS))
    return calls


def _agree(one: Result, other: Result, tolerance: float) -> bool:
    differences = ((one.tensors[name] - other.tensors[name]).abs().max() / other.tensors[name].abs().max() for name in OUTPUTS)
    return all(bool(difference <= tolerance) for difference in differences)
