"""Gradients of calls over HTTP.

By hand, and what must be zero. `test_operators.py` and `test_layer.py` compare them with finite differences.
"""

from typing import Any

import numpy as np
import pytest

from attend.client import Client
from attend.spec_parts import PROJECTIONS

RNG = np.random.default_rng(5)
TINY = {"d_model": 1, "num_heads": 1, "scale": 1.0, "dtype": "float64", "bias": False}
ONES = {f"{name}.weight": np.ones((1, 1)) for name in PROJECTIONS}
LATENT = {"query_rank": 3, "key_value_rank": 5, "rope_key_dim": 1}
GRADIENTS = ["query_gradient", "key_gradient", "value_gradient"]


def gradients(client: Client, spec: dict[str, Any], weights: dict[str, Any] | None, back: Any, **request: Any) -> dict[str, Any]:
    client.put_layer("gradients", spec, weights)
    result = client.attend(**request, layer="gradients", outputs=GRADIENTS, output_gradient=back)
    return {name: np.asarray(result[name]) for name in GRADIENTS}


def test_two_keys_have_the_gradient_of_the_logistic_function(client: Client) -> None:
    """Query x, keys 0 and 1, values 0 and 1: the output is the logistic function σ(x), whose slope is σ(x) (1 - σ(x))."""
    x = 0.7
    got = gradients(client, TINY, ONES, [[1.0]], query=[[x]], key=[[0.0], [1.0]], value=[[0.0], [1.0]])
    sigma = 1 / (1 + np.exp(-x))
    slope = sigma * (1 - sigma)
    np.testing.assert_allclose(got["query_gradient"], [[slope]], rtol=1e-14)
    np.testing.assert_allclose(got["key_gradient"], [[-slope * x], [slope * x]], rtol=1e-14)
    np.testing.assert_allclose(got["value_gradient"], [[1 - sigma], [sigma]], rtol=1e-14)


def test_a_key_and_a_sink_have_the_gradient_of_the_logistic_function(client: Client) -> None:
    """One key of value 1 and a sink of logit 0: the output is σ(x)."""
    got = gradients(client, {**TINY, "sinks": True}, {**ONES, "sinks": np.zeros(1)}, [[1.0]], query=[[0.7]], key=[[1.0]], value=[[1.0]])
    sigma = 1 / (1 + np.exp(-0.7))
    np.testing.assert_allclose(got["query_gradient"], [[sigma * (1 - sigma)]], rtol=1e-14)


def test_uniform_rows_have_no_gradient_for_query_and_key(client: Client) -> None:
    """Their weights depend on nothing, so the values alone have a gradient, of 1/k each."""
    got = gradients(client, TINY, ONES, [[1.0]], query=[[2.0]], key=[[1.0], [3.0]], block_keys=[1, 1], fully_masked="uniform")
    assert [got[name].ravel().tolist() for name in GRADIENTS] == [[0], [0, 0], [0.5, 0.5]]


@pytest.mark.parametrize("layer", [{}, {"softcap": 3.0}, {"alibi": True, "sinks": True}, {"qk_norm": {}, "rope": {}}], ids=str)
def test_gradients_of_blocked_keys_and_fully_masked_rows_are_zero(client: Client, layer: dict[str, Any]) -> None:
    spec = {"d_model": 10, "num_heads": 5, "dtype": "float64", **layer}
    query, key, back = (RNG.standard_normal((2, n, 10)) for n in (3, 7, 3))
    keys, rows = np.array([[1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 1, 1]]), np.ones((3, 7), bool)
    rows[1] = False
    got = gradients(client, spec, None, back, query=query, key=key, attend_keys=keys, attend_mask=rows, query_offset=2)
    for name in ("key_gradient", "value_gradient"):
        assert (got[name][keys == 0] == 0).all()
        assert (got[name][keys == 1] != 0).any()
    assert (got["query_gradient"][:, 1] == 0).all()
    assert (got["query_gradient"][:, [0, 2]] != 0).any()


@pytest.mark.parametrize("queries", [0, 2])
@pytest.mark.parametrize("keys", [0, 3])
@pytest.mark.parametrize("more", [{"sinks": True, "qk_norm": {}, "latent": LATENT}, {"differential": {}}], ids=["latent", "differential"])
def test_axes_of_length_zero_give_empty_gradients(client: Client, queries: int, keys: int, more: dict[str, Any]) -> None:
    spec = {"d_model": 8, "num_heads": 2, "dtype": "float64", "rope": {}, "alibi": True, "relative_bias": {}, "output_gate": {}, **more}
    query, key = np.ones((2, queries, 8)), np.ones((2, keys, 8))
    got = gradients(client, spec, None, query, query=query, key=key, causal=True, query_offset="end")
    assert got["query_gradient"].shape == (2, queries, 8)
    assert got["key_gradient"].shape == got["value_gradient"].shape == (2, keys, 8)
