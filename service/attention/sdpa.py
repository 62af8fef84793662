"""Computes head outputs with torch's scaled_dot_product_attention, for calls that request neither weights nor scores.

It does not store [queries, keys]. Masks are made for one block of query rows at a time, so memory is linear in the length.
"""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from service.attention.call import Call
from service.attention.eager import Assembly, Eager, row_slices
from service.attention.masks import Masks
from service.attention.numerics import at_least_float32


def sdpa(eager: Eager, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None) -> Tensor | None:
    """Head outputs [b, h, q, value_head_dim]; None if torch's kernels cannot compute the call exactly. `eager` has the layer's biases.

    The kernels support softmax alone, without sinks, relative_scores, softcap or seeded dropout. They mask by adding -inf to scores, so a
    NaN or overflow in a masked key reaches the outputs; masked outputs that are not finite are therefore rejected. They return zeros for a
    row whose scores all overflow to -inf, as for a fully masked one; outputs with zeros are rejected if scores may have overflowed.
    """
    has_uniform_rows = fully_masked is not None and call.fully_masked == "uniform"
    is_empty = 0 in call.query.shape or 0 in call.key.shape
    if not eager.is_fusible or call.softcap or call.dropout or call.reproducible or has_uniform_rows or is_empty:
        return None
    outputs = _in_blocks(eager, call, query, key, value, fully_masked)
    if not outputs[..., 0].all() and _may_overflow(call.scale, query, key):
        return None
    return outputs if not call.masks.has_any or torch.isfinite(outputs).all() else None


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
    attend = partial(F.scaled_dot_product_attention, scale=call.scale, enable_gqa=spec.num_heads > spec.num_kv_heads)
    if not eager.has_bias:  # the layer adds no bias, so torch may need no mask tensor
        if masks.only_causal:
            return attend(query, key, value, is_causal=True)
        if not masks.has_any and masks.bias is None:
            return attend(query, key, value)
        if (keys := masks.shared_keys()) is not None:
            return attend(query, key[:, :, keys], value[:, :, keys])
    assembly = Assembly(num_queries)
    for rows in row_slices(batch * heads * num_keys, num_queries):
        keys = _visible_keys(masks, rows)
        mask, bias = masks.visible(rows, keys), eager.bias(query[:, :, rows], masks, rows, keys)
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
