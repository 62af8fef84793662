"""Scores -> weights, and weights -> what they make of values. A blocked key has exactly no influence, and a row without keys is no error.

Pure functions; the sink, where there is one, is a score beside every row that takes its share and has no value. A row's `shift`, float64
[batch|1, heads, rows], is what its scores lack: they stand for scores + shift.
"""

import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.masks import Masks


def softmax(call: Call, scores: Tensor, sinks: Tensor | None, empty: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """[batch, heads, rows, keys], with sinks [heads, 1]; rows without keys, `empty` [batch, heads, rows], get zeros, or 1/k where the
    caller wants that. A row that has keys, but only scores that overflow, is NaN.
    """
    if empty is not None:
        empty = empty[..., None]
        scores = scores.masked_fill(empty, 0)  # -inf throughout has no softmax, nor a derivative
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        sinks = sinks if shift is None else (sinks - shift).to(scores.dtype)
        beside = sinks[..., None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, beside), -1), -1)[..., :-1]
    if empty is not None:
        weights = weights.masked_fill(empty, 1 / max(1, scores.shape[-1]) if call.fully_masked == "uniform" else 0)
    return weights


def apply_weights(weights: Tensor, value: Tensor, masks: Masks) -> Tensor:
    """Weights times values, where a weight of 0 means no contribution even from a value of NaN or infinity."""
    batch, heads, rows, keys = weights.shape
    kv = value.shape[1]
    shared = weights.reshape(batch * kv, heads // kv * rows, keys)  # heads that share values, as more rows
    value = value.flatten(0, 1)
    if masks.blocks and not torch.isfinite(value).all():
        finite = torch.isfinite(value)
        spoilt = (shared != 0).to(value.dtype) @ (~finite).to(value.dtype) > 0
        summed = (shared @ value.masked_fill(~finite, 0)).masked_fill(spoilt, torch.nan)
    else:
        summed = torch.bmm(shared, value)
    return summed.view(batch, heads, rows, value.shape[2])


def log_sum_exp(scores: Tensor, sinks: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """Of each row, the sink among the terms; -inf for a row without keys, which a sink does not fill. In float64 where there is a shift."""
    total = torch.logsumexp(scores, -1)
    if shift is not None:
        total = total + shift
    return total if sinks is None else torch.where(total == -torch.inf, total, torch.logaddexp(total, sinks.to(total.dtype)))
