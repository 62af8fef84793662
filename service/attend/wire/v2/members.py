"""Converts the inputs and parameters of a V2 request to the members of an AttendRequest, and pointers to these members back.

Tensors have their field names. A field that is no tensor is a request parameter; parameters are strings, numbers and booleans, so a nested
field (`select`, `window`, …) is JSON text. Unknown names are refused. This module is independent of JSON and protobuf.

Errors found during decoding point into the V2 request. Later ones point into the AttendRequest: `translate_problem` turns a tensor field
into an input, by its index, every other field and the sequence into a parameter, and the layer into the model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
from pydantic import BaseModel

from attend.axes import TENSOR_FIELDS, Kind
from attend.errors import InvalidRequest, LayerNotFound, MalformedBody, Problem, did_you_mean, pointer
from attend.tensors import DATATYPES, Array, Datatype
from attend.wire.codec import Decoded, Reply, in_places
from attend.wire.json.strict import parse_nested
from attend.wire.problems import describe_value, one_of
from attend.wire.safetensors import LIST_FIELDS
from attend.wire.schemas.attend import AttendRequest


def has_members(annotation: Any) -> bool:
    """Whether a value of this type may be an object."""
    return (isinstance(annotation, type) and issubclass(annotation, BaseModel)) or any(map(has_members, get_args(annotation)))


VERSION = "1"  # of every model
CONFIG_PLACE = "/parameters/config"
INPUT_FIELDS = {*AttendRequest.tensor_kinds, *LIST_FIELDS}
INPUT_NAMES = [name for name in AttendRequest.model_fields if name in INPUT_FIELDS]
PROTOCOL_PARAMETERS = (
    *("binary_data_output", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout"),
    "triton_enable_empty_final_response",
)
PARAMETER_FIELDS = {*AttendRequest.model_fields} - INPUT_FIELDS - {"layer", "outputs"} | LIST_FIELDS
JSON_TEXT_FIELDS = {name for name in PARAMETER_FIELDS if has_members(AttendRequest.model_fields[name].annotation)}
PER_ITEM_FIELDS = {name for name, field in TENSOR_FIELDS.items() if ("b",) in field.shapes} | LIST_FIELDS  # one number per batch item
DEFAULT_OUTPUTS: tuple[str, ...] = tuple(AttendRequest.model_fields["outputs"].get_default(call_default_factory=True, validated_data={}))
TOP_K_KEYS = "attention_weights.keys"
TOP_K_OUTPUTS = (TOP_K_KEYS, "attention_weights.values")  # outputs that replace the weights if `select.top_k` is set


def members_of(layer: str, tensors: Sequence[tuple[str, Any]], parameters: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    """The members of an AttendRequest; the caller must still call `squeeze_per_item`.

    `tensors`: (name, array or V2Input) in the order of the request; `parameters`: those of the request that the protocol does not
    define; `outputs`: the requested names, empty for the default. Raises InvalidRequest or MalformedBody for repeated or unknown names.
    """
    members: dict[str, Any] = {}
    for i, (name, array) in enumerate(tensors):
        if name in members:
            raise MalformedBody.where(f"/inputs/{i}/name", "each input once", f'"{name}" twice')
        members[name] = array
    if "query" not in members:
        raise InvalidRequest.where("/inputs", "an input called query", ", ".join(sorted(members)))
    for name, value in parameters.items():
        at = "/parameters" + pointer([name])
        if name not in PARAMETER_FIELDS:
            raise _unknown(name, at, (*PARAMETER_FIELDS, *PROTOCOL_PARAMETERS), describe_value(name))
        if name in members:
            raise InvalidRequest.where(at, f"{name} either as an input or as a parameter", "both")
        members[name] = _option(name, value, at)
    if outputs:
        members["outputs"] = _outputs(outputs, members.get("select"))
    members["layer"] = layer
    return members


def _option(name: str, value: Any, at: str) -> Any:
    """The value of an option; JSON text is parsed. AttendRequest validates the value later."""
    if not isinstance(value, str | int | float | bool):
        raise InvalidRequest.where(at, "a string, a number or a boolean", describe_value(value))
    if name in JSON_TEXT_FIELDS:
        if not isinstance(value, str):
            raise InvalidRequest.where(at, "JSON text", describe_value(value))
        nested = parse_nested(value, at)
        if name == "reply" and isinstance(nested, dict) and "form" in nested:
            raise InvalidRequest.where(
                f"{at}/form", "no field of that name, since the protocol defines the form of outputs", describe_value(nested["form"])
            )
        return nested
    if name in LIST_FIELDS and isinstance(value, str) and value.startswith("["):
        return parse_nested(value, at)
    return value


def _outputs(names: Sequence[str], select: Any) -> list[str]:
    """The outputs of an AttendRequest that contain the requested ones. Raises InvalidRequest for unknown or repeated names."""
    outputs: list[str] = []
    for i, name in enumerate(names):
        at, output = f"/outputs/{i}", name.partition(".")[0]
        if output != name and name not in TOP_K_OUTPUTS:
            raise InvalidRequest.where(at, f"an output of the layer, {' or '.join(TOP_K_OUTPUTS)}", describe_value(name))
        if name in names[:i] or (name in TOP_K_OUTPUTS and output in names):
            raise InvalidRequest.where(at, "each output once", f'"{name}" twice')
        if name in TOP_K_OUTPUTS and not (isinstance(select, dict) and select.get("top_k") is not None):
            raise InvalidRequest.where(at, f"select.top_k among the parameters, which {name} requires", "nothing")
        if output not in outputs:
            outputs.append(output)
    return outputs


def decode_config(text: str) -> Decoded:
    """The member `spec` of a request to load a model, whose parameter `config` has it as JSON text. Raises what `parse_nested` raises."""
    return Decoded({"spec": parse_nested(text, CONFIG_PLACE)}, translate=partial(in_places, places={"spec": CONFIG_PLACE}))


def squeeze_per_item(members: dict[str, Any]) -> None:
    """Replaces arrays [b, 1] of one number per item by [b]: the metadata announces them with a second axis."""
    for name in PER_ITEM_FIELDS:
        array, query = members.get(name), members.get("query")
        if isinstance(array, np.ndarray) and isinstance(query, np.ndarray) and query.ndim == 3 and array.shape == (query.shape[0], 1):
            members[name] = array[:, 0]


def refuse_decimals(members: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if `reply.decimals` is set, for a reply whose outputs are all bytes, which are not rounded."""
    reply = members.get("reply")
    if isinstance(reply, dict) and reply.get("decimals") is not None:
        raise InvalidRequest.where(
            "/parameters/reply/decimals", "an output in JSON, whose numbers are text to round", "outputs in bytes alone"
        )


def require_version(version: str | None) -> None:
    """Raises LayerNotFound for a version other than VERSION, the only one of every model."""
    if version not in (None, "", VERSION):
        raise LayerNotFound.where("", f"version {VERSION}", describe_value(version))


def require_input(name: str, at: str) -> None:
    """Raises InvalidRequest, with the known names, if no input has that name."""
    if name in INPUT_FIELDS:
        return
    if name in PARAMETER_FIELDS:
        raise InvalidRequest.where(at, f"{name} among the parameters", "an input of that name")
    raise _unknown(name, at, INPUT_NAMES, describe_value(name))


def _unknown(name: str, at: str, known: Iterable[str], got: str) -> InvalidRequest:
    """The error of an unknown input or parameter: what its name means in other libraries, or the known names."""
    instead = AttendRequest.expected_instead.get(name)
    return InvalidRequest.where(at, instead or one_of(known), got + ("" if instead else did_you_mean(name, known)))


def kind_of(name: str) -> Kind:
    return AttendRequest.tensor_kinds.get(name, "number")


def datatype_named(name: Any, kind: Kind, at: str) -> Datatype:
    """The datatype of that name. Raises InvalidRequest if this kind of tensor may not have it."""
    known = [datatype.name for datatype in DATATYPES.values() if datatype.kind != "bool" or kind == "mask"]
    if not isinstance(name, str) or name not in known:
        raise InvalidRequest.where(at, "one of " + " ".join(known), describe_value(name) + did_you_mean(name, known))
    return DATATYPES[name]


@dataclass(frozen=True, slots=True)
class V2ReplyFormat:
    """What the reply repeats or needs of its request. Over gRPC all outputs are bytes."""

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


def requested_arrays(reply: Reply, names: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """The reply's arrays with these names, in this order; all arrays if `names` is empty."""
    arrays = dict(reply.arrays())
    for name in names or reply.tensors:
        yield from ((part, array) for part, array in arrays.items() if name in (part, part.partition(".")[0]))


class InputPath(NamedTuple):
    """An input of the V2 request. `numbers`: the pointer from the input to its elements, "" if they are bytes."""

    name: str
    shape: tuple[int, ...]
    numbers: str = ""
    nested: bool = False


def translate_problem(problem: Problem, inputs: Sequence[InputPath], outputs: Sequence[str], model: str = "") -> Problem:
    """The same problem, with a pointer into the V2 request that has these inputs and outputs. `model`: the pointer to the model's name, ""
    if the name is in the URL."""
    name, *index = problem.at.split("/")[1:] or [""]
    if name == "layer":
        return replace(problem, at=model)
    if name == "sequence":
        return replace(problem, at="/parameters/sequence_id")
    if name == "outputs" and outputs and index:
        names = [output.partition(".")[0] for output in outputs]
        return replace(problem, at=f"/outputs/{names.index([*dict.fromkeys(names)][int(index[0])])}")
    for i, input_path in enumerate(inputs):
        if input_path.name == name:
            return _in_input(problem, f"/inputs/{i}", input_path, index)
    if name in PARAMETER_FIELDS:
        return replace(problem, at=f"/parameters{problem.at}")
    return replace(problem, at="/inputs") if name in INPUT_FIELDS else problem


def _in_input(problem: Problem, at: str, input_path: InputPath, parts: Sequence[str]) -> Problem:
    """Translates a problem of an input or its element `parts`. The pointer loses the input's name, so the message names it."""
    index = [int(part) for part in parts if part.isdigit()]
    shape = input_path.shape
    got = problem.got if input_path.name in problem.expected else f"{problem.got} in {input_path.name}"
    if not index:
        return replace(problem, at=at, got=got)
    if len(index) == len(shape) - 1 and shape[-1] == 1:
        index.append(0)  # [b, 1] is read as [b]
    if not input_path.numbers or len(index) != len(shape):
        return replace(problem, at=at, got=f"{problem.got} as element {index} of {input_path.name}")
    if input_path.nested:
        return replace(problem, at=at + input_path.numbers + "".join(f"/{i}" for i in index), got=got)
    flat = 0
    for i, length in zip(index, shape, strict=True):
        flat = flat * length + i
    return replace(problem, at=f"{at}{input_path.numbers}/{flat}", got=got)
