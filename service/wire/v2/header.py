"""The JSON part of a V2 request: names, shapes, datatypes, parameters, and the numbers of those tensors that are given in it.

As for a request in JSON, simdjson reads it, and hands the numbers over as blocks.
"""

from typing import Any

import simdjson

from service.errors import InvalidRequest, MalformedBody, TooLarge
from service.wire.json.cuts import CutList, Cuts
from service.wire.json.pieces import WORTHWHILE
from service.wire.json.reader import Reader, parse_object
from service.wire.limits import WireLimits
from service.wire.problems import pointer, shown
from service.wire.v2.parameters import demand_known

INPUT = ("name", "shape", "datatype", "parameters", "data")
INPUTS = 64  # of one request; each has a name of its own, and there are not as many


def read_header(text: bytes, limits: WireLimits) -> tuple[dict[str, Any], Reader]:
    """The members of the header, and what makes arrays of those `data` that it holds: they stand where they stood, as proxies.

    To be dropped before this thread parses again. Raises MalformedBody, TooLarge (depth) or InvalidRequest.
    """
    if len(text) < WORTHWHILE:
        document, reader = parse_object(text, limits), Reader(text, {}, limits)
    else:
        cuts = Cuts(text, {"data"}, limits)
        document, reader = parse_object(cuts.rest, limits, cuts.place_of), Reader(cuts.rest, {}, limits, cut=cuts.values)
    members: dict[str, Any] = {}
    for key in _keys(document, "", limits):
        value = document[key]
        members[key] = _inputs(value, reader) if key == "inputs" else reader.plain(value, f"/{key}", {}, 2)
    return members, reader


def has_lists(data: Any) -> bool:
    """Whether an input's data begins with a list of its own."""
    if isinstance(data, CutList):
        return data.nested
    return isinstance(data, simdjson.Array | list) and len(data) > 0 and isinstance(data[0], simdjson.Array | list)


def _inputs(value: Any, reader: Reader) -> Any:
    if not isinstance(value, simdjson.Array | list):
        return reader.plain(value, "/inputs", {}, 2)
    if len(value) > INPUTS:
        raise TooLarge.where("/inputs", f"at most {INPUTS} inputs", str(len(value)))
    reader.brackets += 1
    inputs = []
    for i, item in enumerate(value):
        at = f"/inputs/{i}"
        if isinstance(item, simdjson.Object | dict):
            keys = _keys(item, at, reader.limits)
            demand_known(keys, INPUT, at)  # looking up each member takes a walk along all of them
            entry = {key: item[key] for key in keys}
            inputs.append(
                {key: reader.uncut(part) if key == "data" else reader.plain(part, f"{at}/{key}", {}, 4) for key, part in entry.items()}
            )
        else:
            inputs.append(reader.plain(item, at, {}, 3))
    return inputs


def _keys(proxy: Any, at: str, limits: WireLimits) -> list[str]:
    """The keys of an object, each of which stands there once."""
    if len(proxy) > limits.tensors:
        raise TooLarge.where(at, f"an object of at most {limits.tensors} members (max_tensors)", str(len(proxy)))
    seen: dict[str, None] = {}
    for key in proxy.keys():  # noqa: SIM118  # a proxy is no iterable
        if key in seen:
            raise MalformedBody.where(at + pointer([key]), "each key once", f'"{key}" twice')
        if "\0" in key:  # simdjson would look up what stands before it
            raise InvalidRequest.where(at, "no null character in a name", shown(key))
        seen[key] = None
    return list(seen)
