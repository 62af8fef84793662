"""The largest error that rounding explains; docs/check.md says what it is made of, and what correct implementations need of it."""

import numpy as np

from service.tensors import Array

# In multiples of the distance of 1 to the next number of the dtype.
RELATIVE = {"float64": 16 * 2.0**-52, "float32": 16 * 2.0**-23, "float16": 5 * 2.0**-10, "bfloat16": 2.5 * 2.0**-7}
MAGNIFIED = RELATIVE | {"float64": 80 * 2.0**-52, "float32": 80 * 2.0**-23}


def tolerance(
    expected: Array, dtype: str, scores: Array | float, *, norm: bool = False, relative: float | None = None, logarithmic: bool = False
) -> float:
    """r · max(1, max|scores|) · max|x|, without the last factor for outputs that are `logarithmic` in the weights.

    An error of e in a score is a relative error of e in its weight, and scores of size s are rounded by s · r. r is `relative`, or by
    dtype; larger after a `norm` of queries and keys, which may divide by little, and for logarithmic outputs, which may contain biases that
    are larger than the scores.
    """
    by_dtype = MAGNIFIED if norm or logarithmic else RELATIVE
    unit = by_dtype.get(dtype, RELATIVE["float64"]) if relative is None else relative
    return max(unit * max(1.0, _largest(scores)) * (1.0 if logarithmic else _largest(expected)), 1e-30)


def _largest(x: Array | float) -> float:
    """max|x| of the finite numbers, 0 if there are none."""
    return float(np.abs(x, where=np.isfinite(x), out=np.zeros(np.shape(x))).max(initial=0.0))
