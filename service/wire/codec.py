"""What every protocol implements: a codec decodes a body into the members of a request, and encodes a reply into headers and bytes.

Codecs keep no state between calls. What the reply needs of its request (an id, which outputs go as bytes) is in `Decoded.reply_format`.
`CODECS` has those of the service's own endpoints by media type; `wire/v2/codec.py` and `web/grpc/codec.py` have the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from service.errors import Problem, RequestError
from service.wire import safetensors
from service.wire.arrays import Kind
from service.wire.json import reader as json_reader
from service.wire.json.writer import encode_json
from service.wire.limits import WireLimits
from service.wire.negotiation import JSON, SAFETENSORS
from service.wire.reply import Buffer, Reply
from service.wire.schemas.attend import ReplyOptions

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


class ErrorPaths:
    """Translates pointers into the members of a request to pointers into the body that was sent. As a context manager it translates the
    RequestError that leaves the block. This one leaves pointers as they are."""

    __slots__ = ()

    def translate(self, problem: Problem) -> Problem:
        """The same problem, with a pointer into the body."""
        return problem

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RequestError) and error.problems and type(self) is not ErrorPaths:
            raise type(error)(problems=[self.translate(problem) for problem in error.problems]) from None


SAME_PATHS = ErrorPaths()


class Decoded(NamedTuple):
    """A decoded body. `members` are those of a request of the service's own: tensors as arrays, all else as plain Python, not validated."""

    members: Mapping[str, Any]
    reply_format: Any = None  # what `encode` of the same codec needs of the request
    timeout: float | None = None  # seconds that the body allows, beside the deadline of its headers
    error_paths: ErrorPaths = SAME_PATHS


class Encoded(NamedTuple):
    """A reply: the headers that describe its bytes, and the bytes in pieces."""

    headers: Headers
    pieces: list[Buffer]


class Codec(ABC):
    """One form of bodies. `writes_text`: whether its replies hold numbers as text, which takes more bytes than the numbers have."""

    writes_text: bool = True
    largest_reply: tuple[str, int] | None = None  # the setting, and bytes of a reply's tensors, where the protocol bounds them

    @abstractmethod
    def decode(
        self, body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
    ) -> Decoded:
        """The request in `body`. `parameters` is what its headers and path say; `kinds` maps the members that are tensors to their kind.

        With `shapes_alone` a tensor may be given by its shape. Raises MalformedBody, InvalidRequest or TooLarge.
        """

    @abstractmethod
    def encode(self, reply: Reply, options: ReplyOptions, reply_format: Any) -> Encoded:
        """The reply. Raises InvalidRequest where a number is not finite and `options.nonfinite` is "error"."""


class JsonCodec(Codec):
    """Requests and replies as JSON documents."""

    headers: Headers = ((b"content-type", JSON.encode()),)

    def decode(
        self, body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
    ) -> Decoded:
        return Decoded(json_reader.parse(body, kinds, limits, shapes_alone), parameters.get("accept"))

    def encode(self, reply: Reply, options: ReplyOptions, reply_format: Any = None) -> Encoded:
        return Encoded(self.headers, encode_json(reply, options))


class SafetensorsCodec(Codec):
    """Tensors as safetensors, the other members as JSON in the metadata."""

    writes_text = False
    headers: Headers = ((b"content-type", SAFETENSORS.encode()),)

    def decode(
        self, body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
    ) -> Decoded:
        return Decoded(safetensors.parse(body, kinds, limits, shapes_alone), parameters.get("accept"))

    def encode(self, reply: Reply, options: ReplyOptions, reply_format: Any = None) -> Encoded:
        return Encoded(self.headers, safetensors.encode(reply, options))


CODECS: dict[str, Codec] = {JSON: JsonCodec(), SAFETENSORS: SafetensorsCodec()}
