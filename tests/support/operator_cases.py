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
