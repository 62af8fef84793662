"""safetensors bytes <-> the members of a document. Arrays view the body they came in; replies are written from the arrays' own memory.

The format: eight bytes of length, a JSON header of that length, the tensors' bytes. The library of that name copies every tensor, so the
header is read here, as a ladder of refusals written against an enemy: each rung has its own message, nothing is allocated for a tensor,
and offsets must cover the buffer exactly. Fields that are no tensors travel as JSON in the metadata entry `request` (back: `reply`).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from service.errors import InvalidRequest, MalformedBody, TooLarge
from service.tensors import BY_SAFETENSORS, Array, datatype_of, raw
from service.wire import json_form
from service.wire.arrays import MAX_RANK, Kind
from service.wire.documents import ReplyOptions
from service.wire.limits import WireLimits
from service.wire.refusals import pointer
from service.wire.reply import Buffer, Reply, wire_array
from service.wire.scan import parse_strictly

HEADER_BYTES = 16 * 1024 * 1024  # far above what tensors need, far below what a parser minds
LISTS = {"query_offset"}  # fields that are no tensors in JSON, and may be here
ENTRY = {"dtype", "shape", "data_offsets"}


def read_tensors(body: bytes | memoryview) -> tuple[dict[str, Array], dict[str, str]]:
    """Name -> array over the body's memory, and the metadata. Raises MalformedBody or TooLarge, naming the tensor."""
    if len(body) < 8:
        raise MalformedBody.where("", "safetensors: eight bytes of header length", f"{len(body)} bytes")
    size = int.from_bytes(body[:8], "little")
    if size > HEADER_BYTES:
        raise TooLarge.where("", f"a safetensors header of at most {HEADER_BYTES} bytes", str(size))
    if 8 + size > len(body):
        raise MalformedBody.where("", f"a safetensors header of {size} bytes", f"{len(body) - 8} bytes in all")
    header = parse_strictly(bytes(body[8 : 8 + size]))
    if not isinstance(header, dict):
        raise MalformedBody.where("", "a JSON object as safetensors header", "something else")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise MalformedBody.where("/__metadata__", "an object of strings", "something else")
    buffer = memoryview(body)[8 + size :]
    spans = sorted((*_span(name, entry, len(buffer)), name) for name, entry in header.items())
    position = 0
    for begin, end, name in spans:
        if begin != position:
            raise MalformedBody.where(pointer([name]), f"data from byte {position} on, without holes or overlaps", f"from byte {begin}")
        position = end
    if position != len(buffer):
        raise MalformedBody.where("", f"{position} bytes of tensor data", str(len(buffer)))
    return {name: _view(name, entry, buffer) for name, entry in header.items()}, metadata


def _span(name: str, entry: Any, available: int) -> tuple[int, int]:
    """Checks one entry of the header on its own; its first byte and the one after its last."""
    at = pointer([name])
    if not isinstance(entry, dict) or set(entry) != ENTRY:
        raise MalformedBody.where(at, "an entry with dtype, shape and data_offsets", "something else")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in BY_SAFETENSORS:
        raise InvalidRequest.where(at, "a dtype among " + " ".join(BY_SAFETENSORS), str(entry["dtype"])[:20])
    for field, count in (("shape", None), ("data_offsets", 2)):
        numbers = entry[field]
        if (
            not isinstance(numbers, list)
            or count not in (None, len(numbers))
            or not all(type(n) is int and 0 <= n < 2**48 for n in numbers)
        ):
            raise MalformedBody.where(at, f"{field} of whole numbers", "something else")
    if len(entry["shape"]) > MAX_RANK:
        raise InvalidRequest.where(at, f"at most {MAX_RANK} axes", str(len(entry["shape"])))
    begin, end = entry["data_offsets"]
    size = math.prod(entry["shape"]) * BY_SAFETENSORS[entry["dtype"]].size
    if end > available or begin > end or end - begin != size:
        raise MalformedBody.where(at, f"{size} bytes within {available}", f"data_offsets {begin} to {end}")
    return begin, end


def _view(name: str, entry: Any, buffer: memoryview) -> Array:
    row, (begin, end) = BY_SAFETENSORS[entry["dtype"]], entry["data_offsets"]
    piece = buffer[begin:end]
    if row.kind == "bool" and (np.frombuffer(piece, np.uint8) > 1).any():
        raise InvalidRequest.where(pointer([name]), "bytes 0 or 1 for BOOL", "others")
    array: Array = np.frombuffer(piece, row.numpy).reshape(entry["shape"])
    return array if array.flags.aligned else array.copy()


def parse(body: bytes, kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False) -> dict[str, Any]:
    """The members of a request: tensors under their field names, the others from the metadata entry `request`."""
    tensors, metadata = read_tensors(body)
    try:
        request = metadata.get("request", "{}").encode()
    except UnicodeEncodeError:
        raise MalformedBody.where("/__metadata__/request", "JSON in UTF-8", "half a surrogate pair") from None
    members = json_form.parse(request, kinds, limits, shapes_alone)
    for name, array in tensors.items():
        if name in members:
            raise InvalidRequest.where(pointer([name]), "a field either as a tensor or in the entry `request`", "both")
        # where no tensor belongs, one is no number either: a document refuses an object by the field's own words
        members[name] = array if name in kinds or name in LISTS else {"tensor": list(array.shape)}
    return members


def encode(reply: Reply, options: ReplyOptions) -> list[Buffer]:
    """The reply: its tensors by name (a selection as `.keys` and `.values`), its other members in the metadata entry `reply`."""
    arrays: dict[str, Array] = {}
    for name, tensor in reply.tensors.items():
        parts = {f"{name}.{part}": array for part, array in tensor.items()} if isinstance(tensor, dict) else {name: tensor}
        arrays |= {part: wire_array(part, array, reply.datatype, options)[0] for part, array in parts.items()}
    head: dict[str, Any] = {"layer": reply.layer, "fully_masked_rows": reply.fully_masked_rows}
    if reply.metrics is not None:
        head["metrics"] = _metrics(reply, arrays, options.model_copy(update={"nonfinite": "null"}))
    return write_tensors(arrays, {"reply": orjson.dumps(head).decode()})


def _metrics(reply: Reply, arrays: dict[str, Array], options: ReplyOptions) -> dict[str, Any]:
    """Adds the metrics to `arrays` as `metrics.name` or `metrics.name.part`, and returns what of them is words."""
    words: dict[str, Any] = {}
    for name, value in (reply.metrics or {}).items():
        for part, inner in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(inner, list):
                words.setdefault(name, {})[part] = inner
            else:
                arrays[f"metrics.{name}{'.' if part else ''}{part}"] = wire_array("", inner, reply.datatype, options)[0]
    return words


def write_tensors(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> list[Buffer]:
    """safetensors in pieces: the header, then every array's own memory."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, array in arrays.items():
        entry = {"dtype": datatype_of(array).safetensors, "shape": array.shape, "data_offsets": [position, position + array.nbytes]}
        header[name], position = entry, position + array.nbytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(raw(array) for array in arrays.values() if array.nbytes)]
