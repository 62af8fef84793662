"""The short cut: short calls that want nothing but the output and the weights, and block nothing.

Two dozen small operations cost a call of a few rows three times its arithmetic. A narrow layer is one operation of torch's, on which
`nn.MultiheadAttention` rests where it is fast; what it gets wrong (masks, above all) cannot happen here, since no such call is taken. It
is an internal operation: a release may lack it, so it is tried against the layer's own way before it is used. One such call by itself is
done in NumPy, in `single`; calls to a wide layer, and calls of several lengths, in `packed`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from service.attention.call import Call, Result
from service.attention.linear import NARROW
from service.attention.masks import Masks
from service.attention.packed import Packed
from service.attention.projections import Projections
from service.attention.selection import chosen, selection
from service.attention.single import Single
from service.spec import LayerSpec

ROWS = 64  # of one item: beyond, arithmetic outweighs the steps around it
WORTH = 1024  # calls times their width: below, one after the other is faster than together
OUTPUTS = frozenset({"output", "attention_weights"})
TRIED = ((2, 5), (1, 17))  # batch and rows of the calls that must agree before it is trusted
TOLERANCE = {"float32": 1e-6, "float64": 1e-14}


class Whole:
    """One layer's weights as the operation takes them. Immutable."""

    def __init__(self, projections: Projections) -> None:
        self.spec, weights = projections.spec, projections.weights
        self._packed = Packed(projections)
        self._inputs = weights["query+key+value.weight"], weights["query+key+value.bias"]
        self._output = weights["output.weight"], weights["output.bias"]
        self._single = Single(self.spec, weights) if self.spec.d_model <= NARROW else None

    def takes(self, call: Call) -> bool:
        """Whether the call asks for no more than this can do. Of any other item in its batch it does not depend."""
        masks, length = call.masks, call.query.shape[1]
        return not (
            length > ROWS
            or length != call.key.shape[1]
            or 0 in call.query.shape
            or call.scale != self.spec.scale
            or not call.outputs <= OUTPUTS
            or call.softcap
            or call.reproducible
            or call.dropout is not None
            or call.head_scale is not None
            or masks.bias is not None
            or masks.blocks
        )

    def __call__(self, call: Call) -> Result:
        """The result of a call that it takes."""
        batch, length, _ = call.query.shape
        if self._single is None:
            return self.together([call])[0]
        return _made(*(self._single(call) if batch == 1 and Single.suits(self.spec, length) else self._together(call)), call)

    def together(self, calls: Sequence[Call]) -> list[Result]:
        """The results of several calls that it takes, and that share their inputs in the same way."""
        if self._single is not None and len(calls) * self.spec.d_model < WORTH:
            return [self(call) for call in calls]
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows shows in the numbers, as torch's would
            return [_made(*made, call) for call, made in zip(calls, self._packed(calls), strict=True)]

    def _together(self, call: Call) -> tuple[Tensor, Tensor]:
        sizes, (packed, biases), (weight, bias) = (self.spec.d_model, self.spec.num_heads), self._inputs, self._output
        output, weights = torch._native_multi_head_attention(
            call.query, call.key, call.value, *sizes, packed, biases, weight, bias, None, True, False, None
        )  # no mask, weights wanted, of each head
        return output, weights


def _made(output: Tensor, weights: Tensor, call: Call) -> Result:
    made = {"output": output} if "output" in call.outputs else {}
    if "attention_weights" in call.outputs:
        made |= selection(chosen(weights, call), call)
    return Result(made)


def as_whole(projections: Projections, device: torch.device, own: Callable[[Call], Result]) -> Whole | None:
    """The short cut of a layer; None where it is not of the kind, or where that does not give what its `own` way gives."""
    spec = projections.spec
    if device.type != "cpu" or spec.dtype not in TOLERANCE or not _is_plain(spec) or "query+key+value.bias" not in projections.weights:
        return None
    whole = Whole(projections)
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
