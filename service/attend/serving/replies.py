"""The bytes of a reply: short pieces joined, or compressed."""

from collections.abc import Sequence

from attend.wire.codec import Buffer, Encoded, Headers
from attend.wire.compression import pack

MANY_PIECES = 16  # of a reply: fewer are sent as they are, so that binary tensors are not copied
PIECE_BYTES = 1 << 16  # of what short pieces are joined to


def joined(pieces: Sequence[Buffer]) -> list[Buffer]:
    """The same bytes, with short pieces joined: the event loop sends each piece by itself, and a reply of thousands of tensors has many."""
    whole: list[Buffer] = []
    some: list[Buffer] = []  # what the next piece has so far
    size = 0
    for piece in pieces:
        if some and size + len(piece) > PIECE_BYTES:
            whole.append(some[0] if len(some) == 1 else b"".join(some))
            some, size = [], 0
        some.append(piece)
        size += len(piece)
    return [*whole, b"".join(some)]


def compress(headers: Headers, pieces: Sequence[Buffer], coding: str) -> Encoded:
    """The reply with this Content-Encoding."""
    return (*headers, (b"content-encoding", coding.encode())), pack(pieces, coding)
