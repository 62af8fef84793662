"""Tensors as fields of pydantic models: what each field of a request accepts, the forms of a tensor in a reply, and their JSON schemas.

Decoders give arrays of any dtype, Python callers may give nested lists. A field that validates is an array whose dtype suits its kind.
`shapes.py` checks the shapes of fields against each other. Whether numbers are finite is checked when they are cast to the layer's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args, get_origin

import numpy as np
import pybase64
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, RootModel
from pydantic.json_schema import models_json_schema
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from attend.axes import TENSOR_FIELDS, Kind
from attend.spec_parts import field_error
from attend.tensors import BY_NUMPY, DATATYPES, Array, datatype_of, raw
from attend.wire.arrays import MAX_EXACT_INTEGER, first_element, without_broadcast
from attend.wire.problems import describe_value

MAX_AXIS = 2**31 - 1
FEW_NUMBERS = 16  # are looked at one by one sooner than NumPy's functions begin
NAME_KEY = "x-name"  # in a JSON schema: title and description of the definition that it becomes
ITEMS: dict[Kind, dict[str, Any]] = {
    "number": {"type": "number"},
    "bias": {
        "anyOf": [{"type": "number"}, {"type": "string", "enum": ["-inf"]}],
        NAME_KEY: {"title": "BiasElement", "description": 'A number that is added to a score. "-inf" blocks the pair of query and key.'},
    },
    "mask": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 1}, {"type": "boolean"}]},
    "count": {"type": "integer", "minimum": 0, "maximum": MAX_EXACT_INTEGER - 1},
    "segment": {"type": "integer", "minimum": -1, "maximum": MAX_EXACT_INTEGER - 1},
}
DESCRIPTIONS: dict[Kind, str] = {
    "number": "numbers",
    "bias": 'numbers or "-inf"',
    "mask": "0, 1, true or false",
    "count": "whole numbers",
    "segment": "numbers of segments, -1 for padding",
}
REFERENCE = "#/components/schemas/{model}"  # where the OpenAPI document has a definition
NULL = {"type": "null"}


class Number(RootModel[float | str | None]):
    """A number; null, or a string such as "NaN", only where `reply.nonfinite` asks for it, or "-inf" among scores."""


class Vector(RootModel[list[Number]]):
    """Numbers."""


class Matrix(RootModel[list[Vector]]):
    """Rows of numbers."""


class Tensor3(RootModel[list[Matrix]]):
    """Nested lists of rank 3."""


class Tensor4(RootModel[list[Tensor3]]):
    """Nested lists of rank 4."""


class Base64Tensor(BaseModel):
    """A tensor as its shape and the base64 of its little-endian bytes in row-major order."""

    model_config = ConfigDict(extra="forbid")
    shape: list[int]
    datatype: str = Field(description="Name in the Open Inference Protocol, such as FP32.")
    base64: str

    @classmethod
    def of(cls, array: Array) -> Self:
        return cls(shape=list(array.shape), datatype=datatype_of(array).name, base64=pybase64.b64encode_as_string(raw(array)))


class FlatTensor(BaseModel):
    """A tensor as its shape and its numbers in row-major order."""

    model_config = ConfigDict(extra="forbid")
    shape: list[int]
    datatype: str = Field(description="Name in the Open Inference Protocol, such as FP32.")
    data: list[Number]


class ReplyTensor(RootModel[Number | Vector | Matrix | Tensor3 | Tensor4 | FlatTensor | Base64Tensor]):
    """A tensor of a reply, in the form that `reply.form` chose. Nested lists have the rank of the tensor."""


@dataclass(frozen=True)
class Tensor:
    """The annotation of a field that is a numpy array of one of `ranks`, with elements of `kind`.

    `name`: of its type in the OpenAPI document; `counted`: what a refused count is a number of.
    """

    name: str
    kind: Kind
    ranks: tuple[int, ...]
    counted: str = "keys"

    @classmethod
    def of(cls, name: str, field: str, counted: str = "keys") -> Self:
        """The annotation of this field, and of others that may have the same tensors."""
        return cls(name, TENSOR_FIELDS[field].kind, TENSOR_FIELDS[field].ranks, counted)

    def __call__(self, value: Any) -> Array:
        array = self._checked(value)
        if array.ndim not in self.ranks:
            wanted = " or ".join(map(str, self.ranks))
            raise field_error("", f"a tensor of rank {wanted}", f"shape {list(array.shape)}")
        return array if self.kind in ("number", "bias") else self._as_integers(array)

    def valid(self, array: Array, most: int) -> Array | None:
        """A validated array of one whose shape is valid; None if an element is not, or is a count above `most`."""
        try:
            return array if self.kind in ("number", "bias") else self._as_integers(array, most)
        except PydanticCustomError:
            return None

    def _checked(self, value: Any) -> Array:
        if isinstance(value, str | bool | dict) or value is None:
            raise field_error("", "a tensor", describe_value(value))
        try:
            array = np.asarray(value)
        except (ValueError, TypeError):
            raise field_error("", "a tensor", "ragged rows") from None
        datatype = BY_NUMPY.get(array.dtype) or BY_NUMPY.get(array.dtype.newbyteorder("<"))
        if datatype is None or (datatype.kind == "bool" and self.kind in ("number", "bias")):
            raise field_error("", "numbers", f"elements of type {array.dtype}")
        return array

    def _as_integers(self, array: Array, most: int = MAX_EXACT_INTEGER - 1) -> Array:
        """A mask as booleans, other kinds as int64. Raises at the first element that this would change, or a count above `most`."""
        if 0 in array.strides and array.size > 1:  # a tensor given by its shape alone is broadcast, and may be huge
            return np.broadcast_to(self._as_integers(without_broadcast(array).copy(), most), array.shape)
        if array.dtype == np.bool_:
            if self.kind != "mask":
                raise field_error("", "whole numbers", "booleans")
            return array
        if self.kind == "mask":
            mask: Array = array == 1
            if np.count_nonzero(mask) != np.count_nonzero(array):
                at, got = first_element(array, ~mask & (array != 0))
                raise field_error(at, "0, 1, true or false", got)
            return mask
        if self.kind == "count":
            least, expected = 0, f"a number of {self.counted}: a whole number of at least 0"
        else:  # from 2^53 on, float64 cannot represent every whole number: two segments might become one
            least, expected = -1, f"the number of a segment, a whole number below {MAX_EXACT_INTEGER}, or -1 for padding"
        if array.size <= FEW_NUMBERS and all(least <= x <= most and x % 1 == 0 for x in array.ravel().tolist()):
            return array.astype(np.int64)
        if (wrong := ~(array >= least) | (array > most) | (array != np.floor(array))).any():
            at, got = first_element(array, wrong)
            if self.kind == "count" and array[wrong].flat[0] > most:
                expected = expected.replace("at least 0", f"at most {most}")
            raise field_error(at, expected, got)
        return array.astype(np.int64)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return tensor_schema(self.name, self.kind, self.ranks)


def find_tensors(model: type[BaseModel]) -> dict[str, Tensor]:
    """Field name -> annotation, for the fields of `model` that are tensors."""

    def annotations(item: Any) -> list[Any]:
        return [item, *(a for inner in get_args(item) for a in annotations(inner))] if get_origin(item) is not dict else []

    found = {n: [*f.metadata, *annotations(f.annotation)] for n, f in model.model_fields.items()}
    return {name: item for name, items in found.items() for item in items if isinstance(item, Tensor)}


Sequences = Annotated[Array, Tensor.of("Sequences", "query")]
Mask = Annotated[Array, Tensor.of("Mask", "attend_mask")]
KeyMask = Annotated[Array, Tensor.of("KeyMask", "attend_keys")]
Lengths = Annotated[Array, Tensor.of("Lengths", "valid_lens")]
Segments = Annotated[Array, Tensor.of("Segments", "segments")]
RowCounts = Annotated[Array, Tensor.of("RowCounts", "query_lengths", counted="rows")]
Bias = Annotated[Array, Tensor.of("Bias", "bias")]
Positions = Annotated[Array, Tensor.of("Positions", "positions")]
HeadScale = Annotated[Array, Tensor.of("HeadScale", "head_scale")]
Pattern = Annotated[Array, Tensor.of("Pattern", "pattern")]
HeadOutputs = Annotated[Array, Tensor.of("HeadOutputs", "head_outputs")]
HeadRows = Annotated[Array, Tensor.of("HeadRows", "pattern_rows")]
Weight = Annotated[Array, Tensor("Weight", "number", (1, 2))]


def tensor_field(name: str, about: str = "") -> Any:
    """The field of a tensor, which may be null. Its description begins with the axes."""
    return Field(default=None, description=f"{TENSOR_FIELDS[name]}. {about}".rstrip())


def tensor_schema(name: str, kind: Kind, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The JSON schema of a tensor of a request: nested lists, shape and data, or shape and base64."""
    lists = [_nested_lists(kind, rank) for rank in ranks]
    axes: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_AXIS}}
    axes |= {"minItems": min(ranks), "maxItems": max(ranks), "description": "Lengths of the axes. 0 is allowed."}
    names = [datatype.name for datatype in DATATYPES.values() if datatype.kind != "bool"]
    about = {"title": "Datatype", "description": "Datatype of numbers, by its name in the Open Inference Protocol."}
    datatype: dict[str, Any] = {"type": "string", "enum": names, NAME_KEY: about}
    if kind == "mask":
        datatype = {"anyOf": [datatype, {"type": "string", "enum": ["BOOL"]}]}
    flat = {"type": "array", "items": ITEMS[kind]}
    data: dict[str, Any] = {"anyOf": [flat, *(nested for nested, rank in zip(lists, ranks, strict=True) if rank > 1), NULL]}
    data["description"] = "Row-major values, in one list or nested to the shape; optional only for POST /attend/plan."
    text = {"type": "string", "contentEncoding": "base64", "description": "Little-endian bytes of the row-major values."}
    numbers = _object_schema({"shape": axes, "datatype": {"anyOf": [datatype, NULL]}, "data": data}, "shape")
    numbers[NAME_KEY] = {"title": f"Flat{name}", "description": "A shape, and values in row-major order."}
    bytes_ = _object_schema({"shape": axes, "datatype": datatype, "base64": text}, "shape", "datatype", "base64")
    bytes_[NAME_KEY] = {"title": f"Base64{name}", "description": "A shape, and the base64 of the values' bytes."}
    about_tensor = {"title": name, "description": f"Rank {' or '.join(map(str, ranks))}, of {DESCRIPTIONS[kind]}."}
    return {"anyOf": [*lists, numbers, bytes_], NAME_KEY: about_tensor}


def _nested_lists(kind: Kind, rank: int) -> dict[str, Any]:
    """The schema of nested lists of that rank. An empty list is not allowed, since its shape is unknown."""
    return ITEMS[kind] if not rank else {"type": "array", "items": _nested_lists(kind, rank - 1), "minItems": 1}


def _object_schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def json_schemas(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Name -> JSON schema of the models, and of each type of tensor, which the others reference."""
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    found: dict[str, Any] = {}

    def with_references(node: Any) -> Any:
        if isinstance(node, list):
            return [with_references(item) for item in node]
        if not isinstance(node, dict):
            return node
        if NAME_KEY not in node:
            return {key: with_references(value) for key, value in node.items()}
        name = node[NAME_KEY]["title"]
        schema = {key: with_references(value) for key, value in node.items() if key not in (NAME_KEY, "description")}
        found[name] = {**node[NAME_KEY], **schema}
        description = {"description": node["description"]} if "description" in node else {}
        return {"$ref": REFERENCE.format(model=name), **description}

    return {**with_references(schemas["$defs"]), **found}
