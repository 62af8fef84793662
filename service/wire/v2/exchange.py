"""One V2 request over HTTP and its reply, bytes both ways, with the binary tensor extension.

A body is a JSON object, followed by the bytes of those tensors that say `binary_data_size`, in the order they stand in it; the header
Inference-Header-Content-Length tells where the JSON ends. Arrays view the body; a reply is written from the arrays' own memory. Unlike the
other forms this one has to remember something of the request: its id, and which outputs are wanted as bytes.
"""

import math
from collections.abc import Mapping
from typing import Any

import orjson

from service.errors import InvalidRequest, MalformedBody
from service.tensors import Array, datatype_of, raw
from service.wire.arrays import Kind, array_over
from service.wire.documents import ReplyOptions
from service.wire.json_form import Reader, shape_of
from service.wire.limits import WireLimits
from service.wire.refusals import HALF, is_unicode, shown
from service.wire.reply import Buffer, Reply, text_of, wire_array
from service.wire.v2.header import read_header
from service.wire.v2.members import (
    BY_DEFAULT,
    KEYS,
    VERSION,
    Inference,
    arrays_asked,
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


class Exchange:
    """A request to one model. `header_length` is what the header of that name says, "" without one.

    After `parse`, `timeout` is what the request says of it, in seconds, and `places` is where everything of it stands; after `encode`,
    `reply_header_length` is the length of the JSON where bytes follow it, else None.
    """

    def __init__(self, model: str, header_length: str) -> None:
        self.model, self.header_length = model, header_length
        self.id = ""
        self.timeout: float | None = None
        self.places: Places | None = None
        self.reply_header_length: int | None = None
        self.outputs: list[str] = []
        self.binary = False  # unless an output says otherwise
        self.binary_outputs: dict[str, bool] = {}

    def parse(self, body: bytes, kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False) -> dict[str, Any]:
        """The members of a request for attention. Raises MalformedBody, InvalidRequest or TooLarge, with the place in the header."""
        size = self._header_size(len(body))
        header, reader = read_header(body if size == len(body) else body[:size], limits)
        demand_known(header, REQUEST, "")
        for name, value in (("model_name", self.model), ("model_version", VERSION)):
            if header.get(name, value) != value:
                raise InvalidRequest.where(f"/{name}", f'"{value}", as in the path', shown(header[name]))
        inputs = header.get("inputs")
        if not isinstance(inputs, list) or not inputs:
            raise InvalidRequest.where("/inputs", "a list of inputs", shown(inputs) if "inputs" in header else "nothing")
        rest = memoryview(body)[size:]
        tensors, places, position = [], [], 0
        for i, entry in enumerate(inputs):
            sent, array, taken = _input(entry, f"/inputs/{i}", rest[position:], reader)
            tensors.append((sent.name, array))
            places.append(sent)
            position += taken
        if position != len(rest):
            raise MalformedBody.where("", f"{position} bytes of tensors after the JSON", str(len(rest)))
        reader.look_again()
        parameters = _object(header.get("parameters", {}), "/parameters")
        self.id, self.timeout = _id(header.get("id", "")), seconds_of(parameters)
        self.binary = _flag(parameters.get("binary_data_output", False), "/parameters/binary_data_output")
        self.outputs = self._outputs(header.get("outputs") or [])
        members = members_of(self.model, Inference(tensors, parameters, self.outputs, self.id))
        if not any(self._in_text(name) for name in self.outputs or BY_DEFAULT if name != KEYS):
            refuse_decimals(members)
        self.places = Places(places)
        return members

    def encode(self, reply: Reply, options: ReplyOptions) -> list[Buffer]:
        """The reply: the JSON, then the bytes of the outputs that are wanted as such."""
        outputs: list[dict[str, Any]] = []
        pieces: list[Buffer] = []
        binary = False
        for name, array in arrays_asked(reply, self.outputs):
            array, odd = wire_array(name, array, reply.datatype, options)
            entry: dict[str, Any] = {"name": name, "shape": array.shape, "datatype": datatype_of(array).name}
            if self._in_text(name):
                entry["data"] = text_of(name, array.reshape(-1), odd, options)
            else:
                binary, entry["parameters"] = True, {"binary_data_size": array.nbytes}
                if array.nbytes:
                    pieces.append(raw(array))
            outputs.append(entry)
        document = {"model_name": self.model, "model_version": VERSION, **({"id": self.id} if self.id else {})}
        told = {"fully_masked_rows": reply.fully_masked_rows, "fingerprint": reply.layer["fingerprint"]}
        header = orjson.dumps({**document, "parameters": told, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
        self.reply_header_length = len(header) if binary else None
        return [header, *pieces]

    def _header_size(self, received: int) -> int:
        """Bytes of JSON at the beginning of the body."""
        if not self.header_length:
            return received
        wanted = "an Inference-Header-Content-Length within the body"
        if not self.header_length.isascii() or not self.header_length.isdigit() or len(self.header_length) > 18:
            raise MalformedBody.where("", wanted, f'"{self.header_length[:40]}"')
        size = int(self.header_length)
        if size > received:
            raise MalformedBody.where("", wanted, f"{size} for {received} bytes")
        if not size:  # a raw request: the bytes of the only input a model has
            raise InvalidRequest.where("", "a JSON object that names the inputs, of which there are several", "bytes alone")
        return size

    def _in_text(self, name: str) -> bool:
        """Whether an output goes in the JSON."""
        wishes = self.binary_outputs
        return not wishes.get(name, wishes.get(name.partition(".")[0], self.binary))

    def _outputs(self, entries: Any) -> list[str]:
        """The names asked for; remembers which are wanted as bytes."""
        if not isinstance(entries, list):
            raise InvalidRequest.where("/outputs", "a list of outputs", shown(entries))
        names = []
        for i, entry in enumerate(entries):
            at = f"/outputs/{i}"
            demand_known(_object(entry, at), OUTPUT, at)
            name, parameters = _name(entry, at), _object(entry.get("parameters", {}), f"{at}/parameters")
            demand_known(parameters, ("binary_data",), f"{at}/parameters")
            if "binary_data" in parameters:
                self.binary_outputs[name] = _flag(parameters["binary_data"], f"{at}/parameters/binary_data")
            names.append(name)
        return names


def _input(entry: Any, at: str, rest: memoryview, reader: Reader) -> tuple[Sent, Array, int]:
    """One input: how it was sent, its array, and how many of the bytes that follow are its own."""
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
        return Sent(name, shape, "/data", bool(len(data)) and hasattr(data[0], "__len__")), array, 0
    size, wanted = parameters["binary_data_size"], math.prod(shape) * row.size
    if type(size) is not int or size != wanted:
        expected = f"{wanted} bytes for shape {list(shape)} of {row.name}"
        raise InvalidRequest.where(f"{at}/parameters/binary_data_size", expected, shown(size))
    if size > len(rest):
        raise MalformedBody.where(at, f"{size} bytes after the JSON (Inference-Header-Content-Length tells where it ends)", str(len(rest)))
    return Sent(name, shape), array_over(rest[:size], row, shape, at), size


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
