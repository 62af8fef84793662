"""The reply of POST /attend, the plan of POST /attend/plan and the problem document of a refusal, as pydantic models."""

from typing import Any, TypeAlias

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from service.wire.schemas.document import Document, LayerReference, without_default
from service.wire.schemas.tensors import ReplyTensor


def _output(description: str) -> Any:
    """The field of an output. An output that is not requested is absent, not null."""
    return Field(default=None, description=description, json_schema_extra=without_default)


class Selection(Document):
    """The `top_k` largest attention weights of each row."""

    keys: ReplyTensor = Field(description="[b,h,q,top_k]. Indices of the keys.")
    values: ReplyTensor = Field(description="[b,h,q,top_k]. The weights.")


BySequence: TypeAlias = dict[str, ReplyTensor]  # with `query_lengths`: number of the sequence, "0", "1", … -> its tensor
OptionalTensor: TypeAlias = ReplyTensor | SkipJsonSchema[None]


class AttendReply(Document):
    """The requested outputs, and no others. Shapes are without b if the request has none."""

    layer: LayerReference
    fully_masked_rows: int = Field(description="Number of rows (batch, head, query) without a key to attend to.")
    output: OptionalTensor = _output("[b,q,output_dim].")
    attention_weights: OptionalTensor | Selection | BySequence = _output(
        "[b,h,q,k]; without h if averaged; a Selection with `top_k`; a tensor for each sequence with `query_lengths`. From 0 to 1, and "
        "rows sum to 1, except after dropout, with sinks, in fully masked rows and in layers with sigmoid weights. In layers with "
        "`differential` they may be negative, with any sum."
    )
    scores: OptionalTensor | BySequence = _output(
        "[b,h,q,k]. Before softmax or sigmoid, after scale, softcap, biases, ln n and masks; -inf as text. Layers with `differential` have "
        "none."
    )
    log_sum_exp: OptionalTensor = _output("[b,h,q]. ln of the sum of exp(scores). Layers with `differential` or sigmoid weights have none.")
    query_projection: OptionalTensor = _output("[b,h,q,head_dim]. After norm, rotation and query_scale.")
    key_projection: OptionalTensor = _output("[b,kv heads,k,head_dim]. After norm and rotation.")
    value_projection: OptionalTensor = _output("[b,kv heads,k,value_head_dim].")
    head_outputs: OptionalTensor = _output("[b,h,q,value_head_dim]. After head_scale and the layer's norm and output gate.")
    concatenated: OptionalTensor = _output("[b,q,h * value_head_dim].")
    indexer_mask: OptionalTensor | BySequence = _output(
        "[b,q,k], of datatype BOOL. Whether the layer's indexer selects the key for the query."
    )
    latent: OptionalTensor = _output("[b,k,key_value_rank]. The latent vectors of the key after their norm, in layers with `latent`.")
    rope_key: OptionalTensor = _output(
        "[b,k,rope_key_dim]. The numbers that the keys of all heads share in layers with `latent`, after rotation."
    )
    query_gradient: OptionalTensor = _output("Shape of the query. Gradient of <output_gradient, output>.")
    key_gradient: OptionalTensor = _output("Shape of the key.")
    value_gradient: OptionalTensor = _output("Shape of the value.")


class PlannedTensor(Document):
    shape: list[int]
    datatype: str
    bytes: int


class Refusal(Document):
    at: str
    expected: str
    got: str


class Plan(Document):
    """What POST /attend would do with this body: outputs, predicted cost, and whether it is admitted."""

    layer: LayerReference
    outputs: dict[str, PlannedTensor]
    operations: int = Field(description="Predicted floating-point operations.")
    memory_bytes: int = Field(description="Predicted peak memory of the computation.")
    reply_bytes: int = Field(description="Size of the reply: exact for base64 tensors, an estimate for numbers in text.")
    admitted: bool = Field(description="Whether the limits of this server admit the request.")
    refusals: list[Refusal] = Field(description="Why it is not admitted.")


class ProblemDocument(BaseModel):
    """A refusal, as RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    request_id: str
    errors: list[Refusal]
