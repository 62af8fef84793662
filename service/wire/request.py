"""A request as Python has it -> the JSON body that carries it: what a client sends. `json_form.py` reads it at the other end.

Small tensors go as nested lists, which people can read on the way; larger ones, and those that lists cannot say (no elements, NaN,
infinities), as base64, which is exact and fast. Either way every number arrives as it left. What a request may hold is not judged here:
the server does that, with the place. Only what JSON could not carry, or would carry as something else, is refused.
"""

import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from service.errors import InvalidRequest
from service.tensors import BY_NUMPY, Array, little_endian, raw
from service.wire.arrays import Kind
from service.wire.refusals import pointer

READABLE = 4096  # bytes of a tensor up to which it goes as nested lists


def encode_request(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bytes:
    """The JSON body of these fields; those that are None are left out.

    `kinds` maps the members that are tensors to their kind; "weights/*" names every member of the mapping `weights`. A tensor is whatever
    numpy makes an array of, or a mapping in one of the wire's own forms. Raises InvalidRequest where JSON cannot carry a field.
    """
    document = {name: _member(name, value, kinds) for name, value in fields.items() if value is not None}
    try:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InvalidRequest.where("", "fields that JSON can carry", f"something else ({error})") from None


def _member(name: str, value: Any, kinds: Mapping[str, Kind]) -> Any:
    at = pointer([name])
    if f"{name}/*" in kinds and isinstance(value, Mapping):
        return {key: _tensor(tensor, kinds[f"{name}/*"], at + pointer([key])) for key, tensor in value.items()}
    return _tensor(value, kinds[name], at) if name in kinds else _plain(value, at)


def _plain(value: Any, at: str) -> Any:
    """A value that is no tensor, as orjson takes it. A NaN would leave as null, which has a meaning of its own."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item, at + pointer([key])) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{at}/{i}") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest.where(at, "a finite number", str(value))
    return value


def _tensor(value: Any, kind: Kind, at: str) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    array = _array(value, kind, at)
    row = BY_NUMPY[array.dtype.newbyteorder("<")]
    if not array.size or array.nbytes > READABLE or (row.kind == "float" and not np.isfinite(array).all()):
        text = binascii.b2a_base64(raw(array), newline=False)
        return {"shape": list(array.shape), "datatype": row.name, "base64": orjson.Fragment(b'"' + text + b'"')}
    if row.kind == "float":
        array = array.astype(np.float64)  # written shortest, a float32 would be another number to a layer of float64
    elif kind == "mask" and row.kind == "bool":
        array = array.astype(np.uint8)  # true and false are read more slowly than 1 and 0
    return little_endian(array) if array.ndim else array.item()


def _array(value: Any, kind: Kind, at: str) -> Array:
    try:
        array = np.asarray(value)
        if kind == "bias" and array.dtype.kind == "U":  # "-inf" among the numbers of a list
            array = array.astype(np.float64)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidRequest.where(at, "a tensor", f"something that makes no array ({error})") from None
    if array.dtype.newbyteorder("<") not in BY_NUMPY:
        raise InvalidRequest.where(at, "numbers", f"elements of type {array.dtype}")
    return array
