"""What a V2 request says, in whatever it came, -> the members of a request for attention. Knows neither JSON bodies nor protobuf.

Tensors go under their field names. A field that is no tensor is a request parameter; as parameters are strings, numbers and booleans, one
that has members of its own (`select`, `window`, …) is given as JSON text. Nothing is passed over: what has no meaning here is refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from service.errors import InvalidRequest, MalformedBody, Problem, RequestError, TooLarge
from service.tensors import DATATYPES, Array, Datatype
from service.wire.arrays import Kind
from service.wire.json.strict import parse_strictly
from service.wire.limits import JSON_TEXT_BYTES
from service.wire.problems import pointer, shown
from service.wire.reply import Reply
from service.wire.safetensors import LISTS
from service.wire.schemas.attend import WHICH_MASK, AttendRequest, Output

VERSION = "1"  # of every model
TENSORS = {*AttendRequest.tensors, *LISTS}
INPUTS = [name for name in AttendRequest.model_fields if name in TENSORS]  # in the order that people read them in
OPTIONS = {*AttendRequest.model_fields} - TENSORS - {"layer", "outputs"} | LISTS
NESTED = {"window", "dropout", "select", "reply", "tokens"}
PER_ITEM = ("valid_lens", "query_offset")  # a number for each batch item
OUTPUTS = get_args(Output)
BY_DEFAULT: tuple[str, ...] = tuple(AttendRequest.model_fields["outputs"].get_default(call_default_factory=True))
KEYS = "attention_weights.keys"
PARTS = (KEYS, "attention_weights.values")  # outputs in place of the weights, where the largest are selected
PROTOCOL = {"binary_data_output", "priority", "timeout"}  # parameters of the protocol's own
# Whether a reply of a stream (gRPC) is to say that it is the last one to its request. perf_analyzer sends it outside of streams, too.
FINAL = "triton_enable_empty_final_response"
# Parameters that clients add of their own accord, by where they stand. They say nothing that would change an answer: which of MLServer's
# codecs makes objects of a tensor, and how many bytes it has or whether it goes as bytes, where the protocol decides that (over gRPC).
IGNORED = {
    "request": ("content_type",),
    "input": ("content_type", "binary_data_size"),
    "output": ("content_type", "binary_data"),
}


def members_of(layer: str, tensors: Sequence[tuple[str, Any]], parameters: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    """The members of an AttendRequest; `drop_columns` is still to come.

    `tensors` are arrays, or what stands for them, in the order they came; `outputs` the requested names, none where the caller left them
    open. Raises InvalidRequest or MalformedBody for what stands twice or has no meaning here.
    """
    members: dict[str, Any] = {}
    for i, (name, array) in enumerate(tensors):
        if name in members:
            raise MalformedBody.where(f"/inputs/{i}/name", "each input once", f'"{name}" twice')
        members[name] = array
    if "query" not in members:
        raise InvalidRequest.where("/inputs", "an input called query", ", ".join(members))
    for name, value in parameters.items():
        if name in PROTOCOL or name in IGNORED["request"]:
            continue
        at = "/parameters" + pointer([name])
        if name == FINAL and isinstance(value, bool):
            continue
        if name not in OPTIONS:
            raise InvalidRequest.where(at, f"one of {', '.join(sorted(OPTIONS | PROTOCOL))}", "another parameter")
        if name in members:
            raise InvalidRequest.where(at, f"{name} either as an input or as a parameter", "both")
        members[name] = _option(name, value, at)
    if outputs:
        members["outputs"] = _outputs(outputs, members.get("select"))
    members["layer"] = layer
    return members


def arrays_asked(reply: Reply, names: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """The reply's arrays that go by these names, in their order; all of them where the caller named none."""
    arrays = dict(reply.arrays())
    for name in names or reply.tensors:
        yield from ((part, array) for part, array in arrays.items() if name in (part, part.partition(".")[0]))


def refuse_decimals(members: Mapping[str, Any]) -> None:
    """Raises InvalidRequest where numbers are to be rounded in a reply that has none in text. Bytes hold numbers as they are."""
    reply = members.get("reply")
    if isinstance(reply, dict) and reply.get("decimals") is not None:
        raise InvalidRequest.where(
            "/parameters/reply/decimals", "an output in JSON, whose numbers are text to round", "outputs in bytes alone"
        )


def read_nested(text: str, at: str) -> Any:
    """What JSON text inside a request says. Raises the refusals of a body, with the place in the text and where the text stands."""
    size = len(text) if len(text) > JSON_TEXT_BYTES else len(encoded := text.encode(errors="surrogatepass"))
    if size > JSON_TEXT_BYTES:
        raise TooLarge.where(at, f"JSON text of at most {JSON_TEXT_BYTES} bytes", str(size))
    try:
        return parse_strictly(encoded, "text")
    except RequestError as refusal:
        raise type(refusal)(problems=[Problem(at + p.at, p.expected, p.got) for p in refusal.problems]) from None


def _outputs(names: Sequence[str], select: Any) -> list[str]:
    """The outputs of an AttendRequest that hold the requested ones."""
    outputs: list[str] = []
    for i, name in enumerate(names):
        at, output = f"/outputs/{i}", name.partition(".")[0]
        if name not in (*OUTPUTS, *PARTS):
            raise InvalidRequest.where(at, f"one of {', '.join((*OUTPUTS, *PARTS))}", shown(name))
        if name in names[:i] or (name in PARTS and output in names):
            raise InvalidRequest.where(at, "each output once", f'"{name}" twice')
        if name in PARTS and not (isinstance(select, dict) and select.get("top_k") is not None):
            raise InvalidRequest.where(at, "select.top_k among the parameters, since the largest weights are asked for", "nothing")
        if output not in outputs:
            outputs.append(output)
    return outputs


def drop_columns(members: dict[str, Any]) -> None:
    """Arrays of a number for each item: [b, 1] becomes [b], since a tensor of a model that batches is announced with an axis besides."""
    for name in PER_ITEM:
        array, query = members.get(name), members.get("query")
        if isinstance(array, np.ndarray) and isinstance(query, np.ndarray) and query.ndim == 3 and array.shape == (query.shape[0], 1):
            members[name] = array[:, 0]


def seconds_of(parameters: Mapping[str, Any]) -> float | None:
    """The parameter `timeout`, microseconds on the wire; None where there is none, or 0. Checks `priority`, too: there is one level."""
    for name, number in (("timeout", "a whole number of microseconds"), ("priority", "a whole number")):
        value = parameters.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**64:
            raise InvalidRequest.where(f"/parameters/{name}", f"{number} from 0 to {2**64 - 1}", shown(value))
    return parameters.get("timeout", 0) / 1e6 or None


def demand_known(entry: Iterable[str], known: Sequence[str], at: str) -> None:
    """Raises InvalidRequest where an object of a request has a member that means nothing here."""
    for name in entry:
        if name not in known:
            expected = f"one of {', '.join(known)}" if known else "no members"
            raise InvalidRequest.where(at + pointer([name]), expected, "another member")


def demand_input(name: str, at: str) -> None:
    """Raises InvalidRequest where no input has that name, saying which there are."""
    if name in TENSORS:
        return
    if name in OPTIONS:
        raise InvalidRequest.where(at, f"{name} among the parameters", "an input of that name")
    if name == "mask":
        raise InvalidRequest.where(at, WHICH_MASK, shown(name))
    raise InvalidRequest.where(at, f"one of {', '.join(INPUTS)}", shown(name))


def datatype_named(name: Any, kind: Kind, at: str) -> Datatype:
    """The row of a V2 datatype that a tensor of this kind may have; `...` is one left out. Raises InvalidRequest for any other."""
    known = [row.name for row in DATATYPES.values() if row.kind != "bool" or kind == "mask"]
    if not isinstance(name, str) or name not in known:
        raise InvalidRequest.where(at, "one of " + " ".join(known), "nothing" if name is ... else shown(name))
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
        nested = read_nested(value, at)
        if name == "reply" and isinstance(nested, dict) and "form" in nested:
            raise InvalidRequest.where(f"{at}/form", "no field of that name: the protocol has forms of its own", shown(nested["form"]))
        return nested
    if name in LISTS and isinstance(value, str) and value.startswith("["):
        return read_nested(value, at)
    return value
