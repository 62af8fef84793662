"""The codec of the Open Inference Protocol over HTTP, with the binary tensor extension.

A body is a JSON header, then the bytes of the tensors that have `binary_data_size`, in the order of the header;
Inference-Header-Content-Length is the length of the JSON. Decoded arrays are views of the body; replies are views of the arrays.

Clients repeat headers, and parsing one costs more than a small call. So parsed headers are cached by the header template, the header with
every `data` list replaced by a placeholder; only the lists are parsed each time. A small body that is refused is parsed again as a whole,
to find the place of the fault.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from service.errors import InvalidRequest, MalformedBody, RequestError, TooLarge
from service.tensors import datatype_of, raw
from service.wire.arrays import Kind, array_of_bytes
from service.wire.codec import Codec, Decoded, Encoded, Headers
from service.wire.json.lists import NumberList
from service.wire.json.reader import MAX_STRICT_BYTES, DocumentReader, array_of_data, split_json
from service.wire.json.strict import parse_strictly
from service.wire.json.writer import json_text_of, write_json
from service.wire.limits import WireLimits
from service.wire.negotiation import JSON
from service.wire.reply import Buffer, Reply, wire_array
from service.wire.schemas.attend import ReplyOptions
from service.wire.v2.header import ListSlot, V2Input, V2ReplyFormat, parse_header
from service.wire.v2.members import VERSION, requested_arrays, squeeze_per_item

MAX_CACHED_HEADER = 4096  # bytes of a header template that is cached; longer ones rarely repeat
BEFORE_DATA = re.compile(rb'"data"\s*:\s*(?=\[)')
HEADER_LENGTH = b"inference-header-content-length"
JSON_HEADERS: Headers = ((b"content-type", JSON.encode()),)


class V2Codec(Codec):
    """Requests of `parameters["model"]`; `parameters["header_length"]` is the value of Inference-Header-Content-Length, "" without one."""

    def decode(
        self, body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
    ) -> Decoded:
        size = _header_size(parameters["header_length"], len(body))
        text, binary = body if size == len(body) else body[:size], memoryview(body)[size:]
        return _decode(text, binary, parameters["model"], limits)

    def encode(self, reply: Reply, options: ReplyOptions, reply_format: V2ReplyFormat) -> Encoded:
        """The JSON, then the bytes of the binary outputs."""
        outputs: list[dict[str, Any]] = []
        pieces: list[Buffer] = []
        binary = False
        for name, array in requested_arrays(reply, reply_format.outputs):
            array, nonfinite = wire_array(name, array, reply.datatype, options)
            entry: dict[str, Any] = {"name": name, "shape": array.shape, "datatype": datatype_of(array).name}
            if reply_format.in_text(name):
                entry["data"] = json_text_of(name, array.reshape(-1), nonfinite, options)
            else:
                binary, entry["parameters"] = True, {"binary_data_size": array.nbytes}
                if array.nbytes:
                    pieces.append(raw(array))
            outputs.append(entry)
        document: dict[str, Any] = {"model_name": reply_format.model, "model_version": VERSION}
        if reply_format.id is not None:
            document["id"] = reply_format.id
        parameters = {"fully_masked_rows": reply.fully_masked_rows, "fingerprint": reply.layer["fingerprint"]}
        header = write_json({**document, "parameters": parameters, "outputs": outputs})
        if not binary:
            return Encoded(JSON_HEADERS, header)
        length = str(sum(map(len, header))).encode()
        return Encoded(((b"content-type", b"application/octet-stream"), (HEADER_LENGTH, length)), [*header, *pieces])


def _parse_template(template: bytes, nested: tuple[bool, ...], binary_size: int, model: str, limits: WireLimits) -> Decoded:
    """Parses a header template. `nested`: for each `data` list, whether it contains lists; `binary_size`: bytes after the JSON.

    Raises MalformedBody, InvalidRequest or TooLarge.
    """
    document = parse_strictly(template, replacements=[ListSlot(i, is_nested) for i, is_nested in enumerate(nested)])
    return parse_header(DocumentReader(limits).members(document, {}), binary_size, model)


_parse_cached_template = lru_cache(256)(_parse_template)


def _decode(text: bytes, binary: memoryview, model: str, limits: WireLimits) -> Decoded:
    """The request of a JSON header and the bytes after it. Raises MalformedBody, InvalidRequest or TooLarge."""
    try:
        parts = split_json(text, limits, BEFORE_DATA)
        lists = [value for value in parts.values if isinstance(value, NumberList)]
        parse = _parse_cached_template if len(parts.template) <= MAX_CACHED_HEADER else _parse_template
        header = parse(parts.template, tuple(value.nested for value in lists), len(binary), model, limits)
        return _with_arrays(header, lists, binary)
    except TooLarge:
        raise
    except RequestError:
        if len(text) > MAX_STRICT_BYTES:
            split_json(text, limits, BEFORE_DATA).document()  # raises if the JSON is malformed, with the place in the text
            raise
    header = parse_header(DocumentReader(limits).members(parse_strictly(text), {}), len(binary), model)
    return _with_arrays(header, (), binary)


def _with_arrays(header: Decoded, lists: Sequence[NumberList], binary: memoryview) -> Decoded:
    """The request with arrays in place of each `V2Input`: of `lists`, which the slots number, or of the bytes after the JSON."""
    members = dict(header.members)
    for name, tensor in header.members.items():
        if type(tensor) is not V2Input:
            continue
        kind, datatype, shape, at, data, start, stop = tensor
        if data is None:
            members[name] = array_of_bytes(binary[start:stop], datatype, shape, at)
        else:
            numbers = lists[data.number] if isinstance(data, ListSlot) else data
            members[name] = array_of_data(numbers, kind, shape, datatype.numpy, f"{at}/data")
    squeeze_per_item(members)
    return Decoded(members, *header[1:])


def _header_size(length: str, received: int) -> int:
    """The length of the JSON in a body of `received` bytes. Raises MalformedBody; InvalidRequest for a body without JSON."""
    if not length:
        return received
    wanted = "an Inference-Header-Content-Length within the body"
    if not length.isascii() or not length.isdigit() or len(length) > 18:
        raise MalformedBody.where("", wanted, f'"{length[:40]}"')
    size = int(length)
    if size > received:
        raise MalformedBody.where("", wanted, f"{size} for {received} bytes")
    if not size:  # a raw request, which the protocol allows for models with one input
        raise InvalidRequest.where("", "a JSON object that names the inputs, of which there are several", "bytes alone")
    return size
