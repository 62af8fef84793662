"""Builds the reply from a result, and encodes it."""

from typing import Any

from attend.attention.call import Result
from attend.errors import InvalidRequest
from attend.serving import analysis
from attend.serving.casting import numpy_of
from attend.serving.cost import wire_datatype
from attend.serving.requests import BoundCall, RawRequest
from attend.wire.codec import Decoded, Encoded, Reply
from attend.wire.compression import pack
from attend.wire.schemas.analysis import AnalysisRequest


def encode_reply(bound: BoundCall, result: Result, decoded: Decoded, raw: RawRequest) -> Encoded:
    """Headers and bytes of the reply. Raises InvalidRequest for non-finite numbers, and what `build_reply` raises."""
    encoded = raw.reply_codec.encode(build_reply(bound, result), bound.request.reply, decoded.reply_format)
    return compress(encoded, raw.reply_coding) if raw.reply_coding else encoded


def compress(encoded: Encoded, coding: str) -> Encoded:
    """The reply with this Content-Encoding."""
    return Encoded((*encoded.headers, (b"content-encoding", coding.encode())), pack(encoded.pieces, coding))


def refuse_fully_masked(bound: BoundCall, result: Result) -> None:
    """Raises InvalidRequest for fully masked rows if the request asks for an error."""
    if bound.call.options.fully_masked == "error" and (first := result.first_fully_masked()):
        rows = ", ".join(f"(batch {b}, head {h}, query {i})" for b, h, i in first)
        raise InvalidRequest.where("/fully_masked", "a key to attend to for every row", f"none for {rows}")


def build_reply(bound: BoundCall, result: Result) -> Reply:
    """The outputs under the names and in the order of the request, without the batch axis if the request has none.

    Raises InvalidRequest for fully masked rows if the request asks for an error, and for metrics that overflow.
    """
    if result.fully_masked is not None:
        refuse_fully_masked(bound, result)
    request, layer = bound.request, bound.layer
    if isinstance(request, AnalysisRequest):
        return analysis.build_reply(request, layer, result)
    batched, arrays = request.batched, {}
    for name, tensor in result.tensors.items():
        arrays[name] = numpy_of(tensor if batched else tensor[0])
    tensors: dict[str, Any] = {}
    for name in request.outputs:
        tensors[name] = arrays[name] if name in arrays else _parts(name, arrays)
    datatype = wire_datatype("output", request.reply.datatype, layer.spec)
    session = None if bound.session is None else {"id": bound.session.id, "length": bound.call.masks.num_keys}
    return Reply({"name": layer.name, "fingerprint": layer.fingerprint}, result.fully_masked_rows, datatype, tensors, session=session)


def _parts(name: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """An output that is several arrays: `keys` and `values` of the largest weights, or "0", "1", … for several sequences in one query."""
    if "keys" in arrays:
        return {part: arrays[part] for part in ("keys", "values")}
    return {part.partition(".")[2]: array for part, array in arrays.items() if part.startswith(f"{name}.")}
