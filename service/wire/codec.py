"""The interface of codecs: a codec decodes a body into the members of a request, and encodes a reply into headers and bytes.

Codecs keep no state between calls. `Decoded.reply_format` passes what the reply needs from `decode` to `encode` (an id, which outputs are
sent as bytes). `CODECS` has the codecs of the service's own endpoints by media type; the others are in `wire/v2/codec.py` and
`web/grpc/codec.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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


class SequencePart(NamedTuple):
    """The sequence of the Open Inference Protocol that a request belongs to, and whether the request begins or ends it."""

    id: str
    start: bool
    end: bool


class Decoded(NamedTuple):
    """A decoded body. `members` are named as in AttendRequest: tensors as arrays, all else as plain Python, not validated."""

    members: Mapping[str, Any]
    reply_format: Any = None  # passed to `encode` of the same codec; of the JSON and safetensors codecs: the picture type to reply with
    timeout: float | None = None  # seconds, from the body; the headers may set another deadline
    sequence: SequencePart | None = None
    translate: Callable[[Problem], Problem] | None = None  # a problem of the members as one of the body; None: pointers are the same

    def in_body(self, error: RequestError) -> RequestError:
        """The error with pointers into the body, of one with pointers into the members."""
        if self.translate is None or not error.problems:
            return error
        return type(error)(problems=[self.translate(problem) for problem in error.problems])


class Encoded(NamedTuple):
    """A reply: the headers that describe its bytes, and the bytes in pieces."""

    headers: Headers
    pieces: list[Buffer]


class Codec(ABC):
    """One format of bodies. `writes_text`: whether replies have numbers as text, which is larger than their bytes."""

    writes_text: bool = True
    largest_reply: tuple[str, int] | None = None  # (setting, largest reply in bytes), if the protocol limits replies

    @abstractmethod
    def decode(
        self, body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
    ) -> Decoded:
        """Decodes a request. `parameters`: values from headers and path; `kinds` maps the members that are tensors to their kind.

        With `shapes_alone` a tensor may be given by its shape. Raises MalformedBody, InvalidRequest or TooLarge.
        """

    @abstractmethod
    def encode(self, reply: Reply, options: ReplyOptions, reply_format: Any) -> Encoded:
        """Encodes a reply. Raises InvalidRequest if a number is not finite and `options.nonfinite` is "error"."""


class NativeCodec(Codec):
    """The service's own format of that media type, which `parse` reads and `write` writes."""

    def __init__(self, media_type: str, parse: Callable[..., dict[str, Any]], write: Callable[[Reply, ReplyOptions], list[Buffer]]) -> None:
        self.parse, self.write, self.writes_text = parse, write, media_type == JSON
        self.headers: Headers = ((b"content-type", media_type.encode()),)

    def decode(
        self, body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
    ) -> Decoded:
        return Decoded(self.parse(body, kinds, limits, shapes_alone), parameters.get("picture_type"))

    def encode(self, reply: Reply, options: ReplyOptions, reply_format: Any = None) -> Encoded:
        return Encoded(self.headers, self.write(reply, options))


CODECS: dict[str, Codec] = {
    JSON: NativeCodec(JSON, json_reader.parse, encode_json),
    SAFETENSORS: NativeCodec(SAFETENSORS, safetensors.parse, safetensors.encode),
}
