"""Stacks calls into one, along the batch axis. A stacked call is an ordinary call."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attend.attention.call import Call
from attend.attention.masks import MASK_TENSORS
from attend.axes import CALL_TENSORS

NOT_STACKED = tuple(name for name, field in CALL_TENSORS.items() if not field.stacked)


def stacking_key(call: Call) -> tuple[Any, ...] | None:
    """All properties that must be equal in calls that are stacked: axes other than b, options and kinds of masks. None: never stacked.

    A call with dropout is computed alone, since its random stream has the shape of the single call.
    """
    options, masks = call.options, call.masks
    if options.reproducible or options.dropout is not None:
        return None
    for name in NOT_STACKED:
        if name in call.optional_inputs:
            return None
    return (
        replace(options, items=1),
        tuple(call.optional_inputs[name].shape[1:] if name in call.optional_inputs else None for name in CALL_TENSORS),
        tuple(None if (tensor := getattr(masks, name)) is None else tensor.shape[1:] for name in MASK_TENSORS),
        masks.left,
        masks.right,
        masks.chunk,
        masks.aligned,
    )


def stack(calls: Sequence[Call]) -> Call:
    """Concatenate calls with equal batch keys along the batch axis. A single call is returned as it is."""
    if len(calls) == 1:
        return calls[0]
    first, sizes = calls[0], [call.options.items for call in calls]
    inputs = first.options.inputs(lambda name: torch.cat([getattr(call, name) for call in calls]))
    masks: dict[str, Any] = {name: _stacked([getattr(call.masks, name) for call in calls], sizes) for name in MASK_TENSORS}
    optional_inputs: dict[str, Any] = {
        name: _stacked([call.optional_inputs[name] for call in calls], sizes) for name in first.optional_inputs
    }
    return replace(
        first,
        options=replace(first.options, items=sum(sizes)),
        **inputs,
        masks=first.masks._replace(**masks, bias_blocks=any(call.masks.bias_blocks for call in calls)),
        optional_inputs=optional_inputs,
    )


def _stacked(tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Concatenate tensors [b|1, …] of calls with `sizes` batch items; a tensor that is equal in all calls is returned once, [1, …]."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    if all(t.shape[0] == 1 for t in present) and all(t is present[0] or torch.equal(t, present[0]) for t in present):
        return present[0]
    return torch.cat([t if t.shape[0] == n else t.expand(n, *t.shape[1:]) for t, n in zip(present, sizes, strict=True)])
