"""Powers by the C library: the last digit of NumPy's powers and exponentials of arrays, and so a layer, depends on the processor."""

import numpy as np

from attend.tensors import Array


def powers(base: float, exponents: Array) -> Array:
    """base^x of each exponent, in float64."""
    return np.array([np.float64(base) ** np.float64(x) for x in exponents.ravel()]).reshape(exponents.shape)
