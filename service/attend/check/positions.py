"""Where queries and keys are, found by calls: positions of a layer, the first query of a causal one, and whether there may be more keys."""

from contextlib import suppress
from dataclasses import replace

from attend.check.adapter import CallFailed
from attend.check.candidate import Candidate
from attend.check.cases import CheckCase
from attend.check.convention import ROPE_TABLES, Convention
from attend.check.families import with_positions
from attend.check.trial import Trial, changed_rows, perturbed
from attend.spec import LayerSpec


def positions_of(trial: Trial, convention: Convention) -> tuple[Convention, tuple[str, LayerSpec] | None]:
    """The convention with the window under which everything agrees, or without one; and the positions, in words, and the layer with
    them, if it does not agree without any."""
    plain = trial.prepare(convention)
    agrees = trial.all_agree(plain)
    if agrees and ROPE_TABLES.isdisjoint(plain.adapter.roles):
        return convention, None
    for windowed in trial.with_and_without_window(convention):
        for words, spec in with_positions(trial.prepare(windowed).spec):
            other = Trial(trial.candidate, spec, trial.seed)
            with suppress(ValueError, CallFailed):
                if other.all_agree(other.prepare(windowed)):
                    return windowed, (words, spec)
    return convention if agrees else replace(convention, window=None), None


def one_length(trial: Trial, convention: Convention) -> Convention:
    """The convention, with `one_length` if the candidate raises where there are more keys than queries."""
    prepared = trial.prepare(convention)
    case = _cross_attention(trial, prepared)
    try:
        if case is not None and not prepared.adapter.skip_reason(case):
            trial.output(prepared, case)
    except CallFailed:
        return replace(convention, one_length=True)
    return convention


def _cross_attention(trial: Trial, prepared: Candidate) -> CheckCase | None:
    """The short case with more keys than queries, if there is one."""
    return next((case for case in trial.cases_of(prepared) if case.name == "cross-attention"), None)


def offset(trial: Trial, convention: Convention) -> Convention:
    """Where the queries of an always causal candidate are, if there are more keys: the last query sees the last key, or does not."""
    prepared = trial.prepare(convention)
    if "query_offset" in convention.given or not convention.causal or "key" not in prepared.adapter.roles:
        return convention
    at_start = convention.tried(query_offset="start")
    prepared = trial.prepare(at_start)
    case = _cross_attention(trial, prepared)
    with suppress(CallFailed, ValueError):
        if case is not None:
            before, after = (trial.output(prepared, x) for x in (case, perturbed(case, -1, prepared)))
            return convention.tried(query_offset="end") if changed_rows(before, after)[-1] else at_start
    return convention
