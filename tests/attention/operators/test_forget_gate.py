"""Forgetting attention: a second implementation (see `support/oracles.py`), and what is particular to it."""

import math
from typing import Any

import numpy as np
import pytest

from attend.client import Client
from support.operator_cases import LAYER

RNG = np.random.default_rng(0)


def gate(weights, n, x):
    return 1 / (1 + math.exp(-math.fsum(weights["forget_gate.weight"][n] * x) - weights["forget_gate.bias"][n]))


def bias_of_visible(weights, n, position, visible, keys):
    """The logarithm of a product of gates."""
    gates = [gate(weights, n, x) if visible[at] and at <= position else 1.0 for at, x in enumerate(keys)]
    return [math.log(math.prod(gates[j + 1 :])) for j in range(len(keys))]


SPEC: dict[str, Any] = {"d_model": 10, "num_heads": 2, "dtype": "float64", "forget_gate": True}


def made(client: Client) -> dict[str, Any]:
    from attend.spec import LayerSpec

    weights = {name: RNG.standard_normal(shape) for name, shape in LayerSpec.model_validate(SPEC).weight_shapes().items()}
    client.put_layer(LAYER, SPEC, weights)
    return weights


def test_scores_fall_by_the_gates_between_key_and_query(client: Client) -> None:
    """By hand, for a causal call: the scores of the layer without its gates, and log f_2 + log f_3 for key 1 and query 3."""
    weights, x = made(client), RNG.standard_normal((1, 5, 10))
    scores = np.asarray(client.attend(x, layer=LAYER, causal=True, outputs=["scores"]).scores)
    plain = {name: array for name, array in weights.items() if not name.startswith("forget")}
    client.put_layer(LAYER, {**SPEC, "forget_gate": False}, plain)
    without = np.asarray(client.attend(x, layer=LAYER, causal=True, outputs=["scores"]).scores)
    for n in range(2):
        expected = math.log(gate(weights, n, x[0, 2])) + math.log(gate(weights, n, x[0, 3]))
        assert scores[0, n, 3, 1] - without[0, n, 3, 1] == pytest.approx(expected, rel=1e-10)


def test_nothing_is_forgotten_of_later_keys(client: Client) -> None:
    """Without causality, keys after the query keep their scores, and gates after the query change nothing."""
    made(client)
    x = RNG.standard_normal((1, 5, 10))
    causal, whole = (np.asarray(client.attend(x, layer=LAYER, causal=flag, outputs=["scores"]).scores) for flag in (True, False))
    seen = np.isfinite(causal)
    np.testing.assert_allclose(whole[seen], causal[seen], rtol=0, atol=1e-12)


@pytest.mark.parametrize("blocked", [{"attend_keys": [[1, 1, 0, 1, 1]]}, {"block_mask": [[0, 0, 1, 0, 0]]}], ids=["padding", "mask"])
def test_a_blocked_key_forgets_nothing(client: Client, blocked: dict[str, Any]) -> None:
    made(client)
    x = RNG.standard_normal((1, 5, 10))
    ours = client.attend(x, layer=LAYER, causal=True, **blocked, outputs=["scores"]).scores
    other = x.copy()
    other[0, 2] = 7 * x[0, 0]
    moved = client.attend(x, other, layer=LAYER, causal=True, **blocked, outputs=["scores"]).scores
    np.testing.assert_allclose(ours, moved, rtol=0, atol=1e-12)
    kept = [0, 1, 3, 4]
    alone = client.attend(x[:, kept], layer=LAYER, causal=True, outputs=["scores"]).scores
    np.testing.assert_allclose(np.asarray(ours)[:, :, kept][..., kept], alone, rtol=0, atol=1e-12)
