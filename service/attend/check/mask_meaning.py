"""Finds by calls what a mask of a candidate means, and its axes.

A meaning under which the candidate agrees is right; in one that is always causal, a mask may take the place of causality. A wrong candidate
agrees under none; then a key that is blocked changes no output. Where a mistake hides that, too, each meaning that the candidate takes is
left, and the number of mistakes decides (`comparison.py`).
"""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from attend.check.adapter import CallFailed
from attend.check.cases import CaseKind, CheckCase
from attend.check.convention import POLARITY_OF, Convention, mask_conventions, mask_of_memory
from attend.check.trial import Trial, changed_rows, perturbed

MEANS = {"attend": "means attend", "block": "means blocked", "add": "is added to the scores"}


def meanings_of_mask(trial: Trial, role: str, convention: Convention) -> list[tuple[Convention, str]]:
    """What the mask of a role may mean, and its axes, also in words, which are empty if its name or an option says so.

    Of several, the first is the one under which a key that is blocked changes no output, if there is one.
    """
    adapter, option = trial.prepare(convention).adapter, f"{role}_means"
    name = adapter.roles.get(role)
    if name is None or adapter.is_torch or {option, "mask_shape", "mask_dtype"} <= convention.given:
        return [(convention, "")]
    readings = _readings(trial, role, convention)
    over_pairs = (x for x in readings if role == "mask" and x.causal and "q" in x.mask_shape)  # others cannot contain causality
    alone = [x.tried(mask_replaces_causality=True) for x in over_pairs]
    agreeing = next((x for x in (*readings, *alone) if _agrees(trial, x, role)), None)
    hiding = None if agreeing else next((x for x in readings if _hides(trial, x, role)), None)
    first = agreeing or hiding
    if first is None and role == "mask" and (other := mask_of_memory(adapter.roles, adapter.others)) is not None:
        return meanings_of_mask(trial, role, replace(convention, arguments={**convention.arguments, name: "unused", other: "mask"}))
    taken = [first] if first else []
    if not agreeing:
        taken += [x for x in readings if _accepts(trial, x, role)] or [convention]
    by_meaning = {getattr(x, option): x for x in reversed(taken)}
    in_order = sorted(by_meaning.values(), key=taken.index)
    said = option in convention.given or name in POLARITY_OF
    found = [(x, "" if said else _words(trial, role, x, name, found=first is not None)) for x in in_order]
    replaces = f"{name} takes the place of its causality"
    return [(x, "; ".join(filter(None, (words, replaces if x in alone else "")))) for x, words in found]


def _words(trial: Trial, role: str, convention: Convention, name: str, *, found: bool) -> str:
    """What true in the mask means; empty if another parameter takes such masks. `found`: a key that is blocked is hidden."""
    means = getattr(convention, f"{role}_means")
    if means is None or trial.prepare(convention).adapter.mask_role(_kind(role, convention)) != role:
        return ""
    axes = convention.mask_shape if role == "mask" else "b,k"
    kind = "" if means == "add" else "true in " if convention.mask_dtype == "bool" else "1 in "
    words = f"{kind}{name} [{axes}] {MEANS[means]}"
    return words if found else f"no meaning of {name} blocks a key; here {words}"


def _readings(trial: Trial, role: str, convention: Convention) -> list[Convention]:
    """What a mask may be that its name allows: over keys alone only if none over queries and keys is taken, where more shows."""
    named = POLARITY_OF.get(trial.prepare(convention).adapter.roles[role])
    readings = [x for x in mask_conventions(role, convention) if named in (None, getattr(x, f"{role}_means"))]
    over_pairs = [x for x in readings if _kind(role, x) == "mask"]
    return over_pairs if any(_accepts(trial, x, role) for x in over_pairs) else readings


def _kind(role: str, convention: Convention) -> CaseKind:
    """The cases that have such a mask: over queries and keys, or over keys alone."""
    return "mask" if role == "mask" and convention.mask_shape not in ("b,k", "b,1,1,k") else "padding"


def _case(trial: Trial, convention: Convention, role: str) -> CheckCase | None:
    """The first case with such a mask."""
    return next((case for case in trial.cases_of(trial.prepare(convention)) if case.kind == _kind(role, convention)), None)


def _agrees(trial: Trial, convention: Convention, role: str) -> bool:
    """Whether the candidate agrees on a case with such a mask."""
    prepared, case = trial.prepare(convention), _case(trial, convention, role)
    return case is not None and not prepared.adapter.skip_reason(case) and trial.agrees(prepared, case)


def _hides(trial: Trial, convention: Convention, role: str) -> bool:
    """Whether a key that the mask blocks changes no row, and one that it does not block changes the last."""
    prepared = trial.prepare(convention)
    case = trial.first_case(prepared)
    kept = np.broadcast_to(np.arange(case.key.shape[1]) != 1, case.mask.shape)
    case = replace(case, kind=_kind(role, convention), mask=kept, visible=kept & case.own)
    with suppress(CallFailed, ValueError):
        before = trial.output(prepared, case)
        hidden, seen = (changed_rows(before, trial.output(prepared, perturbed(case, key, prepared))) for key in (1, 0))
        others = np.arange(len(hidden)) != (1 if "key" not in prepared.adapter.roles else -1)  # its own row may depend on its input
        return bool(seen[-1] and not hidden[others].any())
    return False


def _accepts(trial: Trial, convention: Convention, role: str) -> bool:
    """Whether the candidate takes a mask that is read so."""
    case = _case(trial, convention, role)
    with suppress(CallFailed, ValueError):
        return case is not None and trial.output(trial.prepare(convention), case).shape[:2] == case.query.shape[:2]
    return False
