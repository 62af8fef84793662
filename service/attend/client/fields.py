"""Types of the fields of requests, besides those that operations have as parameters of their own. None leaves a field out.

`tests/client/generate_fields.py` writes this file from the models of `wire/schemas/`; `help(Client.attend)` shows their descriptions.
"""

from collections.abc import Sequence
from typing import Literal, Required, TypedDict

from attend.client.arguments import TensorLike


class FigureOptions(TypedDict, total=False):
    """A picture of one batch item."""

    theme: Literal["light", "dark"]
    colours: Literal["viridis", "cividis"]
    title: str | None
    heads: Sequence[int] | None
    item: int
    pool: Literal["mean", "max"] | None
    values: bool | None
    scale: Literal["linear", "log"]
    scale_per_head: bool
    maximum: float | None
    width: int | None
    dpi: int


class Window(TypedDict, total=False):
    """A query at position p attends to keys from p - left to p + right; null is no bound."""

    left: int | None
    right: int | None


class Select(TypedDict, total=False):
    """The attention weights to return. Indices count from 0, and keep their order."""

    heads: Sequence[int] | None
    queries: Sequence[int] | None
    average: bool
    top_k: int | None


class ReplyOptions(TypedDict, total=False):
    """How the reply is written."""

    form: Literal["nested", "flat", "base64"]
    datatype: Literal["FP16", "BF16", "FP32", "FP64"] | None
    decimals: int | None
    nonfinite: Literal["error", "null", "string"]


class Tokens(TypedDict, total=False):
    """Tokens of the queries and keys, as labels and for the metrics that need them: one list, or one for each batch item."""

    query: Sequence[str] | Sequence[Sequence[str]] | None
    key: Sequence[str] | Sequence[Sequence[str]] | None
    omit: Literal["special"] | Sequence[str] | None


class Dropout(TypedDict, total=False):
    """Keeps a weight where `numpy.random.RandomState(seed).random_sample((b, h, q, k))` is at least `p`, and divides it by 1 - p. The reply
    has the weights after dropout."""

    p: Required[float]
    seed: Required[int]


class AnalysisOptions(TypedDict, total=False):
    """Options of the metrics."""

    local_window: int
    top_links: int
    mass: float
    query_lens: int | Sequence[int] | None


class CallFields(TypedDict, total=False):
    """The fields of every operation that computes attention."""

    attend_mask: TensorLike | None  # [q,k], [b,q,k] or [b,h,q,k]; axes of 1 broadcast
    block_mask: TensorLike | None  # [q,k], [b,q,k] or [b,h,q,k]; axes of 1 broadcast
    attend_keys: TensorLike | None  # [b,k]; axes of 1 broadcast
    block_keys: TensorLike | None  # [b,k]; axes of 1 broadcast
    valid_lens: TensorLike | None  # [b] or [b,q]
    segments: TensorLike | None  # [b,n]; axes of 1 broadcast
    query_segments: TensorLike | None  # [b,q]; axes of 1 broadcast
    key_segments: TensorLike | None  # [b,k]; axes of 1 broadcast
    query_lengths: TensorLike | None  # [sequences]
    key_lengths: TensorLike | None  # [sequences]
    bias: TensorLike | None  # [q,k], [b,q,k] or [b,h,q,k]; axes of 1 broadcast
    query_offset: int | Sequence[int] | Literal["end"] | TensorLike | None
    positions: TensorLike | None  # [b,q] or [b,q,axes]; b may be 1
    key_positions: TensorLike | None  # [b,k] or [b,k,axes]; b may be 1
    causal: bool | None
    window: Window | None
    fully_masked: Literal["zero", "uniform", "error"] | None
    head_scale: TensorLike | None  # [h] or [b,h]
    pattern: TensorLike | None  # [q,k], [b,q,k] or [b,h,q,k]; axes of 1 broadcast
    pattern_rows: TensorLike | None  # [h], [b,h] or [b,h,q]; axes of 1 broadcast
    head_outputs: TensorLike | None  # [b,h,q,value_head_dim]; axes of 1 broadcast
    head_output_rows: TensorLike | None  # [h], [b,h] or [b,h,q]; axes of 1 broadcast
    scale: float | None
    softcap: float | None
    outputs: Sequence[str] | None
    select: Select | None
    reply: ReplyOptions | None
    reproducible: bool | None
    tokens: Tokens | None


class AttendFields(CallFields, total=False):
    """The fields of `attend`."""

    dropout: Dropout | None
    output_gradient: TensorLike | None  # [b,q,output_dim]


class StepFields(AttendFields, total=False):
    """The fields of a session's `attend`."""

    append: bool | None
    expected_length: int | None


class AnalysisFields(CallFields, total=False):
    """The fields of `analysis`."""

    session: str | None
    analysis: AnalysisOptions | None
    direction: TensorLike | None  # [b,q,output_dim]


class FigureFields(AttendFields, total=False):
    """The fields of `figure`."""

    session: str | None


class PlanFields(AttendFields, AnalysisFields, total=False):
    """The fields of `plan`."""
