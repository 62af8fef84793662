"""Talking heads: a second implementation (see `support/oracles.py`), and what is particular to them."""

from typing import Any

import numpy as np
import pytest

from attend.client import Client
from attend.errors import InvalidRequest
from attend.spec import LayerSpec
from support.operator_cases import LAYER

# One pair's scores, or one row's weights, of all heads: each head has a sum over the heads


def score(weights, scores):
    matrix, bias = weights["score_mixing.weight"], weights["score_mixing.bias"]
    return [sum(matrix[n, m] * s for m, s in enumerate(scores)) + bias[n] for n in range(len(scores))]


def mix_weights(weights, rows, blocked):
    matrix, bias = weights["weight_mixing.weight"], weights["weight_mixing.bias"]
    heads, keys = blocked.shape
    mixed = [[sum(matrix[n, m] * rows[m][j] for m in range(heads)) + bias[n] for j in range(keys)] for n in range(heads)]
    return [[0.0 if blocked[n, j] else mixed[n][j] for j in range(keys)] for n in range(heads)]


RNG = np.random.default_rng(0)
PLAIN: dict[str, Any] = {"d_model": 15, "num_heads": 3, "dtype": "float64", "seed": 5}


def test_a_layer_that_draws_no_mixing_computes_plain_attention(client: Client) -> None:
    x = RNG.standard_normal((2, 7, 15))
    client.put_layer(LAYER, PLAIN)
    plain = client.attend(x, layer=LAYER, causal=True, outputs=["output", "attention_weights"])
    client.put_layer(LAYER, {**PLAIN, "talking_heads": True})
    talking = client.attend(x, layer=LAYER, causal=True, outputs=["output", "attention_weights"])
    for name in ("output", "attention_weights"):
        np.testing.assert_allclose(talking[name], plain[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rule", "fill"), [("zero", 0.0), ("uniform", 0.25)])
def test_a_blocked_pair_has_weight_0_in_its_head_alone(client: Client, rule: Any, fill: float) -> None:
    """Head 0 sees no key in row 1, and adds nothing to the other heads there. The bias of the weights reaches no blocked pair."""
    spec = LayerSpec.model_validate({**PLAIN, "talking_heads": True})
    weights = {name: RNG.standard_normal(shape) for name, shape in spec.weight_shapes().items()}
    client.put_layer(LAYER, spec, weights)
    mask = np.ones((1, 3, 4, 4), bool)
    mask[0, 0, 1] = mask[0, 1, 2, 3] = False
    result = client.attend(RNG.standard_normal((1, 4, 15)), layer=LAYER, attend_mask=mask, fully_masked=rule, outputs=["attention_weights"])
    ours = np.asarray(result.attention_weights)[0]
    assert (ours[0, 1] == fill).all()
    assert ours[1, 2, 3] == 0
    sums, matrix = ours[1:, 1].sum(-1), weights["weight_mixing.weight"]  # each softmax but that of head 0 sums to 1
    np.testing.assert_allclose(sums, matrix[1:, 1:].sum(-1) + 4 * weights["weight_mixing.bias"][1:], rtol=0, atol=1e-12)


def test_differential_layers_have_no_talking_heads(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.put_layer(LAYER, {**PLAIN, "head_dim": 6, "differential": {}, "talking_heads": True})
    assert caught.value.problems[0].at == "/spec/differential"
