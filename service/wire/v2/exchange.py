"""One V2 request over HTTP and its reply, bytes both ways, with the binary tensor extension.

A body is a JSON object, followed by the bytes of those tensors that say `binary_data_size`, in the order they stand in it; the header
Inference-Header-Content-Length tells where the JSON ends. Arrays view the body; a reply is written from the arrays' own memory. Unlike the
other forms this one has to remember something of the request: its id, and which outputs are wanted as bytes.
"""

from collections.abc import Mapping
from typing import Any

from service.errors import InvalidRequest, MalformedBody
from service.tensors import datatype_of, raw
from service.wire.arrays import Kind
from service.wire.limits import WireLimits
from service.wire.reply import Buffer, Reply, text_of, wire_array, write_json
from service.wire.schemas.attend import ReplyOptions
from service.wire.v2.error_paths import Places
from service.wire.v2.parameters import VERSION, arrays_asked, drop_columns
from service.wire.v2.reading import read
from service.wire.v2.told import Told


class Exchange:
    """A request to one model. `header_length` is what the header of that name says, "" without one.

    `parse` comes first. After `encode`, `reply_header_length` is the length of the JSON where bytes follow it, else None.
    """

    def __init__(self, model: str, header_length: str) -> None:
        self.model, self.header_length = model, header_length
        self.told: Told | None = None
        self.reply_header_length: int | None = None

    @property
    def timeout(self) -> float | None:
        """What the request says of it, in seconds; None before it has been read."""
        return None if self.told is None else self.told.timeout

    @property
    def places(self) -> Places | None:
        """Where everything of the request stands; None before it has been read."""
        return None if self.told is None else self.told.places

    def parse(self, body: bytes, kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False) -> dict[str, Any]:
        """The members of a request for attention. Raises MalformedBody, InvalidRequest or TooLarge, with the place in the header."""
        size = self._header_size(len(body))
        text = body if size == len(body) else body[:size]
        self.told, members = read(text, memoryview(body)[size:], self.model, limits)
        drop_columns(members)
        return members

    def encode(self, reply: Reply, options: ReplyOptions) -> list[Buffer]:
        """The reply: the JSON, then the bytes of the outputs that are wanted as such."""
        assert self.told is not None
        outputs: list[dict[str, Any]] = []
        pieces: list[Buffer] = []
        binary = False
        for name, array in arrays_asked(reply, self.told.outputs):
            array, odd = wire_array(name, array, reply.datatype, options)
            entry: dict[str, Any] = {"name": name, "shape": array.shape, "datatype": datatype_of(array).name}
            if self.told.in_text(name):
                entry["data"] = text_of(name, array.reshape(-1), odd, options)
            else:
                binary, entry["parameters"] = True, {"binary_data_size": array.nbytes}
                if array.nbytes:
                    pieces.append(raw(array))
            outputs.append(entry)
        document = {"model_name": self.model, "model_version": VERSION, **({} if self.told.id is None else {"id": self.told.id})}
        parameters = {"fully_masked_rows": reply.fully_masked_rows, "fingerprint": reply.layer["fingerprint"]}
        header = write_json({**document, "parameters": parameters, "outputs": outputs})
        self.reply_header_length = sum(map(len, header)) if binary else None
        return [*header, *pieces]

    def _header_size(self, received: int) -> int:
        """Bytes of JSON at the beginning of the body."""
        if not self.header_length:
            return received
        wanted = "an Inference-Header-Content-Length within the body"
        if not self.header_length.isascii() or not self.header_length.isdigit() or len(self.header_length) > 18:
            raise MalformedBody.where("", wanted, f'"{self.header_length[:40]}"')
        size = int(self.header_length)
        if size > received:
            raise MalformedBody.where("", wanted, f"{size} for {received} bytes")
        if not size:  # a raw request: the bytes of the only input a model has
            raise InvalidRequest.where("", "a JSON object that names the inputs, of which there are several", "bytes alone")
        return size
