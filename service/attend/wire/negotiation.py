"""The codecs by media type, and content negotiation (RFC 9110, section 12): the media types of body and reply, from request headers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from attend.axes import Kind
from attend.errors import NotAcceptable, UnsupportedMediaType
from attend.limits import WireLimits
from attend.wire import safetensors
from attend.wire.codec import Buffer, Codec, Decoded, Encoded, Headers, Reply
from attend.wire.json import reader as json_reader
from attend.wire.json.writer import encode_json
from attend.wire.schemas.attend import ReplyOptions

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
HTML = "text/html"
PROBLEM_JSON = "application/problem+json"  # of refusals (RFC 9457)
# media type -> `figure.format`, in order of preference
PICTURES: dict[str, Literal["png", "svg", "html"]] = {"image/png": "png", "image/svg+xml": "svg", "text/html": "html"}


class AttendCodec(Codec):
    """A format of the service's own endpoints, which `parse` reads and `write` writes."""

    def __init__(
        self,
        media_type: str,
        parse: Callable[..., dict[str, Any]],
        write: Callable[[Reply, ReplyOptions], list[Buffer]],
        *,
        writes_text: bool,
        largest_text: float = math.inf,
    ) -> None:
        self.parse, self.write, self.writes_text, self.largest_text = parse, write, writes_text, largest_text
        self.headers: Headers = ((b"content-type", media_type.encode()),)

    def decode(
        self, body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
    ) -> Decoded:
        return Decoded(self.parse(body, kinds, limits, shapes_alone), reply_format=parameters)

    def encode(self, reply: Reply, options: ReplyOptions, reply_format: Any = None) -> Encoded:
        return self.headers, self.write(reply, options)


CODECS: dict[str, Codec] = {  # in order of preference
    JSON: AttendCodec(JSON, json_reader.parse, encode_json, writes_text=True),
    SAFETENSORS: AttendCodec(
        SAFETENSORS,
        safetensors.parse,
        safetensors.encode,
        writes_text=False,
        largest_text=safetensors.MAX_HEADER_BYTES // 2,  # the other half for the tensors' entries
    ),
}
SUPPORTED = tuple(CODECS)
BINARY_TYPES = tuple(media_type for media_type in CODECS if media_type != JSON)  # in which a request to compute may be sent, besides JSON
FILE_CODEC = CODECS[SAFETENSORS]  # whose bodies may also be files: weights of a layer, rows of a session


def media_type_of_body(content_type: str) -> str:
    """The media type of a body. A body without Content-Type, or with curl's default one, is JSON. Raises UnsupportedMediaType."""
    media = content_type.partition(";")[0].strip().lower()
    if media in ("", "application/x-www-form-urlencoded", "text/json") or media == JSON or media.endswith("+json"):
        return JSON
    if media in SUPPORTED:
        return media
    raise UnsupportedMediaType.where("", f"a body of type {' or '.join(SUPPORTED)}", f'"{media}"')


def media_type_of_reply(accept: str, supported: Sequence[str] = SUPPORTED) -> str:
    """The media type of the reply: the supported one with the highest quality, the first one of several. Raises NotAcceptable."""
    if best := accepted_type(accept, supported):
        return best
    raise NotAcceptable.where("", f"an Accept with {' or '.join(supported)}", f'"{accept[:100]}"')


def accepted_type(accept: str, supported: Sequence[str]) -> str:
    """The media type of the reply, "" if none that is supported is accepted."""
    if accept in ("", "*/*"):
        return supported[0]
    if accept in supported:
        return accept
    ranges = sorted((name_and_quality(part) for part in accept.split(",") if part.strip()), key=lambda named: named[1])
    if not ranges:
        return supported[0]
    qualities = dict(ranges)  # of a repeated range, the highest quality

    def quality(media: str) -> float:
        """The quality of the most specific range that matches."""
        return next((qualities[name] for name in (media, media.partition("/")[0] + "/*", "*/*") if name in qualities), 0.0)

    best = max(supported, key=quality)
    return best if quality(best) else ""


def name_and_quality(part: str) -> tuple[str, float]:
    """Name, in lower case, and q-value of one element of an Accept header. The q-value is 1 if left out, and 0 if malformed."""
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                return name, 0.0
    return name, 1.0
