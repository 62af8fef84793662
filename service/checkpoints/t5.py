"""T5's layers: no biases, no division by sqrt(d), and a table of position biases that only the first block of each stack keeps.

So another block's layer is read together with block 0's table of the same stack, here out of the whole checkpoint. Encoders look both
ways and decoders back: the stack's name tells, else `relative_bias.bidirectional` of the spec must. Attention from decoder to encoder
has no table. Assumed where the spec is silent: scale 1, max_distance 128 (the buckets are the table's rows).
"""

import re
from collections.abc import Mapping
from typing import Any

from service.checkpoints.layout import Fields, Found, Layout, Read, as_linear, linear_names
from service.checkpoints.problems import field_pointer, shape_of, weight_pointer
from service.errors import InvalidRequest
from service.tensors import Array

TABLE = "relative_attention_bias.weight"
CROSS = "EncDecAttention"


def convert(found: Found) -> Read:
    weights = as_linear(found)
    told: Fields = {}
    stack = _first_block(found.stem)
    home, table = _table(found, stack)
    if table is not None:
        told["num_heads"] = table.shape[1]
    if _is_cross(found):
        return Read(weights, told, {"scale": 1.0})
    if table is None:
        raise InvalidRequest.where(weight_pointer(home), "the stack's table of position biases, [buckets, heads]", "nothing")
    told["relative_bias"] = {"buckets": table.shape[0]}
    bias: dict[str, Any] = {"max_distance": 128, "bidirectional": _bidirectional(found)}
    return Read(weights | {"relative_bias": table}, told, {"scale": 1.0, "relative_bias": bias})


def _is_cross(found: Found) -> bool:
    """The name tells; of a layer taken out of its checkpoint, a spec that says there is no table."""
    no_table = "relative_bias" in found.given and found.given["relative_bias"] is None and not found.has("relative_bias")
    return found.stem.endswith(CROSS) or no_table


def _first_block(stem: str) -> str:
    """The stem that keeps the table: decoder.block.3.layer.1.EncDecAttention -> decoder.block.0.layer.0.SelfAttention."""
    return re.sub(r"(^|\.)block\.\d+\.layer\.\d+\.\w+$", r"\1block.0.layer.0.SelfAttention", stem)


def _table(found: Found, stack: str) -> tuple[str, Array | None]:
    """The table's name, and the table: the layer's own, else that of the stack's first block."""
    name = f"{stack}.{TABLE}".lstrip(".")
    own = found.has("relative_bias")
    array = found.arrays["relative_bias"] if own else found.elsewhere(name)
    name = found.names["relative_bias"] if own else name
    if array is not None and array.ndim != 2:
        raise InvalidRequest.where(weight_pointer(name), "shape [buckets, heads]", shape_of(array))
    return name, array


def _bidirectional(found: Found) -> bool:
    stacks = [segment for segment in found.stem.split(".") if segment in ("encoder", "decoder")]
    if stacks:
        return stacks[-1] == "encoder"
    given = found.given.get("relative_bias")
    if not isinstance(given, Mapping) or type(given.get("bidirectional")) is not bool:
        raise InvalidRequest.where(field_pointer("relative_bias", "bidirectional"), "true for an encoder, false for a decoder", "nothing")
    return bool(given["bidirectional"])


NAMES = linear_names("q", "k", "v", "o", biases="")

FORMS = (
    Layout("t5", NAMES | {TABLE: "relative_bias"}, convert, optional=(("relative_bias",),), told_under=("SelfAttention",)),
    Layout("t5", NAMES, convert, aside={TABLE: 2}, told_under=(CROSS,)),  # old decoders carry a table there that T5 itself ignores
)
