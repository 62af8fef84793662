"""`Schema`, the base class of the schemas of bodies and replies; the schema of a refusal; types of fields that several schemas have."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from attend.axes import Kind
from attend.errors import InvalidRequest
from attend.spec_parts import WHOLE, field_error
from attend.wire.problems import describe_value
from attend.wire.schemas.tensors import Tensor, find_tensors

LAYER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Schema(BaseModel):
    """The schema of a body or reply. Unknown fields are refused by name.

    `tensors` maps its tensor members to their annotations, `tensor_kinds` to their kinds, `expected_instead` names that are no fields to
    what a refusal says is expected.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    tensors: ClassVar[dict[str, Tensor]] = {}
    tensor_kinds: ClassVar[dict[str, Kind]] = {}
    expected_instead: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.tensors = {**cls.tensors, **find_tensors(cls)}
        cls.tensor_kinds = {**cls.tensor_kinds, **{name: tensor.kind for name, tensor in cls.tensors.items()}}


class LayerReference(Schema):
    name: str
    fingerprint: str


class Refusal(Schema):
    at: str
    expected: str
    got: str


class ProblemDocument(BaseModel):
    """A refusal, as RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    request_id: str
    errors: list[Refusal]
    length: int | None = Field(default=None, description="Number of rows of the session, if it does not have `expected_length` (412).")


def unique(noun: str) -> AfterValidator:
    """The annotation of a list whose items differ."""

    def check(items: list[Any]) -> list[Any]:
        seen: set[Any] = set()
        for i, item in enumerate(items):
            if item in seen:
                raise field_error(f"/{i}", f"each {noun} once", f"{describe_value(item)} twice")
            seen.add(item)
        return items

    return AfterValidator(check)


Index = Annotated[int, Field(ge=0, strict=True), WHOLE]
Indices = Annotated[list[Index], Field(min_length=1, json_schema_extra={"uniqueItems": True}), unique("index")]
PositiveInt = Annotated[int, Field(ge=1, strict=True), WHOLE]
StrictBool = Annotated[bool, Field(strict=True)]


def require_layer_name(name: str) -> None:
    """Raises InvalidRequest if no layer can have this name."""
    if not re.fullmatch(LAYER_NAME, name):
        expected = "a layer name of at most 64 letters, digits, dots, underscores and hyphens, a letter or digit first"
        raise InvalidRequest.where("", expected, describe_value(name))


def without_default(schema: dict[str, Any]) -> None:
    """Removes the default from the JSON schema of a field: for `json_schema_extra`."""
    schema.pop("default", None)
