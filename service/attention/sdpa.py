"""Head outputs by torch's fused attention, which never makes the weights: for calls that want neither them nor what comes before them.

Masks are made for a block of query rows at a time, so that memory stays linear.
"""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from service.attention.blocks import Assembly, reach, row_blocks
from service.attention.call import Call
from service.attention.scores import Scores
from service.spec import LayerSpec


def fused(spec: LayerSpec, scores: Scores, call: Call, query: Tensor, key: Tensor, value: Tensor, empty: Tensor | None) -> Tensor | None:
    """[batch, heads, queries, head_dim] without ever holding [q, k]; None where that cannot give exactly what is asked.

    A kernel adds -inf to the scores of blocked keys, and so lets NaN, or a score that overflows, through: seen in the result.
    """
    plain = not (spec.sinks or call.softcap or call.dropout or call.reproducible or (empty is not None and call.fully_masked == "uniform"))
    if not plain or 0 in call.query.shape or 0 in call.key.shape:
        return None
    heads = _in_blocks(spec, scores, call, query, key, value, empty)
    return heads if not call.masks.blocks or torch.isfinite(heads).all() else None


def _in_blocks(spec: LayerSpec, scores: Scores, call: Call, query: Tensor, key: Tensor, value: Tensor, empty: Tensor | None) -> Tensor:
    """A block of query rows at a time, the keys that no row of it sees cut off."""
    masks, (batch, heads, num_queries, _), num_keys = call.masks, query.shape, key.shape[2]
    attend = partial(F.scaled_dot_product_attention, scale=call.scale, enable_gqa=spec.num_heads > spec.num_kv_heads)
    if not (spec.alibi or spec.relative_bias):
        if masks.plainly_causal or not (masks.blocks or masks.bias is not None):
            return attend(query, key, value, is_causal=masks.blocks)
        if (keys := masks.same_keys()) is not None:
            return attend(query, key[:, :, keys], value[:, :, keys])
    made = Assembly(num_queries)
    for rows in row_blocks(batch * heads * num_keys, num_queries):
        keys = reach(masks, rows)
        mask, bias = masks.visible(rows, keys), scores.added(masks, rows, keys)
        if bias is not None:
            mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).to(query.dtype)
        if mask is not None:
            mask = mask.expand(-1, -1, rows.stop - rows.start, keys.stop - keys.start)
        part = attend(query[:, :, rows], key[:, :, keys], value[:, :, keys], mask)
        made.put("head_outputs", rows, part if empty is None else part.masked_fill(empty[:, :, rows, None], 0))
    return made.tensors["head_outputs"]
