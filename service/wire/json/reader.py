"""JSON bytes -> the members of a document, tensors as numpy arrays. No Python object is made per number.

simdjson parses; `as_buffer` hands a tensor's numbers over as one block of float64. Three things it does not tell are found here:
keys that stand twice (it keeps one), ragged rows (it flattens: so the rows are walked), and a list where a number should stand
(it flattens that too: so the brackets of the whole body are counted against those that regular tensors have). Whatever looks
odd is gone through again, slowly, to name the place; that scan also decides where simdjson refuses what JSON allows.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import simdjson

from service.errors import InvalidRequest, MalformedBody, TooLarge
from service.tensors import DATATYPES, Array
from service.wire.arrays import MAX_RANK, Kind, array_of_base64, beyond_float64, held_exactly
from service.wire.json.lists import array_of_integers, array_of_lists
from service.wire.json.strict import parse_slowly
from service.wire.limits import WireLimits
from service.wire.problems import SHOWN, pointer, shown

FORM_KEYS = {"shape", "datatype", "data", "base64"}
NOTHING: Mapping[str, Any] = {}
_threads = threading.local()


@runtime_checkable
class CutValue(Protocol):
    """A value that was cut out of a large body, to be read in pieces: a list, or a string."""

    is_list: bool
    nested: bool  # whether it is a list that holds others

    def array(self, kind: Kind, at: str) -> Array:
        """A list as float64. Raises MalformedBody, InvalidRequest or TooLarge."""
        ...

    def integers(self, kind: Kind, dtype: np.dtype[Any], at: str) -> Array:
        """A list as integers of that datatype, each as it was sent. Raises as `array` does."""
        ...

    def text(self) -> Iterator[bytes]:
        """A string in pieces. Raises MalformedBody."""
        ...

    def plain(self, at: str) -> Any:
        """The value as plain Python. Raises TooLarge where it is longer than plain values may be."""
        ...


def parse(body: bytes, kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False) -> dict[str, Any]:
    """The members of the JSON object `body`; those named in `kinds` as arrays, the others as plain Python.

    `kinds` maps member names to the kind of their tensor; "weights/*" names every member of the object `weights`. With
    `shapes_alone` a tensor may be given by its shape: zeros that take no memory.
    Raises MalformedBody, TooLarge (depth) or InvalidRequest, each with the place.
    """
    document = parse_object(body, limits)
    reader = Reader(body, kinds, limits, shapes_alone)
    members = reader.members(document)
    del document  # before the parser's next turn
    return members


def parse_object(body: bytes, limits: WireLimits, place_of: Callable[[int], str] | None = None) -> Any:
    """The JSON object `body`: simdjson's proxy of it, or a dict where that refuses JSON.

    The proxy is to be dropped before this thread parses again, unless there is `place_of`, which `parse_slowly` describes.
    """
    parser = own_parser() if place_of is None else simdjson.Parser()
    try:
        document = parser.parse(body)
    except (ValueError, RuntimeError) as error:
        if "DEPTH_ERROR" in str(error):
            raise TooLarge.where("", f"a document at most {limits.depth} deep (max_depth)", "one nested deeper") from None
        document = parse_slowly(body, place_of=place_of)
    if not isinstance(document, simdjson.Object | dict):
        raise InvalidRequest.where("", "a JSON object", "a list" if isinstance(document, simdjson.Array) else shown(document))
    return document


def own_parser() -> Any:
    """This thread's parser; a new one if an error's traceback still holds on to what the last document returned."""
    parser = getattr(_threads, "parser", None) or simdjson.Parser()
    try:
        parser.parse(b"{}")
    except RuntimeError:
        parser = simdjson.Parser()
    _threads.parser = parser
    return parser


class Reader:
    """One body's way from proxies to arrays. `brackets` counts the lists that a body of regular tensors must have; `lists` it has."""

    def __init__(
        self,
        body: bytes,
        kinds: Mapping[str, Kind],
        limits: WireLimits,
        shapes_alone: bool = False,
        cut: Mapping[str, CutValue] = NOTHING,
    ) -> None:
        """`cut` has values that were cut out of the body, by the strings that stand in their places."""
        self.lists, self.escaped = _count(body, b"["), b"\\" in body
        self.kinds, self.limits, self.shapes_alone, self.cut = kinds, limits, shapes_alone, cut
        self.brackets = self.values = 0
        self._seen: list[tuple[Any, Kind, str]] = []

    def members(self, document: Any) -> dict[str, Any]:
        members = self._object(document, "", self.kinds)
        self.look_again()
        return members

    def look_again(self) -> None:
        """After everything has been read: at every row, where a list may stand among numbers, or strings may hide brackets."""
        if self._seen and (self.escaped or self.brackets != self.lists):
            for value, kind, at in self._seen:
                array_of_lists(value.as_list() if isinstance(value, simdjson.Array) else value, kind, at)

    def _object(self, document: Any, at: str, kinds: Mapping[str, Kind], depth: int = 1) -> dict[str, Any]:
        if len(document) > self.limits.tensors:
            raise TooLarge.where(at, f"an object of at most {self.limits.tensors} members (max_tensors)", str(len(document)))
        members: dict[str, Any] = {}
        for key in document.keys():  # noqa: SIM118  # a proxy is no iterable; its items() would make Python objects of everything
            place = f"{at}/{key}" if key in kinds else at + pointer([key])
            if "\0" in key:  # simdjson would look up what stands before it
                raise InvalidRequest.where(place, "no field of that name", "a null character in a name")
            value = document[key]
            if key in members:
                raise MalformedBody.where(place, "each key once", f'"{key}" twice')
            kind = kinds.get(key) or kinds.get("*")
            inner: Mapping[str, Kind] = {"*": kinds[f"{key}/*"]} if f"{key}/*" in kinds else {}
            members[key] = self._tensor(value, kind, place) if kind else self.plain(value, place, inner, depth + 1)
        return members

    def plain(self, value: Any, at: str, kinds: Mapping[str, Kind], depth: int) -> Any:
        """The value as plain Python, but for the members that `kinds` calls tensors."""
        self.values += 1
        if self.values > self.limits.values:
            raise TooLarge.where(at, f"at most {self.limits.values} plain values in one body", "more")
        if depth > self.limits.depth:
            raise TooLarge.where("/" + at.split("/")[1], f"a document at most {self.limits.depth} deep (max_depth)", "one nested deeper")
        if isinstance(value, simdjson.Object | dict):
            return self._object(value, at, kinds, depth)
        if isinstance(value, simdjson.Array | list):
            self.brackets += 1
            return [self.plain(item, f"{at}/{i}", {}, depth + 1) for i, item in enumerate(value)]
        if isinstance(value, str):
            if value in self.cut:
                return self.plain(self.cut[value].plain(at), at, kinds, depth)
            self.brackets += value.count("[")
        return value

    def uncut(self, value: Any) -> Any:
        """What was cut out, for the string in its place; any other value as it is."""
        return self.cut.get(value, value) if isinstance(value, str) else value

    def _tensor(self, value: Any, kind: Kind, at: str) -> Any:
        if isinstance(value, str) and value in self.cut:
            whole = self.cut[value]
            return whole.array(kind, at) if whole.is_list else next(whole.text())[: 2 * SHOWN].decode(errors="replace")
        if isinstance(value, simdjson.Array | list):
            return self.nested(value, kind, at)
        if isinstance(value, simdjson.Object | dict):
            return self._form(value, kind, at)
        if isinstance(value, bool) and kind == "mask":
            return np.array(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        try:
            return np.array(float(value))
        except OverflowError:
            raise InvalidRequest.where(at, "a number within the range of a float64", "an integer far beyond it") from None

    def nested(self, value: Any, kind: Kind, at: str) -> Array:
        """A list, of lists or of numbers, as float64. Raises InvalidRequest or TooLarge (depth)."""
        if isinstance(value, list):
            return array_of_lists(value, kind, at)
        shape, rows = [], value
        while isinstance(rows, simdjson.Array):
            shape.append(len(rows))
            if len(shape) > self.limits.depth:
                raise TooLarge.where(at, f"a document at most {self.limits.depth} deep (max_depth)", "one nested deeper")
            if not shape[-1]:
                break
            rows = rows[0]
        if len(shape) > MAX_RANK or 0 in shape:
            return array_of_lists(value.as_list(), kind, at)
        try:
            numbers = np.frombuffer(value.as_buffer(of_type="d"), np.float64)
        except TypeError:  # booleans, strings or nulls among the numbers
            return self._regular(array_of_lists(value.as_list(), kind, at))
        if numbers.size != math.prod(shape) or not _rows_agree(value, shape):
            return array_of_lists(value.as_list(), kind, at)  # raises with the place
        self._seen.append((value, kind, at))
        return self._regular(numbers.reshape(shape))

    def _regular(self, array: Array) -> Array:
        lists = 1
        for length in array.shape:
            self.brackets += lists
            lists *= length
        return array

    def _form(self, value: Any, kind: Kind, at: str) -> Array:
        """`{"shape", "datatype", "data"}` or `{"shape", "datatype", "base64"}`; a shape alone is a tensor of zeros that takes no room."""
        keys = list(value.keys())
        for i, key in enumerate(keys):
            if key not in FORM_KEYS:
                raise InvalidRequest.where(at + pointer([key]), "one of shape, datatype, data, base64", shown(key))
            if key in keys[:i]:
                raise MalformedBody.where(f"{at}/{key}", "each key once", f'"{key}" twice')
        keys = [key for key in keys if key not in ("data", "base64") or value[key] is not None]
        if "data" in keys and "base64" in keys:
            raise InvalidRequest.where(at, "either data or base64", "both")
        shape = shape_of(self.plain(value["shape"], f"{at}/shape", {}, 3) if "shape" in keys else ..., f"{at}/shape")
        name = value["datatype"] if "datatype" in keys else None
        if not (name is None and "base64" not in keys) and (not isinstance(name, str) or name not in DATATYPES):
            raise InvalidRequest.where(f"{at}/datatype", "one of " + " ".join(DATATYPES), shown(_python(name)))
        dtype = DATATYPES[name].numpy if name else np.dtype(np.float64)
        if "base64" in keys:
            text = self.uncut(value["base64"])
            if isinstance(text, CutValue):
                text = [] if text.is_list else text.text()
            return array_of_base64(_python(text), shape, dtype, f"{at}/base64")
        if "data" not in keys:
            if not self.shapes_alone:
                raise InvalidRequest.where(at, "data or base64 beside the shape", "a shape alone")
            return np.broadcast_to(np.zeros((), dtype), shape)
        return self.data(value["data"], kind, shape, dtype, f"{at}/data")

    def data(self, data: Any, kind: Kind, shape: tuple[int, ...], dtype: np.dtype[Any], at: str) -> Array:
        """Numbers, flat or nested to their shape, as an array of a dtype that holds them."""
        data = self.uncut(data)
        whole: CutValue | None = None
        if isinstance(data, CutValue):
            whole, data = data, [] if data.is_list else "a long string"
        if not isinstance(data, simdjson.Array | list):
            raise InvalidRequest.where(at, "a list of numbers", shown(_python(data)))
        if whole is not None:
            array = whole.array(kind, at)
        elif not len(data):
            self.brackets += 1
            array = np.zeros(0)
        else:
            array = self.nested(data, kind, at)
        if array.shape != shape and array.shape != (math.prod(shape),):
            raise InvalidRequest.where(
                at, f"{math.prod(shape)} values for shape {list(shape)}, in one list or nested to it", _count_words(array)
            )
        if beyond_float64(array, dtype):
            exact = array_of_integers(_python(data), kind, dtype, at) if whole is None else whole.integers(kind, dtype, at)
            return exact.reshape(shape)
        return held_exactly(array, dtype, at).reshape(shape)


def _rows_agree(value: Any, shape: list[int]) -> bool:
    """Whether every list of lists has the length that the first one of its level has, as deep as `shape` goes."""
    if len(shape) == 1:
        return True
    try:
        agree = set(map(len, value)) == {shape[1]}
    except TypeError:  # a number among the lists; strings and objects, which have a length too, `as_buffer` has refused
        return False
    return agree and (len(shape) == 2 or all(_rows_agree(row, shape[1:]) for row in value))


def _count(body: bytes, character: bytes) -> int:
    """How often a byte occurs; in pieces, so that no second body is made (and faster than bytes.count)."""
    view, piece = np.frombuffer(body, np.uint8), 1 << 18
    return sum(int(np.count_nonzero(view[i : i + piece] == character[0])) for i in range(0, len(view), piece))


def _python(value: Any) -> Any:
    if isinstance(value, simdjson.Object):
        return {}
    return value.as_list() if isinstance(value, simdjson.Array) else value


def _count_words(array: Array) -> str:
    return f"{array.size}" if array.ndim == 1 else f"shape {list(array.shape)}"


def shape_of(value: Any, at: str) -> tuple[int, ...]:
    """A list of lengths of axes as a shape; `...` is one left out. Raises InvalidRequest, or TooLarge for more than any memory holds."""
    if not isinstance(value, list):
        raise InvalidRequest.where(at, "a list of lengths", "nothing" if value is ... else shown(value))
    if len(value) > MAX_RANK:
        raise InvalidRequest.where(at, f"at most {MAX_RANK} axes", str(len(value)))
    for i, length in enumerate(value):
        if type(length) is not int or not 0 <= length < 2**31:
            raise InvalidRequest.where(f"{at}/{i}", "a length from 0 to 2147483647", shown(length))
    if math.prod(value) >= 2**48:
        raise TooLarge.where(at, "fewer than 2^48 elements", str(math.prod(value)))
    return tuple(value)
