"""Decompresses bodies and compresses replies (gzip, deflate). The size limit is checked during decompression."""

import zlib
from collections.abc import Sequence

from attend.errors import MalformedBody, TooLarge, UnsupportedMediaType
from attend.wire.codec import Buffer, Encoded
from attend.wire.negotiation import name_and_quality

WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
FORMATS = {"deflate": "deflate, in the format zlib (RFC 1950) or without its header (RFC 1951)"}  # coding -> formats; others have one
UNPACKED = ("", "identity")
FIRST_PIECE, LARGEST_PIECE = 1 << 10, 1 << 16  # bytes of a body that a stream gets at once
MAX_MEMBERS = 4096  # in one gzip body
LEVEL = 1  # higher levels cost several times as much, and hardly shrink numbers in text


def unpack(body: bytes, coding: str, limit: int) -> bytes:
    """Decompresses a body to at most `limit` bytes. Raises MalformedBody, TooLarge or UnsupportedMediaType."""
    pieces, left = _unpack(body, coding, limit)
    if left < 0:
        raise TooLarge.where("", f"a body that unpacks to at most {limit} bytes (max_body_bytes)", f"more than {limit}")
    return b"".join(pieces) if len(pieces) != 1 else pieces[0]


def unpack_start(body: bytes, coding: str, size: int) -> bytes:
    """Decompresses the first `size` bytes of a body, and no more; all if it has fewer. Raises as `unpack`."""
    return b"".join(_unpack(body[:size] if coding.strip().lower() in UNPACKED else body, coding, size)[0])[:size]


def _unpack(body: bytes, coding: str, limit: int) -> tuple[list[bytes], int]:
    """The pieces of the decompressed body, at most one byte beyond `limit`; and what is left of the limit, -1 if the body exceeds it."""
    coding = coding.strip().lower()
    if coding in UNPACKED:
        return [body], 0
    if coding not in WINDOWS:
        raise UnsupportedMediaType.where("", "a Content-Encoding of gzip or deflate", f'"{coding[:40]}"')
    pieces: list[bytes] = []
    position, left, members = 0, limit, 0
    while position < len(body):  # gzip may have several members
        members += 1
        if members > MAX_MEMBERS:
            raise TooLarge.where("", f"a {coding} body of at most {MAX_MEMBERS} members", "more")
        position, left = _unpack_member(body, position, left, coding, pieces)
        if left < 0:
            break
    return pieces, left


def _unpack_member(body: bytes, position: int, left: int, coding: str, pieces: list[bytes]) -> tuple[int, int]:
    """Unpacks the member at `position` into `pieces`. Returns (start of the next one, bytes left of the limit, or less than 0).

    The input is passed in growing pieces, since zlib copies the input that a stream does not use.
    """
    is_raw = coding == "deflate" and not _has_zlib_header(body[position : position + 2])  # as many clients send it
    stream, size = zlib.decompressobj(-zlib.MAX_WBITS if is_raw else WINDOWS[coding]), FIRST_PIECE
    while not stream.eof:
        if position >= len(body) and not stream.unconsumed_tail:
            raise MalformedBody.where("", f"{coding} to its end", "a body that ends before")
        chunk = stream.unconsumed_tail
        if not chunk:
            chunk = body[position : position + size]
            position, size = position + len(chunk), min(2 * size, LARGEST_PIECE)
        try:
            piece = stream.decompress(chunk, left + 1)
        except zlib.error as error:
            raise MalformedBody.where("", FORMATS.get(coding, coding), f"something else ({error})") from None
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            break
    return position - len(stream.unused_data), left


def _has_zlib_header(start: bytes) -> bool:
    """Whether a body starts with the header of zlib (RFC 1950, section 2.2). Compressors do not start a stream without a header like this:
    its first block would be a stored one, whose padding they fill with zeros."""
    return len(start) == 2 and start[0] & 0x0F == zlib.DEFLATED and int.from_bytes(start) % 31 == 0


def pack(pieces: Sequence[Buffer], coding: str) -> list[Buffer]:
    """Compresses a reply."""
    stream = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOWS[coding])
    packed = [stream.compress(piece) for piece in pieces]
    return [b"".join([*packed, stream.flush()])]


def coding_of_reply(accept_encoding: str, always: bool) -> str:
    """The Content-Encoding of the reply, "" for none. Without `always`, it is used only if the client accepts one coding and no other.

    HTTP libraries accept several codings by default, but on a fast network compression costs more time than it saves.
    """
    wanted = {name: quality for name, quality in map(name_and_quality, accept_encoding.split(",")) if name and quality > 0}
    usable = sorted((name for name in wanted if name in ("gzip", "deflate")), key=lambda name: -wanted[name])
    return usable[0] if usable and (always or list(wanted) == usable[:1]) else ""


def compress(reply: Encoded, coding: str) -> Encoded:
    """The reply with this Content-Encoding."""
    headers, pieces = reply
    return (*headers, (b"content-encoding", coding.encode())), pack(pieces, coding)
