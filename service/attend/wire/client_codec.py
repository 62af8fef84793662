"""Encodes requests and decodes replies for the client, in JSON and in safetensors.

Tensors in JSON are base64. Numbers arrive unchanged. The server validates requests; this module refuses only values that it cannot
encode without changing them.

Replies in base64 or safetensors keep the datatypes of the server. Nested lists have none: numbers become float64, indices int64.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import pybase64
from pydantic import BaseModel

from attend.axes import Kind
from attend.errors import InvalidRequest, MalformedBody, pointer
from attend.limits import WireLimits
from attend.tensors import BY_NUMPY, DATATYPES, Array
from attend.wire.problems import validate
from attend.wire.safetensors import MAX_HEADER_BYTES, read_tensors, write_tensors
from attend.wire.schemas.analysis import INDEX_PARTS
from attend.wire.schemas.schema import LayerReference
from attend.wire.schemas.sessions import SessionLength
from attend.wire.schemas.tensors import Base64Tensor

REPLY_LIMITS = WireLimits(values=MAX_HEADER_BYTES)  # a server's reply may have the weights of many sequences, each as a tensor


def encode_json_request(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bytes:
    """The JSON body of these fields, without those that are None.

    `kinds` maps the members that are tensors to their kind; "weights/*" names every member of the mapping `weights`. A tensor is anything
    that numpy converts to an array, or a mapping in a form of the wire. Raises InvalidRequest if JSON cannot represent a field.
    """
    return _write({name: _member(name, value, kinds) for name, value in fields.items() if value is not None})


def encode_binary_request(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bytes:
    """The safetensors body of these fields: tensors under their names, the others as JSON in the metadata entry `request`.

    A tensor given as a mapping (a form of the JSON body) is written there too. Raises InvalidRequest as `encode_json_request` does.
    """
    tensors, others = {}, {}
    for name, value in fields.items():
        if name in kinds and value is not None and not isinstance(value, Mapping):
            tensors[name] = _array(value, kinds[name], pointer([name]))
        elif value is not None:
            others[name] = _member(name, value, kinds)
    return b"".join(write_tensors(tensors, {"request": _write(others).decode()}))


def _write(document: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InvalidRequest.where("", "fields that JSON can represent", f"something else ({error})") from None


def _member(name: str, value: Any, kinds: Mapping[str, Kind]) -> Any:
    at = pointer([name])
    if f"{name}/*" in kinds and isinstance(value, Mapping):
        return {key: _tensor(tensor, kinds[f"{name}/*"], at + pointer([key])) for key, tensor in value.items()}
    return _tensor(value, kinds[name], at) if name in kinds else _plain(value, at)


def _plain(value: Any, at: str) -> Any:
    """A value that is not a tensor, as plain Python. Raises InvalidRequest for NaN, which orjson would write as null."""
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
    return Base64Tensor.of(_array(value, kind, at)).model_dump()


def _array(value: Any, kind: Kind, at: str) -> Array:
    try:
        array = from_torch(value) if hasattr(value, "detach") else np.asarray(value)
        if kind == "bias" and array.dtype.kind == "U":  # "-inf" among the numbers of a list
            array = array.astype(np.float64)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidRequest.where(at, "a tensor", f"a value that numpy cannot convert to an array ({error})") from None
    if array.dtype.newbyteorder("<") not in BY_NUMPY:
        raise InvalidRequest.where(at, "numbers", "text" if array.dtype.kind == "U" else f"elements of type {array.dtype}")
    return array


def from_torch(tensor: Any) -> Array:
    """A torch tensor on any device as an array. bfloat16, which numpy lacks, is converted by way of float32."""
    tensor = tensor.detach().cpu()
    array: Array = tensor.float().numpy().astype(DATATYPES["BF16"].numpy) if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()
    return array


def decode_document(body: bytes) -> dict[str, Any]:
    """The JSON object `body` as Python objects. Raises MalformedBody."""
    try:
        document = orjson.loads(body)
    except ValueError:
        raise MalformedBody.where("", "a reply in JSON", f"{len(body)} bytes of something else") from None
    if not isinstance(document, dict):
        raise MalformedBody.where("", "a JSON object", f"a {type(document).__name__}")
    return document


class ReplyMetadata(BaseModel):
    """The members of every reply to a call that are not tensors."""

    layer: LayerReference
    fully_masked_rows: int
    session: SessionLength | None = None


def decode_json_reply(body: bytes) -> tuple[ReplyMetadata, dict[str, Any]]:
    """A JSON reply to POST /attend or /attend/analysis: (metadata, the other members as arrays). Raises RequestError."""
    document = decode_document(body)
    others = {name: value for name, value in document.items() if name not in ReplyMetadata.model_fields}
    return validate(ReplyMetadata, document), {name: _arrays(value, name, pointer([name])) for name, value in others.items()}


def decode_binary_reply(body: bytes) -> tuple[ReplyMetadata, dict[str, Any]]:
    """A safetensors reply to POST /attend. Raises MalformedBody, InvalidRequest or TooLarge."""
    arrays, metadata = read_tensors(body, REPLY_LIMITS)
    tensors: dict[str, Any] = {}
    for name, array in arrays.items():
        output, _, part = name.partition(".")
        if part:
            tensors.setdefault(output, {})[part] = array.copy()
        else:
            tensors[output] = array.copy()
    return validate(ReplyMetadata, decode_document(metadata.get("reply", "").encode())), tensors


def _arrays(value: Any, name: str, at: str) -> Any:
    """An output or a metric as an array, or its parts by name; null becomes NaN, or -1 among indices. Words stay lists."""
    if isinstance(value, Mapping) and "shape" not in value:
        return {part: _arrays(inner, part, at + pointer([part])) for part, inner in value.items()}
    if name.endswith("_words"):
        return value
    if name in INDEX_PARTS:
        value = {**value, "data": _indices(value["data"])} if isinstance(value, Mapping) and "data" in value else _indices(value)
    return decode_tensor(value, at, name in INDEX_PARTS)


def _indices(value: Any) -> Any:
    """Lists of indices with null replaced by -1; anything else unchanged."""
    if isinstance(value, list):
        return [_indices(item) for item in value]
    return -1 if value is None else value


def decode_tensor(value: Any, at: str, integers: bool = False) -> Array:
    """A tensor in any form; nested lists become int64 with `integers`, else float64. Raises MalformedBody."""
    try:
        if not isinstance(value, Mapping):
            return np.array(value, np.int64 if integers else np.float64)
        dtype = DATATYPES[value["datatype"]].numpy
        if "base64" in value:
            data = pybase64.b64decode_as_bytearray(value["base64"], validate=True)  # an array over bytes would be read-only
            array = np.frombuffer(data, dtype)
        else:
            array = np.array(value["data"], dtype if dtype.kind in "iub" else np.float64).astype(dtype, copy=False)
        return array.reshape(value["shape"])
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise MalformedBody.where(at, "a tensor", f"something else ({error})") from None
