"""Decodes and encodes the ModelInfer messages of the Open Inference Protocol over gRPC.

It is not in `wire`, so that clients do not need protobuf. Requests have numbers raw, as the tensors' bytes, or typed, in repeated fields;
replies have them raw. Decoded arrays are views of the message where possible.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from attend.axes import Kind
from attend.errors import InvalidRequest, MalformedBody
from attend.limits import WireLimits
from attend.tensors import Array, Datatype, datatype_of, raw
from attend.web.grpc import messages
from attend.web.grpc.descriptors import DESCRIPTOR
from attend.web.grpc.messages import RAW_OUTPUTS_FIELD, SplitRequest, length_prefixed, request_id, split_request, varints
from attend.wire.arrays import array_of_bytes, require_exact, wire_array
from attend.wire.codec import Buffer, Codec, Decoded, Encoded, Reply
from attend.wire.json.reader import shape_of
from attend.wire.problems import describe_value, validate
from attend.wire.schemas.attend import ReplyOptions
from attend.wire.v2.members import (
    VERSION,
    InputPath,
    V2ReplyFormat,
    datatype_named,
    kind_of,
    members_of,
    refuse_decimals,
    requested_arrays,
    require_input,
    require_version,
    squeeze_per_item,
    translate_problem,
)
from attend.wire.v2.schemas import CodecParameters, InferenceParameters, InputParameters, OutputParameters

CONTENTS = {  # the field for each datatype; FP16 and BF16 have none
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
FIELDS = {field.number: field.name for field in DESCRIPTOR.message_types_by_name["InferTensorContents"].fields}
SHARED_FIELD_TYPES = {"int_contents": np.dtype("<i4"), "uint_contents": np.dtype("<u4")}  # of the fields that several datatypes share
FINAL_RESPONSE_FLAG = "triton_final_response"
INFER_RESPONSE = 2  # field number in ModelStreamInferResponse


def grpc_codec(largest: int, stream: bool = False) -> Codec:
    """Decodes ModelInferRequest; encodes ModelInferResponse, with `stream` ModelStreamInferResponse, of at most `largest` bytes."""
    return Codec(partial(_decode, stream), partial(_encode, stream), writes_text=False, largest_reply=("max_grpc_bytes", largest))


def _decode(
    stream: bool, body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
) -> Decoded:
    """The request of a ModelInferRequest. Raises MalformedBody, InvalidRequest, TooLarge or LayerNotFound."""
    parts = _split(body)
    request, pieces = parts.message, parts.raw
    require_version(request.model_version)
    if not request.inputs:
        raise InvalidRequest.where("/inputs", "a list of inputs", "nothing")
    if pieces and len(pieces) != len(request.inputs):
        expected = f"{len(request.inputs)} pieces, one for each input"
        raise InvalidRequest.where("/raw_input_contents", expected, str(len(pieces)))
    tensors, paths = [], []
    for i, entry in enumerate(request.inputs):
        path, array = _input(entry, pieces[i] if pieces else None, parts.typed[i], f"/inputs/{i}")
        tensors.append((path.name, array))
        paths.append(path)
    options = validate(InferenceParameters, values_of(request.parameters), "/parameters")
    for i, output in enumerate(request.outputs):
        _check_parameters(output.parameters, OutputParameters, f"/outputs/{i}/parameters")
    outputs = tuple(output.name for output in request.outputs)
    members = members_of(request.model_name, tensors, options.model_extra or {}, outputs)
    squeeze_per_item(members)
    refuse_decimals(members)
    marks_final = stream and options.triton_enable_empty_final_response
    reply_format = V2ReplyFormat(request.id, outputs, marks_final=marks_final)
    translate = partial(translate_problem, inputs=tuple(paths), outputs=outputs, model="/model_name")
    return Decoded(members, reply_format, options.seconds, options.sequence, translate)


def _encode(stream: bool, reply: Reply, options: ReplyOptions, reply_format: V2ReplyFormat) -> Encoded:
    """The reply as one message. The tensors are appended without the protobuf library, which would copy them once more."""
    response = messages.ModelInferResponse(model_name=reply.layer["name"], model_version=VERSION, id=reply_format.id)
    response.parameters["fully_masked_rows"].int64_param = reply.fully_masked_rows
    response.parameters["fingerprint"].string_param = reply.layer["fingerprint"]
    if reply_format.marks_final:
        response.parameters[FINAL_RESPONSE_FLAG].bool_param = True
    pieces: list[Buffer] = []
    for name, array in requested_arrays(reply, reply_format.outputs):
        array, _ = wire_array(name, array, reply.datatype, options.nonfinite)
        response.outputs.add(name=name, datatype=datatype_of(array).name, shape=array.shape)
        pieces += [length_prefixed(RAW_OUTPUTS_FIELD, array.nbytes), raw(array)]
    pieces.insert(0, response.SerializeToString())
    if stream:
        pieces.insert(0, length_prefixed(INFER_RESPONSE, sum(map(len, pieces))))
    return (), [b"".join(pieces)]


def refusal_in_stream(body: bytes, detail: str) -> bytes:
    """The reply to a refused request of a stream, with the request's id if that can be read."""
    response = messages.ModelStreamInferResponse(error_message=detail)
    response.infer_response.id = request_id(body)
    return bytes(response.SerializeToString())


def _split(body: bytes) -> SplitRequest:
    """The message and its tensors. Raises MalformedBody or TooLarge."""
    try:
        return split_request(body)
    except DecodeError:
        raise MalformedBody.where("", "a ModelInferRequest", f"{len(body)} bytes of something else") from None


def values_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name, as Python values. Raises InvalidRequest if one has no value."""
    values = {}
    for name, parameter in parameters.items():
        if (choice := parameter.WhichOneof("parameter_choice")) is None:
            raise InvalidRequest.where("/parameters", "a value for every parameter", f"none for {describe_value(name)}")
        values[name] = getattr(parameter, choice)
    return values


def _check_parameters(parameters: Mapping[str, Any], model: type[CodecParameters], at: str) -> None:
    """Raises InvalidRequest for unknown parameters of an input or output. The others have no effect: tensors in replies are always raw."""
    if parameters:
        validate(model, values_of(parameters), at)


def _input(entry: Any, piece: memoryview | None, typed: Mapping[int, bytes | memoryview] | None, at: str) -> tuple[InputPath, Array]:
    """(path, array) of one input. Raises InvalidRequest or MalformedBody."""
    require_input(entry.name, f"{at}/name")
    _check_parameters(entry.parameters, InputParameters, f"{at}/parameters")
    datatype, shape = datatype_named(entry.datatype, kind_of(entry.name), f"{at}/datatype"), shape_of(list(entry.shape), f"{at}/shape")
    if piece is None:
        array = _typed(typed or {}, datatype, shape, f"{at}/contents")
        return InputPath(entry.name, shape, f"/contents/{CONTENTS[datatype.name]}"), array
    if typed is not None:
        raise InvalidRequest.where(at, "either contents or raw_input_contents", "both")
    if len(piece) != math.prod(shape) * datatype.size:
        expected = f"{math.prod(shape) * datatype.size} bytes for shape {list(shape)} of {datatype.name}"
        raise InvalidRequest.where(f"{at}/raw_input_contents", expected, str(len(piece)))
    return InputPath(entry.name, shape), array_of_bytes(piece, datatype, shape, at)


def _typed(contents: Mapping[int, bytes | memoryview], datatype: Datatype, shape: tuple[int, ...], at: str) -> Array:
    """The array of an input's typed contents (field number -> packed numbers). Raises InvalidRequest or MalformedBody."""
    if datatype.name not in CONTENTS:
        raise InvalidRequest.where(at, f"{datatype.name} in raw_input_contents", "no such field in typed contents")
    field = CONTENTS[datatype.name]
    packed = {FIELDS.get(number, str(number)): numbers for number, numbers in contents.items()}
    if other := packed.keys() - {field}:
        raise InvalidRequest.where(f"{at}/{min(other)}", f"{field} alone for {datatype.name}", "another field")
    numbers, field_type = packed.get(field, b""), SHARED_FIELD_TYPES.get(field, datatype.numpy)
    try:
        wide = np.frombuffer(numbers, field_type) if datatype.kind == "float" else varints(numbers, field_type)
    except (DecodeError, ValueError):  # NumPy raises ValueError for an incomplete number
        raise MalformedBody.where(f"{at}/{field}", "packed numbers", "something else") from None
    if len(wide) != math.prod(shape):
        raise InvalidRequest.where(at, f"{math.prod(shape)} values for shape {list(shape)}", str(len(wide)))
    array: Array = wide.astype(datatype.numpy, copy=not wide.flags.aligned)  # a view of the message may not be
    require_exact(array, wide, datatype, f"{at}/{field}")
    return array.reshape(shape)
