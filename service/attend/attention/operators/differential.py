"""Differential attention (Ye et al. 2024, arXiv 2410.05258): weights are the difference of two softmaxes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from attend.attention.operators.operator import Operator
from attend.attention.operators.qk_norm import QKNorm, normalise
from attend.attention.operators.step import HEAD_OUTPUTS, SCORES, WEIGHTS, Step, Steps, Value
from attend.spec_parts import SMALLEST, Flag, Part, field_error

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions
    from attend.tensors import Array

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class Differential(Part):
    """Differential attention (Ye et al. 2024, arXiv 2410.05258): weights are the difference of two softmaxes, and may be negative.

    Queries and keys of a head are two halves of head_dim/2 numbers: A = softmax(scale q1 k1^T) - lambda softmax(scale q2 k2^T). The head's
    output is (1 - lambda_init) norm(A v), with an RMS norm. lambda = exp(lambda_q1 · lambda_k1) - exp(lambda_q2 · lambda_k2) + lambda_init,
    with four weights [head_dim/2] of these names, which all heads share.
    """

    lambda_init: Annotated[float, Field(ge=0, le=1, strict=True)] = Field(
        default=0.8, description="0.8 - 0.6 exp(-0.3 n) in layer n of the paper's models, counted from 0."
    )
    eps: Annotated[float, Field(ge=SMALLEST, le=1, allow_inf_nan=False, strict=True)] = Field(
        default=1e-5, description="Of the norm of each head's output."
    )
    norm_weights: Flag = Field(
        default=True, description="Whether that norm has a weight for all heads, `head_norm.weight` [value_head_dim]."
    )


class DifferentialOperator(Operator):
    name, field, num_softmaxes = "differential", "differential", 2
    conflicts: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("qk_norm", "latent", "relative_scores", "sinks"), "differential attention is not defined with it"),
        "normalizer": "differential attention is the difference of two softmaxes",
    }
    survives_conflicts = True
    amplifies_rounding = True  # its norm may amplify the rounding of any difference
    undefined_options: ClassVar[dict[str, str]] = {"dropout": "dropout of a difference of two softmaxes is not defined"}
    axes: ClassVar[Axes] = dict.fromkeys((*LAMBDAS, "head_norm.weight"), ("n",))
    identifying_weight = "lambda_q1"

    @classmethod
    def check(cls, spec: Dimensions) -> None:
        if spec.head_dim % 2:
            raise field_error("/head_dim", "an even number, since differential attention halves it", str(spec.head_dim))

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        shapes: Shapes = dict.fromkeys(LAMBDAS, (spec.head_dim // 2,))
        return shapes | ({"head_norm.weight": (spec.value_head_dim,)} if getattr(spec, cls.field).norm_weights else {})

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        norm = {"eps": draw.one_of(1e-5, 0.1), "norm_weights": draw.flag()}
        return {**norm, "lambda_init": draw.number(0.2, 0.5)}

    @classmethod
    def random_weight(cls, name: str, normal: Array) -> Array:
        """So small that exp of a product of two is moderate."""
        weight: Array = 0.5 * normal / len(normal) ** 0.5
        return weight

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """Scores of both halves of queries and keys, the difference of their softmaxes, and the norm of the heads' outputs."""
        config: Differential = getattr(spec, cls.field)
        factor = Step(
            "lambda",
            LAMBDAS,
            {"lambda": Value("1", "float64")},
            "λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + lambda_init",
            lambda m, q1, k1, q2, k2: _dot(m, q1, k1) - _dot(m, q2, k2) + config.lambda_init,
        )
        scores = Step(
            "two_scores",
            ("query_projection", "key_projection", "scale"),
            SCORES,
            "S1, S2 = scale · Q1 K1ᵀ, scale · Q2 K2ᵀ, of both halves of each head",
            _two_scores,
            products=("b,h,q,k,head_dim",),
        )
        difference = Step(
            "difference",
            ("attention_weights", "lambda"),
            WEIGHTS,
            "A = A1 - λ A2",
            lambda m, weights, factor: weights[0] - factor * weights[1],
            all_keys=True,
            signed=True,
        )
        weight = " with one weight for all heads" if config.norm_weights else ""
        formula = f"O = (1 - lambda_init) RMSNorm(O){weight}"
        norm = Step("norm_heads", ("head_outputs",), HEAD_OUTPUTS, formula, partial(_norm, config=config), all_keys=True)
        return {"constants": (factor,), "scores": (scores,), "combine": (difference,), "value_norm": (norm,)}


def _dot(m: Arithmetic, x: Any, y: Any) -> float:
    """exp(x · y)."""
    return float(m.xp.exp(m.exact(x) @ m.exact(y)))


def _two_scores(m: Arithmetic, query: Any, key: Any, scale: float) -> Any:
    half = query.shape[-1] // 2
    return m.xp.stack([m.scores(query[..., numbers], key[..., numbers], scale) for numbers in (slice(half), slice(half, None))])


def _norm(m: Arithmetic, heads: Any, *, config: Differential) -> Any:
    """The norm of each head's output, in wide numbers up to the factor."""
    normalised = normalise(m, m.wide(heads), norm=QKNorm(eps=config.eps), name="head_norm" if config.norm_weights else "")
    return m.like((1 - config.lambda_init) * normalised, heads)
