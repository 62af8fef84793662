"""Computes head outputs with torch's scaled_dot_product_attention, for calls that request neither weights nor scores.

It does not store [queries, keys]. Masks are made for one block of query rows at a time, so memory is linear in the length.
"""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from attend.attention.call import Call
from attend.attention.kernels.choose import Heads
from attend.attention.kernels.declaration import BIAS_FIELDS, OUTER_FIELDS, Declaration
from attend.attention.kernels.eager import Assembly, Eager, all_finite
from attend.attention.masks import Masks
from attend.attention.numerics import at_least_float32
from attend.attention.rows import row_slices


class SdpaKernel:
    """torch's fused kernels for one layer. Immutable.

    They mask by adding -inf to scores, and multiply weights of 0, so a NaN or overflow of a key without influence reaches the outputs;
    outputs that are not finite are therefore rejected. They return zeros for a row whose scores all overflow to -inf, as for a fully masked
    one; outputs with zeros are rejected if scores may have overflowed. They add biases in the dtype of the query, so with biases of the
    layer's own they get float32 or better.
    """

    declaration = Declaration(
        fields=OUTER_FIELDS | BIAS_FIELDS,
        options=frozenset({"head_scale", "head_outputs", "bias", "intervals", "sets", "uniform_rows"}),
        outputs=frozenset({"head_outputs"}),
        dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}),
    )

    def __init__(self, eager: Eager) -> None:
        """`eager` has the layer's biases."""
        self._eager = eager

    @classmethod
    def make(cls, eager: Eager, device: torch.device) -> "SdpaKernel | None":
        """The kernel of a layer; None if it does not compute such layers."""
        return cls(eager) if cls.declaration.has_layer(eager.spec, device) else None

    def suits(self, call: Call) -> bool:
        """Whether there are numbers to compute."""
        options = call.options
        return 0 not in (options.items, options.num_queries, options.num_keys)

    def compute(self, call: Call, inputs: Heads, outputs: frozenset[str]) -> dict[str, Tensor] | None:
        """Head outputs [b, h, q, value_head_dim]; None if torch's kernels cannot compute the call exactly."""
        if inputs.fully_masked is not None and call.options.fully_masked == "uniform":
            return None
        head_outputs = _in_blocks(self._eager, call, *inputs)
        if not head_outputs[..., 0].all() and _may_overflow(call.options.scale, inputs.query, inputs.key):
            return None
        return {"head_outputs": head_outputs.to(self._eager.layer_dtype)} if all_finite(head_outputs) else None


def _may_overflow(scale: float, query: Tensor, key: Tensor) -> bool:
    """Whether |scale · query · key| may exceed the largest number of the scores, which are float32 for narrower inputs."""
    largest = torch.finfo(at_least_float32(query.dtype)).max
    bound = abs(scale) * query.shape[-1]
    for rows in (query, key):
        bound *= float(rows.abs().amax())
    return not bound < largest


def _in_blocks(eager: Eager, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None) -> Tensor:
    """Compute one block of query rows at a time, only with the range of keys that its rows may attend to."""
    spec, masks, (batch, heads, num_queries, _), num_keys = eager.spec, call.masks, query.shape, key.shape[2]
    attend = partial(F.scaled_dot_product_attention, scale=call.options.scale, enable_gqa=spec.num_heads > spec.num_kv_heads)
    if not eager.has_bias:  # the layer adds no bias, so torch may need no mask tensor
        if masks.only_causal:
            return attend(query, key, value, is_causal=True)
        if not masks.has_any and masks.bias is None:
            return attend(query, key, value)
        if (keys := masks.shared_keys()) is not None:
            return attend(query, key[:, :, keys], value[:, :, keys])
    else:
        query, key, value = (x.to(eager.dtype) for x in (query, key, value))
    assembly = Assembly(num_queries)
    for rows in row_slices(batch * heads * num_keys, num_queries):
        keys = _visible_keys(masks, rows)
        mask, bias = masks.visible(rows, keys), eager.bias(query[:, :, rows], call, rows, keys)
        if bias is not None:
            mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).to(query.dtype)
        if mask is not None:
            mask = mask.expand(-1, -1, rows.stop - rows.start, keys.stop - keys.start)
        part = attend(query[:, :, rows], key[:, :, keys], value[:, :, keys], mask)
        assembly.put("head_outputs", rows, part if fully_masked is None else part.masked_fill(fully_masked[:, :, rows, None], 0))
    return assembly.tensors["head_outputs"]


def _visible_keys(masks: Masks, rows: slice) -> slice:
    """The shortest range with all keys that lengths, causality, windows and chunks leave to these rows; at least one key."""
    if not masks.has_intervals:
        return slice(0, masks.num_keys)
    first, last = masks.interval(rows)
    start = min(max(int(first.min()), 0), masks.num_keys - 1)
    return slice(start, max(int(last.max()) + 1, start + 1))
