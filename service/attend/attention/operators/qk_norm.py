"""Normalisation of queries and keys: RMS norm (Zhang & Sennrich 2019) or layer norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import LeftOut, Variances
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.spec_parts import Eps, Flag, Part, field_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attend.attention.call import Call
    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields, Layer
    from attend.attention.operators.stages import Projected
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
    newer_fields = ("over", "weights", "bias", "after_rope", "values")
    axes: ClassVar[Axes] = dict.fromkeys(("query_norm.weight", "key_norm.weight", "query_norm.bias", "key_norm.bias"), ("n",))
    identifying_weight = "query_norm.weight"

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        norm: QKNorm = getattr(spec, cls.field)
        shapes: Shapes = {}
        for name, heads in (("query_norm", spec.num_heads), ("key_norm", spec.num_kv_heads)) if norm.weights != "none" else ():
            shape = (spec.head_dim,) if norm.weights == "shared" else (heads, spec.head_dim)
            shapes |= {f"{name}.{part}": shape for part in ("weight", "bias")[: 1 + norm.bias]}
        return shapes

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        norm: QKNorm = getattr(spec, cls.field)
        function, over = (
            "LayerNorm" if norm.kind == "layer" else "RMSNorm",
            "each head" if norm.over == "head" else "all heads as one vector",
        )
        own = "weights" if norm.over == "all" else "a weight for each head"
        weights = {"shared": "one weight for all heads", "own": own, "none": "no weights"}[norm.weights] + (
            " and biases" if norm.bias else ""
        )
        heads = f"Q = {function}(Q),  K = {function}(K), over {over}, with {weights}"
        values = f"V = {function}(V), over {over}, with no weights"
        if norm.after_rope:
            return {"norm": values, "rescale": heads} if norm.values else {"rescale": heads}
        return {"norm": f"{heads};  {values}" if norm.values else heads}

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

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.config: QKNorm = getattr(layer.spec, self.field)
        self._weights = layer.weights

    def norm(self, projected: Projected, call: Call) -> Projected:
        """Queries and keys, unless that follows RoPE, and values."""
        query, key, value = projected
        if self.config.values:
            value = normalise(value, self.config, None, None, self.dtype)
        return (query, key, value) if self.config.after_rope else (self._norm(query, "query"), self._norm(key, "key"), value)

    def rescale(self, projected: Projected, call: Call) -> Projected:
        """Queries and keys after RoPE."""
        query, key, value = projected
        return (self._norm(query, "query"), self._norm(key, "key"), value) if self.config.after_rope else projected

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self._weights.get(f"{name}_norm.{part}") for part in ("weight", "bias"))
        return normalise(x, self.config, weight, bias, self.dtype)


def normalise(x: Tensor, norm: QKNorm, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The norm of x [b, heads, n, d] or [b, n, d], computed in `dtype`; weight and bias are [d] or [heads, d]."""
    exact, axes = x.to(dtype), (-1,) if norm.over == "head" else (1, 3)
    if norm.kind == "layer":
        exact = exact - exact.mean(axes, keepdim=True)
    exact = exact * torch.rsqrt(exact.square().mean(axes, keepdim=True) + norm.eps)
    if weight is not None:
        exact = exact * weight.to(dtype).unsqueeze(-2)
    if bias is not None:
        exact = exact + bias.to(dtype).unsqueeze(-2)
    return exact.to(x.dtype)
