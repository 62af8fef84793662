"""The body of PUT /layers/{name}, and the description of a layer in replies, as pydantic models."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from attend.spec import LayerSpec
from attend.wire.arrays import Kind
from attend.wire.schemas.attend import SPEC_NAMES
from attend.wire.schemas.schema import Schema
from attend.wire.schemas.tensors import Weight

WEIGHTS_DESCRIPTION = (
    "Name -> tensor; names are canonical, or those of another framework, such as W_q. If null, the weights are drawn by `init`, `seed` and "
    "`gain`; if given, nothing is drawn, and these three must be left out, null or at their defaults."
)


class PutLayer(Schema):
    """A layer: its spec, and its weights unless they are to be drawn."""

    tensor_kinds: ClassVar[dict[str, Kind]] = {"weights/*": "number"}
    expected_instead: ClassVar[Mapping[str, str]] = dict.fromkeys(SPEC_NAMES, 'no field of that name, which belongs inside "spec"')
    spec: LayerSpec
    weights: dict[str, Weight] | None = Field(default=None, description=WEIGHTS_DESCRIPTION)

    @model_validator(mode="before")
    @classmethod
    def _without_null_init(cls, data: Any) -> Any:
        """Removes an `init` of null if there are no weights: it is then the same as left out."""
        spec = data.get("spec") if isinstance(data, dict) and data.get("weights") is None else None
        if isinstance(spec, dict) and spec.get("init", ...) is None:
            return {**data, "spec": {name: value for name, value in spec.items() if name != "init"}}
        return data


class LayerDocument(Schema):
    """A layer, and whether it is loaded."""

    name: str
    state: Literal["ready", "unloaded"] = Field(default="ready", description="An unloaded layer computes nothing until it is loaded again.")
    spec: LayerSpec
    fingerprint: str
    parameters: int
    device: str
    origin: str | None = Field(default=None, description="Where given weights are from; absent if that is not known.")
    assumed: dict[str, Any] | None = Field(
        default=None,
        description="In replies to PUT: fields of the spec that neither a checkpoint's tensors nor the query gave, such as scale.",
    )

    @model_serializer(mode="wrap")
    def _without_null(self, serialize: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # a type would replace the schema
        """The document, without `origin` and `assumed` if they are null."""
        return {name: value for name, value in serialize(self).items() if value is not None or name not in ("origin", "assumed")}


class Layers(Schema):
    layers: list[LayerDocument]
