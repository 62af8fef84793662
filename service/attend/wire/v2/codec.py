"""The codec of the Open Inference Protocol over HTTP, with the binary tensor extension.

A body is a JSON header, then the bytes of the tensors that have `binary_data_size`, in the order of the header;
Inference-Header-Content-Length is the length of the JSON. Decoded arrays are views of the body; replies are views of the arrays.

Clients repeat headers, and parsing one costs more than a small call. So parsed headers are cached by the header template, the header with
every `data` list replaced by a placeholder; only the lists are parsed each time. A small body that is refused is parsed again as a whole,
to find the place of the fault.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from attend.axes import Kind
from attend.errors import InvalidRequest, MalformedBody, RequestError, TooLarge
from attend.limits import WireLimits
from attend.tensors import Datatype, datatype_of, raw
from attend.wire.arrays import array_of_bytes, wire_array
from attend.wire.codec import Buffer, Codec, Decoded, Encoded, Reply
from attend.wire.json.lists import NumberList
from attend.wire.json.reader import MAX_STRICT_BYTES, DocumentReader, array_of_data, parse_refused, parse_template, shape_of, split_json
from attend.wire.json.strict import parse_strictly
from attend.wire.json.writer import HEADERS, json_text_of, write_json
from attend.wire.problems import describe_value, validate
from attend.wire.schemas.attend import ReplyOptions
from attend.wire.v2.members import (
    DEFAULT_OUTPUTS,
    TOP_K_KEYS,
    VERSION,
    InputPath,
    V2ReplyFormat,
    datatype_named,
    kind_of,
    members_of,
    refuse_decimals,
    requested_arrays,
    require_input,
    squeeze_per_item,
    translate_problem,
)
from attend.wire.v2.schemas import InferenceInput, InferenceParameters, InferenceRequest

MAX_CACHED_HEADER = 4096  # bytes of a header template that is cached; longer ones rarely repeat
BEFORE_DATA = re.compile(rb'"data"\s*:\s*(?=\[)')
HEADER_LENGTH = b"inference-header-content-length"


class ListPlaceholder(NamedTuple):
    """Stands, in a parsed header template, for the `data` list of that index. `nested`: whether the list contains lists."""

    number: int
    nested: bool


class V2Input(NamedTuple):
    """An input without its numbers. `data` has them, as a `ListPlaceholder` or as the value in the JSON; if it is None, they are the bytes
    from `start` to `stop` after the JSON. `at` points to the input."""

    kind: Kind
    datatype: Datatype
    shape: tuple[int, ...]
    at: str
    data: Any = None
    start: int = 0
    stop: int = 0


def decode(
    body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
) -> Decoded:
    """A request of `parameters["model"]`; `parameters["header_length"]` is the value of Inference-Header-Content-Length, "" without one."""
    size = _header_size(parameters["header_length"], len(body))
    text, binary = body if size == len(body) else body[:size], memoryview(body)[size:]
    return _decode(text, binary, parameters["model"], limits)


def encode(reply: Reply, options: ReplyOptions, reply_format: V2ReplyFormat) -> Encoded:
    """The JSON, then the bytes of the binary outputs."""
    outputs: list[dict[str, Any]] = []
    pieces: list[Buffer] = []
    binary = False
    for name, array in requested_arrays(reply, reply_format.outputs):
        array, nonfinite = wire_array(name, array, reply.datatype, options.nonfinite)
        entry: dict[str, Any] = {"name": name, "shape": array.shape, "datatype": datatype_of(array).name}
        if reply_format.in_text(name):
            entry["data"] = json_text_of(name, array.reshape(-1), nonfinite, options)
        else:
            binary, entry["parameters"] = True, {"binary_data_size": array.nbytes}
            if array.nbytes:
                pieces.append(raw(array))
        outputs.append(entry)
    document: dict[str, Any] = {"model_name": reply.layer["name"], "model_version": VERSION}
    if reply_format.id is not None:
        document["id"] = reply_format.id
    parameters = {"fully_masked_rows": reply.fully_masked_rows, "fingerprint": reply.layer["fingerprint"]}
    header = write_json({**document, "parameters": parameters, "outputs": outputs})
    if not binary:
        return HEADERS, header
    length = str(sum(map(len, header))).encode()
    return ((b"content-type", b"application/octet-stream"), (HEADER_LENGTH, length)), [*header, *pieces]


CODEC = Codec(decode, encode)


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


def _decode(text: bytes, binary: memoryview, model: str, limits: WireLimits) -> Decoded:
    """The request of a JSON header and the bytes after it. Raises MalformedBody, InvalidRequest or TooLarge."""
    try:
        template, values = split_json(text, limits, BEFORE_DATA)
        lists = [value for value in values if isinstance(value, NumberList)]
        parse = _parse_cached_template if len(template) <= MAX_CACHED_HEADER else _parse_template
        header = parse(template, tuple(value.nested for value in lists), len(binary), model, limits)
        return _with_arrays(header, lists, binary)
    except TooLarge:
        raise
    except RequestError as refusal:
        if len(text) > MAX_STRICT_BYTES:  # refuse malformed JSON with the place in the text
            parse_template(text, *split_json(text, limits, BEFORE_DATA), limits)
        document = parse_refused(text, limits, refusal)
    header = _parse_header(DocumentReader(limits).members(document, {}), len(binary), model)
    return _with_arrays(header, (), binary)


def _parse_template(template: bytes, nested: tuple[bool, ...], binary_size: int, model: str, limits: WireLimits) -> Decoded:
    """Parses a header template. `nested`: for each `data` list, whether it contains lists; `binary_size`: bytes after the JSON.

    Raises MalformedBody, InvalidRequest or TooLarge.
    """
    document = parse_strictly(template, replacements=[ListPlaceholder(i, is_nested) for i, is_nested in enumerate(nested)], limits=limits)
    return _parse_header(DocumentReader(limits).members(document, {}), binary_size, model)


_parse_cached_template = lru_cache(256)(_parse_template)


def _parse_header(document: Mapping[str, Any], binary_size: int, model: str) -> Decoded:
    """The request to `model` with this header and `binary_size` bytes after the JSON. Its members have a `V2Input` for each array.

    Raises MalformedBody or InvalidRequest.
    """
    request = validate(InferenceRequest, document)
    for name, got, value in (("model_name", request.model_name, model), ("model_version", request.model_version, VERSION)):
        if got not in (None, value):
            raise InvalidRequest.where(f"/{name}", f'"{value}", as in the path', describe_value(got))
    paths: list[InputPath] = []
    tensors: list[tuple[str, V2Input]] = []
    position = 0
    for i, entry in enumerate(request.inputs):
        path, tensor = _input(entry, f"/inputs/{i}", position, binary_size)
        paths.append(path)
        tensors.append((path.name, tensor))
        position = tensor.stop
    if position != binary_size:
        raise MalformedBody.where("", f"{position} bytes of tensors after the JSON", str(binary_size))
    parameters, requested = request.parameters or InferenceParameters(), request.outputs or []
    outputs = tuple(output.name for output in requested)
    binary_outputs = {
        output.name: output.parameters.binary_data
        for output in requested
        if output.parameters is not None and "binary_data" in output.parameters.model_fields_set
    }
    members = members_of(model, tensors, parameters.model_extra or {}, outputs)
    reply_format = V2ReplyFormat(request.id, outputs, parameters.binary_data_output, binary_outputs)
    if not any(reply_format.in_text(name) for name in outputs or DEFAULT_OUTPUTS if name != TOP_K_KEYS):
        refuse_decimals(members)
    return Decoded(
        members, reply_format, parameters.seconds, parameters.sequence, partial(translate_problem, inputs=tuple(paths), outputs=outputs)
    )


def _input(entry: InferenceInput, at: str, position: int, binary_size: int) -> tuple[InputPath, V2Input]:
    """(path, tensor) of one input; `position`: where the bytes of the inputs before it end."""
    name, kind, data = entry.name, kind_of(entry.name), entry.data
    require_input(name, f"{at}/name")
    datatype = datatype_named(entry.datatype, kind, f"{at}/datatype")
    shape = shape_of(entry.shape, f"{at}/shape")
    size = None if entry.parameters is None else entry.parameters.binary_data_size
    if (data is None) == (size is None):
        raise InvalidRequest.where(at, "either data or binary_data_size", "neither" if data is None else "both")
    if size is None:
        nested = (
            data.nested if isinstance(data, ListPlaceholder) else isinstance(data, list) and len(data) > 0 and isinstance(data[0], list)
        )
        return InputPath(name, shape, "/data", nested), V2Input(kind, datatype, shape, at, data, stop=position)
    wanted = math.prod(shape) * datatype.size
    if size != wanted:
        expected = f"{wanted} bytes for shape {list(shape)} of {datatype.name}"
        raise InvalidRequest.where(f"{at}/parameters/binary_data_size", expected, str(size))
    if size > (left := binary_size - position):
        raise MalformedBody.where(at, f"{size} bytes after the JSON (Inference-Header-Content-Length is its length)", str(left))
    return InputPath(name, shape), V2Input(kind, datatype, shape, at, None, position, position + size)


def _with_arrays(header: Decoded, lists: Sequence[NumberList], binary: memoryview) -> Decoded:
    """The request with arrays in place of each `V2Input`: of `lists`, by the number of a placeholder, or of the bytes after the JSON."""
    members = dict(header.members)
    for name, tensor in header.members.items():
        if type(tensor) is not V2Input:
            continue
        kind, datatype, shape, at, data, start, stop = tensor
        if data is None:
            members[name] = array_of_bytes(binary[start:stop], datatype, shape, at)
        else:
            numbers = lists[data.number] if isinstance(data, ListPlaceholder) else data
            members[name] = array_of_data(numbers, kind, shape, datatype.numpy, f"{at}/data")
    squeeze_per_item(members)
    return Decoded(members, *header[1:])
