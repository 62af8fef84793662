"""Types of the operations' arguments: `timeout`, tensors, and the fields of their requests besides `layer`, `query`, `key` and `value`.

The models of `service/wire/schemas/` describe the fields; `help(Client.attend)` shows the descriptions. None leaves a field out.
"""

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

from service.wire.schemas.attend import Output

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    TensorLike: TypeAlias = ArrayLike
else:

    class TensorLike:
        """Anything that numpy converts to an array, or a torch tensor. numpy's own type would fill a signature with its parts."""


class UseClientDefault(Enum):
    """The type of a `timeout` argument that is left out."""

    USE_CLIENT_DEFAULT = "the client's timeout"

    def __repr__(self) -> str:
        return f"<{self.value}>"


USE_CLIENT_DEFAULT = UseClientDefault.USE_CLIENT_DEFAULT
Timeout = float | Literal[UseClientDefault.USE_CLIENT_DEFAULT] | None


class Window(TypedDict, total=False):
    """Numbers of keys on each side of the position of the query; None is no bound."""

    left: int | None
    right: int | None


class Dropout(TypedDict):
    p: float
    seed: int


class Select(TypedDict, total=False):
    """The attention weights to return. With `top_k` the result has `TopWeights`."""

    heads: Sequence[int] | None
    queries: Sequence[int] | None
    average: bool
    top_k: int | None


class Reply(TypedDict, total=False):
    """How numbers are returned: in safetensors, or in JSON if `form` or `decimals` is given."""

    form: Literal["nested", "flat", "base64"]
    datatype: Literal["FP16", "BF16", "FP32", "FP64"] | None
    decimals: int | None
    nonfinite: Literal["error", "null", "string"]


class Tokens(TypedDict, total=False):
    """Labels of the queries and keys: a list, or one for each batch item."""

    query: Sequence[str] | Sequence[Sequence[str]] | None
    key: Sequence[str] | Sequence[Sequence[str]] | None
    omit: Literal["special"] | Sequence[str] | None


class CallFields(TypedDict, total=False):
    """The fields of every operation that computes attention."""

    attend_mask: TensorLike | None
    block_mask: TensorLike | None
    attend_keys: TensorLike | None
    block_keys: TensorLike | None
    valid_lens: TensorLike | None
    segments: TensorLike | None
    query_segments: TensorLike | None
    key_segments: TensorLike | None
    query_lengths: TensorLike | None
    key_lengths: TensorLike | None
    bias: TensorLike | None
    causal: bool | None
    window: Window | None
    query_offset: int | Sequence[int] | TensorLike | Literal["end"] | None
    positions: TensorLike | None
    key_positions: TensorLike | None
    fully_masked: Literal["zero", "uniform", "error"] | None
    head_scale: TensorLike | None
    scale: float | None
    softcap: float | None
    outputs: Sequence[Output] | None
    select: Select | None
    reply: Reply | None
    reproducible: bool | None
    tokens: Tokens | None


class AttendFields(CallFields, total=False):
    """The fields of `attend`."""

    dropout: Dropout | None
    output_gradient: TensorLike | None


class StepFields(AttendFields, total=False):
    """The fields of a session's `attend`."""

    append: bool | None
    expected_length: int | None


class MetricOptions(TypedDict, total=False):
    local_window: int
    top_links: int
    mass: float
    query_lens: int | Sequence[int] | None


class AnalysisFields(CallFields, total=False):
    """The fields of `analysis`."""

    session: str | None
    analysis: MetricOptions | None
    direction: TensorLike | None


class FigureFields(AttendFields, total=False):
    """The fields of `figure`."""

    session: str | None


class PlanFields(AttendFields, AnalysisFields, total=False):
    """The fields of `plan`."""

    metrics: Sequence[str] | None


class FigureOptions(TypedDict, total=False):
    theme: Literal["light", "dark"]
    colours: Literal["viridis", "cividis"]
    title: str | None
    heads: Sequence[int] | None
    item: int
    pool: Literal["mean", "max"] | None
    values: bool | None
    scale: Literal["linear", "log"]
    maximum: float | None
    width: int | None
    dpi: int
