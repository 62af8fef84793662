"""What the JSON part of a V2 request tells: its tensors, options and wishes, everything but the numbers, in it or behind it.

Whoever calls often says the same of tensors of the same shapes, in the same words; so what they mean is worked out once and kept.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from service.errors import InvalidRequest, MalformedBody
from service.tensors import Array, Datatype
from service.wire.arrays import Kind, array_over
from service.wire.json.reader import shape_of
from service.wire.json.strict import parse_slowly
from service.wire.problems import HALF, is_unicode, shown
from service.wire.v2.error_paths import Places, Sent
from service.wire.v2.header import INPUT, has_lists
from service.wire.v2.parameters import (
    BY_DEFAULT,
    IGNORED,
    KEYS,
    VERSION,
    datatype_named,
    demand_input,
    demand_known,
    kind_of,
    members_of,
    refuse_decimals,
    seconds_of,
)

REQUEST = ("id", "parameters", "inputs", "outputs", "model_name", "model_version")  # KServe's client repeats the last two
OUTPUT = ("name", "parameters")


class Behind(NamedTuple):
    """Where among the bytes after the JSON a tensor stands, and what it is; `at` points to its input."""

    row: Datatype
    shape: tuple[int, ...]
    start: int
    stop: int
    at: str

    def array(self, rest: memoryview) -> Array:
        """The array, over those bytes. Raises InvalidRequest."""
        return array_over(rest[self.start : self.stop], self.row, self.shape, self.at)


class Within(NamedTuple):
    """Which input has a tensor's numbers in the JSON, and what they are."""

    input: int
    kind: Kind
    row: Datatype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """One request's. `members` are those of a request for attention, in which the arrays are still to be made; only read."""

    members: Mapping[str, Any]
    behind: Mapping[str, Behind]  # by name, in the order they came
    within: Mapping[str, Within]
    id: str | None  # which the reply repeats
    timeout: float | None  # in seconds
    outputs: list[str]  # the names asked for, none where that is left open
    binary: bool  # whether outputs go as bytes, unless one says otherwise
    binary_outputs: Mapping[str, bool]
    places: Places

    def in_text(self, name: str) -> bool:
        """Whether an output goes in the JSON."""
        wishes = self.binary_outputs
        return not wishes.get(name, wishes.get(name.partition(".")[0], self.binary))


@lru_cache(256)
def told_again(frame: bytes, following: int, model: str) -> Told:
    """What a JSON part without its numbers tells. Raises MalformedBody, InvalidRequest or TooLarge."""
    return told_by(_object(parse_slowly(frame), ""), following, model)


def told_by(header: Mapping[str, Any], following: int, model: str) -> Told:
    """What the members of a JSON part tell, of a request to that model, with so many bytes behind it. At the numbers in it nobody looks.

    Raises MalformedBody, InvalidRequest or TooLarge.
    """
    demand_known(header, REQUEST, "")
    for name, value in (("model_name", model), ("model_version", VERSION)):
        if header.get(name) not in (None, value):
            raise InvalidRequest.where(f"/{name}", f'"{value}", as in the path', shown(header[name]))
    inputs = header.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise InvalidRequest.where("/inputs", "a list of inputs", shown(inputs) if "inputs" in header else "nothing")
    places: list[Sent] = []
    behind: dict[str, Behind] = {}
    within: dict[str, Within] = {}
    position = 0
    for i, entry in enumerate(inputs):
        sent, tensor = _input(entry, i, position, following)
        places.append(sent)
        if isinstance(tensor, Behind):
            behind[sent.name] = tensor
            position = tensor.stop
        else:
            within[sent.name] = tensor
    if position != following:
        raise MalformedBody.where("", f"{position} bytes of tensors after the JSON", str(following))
    parameters = _parameters(header, "")
    request_id, timeout = _id(header.get("id")), seconds_of(parameters)
    binary = _flag(parameters.get("binary_data_output", False), "/parameters/binary_data_output")
    outputs, binary_outputs = _outputs([] if header.get("outputs") is None else header["outputs"])
    members = members_of(model, [(sent.name, ...) for sent in places], parameters, outputs)
    told = Told(members, behind, within, request_id, timeout, outputs, binary, binary_outputs, Places(places))
    if not any(told.in_text(name) for name in outputs or BY_DEFAULT if name != KEYS):
        refuse_decimals(members)
    return told


def _input(entry: Any, i: int, position: int, following: int) -> tuple[Sent, Behind | Within]:
    """One input: how it was sent, and where its numbers are to be found."""
    at = f"/inputs/{i}"
    demand_known(_object(entry, at), INPUT, at)
    name = _name(entry, at)
    demand_input(name, f"{at}/name")
    row = datatype_named(entry.get("datatype", ...), kind_of(name), f"{at}/datatype")
    shape = shape_of(entry.get("shape", ...), f"{at}/shape")
    parameters, in_text = _parameters(entry, at), entry.get("data") is not None
    demand_known(parameters, IGNORED["input"], f"{at}/parameters")
    size = parameters.get("binary_data_size")
    if in_text == (size is not None):
        raise InvalidRequest.where(at, "either data or binary_data_size", "both" if in_text else "neither")
    if in_text:
        return Sent(name, shape, "/data", has_lists(entry["data"])), Within(i, kind_of(name), row, shape)
    wanted = math.prod(shape) * row.size
    if type(size) is not int or size != wanted:
        expected = f"{wanted} bytes for shape {list(shape)} of {row.name}"
        raise InvalidRequest.where(f"{at}/parameters/binary_data_size", expected, shown(size))
    if size > (left := following - position):
        raise MalformedBody.where(at, f"{size} bytes after the JSON (Inference-Header-Content-Length tells where it ends)", str(left))
    return Sent(name, shape), Behind(row, shape, position, position + size, at)


def _outputs(entries: Any) -> tuple[list[str], dict[str, bool]]:
    """The names asked for, and which of them are wanted as bytes, or not."""
    if not isinstance(entries, list):
        raise InvalidRequest.where("/outputs", "a list of outputs", shown(entries))
    names, binary = [], {}
    for i, entry in enumerate(entries):
        at = f"/outputs/{i}"
        demand_known(_object(entry, at), OUTPUT, at)
        name, parameters = _name(entry, at), _parameters(entry, at)
        demand_known(parameters, IGNORED["output"], f"{at}/parameters")
        if "binary_data" in parameters:
            binary[name] = _flag(parameters["binary_data"], f"{at}/parameters/binary_data")
        names.append(name)
    return names, binary


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest.where(at, "an object", shown(value))
    return value


def _parameters(holder: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The parameters of a request, an input or an output; null says that there are none."""
    value = holder.get("parameters")
    return {} if value is None else _object(value, f"{at}/parameters")


def _name(entry: Mapping[str, Any], at: str) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise InvalidRequest.where(f"{at}/name", "a string", shown(name) if "name" in entry else "nothing")
    return name


def _flag(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest.where(at, "true or false", shown(value))
    return value


def _id(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequest.where("/id", "a string", shown(value))
    if not is_unicode(value):  # the reply repeats it
        raise InvalidRequest.where("/id", "a string of Unicode text", HALF)
    return value
