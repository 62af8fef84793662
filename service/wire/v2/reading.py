"""The body of a V2 request -> the members of a request for attention, arrays among them.

What it tells besides its numbers has mostly been told before; then only the numbers are read, each list by itself. Whatever looks odd goes
the slower way, which reads the text as a whole, and says what is wrong with it.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from service.errors import RequestError
from service.tensors import Array
from service.wire.limits import WireLimits
from service.wire.v2.header import read_header
from service.wire.v2.header_template import frame_of
from service.wire.v2.lists import array_of_list
from service.wire.v2.told import Told, told_again, told_by


def read(text: bytes, rest: memoryview, model: str, limits: WireLimits) -> tuple[Told, dict[str, Any]]:
    """What the JSON `text` and the bytes behind it say to that model. Raises MalformedBody, InvalidRequest or TooLarge."""
    if (frame := frame_of(text)) is not None:
        with suppress(RequestError):
            told = told_again(frame.text, len(rest), model)
            if (arrays := _arrays(told, text, frame.lists, limits)) is not None:
                return told, {**told.members, **arrays, **_behind(told, rest)}
    header, reader = read_header(text, limits)
    told = told_by(header, len(rest), model)
    members = {**told.members, **_behind(told, rest)}
    for name, tensor in told.within.items():
        data = header["inputs"][tensor.input]["data"]
        members[name] = reader.data(data, tensor.kind, tensor.shape, tensor.row.numpy, f"/inputs/{tensor.input}/data")
    reader.look_again()
    return told, members


def _behind(told: Told, rest: memoryview) -> dict[str, Array]:
    return {name: tensor.array(rest) for name, tensor in told.behind.items()}


def _arrays(told: Told, text: bytes, lists: Sequence[slice], limits: WireLimits) -> dict[str, Array] | None:
    """The tensors whose numbers stand in the text, in these lists; None where that is not easily told."""
    if len(lists) != len(told.within):  # one is called data in other letters
        return None
    arrays: dict[str, Array] = {}
    for place, (name, tensor) in zip(lists, told.within.items(), strict=True):
        if (array := array_of_list(text, place, tensor.kind, tensor.row, tensor.shape, limits)) is None:
            return None
        arrays[name] = array
    return arrays
