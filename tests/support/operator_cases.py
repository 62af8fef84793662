"""Random layers with one operator, on a server and in the float64 reference."""

from typing import Any

import numpy as np

from attend.attention.initialization import in_dtype
from attend.attention.operators.operator import Operator
from attend.attention.reference.forward import Outputs, attend
from attend.check.random_cases import FEATURE_OF, FEATURES, Case, excluded_by, random_case
from attend.client import Client
from support.cases import weights_of

LAYER = "operator"


def case_with(operator: type[Operator], seed: int, dtype: str = "float64") -> Case:
    """A case of a layer with this operator, and with any others that fit it."""
    features = {*FEATURES} - {*excluded_by(operator), "projections"}
    always = [FEATURE_OF[operator.field]]
    return random_case(np.random.default_rng(seed), features=features, always=always, rate=0.3, dtype=dtype, init="xavier_uniform")


def put(client: Client, case: Case) -> Outputs:
    """Put the layer on the server, and compute the reference."""
    client.put_layer(LAYER, case.spec, case.weights)
    return attend(case.spec, in_dtype(case.spec, weights_of(case)), **case.request)


def agree(case: Case, name: str, ours: Any, exact: Any, tolerance: float | None = None) -> None:
    """Assert that an output is that of the reference, to a tolerance relative to its largest number."""
    there = np.isfinite(exact)
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(exact), err_msg=name)
    tolerance = tolerance or {"float64": 1e-10, "float32": 1e-4}[case.spec.dtype]
    largest = max(1.0, np.abs(exact[there]).max(initial=0.0))
    np.testing.assert_allclose(ours[there], exact[there], rtol=0, atol=tolerance * largest, err_msg=f"{name} of {case.spec!r}")


def agree_with_finite_differences(client: Client, case: Case, seed: int) -> None:
    """Assert that the gradients by each input, along random directions, are slopes of the reference, to the fourth order in the step."""
    exact = put(client, case)
    rng, request = np.random.default_rng(seed), {**case.request}
    back = rng.standard_normal(exact.output.shape)
    names = ("query", "key", "value")
    result = client.attend(**request, layer=LAYER, outputs=[f"{name}_gradient" for name in names], output_gradient=back)
    request["key"] = request.get("key", request["query"])
    request["value"] = request.get("value", request["key"])
    weights = in_dtype(case.spec, weights_of(case))
    for name in names:
        direction = rng.standard_normal(np.shape(request[name]))

        def at(step: float, name: str = name, direction: Any = direction) -> float:
            moved = request | {name: request[name] + step * direction}
            return float(np.sum(back * attend(case.spec, weights, **moved).output))

        step = 1e-5
        slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
        ours, size = np.sum(result[f"{name}_gradient"] * direction), np.abs(result[f"{name}_gradient"]).sum()
        assert abs(ours - slope) <= 1e-6 * max(1.0, size), f"{name} of {case.spec!r}"
