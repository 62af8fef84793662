"""Results -> reply bytes, and the JSON form of them. Numbers go from the arrays' own memory into text; no Python object is made per number.

A reply's tensors are what the caller asked for, cast to the datatype the caller wants. Numbers that JSON cannot write are dealt with
here, in the order they stand: orjson writes them all as `null`, and each null is then given its word.
"""

import binascii
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import orjson

from service.errors import InvalidRequest
from service.tensors import BY_NUMPY, DATATYPES, Array, raw
from service.wire.schemas.attend import ReplyOptions

Buffer: TypeAlias = bytes | memoryview  # a piece of a reply; its len() is its bytes
MINUS_INFINITY_IS_A_VALUE = frozenset({"scores", "log_sum_exp"})
PIECE = 1 << 15  # numbers written at a time, which takes about a millisecond
PLACE = b"\0"  # of a long text in a document, which has no such byte elsewhere: in strings it is escaped
WORDS = {"nan": b'"nan"', "inf": b'"inf"', "-inf": b'"-inf"'}


@dataclass(frozen=True, slots=True)
class Reply:
    """What goes back to the caller. A tensor, or two of them (`keys` and `values`) where only the largest weights were asked for."""

    layer: dict[str, str]  # name, fingerprint
    fully_masked_rows: int
    datatype: str  # V2 name in which numbers go out
    tensors: dict[str, Array | dict[str, Array]] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None  # of an analysis: name -> array, or parts by name, of which lists are words

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Every array with its name; the two of one tensor as `name.keys` and `name.values`."""
        for name, tensor in self.tensors.items():
            if isinstance(tensor, dict):
                yield from ((f"{name}.{part}", array) for part, array in tensor.items())
            else:
                yield name, tensor


def encode_json(reply: Reply, options: ReplyOptions) -> list[Buffer]:
    """The reply as JSON. Raises InvalidRequest where a number is not finite and `options.nonfinite` is "error"."""
    document: dict[str, Any] = {"layer": reply.layer, "fully_masked_rows": reply.fully_masked_rows}
    for name, tensor in reply.tensors.items():
        if isinstance(tensor, dict):
            document[name] = {part: _form(f"{name}/{part}", array, reply.datatype, options) for part, array in tensor.items()}
        else:
            document[name] = _form(name, tensor, reply.datatype, options)
    if reply.metrics is not None:
        document["metrics"] = {name: _metric(value, reply.datatype, options) for name, value in reply.metrics.items()}
    return write_json(document)


class LongText:
    """A value of a JSON document that is long, as its text in pieces."""

    def __init__(self, pieces: list[Buffer]) -> None:
        self.pieces = pieces


def write_json(document: dict[str, Any]) -> list[Buffer]:
    """The document, which may hold arrays and `LongText`, in pieces.

    A writer holds the interpreter's lock until it is done, so that each piece is written by itself.
    """
    pieces: list[list[Buffer]] = []

    def place(value: Any) -> orjson.Fragment:
        if not isinstance(value, LongText):
            raise TypeError
        pieces.append(value.pieces)
        return orjson.Fragment(PLACE)

    text = orjson.dumps(document, place, orjson.OPT_SERIALIZE_NUMPY)
    if not pieces:
        return [text]
    before, *parts = text.split(PLACE)
    return [before, *(piece for long, after in zip(pieces, parts, strict=True) for piece in (*long, after))]


def _metric(value: Any, datatype: str, options: ReplyOptions) -> Any:
    """A metric, or the parts of one. What is not defined is null: NaN among numbers, -1 among indices."""
    if isinstance(value, dict):
        return {part: _metric(inner, datatype, options) for part, inner in value.items()}
    if isinstance(value, list):
        return value
    form = _form("", value, datatype, options.model_copy(update={"nonfinite": "null"}))
    if value.dtype.kind == "i" and options.form != "base64" and (value < 0).any():
        whole = form["data"] if isinstance(form, dict) else form
        written = whole.pieces if isinstance(whole, LongText) else [orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)]
        text = LongText([bytes(piece).replace(b"-1", b"null") for piece in written])
        return {**form, "data": text} if isinstance(form, dict) else text
    return form


def wire_array(name: str, array: Array, datatype: str, options: ReplyOptions) -> tuple[Array, Array | None]:
    """The array in its wire datatype, and which of its elements are not finite (None: all are).

    Raises InvalidRequest, naming output and index, where one is NaN or overflowed and the caller wants that to be an error.
    """
    if array.dtype.kind in "iu":
        return array, None
    if array.dtype != (wanted := DATATYPES[datatype].numpy):
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(wanted)
    finite = np.isfinite(array)
    if finite.all():
        return array, None
    if options.nonfinite == "error":
        wrong = ~finite
        if name in MINUS_INFINITY_IS_A_VALUE:
            wrong &= ~np.isneginf(array.astype(np.float64))
        if wrong.any():
            index = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), array.shape)]
            where = f"{name}{index} = {float(array[tuple(index)])}"
            raise InvalidRequest.where("/reply/nonfinite", f"finite numbers in {name} as {BY_NUMPY[array.dtype].name}", where)
    return array, ~finite


def _form(name: str, array: Array, datatype: str, options: ReplyOptions) -> Any:
    array, odd = wire_array(name, array, datatype, options)
    head = {"shape": list(array.shape), "datatype": BY_NUMPY[array.dtype.newbyteorder("<")].name}
    if options.form == "base64":
        return {**head, "base64": base64_of(array)}
    if options.form == "flat" or 0 in array.shape:  # nested lists cannot tell [1, 0, 64] from [1, 0]
        return {**head, "data": text_of(name, array.reshape(-1), odd, options)}
    return text_of(name, array, odd, options)


def base64_of(array: Array) -> str | LongText:
    """The array's bytes as base64; a long text in pieces, quotation marks included."""
    data = raw(array)
    if len(data) <= 4 * PIECE:
        return binascii.b2a_base64(data, newline=False).decode()
    step = 3 * PIECE  # bytes, a multiple of three, so that no piece but the last is padded
    pieces: list[Buffer] = [binascii.b2a_base64(data[i : i + step], newline=False) for i in range(0, len(data), step)]
    return LongText([b'"', *pieces, b'"'])


def text_of(name: str, array: Array, odd: Array | None, options: ReplyOptions) -> Any:
    """What `write_json` turns into the numbers of the array: the array itself, or text where it is long or holds what JSON cannot write."""
    if array.size > PIECE:
        return LongText(_pieces(name, array, None if odd is None else odd.reshape(array.shape), options))
    array = _printable(array, options)
    if not array.ndim:
        array = array.reshape(1)
        return orjson.Fragment(_written(name, array, odd, options)[1:-1])
    return np.ascontiguousarray(array) if odd is None else orjson.Fragment(_written(name, array, odd, options))


def _pieces(name: str, array: Array, odd: Array | None, options: ReplyOptions) -> list[Buffer]:
    """The text of an array as a list, some rows or numbers at a time."""
    size = array.size // len(array)  # numbers in a row
    pieces: list[Buffer] = []
    step = max(1, PIECE // size)
    for i in range(0, len(array), step):
        before = b"," if i else b"["
        rows, where = array[i : i + step], None if odd is None else odd[i : i + step]
        if size > PIECE:
            pieces += before, *_pieces(name, rows[0], None if where is None else where[0], options)
        else:
            text = _written(name, _printable(rows, options), where, options)
            pieces.append(b"".join((before, memoryview(text)[1:-1])))
    return [*pieces, b"]"]


def _printable(array: Array, options: ReplyOptions) -> Array:
    """The array as the writer takes it: wide enough, and rounded where that is asked for."""
    if (array.dtype.kind == "f" and array.dtype.itemsize < 4) or array.dtype.kind == "V":
        array = array.astype(np.float32)
    if options.decimals is not None and array.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = np.round(array, options.decimals)
        rounded += 0  # -0.0 becomes 0.0
        array = np.where(np.isfinite(rounded), rounded, array)  # rounding multiplies: what overflows has no such decimals
    return array


def _written(name: str, array: Array, odd: Array | None, options: ReplyOptions) -> bytes:
    text = orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
    if odd is None:
        return text
    words = [_word(name, str(float(number)), options) for number in array.reshape(-1)[odd.reshape(-1)]]
    parts = text.split(b"null")
    return b"".join(piece for pair in zip(parts, [*words, b""], strict=True) for piece in pair)


def _word(name: str, number: str, options: ReplyOptions) -> bytes:
    if number == "-inf" and name in MINUS_INFINITY_IS_A_VALUE:
        return WORDS[number]
    return WORDS[number] if options.nonfinite == "string" else b"null"
