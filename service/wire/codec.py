"""The forms a body may have, each with the same two verbs. Another form is another row; nothing else knows how many there are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from service.wire import safetensors
from service.wire.arrays import Kind
from service.wire.json import pieces as json_pieces
from service.wire.limits import WireLimits
from service.wire.negotiation import JSON, SAFETENSORS
from service.wire.reply import Buffer, Reply, encode_json
from service.wire.schemas.attend import ReplyOptions


@dataclass(frozen=True, slots=True)
class Codec:
    """How requests of one media type are read, and replies written. `largest_reply` bounds the bytes of a reply's tensors where the
    protocol does: the setting's name and its value."""

    media_type: str
    parse: Callable[[bytes, Mapping[str, Kind], WireLimits, bool], dict[str, Any]]
    encode: Callable[[Reply, ReplyOptions], list[Buffer]]
    largest_reply: tuple[str, int] | None = None


CODECS = {
    form.media_type: form
    for form in (
        Codec(JSON, json_pieces.parse, encode_json),
        Codec(SAFETENSORS, safetensors.parse, safetensors.encode),
    )
}
