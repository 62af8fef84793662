"""JSON bodies, small ones read at once, large ones in pieces: a parser needs several times the memory of what it parses, and holds the
interpreter's lock all the while. In pieces, a body of a hundred megabytes leaves other threads their turn, and nothing but its arrays.
"""

from collections.abc import Mapping
from typing import Any

from service.errors import AttendError
from service.wire.arrays import Kind
from service.wire.json import reader as json_reader
from service.wire.json.cuts import Cuts
from service.wire.json.reader import Reader, parse_object
from service.wire.limits import WireLimits

WORTHWHILE = 1 << 20  # bytes of a body from which on pieces pay
AT_ONCE = 1 << 20  # bytes of a body up to which it may be read at once to find what is wrong


def parse(body: bytes, kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False) -> dict[str, Any]:
    """What `json_form.parse` gives for the same body, for less memory. Raises MalformedBody, InvalidRequest or TooLarge."""
    if len(body) < WORTHWHILE:
        return json_reader.parse(body, kinds, limits, shapes_alone)
    try:
        cuts = Cuts(body, {*kinds, "data"}, limits)
        reader = Reader(cuts.rest, kinds, limits, shapes_alone, cuts.values)
        return reader.members(parse_object(cuts.rest, limits, cuts.place_of))
    except AttendError:
        if len(body) > AT_ONCE:
            raise
    return json_reader.parse(body, kinds, limits, shapes_alone)
