"""The body of POST /attend as pydantic models, from which the OpenAPI document is made, too.

Each field is checked here on its own, and by `shapes.py` against the others. `serving/binding.py` checks a request against its layer.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from service.spec import LayerSpec
from service.spec_parts import Finite, Window, field_error
from service.wire import shapes
from service.wire.problems import describe_value
from service.wire.schemas.document import LAYER_NAME, Document, Indices, PositiveInt, StrictBool, unique
from service.wire.schemas.tensors import Bias, HeadScale, KeyMask, Lengths, Mask, Positions, RowCounts, Segments, Sequences
from service.wire.schemas.tokens import Tokens
from service.wire.suggestions import OTHER_NAMES

SESSION_DESCRIPTION = "Id of a session, whose layer and rows take the place of `layer`, `key` and `value`; nothing is appended."
SPEC_NAMES = (*LayerSpec.model_fields, *LayerSpec.expected_instead)  # fields of a layer's spec, and their names in other libraries

Output = Literal[
    "output",
    "attention_weights",
    "scores",
    "log_sum_exp",
    "query_projection",
    "key_projection",
    "value_projection",
    "head_outputs",
    "concatenated",
    "indexer_mask",
    "latent",
    "rope_key",
    "query_gradient",
    "key_gradient",
    "value_gradient",
]


def _default_outputs() -> list[Output]:
    return ["output", "attention_weights"]


def _valid_offset(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        value = value.tolist()
    for number in value if isinstance(value, list) else [value]:
        if number != "end" and (type(number) is not int or abs(number) >= 2**31):
            raise field_error("", 'an integer of 32 bits, a list of them, or "end"', describe_value(number))
        if number == "end" and value != "end":
            raise field_error("", "a list of integers", '"end" in a list')
    return value


Position = Annotated[int, Field(gt=-(2**31), lt=2**31)]
Offset = Annotated[Position | list[Position] | Literal["end"], BeforeValidator(_valid_offset)]


class Dropout(Document):
    """Keeps a weight where `numpy.random.RandomState(seed).random_sample((b, h, q, k))` is at least `p`, and divides it by 1 - p. The reply
    has the weights after dropout."""

    p: Annotated[float, Field(ge=0, lt=1, strict=True, examples=[0.1])]
    seed: Annotated[int, Field(ge=0, le=2**32 - 1, strict=True, examples=[0])]


class Select(Document):
    """The attention weights to return. Indices count from 0, and keep their order."""

    heads: Indices | None = Field(default=None, examples=[[0, 1]], description="Heads to return; all if null.")
    queries: Indices | None = Field(default=None, description="Queries to return; all if null.")
    average: StrictBool = Field(default=False, description="Return the mean over the selected heads, without the axis h.")
    top_k: PositiveInt | None = Field(
        default=None, description="Return only the largest weights of each row, with their keys. Ties: lower key first."
    )


class ReplyOptions(Document):
    """How the reply is written."""

    form: Literal["nested", "flat", "base64"] = Field(
        default="nested",
        examples=["nested"],
        description="Tensors as nested lists, {shape, datatype, data} or {shape, datatype, base64} (little-endian).",
    )
    datatype: Literal["FP16", "BF16", "FP32", "FP64"] | None = Field(default=None, description="Of the numbers; the layer's if null.")
    decimals: Annotated[int, Field(ge=0, le=17, strict=True)] | None = Field(default=None, description="Decimals in JSON; all if null.")
    nonfinite: Literal["error", "null", "string"] = Field(
        default="error",
        description="How NaN and overflow are returned: error, null or string. -inf in scores and log_sum_exp is allowed.",
    )


class AttendRequest(Document):
    """Queries, keys, values and masks for one layer.

    b batch, q queries, k keys, h heads. Where the query has no b, no other tensor has.
    """

    expected_instead: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(SPEC_NAMES, "no field of that name, which belongs to the spec of a layer (PUT /layers/{name})"),
        **OTHER_NAMES,
        "figure": "no field of that name, which belongs to POST /attend/figure",
        "session": "no field of that name; POST /sessions/{id}/attend takes this body without `layer`",
        "metrics": "no field of that name, which belongs to POST /attend/analysis",
    }
    layer: str = Field(default="default", pattern=LAYER_NAME, description="Name of the layer.")
    query: Sequences = Field(description="[b, q, query_dim] or, unbatched, [q, query_dim].")
    key: Sequences | None = Field(default=None, description="[b, k, key_dim]. The query if left out.")
    value: Sequences | None = Field(default=None, description="[b, k, value_dim]. The key if left out.")
    attend_mask: Mask | None = Field(default=None, description="1 = may attend. [q,k], [b,q,k] or [b,h,q,k]; axes of 1 broadcast.")
    block_mask: Mask | None = Field(default=None, description="1 = may not attend. Shapes as attend_mask.")
    attend_keys: KeyMask | None = Field(default=None, description="[b,k]. 1 = queries may attend to the key.")
    block_keys: KeyMask | None = Field(default=None, description="[b,k]. 1 = no query may attend to the key.")
    valid_lens: Lengths | None = Field(default=None, description="[b] or [b,q]. Only the first n keys may be attended to.")
    segments: Segments | None = Field(
        default=None, description="[b,n]. Queries attend only to keys of their own segment; -1 is padding. For query and key alike."
    )
    query_segments: Segments | None = Field(default=None, description="[b,q]. Segments of the queries; needs key_segments.")
    key_segments: Segments | None = Field(default=None, description="[b,k]. Segments of the keys; needs query_segments.")
    query_lengths: RowCounts | None = Field(
        default=None,
        description="Rows of each sequence, if query [total, query_dim] is several sequences one after the other. Each attends to its own "
        "keys; weights and scores are returned for each.",
    )
    key_lengths: RowCounts | None = Field(
        default=None, description="Rows of each sequence of keys, as many as in query_lengths; required if there is a key."
    )
    bias: Bias | None = Field(default=None, description='Added to the scores; "-inf" blocks the key for the query. Shapes as attend_mask.')
    query_offset: Offset | None = Field(
        default=None, description='Query i is at key position i + offset; [b] or one. "end" puts the last query at the last real key.'
    )
    positions: Positions | None = Field(
        default=None,
        description="[b,q], or [b,q,axes] if rope has axes; b may be 1. RoPE rotates queries by them; by their indices if null.",
    )
    key_positions: Positions | None = Field(
        default=None, description="[b,k] or [b,k,axes]. RoPE rotates the keys by them; those of the queries if the key is left out."
    )
    causal: StrictBool = Field(default=False, description="Query i attends only to keys j <= i + query_offset.")
    window: Window | None = Field(default=None, description="Window of keys around each query's position.")
    fully_masked: Literal["zero", "uniform", "error"] = Field(default="zero", description="Weights of rows without keys, or an error.")
    head_scale: HeadScale | None = Field(default=None, description="[h] or [b,h]. Factor on each head's output.")
    dropout: Dropout | None = Field(default=None, description="Dropout of attention weights; none if null.")
    scale: Finite | None = Field(default=None, description="Factor on query·key; the layer's if null.")
    softcap: Annotated[Finite, Field(ge=0)] | None = Field(
        default=None, description="c in c·tanh(scores/c), 0 for none; the layer's if null."
    )
    outputs: Annotated[list[Output], Field(min_length=1, json_schema_extra={"uniqueItems": True}), unique("output")] = Field(
        default_factory=_default_outputs, description="Tensors to return; output and attention_weights if left out."
    )
    output_gradient: Sequences | None = Field(default=None, description="[b, q, output_dim]. Required by the outputs that are gradients.")
    select: Select | None = Field(default=None, description="Which attention weights to return; all if null.")
    reply: ReplyOptions = Field(default_factory=ReplyOptions)
    reproducible: StrictBool = Field(default=False, description="The same request returns the same bits on the same machine, at any load.")
    tokens: Tokens | None = Field(default=None, description="Tokens of the queries and keys.")

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        shapes.check_fields_together(self)
        return self

    @property
    def batched(self) -> bool:
        return self.query.ndim == 3

    def tokens_of(self, side: Literal["query", "key"]) -> list[str] | list[list[str]]:
        """The tokens of the queries or keys, empty if there are none. A key that is left out has the query's."""
        if self.tokens is None:
            return []
        return getattr(self.tokens, side) or (self.tokens.query if self.key is None else None) or []
