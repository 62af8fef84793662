"""Calls a function with a probability of dropout: each attention weight is left out, or divided by the probability that it is kept.

The values are 0 and 1, so that the output shows the weights that were applied, each of them in several numbers.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from attend.check.adapter import CallFailed
from attend.check.calls import Calls
from attend.check.candidate import Candidate
from attend.check.cases import CheckCase
from attend.check.further.look import Extent
from attend.check.further.side_outputs import SideOutput, add_results
from attend.check.layer import Layer
from attend.check.low_precision import HALF
from attend.check.report import Disagreement
from attend.tensors import Array

P = 0.3
ITEMS = 128
NEAR = {False: 1e-3, True: 0.03}  # errors of weights, of a candidate in half precision or not
FAR = 6.0  # standard deviations by which the share of weights that are left out may differ from P
KEPT = {  # what weights that are kept are multiplied by -> what is said
    1.0: "weights that are kept are not divided by 1 - p",
    1 / P: "p is taken for the probability that a weight is kept",
}


def look(called: Calls, extent: Extent) -> Disagreement | None:
    """The weights that dropout leaves, if they are wrong. The parameters for it are tried if they are right."""
    roles, found = called.prepared.adapter.roles, [*_compare(called.prepared, extent.tried.seed)]
    wrong = add_results(called, "dropout", found)
    if found and wrong is None:
        called.tried |= {roles[role]: None for role in ("dropout", "training") if role in roles}
    return wrong


def _compare(candidate: Candidate, seed: int) -> Iterator[SideOutput]:
    """What a call with dropout shows; nothing if no parameter is known for it, if it changes nothing, or if heads are too narrow."""
    adapter, width = candidate.adapter, candidate.spec.value_head_dim
    draw = candidate.draw(seed)
    rows = draw.lengths.whole(2)
    can_show = adapter.heads_given and adapter.convention.batched and not adapter.convention.takes_one_query and width >= 2 * rows
    if "dropout" not in adapter.roles or not can_show:
        return
    of_case: dict[str, Any] = {"queries": rows, "batch": ITEMS, "largest": 1.0, "group": "parameters"}
    case = candidate.as_passed(draw.case(f"{adapter.roles['dropout']}={P:g}", "plain", rows, **of_case))
    value = np.zeros((ITEMS, rows, candidate.spec.num_kv_heads, width))
    for row in range(rows):
        value[:, row, :, row::rows] = 1.0
    case = replace(case, value=value.reshape(ITEMS, rows, -1))
    with suppress(CallFailed), _seeded(seed):
        weights = _applied(candidate, case)[0]
        applied = _applied(candidate, replace(case, passed={**case.passed, "dropout": P}))
        if _differ(applied, weights, near := NEAR[adapter.dtype in HALF]):
            yield _looked_at(SideOutput(case, "dropout", weights, applied, near))


def _applied(candidate: Candidate, case: CheckCase) -> Array:
    """The weights that the output of such values shows: [copies, b, h, q, k]."""
    heads, rows = Layer.split_heads(candidate.adapter.call(case).output, candidate.spec.num_heads), case.key.shape[1]
    heads = heads[..., : heads.shape[-1] // rows * rows]
    return np.moveaxis(heads.reshape(*heads.shape[:-1], -1, rows), -2, 0)


def _looked_at(found: SideOutput) -> SideOutput:
    """The applied weights [copies, b, h, q, k] beside those that dropout allows; the share that is left out, if all are allowed."""
    weights, applied, near = found.expected, found.got, found.tolerance
    dropped = np.abs(applied) <= near
    allowed = np.where(dropped, 0.0, weights / (1 - P))
    if _differ(applied, applied[:1], near):
        allowed, hints = np.broadcast_to(applied[:1], applied.shape), ["numbers of the output are left out, and not weights"]
    elif not _differ(applied.sum(axis=-1), np.ones(()), near):
        hints = ["what is kept of a row sums to 1, as if dropout came before the softmax"]
    elif _differ(applied, allowed, near):
        hints = [words for factor, words in KEPT.items() if not _differ(applied, np.where(dropped, 0.0, factor * weights), near)]
    else:
        share, bound = float(dropped[0].mean()), FAR * math.sqrt(P * (1 - P) / dropped[0].size)
        hints = [f"{share:.2g} of the weights are left out"]
        return replace(found, expected=np.array([P]), got=np.array([share]), tolerance=bound, hints=tuple(hints))
    copy = int(np.unravel_index(np.abs(applied - allowed).argmax(), applied.shape)[0])
    return replace(found, expected=allowed[copy], got=applied[copy], hints=tuple(hints))


def _differ(one: Array, two: Array, near: float) -> bool:
    return not bool((np.abs(one - two) <= near).all())  # as NaN does from all numbers


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The same random numbers of torch in each check, in the `with` block alone."""
    if (torch := sys.modules.get("torch")) is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
