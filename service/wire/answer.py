"""Reply bytes -> arrays: what a client does with what the server wrote, in JSON's three forms or in safetensors.

The forms with a shape give the very array that was sent. Nested lists say no datatype: their numbers become float64, keys int64. Words and
nulls among numbers become the floats they stand for. Here a number costs a Python object, but for base64: whoever minds asks for that.
"""

import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from service.errors import MalformedBody
from service.tensors import DATATYPES, Array, datatype_of
from service.wire.problems import pointer
from service.wire.reply import Reply
from service.wire.safetensors import read_tensors
from service.wire.schemas.analysis import WHOLE

HEAD = ("layer", "fully_masked_rows")


def decode_document(body: bytes) -> dict[str, Any]:
    """The JSON object `body` as plain Python. Raises MalformedBody where it is none."""
    try:
        document = orjson.loads(body)
    except ValueError:
        raise MalformedBody.where("", "a reply in JSON", f"{len(body)} bytes of something else") from None
    if not isinstance(document, dict):
        raise MalformedBody.where("", "a JSON object", f"a {type(document).__name__}")
    return document


def decode_reply(body: bytes) -> Reply:
    """The reply to POST /attend. Raises MalformedBody where it is none."""
    document = decode_document(body)
    return _reply(document, {name: _parts(value, pointer([name])) for name, value in document.items() if name not in HEAD})


def decode_binary_reply(body: bytes) -> Reply:
    """The same in safetensors. Raises MalformedBody, InvalidRequest or TooLarge where it is none."""
    arrays, metadata = read_tensors(body)
    tensors: dict[str, Any] = {}
    for name, array in arrays.items():
        output, _, part = name.partition(".")
        writable = array.copy()
        if part:
            tensors.setdefault(output, {})[part] = writable
        else:
            tensors[output] = writable
    return _reply(decode_document(metadata.get("reply", "").encode()), tensors)


def _reply(head: Mapping[str, Any], tensors: dict[str, Any]) -> Reply:
    for name in HEAD:
        if name not in head:
            raise MalformedBody.where(pointer([name]), "a reply to POST /attend", "nothing")
    numbers = [part for tensor in tensors.values() for part in (tensor.values() if isinstance(tensor, dict) else [tensor])]
    names = [datatype_of(array).name for array in numbers if array.dtype != np.int64]
    return Reply(dict(head["layer"]), int(head["fully_masked_rows"]), names[0] if names else "FP64", tensors)


def decode_metrics(body: bytes) -> Reply:
    """The reply to POST /attend/analysis: metrics as arrays, null as NaN, an index that is not there as -1. Raises MalformedBody."""
    document = decode_document(body)
    for name in (*HEAD, "metrics"):
        if name not in document:
            raise MalformedBody.where(pointer([name]), "a reply to POST /attend/analysis", "nothing")
    metrics = {name: _metric(value, name, pointer(["metrics", name])) for name, value in document["metrics"].items()}
    return Reply(dict(document["layer"]), int(document["fully_masked_rows"]), "FP64", {}, metrics)


def _metric(value: Any, name: str, at: str) -> Any:
    if isinstance(value, Mapping) and "shape" not in value:
        return {part: _metric(inner, part, at + pointer([part])) for part, inner in value.items()}
    if name.endswith("_words"):
        return value
    if name in WHOLE:
        value = {**value, "data": _whole(value["data"])} if isinstance(value, Mapping) and "data" in value else _whole(value)
    return _array(value, at, name in WHOLE)


def _whole(value: Any) -> Any:
    """Indices in lists, null as -1; a tensor in base64 as it is."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return -1 if value is None else value


def _parts(value: Any, at: str) -> Array | dict[str, Array]:
    if isinstance(value, Mapping) and "shape" not in value:
        return {part: _array(tensor, at + pointer([part]), part == "keys") for part, tensor in value.items()}
    return _array(value, at, False)


def _array(value: Any, at: str, whole: bool) -> Array:
    """One tensor in any form; `whole` says that lists of it hold integers."""
    try:
        if not isinstance(value, Mapping):
            return np.array(value, np.int64 if whole else np.float64)
        dtype = DATATYPES[value["datatype"]].numpy
        if "base64" in value:
            array = np.frombuffer(binascii.a2b_base64(value["base64"]), dtype).copy()  # a buffer of bytes could not be written to
        else:
            array = np.array(value["data"], dtype if dtype.kind in "iu" else np.float64).astype(dtype, copy=False)
        return array.reshape(value["shape"])
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise MalformedBody.where(at, "a tensor", f"something else ({error})") from None
