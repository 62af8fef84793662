"""The whole operator over HTTP, weights and all, against the float64 reference: grouped heads, widths of their own, RoPE, ALiBi, T5's
bias, norms, sinks, windows, no projections; and gradients."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.attention.compare.random_cases import Case, random_case
from service.attention.reference import forward
from service.attention.reference.gradients import gradients
from service.attention.weights import draw_weights, in_dtype
from service.cli.server_check import OUTPUTS, compare_reply
from service.client import Client

GRADIENTS = ["query_gradient", "key_gradient", "value_gradient"]
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with Client(server.url) as one:
        yield one


def weights_of(case: Case) -> dict[str, Any]:
    return draw_weights(case.spec) if case.weights is None else in_dtype(case.spec, case.weights)


@given(seed=SEEDS)
def test_any_layer_agrees_with_the_reference(client: Client, seed: int) -> None:
    """Every output of a random call to a random layer."""
    case = random_case(np.random.default_rng(seed), rate=0.4)
    client.put_layer("operator", case.spec, case.weights)
    exact = forward.attend(case.spec, weights_of(case), **case.request)

    result = client.attend(**case.request, layer="operator", outputs=list(OUTPUTS))

    wrong = [finding for finding in compare_reply(case, exact, result, result.fully_masked_rows) if not finding.agrees]
    assert wrong == [], case.spec


@given(seed=SEEDS)
def test_gradients_agree_with_the_formulas(client: Client, seed: int) -> None:
    """Of a random direction in the output, by each of the three inputs, for float64 layers."""
    case = random_case(np.random.default_rng(seed), dtype="float64")
    layer = client.put_layer("operator", case.spec, case.weights).spec
    width = layer.output_dim if layer.projections else layer.concatenated_dim
    direction = np.random.default_rng(seed).standard_normal((*np.shape(case.request["query"])[:-1], width))
    exact = gradients(case.spec, weights_of(case), direction, **case.request)

    result = client.attend(**case.request, layer="operator", outputs=GRADIENTS, output_gradient=direction)

    for name in GRADIENTS:
        scale = max(1.0, np.abs(exact[name]).max(initial=0.0))
        np.testing.assert_allclose(result[name], exact[name], rtol=0, atol=1e-10 * scale, err_msg=name)
