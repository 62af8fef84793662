"""Tensors as fields of pydantic models: what each field of a request accepts, and the forms of a tensor in a reply.

Decoders give arrays of any dtype, Python callers may give nested lists. A field that validates is an array whose dtype suits its kind.
`shapes.py` checks the shapes of fields against each other. Whether numbers are finite is checked when they are cast to the layer's dtype.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args, get_origin

import numpy as np
import pybase64
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, RootModel
from pydantic_core import CoreSchema, core_schema

from service.spec_parts import field_error
from service.tensors import BY_NUMPY, Array, datatype_of, raw
from service.wire.arrays import Kind, first_element, without_broadcast
from service.wire.problems import describe_value
from service.wire.schemas.json_schemas import MAX_COUNT, tensor_schema


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

    def __call__(self, value: Any) -> Array:
        array = self._checked(value)
        if array.ndim not in self.ranks:
            wanted = " or ".join(map(str, self.ranks))
            raise field_error("", f"a tensor of rank {wanted}", f"shape {list(array.shape)}")
        return array if self.kind in ("number", "bias") else self._as_integers(array)

    def _checked(self, value: Any) -> Array:
        if isinstance(value, str | bool | dict) or value is None:
            raise field_error("", "a tensor", describe_value(value))
        try:
            array = np.asarray(value)
        except (ValueError, TypeError):
            raise field_error("", "a tensor", "ragged rows") from None
        datatype = BY_NUMPY.get(array.dtype.newbyteorder("<"))
        if datatype is None or (datatype.kind == "bool" and self.kind in ("number", "bias")):
            raise field_error("", "numbers", f"elements of type {array.dtype}")
        return array

    def _as_integers(self, array: Array) -> Array:
        """A mask as booleans, other kinds as int64. Raises at the first element that this would change."""
        if 0 in array.strides and array.size > 1:  # a tensor given by its shape alone is broadcast, and may be huge
            return np.broadcast_to(self._as_integers(without_broadcast(array).copy()), array.shape)
        if array.dtype == np.bool_:
            if self.kind != "mask":
                raise field_error("", "whole numbers", "booleans")
            return array
        if self.kind == "mask":
            mask: Array = array != 0
            if (wrong := mask & (array != 1)).any():
                at, got = first_element(array, wrong)
                raise field_error(at, "0, 1, true or false", got)
            return mask
        if self.kind == "count":
            least, expected = 0, f"a number of {self.counted}: a whole number of at least 0"
        else:  # from 2^53 on, float64 has not every whole number: two segments might become one
            least, expected = -1, f"the number of a segment, a whole number below {MAX_COUNT}, or -1 for padding"
        if (wrong := ~(array >= least) | (array >= MAX_COUNT) | (array != np.floor(array))).any():
            at, got = first_element(array, wrong)
            if self.kind == "count" and array[wrong].flat[0] >= MAX_COUNT:
                expected = expected.replace("at least 0", f"at most {MAX_COUNT - 1}")
            raise field_error(at, expected, got)
        return array.astype(np.int64)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return tensor_schema(self.name, self.kind, self.ranks)


def find_tensor_kinds(model: type[BaseModel]) -> dict[str, Kind]:
    """Field name -> kind, for the fields of `model` that are tensors."""

    def annotations(item: Any) -> list[Any]:
        return [item, *(a for inner in get_args(item) for a in annotations(inner))] if get_origin(item) is not dict else []

    found = {n: [*f.metadata, *annotations(f.annotation)] for n, f in model.model_fields.items()}
    return {name: item.kind for name, items in found.items() for item in items if isinstance(item, Tensor)}


Sequences = Annotated[Array, Tensor("Sequences", "number", (2, 3))]  # [b, n, width] or [n, width]
Mask = Annotated[Array, Tensor("Mask", "mask", (2, 3, 4))]
KeyMask = Annotated[Array, Tensor("KeyMask", "mask", (1, 2))]
Lengths = Annotated[Array, Tensor("Lengths", "count", (0, 1, 2))]
Segments = Annotated[Array, Tensor("Segments", "segment", (1, 2))]
RowCounts = Annotated[Array, Tensor("RowCounts", "count", (1,), counted="rows")]
Bias = Annotated[Array, Tensor("Bias", "bias", (2, 3, 4))]
Positions = Annotated[Array, Tensor("Positions", "number", (1, 2, 3))]
HeadScale = Annotated[Array, Tensor("HeadScale", "number", (1, 2))]
Weight = Annotated[Array, Tensor("Weight", "number", (1, 2))]
