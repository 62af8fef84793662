"""Candidates whose numbers have the digits of float32 in float64, as NumPy code with constants of float32."""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from attend.check.adapter import CallFailed, NoCache
from attend.check.calls import Calls, call
from attend.check.computation import RELATIVE

UNSEEN = 1e-12  # of a number: a change that float64 shows and float32 does not


def has_digits_of_float32(called: Calls) -> bool:
    """Whether what is wrong in float64, which no option asks for, is right to the digits of float32, or knows no others: inputs that differ
    by less change nothing."""
    prepared, wrong = called.prepared, [x for x in called.results if x.agrees is False]
    if not wrong or called.failures or prepared.adapter.convention.dtype is not None or prepared.adapter.dtype != "float64":
        return False
    if all(x.error <= x.tolerance * RELATIVE["float32"] / RELATIVE["float64"] for x in wrong):
        return True
    first = called.compared[0]
    moved = {name: getattr(first.right.case, name) * (1 + UNSEEN) for name in ("query", "key", "value")}
    with suppress(CallFailed, NoCache):
        again = call(prepared, replace(first.right.case, **moved)).outputs[0].got
        return bool(again.any()) and np.array_equal(first.outputs[0].got, again, equal_nan=True)
    return False
