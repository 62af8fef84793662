"""Two modules of a class that are made and called in turn, which shows what they share and should not: a table, a cache, a mask."""

from contextlib import suppress
from dataclasses import replace

from attend.check.calls import Calls, call_on
from attend.check.disagreements import disagreement
from attend.check.families import with_other_theta
from attend.check.further.look import Extent
from attend.check.report import Disagreement


def look(called: Calls, extent: Extent) -> Disagreement | None:
    """The first wrong number of a second module with other weights, and another theta if it reads one, or of the first after it."""
    prepared = called.prepared
    if extent.tried.constructor is None:
        return None
    reads = "theta" in prepared.adapter.convention.sizes_read
    thetas, fields = with_other_theta(prepared.spec) if reads else ("", {})
    with_thetas, ignored = (f", with {thetas},", "theta is ignored, or ") if thetas else ("", "")
    with suppress(Exception):  # a class may take some sizes alone
        second = extent.tried.prepare(prepared.adapter.convention, further=1, **fields)
        for which, each in (("second", second), ("first", prepared)):
            calls = call_on(each, extent.tried.seed, ["short"], until_wrong=True)
            if (wrong := next((x for x in calls.compared if x.wrong is not None), None)) is not None:
                name = f"{wrong.right.case.name}, the {which} of two modules"
                called.results += [replace(x, case=name) for x in calls.results if x.agrees is False]
                words = f"of two{with_thetas} that are made and called in turn, the {which} does not"
                hint = f"one module of the class agrees; {words}: {ignored}they share what is kept of a call"
                return replace(disagreement(wrong, hint=hint), case=name)
    return None
