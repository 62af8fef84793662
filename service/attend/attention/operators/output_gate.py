"""A gate on the output of each head (Qiu et al. 2025, arXiv 2505.06708, equation 5)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from attend.attention.operators.declarations import LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import HEAD_OUTPUTS, Step, Steps, Value
from attend.spec_parts import Flag, Part

if TYPE_CHECKING:
    from collections.abc import Collection

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields, Misfit
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions
    from attend.tensors import Array


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


class OutputGateOperator(Operator):
    name, field, needs_projections = "output_gate", "output_gate", True
    left_out = LeftOut("the output gate", "softmax(S) V", "gate(x) ⊙ softmax(S) V")
    matrices = ("gate",)
    per_head = True
    axes: ClassVar[Axes] = {"gate.weight": ("out", "in"), "gate.bias": ("n",)}
    identifying_weight = "gate.weight"

    @classmethod
    def width(cls, spec: Dimensions) -> int:
        """Width of the projection of the gate."""
        gate: OutputGate = getattr(spec, cls.field)
        return spec.num_heads if gate.granularity == "headwise" else spec.concatenated_dim

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        """The projection of the gate."""
        width, gate = cls.width(spec), getattr(spec, cls.field)
        return {"gate.weight": (width, spec.d_model)} | ({"gate.bias": (width,)} if gate.bias else {})

    @classmethod
    def infer_fields(cls, weights: Mapping[str, Array], num_heads: int, misfit: Misfit) -> Fields:
        """Bias and granularity, which is open if values have one number."""
        rows, width = len(weights["gate.weight"]), weights["output.weight"].shape[1]
        by_rows = {num_heads: "headwise", width: "elementwise"}
        granularity = {"granularity": by_rows[rows]} if rows in by_rows and width > num_heads else {}
        return {cls.field: {"bias": "gate.bias" in weights, **granularity}}

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Any gate."""
        gate = {"granularity": draw.one_of("elementwise", "headwise"), "activation": draw.one_of("sigmoid", "softplus")}
        return {**gate, "bias": draw.flag()}

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """The gate, from the input of the layer, and its product with the outputs of heads."""
        gate: OutputGate = getattr(spec, cls.field)
        width = "value_head_dim" if gate.granularity == "elementwise" else "1"
        formula = f"G = {gate.activation}(x W_G{' + b_G' if gate.bias else ''})" + (", one number for each head" if width == "1" else "")
        compute = partial(_gate, heads=spec.num_heads, activation=gate.activation)
        return {
            "gate": (
                Step("gate", ("query",), {"gate": Value(f"b,h,q,{width}")}, formula, compute, products=(f"b,h,q,{width},query_dim",)),
                Step("apply_gate", ("head_outputs", "gate"), HEAD_OUTPUTS, "O = O ⊙ G", lambda m, outputs, gate: outputs * gate),
            )
        }


def _gate(m: Arithmetic, query: Any, *, heads: int, activation: str) -> Any:
    logits = m.split_heads(m.project(query, "gate"), heads)
    return m.sigmoid(logits) if activation == "sigmoid" else m.softplus(logits)
