"""The Open Inference Protocol over HTTP, with the binary tensor extension: bytes both ways.

A body is a JSON header, followed by the bytes of those tensors that have `binary_data_size`, in the order they stand in the header;
Inference-Header-Content-Length says where the JSON ends. Arrays view the body; a reply is written from the arrays' own memory.

Callers repeat headers, and parsing one costs more than a small call. So the header template, which is the header with every `data` list
emptied, is the key of a cache of parsed headers, and only the lists are read anew. A body that does not fit this is read as a whole, which
also says what is wrong with it.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from service.errors import InvalidRequest, MalformedBody, RequestError
from service.tensors import Array, datatype_of, raw
from service.wire.arrays import Kind
from service.wire.codec import Codec, Decoded, Encoded, Headers
from service.wire.json.strict import parse_slowly
from service.wire.limits import WireLimits
from service.wire.negotiation import JSON
from service.wire.problems import shown
from service.wire.reply import Buffer, Reply, text_of, wire_array, write_json
from service.wire.schemas.attend import ReplyOptions
from service.wire.v2.header import V2Header, V2ReplyFormat, parse_header, read_header
from service.wire.v2.parameters import VERSION, arrays_asked, drop_columns
from service.wire.v2.tensors import array_of_list

LONGEST = 4096  # bytes of a header template; longer ones are hardly sent twice
DATA = re.compile(rb'"data"\s*:\s*(?=\[)')
NESTED = re.compile(rb"\[\s*\[")
HEADER_LENGTH = b"inference-header-content-length"
JSON_ALONE: Headers = ((b"content-type", JSON.encode()),)


class V2Codec(Codec):
    """Requests of `parameters["model"]`; `parameters["header_length"]` is the value of Inference-Header-Content-Length, "" without one."""

    def decode(
        self, body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
    ) -> Decoded:
        size = _header_size(parameters["header_length"], len(body))
        text, following = body if size == len(body) else body[:size], memoryview(body)[size:]
        model = parameters["model"]
        header, members = _read_by_template(text, following, model, limits) or _read(text, following, model, limits)
        drop_columns(members)
        return Decoded(members, header.reply_format, header.timeout, header.error_paths)

    def encode(self, reply: Reply, options: ReplyOptions, reply_format: V2ReplyFormat) -> Encoded:
        """The JSON, then the bytes of the outputs that go as such."""
        outputs: list[dict[str, Any]] = []
        pieces: list[Buffer] = []
        binary = False
        for name, array in arrays_asked(reply, reply_format.outputs):
            array, odd = wire_array(name, array, reply.datatype, options)
            entry: dict[str, Any] = {"name": name, "shape": array.shape, "datatype": datatype_of(array).name}
            if reply_format.in_text(name):
                entry["data"] = text_of(name, array.reshape(-1), odd, options)
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
            return Encoded(JSON_ALONE, header)
        length = str(sum(map(len, header))).encode()
        return Encoded(((b"content-type", b"application/octet-stream"), (HEADER_LENGTH, length)), [*header, *pieces])


class HeaderTemplate(NamedTuple):
    """A JSON header in which each list of numbers is an empty one, with a list inside where it had lists; `lists` says where they were."""

    text: bytes
    lists: list[slice]


def header_template(text: bytes) -> HeaderTemplate | None:
    """The template of a JSON text; None where it would be long, or where the lists are not easily found.

    Lists are found without parsing. In JSON the quote behind `data` in `"data":` can only end a string, so what follows is the value of a
    key; and up to the next quote or brace there is no string and no object, so that a list which begins there holds numbers alone, and ends
    before that. In a text that is no JSON, either what is left out or what is left is none, and reading it will say so.
    """
    pieces: list[bytes] = []
    lists: list[slice] = []
    begin = size = 0
    while found := DATA.search(text, begin, begin + LONGEST):
        start = found.end()
        quote = text.find(b'"', start)
        brace = text.find(b"}", start, quote if quote >= 0 else len(text))
        stop = text.rfind(b"]", start, quote if brace < 0 else brace) + 1  # where neither comes, this is no JSON
        size += start - begin
        if not stop or size > LONGEST:
            return None
        pieces += text[begin:start], b"[[]]" if NESTED.match(text, start) else b"[]"
        lists.append(slice(start, stop))
        begin = stop
    if size + len(text) - begin > LONGEST:
        return None
    return HeaderTemplate(b"".join((*pieces, text[begin:])), lists)


@lru_cache(256)
def parse_template(text: bytes, following: int, model: str) -> V2Header:
    """The header of that template. Raises MalformedBody, InvalidRequest or TooLarge."""
    members = parse_slowly(text)
    if not isinstance(members, dict):
        raise InvalidRequest.where("", "an object", shown(members))
    return parse_header(members, following, model)


def _read_by_template(text: bytes, following: memoryview, model: str, limits: WireLimits) -> tuple[V2Header, dict[str, Any]] | None:
    """The header by its template, and the members with their arrays; None where the body has to be read as a whole."""
    if (template := header_template(text)) is None:
        return None
    with suppress(RequestError):
        header = parse_template(template.text, len(following), model)
        if (arrays := _arrays(header, text, template.lists, limits)) is not None:
            return header, {**header.members, **arrays, **_binary_arrays(header, following)}
    return None


def _read(text: bytes, following: memoryview, model: str, limits: WireLimits) -> tuple[V2Header, dict[str, Any]]:
    """The same from the whole text. Raises MalformedBody, InvalidRequest or TooLarge."""
    header_members, reader = read_header(text, limits)
    header = parse_header(header_members, len(following), model)
    members = {**header.members, **_binary_arrays(header, following)}
    for name, tensor in header.json_tensors.items():
        data = header_members["inputs"][tensor.input]["data"]
        members[name] = reader.data(data, tensor.kind, tensor.shape, tensor.row.numpy, f"/inputs/{tensor.input}/data")
    reader.look_again()
    return header, members


def _binary_arrays(header: V2Header, following: memoryview) -> dict[str, Array]:
    return {name: tensor.array(following) for name, tensor in header.binary_tensors.items()}


def _arrays(header: V2Header, text: bytes, lists: Sequence[slice], limits: WireLimits) -> dict[str, Array] | None:
    """The tensors whose numbers are in these lists of the text; None where they are not as many, or a list is irregular."""
    if len(lists) != len(header.json_tensors):  # a key is `data` written with escapes
        return None
    arrays: dict[str, Array] = {}
    for place, (name, tensor) in zip(lists, header.json_tensors.items(), strict=True):
        if (array := array_of_list(text, place, tensor.kind, tensor.row, tensor.shape, limits)) is None:
            return None
        arrays[name] = array
    return arrays


def _header_size(length: str, received: int) -> int:
    """Bytes of JSON at the beginning of a body of `received` bytes. Raises MalformedBody, or InvalidRequest for bytes alone."""
    if not length:
        return received
    wanted = "an Inference-Header-Content-Length within the body"
    if not length.isascii() or not length.isdigit() or len(length) > 18:
        raise MalformedBody.where("", wanted, f'"{length[:40]}"')
    size = int(length)
    if size > received:
        raise MalformedBody.where("", wanted, f"{size} for {received} bytes")
    if not size:  # a raw request: the bytes of the only input a model has
        raise InvalidRequest.where("", "a JSON object that names the inputs, of which there are several", "bytes alone")
    return size
