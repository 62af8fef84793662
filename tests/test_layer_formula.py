"""The formulas on the pages of families: the steps of a layer in their order, and none that it does not have."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from attend.spec import LayerSpec

formulas = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "layer_formula.py"))["formulas"]
WIDTHS = {"d_model": 12, "num_heads": 3}
PROJECTED = "Q = x W_Q + b_Q,  K = x W_K + b_K,  V = x W_V + b_V"
SCORES, SOFTMAX, OUTPUTS, OUTPUT = "S = Q Kᵀ / √head_dim", "A = softmax(S)", "O = A V", "y = concat(O) W_O + b_O"
LAYERS: dict[str, tuple[dict[str, Any], bool, list[str]]] = {  # name -> fields of a spec, whether causal, formulas
    "plain": ({}, False, [PROJECTED, SCORES, SOFTMAX, OUTPUTS, OUTPUT]),
    "without projections": ({"projections": False}, False, ["Q = x,  K = x,  V = x", SCORES, SOFTMAX, OUTPUTS, "y = concat(O)"]),
    "sigmoid": (
        {"normalizer": "sigmoid"},
        True,
        [
            PROJECTED,
            SCORES,
            "S = S - ln n, for the n keys that are no padding",
            "S_ij = -∞ unless j ≤ i",
            "A = sigmoid(S)",
            OUTPUTS,
            OUTPUT,
        ],
    ),
    "talking heads": (
        {"talking_heads": True, "softcap": 3.0, "alibi": True},
        False,
        [
            *(PROJECTED, SCORES, "S = softcap · tanh(S / softcap)", "S_h = Σ_m P_hm S_m + b_h", "S_ij = S_ij - slope_h · |i - j|", SOFTMAX),
            *("A_h = Σ_m W_hm A_m + c_h, 0 where a key is masked", OUTPUTS, OUTPUT),
        ],
    ),
    "norm of values": (
        {"qk_norm": {"kind": "layer", "values": True, "after_rope": True}, "query_scale": {"factor": 0.1, "length": 7}},
        False,
        [
            *(PROJECTED, "V = LayerNorm(V), over each head, with no weights"),
            "Q = LayerNorm(Q),  K = LayerNorm(K), over each head, with one weight for all heads",
            *("Q_i = Q_i · (1 + factor · ln(1 + ⌊(i + shift) / length⌋))", SCORES, SOFTMAX, OUTPUTS, OUTPUT),
        ],
    ),
    "differential": (
        {"differential": {"norm_weights": False}, "scale": 0.3},
        False,
        [
            *(PROJECTED, "S = Q Kᵀ · scale, for each of 2 parts of a head: S1, S2"),
            "A = softmax(S1) - λ softmax(S2),  λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + lambda_init",
            *(OUTPUTS, "O = (1 - lambda_init) RMSNorm(O)", OUTPUT),
        ],
    ),
    "indexer and window": (
        {"indexer": {"num_heads": 2, "head_dim": 4, "top_k": 3}, "window": {"left": 5}, "chunk_size": 7},
        True,
        [
            *(PROJECTED, SCORES, "S_ij = -∞ unless j ≤ i and i - j ≤ left and ⌊i / chunk_size⌋ = ⌊j / chunk_size⌋"),
            "S_ij = -∞ unless j is among the top_k visible keys by I_ij = Σ_h w_ih relu(q_ih · k_j)  ([operators.md](../operators.md))",
            *(SOFTMAX, OUTPUTS, OUTPUT),
        ],
    ),
    "latent": (
        {"latent": {"key_value_rank": 5, "rope_key_dim": 2, "bias": True}, "rope": {"dims": 2}, "bias": False},
        False,
        [
            "c = RMSNorm(x W_DKV + b_DKV),  Q = x W_Q,  K = [x W_KR + b_KR, c W_UK],  V = c W_UV",
            "Q = RoPE(Q),  K = RoPE(K), on halves of the part of K that heads share",
            *(SCORES, SOFTMAX, OUTPUTS, "y = concat(O) W_O"),
        ],
    ),
    "grid": (
        {"grid_bias": {"height": 2, "width": 3, "class_token": True}},
        False,
        [
            PROJECTED,
            SCORES,
            "S_ij = S_ij + grid_bias[place_i - place_j, h], whose last three rows are for a class token",
            SOFTMAX,
            OUTPUTS,
            OUTPUT,
        ],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_formulas_of_a_layer_are_its_steps(name: str) -> None:
    fields, causal, wanted = LAYERS[name]
    assert list(formulas(LayerSpec(**WIDTHS, **fields), causal, cross=False).values()) == wanted


def test_keys_of_other_inputs_are_named_apart() -> None:
    assert next(iter(formulas(LayerSpec(**WIDTHS), causal=False, cross=True).values())) == PROJECTED.replace("K = x", "K = z").replace(
        "V = x", "V = z"
    )
