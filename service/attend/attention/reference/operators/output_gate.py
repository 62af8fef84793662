"""A gate on the output of each head (Qiu et al. 2025, arXiv 2505.06708, equation 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attend.attention.operators.output_gate import OutputGate
from attend.attention.reference.operators.sigmoid import sigmoid

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer
    from attend.tensors import Array


def gate(layer: Layer, query: Array) -> Array:
    """activation(X W_θ): [b, h, q, dv], or [b, h, q, 1] for a headwise gate."""
    assert layer.spec.output_gate is not None
    return activate(gate_logits(layer, query), layer.spec.output_gate)


def gate_logits(layer: Layer, query: Array) -> Array:
    """X W_θ: [b, q, d_model] -> [b, h, q, dv], or [b, h, q, 1]."""
    return layer.split_heads(layer.project(query, "gate"), layer.spec.num_heads)


def activate(logits: Array, gate: OutputGate) -> Array:
    """The sigmoid, or softplus ln(1 + exp(x))."""
    return np.logaddexp(0.0, logits) if gate.activation == "softplus" else sigmoid(logits)
