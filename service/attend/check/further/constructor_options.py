"""Parameters of a constructor, and of its configuration, that are off by default and change the layer: a window of keys, and causality."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from attend.check.calls import Calls, CaseResult, call_on
from attend.check.constructor import meaning_of
from attend.check.convention import CALL, Convention
from attend.check.disagreements import explained
from attend.check.further.look import Extent
from attend.check.report import Disagreement
from attend.check.windows import KEYS, ON_EACH_SIDE, WINDOWS, sizes_constructed

UNKNOWN = "since its numbers are not those of the layer with it"


def look(called: Calls, extent: Extent) -> Disagreement | None:
    """What is wrong in the short calls with an option, if a mistake has a name; without one, or where masks may be what blocks the keys,
    the option is untried."""
    found = None
    for words, conventions in _options(called, extent):
        calls = [x for x in (_call_with(convention, extent) for convention in conventions) if x is not None]
        if (right := next((x for x in calls if x.agree), None)) is not None:
            called.add_together(words, [x for x in right.results if x.agrees])
            continue
        wrong = next((x for x in calls if x.compared and not x.failures), None)
        named = None if wrong is None or "mask" in called.prepared.adapter.roles else _named(wrong, extent.tried.seed)
        if wrong is None or named is None:
            called.results.append(CaseResult(words, skipped=UNKNOWN, untried=True))
        else:
            called.results += [replace(x, case=f"{x.case}, {words}") for x in wrong.results if x.agrees is False]
            found = found or replace(named, case=f"{named.case}, {words}")
    return found


def _options(called: Calls, extent: Extent) -> Iterator[tuple[str, list[Convention]]]:
    """An option in words, and what the layer may be with it, the likeliest first."""
    convention, spec = called.prepared.adapter.convention, called.prepared.spec
    if extent.tried.constructor is None or any(side is not None for interval in spec.intervals for side in interval):
        return
    of_parameters = [x.name for x in sizes_constructed(extent.tried.constructor, convention) if x.default is None]
    of_configurations = [name for name in dict.fromkeys(convention.off) if meaning_of(name.rpartition(".")[2]) == "window"]
    called.tried |= dict.fromkeys(of_configurations)  # or untried, as cases say
    for name in (*of_parameters, *of_configurations):
        windows = WINDOWS[:1] if convention.causal else (*WINDOWS[1:], ON_EACH_SIDE, *WINDOWS[:1])
        yield f"{name}={KEYS}", [replace(convention, window=window) for window in windows]
    parameters = inspect.signature(extent.tried.constructor).parameters
    for name in CALL["causal"].split() if not convention.causal and "causal" not in convention.given else ():
        if name in parameters and parameters[name].default is False and name not in convention.construct:
            yield f"{name}=True", [replace(convention, construct={**convention.construct, name: True}, causal=True)]


def _call_with(convention: Convention, extent: Extent) -> Calls | None:
    """What the short calls of the candidate that is constructed so gave; None if it cannot be."""
    with suppress(Exception):  # a class may refuse the value
        return call_on(extent.tried.prepare(convention), extent.tried.seed, ["short"])
    return None


def _named(calls: Calls, seed: int) -> Disagreement | None:
    """What is wrong, if a mistake gives these numbers."""
    with calls.prepared.evaluating():
        first, *_ = explained(calls.prepared, calls.compared, lambda: None, seed)
    return first if first.mistakes else None
