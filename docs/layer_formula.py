"""The formulas of a layer, step by step, for the pages of families. Those of its operators are in `attention/operators/`."""

import math
import re

from attend.spec import LayerSpec

# Stages of operators, in the order of computation
BEFORE_SCORES = ("project", "norm", "rotate", "rescale", "terms")
OF_SCORES = ("score", "bias", "bias_of_visible", "normalise_input")
MASKS = ("interval", "select")
SOFTMAX = ("normalise", "sinks", "factors", "mix_weights")
OF_OUTPUTS = ("value", "gate")


def formulas(spec: LayerSpec, causal: bool, cross: bool) -> dict[str, str]:
    """Step -> its formula, in the order of computation. x [n, d_model] are the inputs of queries and, unless `cross`, of keys.

    KeyError: an operator has a formula of an unknown stage.
    """
    of_stages: dict[str, dict[str, str]] = {stage: {} for stage in (*BEFORE_SCORES, *OF_SCORES, *MASKS, *SOFTMAX, *OF_OUTPUTS)}
    for operator in spec.operators:
        for stage, formula in operator.formula(spec).items():
            of_stages[stage][f"{stage} of {operator.name}"] = formula

    def own(*stages: str) -> dict[str, str]:
        return {step: formula for stage in stages for step, formula in of_stages[stage].items()}

    steps = own("project") or {"project": _projections(spec)}
    if spec.num_kv_heads != spec.num_heads:
        steps["heads"] = "each head of K and V serves num_heads / num_kv_heads heads of Q"
    steps |= own(*BEFORE_SCORES[1:]) | {"scores": _scores(spec, terms=bool(of_stages["terms"]))} | own(*OF_SCORES)
    if visible := [*(["j ≤ i"] if causal else []), *of_stages["interval"].values()]:
        steps["interval"] = f"S_ij = -∞ unless {' and '.join(visible)}"
    steps |= own("select") | (own(*SOFTMAX[:3]) or {"softmax": "A = softmax(S)"}) | own("mix_weights")
    steps |= {"outputs of heads": "O = A V"} | own(*OF_OUTPUTS)
    steps["output"] = f"y = concat(O) W_O{_bias(spec, 'output')}" if spec.projections else "y = concat(O)"
    return {step: formula if cross else re.sub(r"\bz\b", "x", formula) for step, formula in steps.items()}


def _bias(spec: LayerSpec, name: str) -> str:
    return f" + b_{name[0].upper()}" if spec.has_bias(name) else ""


def _projections(spec: LayerSpec) -> str:
    if not spec.projections:
        return "Q = x,  K = z,  V = z"
    query, key, value = (_bias(spec, name) for name in ("query", "key", "value"))
    return f"Q = x W_Q{query},  K = z W_K{key},  V = z W_V{value}"


def _scores(spec: LayerSpec, terms: bool) -> str:
    """The scores, with the factor of the spec, of each softmax."""
    softmaxes = spec.num_softmaxes
    is_default = math.isclose(spec.scale, (spec.head_dim / softmaxes) ** -0.5, rel_tol=1e-9)
    width = "head_dim" if softmaxes == 1 else f"(head_dim/{softmaxes})"
    factor = f" / √{width}" if is_default else "" if spec.scale == 1 else " · scale"
    parts = "" if softmaxes == 1 else f", for each of {softmaxes} parts of a head: {', '.join(f'S{i + 1}' for i in range(softmaxes))}"
    return f"S = {'(Q Kᵀ + T)' if terms else 'Q Kᵀ'}{factor}{parts}"
