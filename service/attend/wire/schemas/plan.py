"""The reply of POST /attend/plan."""

from pydantic import Field

from attend.wire.schemas.schema import LayerReference, Refusal, Schema


class PlannedTensor(Schema):
    shape: list[int]
    datatype: str
    bytes: int


class Plan(Schema):
    """What POST /attend would do with this body: outputs, predicted cost, and whether it is admitted."""

    layer: LayerReference
    outputs: dict[str, PlannedTensor]
    operations: int = Field(description="Predicted floating-point operations.")
    memory_bytes: int = Field(description="Predicted peak memory of the computation.")
    reply_bytes: int = Field(description="Size of the reply: exact for base64 tensors, an estimate for numbers in text.")
    admitted: bool = Field(description="Whether the limits of this server admit the request.")
    refusals: list[Refusal] = Field(description="Why it is not admitted.")
