"""The body of PUT /layers/{name}, and the description of a layer in replies, as pydantic models."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from attend.axes import Kind
from attend.spec import LayerSpec
from attend.wire.schemas.attend import SPEC_NAMES
from attend.wire.schemas.schema import LayerReference, Schema
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


class LayerInfo(Schema):
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

    steps: dict[str, str] | None = Field(
        default=None,
        description="In the reply to GET /layers/{name}: what the layer computes. Each step and its formula, in order; x are the inputs of "
        "queries, z those of keys and values, Q, K and V their heads, S scores, A weights, O outputs of heads.",
    )

    @model_serializer(mode="wrap")
    def _without_null(self, serialize: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # a type would replace the schema
        """The document, without `origin`, `assumed` and `steps` if they are null."""
        return {name: value for name, value in serialize(self).items() if value is not None or name not in ("origin", "assumed", "steps")}


class Circuits(Schema):
    """The QK and OV circuits of each head of a layer: scale W_Q^T W_K, and W_O W_V, without positions, biases and norms.

    A number is null if it is undefined: a score of a matrix that is not square, or 0.
    """

    layer: LayerReference
    qk_singular_values: list[list[float | None]] = Field(description="[h,n]: of scale W_Q^T W_K, largest first.")
    matching_score: list[float | None] = Field(
        description="[h]: eigenvalues of scale W_Q^T W_K, their sum over that of their magnitudes. 1: rows attend to rows like themselves."
    )
    ov_singular_values: list[list[float | None]] = Field(description="[h,n]: of W_O W_V, largest first.")
    copying_score: list[float | None] = Field(
        description="[h]: eigenvalues of W_O W_V, their sum over that of their magnitudes. 1: the head copies what it attends to."
    )


class Layers(Schema):
    layers: list[LayerInfo]
