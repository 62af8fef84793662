"""Which form a body has and which the caller wants back: headers in, names of forms out. RFC 9110 section 12, as far as two forms need."""

from collections.abc import Sequence
from typing import Literal

from service.errors import NotAcceptable, UnsupportedMediaType

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
HTML = "text/html"
SUPPORTED = (JSON, SAFETENSORS)  # in order of preference where the caller has none
# media type -> `figure.format`, likewise in order
PICTURES: dict[str, Literal["png", "svg", "html"]] = {"image/png": "png", "image/svg+xml": "svg", "text/html": "html"}


def form_of_body(content_type: str) -> str:
    """The media type in which to read a body. None given, or curl's form type, is JSON. Raises UnsupportedMediaType."""
    media = content_type.partition(";")[0].strip().lower()
    if media in ("", "application/x-www-form-urlencoded", "text/json") or media == JSON or media.endswith("+json"):
        return JSON
    if media in SUPPORTED:
        return media
    raise UnsupportedMediaType.where("", f"a body of type {' or '.join(SUPPORTED)}", f'"{media}"')


def form_of_reply(accept: str, supported: Sequence[str] = SUPPORTED) -> str:
    """The media type in which to answer: the highest quality the caller gives, ties go to the first we support. Raises NotAcceptable."""
    if best := acceptable(accept, supported):
        return best
    raise NotAcceptable.where("", f"an Accept that admits {' or '.join(supported)}", f'"{accept[:100]}"')


def acceptable(accept: str, supported: Sequence[str]) -> str:
    """The same, and "" where nothing that is supported is accepted."""
    if accept in ("", "*/*"):
        return supported[0]
    if accept in supported:
        return accept
    ranges = [quality_of(part) for part in accept.split(",") if part.strip()]
    if not ranges:
        return supported[0]
    best, best_quality = "", 0.0
    for media in supported:
        matching = [(specific, quality) for name, quality in ranges if (specific := _specificity(name, media)) >= 0]
        quality = max(matching)[1] if matching else 0.0
        if quality > best_quality:
            best, best_quality = media, quality
    return best


def quality_of(part: str) -> tuple[str, float]:
    """One element of an Accept header: its name in lower case, and its q-value; 1 where there is none, 0 where it is no number."""
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                return name, 0.0
    return name, 1.0


def _specificity(name: str, media: str) -> int:
    if name == media:
        return 2
    if name == media.partition("/")[0] + "/*":
        return 1
    return 0 if name == "*/*" else -1
