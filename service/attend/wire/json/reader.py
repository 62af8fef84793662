"""Decodes a JSON body into its members, with tensors as numpy arrays and without a Python object per number.

Lists of numbers and long base64 strings are found without parsing, and replaced by placeholders. What remains is a small template, which
`strict.py` parses. `lists.py` then reads the numbers from the text. A small body that is refused is parsed again as a whole by `strict.py`,
which finds the place of the fault.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from attend.axes import Kind
from attend.errors import InvalidRequest, RequestError, TooLarge, did_you_mean, pointer
from attend.limits import WireLimits
from attend.spec_parts import whole
from attend.tensors import DATATYPES, Array, shape_alone
from attend.wire.arrays import MAX_RANK, array_of_base64
from attend.wire.codec import Decoded
from attend.wire.json.lists import NumberList, RawValue, array_of_lists
from attend.wire.json.strict import SCALARS, line_and_column, parse_strictly
from attend.wire.problems import MAX_SHOWN, describe_value

MAX_TEMPLATE_BYTES = 4 << 20  # bytes of a body without its numbers and base64
MAX_CACHED_BYTES = 2048  # bytes of a template whose parsed document is cached
MAX_STRICT_BYTES = 1 << 20  # bytes of a body that the strict reader may parse as a whole
MAX_TEMPLATE_STRING = 1 << 16  # bytes of a base64 string that stays in the template
MINUS_INFINITY = re.compile(rb'"-inf"\s*[,\]]')  # as an item of a list
NOT_COUNTED = 'base64 and lists of numbers (a list with an object, or a string other than "-inf", is no list of numbers)'
PLACEHOLDER = b"NaN"  # JSON has no such value
BEFORE_VALUE = re.compile(rb'"\s*:\s*(?=\[)|"base64"\s*:\s*(?=")')  # what is before a list or a long string
AFTER_VALUE = re.compile(rb'\s*(?:\}|,\s*"(?:[^"\\]|\\.){,200}"\s*:)')  # what is after the value of a member
ESCAPE = re.compile(rb"\\(?:/|u00([0-7][0-9A-Fa-f]))")  # of a character that base64 may have
MEMBERS_PER_TENSOR = 4  # a tensor is a member of an object, and as an object it has up to three
TENSOR_KEYS = ("shape", "datatype", "data", "base64")


def decode(
    body: bytes, parameters: Mapping[str, str], kinds: Mapping[str, Kind], limits: WireLimits, shapes_alone: bool = False
) -> Decoded:
    """The members of the JSON object `body`; those named in `kinds` as arrays, the others as Python objects. The reply may need the
    `parameters`.

    `kinds` maps names of members to the kind of their tensor; "weights/*" names every member of the object `weights`. With `shapes_alone` a
    tensor may be given by its shape: zeros that take no memory. Raises MalformedBody, InvalidRequest or TooLarge.
    """
    try:
        template, values = split_json(body, limits)
        document = parse_template(body, template, values, limits)
        members = DocumentReader(limits, shapes_alone, values).members(document, kinds)
    except TooLarge:
        raise
    except RequestError as refusal:
        document = parse_refused(body, limits, refusal)
        members = DocumentReader(limits, shapes_alone).members(document, kinds)
    return Decoded(members, parameters)


def parse_refused(body: bytes, limits: WireLimits, refusal: RequestError) -> Any:
    """The whole of a small body that `refusal` refuses, with the numbers of its tensors, to find the place of its fault. Raises `refusal`
    for a large one."""
    if len(body) <= MAX_STRICT_BYTES:
        with suppress(TooLarge):
            return parse_strictly(body, limits=limits)
    raise refusal


class Base64Text(RawValue):
    """A long string."""

    __slots__ = ()

    def content(self) -> bytes | memoryview:
        """The content, with escaped characters of ASCII unescaped; a view if it has none. Base64 has no other characters."""
        if self.text.find(b"\\", self.start, self.stop) < 0:
            return memoryview(self.text)[self.start + 1 : self.stop - 1]
        content = self.text[self.start + 1 : self.stop - 1]
        return ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()) if escape[1] else b"/", content)


class Placeholder(int):
    """Stands, in a parsed template, for the list or long string of that index. It is always the value of a member of an object."""


def parse_template(text: bytes, template: bytes, values: Sequence[RawValue], limits: WireLimits) -> Any:
    """The document of a text that `split_json` has split, which must not be changed. Raises MalformedBody, InvalidRequest or TooLarge."""
    if len(template) <= MAX_CACHED_BYTES:
        try:
            return _parse_recurring(template, len(values))
        except (RequestError, RecursionError):
            pass  # refused below, with the place in the text

    def position_of(offset: int) -> str:
        """Line and column in the text of the byte at `offset` in the template."""
        for value in values:
            if offset <= value.start:
                break
            offset += value.stop - value.start - len(PLACEHOLDER)
        return line_and_column(text, min(offset, len(text)))

    return parse_strictly(template, position_of=position_of, replacements=[*map(Placeholder, range(len(values)))], limits=limits)


@lru_cache(256)  # clients repeat what is around the numbers, and parsing it costs more than reading the numbers of a small call
def _parse_recurring(template: bytes, count: int) -> Any:
    """The document of a template with `count` placeholders, each as a `Placeholder`. Raises MalformedBody, InvalidRequest or TooLarge."""
    return parse_strictly(template, replacements=[*map(Placeholder, range(count))])


def split_json(text: bytes, limits: WireLimits, before: re.Pattern[bytes] = BEFORE_VALUE) -> tuple[bytes, list[RawValue]]:
    """(template, values): the values are the lists of numbers and long base64 strings that follow a match of `before`; the template is the
    text with a placeholder in place of each. Raises TooLarge.

    Nothing is parsed. In JSON, a quotation mark before a colon ends a key, so a value follows. There are no strings or objects before the
    next quotation mark or brace, so a list that is the value and ends before that mark contains only numbers. If the text is not JSON, the
    template or one of the values is not JSON either, and is refused when it is parsed. So {"query": [[1, 2]], "causal": true} has the list
    [[1, 2]], and a template with a placeholder in its place.
    """
    pieces: list[bytes] = []
    values: list[RawValue] = []
    copied = position = size = 0  # text[:copied] is in the template, as `size` bytes without the placeholders
    while found := before.search(text, position, copied + MAX_TEMPLATE_BYTES - size):
        start = found.end()
        value = (_number_list if text[start : start + 1] == b"[" else _base64_text)(text, start, limits)
        position = start + 1
        if value is not None:
            values.append(value)
            if len(values) > limits.values:
                raise TooLarge.where("", f"at most {limits.values} values outside of tensors in one body", "more")
            pieces += text[copied:start], PLACEHOLDER
            size += start - copied
            copied = position = value.stop
    size += len(text) - copied
    if size > MAX_TEMPLATE_BYTES:
        raise TooLarge.where("", f"at most {MAX_TEMPLATE_BYTES} bytes outside of {NOT_COUNTED}", str(size))
    return b"".join((*pieces, text[copied:])), values


def _number_list(text: bytes, start: int, limits: WireLimits) -> NumberList | None:
    """The list that begins at `start`; None if it contains strings or objects."""
    quote = text.find(b'"', start)
    while quote >= 0 and (item := MINUS_INFINITY.match(text, quote)):
        quote = text.find(b'"', item.end())
    brace = text.find(b"}", start, quote if quote >= 0 else len(text))
    stop = text.rfind(b"]", start, quote if brace < 0 else brace) + 1
    return NumberList(text, start, stop, limits) if stop and AFTER_VALUE.match(text, stop) else None


def _base64_text(text: bytes, start: int, limits: WireLimits) -> Base64Text | None:
    """The string that begins at `start`; None if it is at most MAX_TEMPLATE_STRING bytes."""
    stop = text.find(b'"', start + 1) + 1
    return Base64Text(text, start, stop, limits) if stop - start > MAX_TEMPLATE_STRING and text[stop - 2 : stop - 1] != b"\\" else None


class DocumentReader:
    """Converts the members of one document, and limits their depth and number. `values`: those that its placeholders stand for."""

    def __init__(self, limits: WireLimits, shapes_alone: bool = False, values: Sequence[RawValue] = ()) -> None:
        self.limits, self.shapes_alone, self.values = limits, shapes_alone, values
        self.value_count = self.member_count = 0

    def members(self, document: Any, kinds: Mapping[str, Kind], at: str = "", depth: int = 1) -> dict[str, Any]:
        """The members of an object, which is at this pointer and depth: tensors as arrays, the others as Python objects."""
        if not isinstance(document, dict):
            raise InvalidRequest.where(at, "a JSON object", "a list" if isinstance(document, list) else describe_value(document))
        if len(document) > self.limits.max_tensors:
            raise TooLarge.where(at, f"an object of at most {self.limits.max_tensors} members (max_tensors)", str(len(document)))
        self.member_count += len(document)
        if self.member_count > (largest := MEMBERS_PER_TENSOR * self.limits.max_tensors):  # a refusal of each takes long to write
            raise TooLarge.where(at, f"at most {largest} members of objects in one body ({MEMBERS_PER_TENSOR} x max_tensors)", "more")
        members: dict[str, Any] = {}
        for key, value in document.items():
            if type(value) is Placeholder:
                value = self.values[value]
            place = f"{at}/{key}" if key.isidentifier() else at + pointer([key])
            if kind := kinds.get(key) or kinds.get("*"):
                members[key] = value.array(kind, place) if type(value) is NumberList else self._tensor(value, kind, place)
            elif type(value) in SCALARS and depth < self.limits.max_depth and self.value_count < self.limits.values:
                self.value_count += 1  # as `_plain` does
                members[key] = value
            else:
                below = kinds.get(f"{key}/*")
                members[key] = self._plain(value, place, depth + 1, {"*": below} if below else None)
        return members

    def _plain(self, value: Any, at: str, depth: int, kinds: Mapping[str, Kind] | None = None) -> Any:
        """The value as Python objects; members named in `kinds` become arrays."""
        self.value_count += 1
        if self.value_count > self.limits.values:
            raise TooLarge.where(at, f"at most {self.limits.values} values outside of tensors in one body", "more")
        if depth > self.limits.max_depth:
            raise TooLarge.where(
                "/" + at.split("/")[1], f"a document at most {self.limits.max_depth} deep (max_depth)", "one nested deeper"
            )
        if isinstance(value, dict):
            return self.members(value, kinds or {}, at, depth)
        if isinstance(value, list):
            return [self._plain(item, f"{at}/{i}", depth + 1) for i, item in enumerate(value)]
        return self._plain(value.parsed(at), at, depth) if isinstance(value, RawValue) else value

    def _tensor(self, value: Any, kind: Kind, at: str) -> Any:
        if isinstance(value, Base64Text):
            return bytes(value.content()[: 2 * MAX_SHOWN]).decode(errors="replace")
        if isinstance(value, list):
            return array_of_lists(value, kind, at)
        if isinstance(value, dict):
            return self._tensor_object(value, kind, at)
        if isinstance(value, bool) and kind == "mask":
            return np.array(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return np.array(float(value))

    def _tensor_object(self, value: dict[str, Any], kind: Kind, at: str) -> Array:
        """`{"shape", "datatype", "data"}` or `{"shape", "datatype", "base64"}`; with `shapes_alone` zeros that take no memory."""
        for key in value:
            if key not in TENSOR_KEYS:
                raise InvalidRequest.where(
                    at + pointer([key]), "one of " + ", ".join(TENSOR_KEYS), describe_value(key) + did_you_mean(key, TENSOR_KEYS)
                )
        value = {key: self.values[part] if type(part) is Placeholder else part for key, part in value.items()}
        data, base64 = value.get("data"), value.get("base64")
        if "data" in value and "base64" in value:
            raise InvalidRequest.where(at, "either data or base64", "both")
        if "base64" in value and base64 is None:
            raise InvalidRequest.where(f"{at}/base64", "a base64 string", "null")
        shape = shape_of(self._plain(value.get("shape", ...), f"{at}/shape", 3), f"{at}/shape")
        name = value.get("datatype")
        if not (name is None and base64 is None) and (not isinstance(name, str) or name not in DATATYPES):
            raise InvalidRequest.where(
                f"{at}/datatype", "one of " + " ".join(DATATYPES), describe_value(name) + did_you_mean(name, DATATYPES)
            )
        dtype = DATATYPES[name].numpy if name else np.dtype(np.float64)
        if base64 is not None:
            text = base64.content() if isinstance(base64, Base64Text) else [] if isinstance(base64, NumberList) else base64
            return array_of_base64(text, shape, dtype, f"{at}/base64")
        if data is not None:
            return array_of_data(data, kind, shape, dtype, f"{at}/data")
        if not self.shapes_alone:
            raise InvalidRequest.where(at, "data or base64 in addition to the shape", "a shape alone")
        return shape_alone(shape, dtype)


def array_of_data(data: Any, kind: Kind, shape: tuple[int, ...], dtype: np.dtype[Any], at: str) -> Array:
    """A list of numbers, flat or nested to the shape, as an array of `dtype`. Raises InvalidRequest if they do not fit."""
    if not isinstance(data, list | NumberList):
        raise InvalidRequest.where(at, "a list of numbers", "a long string" if isinstance(data, Base64Text) else describe_value(data))
    if data.empty if isinstance(data, NumberList) else not data:
        array = np.zeros(0, dtype)
    else:
        array = data.array(kind, at, dtype) if isinstance(data, NumberList) else array_of_lists(data, kind, at, dtype)
    if array.shape != shape and array.shape != (math.prod(shape),):
        got = f"{array.size}" if array.ndim == 1 else f"shape {list(array.shape)}"
        raise InvalidRequest.where(at, f"{math.prod(shape)} values for shape {list(shape)}, in one list or nested to it", got)
    return array.reshape(shape)


def shape_of(value: Any, at: str) -> tuple[int, ...]:
    """A list of lengths of axes as a shape; `...` means that the list is missing. Raises InvalidRequest, or TooLarge (2^48 elements)."""
    if not isinstance(value, list):
        raise InvalidRequest.where(at, "a list of lengths", "nothing" if value is ... else describe_value(value))
    if len(value) > MAX_RANK:
        raise InvalidRequest.where(at, f"at most {MAX_RANK} axes", str(len(value)))
    lengths = [whole(length) for length in value]
    for i, length in enumerate(lengths):
        if type(length) is not int or not 0 <= length < 2**31:
            raise InvalidRequest.where(f"{at}/{i}", "a length from 0 to 2147483647", describe_value(length))
    if math.prod(lengths) >= 2**48:
        raise TooLarge.where(at, "fewer than 2^48 elements", str(math.prod(lengths)))
    return tuple(lengths)
