"""Keyword arguments of the operations: the fields of their requests besides `layer`, `query`, `key` and `value`.

b is the batch size, h the number of heads, q the number of queries, k the number of keys. Without a batch axis in the query, no field has
one. None leaves a field out.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

from service.wire.schemas.attend import Output

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    TensorLike: TypeAlias = ArrayLike
else:

    class TensorLike:
        """Whatever numpy makes an array of, or a torch tensor. numpy's own type would fill a signature with its parts."""


class Window(TypedDict, total=False):
    """Numbers of keys on each side of the position of the query; None is no bound."""

    left: int | None
    right: int | None


class Dropout(TypedDict):
    """Weights are dropped with probability `p`, and the others divided by 1 - p; the same `seed` drops the same ones."""

    p: float
    seed: int


class Select(TypedDict, total=False):
    """The attention weights to return."""

    heads: Sequence[int] | None
    """Heads, from 0, in the order of the result; all by default."""
    queries: Sequence[int] | None
    """Queries, from 0, in the order of the result; all by default."""
    average: bool
    """The mean over these heads, without the axis h."""
    top_k: int | None
    """Only the largest weights of each row, with their keys: `TopWeights`."""


class Reply(TypedDict, total=False):
    """How numbers come back."""

    form: Literal["nested", "flat", "base64"]
    """A reply in JSON, in this form; by default it is safetensors."""
    datatype: Literal["FP16", "BF16", "FP32", "FP64"] | None
    """Of the arrays; the layer's by default."""
    decimals: int | None
    """Decimals of the numbers in JSON; all by default."""
    nonfinite: Literal["error", "null", "string"]
    """Whether NaN and overflow are an error, which is the default, or NaN and infinity in the arrays."""


class Tokens(TypedDict, total=False):
    """Labels of the queries and keys: a list, or one for each batch item."""

    query: Sequence[str] | Sequence[Sequence[str]] | None
    key: Sequence[str] | Sequence[Sequence[str]] | None
    omit: Literal["special"] | Sequence[str] | None
    """Tokens to leave out of pictures and metrics, such as [CLS] and </s>, which are "special"; weights stay as they are."""


class CallFields(TypedDict, total=False):
    """The fields of every operation that computes attention."""

    attend_mask: TensorLike | None
    """1 = may attend; [q,k], [b,q,k] or [b,h,q,k], axes of 1 are broadcast. Not beside `block_mask`."""
    block_mask: TensorLike | None
    """1 = may not attend; shapes as `attend_mask`."""
    attend_keys: TensorLike | None
    """1 = a key that queries may attend to; [b,k]. Not beside `block_keys`."""
    block_keys: TensorLike | None
    """1 = a key that no query may attend to, such as padding; [b,k]."""
    valid_lens: TensorLike | None
    """Only the first n keys may be attended to; [b] or [b,q]."""
    segments: TensorLike | None
    """Queries attend only to keys of their own segment, such as one of several sequences in a row; -1 is padding; [b,n]."""
    query_segments: TensorLike | None
    """Segments of the queries, beside `key_segments`, where query and key differ; [b,q]."""
    key_segments: TensorLike | None
    """Segments of the keys; [b,k]."""
    query_lengths: TensorLike | None
    """Rows of each sequence, if the query [total, width] is several sequences one after the other; weights are then a list."""
    key_lengths: TensorLike | None
    """Rows of each sequence of keys, beside `query_lengths`."""
    bias: TensorLike | None
    """Added to the scores; shapes as `attend_mask`. -inf blocks."""
    causal: bool | None
    """Query i attends to keys j <= i + query_offset only."""
    window: Window | None
    """Query i attends to keys from i + query_offset - left to i + query_offset + right only."""
    query_offset: int | Sequence[int] | TensorLike | Literal["end"] | None
    """Position of the first query among the keys: an integer, [b], or "end", which puts the last query at the last real key."""
    positions: TensorLike | None
    """Positions by which RoPE rotates the queries, in place of their indices; [b,q], or [b,q,axes] for layers with several axes."""
    key_positions: TensorLike | None
    """The same of the keys; those of the queries if the key is left out."""
    fully_masked: Literal["zero", "uniform", "error"] | None
    """Weights of a query without any key: 0, which is the default, 1/k, or an error."""
    head_scale: TensorLike | None
    """Factor on the output of each head; [h] or [b,h]."""
    scale: float | None
    """Factor on query·key; the layer's by default."""
    softcap: float | None
    """c in c·tanh(scores/c), 0 for none; the layer's by default."""
    outputs: Sequence[Output] | None
    """Names of the arrays to return; by default output and attention_weights."""
    select: Select | None
    """Which attention weights to return; all by default."""
    reply: Reply | None
    """How numbers come back."""
    reproducible: bool | None
    """The same bits for the same request on the same machine."""
    tokens: Tokens | None
    """Labels of the queries and keys, for pictures and for metrics that need them."""


class AttendFields(CallFields, total=False):
    """The fields of `attend`, which are also those of `figure`."""

    dropout: Dropout | None
    """Dropout of the attention weights; none by default."""
    output_gradient: TensorLike | None
    """Gradient of a loss with respect to the output, [b, q, output_dim]; needed for the gradients among the outputs."""


class MetricOptions(TypedDict, total=False):
    """Options of the metrics."""

    local_window: int
    """Largest distance of a local key; 2 by default."""
    top_links: int
    """Number of strongest links of each head; 5 by default."""
    mass: float
    """Share of a row's weight, for keys_for_mass; 0.9 by default."""
    query_lens: int | Sequence[int] | None
    """Only the first n queries count; [b]. By default those that are real keys in self-attention, otherwise all."""


class AnalysisFields(CallFields, total=False):
    """The fields of `analysis`."""

    analysis: MetricOptions | None
    """Options of the metrics."""
    direction: TensorLike | None
    """contribution and gradient_importance are of <direction, output>, [b, q, output_dim]; by default of |output|²/2."""


class PlanFields(AttendFields, AnalysisFields, total=False):
    """The fields of `plan`."""

    metrics: Sequence[str] | None
    """Metrics to plan for, as those of `analysis`."""


class FigureOptions(TypedDict, total=False):
    """Options of a picture."""

    theme: Literal["light", "dark"]
    """Of the background."""
    colours: Literal["viridis", "cividis"]
    """Of the cells."""
    title: str | None
    """By default a description; "" for none."""
    heads: Sequence[int] | None
    """Heads to draw, all by default; for the kind `head` exactly one, the first by default."""
    item: int
    """Batch item to draw; 0 by default."""
    pool: Literal["mean", "max"] | None
    """How pairs that share a cell are pooled."""
    values: bool | None
    """Whether to write numbers in the cells; by default where they fit."""
    scale: Literal["linear", "log"]
    """Of the colours."""
    maximum: float | None
    """Value of the last colour; by default the largest."""
    width: int | None
    """CSS pixels; as needed by default."""
    dpi: int
    """Resolution of a PNG; 144 by default."""
