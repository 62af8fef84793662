"""Powers have the digits of the C library, whatever the processor is."""

import math

import numpy as np

from attend.checkpoints.powers import powers


def test_powers_are_those_of_the_c_library():
    exponents = np.random.default_rng(0).uniform(-5, 5, (47, 11)).astype(np.float32)
    for base in (math.e, 10000.0):
        assert powers(base, exponents).tolist() == [[math.pow(base, x) for x in row] for row in exponents.tolist()]
