"""What a V2 request says, in whatever it came, -> the members of a request for attention. Knows neither JSON bodies nor protobuf.

Tensors go under their field names. A field that is no tensor is a request parameter; as parameters are strings, numbers and booleans, one
that has members of its own (`select`, `window`, …) is given as JSON text. Nothing is passed over: what has no meaning here is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.errors import InvalidRequest, MalformedBody
from service.tensors import DATATYPES, Array, Datatype
from service.wire.arrays import Kind
from service.wire.documents import AttendRequest
from service.wire.refusals import pointer, shown
from service.wire.safetensors_form import LISTS
from service.wire.scan import parse_strictly

VERSION = "1"  # of every model
TENSORS = {*AttendRequest.tensors, *LISTS}
OPTIONS = {*AttendRequest.model_fields} - TENSORS - {"layer", "outputs"} | LISTS
NESTED = {"window", "dropout", "select", "reply", "tokens"}
PROTOCOL = {"binary_data_output", "priority", "timeout"}  # parameters of the protocol's own


@dataclass(slots=True)
class Inference:
    """A V2 request. `tensors` in the order they came; `outputs` are the names asked for, none where the caller left that open."""

    tensors: list[tuple[str, Array]]
    parameters: dict[str, Any] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    id: str = ""


def members_of(layer: str, inference: Inference) -> dict[str, Any]:
    """The members of an AttendRequest. Raises InvalidRequest or MalformedBody for what stands twice or has no meaning here."""
    members: dict[str, Any] = {}
    for i, (name, array) in enumerate(inference.tensors):
        if name in members:
            raise MalformedBody.where(f"/inputs/{i}/name", "each input once", f'"{name}" twice')
        # an option that came as a tensor is refused by its own words, and so is a name that means nothing here
        members[name] = array if name in TENSORS else {"tensor": list(array.shape)}
    if "layer" in members or "outputs" in members:
        raise InvalidRequest.where("/inputs", "no input of that name", "layer or outputs")
    for name, value in inference.parameters.items():
        if name in PROTOCOL:
            continue
        at = "/parameters" + pointer([name])
        if name not in OPTIONS:
            raise InvalidRequest.where(at, f"one of {', '.join(sorted(OPTIONS | PROTOCOL))}", "another parameter")
        if name in members:
            raise InvalidRequest.where(at, f"{name} either as an input or as a parameter", "both")
        members[name] = _option(name, value, at)
    if inference.outputs:
        members["outputs"] = inference.outputs
    members["layer"] = layer
    return members


def seconds_of(parameters: Mapping[str, Any]) -> float | None:
    """The parameter `timeout`, microseconds on the wire; None where there is none, or 0. Checks `priority`, too: there is one level."""
    for name in ("timeout", "priority"):
        value = parameters.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**64:
            raise InvalidRequest.where(f"/parameters/{name}", "a whole number", shown(value))
    return parameters.get("timeout", 0) / 1e6 or None


def demand_known(entry: Mapping[str, Any], known: Sequence[str], at: str) -> None:
    """Raises InvalidRequest where an object of a request has a member that means nothing here."""
    for name in entry:
        if name not in known:
            raise InvalidRequest.where(at + pointer([name]), f"one of {', '.join(known)}", "another member")


def datatype_named(name: Any, at: str) -> Datatype:
    """The row of a V2 datatype. Raises InvalidRequest for any other, BYTES among them."""
    if not isinstance(name, str) or name not in DATATYPES:
        raise InvalidRequest.where(at, "one of " + " ".join(DATATYPES), shown(name))
    return DATATYPES[name]


def kind_of(name: str) -> Kind:
    return AttendRequest.tensors.get(name, "number")


def _option(name: str, value: Any, at: str) -> Any:
    """The value of an option, JSON text read. How it is refused from here on, the request's own model says."""
    if not isinstance(value, str | int | float | bool):
        raise InvalidRequest.where(at, "a string, a number or a boolean", shown(value))
    if name in NESTED:
        if not isinstance(value, str):
            raise InvalidRequest.where(at, "JSON text", shown(value))
        nested = parse_strictly(value.encode(errors="surrogatepass"))
        if name == "reply" and isinstance(nested, dict) and "form" in nested:
            raise InvalidRequest.where(f"{at}/form", "no field of that name: the protocol has forms of its own", shown(nested["form"]))
        return nested
    if name in LISTS and isinstance(value, str) and value.startswith("["):
        return parse_strictly(value.encode(errors="surrogatepass"))
    return value
