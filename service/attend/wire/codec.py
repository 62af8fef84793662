"""A codec: a function that decodes a body into the members of a request, and one that encodes a `Reply` into headers and bytes.

They keep no state between calls. `Decoded.reply_format` passes what the reply needs from `decode` to `encode` (an id, which outputs are
sent as bytes). `negotiation.py` has those of the service's own endpoints; `wire/v2/codec.py` and `web/grpc/codec.py` have the others.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from attend.errors import Problem, Translate
from attend.tensors import Array
from attend.wire.schemas.attend import ReplyOptions

MANY_PIECES = 16  # of a reply: fewer are sent as they are, so that binary tensors are not copied
PIECE_BYTES = 1 << 16  # of what short pieces are joined to
Buffer: TypeAlias = bytes | memoryview  # a piece of an encoded reply; its len() is its bytes
Encoded: TypeAlias = tuple[tuple[tuple[bytes, bytes], ...], list[Buffer]]  # a reply: the headers that describe its bytes, and its pieces


class SequencePart(NamedTuple):
    """The sequence of the Open Inference Protocol that a request belongs to, and whether the request begins or ends it."""

    id: str
    start: bool
    end: bool


class Decoded(NamedTuple):
    """A decoded body. `members` are named as in AttendRequest: tensors as arrays, all else as plain Python, not validated."""

    members: Mapping[str, Any]
    reply_format: Any = None  # passed to `encode` of the same codec
    timeout: float | None = None  # seconds, from the body; the headers may set another deadline
    sequence: SequencePart | None = None  # problems point to it as /sequence
    translate: Translate | None = None  # None: the body has the members in the same places


def in_places(problem: Problem, places: Mapping[str, str | None]) -> Problem:
    """The same problem, with a pointer into a body that has some members in other places.

    `places` has the pointer to each of these. None is that of a member which the query has: the problem then names the parameter.
    """
    name, slash, rest = problem.at.removeprefix("/").partition("/")
    if name not in places:
        return problem
    if (place := places[name]) is not None:
        return replace(problem, at=f"{place}{slash}{rest}")
    place = f", at /{rest} of the {name}, a query parameter" if rest else f" as the query parameter {name}"
    return Problem("", f"{problem.expected}{place}", problem.got)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply. A tensor is an array, or with `select.top_k` two arrays, `keys` and `values`."""

    layer: dict[str, str]  # name, fingerprint
    fully_masked_rows: int
    datatype: str  # V2 name of the datatype in which numbers are sent
    tensors: dict[str, Array | dict[str, Array]] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None  # of an analysis: name -> array, or parts by name; a part that is a list contains tokens
    session: dict[str, Any] | None = None  # id and length, of a call to a session

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Every array with its name; those of one tensor as `name.keys` and `name.values`."""
        for name, tensor in self.tensors.items():
            if isinstance(tensor, dict):
                yield from ((f"{name}.{part}", array) for part, array in tensor.items())
            else:
                yield name, tensor


@dataclass(frozen=True, slots=True)
class Codec:
    """One format of bodies.

    `decode(body, parameters, kinds, limits, shapes_alone=False)` decodes a request. `parameters`: values from headers and path; `kinds`
    maps the members that are tensors to their kind; with `shapes_alone` a tensor may be given by its shape. Raises MalformedBody,
    InvalidRequest or TooLarge.

    `encode(reply, options, reply_format)` returns the headers that describe the bytes of a reply, and the bytes in pieces. Raises
    InvalidRequest if a number is not finite and `options.nonfinite` is "error".
    """

    decode: Callable[..., Decoded]
    encode: Callable[[Reply, ReplyOptions, Any], Encoded]
    writes_text: bool = True  # whether replies have numbers as text, which is larger than their bytes
    largest_text: float = math.inf  # bytes of text in a reply, if the format limits it
    largest_reply: tuple[str, int] | None = None  # (setting, largest reply in bytes), if the protocol limits replies


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
