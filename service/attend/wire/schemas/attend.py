"""The body and the reply of POST /attend as pydantic models, from which the OpenAPI document is made, too.

Each field is checked here on its own, and by `shapes.py` against the others. `serving/layer_checks.py` checks a request against its layer.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationInfo, model_validator
from pydantic.json_schema import SkipJsonSchema

from attend.spec import LayerSpec
from attend.spec_parts import WHOLE, Finite, Window, field_error, whole
from attend.tensors import Array
from attend.wire import shapes
from attend.wire.problems import describe_value
from attend.wire.schemas.schema import (
    LAYER_NAME,
    Indices,
    LayerReference,
    PositiveInt,
    Schema,
    StrictBool,
    unique,
    without_default,
)
from attend.wire.schemas.tensors import (
    Bias,
    HeadOutputs,
    HeadRows,
    HeadScale,
    KeyMask,
    Lengths,
    Mask,
    Pattern,
    Positions,
    ReplyTensor,
    RowCounts,
    Segments,
    Sequences,
    tensor_field,
)
from attend.wire.schemas.tokens import Tokens

SESSION_DESCRIPTION = "Id of a session, whose layer and rows take the place of `layer`, `key` and `value`; nothing is appended."
SPEC_NAMES = (*LayerSpec.model_fields, *LayerSpec.expected_instead)  # fields of a layer's spec, and their names in other libraries
# The field of a request to use -> arguments in torch, Keras, Flax, transformers, flash-attention or a textbook that have its meaning.
ADVICE = {
    "query, which is also the key and the value if those are left out": "q Q queries hidden_states inputs_q",
    "key, which is also the value if that is left out": "k K keys inputs_k inputs_kv",
    "value": "v V values inputs_v",
    "attend_mask, block_mask, attend_keys, block_keys, valid_lens or bias, since libraries disagree on what 1 means in a mask": "mask",
    "attend_keys (1 = a real key) or attend_mask (1 = may attend), as in transformers and Keras; bias for numbers that are added to the "
    "scores": "attention_mask",
    "block_mask for the booleans of torch's MultiheadAttention (True = blocked), attend_mask for those of scaled_dot_product_attention "
    "(True = may attend), bias for numbers that are added to the scores": "attn_mask memory_mask src_mask tgt_mask",
    "block_keys for the booleans of torch's key_padding_mask (True = blocked), attend_keys for their opposite, bias [b, 1, k] for floats, "
    "which torch adds to the scores": ("key_padding_mask memory_key_padding_mask src_key_padding_mask tgt_key_padding_mask"),
    "attend_keys (1 = a real key, as True is in Keras)": "key_mask value_mask",
    "valid_lens (only the first n keys are real)": "lengths valid_len valid_length",
    "bias (added to the scores)": "attn_bias position_bias",
    "causal (key j is visible to query i if j <= i + query_offset)": "causal_mask is_causal use_causal_mask",
    'window {"left", "right"}, numbers of keys on each side of the position of a query, null for no bound': "sliding_window window_size",
    "scale (a factor on query·key)": "softmax_scale",
    'dropout {"p", "seed"}, without which nothing is dropped': "deterministic dropout_p dropout_rate training",
    "head_scale (a factor on each head's output)": "head_mask",
    'outputs with attention_weights, which are among them by default; ["output"] for none': (
        "need_weights output_attentions return_attention_scores"
    ),
    'select {"average": true} for the mean over the heads; without it the weights are of each head': "average_attn_weights",
    "segments (a query attends only to keys of its own segment), or query_segments and key_segments": (
        "decoder_segment_ids document_ids segment_ids"
    ),
    "query_lengths and key_lengths (the rows of each sequence, not their sums)": "cu_seqlens cu_seqlens_k cu_seqlens_q",
}
OTHER_NAMES = {name: advice for advice, names in ADVICE.items() for name in names.split()}

OutputName = Annotated[str, Field(max_length=64, examples=["output"])]  # of which the layer refuses those that it does not have


def _default_outputs() -> list[str]:
    return ["output", "attention_weights"]


def _valid_offset(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    value = [whole(number) for number in value] if isinstance(value, list) else whole(value)
    for number in value if isinstance(value, list) else [value]:
        if number != "end" and (type(number) is not int or not -(2**31) <= number < 2**31):
            raise field_error("", 'an integer of 32 bits, a list of them, or "end"', describe_value(number))
        if number == "end" and value != "end":
            raise field_error("", "a list of integers", '"end" in a list')
    return value


Position = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Offset = Annotated[Position | list[Position] | Literal["end"], BeforeValidator(_valid_offset)]


class Dropout(Schema):
    """Keeps a weight where `numpy.random.RandomState(seed).random_sample((b, h, q, k))` is at least `p`, and divides it by 1 - p. The reply
    has the weights after dropout."""

    p: Annotated[float, Field(ge=0, lt=1, strict=True, examples=[0.1])]
    seed: Annotated[int, Field(ge=0, le=2**32 - 1, strict=True, examples=[0]), WHOLE]


class Select(Schema):
    """The attention weights to return. Indices count from 0, and keep their order."""

    heads: Indices | None = Field(default=None, examples=[[0, 1]], description="Heads to return; all if null.")
    queries: Indices | None = Field(default=None, description="Queries to return; all if null.")
    average: StrictBool = Field(default=False, description="Return the mean over the selected heads, without the axis h.")
    top_k: PositiveInt | None = Field(
        default=None, description="Return only the largest weights of each row, with their keys. Ties: lower key first."
    )


class ReplyOptions(Schema):
    """How the reply is written."""

    form: Literal["nested", "flat", "base64"] = Field(
        default="nested",
        examples=["nested"],
        description="Tensors as nested lists, {shape, datatype, data} or {shape, datatype, base64} (little-endian).",
    )
    datatype: Literal["FP16", "BF16", "FP32", "FP64"] | None = Field(default=None, description="Of the numbers; the layer's if null.")
    decimals: Annotated[int, Field(ge=0, le=17, strict=True), WHOLE] | None = Field(
        default=None, description="Decimals in JSON; all if null."
    )
    nonfinite: Literal["error", "null", "string"] = Field(
        default="error",
        description="How NaN and overflow are returned: error, null or string. -inf in scores and log_sum_exp is allowed.",
    )


class Past(NamedTuple):
    """The session of a request: the number of its rows before the request, and whether the request appends its keys."""

    rows: int
    appends: bool


class AttendRequest(Schema):
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
    key: Sequences | None = tensor_field("key", "The query if left out.")
    value: Sequences | None = tensor_field("value", "The key if left out.")
    attend_mask: Mask | None = tensor_field("attend_mask", "1 = may attend.")
    block_mask: Mask | None = tensor_field("block_mask", "1 = may not attend.")
    attend_keys: KeyMask | None = tensor_field("attend_keys", "1 = queries may attend to the key.")
    block_keys: KeyMask | None = tensor_field("block_keys", "1 = no query may attend to the key.")
    valid_lens: Lengths | None = tensor_field("valid_lens", "Only the first n keys may be attended to.")
    segments: Segments | None = tensor_field(
        "segments", "Queries attend only to keys of their own segment; -1 is padding. For query and key alike."
    )
    query_segments: Segments | None = tensor_field("query_segments", "Segments of the queries; needs key_segments.")
    key_segments: Segments | None = tensor_field("key_segments", "Segments of the keys; needs query_segments.")
    query_lengths: RowCounts | None = tensor_field(
        "query_lengths",
        "Rows of each sequence, if query [total, query_dim] is several sequences one after the other. Each attends to its own "
        "keys; weights and scores are returned for each.",
    )
    key_lengths: RowCounts | None = tensor_field(
        "key_lengths", "Rows of each sequence of keys, as many as in query_lengths; required if there is a key."
    )
    bias: Bias | None = tensor_field("bias", 'Added to the scores; "-inf" blocks the key for the query.')
    query_offset: Offset | None = Field(
        default=None, description='Query i is at key position i + offset; [b] or one. "end" puts the last query at the last real key.'
    )
    positions: Positions | None = tensor_field(
        "positions", "RoPE rotates queries by them, of which a rope with axes has several; by their indices if null."
    )
    key_positions: Positions | None = tensor_field(
        "key_positions", "RoPE rotates the keys by them; those of the queries if the key is left out."
    )
    causal: StrictBool = Field(default=False, description="Query i attends only to keys j <= i + query_offset.")
    window: Window | None = Field(default=None, description="Window of keys around each query's position.")
    fully_masked: Literal["zero", "uniform", "error"] = Field(default="zero", description="Weights of rows without keys, or an error.")
    head_scale: HeadScale | None = tensor_field("head_scale", "Factor on each head's output.")
    pattern: Pattern | None = tensor_field("pattern", "Attention weights in place of those that the layer computes, before dropout.")
    pattern_rows: HeadRows | None = tensor_field("pattern_rows", "1 = the rows that have the weights of `pattern`; all if left out.")
    head_outputs: HeadOutputs | None = tensor_field("head_outputs", "In place of the output of that name, from which `output` is computed.")
    head_output_rows: HeadRows | None = tensor_field("head_output_rows", "1 = the rows that `head_outputs` replaces; all if left out.")
    dropout: Dropout | None = Field(default=None, description="Dropout of attention weights; none if null.")
    scale: Finite | None = Field(default=None, description="Factor on query·key; the layer's if null.")
    softcap: Annotated[Finite, Field(ge=0)] | None = Field(
        default=None, description="c in c·tanh(scores/c), 0 for none; the layer's if null."
    )
    outputs: Annotated[list[OutputName], Field(min_length=1, json_schema_extra={"uniqueItems": True}), unique("output")] = Field(
        default_factory=_default_outputs,
        description="Tensors to return, by their names in AttendReply or those of other values of the layer's steps; output and "
        "attention_weights if left out.",
    )
    output_gradient: Sequences | None = tensor_field("output_gradient", "Required by the outputs that are gradients.")
    select: Select | None = Field(default=None, description="Which attention weights to return; all if null.")
    reply: ReplyOptions = Field(default_factory=ReplyOptions)
    reproducible: StrictBool = Field(default=False, description="The same request returns the same bits on the same machine, at any load.")
    tokens: Tokens | None = Field(default=None, description="Tokens of the queries and keys.")
    _past: Past | None = PrivateAttr(default=None)  # the context of the validation

    @model_validator(mode="after")
    def _check_fields_together(self, info: ValidationInfo) -> Self:
        self._past = info.context
        shapes.check_fields_together(self)
        return self

    @property
    def past(self) -> int:
        """Number of keys that a session has before those of the request."""
        return 0 if self._past is None else self._past.rows

    @property
    def has_keys(self) -> bool:
        """Whether `key`, or the query in its place, has new keys. A request that reads a session has none."""
        return self._past is None or self._past.appends

    @property
    def num_keys(self) -> int:
        """Number of keys, those of a session included."""
        return self.past + (self.key_rows.shape[-2] if self.has_keys else 0)

    @property
    def in_session(self) -> bool:
        """Whether the keys, or some of them, are those of a session."""
        return self._past is not None

    @property
    def in_self_attention(self) -> bool:
        """Whether queries and keys are the same rows."""
        return self.key is None and self._past is None

    def has_signed_weights(self, spec: LayerSpec) -> bool:
        """Whether attention weights of the call may be negative: those of the layer, or those of `pattern`."""
        return bool(spec.signed_weights) or (self.pattern is not None and bool((self.pattern < 0).any()))

    @cached_property
    def batched(self) -> bool:
        return self.query.ndim == 3

    @property
    def key_rows(self) -> Array:
        """The rows that are keys: those of `key`, or the queries."""
        return self.query if self.key is None else self.key

    @property
    def value_rows(self) -> Array:
        """The rows that are values: those of `value`, or the keys."""
        return self.key_rows if self.value is None else self.value

    @property
    def sequence_lengths(self) -> list[tuple[int, int]]:
        """Numbers of queries and keys of each of several sequences in one query; empty for a request without `query_lengths`."""
        if self.query_lengths is None:
            return []
        lengths = self.query_lengths if self.key_lengths is None else self.key_lengths
        return list(zip(self.query_lengths.tolist(), lengths.tolist(), strict=True))

    def tokens_of(self, side: Literal["query", "key"]) -> list[str] | list[list[str]]:
        """The tokens of the queries or keys, empty if there are none. A key that is left out has the query's."""
        if self.tokens is None:
            return []
        return getattr(self.tokens, side) or (self.tokens.query if self.in_self_attention else None) or []


def _output(about: str) -> Any:
    """The field of an output, whose description begins with its axes. An output that is not requested is absent, not null."""
    return Field(default=None, description=about, json_schema_extra=without_default)


class Selection(Schema):
    """The `top_k` largest attention weights of each row."""

    keys: ReplyTensor = Field(description="[b,h,q,top_k]. Indices of the keys.")
    values: ReplyTensor = Field(description="[b,h,q,top_k]. The weights.")


BySequence: TypeAlias = dict[str, ReplyTensor]  # with `query_lengths`: number of the sequence, "0", "1", … -> its tensor
OptionalTensor: TypeAlias = ReplyTensor | SkipJsonSchema[None]


class AttendReply(Schema):
    """The requested outputs, and no others: those below and other values of the layer's steps, which are tensors, too.

    Shapes are without b if the request has none."""

    model_config = ConfigDict(extra="allow")

    layer: LayerReference
    fully_masked_rows: int = Field(description="Number of rows (batch, head, query) without a key to attend to.")
    output: OptionalTensor = _output("[b,q,output_dim].")
    attention_weights: OptionalTensor | Selection | BySequence = _output(
        "[b,h,q,k]. Without h if averaged; a Selection with `top_k`; a tensor for each sequence with `query_lengths`. From 0 to 1, "
        "and rows sum to 1, except after dropout, with sinks, in fully masked rows and in layers with sigmoid weights. Some operators make "
        "them negative, with any sum.",
    )
    scores: OptionalTensor | BySequence = _output(
        "[b,h,q,k], or [b,2 * h,q,k] in layers with two softmaxes. Before softmax or sigmoid, after scale, softcap, biases, ln n and "
        "masks; -inf as text.",
    )
    log_sum_exp: OptionalTensor = _output(
        "[b,h,q], or [b,2 * h,q] in layers with two softmaxes. ln of the sum of exp(scores). Layers with sigmoid weights have none."
    )
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
        "[b,k,rope_key_dim]. What the keys of all heads begin with in layers with `latent`, after rotation if it is rotated by itself."
    )
    query_gradient: OptionalTensor = _output("[b,q,query_dim]. Gradient of <output_gradient, output>.")
    key_gradient: OptionalTensor = _output("[b,k,key_dim].")
    value_gradient: OptionalTensor = _output("[b,k,value_dim].")
