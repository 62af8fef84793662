"""What the JSON part of a V2 request tells: its tensors, options and wishes, everything but the bytes that follow it.

Whoever calls often says the same of tensors of the same shapes, in the same words; so what they mean is worked out once and kept.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from service.errors import InvalidRequest, MalformedBody
from service.tensors import Array, Datatype
from service.wire.arrays import array_over
from service.wire.json_form import Reader, shape_of
from service.wire.limits import WireLimits
from service.wire.refusals import HALF, is_unicode, shown
from service.wire.v2.header import read_header
from service.wire.v2.members import (
    BY_DEFAULT,
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
from service.wire.v2.places import Places, Sent

REQUEST = ("id", "parameters", "inputs", "outputs", "model_name", "model_version")  # KServe's client repeats the last two
INPUT = ("name", "shape", "datatype", "parameters", "data")
OUTPUT = ("name", "parameters")
REMEMBERED = 4096  # bytes of a JSON part, up to which it is kept for the next request that has the same


class Slot(NamedTuple):
    """Where among the bytes after the JSON a tensor stands, and what it is; `at` points to its input."""

    row: Datatype
    shape: tuple[int, ...]
    start: int
    stop: int
    at: str

    def over(self, rest: memoryview) -> Array:
        """The array, over those bytes. Raises InvalidRequest."""
        return array_over(rest[self.start : self.stop], self.row, self.shape, self.at)


@dataclass(frozen=True, slots=True)
class Told:
    """One request's. `members` are those of a request for attention, with slots for arrays that are still to be made; only read."""

    members: Mapping[str, Any]
    id: str
    timeout: float | None  # in seconds
    outputs: list[str]  # the names asked for, none where that is left open
    binary: bool  # whether outputs go as bytes, unless one says otherwise
    binary_outputs: Mapping[str, bool]
    places: Places

    def in_text(self, name: str) -> bool:
        """Whether an output goes in the JSON."""
        wishes = self.binary_outputs
        return not wishes.get(name, wishes.get(name.partition(".")[0], self.binary))


def told_by(text: bytes, following: int, model: str, limits: WireLimits) -> Told:
    """What the JSON `text` tells, of a request to that model, with so many bytes behind it.

    Raises MalformedBody, InvalidRequest or TooLarge.
    """
    if len(text) <= REMEMBERED and b'"data"' not in text:
        return _known(text, following, model, limits)
    return _told(text, following, model, limits)


def _told(text: bytes, following: int, model: str, limits: WireLimits) -> Told:
    header, reader = read_header(text, limits)
    demand_known(header, REQUEST, "")
    for name, value in (("model_name", model), ("model_version", VERSION)):
        if header.get(name, value) != value:
            raise InvalidRequest.where(f"/{name}", f'"{value}", as in the path', shown(header[name]))
    inputs = header.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise InvalidRequest.where("/inputs", "a list of inputs", shown(inputs) if "inputs" in header else "nothing")
    tensors, places, position = [], [], 0
    for i, entry in enumerate(inputs):
        sent, tensor = _input(entry, f"/inputs/{i}", position, following, reader)
        tensors.append((sent.name, tensor))
        places.append(sent)
        position = tensor.stop if isinstance(tensor, Slot) else position
    if position != following:
        raise MalformedBody.where("", f"{position} bytes of tensors after the JSON", str(following))
    reader.look_again()
    parameters = _object(header.get("parameters", {}), "/parameters")
    request_id, timeout = _id(header.get("id", "")), seconds_of(parameters)
    binary = _flag(parameters.get("binary_data_output", False), "/parameters/binary_data_output")
    outputs, binary_outputs = _outputs(header.get("outputs") or [])
    members = members_of(model, tensors, parameters, outputs)
    told = Told(members, request_id, timeout, outputs, binary, binary_outputs, Places(places))
    if not any(told.in_text(name) for name in outputs or BY_DEFAULT if name != KEYS):
        refuse_decimals(members)
    return told


_known = lru_cache(256)(_told)


def _input(entry: Any, at: str, position: int, following: int, reader: Reader) -> tuple[Sent, Array | Slot]:
    """One input: how it was sent, and its array, or where its bytes are to be found."""
    demand_known(_object(entry, at), INPUT, at)
    name = _name(entry, at)
    demand_input(name, f"{at}/name")
    row = datatype_named(entry.get("datatype"), f"{at}/datatype")
    shape = shape_of(entry.get("shape"), f"{at}/shape")
    parameters = _object(entry.get("parameters", {}), f"{at}/parameters")
    demand_known(parameters, ("binary_data_size",), f"{at}/parameters")
    if ("data" in entry) == ("binary_data_size" in parameters):
        raise InvalidRequest.where(at, "either data or binary_data_size", "both" if "data" in entry else "neither")
    if "data" in entry:
        data = entry["data"]
        array = reader.data(data, kind_of(name), shape, row.numpy, f"{at}/data")
        return Sent(name, shape, "/data", bool(len(data)) and hasattr(data[0], "__len__")), array
    size, wanted = parameters["binary_data_size"], math.prod(shape) * row.size
    if type(size) is not int or size != wanted:
        expected = f"{wanted} bytes for shape {list(shape)} of {row.name}"
        raise InvalidRequest.where(f"{at}/parameters/binary_data_size", expected, shown(size))
    if size > (left := following - position):
        raise MalformedBody.where(at, f"{size} bytes after the JSON (Inference-Header-Content-Length tells where it ends)", str(left))
    return Sent(name, shape), Slot(row, shape, position, position + size, at)


def _outputs(entries: Any) -> tuple[list[str], dict[str, bool]]:
    """The names asked for, and which of them are wanted as bytes, or not."""
    if not isinstance(entries, list):
        raise InvalidRequest.where("/outputs", "a list of outputs", shown(entries))
    names, binary = [], {}
    for i, entry in enumerate(entries):
        at = f"/outputs/{i}"
        demand_known(_object(entry, at), OUTPUT, at)
        name, parameters = _name(entry, at), _object(entry.get("parameters", {}), f"{at}/parameters")
        demand_known(parameters, ("binary_data",), f"{at}/parameters")
        if "binary_data" in parameters:
            binary[name] = _flag(parameters["binary_data"], f"{at}/parameters/binary_data")
        names.append(name)
    return names, binary


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest.where(at, "an object", shown(value))
    return value


def _name(entry: Mapping[str, Any], at: str) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise InvalidRequest.where(f"{at}/name", "a string", shown(name) if "name" in entry else "nothing")
    return name


def _flag(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest.where(at, "true or false", shown(value))
    return value


def _id(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest.where("/id", "a string", shown(value))
    if not is_unicode(value):  # the reply repeats it
        raise InvalidRequest.where("/id", "a string of Unicode text", HALF)
    return value
