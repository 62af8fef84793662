"""Head outputs by torch's scaled_dot_product_attention, which never holds [queries, keys]: for calls that want neither weights nor scores.

Masks are made for one block of query rows at a time, so that memory stays linear in the length.
"""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from service.attention.call import Call
from service.attention.eager import Assembly, Eager, row_blocks
from service.attention.masks import Masks


def sdpa(eager: Eager, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None) -> Tensor | None:
    """[batch, heads, queries, head_dim]; None where torch's kernels cannot compute exactly what the call wants.

    They have no sinks, no softcap and no seeded dropout. They mask by adding -inf to scores, so a NaN or an overflow under a mask reaches
    the result, where it is found.
    """
    uniform = fully_masked is not None and call.fully_masked == "uniform"
    if eager.spec.sinks or call.softcap or call.dropout or call.reproducible or uniform or 0 in call.query.shape or 0 in call.key.shape:
        return None
    outputs = _in_blocks(eager, call, query, key, value, fully_masked)
    return outputs if not call.masks.blocks or torch.isfinite(outputs).all() else None


def _in_blocks(eager: Eager, call: Call, query: Tensor, key: Tensor, value: Tensor, fully_masked: Tensor | None) -> Tensor:
    """One block of query rows at a time, without the keys that none of its rows may attend to."""
    spec, masks, (batch, heads, num_queries, _), num_keys = eager.spec, call.masks, query.shape, key.shape[2]
    attend = partial(F.scaled_dot_product_attention, scale=call.scale, enable_gqa=spec.num_heads > spec.num_kv_heads)
    if not (spec.alibi or spec.relative_bias):
        if masks.plainly_causal or not (masks.blocks or masks.bias is not None):
            return attend(query, key, value, is_causal=masks.blocks)
        if (keys := masks.same_keys()) is not None:
            return attend(query, key[:, :, keys], value[:, :, keys])
    assembly = Assembly(num_queries)
    for rows in row_blocks(batch * heads * num_keys, num_queries):
        keys = _visible_keys(masks, rows)
        mask, bias = masks.visible(rows, keys), eager.bias(masks, rows, keys)
        if bias is not None:
            mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).to(query.dtype)
        if mask is not None:
            mask = mask.expand(-1, -1, rows.stop - rows.start, keys.stop - keys.start)
        part = attend(query[:, :, rows], key[:, :, keys], value[:, :, keys], mask)
        assembly.put("head_outputs", rows, part if fully_masked is None else part.masked_fill(fully_masked[:, :, rows, None], 0))
    return assembly.tensors["head_outputs"]


def _visible_keys(masks: Masks, rows: slice) -> slice:
    """The shortest range of keys that holds all those these rows may attend to by lengths, causality and windows; at least one key."""
    if not masks.intervals:
        return slice(0, masks.num_keys)
    first, last = masks.interval(rows)
    start = min(max(int(first.min()), 0), masks.num_keys - 1)
    return slice(start, max(int(last.max()) + 1, start + 1))
