"""Encodes replies as JSON. Numbers are read from the arrays' memory, without a Python object per number.

The compiled writer (`wire/native`) writes float32, orjson everything else, and float32 too where there is no compiled writer. orjson holds
the GIL until it returns, so long arrays are written in pieces. Both write NaN and infinities as `null`; each null is then replaced as
`options.nonfinite` requires.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import orjson
import pybase64

from attend.tensors import Array, datatype_of, raw
from attend.wire.arrays import may_be_minus_infinity, wire_array
from attend.wire.codec import Buffer, Encoded, Reply
from attend.wire.native import numbers
from attend.wire.schemas.attend import ReplyOptions

MEDIA_TYPE = "application/json"
HEADERS = ((b"content-type", MEDIA_TYPE.encode()),)
NUMBERS_PER_PIECE = 1 << 15  # numbers written at a time, which takes about a millisecond
MARK = b"\0"  # stands for a `JsonText` in a document; JSON text never contains this byte


class JsonText(tuple[Buffer, ...]):
    """A value of a JSON document that is already JSON text, in pieces. orjson does not know how to write it, and asks `write_json`."""

    __slots__ = ()


def encode(reply: Reply, options: ReplyOptions, reply_format: Any = None) -> Encoded:
    """The reply as JSON, in pieces. Raises InvalidRequest if a number is not finite and `options.nonfinite` is "error"."""
    pieces: list[Buffer] = [orjson.dumps({"layer": reply.layer, "fully_masked_rows": reply.fully_masked_rows})[:-1]]
    for name, tensor in reply.tensors.items():
        pieces.append(b',"%b":' % name.encode())
        if isinstance(tensor, dict):
            pieces += write_json({part: _wire_tensor(f"{name}.{part}", array, reply.datatype, options) for part, array in tensor.items()})
        else:
            array, nonfinite = wire_array(name, tensor, reply.datatype, options.nonfinite)
            if nonfinite is None and options.form == "nested" and 0 < array.size <= NUMBERS_PER_PIECE:
                text = numbers.write(array, options.decimals)  # of most replies
                if text is not None:
                    pieces.append(text)
                    continue
            value = _tensor(name, array, nonfinite, options)
            pieces += value if isinstance(value, JsonText) else write_json(value)
    if reply.session is not None:
        pieces += [b',"session":', orjson.dumps(reply.session)]
    if reply.metrics is not None:
        metrics = {name: _metric(value, reply.datatype, options) for name, value in reply.metrics.items()}
        pieces += [b',"metrics":', *write_json(metrics)]
    pieces.append(b"}")
    return HEADERS, pieces


def write_json(document: dict[str, Any]) -> list[Buffer]:
    """Encodes the document, which may contain arrays and `JsonText`. Returns pieces."""
    texts: list[JsonText] = []

    def marked(value: Any) -> orjson.Fragment:
        if not isinstance(value, JsonText):
            raise TypeError
        texts.append(value)
        return orjson.Fragment(MARK)

    text = orjson.dumps(document, marked, orjson.OPT_SERIALIZE_NUMPY)
    if not texts:
        return [text]
    before, *parts = text.split(MARK)
    return [before, *(piece for long, after in zip(texts, parts, strict=True) for piece in (*long, after))]


def _wire_tensor(name: str, array: Array, datatype: str, options: ReplyOptions) -> Any:
    """An array of a reply in the form that the request asks for. Raises as `wire_array`."""
    return _tensor(name, *wire_array(name, array, datatype, options.nonfinite), options)


def _tensor(name: str, array: Array, nonfinite: Array | None, options: ReplyOptions) -> Any:
    """What `wire_array` returned, in the form that the request asks for."""
    if options.form == "nested" and 0 not in array.shape:  # nested lists of shape [1, 0, 64] and [1, 0] are the same
        return json_text_of(name, array, nonfinite, options)
    description = {"shape": list(array.shape), "datatype": datatype_of(array).name}
    if options.form == "base64":
        return {**description, "base64": _base64(array)}
    return {**description, "data": json_text_of(name, array.reshape(-1), nonfinite, options)}


def _metric(value: Any, datatype: str, options: ReplyOptions) -> Any:
    """A metric, or its parts. Undefined values, NaN among numbers and -1 among indices, are written as null."""
    if isinstance(value, dict):
        return {part: _metric(inner, datatype, options) for part, inner in value.items()}
    if isinstance(value, list):
        return JsonText(_word_texts(value, {}))
    tensor = _wire_tensor("", value, datatype, options.model_copy(update={"nonfinite": "null"}))
    if value.dtype.kind != "i" or options.form == "base64" or not (value < 0).any():
        return tensor
    data = tensor["data"] if isinstance(tensor, dict) else tensor
    text = JsonText([bytes(piece).replace(b"-1", b"null") for piece in data])
    return {**tensor, "data": text} if isinstance(tensor, dict) else text


def bytes_of_word(word: str) -> int:
    """The bytes of a word in a reply, at most: as JSON text, which safetensors have inside of other JSON text, and the comma before it."""
    return len(orjson.dumps(orjson.dumps(word).decode())) + 1


def _word_texts(words: list[Any], written: dict[str | None, bytes]) -> Iterator[bytes]:
    """Nested lists of words as JSON text. A word is in memory once, however many links have it: `written` has those that were written."""
    yield b"["
    for i, word in enumerate(words):
        if i:
            yield b","
        if isinstance(word, list):
            yield from _word_texts(word, written)
        else:
            if word not in written:
                written[word] = orjson.dumps(word)
            yield written[word]
    yield b"]"


def _base64(array: Array) -> str | JsonText:
    data = raw(array)
    if len(data) <= 4 * NUMBERS_PER_PIECE:
        return pybase64.b64encode_as_string(data)
    step = 3 * NUMBERS_PER_PIECE  # bytes, a multiple of three, so that only the last piece is padded
    pieces: list[Buffer] = [pybase64.b64encode(data[i : i + step]) for i in range(0, len(data), step)]
    return JsonText([b'"', *pieces, b'"'])


def json_text_of(name: str, array: Array, nonfinite: Array | None, options: ReplyOptions) -> JsonText:
    """The array as JSON text."""
    if array.size > NUMBERS_PER_PIECE:
        return JsonText(_list_pieces(name, array, None if nonfinite is None else nonfinite.reshape(array.shape), options))
    if not array.ndim:
        return JsonText([_list_text(name, array.reshape(1), nonfinite, options)[1:-1]])
    return JsonText([_list_text(name, array, nonfinite, options)])


def _list_pieces(name: str, array: Array, nonfinite: Array | None, options: ReplyOptions) -> list[Buffer]:
    """The array as the text of a JSON list; each piece has at most about NUMBERS_PER_PIECE numbers."""
    size = array.size // len(array)  # numbers in a row
    pieces: list[Buffer] = []
    step = max(1, NUMBERS_PER_PIECE // size)
    for i in range(0, len(array), step):
        before = b"," if i else b"["
        rows, mask = array[i : i + step], None if nonfinite is None else nonfinite[i : i + step]
        if size > NUMBERS_PER_PIECE:
            pieces += before, *_list_pieces(name, rows[0], None if mask is None else mask[0], options)
        else:
            text = _list_text(name, rows, mask, options)
            pieces.append(b"".join((before, memoryview(text)[1:-1])))
    return [*pieces, b"]"]


def _list_text(name: str, array: Array, nonfinite: Array | None, options: ReplyOptions) -> bytes:
    """The array as the text of a JSON list."""
    if (array.dtype.kind == "f" and array.dtype.itemsize < 4) or array.dtype.kind == "V":  # orjson does not write them
        array = array.astype(np.float32)
    text = numbers.write(array, options.decimals)
    if text is None:
        text = orjson.dumps(np.ascontiguousarray(_rounded(array, options.decimals)), option=orjson.OPT_SERIALIZE_NUMPY)
    if nonfinite is None:
        return text
    values = [_nonfinite(name, str(float(number)), options) for number in array.reshape(-1)[nonfinite.reshape(-1)]]
    between = text.split(b"null")
    return b"".join(chain.from_iterable(zip(between, [*values, b""], strict=True)))


def _rounded(array: Array, decimals: int | None) -> Array:
    """The array with numbers rounded as Python rounds: to the nearest decimal. np.round is faster and less exact, since it multiplies."""
    if decimals is None or array.dtype.kind != "f":
        return array
    numbers = [round(number, decimals) + 0.0 for number in array.reshape(-1).tolist()]  # -0.0 becomes 0.0
    return np.array(numbers, array.dtype).reshape(array.shape)


def _nonfinite(name: str, number: str, options: ReplyOptions) -> bytes:
    """The JSON value for "nan", "inf" or "-inf"."""
    if options.nonfinite == "string" or (number == "-inf" and may_be_minus_infinity(name)):
        return b'"%b"' % number.encode()
    return b"null"
