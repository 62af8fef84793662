"""The codecs by media type, and content negotiation (RFC 9110, section 12): the media types of body and reply, from request headers."""

from collections.abc import Sequence
from typing import Literal

from attend.errors import NotAcceptable, UnsupportedMediaType
from attend.wire import safetensors
from attend.wire.codec import Codec
from attend.wire.json import reader, writer

JSON, SAFETENSORS = writer.MEDIA_TYPE, safetensors.MEDIA_TYPE
HTML = "text/html"
PROBLEM_JSON = "application/problem+json"  # of refusals (RFC 9457)
# media type -> `figure.format`, in order of preference
PICTURES: dict[str, Literal["png", "svg", "html"]] = {"image/png": "png", "image/svg+xml": "svg", "text/html": "html"}
CODECS: dict[str, Codec] = {  # in order of preference
    JSON: Codec(reader.decode, writer.encode),
    SAFETENSORS: Codec(safetensors.decode, safetensors.encode, writes_text=False, largest_text=safetensors.LARGEST_TEXT),
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
