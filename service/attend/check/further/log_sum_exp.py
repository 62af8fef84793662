"""The log-sum-exp of the scores of each row, which kernels return beside the output so that results of parts of the keys can be merged."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from attend.check.calls import Calls, ComparedCase
from attend.check.computation import tolerance
from attend.check.further.look import Extent
from attend.check.further.side_outputs import SideOutput, add_results
from attend.check.report import Disagreement
from attend.tensors import Array

BASES = {"e": 1.0, "2": float(np.log2(np.e))}  # base of the exponentials -> what their logarithm multiplies the natural one by
UNKNOWN = "the number that it returns for each row is not the log-sum-exp of the scores, with base e or 2"


def look(called: Calls, _: Extent) -> Disagreement | None:
    """The first wrong log-sum-exp, if the candidate returns some."""
    return add_results(called, "log-sum-exps", _compare(called.with_sums))


def _compare(compared: Sequence[ComparedCase]) -> Iterator[SideOutput | str]:
    """The log-sum-exps of the cases, read with the base and the order of axes under which most are right. Numbers that are wrong in the
    first case are taken for something else, and not compared."""
    cases = [x for x in compared if x.right.case.key.shape[1] > 1]
    readings = [[_compared(x, *reading) for x in cases] for reading in product(BASES.values(), (False, True))]
    best = max(readings, key=lambda found: sum(x.error <= x.tolerance for x in found))
    if best and best[0].error > best[0].tolerance:
        yield UNKNOWN
    else:
        yield from best


def _compared(compared: ComparedCase, factor: float, heads_last: bool) -> SideOutput:
    """The log-sum-exps [b, h, q] of a case; 0 in rows without a key, which are not compared. `factor`: for the base; `heads_last`: they are
    [b, q, h]."""
    scores, right = compared.right.scores(), compared.right
    expected = factor * _log_sum_exp(scores)  # [b, h, q]
    assert compared.sums is not None
    b, h, q = expected.shape
    got = compared.sums.reshape(b, q, h).swapaxes(1, 2) if heads_last else compared.sums.reshape(b, h, q)
    empty = np.isneginf(expected)
    bound = tolerance(0.0, right.dtype, scores, logarithmic=True)
    return SideOutput(right.case, "log_sum_exp", np.where(empty, 0.0, expected), np.where(empty, 0.0, got), bound)


def _log_sum_exp(scores: Array) -> Array:
    """log(sum(exp(scores))) over the last axis; -inf in rows without a key."""
    with np.errstate(divide="ignore"):
        largest = np.maximum(scores.max(axis=-1), -1e300)
        return np.asarray(largest + np.log(np.exp(scores - largest[..., None]).sum(axis=-1)))
