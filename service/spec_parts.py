"""The parts of a LayerSpec: a model for each field that has fields of its own, with its formula, and the error that validators raise."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Width = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
LARGEST, SMALLEST = 1e30, 1e-30  # of factors; float32 overflows at 3e38, and is 0 below 1e-45
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Side = Annotated[int, Field(ge=1, le=65536, strict=True)]
Axis = Annotated[int, Field(ge=0, le=15, strict=True)]
PROJECTIONS = ("query", "key", "value", "output")


def field_error(at: str, expected: str, got: str) -> PydanticCustomError:
    """An error for validators to raise; `at` is a pointer below the field or model that is validated."""
    return PydanticCustomError("field_error", "expected {expected}, got {got}", {"expected": expected, "got": got, "at": at})


def _zero_or_normal(value: float) -> float:
    if 0 < value < SMALLEST:
        raise field_error("", f"0, or a number from {SMALLEST} to 1", str(value))
    return value


Eps = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True), AfterValidator(_zero_or_normal)]  # of a norm


class Part(BaseModel):
    """A group of fields of a spec."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def bias_of_each(value: Any) -> Any:
    if isinstance(value, bool | Biases):
        return value
    if isinstance(value, Mapping) and set(value) == set(PROJECTIONS) and all(isinstance(flag, bool) for flag in value.values()):
        return Biases(**value)
    raise field_error("", f"true or false, or one of them for each of {', '.join(PROJECTIONS)}", json.dumps(value)[:60])


class Biases(Part):
    """Which projections have a bias."""

    query: Flag
    key: Flag
    value: Flag
    output: Flag


class Window(Part):
    """A query at position p attends to keys from p - left to p + right; null is no bound."""

    left: Count | None = Field(default=None, examples=[128])
    right: Count | None = Field(default=None, examples=[0])


class RopeScaling(Part):
    """Scaling of RoPE's frequencies for long contexts: all divided by `factor` (linear), or only low frequencies (llama3)."""

    type: Literal["linear", "llama3"] = Field(examples=["linear"])
    factor: Positive = Field(examples=[8.0])
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position: Width = 8192

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise field_error("/low_freq_factor", f"less than high_freq_factor {self.high_freq_factor}", str(self.low_freq_factor))
        return self


class Rope(Part):
    """Rotary position embedding (Su et al. 2021) of the first `dims` of each head: halves (GPT-NeoX, Llama) or interleaved pairs."""

    theta: Positive = Field(default=10000.0, examples=[10000.0])
    dims: Width | None = Field(default=None, description="Number of dimensions of each head that are rotated, even; head_dim if left out.")
    interleaved: Flag = False
    scaling: RopeScaling | None = None
    frequencies: tuple[Finite, ...] | None = Field(
        default=None, description="Radians per position of each pair, dims/2 numbers, in place of theta and scaling (yarn, longrope)."
    )
    attention_factor: Positive = Field(default=1.0, description="Factor on cosines and sines (yarn, longrope).")
    max_length: Width | None = Field(
        default=None, description="Longer calls are refused, since the model has other frequencies there (longrope, dynamic)."
    )
    axes: tuple[Axis, ...] | None = Field(
        default=None,
        description="Axis of the positions that each pair turns by, dims/2 numbers (m-RoPE, images); null if there is one axis.",
    )
    requires_positions: Flag = Field(
        default=False,
        description="Whether calls must have `positions` (images); otherwise they are the indices of the rows, on every axis.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.frequencies is not None and self.scaling is not None:
            raise field_error("/scaling", "null, since frequencies are given", self.scaling.type)
        for name, numbers in (("frequencies", self.frequencies), ("axes", self.axes)):
            if numbers is not None and self.dims is not None and len(numbers) * 2 != self.dims:
                raise field_error(f"/{name}", f"{self.dims // 2} numbers, half of dims {self.dims}", str(len(numbers)))
        if unused := {*range(self.num_axes)} - {*(self.axes or (0,))}:
            raise field_error("/axes", f"each axis from 0 to {self.num_axes - 1}", f"no pair with axis {min(unused)}")
        return self

    @property
    def num_axes(self) -> int:
        """Number of coordinates of a position."""
        return 1 + max(self.axes, default=0) if self.axes is not None else 1


class QueryScale(Part):
    """Queries grow with their position p, by 1 + factor · ln(1 + ⌊(max(p, 0) + shift)/length⌋), after norm and RoPE.

    Nakanishi 2025 and Llama 4.
    """

    factor: Positive = Field(examples=[0.1], description="0.1 in Llama 4 and Ministral 3.")
    length: Width = Field(examples=[8192], description="Number of positions with the same factor.")
    shift: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] = Field(default=0, description="1 in Llama 4, 0 in Ministral 3.")


class RelativeBias(Part):
    """T5's biases by bucket of distance (Raffel et al. 2020), from the weight `relative_bias` [buckets, num_heads]."""

    buckets: Annotated[int, Field(ge=4, le=65536, strict=True)] = Field(default=32, examples=[32])
    max_distance: Width = Field(default=128, examples=[128])
    bidirectional: Flag = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        exact = self.buckets // (4 if self.bidirectional else 2)
        if self.max_distance <= exact:
            raise field_error(
                "/max_distance", f"more than {exact}, the number of distances with a bucket of their own", str(self.max_distance)
            )
        return self


class RelativeScores(Part):
    """Scores that have terms of the content and the distance D, the position of query i less that of key j, beside query·key.

    transformer_xl (Dai et al. 2019, arXiv 1901.02860, section 3.3): (q_i + u)·k_j + (q_i + v)·W_R R_D with sinusoids R_D [d_model]. W_R is
    `position_key.weight` [num_heads*head_dim, d_model]; u and v are `content_bias` and `position_bias`, [num_heads, head_dim].

    disentangled (He et al. 2021, arXiv 2006.03654, equation 4): q_i·k_j + q_i·r_D + k_j·s_D with the columns r_D and s_D of the weights
    `position_key.weight` and `position_query.weight` [num_heads*head_dim, 2n] for this distance, n for each direction.
    """

    kind: Literal["transformer_xl", "disentangled"]
    max_distance: Width | None = Field(
        default=None, description="Keys further away than this count as this far; null: no bound (transformer_xl alone)."
    )
    interleaved: Flag = Field(
        default=False, description="transformer_xl: whether sines and cosines alternate (Conformers), or all sines come first (XLNet)."
    )
    buckets: Annotated[int, Field(ge=4, le=65536, strict=True)] | None = Field(
        default=None, description="disentangled: columns for each direction, logarithmic from the middle on; null: one for each distance."
    )
    position_to_content: Flag = Field(default=False, description="disentangled: whether there is the term k_j·s_D.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "transformer_xl":
            for name in ("buckets", "position_to_content"):
                if (value := getattr(self, name)) not in (None, False):
                    raise field_error(f"/{name}", "none, since kind is transformer_xl", json.dumps(value))
        elif self.interleaved:
            raise field_error("/interleaved", "false, since kind is disentangled", "true")
        elif self.max_distance is None:
            raise field_error("/max_distance", "a number, since kind is disentangled", "null")
        elif self.buckets is not None and self.max_distance <= (least := self.buckets // 2 + 1):
            raise field_error("/max_distance", f"more than {least}, so that the logarithm grows", str(self.max_distance))
        return self

    @property
    def columns(self) -> int:
        """disentangled: the number of columns for each direction, n; transformer_xl: 0."""
        return (self.buckets or self.max_distance or 0) if self.kind == "disentangled" else 0


class GridBias(Part):
    """Scores by relative position in a grid of height x width tokens in row-major order, such as a window of an image.

    With dy and dx the row and column of the query less those of the key, and the projected query q, a head's score is increased by
    `grid_bias`[(dy + height - 1) (2 width - 1) + dx + width - 1, head] (table; Swin, Liu et al. 2021, equation 4), or by
    q · `grid_rows`[dy + height - 1] + q · `grid_columns`[dx + width - 1] (decomposed; MViTv2, Li et al. 2022, equation 4).
    """

    height: Side
    width: Side
    kind: Literal["table", "decomposed"] = Field(
        default="table", description="A bias for each head and relative position (Swin, BEiT), or a vector for each row and column (SAM)."
    )
    class_token: Flag = Field(
        default=False,
        description="Whether a class token precedes the grid; the table ends with its biases to keys, from queries and to itself (BEiT).",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.class_token and self.kind == "decomposed":
            raise field_error("/class_token", "false, since decomposed positions have no class token", "true")
        return self

    @property
    def num_tokens(self) -> int:
        """The tokens of the grid, and the class token if there is one."""
        return self.height * self.width + self.class_token


class QKNorm(Part):
    """Normalisation of queries and keys, with the weights `query_norm.weight` and `key_norm.weight`."""

    kind: Literal["rms", "layer"] = Field(default="rms", examples=["rms"])
    eps: Eps = 1e-6
    over: Literal["head", "all"] = Field(default="head", description="Each head by itself, or all heads as one vector (OLMo-2).")
    weights: Literal["shared", "own", "none"] = Field(
        default="shared", description="One weight [head_dim] for all heads, one for each head [heads, head_dim] (Cohere), or none."
    )
    bias: Flag = Field(default=False, description="Whether the norms have biases, `query_norm.bias` and `key_norm.bias`.")
    after_rope: Flag = Field(default=False, description="Whether the norm follows RoPE instead of preceding it.")
    values: Flag = Field(default=False, description="Whether values are normalised too, without weights (Gemma 4).")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bias and self.weights == "none":
            raise field_error("/bias", "false, since the norm has no weights", "true")
        if self.over == "all" and self.weights == "shared":
            raise field_error("/weights", "own or none, since the norm is over all heads", "shared")
        return self


class Latent(Part):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): projections in two steps, and a part of the keys that heads share.

    Keys and values: c = norm(x W^T) with the weight `key_value_down.weight` [key_value_rank, key_dim]; `key.weight` and `value.weight` are
    applied to c. Queries likewise with `query_down.weight`, or in one step. The first `rope_key_dim` numbers of each key are the same for
    all heads, x W^T with `rope_key.weight` [rope_key_dim, key_dim], so `key.weight` has that many fewer rows for each head.
    """

    key_value_rank: Width = Field(examples=[16], description="Width of the latent vector of keys and values.")
    query_rank: Width | None = Field(default=None, description="Width of the latent vector of queries; null if they have none.")
    rope_key_dim: Width = Field(
        examples=[4], description="Number of dimensions of each key that all heads share; RoPE rotates the first ones."
    )
    eps: Eps = Field(default=1e-6, description="Of the RMS norms of the latent vectors.")
    bias: Flag = Field(default=False, description="Whether query_down, key_value_down and rope_key have biases.")


class OutputGate(Part):
    """A gate on the output of each head, before the output projection, from the query's input x (Qiu et al. 2025, arXiv 2505.06708).

    Y' = Y * activation(x W^T + b), with W the weight `gate.weight` and b `gate.bias`. W is [num_heads * value_head_dim, d_model]
    (elementwise), or [num_heads, d_model] (headwise: one factor for each head).
    """

    granularity: Literal["elementwise", "headwise"] = Field(
        default="elementwise", examples=["elementwise"], description="One gate for each number of a head's output, or one for each head."
    )
    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    bias: Flag = Field(default=False, description="Whether the projection of the gate has a bias, `gate.bias`.")


class Differential(Part):
    """Differential attention (Ye et al. 2024, arXiv 2410.05258): weights are the difference of two softmaxes, and may be negative.

    Queries and keys of a head are two halves of head_dim/2 numbers: A = softmax(scale q1 k1^T) - lambda softmax(scale q2 k2^T). The head's
    output is (1 - lambda_init) norm(A v), with an RMS norm. lambda = exp(lambda_q1 · lambda_k1) - exp(lambda_q2 · lambda_k2) + lambda_init,
    with four weights [head_dim/2] of these names, which all heads share.
    """

    lambda_init: Annotated[float, Field(ge=0, le=1, strict=True)] = Field(
        default=0.8, description="0.8 - 0.6 exp(-0.3 n) in layer n of the paper's models, counted from 0."
    )
    eps: Annotated[Eps, Field(gt=0)] = Field(default=1e-5, description="Of the norm of each head's output.")
    norm_weights: Flag = Field(
        default=True, description="Whether that norm has a weight for all heads, `head_norm.weight` [value_head_dim]."
    )


class Indexer(Part):
    """DeepSeek's indexer (DeepSeek-AI 2025, arXiv 2512.02556): a query attends only to the keys with its `top_k` largest index scores.

    I_ij = sum_h w_ih relu(q_ih · k_j) over small heads of its own. Queries are x W^T with `index_query.weight` [num_heads * head_dim, in],
    from the latent vector of queries if there is one; keys, the same for all of these heads, norm(x W^T) with `index_key.weight` [head_dim,
    key_dim] and a layer norm, `index_key_norm.weight` and `.bias`; w is x W^T with `index_head_weights.weight` [num_heads, d_model]. RoPE
    rotates these queries and keys as those of the layer.
    """

    num_heads: Width = Field(description="Number of heads of the indexer.")
    head_dim: Width = Field(description="Width of its heads.")
    top_k: Width = Field(description="Number of keys that each query keeps.")
    interleaved: Flag = Field(default=False, description="Whether RoPE rotates interleaved pairs here (GLM-5), or halves (DeepSeek-V3.2).")
    eps: Eps = Field(default=1e-6, description="Of the layer norm of its keys.")
