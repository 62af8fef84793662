"""Which form a body has and which the caller wants back: headers in, names of forms out. RFC 9110 section 12, as far as two forms need."""

from service.errors import NotAcceptable, UnsupportedMediaType

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
HTML = "text/html"
SUPPORTED = (JSON, SAFETENSORS)  # in order of preference where the caller has none


def form_of_body(content_type: str) -> str:
    """The media type in which to read a body. None given, or curl's form type, is JSON. Raises UnsupportedMediaType."""
    media = content_type.partition(";")[0].strip().lower()
    if media in ("", "application/x-www-form-urlencoded", "text/json") or media == JSON or media.endswith("+json"):
        return JSON
    if media in SUPPORTED:
        return media
    raise UnsupportedMediaType.where("", f"a body of type {' or '.join(SUPPORTED)}", f'"{media}"')


def form_of_reply(accept: str) -> str:
    """The media type in which to answer: the highest quality the caller gives, ties go to the first we support. Raises NotAcceptable."""
    if accept in ("", "*/*"):
        return JSON
    if accept in SUPPORTED:
        return accept
    ranges = [quality_of(part) for part in accept.split(",") if part.strip()]
    if not ranges:
        return JSON
    best, best_quality = "", 0.0
    for media in SUPPORTED:
        matching = [(specific, quality) for name, quality in ranges if (specific := _specificity(name, media)) >= 0]
        quality = max(matching)[1] if matching else 0.0
        if quality > best_quality:
            best, best_quality = media, quality
    if not best:
        raise NotAcceptable.where("", f"an Accept that admits {' or '.join(SUPPORTED)}", f'"{accept[:100]}"')
    return best


def prefers_html(accept: str) -> bool:
    """Whether HTML is asked for by name, and more than JSON is: by browsers, and by nobody who names no type or any."""
    ranges = dict(quality_of(part) for part in accept.split(","))
    return ranges.get(HTML, 0.0) > ranges.get(JSON, 0.0)


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
