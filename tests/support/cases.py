"""Layers and weights of random cases, for tests that compare with the reference."""

from typing import Any

from attend.attention.initialization import draw_weights
from attend.check.random_cases import Case
from attend.spec import LayerSpec
from attend.tensors import Array


def weights_of(case: Case) -> dict[str, Array]:
    """All weights of a case by canonical name: its own, or those that its spec's seed draws."""
    return draw_weights(case.spec) if case.weights is None else case.weights


def layer_without_projections(**fields: Any) -> LayerSpec:
    """Inputs are the queries, keys and values of the heads; one head of width 1 and scale 1 unless `fields` say otherwise."""
    defaults = {"d_model": fields.get("num_heads", 1), "head_dim": 1, "num_heads": 1, "scale": 1.0, "projections": False}
    return LayerSpec.model_validate(defaults | fields | {"dtype": "float64"})
