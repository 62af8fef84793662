"""A request as Python has it -> the body that carries it, JSON or safetensors: what a client sends. The forms beside this read it again.

In JSON small tensors go as nested lists, which people can read on the way; larger ones, and those that lists cannot say (no elements,
NaN, infinities), as base64, which is exact and fast. In every form each number arrives as it left. What a request may hold is not judged
here: the server does that, with the place. Only what could not be carried, or would arrive as something else, is refused.
"""

import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from service.errors import InvalidRequest
from service.tensors import BY_NUMPY, DATATYPES, Array, little_endian, raw
from service.wire.arrays import Kind
from service.wire.problems import pointer
from service.wire.safetensors import write_tensors

READABLE = 4096  # bytes of a tensor up to which it goes as nested lists


def encode_request(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bytes:
    """The JSON body of these fields; those that are None are left out.

    `kinds` maps the members that are tensors to their kind; "weights/*" names every member of the mapping `weights`. A tensor is whatever
    numpy makes an array of, or a mapping in one of the wire's own forms. Raises InvalidRequest where JSON cannot carry a field.
    """
    return _written({name: _member(name, value, kinds) for name, value in fields.items() if value is not None})


def encode_tensors(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bytes:
    """The safetensors body of the same fields: tensors under their names, all else as JSON in the metadata entry `request`.

    A tensor that comes as a mapping in one of JSON's own forms stays there. Raises InvalidRequest as `encode_request` does.
    """
    tensors, others = {}, {}
    for name, value in fields.items():
        if name in kinds and value is not None and not isinstance(value, Mapping):
            tensors[name] = _array(value, kinds[name], pointer([name]))
        elif value is not None:
            others[name] = _member(name, value, kinds)
    return b"".join(write_tensors(tensors, {"request": _written(others).decode()}))


def _written(document: dict[str, Any]) -> bytes:
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
        array = _of_torch(value) if hasattr(value, "detach") else np.asarray(value)
        if kind == "bias" and array.dtype.kind == "U":  # "-inf" among the numbers of a list
            array = array.astype(np.float64)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidRequest.where(at, "a tensor", f"something that makes no array ({error})") from None
    if array.dtype.newbyteorder("<") not in BY_NUMPY:
        raise InvalidRequest.where(at, "numbers", f"elements of type {array.dtype}")
    return array


def _of_torch(tensor: Any) -> Array:
    """A tensor of torch as an array, from any device, out of any graph. numpy's own way knows no bfloat16; float32 holds all of them."""
    tensor = tensor.detach().cpu()
    array: Array = tensor.float().numpy().astype(DATATYPES["BF16"].numpy) if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()
    return array
