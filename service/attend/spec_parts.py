"""What the operators of a LayerSpec share: types of numbers, the fields of every layer, and the error that validators raise."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_EXACT = 2**53  # floats up to this one represent every integer


def whole(value: Any) -> Any:
    """The integer that a whole float such as 16.0 is, since JSON Schema calls it an integer; any other value unchanged."""
    return int(value) if type(value) is float and abs(value) <= MAX_EXACT and value.is_integer() else value


WHOLE = BeforeValidator(whole)  # the annotation of an integer that may be written as 16.0
Width = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True), WHOLE]
LARGEST, SMALLEST = 1e30, 1e-30  # of factors; float32 overflows at 3e38, and is 0 below 1e-45
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True), WHOLE]
Flag = Annotated[bool, Field(strict=True)]
Side = Annotated[int, Field(ge=1, le=65536, strict=True), WHOLE]
Axis = Annotated[int, Field(ge=0, le=15, strict=True), WHOLE]
PROJECTIONS = ("query", "key", "value", "output")


def field_error(at: str, expected: str, got: str) -> PydanticCustomError:
    """An error for validators to raise; `at` is a pointer below the field or model that is validated."""
    return PydanticCustomError("field_error", "expected {expected}, got {got}", {"expected": expected, "got": got, "at": at})


def _zero_or_normal(value: float) -> float:
    if 0 < value < SMALLEST:
        raise field_error("", f"0, or a number from {SMALLEST} to 1", str(value))
    return value


Eps = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True), AfterValidator(_zero_or_normal)]  # of a norm


class Part(BaseModel):
    """A group of fields of a spec."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def bias_of_each(value: Any) -> Any:
    if isinstance(value, bool | Biases):
        return value
    if isinstance(value, Mapping) and set(value) == set(PROJECTIONS) and all(isinstance(flag, bool) for flag in value.values()):
        return Biases(**value)
    raise field_error("", f"true or false, or one of them for each of {', '.join(PROJECTIONS)}", json.dumps(value)[:60])


class Biases(Part):
    """Which projections have a bias."""

    query: Flag
    key: Flag
    value: Flag
    output: Flag


class Window(Part):
    """A query at position p attends to keys from p - left to p + right; null is no bound."""

    left: Count | None = Field(default=None, examples=[128])
    right: Count | None = Field(default=None, examples=[0])


class Dimensions(BaseModel):
    """The fields of a spec that every layer has: widths, heads, biases and the scale. Operators read them, and add fields of their own."""

    d_model: Width = Field(description="Width of the queries.", examples=[64])
    num_heads: Width = Field(description="Number of query heads.", examples=[8])
    num_kv_heads: Width = Field(
        default=0, description="Number of heads of keys and values, each shared by a group of query heads; num_heads if left out."
    )
    head_dim: Width = Field(default=0, description="Width of a head's queries and keys; d_model/num_heads if left out.")
    value_head_dim: Width = Field(default=0, description="Width of a head's values; head_dim if left out.")
    key_dim: Width = Field(default=0, description="Width of the keys in requests; d_model if left out, or value_dim with `latent`.")
    value_dim: Width = Field(default=0, description="Width of the values in requests; d_model if left out, or key_dim with `latent`.")
    output_dim: Width = Field(default=0, description="Width of the output; d_model if left out.")
    bias: Annotated[bool | Biases, BeforeValidator(bias_of_each)] = Field(
        default=True, description="Whether projections have a bias, for all or for each; by default true, but false for the numpy_* inits."
    )
    projections: Flag = Field(
        default=True, description="If false, requests have projected queries, keys and values, and the output is not projected."
    )
    scale: Finite = Field(
        default=math.nan,
        description="Factor on query·key, not 0; 1/sqrt(head_dim) if left out, or 1/sqrt(head_dim/n) for n softmaxes of each head.",
    )

    @property
    def operators(self) -> tuple[Any, ...]:
        """The operators of the layer."""
        return ()

    @property
    def all_operators(self) -> tuple[Any, ...]:
        """The operators of the layer, and those that calls may ask for."""
        return self.operators

    @property
    def num_softmaxes(self) -> int:
        """Number of softmaxes of each head, among which the numbers of its queries and keys are divided."""
        return 1

    @property
    def concatenated_dim(self) -> int:
        """Width of the concatenated heads."""
        return self.num_heads * self.value_head_dim

    def has_bias(self, projection: str) -> bool:
        return self.bias if isinstance(self.bias, bool) else bool(getattr(self.bias, projection))
