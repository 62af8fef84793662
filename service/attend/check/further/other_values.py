"""Other values of parameters whose meaning is unknown, which may leave the output right."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from attend.check.calls import Calls, call_on
from attend.check.candidate import Candidate
from attend.check.convention import CALL
from attend.check.further.look import Extent
from attend.check.windows import with_windows


def look(called: Calls, extent: Extent) -> None:
    """Nothing is wrong: a parameter with which the usual calls are right is tried, and another one is not."""
    prepared = called.prepared
    for name, other in (*_with_other_values(prepared), *_without_keys(prepared), *with_windows(prepared)):
        with suppress(ValueError):  # it returns no array with this value
            further = call_on(other, extent.tried.seed, longest=extent.longest, until_wrong=True)
            is_flag = type(prepared.adapter.signature.parameters[name].default) is bool  # one that changes nothing may be ignored
            if further.agree and (further.with_sums or not is_flag):
                called.tried[name] = None
                called.with_sums += further.with_sums


def _with_other_values(prepared: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Each parameter of unknown meaning that is a flag, or a number such as the size of a tile; and the candidate with the other value of
    the flag, or with half the number."""
    adapter = prepared.adapter
    for name in adapter.others:
        default = parameter.default if (parameter := adapter.signature.parameters.get(name)) else None
        if type(default) is bool or (type(default) is int and default > 1):
            other = not default if type(default) is bool else default // 2
            yield name, replace(prepared, adapter=replace(adapter, function=partial(adapter.function, **{name: other})))


def _without_keys(prepared: Candidate) -> Iterator[tuple[str, Candidate]]:
    """The mask that is passed where keys are left out, and the candidate without them, if another mask takes its place beside keys."""
    adapter = prepared.adapter
    for name in (name for name in adapter.others if name in CALL["mask"].split() and "key" in adapter.roles):
        roles = {role: parameter for role, parameter in adapter.roles.items() if role not in ("key", "value")}
        yield name, replace(prepared, adapter=replace(adapter, roles=roles | {"mask": name}))
