"""The JSON documents of the service's own endpoints, as pydantic models: the contract, and the source of the OpenAPI document.

What a field may be on its own stands here; what fields must agree on stands in `shapes.py`. A request that validates can only still be
wrong about the layer it names, which `serving/binding.py` checks.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import models_json_schema

from service.spec import Finite, LayerSpec, Window, disagreement
from service.wire import shapes
from service.wire.arrays import (
    REFERENCE,
    Bias,
    HeadScale,
    KeyMask,
    Kind,
    Lengths,
    Mask,
    Sequences,
    Weight,
    tensor_kinds,
    with_definitions,
)
from service.wire.problems import HALF, is_unicode, shown

WEIGHTS = "Canonical name -> tensor; null draws them by init and seed, which say nothing where weights are given: both become null."
LAYER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
WHICH_MASK = "attend_mask, block_mask, attend_keys, block_keys, valid_lens or bias, since libraries disagree on what 1 means in a mask"
ELSEWHERE = {"metrics": "/attend/analysis", "figure": "/attend/figure"}  # what a body that was sent there may still hold

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
    "query_gradient",
    "key_gradient",
    "value_gradient",
]


def _default_outputs() -> list[Output]:
    return ["output", "attention_weights"]


def each_once(schema: dict[str, Any]) -> None:
    """Says in the JSON schema of a list, or of a list or null, that nothing may stand in it twice."""
    next(form for form in schema.get("anyOf", [schema]) if form.get("type") == "array")["uniqueItems"] = True


def _offset(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        value = value.tolist()
    for number in value if isinstance(value, list) else [value]:
        if number != "end" and (type(number) is not int or abs(number) >= 2**31):
            raise disagreement("", 'an integer of 32 bits, a list of them, or "end"', shown(number))
        if number == "end" and value != "end":
            raise disagreement("", "a list of integers", '"end" in a list')
    return value


def _words(value: Any) -> Any:
    nested = isinstance(value, list) and value and all(isinstance(row, list) for row in value)
    for i, row in enumerate(value if nested else [value]):
        if not isinstance(row, list) or not all(isinstance(word, str) for word in row):
            raise disagreement("", "a list of words, or one such list per batch item", "something else")
        for j, word in enumerate(row):
            if not is_unicode(word):  # no reply and no picture could hold it
                raise disagreement(f"/{i}/{j}" if nested else f"/{j}", "words of Unicode text", HALF)
    return value


Position = Annotated[int, Field(gt=-(2**31), lt=2**31)]
Offset = Annotated[Position | list[Position] | Literal["end"], BeforeValidator(_offset)]
Words = Annotated[list[str] | list[list[str]], BeforeValidator(_words)]
Index = Annotated[int, Field(ge=0, strict=True)]
Strict = Annotated[bool, Field(strict=True)]


class Document(BaseModel):
    """A document whose unknown fields are refused by name. `tensors` maps its tensor members to their kinds."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    tensors: ClassVar[dict[str, Kind]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.tensors = {**cls.tensors, **tensor_kinds(cls)}


class Dropout(Document):
    """A weight is kept where `numpy.random.RandomState(seed).random_sample((b, h, q, k))` is at least `p`, and divided by 1 - p. Those
    replied are after it."""

    p: Annotated[float, Field(ge=0, lt=1, strict=True)]
    seed: Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)]


class Select(Document):
    """Which attention weights are wanted: 0-based, in this order. `average` is over the selected heads."""

    heads: list[Index] | None = Field(default=None, min_length=1)
    queries: list[Index] | None = Field(default=None, min_length=1)
    average: Strict = False
    top_k: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        default=None, description="Reply the largest weights of each row and their keys, ties to the lower key."
    )


class ReplyOptions(Document):
    """How the reply is written."""

    form: Literal["nested", "flat", "base64"] = "nested"
    datatype: Literal["FP16", "BF16", "FP32", "FP64"] | None = Field(default=None, description="The layer's if null.")
    decimals: Annotated[int, Field(ge=0, le=17, strict=True)] | None = Field(default=None, description="Rounds numbers in JSON.")
    nonfinite: Literal["error", "null", "string"] = Field(
        default="error", description="What NaN and overflow become; -inf in scores and log_sum_exp is a value."
    )


class Tokens(Document):
    """Words for the axes: one list, or one per batch item."""

    query: Words | None = None
    key: Words | None = None


class AttendRequest(Document):
    """Queries, keys, values and masks for one layer. b batch, q queries, k keys, h heads; without b everything drops it."""

    layer: str = Field(default="default", pattern=LAYER_NAME, description="Name of the layer.")
    query: Sequences = Field(description="[b, q, query_dim] or [q, query_dim].")
    key: Sequences | None = Field(default=None, description="[b, k, key_dim]; the query if left out.")
    value: Sequences | None = Field(default=None, description="[b, k, value_dim]; the key if left out.")
    attend_mask: Mask | None = Field(default=None, description="1 = may attend. [q,k], [b,q,k] or [b,h,q,k]; axes of 1 broadcast.")
    block_mask: Mask | None = Field(default=None, description="1 = blocked. Shapes as attend_mask.")
    attend_keys: KeyMask | None = Field(default=None, description="[b,k], 1 = may be attended.")
    block_keys: KeyMask | None = Field(default=None, description="[b,k], 1 = blocked.")
    valid_lens: Lengths | None = Field(default=None, description="[b] or [b,q]: only the first n keys are real.")
    bias: Bias | None = Field(default=None, description='Added to the scores; "-inf" blocks. Shapes as attend_mask.')
    query_offset: Offset | None = Field(
        default=None,
        description='Query i stands at key position i + offset; [b] for one per item, "end": the last real key.',
    )
    causal: Strict = Field(default=False, description="Key j is seen by query i if j <= i + offset.")
    window: Window | None = None
    fully_masked: Literal["zero", "uniform", "error"] = Field(default="zero", description="What a row without keys becomes.")
    head_scale: HeadScale | None = Field(default=None, description="[h] or [b,h], multiplies each head's output.")
    dropout: Dropout | None = None
    scale: Finite | None = Field(default=None, description="The layer's if null.")
    softcap: Annotated[Finite, Field(ge=0)] | None = Field(default=None, description="The layer's if null; 0 switches it off.")
    outputs: list[Output] = Field(
        default_factory=_default_outputs,
        min_length=1,
        description="output and attention_weights if left out.",
        json_schema_extra=each_once,
    )
    output_gradient: Sequences | None = Field(default=None, description="[b, q, output_dim]: the outputs may then name gradients.")
    select: Select | None = None
    reply: ReplyOptions = Field(default_factory=ReplyOptions)
    reproducible: Strict = Field(default=False, description="Bit for bit the same on one machine; runs alone.")
    tokens: Tokens | None = None

    @model_validator(mode="before")
    @classmethod
    def _misplaced(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if "mask" in data:
            raise disagreement("/mask", WHICH_MASK, '"mask"')
        for name, path in ELSEWHERE.items():
            if name in data and name not in cls.model_fields:
                raise disagreement(f"/{name}", f"no field of that name: it is for POST {path}", shown(data[name]))
        return data

    @model_validator(mode="after")
    def _agree(self) -> Self:
        shapes.check(self)
        return self

    @property
    def batched(self) -> bool:
        return self.query.ndim == 3


class PutLayer(Document):
    """A layer to make: seeded by its spec, or with explicit weights under their canonical names."""

    tensors: ClassVar[dict[str, Kind]] = {"weights/*": "number"}
    spec: LayerSpec
    weights: dict[str, Weight] | None = Field(default=None, description=WEIGHTS)

    @model_validator(mode="before")
    @classmethod
    def _drawn(cls, data: Any) -> Any:
        """An init of null says that weights were given; where none are, it is left out."""
        spec = data.get("spec") if isinstance(data, dict) and data.get("weights") is None else None
        if isinstance(spec, dict) and spec.get("init", ...) is None:
            return {**data, "spec": {name: value for name, value in spec.items() if name != "init"}}
        return data


class LayerReference(Document):
    name: str
    fingerprint: str


class AttendReply(Document):
    """What was asked for, under the names of `outputs`; shapes are documented with each output."""

    model_config = ConfigDict(extra="allow")
    layer: LayerReference
    fully_masked_rows: int = Field(description="Rows (batch, head, query) that had no key to attend to.")


class LayerDocument(Document):
    """A layer that is held, or one that has been unloaded."""

    name: str
    state: Literal["ready", "unloaded"] = Field(
        default="ready", description="An unloaded layer is kept, answers no calls, and can be loaded again."
    )
    spec: LayerSpec
    fingerprint: str
    parameters: int
    device: str


class Layers(Document):
    layers: list[LayerDocument]


class PlannedTensor(Document):
    shape: list[int]
    datatype: str
    bytes: int


class Refusal(Document):
    at: str
    expected: str
    got: str


class Plan(Document):
    """What POST /attend would do with this body."""

    layer: LayerReference
    outputs: dict[str, PlannedTensor]
    operations: int = Field(description="Predicted floating-point operations.")
    memory_bytes: int = Field(description="Predicted peak memory of the computation.")
    reply_bytes: int = Field(description="Size of the reply: exact for base64 tensors, an estimate for numbers in text.")
    admitted: bool
    refusals: list[Refusal] = Field(description="Why it would not be admitted.")


class ProblemDocument(BaseModel):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    request_id: str
    errors: list[Refusal]


def request_schemas(*more: type[BaseModel]) -> dict[str, Any]:
    """Name -> JSON schema of the documents that routes read or write themselves, for the OpenAPI document."""
    models: list[Any] = [(model, "validation") for model in (AttendRequest, PutLayer, ProblemDocument, *more)]
    _, definitions = models_json_schema(models, ref_template=REFERENCE)
    return with_definitions(definitions["$defs"])
