"""The layer whose parts may be replaced computes, with none replaced, what the reference does."""

import numpy as np
import pytest

from attend.attention.operators import OPERATORS
from attend.attention.operators.operator import Operator
from attend.attention.reference import forward
from attend.attention.reference.call import ReferenceCall
from attend.check.layer import Layer
from support.cases import weights_of
from support.operator_cases import case_with


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_layers_with_each_operator_agree_with_the_reference(operator: type[Operator]) -> None:
    for seed in range(8):
        case = case_with(operator, seed)
        weights = weights_of(case)
        expected = forward.attend(case.spec, weights, **case.request).output
        output = Layer(case.spec, weights).attend(ReferenceCall.from_fields(**case.request)).output
        np.testing.assert_allclose(np.reshape(output, expected.shape), expected, rtol=1e-9, atol=1e-12, equal_nan=True)
