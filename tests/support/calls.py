"""Calls to a layer, made of tensors."""

from dataclasses import fields
from typing import Any

from torch import Tensor

from attend.attention.call import Call, CallOptions
from attend.attention.masks import Masks
from attend.axes import CALL_TENSORS

OPTIONS = {field.name for field in fields(CallOptions)}


def call_of(query: Tensor, key: Tensor, value: Tensor, masks: Masks, scale: float, outputs: frozenset[str], **others: Any) -> Call:
    """A call with these inputs; `others` are fields of Call and CallOptions, and tensors."""
    options = {name: others.pop(name) for name in set(others) & OPTIONS}
    given = {name: others.pop(name) for name in set(others) & CALL_TENSORS.keys()}
    one_input = {"self_attention": key is query and value is query, "keys_as_values": value is key}
    made = CallOptions(query.shape[0], query.shape[1], key.shape[1], outputs, scale, **one_input | options)
    return Call(made, query, key, value, masks, given, **others)
