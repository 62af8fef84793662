"""Normalisation of queries and keys: RMS norm (Zhang & Sennrich 2019) or layer norm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import LeftOut, Variances
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Step, Steps, Value
from attend.spec_parts import Eps, Flag, Part, field_error

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions


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


class QKNormOperator(Operator):
    name, field, normalises_heads = "qk_norm", "qk_norm", True
    left_out = LeftOut("the norm of queries and keys", "q_i · k_j", "norm(q_i) · norm(k_j)")
    axes: ClassVar[Axes] = dict.fromkeys(("query_norm.weight", "key_norm.weight", "query_norm.bias", "key_norm.bias"), ("n",))
    identifying_weight = "query_norm.weight"

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        norm: QKNorm = getattr(spec, cls.field)
        shapes: Shapes = {}
        for name, heads in (("query_norm", spec.num_heads), ("key_norm", spec.num_kv_heads)) if norm.weights != "none" else ():
            shape = (spec.head_dim,) if norm.weights == "shared" else (heads, spec.head_dim)
            shapes |= {f"{name}.weight": shape} | ({f"{name}.bias": shape} if norm.bias else {})
        return shapes

    @classmethod
    def variances(cls, spec: Dimensions, weights: Mapping[str, Tensor], before: Variances) -> Variances:
        """The mean squares of the norms' weights."""
        names = ("query_norm.weight", "key_norm.weight")
        return Variances(*(float(weights[name].double().square().mean()) if name in weights else 1.0 for name in names))

    @classmethod
    def is_relative(cls, spec: Dimensions) -> bool:
        """A norm after RoPE that treats dimensions differently makes scores depend on the positions themselves."""
        norm: QKNorm = getattr(spec, cls.field)
        return not (getattr(spec, "rope", None) and norm.after_rope and (norm.weights != "none" or norm.kind == "layer"))

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """The usual norm half of the time, else one over all heads, with weights of its own for each head, after RoPE, or of values too."""
        head_dim = fields.get("head_dim", fields["d_model"] // fields["num_heads"])
        few = min(head_dim, fields.get("value_head_dim", head_dim)) < 5  # small or equal numbers magnify rounding
        eps = draw.one_of(*((0.01, 0.1) if few else (1e-6, 1e-5, 0.1)))
        kinds = ("rms", "layer") if head_dim > 2 else ("rms",)  # the layer norm of two numbers is only their signs
        norm = {"kind": draw.one_of(*kinds), "eps": eps}
        if draw.flag():
            return norm
        over = draw.one_of("head", "all")
        weights = draw.one_of(*(("shared", "own", "none") if over == "head" else ("own", "none")))
        after, values, bias = (draw.flag() for _ in range(3))
        values = values and (norm["kind"] == "rms" or fields.get("value_head_dim", head_dim) > 2)
        return norm | {"over": over, "weights": weights, "after_rope": after, "values": values, "bias": bias and weights != "none"}

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """Norms of queries and keys, before or after RoPE, and of values."""
        norm: QKNorm = getattr(spec, cls.field)
        heads = tuple(cls._step(norm, role, weighted=norm.weights != "none") for role in ("query", "key"))
        of_values = (cls._step(norm, "value", weighted=False),) if norm.values else ()
        return {"norm": of_values, "rescale": heads} if norm.after_rope else {"norm": heads + of_values}

    @classmethod
    def _step(cls, norm: QKNorm, role: str, *, weighted: bool) -> Step:
        letter, function = role[0].upper(), "LayerNorm" if norm.kind == "layer" else "RMSNorm"
        over = "each head" if norm.over == "head" else "all heads as one vector"
        each = "weights" if norm.over == "all" else "a weight for each head"
        weights = {"shared": "one weight for all heads", "own": each, "none": "no weights"}[norm.weights if weighted else "none"]
        formula = f"{letter} = {function}({letter}), over {over}, with {weights}{' and biases' if norm.bias and weighted else ''}"
        compute = partial(normalise, norm=norm, name=f"{role}_norm" if weighted else "")
        heads, width = ("h,q" if role == "query" else "kv heads,k"), "value_head_dim" if role == "value" else "head_dim"
        projected = f"{role}_projection"
        return Step(f"norm_{role}", (projected,), {projected: Value(f"b,{heads},{width}")}, formula, compute)


def normalise(m: Arithmetic, x: Any, *, norm: QKNorm, name: str = "") -> Any:
    """x / √(mean x² + eps) · w + b, the RMS norm (Zhang & Sennrich 2019); the layer norm subtracts the mean of x first.

    x is [b, heads, n, d] or [b, n, d], the mean over its last axis, or over all heads of a row. The weight and bias of this `name` are
    [d] or [heads, d]; 1 and 0 if the layer has none.
    """
    x_wide, axes = m.widened(x), (-1,) if norm.over == "head" else (1, 3)
    if norm.kind == "layer":
        x_wide = x_wide - x_wide.mean(axis=axes, keepdims=True)
    normalised = x_wide / m.xp.sqrt(m.xp.square(x_wide).mean(axis=axes, keepdims=True) + norm.eps)
    if (weight := m.weight(f"{name}.weight")) is not None:
        normalised = normalised * m.like(weight, x_wide)[..., None, :]
    if (bias := m.weight(f"{name}.bias")) is not None:
        normalised = normalised + m.like(bias, x_wide)[..., None, :]
    return m.like(normalised, x)
