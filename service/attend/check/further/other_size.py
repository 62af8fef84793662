"""A class in other heads and widths, where sizes that it should read and does not are wrong."""

from dataclasses import replace

from attend.check.calls import Calls
from attend.check.disagreements import explained
from attend.check.fitting import width_of_scale
from attend.check.further.look import Extent
from attend.check.further.sweeps import of_one_width
from attend.check.report import Disagreement


def look(called: Calls, extent: Extent) -> Disagreement | None:
    """What is wrong in the short calls."""
    if (calls := extent.in_other_size) is None:
        return None
    sizes = [f"{x.num_heads} heads of {x.head_dim} numbers" for x in (called.prepared.spec, calls.prepared.spec)]
    if calls.agree:
        called.add_together(sizes[1], [x for x in calls.results if x.agrees])
    if calls.agree or calls.failures or not calls.compared:
        return None
    with calls.prepared.evaluating():
        first, *_ = explained(calls.prepared, calls.compared, lambda: None, extent.tried.seed)
    width = called.prepared.spec.head_dim
    if width_of_scale(first.explanation.made, calls.compared[0].right) == width:
        called.results.append(of_one_width("widths of heads", width))
        return None
    called.results += [replace(x, case=f"{x.case}, {sizes[1]}") for x in calls.results if x.agrees is False]
    return replace(first, case=f"{first.case}, {sizes[1]}", hint=f"with {sizes[0]} it agrees: {first.hint}")
