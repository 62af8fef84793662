"""Tensors as fields of pydantic models: the kinds a field may have, and how a kind checks and describes itself.

A decoder hands over numpy arrays (whatever their dtype), Python callers may hand over nested lists; a field that validates holds an
array whose dtype suits its kind. Shapes that must agree with other fields are `shapes.py`'s business, finiteness is checked
once, when an array is cast to the layer's dtype.
"""

import binascii
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from service.errors import InvalidRequest
from service.spec import disagreement
from service.tensors import BY_NUMPY, DATATYPES, Array, Datatype
from service.wire.problems import shown

Kind = Literal["number", "bias", "mask", "count"]
MAX_RANK = 4
LARGEST_COUNT = 2**53
EXACT = 2**53  # up to it a float64 holds every whole number
LONGEST_AXIS = 2**31 - 1
NAME = "x-name"  # in a JSON schema: what a definition of it is called
ITEMS: dict[Kind, dict[str, Any]] = {
    "number": {"type": "number"},
    "bias": {
        "anyOf": [{"type": "number"}, {"type": "string", "enum": ["-inf"]}],
        NAME: {"title": "BiasElement", "description": "A number that is added to a score; -inf blocks the pair."},
    },
    "mask": {"enum": [0, 1, True, False]},
    "count": {"type": "integer", "minimum": 0, "maximum": LARGEST_COUNT},
}
WORDS: dict[Kind, str] = {"number": "numbers", "bias": 'numbers or "-inf"', "mask": "0, 1, true or false", "count": "whole numbers"}
REFERENCE = "#/components/schemas/{model}"  # where the OpenAPI document has a definition
NULL = {"type": "null"}


class Base64Tensor(BaseModel):
    """A tensor as shape and base64 of its little-endian row-major bytes."""

    model_config = ConfigDict(extra="forbid")
    shape: list[int]
    datatype: str = Field(description="Open Inference Protocol name, such as FP32.")
    base64: str


def array_over(piece: memoryview | bytes, row: Datatype, shape: Sequence[int], at: str) -> Array:
    """An array over a piece of a body that has just its bytes; a copy where they do not stand as the processor wants them.

    Raises InvalidRequest at `at` where bytes of BOOL are neither 0 nor 1.
    """
    if row.kind == "bool":
        _demand_flags(piece, at)
    array: Array = np.frombuffer(piece, row.numpy).reshape(shape)
    return array if array.flags.aligned else array.copy()


def decode_base64(pieces: Iterator[bytes]) -> bytearray:
    """The bytes of a base64 text that comes in pieces, which may be cut anywhere. Raises ValueError where it is none."""
    data, rest = bytearray(), b""
    for piece in pieces:
        rest += piece
        whole = max(0, len(rest) // 4 * 4 - 4)  # what may be the last four stay: they alone may be padded
        if b"=" in rest[:whole]:
            raise ValueError("Excess data after padding")
        if whole:
            data += binascii.a2b_base64(rest[:whole], strict_mode=True)
            rest = rest[whole:]
    if rest:
        data += binascii.a2b_base64(rest, strict_mode=True)
    return data


def array_of_base64(text: Any, shape: tuple[int, ...], dtype: np.dtype[Any], at: str) -> Array:
    """The array whose bytes the text holds, a string or the pieces of one. Raises InvalidRequest where it does not hold just these."""
    if not isinstance(text, str | Iterator):
        raise InvalidRequest.where(at, "a base64 string", shown(text))
    try:
        if isinstance(text, str):
            data: bytes | bytearray = binascii.a2b_base64(text, strict_mode=True) if text else b""
        else:
            data = decode_base64(text)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest.where(at, "base64", f"something else ({error})") from None
    if len(data) != math.prod(shape) * dtype.itemsize:
        wanted = f"{math.prod(shape) * dtype.itemsize} bytes for shape {list(shape)} of {BY_NUMPY[dtype].name}"
        raise InvalidRequest.where(at, wanted, str(len(data)))
    array = np.frombuffer(data, dtype)
    if dtype == np.bool_:
        _demand_flags(data, at)
    return array.reshape(shape)


def _demand_flags(piece: memoryview | bytes | bytearray, at: str) -> None:
    flags = np.frombuffer(piece, np.uint8)
    if (wrong := flags > 1).any():
        first = int(np.argmax(wrong))
        raise InvalidRequest.where(at, "bytes 0 or 1 for BOOL", f"{flags[first]} as byte {first}")


def beyond_float64(numbers: Array, dtype: np.dtype[Any]) -> bool:
    """Whether some of the numbers, read as float64, may not be the integers of 64 bits that were sent."""
    return dtype.kind in "iu" and dtype.itemsize == 8 and bool((np.abs(numbers) >= EXACT).any())


def held_exactly(numbers: Array, dtype: np.dtype[Any], at: str) -> Array:
    """The numbers, float64, in a datatype that holds them. Raises InvalidRequest at the first that it does not hold."""
    if numbers.dtype == dtype:
        return numbers
    with np.errstate(over="ignore", invalid="ignore"):
        array = numbers.astype(dtype)
    demand_exact(array, numbers, BY_NUMPY[dtype], at)
    return array


def demand_exact(array: Array, numbers: Array, row: Datatype, at: str) -> None:
    """Raises InvalidRequest at the first of `numbers` that `array`, made of them, does not hold. Floats may be rounded, others may not."""
    wrong = ~np.isfinite(array) if row.kind == "float" else array != numbers
    if not wrong.any():
        return
    if row.kind == "float":
        wrong &= np.isfinite(numbers)  # a bias may be -inf
    if wrong.any():
        value = numbers[np.unravel_index(int(np.argmax(wrong)), wrong.shape)].item()
        raise InvalidRequest.where(at + first_index(wrong), held_by(row), number_in_words(value))


def held_by(row: Datatype) -> str:
    """The numbers of a datatype, in words."""
    if row.kind == "int":
        return f"a whole number from {np.iinfo(row.numpy).min} to {np.iinfo(row.numpy).max} for {row.name}"
    return "0 or 1 for BOOL" if row.kind == "bool" else f"a number that is finite in {row.name}"


def number_in_words(value: float) -> str:
    """As people write it: a whole number without a point, as long as it is that very one."""
    return str(int(value)) if isinstance(value, int) or (value.is_integer() and abs(value) <= EXACT) else repr(value)


def there(array: Array) -> Array:
    """What of a broadcast array is really there: the axes along which nothing changes cut to 1."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


def first_index(where: Array) -> str:
    """Pointer to the first true element: /0/3/1."""
    flat = int(np.argmax(where))
    return "".join(f"/{i}" for i in np.unravel_index(flat, where.shape)) if where.ndim else ""


def element(array: Array, at: str) -> str:
    """The element a pointer of `first_index` names, in words."""
    value = array[tuple(int(i) for i in at.split("/")[1:])]
    return str(value.item() if hasattr(value, "item") else value)


@dataclass(frozen=True)
class Tensor:
    """Annotation: a numpy array of one of `ranks` whose values are of `kind`; `name` is what the OpenAPI document calls it."""

    name: str
    kind: Kind
    ranks: tuple[int, ...]

    def __call__(self, value: Any) -> Array:
        array = self._array(value)
        if array.ndim not in self.ranks:
            wanted = " or ".join(map(str, self.ranks))
            raise disagreement("", f"a tensor of rank {wanted}", f"shape {list(array.shape)}")
        return array if self.kind in ("number", "bias") else self._whole(array)

    def _array(self, value: Any) -> Array:
        if isinstance(value, str | bool | dict) or value is None:
            raise disagreement("", "a tensor", shown(value))
        try:
            array = np.asarray(value)
        except (ValueError, TypeError):
            raise disagreement("", "a tensor", "ragged rows") from None
        row = BY_NUMPY.get(array.dtype.newbyteorder("<"))
        if row is None or (row.kind == "bool" and self.kind in ("number", "bias")):
            raise disagreement("", "numbers", f"elements of type {array.dtype}")
        return array

    def _whole(self, array: Array) -> Array:
        if 0 in array.strides and array.size > 1:  # broadcast, as a tensor given by shape alone is: look at what is really there
            return np.broadcast_to(self._whole(there(array).copy()), array.shape)
        if array.dtype == np.bool_:
            if self.kind == "count":
                raise disagreement("", "integers", "booleans")
            return array
        if self.kind == "mask":
            mask: Array = array != 0
            if (wrong := mask & (array != 1)).any():
                at = first_index(wrong)
                raise disagreement(at, "0, 1, true or false", element(array, at))
            return mask
        if (wrong := ~(array >= 0) | (array > LARGEST_COUNT) | (array != np.floor(array))).any():
            at = first_index(wrong)
            raise disagreement(at, "a whole number of keys", element(array, at))
        return array.astype(np.int64)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        ranks = " or ".join(map(str, self.ranks))
        return {"anyOf": self._forms(), NAME: {"title": self.name, "description": f"A tensor of rank {ranks}, of {WORDS[self.kind]}."}}

    def _forms(self) -> list[dict[str, Any]]:
        """JSON schemas of what it may be: nested lists, shape and data, shape and base64."""
        lists = [_lists(self.kind, rank) for rank in self.ranks]
        axes: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": LONGEST_AXIS}}
        axes |= {"minItems": min(self.ranks), "maxItems": max(self.ranks), "description": "Lengths of the axes; 0 is allowed."}
        names = [row.name for row in DATATYPES.values() if row.kind != "bool" or self.kind == "mask"]
        datatype = {"enum": names, "description": "Of the Open Inference Protocol."}
        flat = {"type": "array", "items": ITEMS[self.kind]}
        data: dict[str, Any] = {"anyOf": [flat, *(form for form, rank in zip(lists, self.ranks, strict=True) if rank > 1), NULL]}
        data["description"] = "Row-major values, flat or nested to the shape; left out only under /attend/plan."
        text = {"type": "string", "contentEncoding": "base64", "description": "Of the little-endian row-major bytes."}
        numbers = _object({"shape": axes, "datatype": {"anyOf": [datatype, NULL]}, "data": data}, "shape")
        return [*lists, numbers, _object({"shape": axes, "datatype": datatype, "base64": text}, "shape", "datatype", "base64")]


def _lists(kind: Kind, rank: int) -> dict[str, Any]:
    """The schema of nested lists. One of length 0 has no shape to tell, so there is none."""
    return ITEMS[kind] if not rank else {"type": "array", "items": _lists(kind, rank - 1), "minItems": 1}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def with_definitions(schemas: dict[str, Any]) -> dict[str, Any]:
    """The schemas with one definition of each kind of tensor, to which others refer; `{model}` in REFERENCE is its name."""
    found: dict[str, Any] = {}

    def referring(node: Any) -> Any:
        if isinstance(node, list):
            return [referring(item) for item in node]
        if not isinstance(node, dict):
            return node
        if NAME not in node:
            return {key: referring(value) for key, value in node.items()}
        name = node[NAME]["title"]
        found[name] = {**node[NAME], "anyOf": referring(node["anyOf"])}
        words = {key: node[key] for key in ("description",) if key in node}
        return {"$ref": REFERENCE.format(model=name), **words}

    return {**referring(schemas), **found}


def tensor_kinds(model: type[BaseModel]) -> dict[str, Kind]:
    """Field name -> kind, for the fields of `model` that are tensors."""

    def annotations(item: Any) -> list[Any]:
        return [item, *(a for inner in get_args(item) for a in annotations(inner))] if get_origin(item) is not dict else []

    found = {n: [*f.metadata, *annotations(f.annotation)] for n, f in model.model_fields.items()}
    return {name: item.kind for name, items in found.items() for item in items if isinstance(item, Tensor)}


Sequences = Annotated[Array, Tensor("Sequences", "number", (2, 3))]  # [b, n, width] or [n, width]
Mask = Annotated[Array, Tensor("Mask", "mask", (2, 3, 4))]
KeyMask = Annotated[Array, Tensor("KeyMask", "mask", (1, 2))]
Lengths = Annotated[Array, Tensor("Lengths", "count", (0, 1, 2))]
Bias = Annotated[Array, Tensor("Bias", "bias", (2, 3, 4))]
HeadScale = Annotated[Array, Tensor("HeadScale", "number", (1, 2))]
Weight = Annotated[Array, Tensor("Weight", "number", (1, 2))]
