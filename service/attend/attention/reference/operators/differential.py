"""Differential attention (Ye et al. 2024, arXiv 2410.05258)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attend.attention.operators.differential import LAMBDAS
from attend.attention.operators.qk_norm import QKNorm

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer
    from attend.tensors import Array


def factors(layer: Layer) -> list[float]:
    """1 and -λ, with λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init (equation 2)."""
    assert layer.spec.differential is not None
    q1, k1, q2, k2 = (layer.weights[name] for name in LAMBDAS)
    return [1.0, -(float(np.exp(q1 @ k1) - np.exp(q2 @ k2)) + layer.spec.differential.lambda_init)]


def value(layer: Layer, heads: Array) -> Array:
    """(1 - λ_init) · norm(A V) (equation 3)."""
    config = layer.spec.differential
    assert config is not None
    return (1 - config.lambda_init) * layer.norm(heads, "head", QKNorm(eps=config.eps))
