"""Decodes and encodes safetensors. Decoded arrays are views of the body; encoded pieces are views of the arrays.

The format: eight bytes with the length of a JSON header, the header, the tensors' bytes. The library `safetensors` copies every tensor, so
this module parses the header itself. It checks every entry before use; the tensors must cover the buffer without gaps or overlaps.
Fields that are not tensors are JSON in the metadata entry `request`, and in replies in the entry `reply`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from attend.axes import Kind
from attend.errors import InvalidRequest, MalformedBody, RequestError, TooLarge, pointer
from attend.limits import JSON_TEXT_BYTES, WireLimits
from attend.tensors import BY_SAFETENSORS, Array, Datatype, datatype_of, raw
from attend.wire.arrays import MAX_RANK, array_of_bytes, wire_array
from attend.wire.codec import Buffer, Decoded, Encoded, Reply
from attend.wire.json import reader
from attend.wire.json.strict import DEFAULT_LIMITS, parse_strictly
from attend.wire.schemas.attend import ReplyOptions

MEDIA_TYPE = "application/vnd.safetensors"
HEADERS = ((b"content-type", MEDIA_TYPE.encode()),)
MAX_HEADER_BYTES = 4 * 1024 * 1024  # of a header; the bound on its values allows about ten thousand tensors
LARGEST_TEXT = MAX_HEADER_BYTES // 2  # bytes of text in a reply; the other half is for the tensors' entries
MAX_CACHED_BYTES = 4096  # bytes of a header whose parsed entries are cached, and of the metadata of one whose text is
LIST_FIELDS = {"query_offset"}  # fields that are lists in JSON and may be tensors here
OPENING = ord("{")
OTHER_FORMATS = {  # first bytes -> the format
    b"PK": "a zip archive, as torch.save and numpy.savez write",
    b"\x80": "a pickle",
    b"\x89HDF": "HDF5",
    b"\x1f\x8b": "gzip",
    b"GGUF": "GGUF",
    b"\x93NUMPY": "a file of numpy.save",
    b"{": "JSON",
    b"version ": "a pointer of Git LFS in place of the file",
}
ENTRY_MEMBERS = {"dtype", "shape", "data_offsets"}
METADATA_ENTRIES = {"request", "spec", "config", "layer", "part"}  # those that the service reads


def read_tensors(body: bytes | memoryview, limits: WireLimits = DEFAULT_LIMITS) -> tuple[dict[str, Array], dict[str, str]]:
    """(name -> view of the body, metadata). Raises MalformedBody, InvalidRequest or TooLarge with the name of the tensor.

    `limits.values` bounds the values of the header: a tensor has 6, and one for each axis.
    """
    size = int.from_bytes(body[:8], "little")
    _require_header(body, size)
    buffer = memoryview(body)[8 + size :]
    text = bytes(body[8 : 8 + size])
    if size > MAX_CACHED_BYTES:
        entries, metadata = _read_header(text, len(buffer), limits)
    else:
        entries, metadata = _read_cached_header(text, len(buffer))
    arrays = {entry.name: array_of_bytes(buffer[entry.begin : entry.end], entry.datatype, entry.shape, entry.at) for entry in entries}
    return arrays, dict(metadata)


def _require_header(body: bytes | memoryview, size: int) -> None:
    """Raises MalformedBody or TooLarge unless the body begins with a header of `size` bytes."""
    if len(body) < 8:
        raise MalformedBody.where("", "safetensors: eight bytes of header length", f"{len(body)} bytes")
    if size > MAX_HEADER_BYTES and (other := _format_of(bytes(body[:8]))):
        raise MalformedBody.where("", "safetensors", other)
    if len(body) > 8 and body[8] != OPENING:
        got = _format_of(bytes(body[:8])) or "something else"
        raise MalformedBody.where("", "safetensors: eight bytes of header length, then a JSON object", got)
    if size > MAX_HEADER_BYTES:
        raise TooLarge.where("", f"a safetensors header of at most {MAX_HEADER_BYTES} bytes", str(size))
    if 8 + size > len(body):
        raise MalformedBody.where("", f"a safetensors header of {size} bytes", f"{len(body) - 8} bytes after its length")


def read_header(start: Callable[[int], bytes]) -> tuple[list["TensorEntry"], dict[str, str], int]:
    """(entry of each tensor, metadata, bytes of the whole file), of a file of which `start(n)` returns the first n bytes.

    Whether the file has so many bytes is for `read_tensors` to check. Raises MalformedBody, InvalidRequest or TooLarge.
    """
    size = int.from_bytes(start(8), "little")
    text = start(8 + min(size, MAX_HEADER_BYTES))
    _require_header(text, size)
    entries, metadata = _read_header(text[8:], None)
    return entries, metadata, 8 + size + sum(entry.end - entry.begin for entry in entries)


def _format_of(start: bytes) -> str:
    """The other format of a file that begins with these bytes, "" if it is unknown."""
    return next((kind for magic, kind in OTHER_FORMATS.items() if start.startswith(magic)), "")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's entry in the header: data[begin:end] are its bytes. `at` points to it."""

    begin: int
    end: int
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    at: str


def _read_header(text: bytes, available: int | None, limits: WireLimits = DEFAULT_LIMITS) -> tuple[list[TensorEntry], dict[str, str]]:
    """(entries in header order, metadata), checked against the number of bytes after the header if that is known."""
    try:
        header = parse_strictly(text, "header", limits=limits)
    except TooLarge:
        raise
    except RequestError as refusal:
        raise MalformedBody(problems=refusal.problems) from None
    if not isinstance(header, dict):
        raise MalformedBody.where("", "a JSON object as safetensors header", "something else")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise MalformedBody.where("/__metadata__", "an object of strings", "something else")
    for name in metadata:  # "Request" would otherwise be ignored, and every option in it
        if name not in METADATA_ENTRIES and (known := name.lower()) in METADATA_ENTRIES:
            raise MalformedBody.where("/__metadata__" + pointer([name]), f"the entry {known} in lower case", f'"{name}"')
    entries = [_entry_of(name, value, available) for name, value in header.items()]
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end, entry.name)):
        if entry.begin != position:
            wanted = f"data from byte {position} on, without holes or overlaps"
            raise MalformedBody.where(entry.at, wanted, f"from byte {entry.begin}")
        position = entry.end
    if available is not None and position != available:
        raise MalformedBody.where("", f"{position} bytes of tensor data", str(available))
    return entries, metadata


_read_cached_header = lru_cache(256)(_read_header)  # clients repeat headers


def _entry_of(name: str, entry: Any, available: int | None) -> TensorEntry:
    """The checked entry of one tensor."""
    at = pointer([name])
    if not isinstance(entry, dict) or set(entry) != ENTRY_MEMBERS:
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
    if (available is not None and end > available) or begin > end or end - begin != size:
        within = "" if available is None else f" within {available}"
        raise MalformedBody.where(at, f"{size} bytes{within}", f"data_offsets {begin} to {end}")
    return TensorEntry(begin, end, name, BY_SAFETENSORS[entry["dtype"]], tuple(entry["shape"]), at)


def decode(
    body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
) -> Decoded:
    """The members of a request: tensors under their field names, the others from the metadata entry `request`."""
    tensors, metadata = read_tensors(body, limits)
    if len(tensors) > limits.max_tensors:
        raise TooLarge.where("", f"at most {limits.max_tensors} tensors (max_tensors)", str(len(tensors)))
    try:
        request = metadata.get("request", "").encode()
    except UnicodeEncodeError:
        raise MalformedBody.where("/__metadata__/request", "JSON in UTF-8", "half a surrogate pair") from None
    if len(request) > JSON_TEXT_BYTES:
        raise TooLarge.where("/__metadata__/request", f"JSON text of at most {JSON_TEXT_BYTES} bytes", str(len(request)))
    members = dict(reader.decode(request, {}, kinds, limits, shapes_alone).members) if "request" in metadata else {}
    for name, array in tensors.items():
        if name in members:
            raise InvalidRequest.where(pointer([name]), "the field either as a tensor or in the metadata entry request", "both")
        # a tensor instead of a plain value is refused when that field is validated
        members[name] = array if name in kinds or name in LIST_FIELDS else {"tensor": list(array.shape)}
    return Decoded(members, parameters)


def encode(reply: Reply, options: ReplyOptions, reply_format: Any = None) -> Encoded:
    """Encodes a reply: tensors by name, selections as `.keys` and `.values`, the other members in the metadata entry `reply`."""
    arrays = {name: wire_array(name, array, reply.datatype, options.nonfinite)[0] for name, array in reply.arrays()}
    members: dict[str, Any] = {"layer": reply.layer, "fully_masked_rows": reply.fully_masked_rows}
    if reply.session is not None:
        members["session"] = reply.session
    if reply.metrics is not None:
        members["metrics"] = _metrics(reply, arrays)
    return HEADERS, write_tensors(arrays, {"reply": orjson.dumps(members).decode()})


def _metrics(reply: Reply, arrays: dict[str, Array]) -> dict[str, Any]:
    """Adds the metrics to `arrays` as `metrics.name` or `metrics.name.part`, and returns their parts that are texts."""
    texts: dict[str, Any] = {}
    for name, value in (reply.metrics or {}).items():
        for part, inner in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(inner, list):
                texts.setdefault(name, {})[part] = inner
            else:
                arrays[f"metrics.{name}{'.' if part else ''}{part}"] = wire_array("", inner, reply.datatype, "null")[0]
    return texts


def write_tensors(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> list[Buffer]:
    """A safetensors body in pieces: the header, then the memory of each array."""
    entries = tuple([(name, datatype_of(array).safetensors, array.shape, array.nbytes) for name, array in arrays.items()])
    write = _write_header if sum(map(len, metadata.values())) > MAX_CACHED_BYTES else _write_cached_header
    return [write(entries, tuple(metadata.items())), *[raw(array) for array in arrays.values() if array.nbytes]]


def _write_header(entries: tuple[tuple[str, str, tuple[int, ...], int], ...], metadata: tuple[tuple[str, str], ...]) -> bytes:
    """Length and text of the header for tensors that follow each other; an entry is (name, dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_write_cached_header = lru_cache(256)(_write_header)
