"""gzip and deflate, both ways, with a bound on what a body may unpack to: a bomb is refused before it takes the memory it promises."""

import zlib
from collections.abc import Sequence

from service.errors import MalformedBody, TooLarge, UnsupportedMediaType
from service.wire.reply import Buffer

WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
LEVEL = 1  # numbers in text hardly shrink further, and every further level costs a multiple


def unpack(body: bytes, coding: str, limit: int) -> bytes:
    """The body as it was before the Content-Encoding. Raises MalformedBody, TooLarge or UnsupportedMediaType."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in WINDOWS:
        raise UnsupportedMediaType.where("", "a Content-Encoding of gzip or deflate", f'"{coding[:40]}"')
    pieces, size = [], 0
    while body:
        stream = zlib.decompressobj(WINDOWS[coding])
        try:
            while not stream.eof:
                piece = stream.decompress(body, limit + 1 - size)
                size += len(piece)
                if size > limit:
                    raise TooLarge.where("", f"a body that unpacks to at most {limit} bytes (max_body_bytes)", f"more than {limit}")
                pieces.append(piece)
                body = stream.unconsumed_tail
                if not stream.eof and not body:
                    raise MalformedBody.where("", f"{coding} to its end", "a body that breaks off")
        except zlib.error as error:
            raise MalformedBody.where("", coding, f"something else ({error})") from None
        body = stream.unused_data  # gzip may have several members
    return b"".join(pieces)


def pack(pieces: Sequence[Buffer], coding: str) -> list[Buffer]:
    """The reply under a Content-Encoding."""
    stream = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOWS[coding])
    packed = [stream.compress(piece) for piece in pieces]
    return [b"".join([*packed, stream.flush()])]


def coding_of_reply(accept_encoding: str, always: bool) -> str:
    """The coding for the reply, "" for none: where the caller names one we have and nothing else, or, with `always`, any we have.

    Every HTTP library names several by default without wanting the wait: compression costs more than it saves on a fast network.
    """
    named = [part.strip().lower().partition(";") for part in accept_encoding.split(",") if part.strip()]
    wanted = [name.strip() for name, _, quality in named if quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")]
    usable = [name for name in wanted if name in ("gzip", "deflate")]
    return usable[0] if usable and (always or wanted == usable[:1]) else ""
