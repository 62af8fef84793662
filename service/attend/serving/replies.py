"""Encodes the reply of a result."""

from attend.attention.call import Result
from attend.serving.binding import BoundCall, refuse_fully_masked
from attend.serving.requests import RawRequest
from attend.wire.codec import Decoded, Encoded
from attend.wire.compression import pack


def encode_reply(bound: BoundCall, result: Result, decoded: Decoded, raw: RawRequest) -> Encoded:
    """Headers and bytes of the reply.

    Raises InvalidRequest for non-finite numbers, for fully masked rows if the request asks for an error, and what `build_reply` raises.
    """
    if result.fully_masked is not None:
        refuse_fully_masked(bound, result)
    reply = bound.binding.build_reply(bound, result)
    encoded = raw.reply_codec.encode(reply, bound.request.reply, decoded.reply_format)
    return compress(encoded, raw.reply_coding) if raw.reply_coding else encoded


def compress(encoded: Encoded, coding: str) -> Encoded:
    """The reply with this Content-Encoding."""
    return Encoded((*encoded.headers, (b"content-encoding", coding.encode())), pack(encoded.pieces, coding))
