"""Validates the JSON header of a V2 request into a `V2Header`, without the numbers of tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.errors import InvalidRequest, MalformedBody, TooLarge
from service.tensors import Array, Datatype
from service.wire.arrays import Kind, array_of_bytes
from service.wire.json.reader import shape_of
from service.wire.problems import HALF_SURROGATE, describe_value, is_unicode
from service.wire.v2.error_paths import InputPath, V2ErrorPaths
from service.wire.v2.parameters import (
    DEFAULT_OUTPUTS,
    IGNORED,
    TOP_K_KEYS,
    VERSION,
    datatype_named,
    kind_of,
    members_of,
    refuse_decimals,
    require_input,
    require_known,
    timeout_of,
)

REQUEST_MEMBERS = ("id", "parameters", "inputs", "outputs", "model_name", "model_version")  # KServe's client repeats the last two
INPUT_MEMBERS = ("name", "shape", "datatype", "parameters", "data")
OUTPUT_MEMBERS = ("name", "parameters")
MAX_INPUTS = 64  # of one request; there are fewer names of inputs


class BinaryTensor(NamedTuple):
    """A tensor sent as bytes: those from `start` to `stop` after the JSON. `at` points to its input."""

    datatype: Datatype
    shape: tuple[int, ...]
    start: int
    stop: int
    at: str

    def array(self, following: memoryview) -> Array:
        """The array, a view of `following`, the bytes after the JSON. Raises InvalidRequest."""
        return array_of_bytes(following[self.start : self.stop], self.datatype, self.shape, self.at)


class CutList(NamedTuple):
    """Replaces, in a parsed header, a list that was cut out of the text. `nested`: whether it contains lists."""

    number: int  # index among the lists that were cut out
    nested: bool


class JsonTensor(NamedTuple):
    """A tensor whose numbers are in the JSON, in input number `input`. `data`: a `CutList`, or the value in the JSON."""

    input: int
    kind: Kind
    datatype: Datatype
    shape: tuple[int, ...]
    data: Any


@dataclass(frozen=True, slots=True)
class V2ReplyFormat:
    """The parts of a request that decide how its reply is encoded."""

    model: str
    id: str | None  # the reply repeats it
    outputs: Sequence[str] = ()  # the requested names; empty for the default outputs
    binary: bool = False  # whether outputs are sent as bytes; `binary_outputs` overrides it by name
    binary_outputs: Mapping[str, bool] | None = None
    marks_final: bool = False  # in a stream: whether the reply has the flag `triton_final_response`

    def in_text(self, name: str) -> bool:
        """Whether an output is sent in the JSON."""
        if not self.binary_outputs:
            return not self.binary
        return not self.binary_outputs.get(name, self.binary_outputs.get(name.partition(".")[0], self.binary))


@dataclass(frozen=True, slots=True)
class V2Header:
    """A parsed header. `members`: those of an AttendRequest, with `...` for each array, in the order of the inputs."""

    members: Mapping[str, Any]
    binary_tensors: Mapping[str, BinaryTensor]  # by name, in the order of their bytes
    json_tensors: Mapping[str, JsonTensor]
    timeout: float | None  # seconds
    reply_format: V2ReplyFormat
    error_paths: V2ErrorPaths


def parse_header(header: Mapping[str, Any], following: int, model: str) -> V2Header:
    """Parses the header of a request to `model`, with `following` bytes after the JSON.

    Raises MalformedBody, InvalidRequest or TooLarge.
    """
    require_known(header, REQUEST_MEMBERS, "")
    for name, value in (("model_name", model), ("model_version", VERSION)):
        if header.get(name) not in (None, value):
            raise InvalidRequest.where(f"/{name}", f'"{value}", as in the path', describe_value(header[name]))
    inputs = header.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise InvalidRequest.where("/inputs", "a list of inputs", describe_value(inputs) if "inputs" in header else "nothing")
    if len(inputs) > MAX_INPUTS:
        raise TooLarge.where("/inputs", f"at most {MAX_INPUTS} inputs", str(len(inputs)))
    paths: list[InputPath] = []
    binary_tensors: dict[str, BinaryTensor] = {}
    json_tensors: dict[str, JsonTensor] = {}
    position = 0
    for i, entry in enumerate(inputs):
        path, tensor = _input(entry, i, position, following)
        paths.append(path)
        if isinstance(tensor, BinaryTensor):
            binary_tensors[path.name] = tensor
            position = tensor.stop
        else:
            json_tensors[path.name] = tensor
    if position != following:
        raise MalformedBody.where("", f"{position} bytes of tensors after the JSON", str(following))
    parameters = _parameters(header, "")
    request_id, timeout = _id(header.get("id")), timeout_of(parameters)
    binary = _flag(parameters.get("binary_data_output", False), "/parameters/binary_data_output")
    outputs, binary_outputs = _outputs([] if header.get("outputs") is None else header["outputs"])
    members = members_of(model, [(path.name, ...) for path in paths], parameters, outputs)
    reply_format = V2ReplyFormat(model, request_id, tuple(outputs), binary, binary_outputs)
    if not any(reply_format.in_text(name) for name in outputs or DEFAULT_OUTPUTS if name != TOP_K_KEYS):
        refuse_decimals(members)
    return V2Header(members, binary_tensors, json_tensors, timeout, reply_format, V2ErrorPaths(tuple(paths)))


def _input(entry: Any, i: int, position: int, following: int) -> tuple[InputPath, BinaryTensor | JsonTensor]:
    """(path, tensor) of one input."""
    at = f"/inputs/{i}"
    require_known(_object(entry, at), INPUT_MEMBERS, at)
    name = _name(entry, at)
    require_input(name, f"{at}/name")
    datatype = datatype_named(entry.get("datatype", ...), kind_of(name), f"{at}/datatype")
    shape = shape_of(entry.get("shape", ...), f"{at}/shape")
    parameters, in_text = _parameters(entry, at), entry.get("data") is not None
    require_known(parameters, IGNORED["input"], f"{at}/parameters")
    size = parameters.get("binary_data_size")
    if in_text == (size is not None):
        raise InvalidRequest.where(at, "either data or binary_data_size", "both" if in_text else "neither")
    if in_text:
        data = entry["data"]
        nested = data.nested if isinstance(data, CutList) else isinstance(data, list) and len(data) > 0 and isinstance(data[0], list)
        return InputPath(name, shape, "/data", nested), JsonTensor(i, kind_of(name), datatype, shape, data)
    wanted = math.prod(shape) * datatype.size
    if type(size) is not int or size != wanted:
        expected = f"{wanted} bytes for shape {list(shape)} of {datatype.name}"
        raise InvalidRequest.where(f"{at}/parameters/binary_data_size", expected, describe_value(size))
    if size > (left := following - position):
        raise MalformedBody.where(at, f"{size} bytes after the JSON (Inference-Header-Content-Length is its length)", str(left))
    return InputPath(name, shape), BinaryTensor(datatype, shape, position, position + size, at)


def _outputs(entries: Any) -> tuple[list[str], dict[str, bool]]:
    """(requested names, name -> `binary_data` where the request sets it)."""
    if not isinstance(entries, list):
        raise InvalidRequest.where("/outputs", "a list of outputs", describe_value(entries))
    names, binary = [], {}
    for i, entry in enumerate(entries):
        at = f"/outputs/{i}"
        require_known(_object(entry, at), OUTPUT_MEMBERS, at)
        name, parameters = _name(entry, at), _parameters(entry, at)
        require_known(parameters, IGNORED["output"], f"{at}/parameters")
        if "binary_data" in parameters:
            binary[name] = _flag(parameters["binary_data"], f"{at}/parameters/binary_data")
        names.append(name)
    return names, binary


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest.where(at, "an object", describe_value(value))
    return value


def _parameters(holder: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The parameters of a request, an input or an output; null means none."""
    value = holder.get("parameters")
    return {} if value is None else _object(value, f"{at}/parameters")


def _name(entry: Mapping[str, Any], at: str) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise InvalidRequest.where(f"{at}/name", "a string", describe_value(name) if "name" in entry else "nothing")
    return name


def _flag(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest.where(at, "true or false", describe_value(value))
    return value


def _id(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequest.where("/id", "a string", describe_value(value))
    if not is_unicode(value):  # the reply repeats it
        raise InvalidRequest.where("/id", "a string of Unicode text", HALF_SURROGATE)
    return value
