"""Validates the JSON header of a V2 request, without the numbers of tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from service.errors import InvalidRequest, MalformedBody
from service.tensors import Datatype
from service.wire.arrays import Kind
from service.wire.codec import Decoded
from service.wire.json.reader import shape_of
from service.wire.problems import describe_value, validate
from service.wire.v2.error_paths import InputPath, translate_problem
from service.wire.v2.members import (
    DEFAULT_OUTPUTS,
    TOP_K_KEYS,
    VERSION,
    datatype_named,
    kind_of,
    members_of,
    refuse_decimals,
    require_input,
)
from service.wire.v2.schemas import InferenceInput, InferenceParameters, InferenceRequest


class ListSlot(NamedTuple):
    """Takes, in a parsed header template, the place of the `data` list of that index. `nested`: whether the list contains lists."""

    number: int
    nested: bool


class V2Input(NamedTuple):
    """An input without its numbers. `data` has them, as a `ListSlot` or as the value in the JSON; if it is None, they are the bytes from
    `start` to `stop` after the JSON. `at` points to the input."""

    kind: Kind
    datatype: Datatype
    shape: tuple[int, ...]
    at: str
    data: Any = None
    start: int = 0
    stop: int = 0


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


def parse_header(document: Mapping[str, Any], binary_size: int, model: str) -> Decoded:
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
    reply_format = V2ReplyFormat(model, request.id, outputs, parameters.binary_data_output, binary_outputs)
    if not any(reply_format.in_text(name) for name in outputs or DEFAULT_OUTPUTS if name != TOP_K_KEYS):
        refuse_decimals(members)
    return Decoded(members, reply_format, parameters.seconds, parameters.sequence, partial(translate_problem, inputs=tuple(paths)))


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
        nested = data.nested if isinstance(data, ListSlot) else isinstance(data, list) and len(data) > 0 and isinstance(data[0], list)
        return InputPath(name, shape, "/data", nested), V2Input(kind, datatype, shape, at, data, stop=position)
    wanted = math.prod(shape) * datatype.size
    if size != wanted:
        expected = f"{wanted} bytes for shape {list(shape)} of {datatype.name}"
        raise InvalidRequest.where(f"{at}/parameters/binary_data_size", expected, str(size))
    if size > (left := binary_size - position):
        raise MalformedBody.where(at, f"{size} bytes after the JSON (Inference-Header-Content-Length is its length)", str(left))
    return InputPath(name, shape), V2Input(kind, datatype, shape, at, None, position, position + size)
