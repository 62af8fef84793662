"""What is said of a wrong candidate: its first wrong number, the step where it leaves the reference, and the mistake that explains it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice

import numpy as np

from attend.check.calls import ComparedCase, ComparedOutput, call, observe
from attend.check.candidate import Candidate
from attend.check.cases import CheckCase, Group, Repeatable
from attend.check.divergence import Divergence, FirstWrongStep, first_wrong_step
from attend.check.explanation import Explanation, Observation, OtherSizes, explain, explain_in_turn
from attend.check.pairs import shortened
from attend.check.report import Disagreement
from attend.check.sizes import other_lengths
from attend.check.trace import Trace, recorded, source_folders

NOT_FINITE = "no number is finite: a row may have no key that is not blocked, exp may overflow, or a number is divided by 0"
UNEXPLAINED = "no known mistake gives these numbers"
OF_WEIGHTS = "the output is right, and the weights returned beside it are not"
IN_SWEEP = "all other kinds of calls agree"
UNKNOWN = Explanation()
MOST_NAMES = 6  # of calls that a hint lists
FURTHER_SEEDS = 3  # draws of further cases


def explained(
    prepared: Candidate, compared: Sequence[ComparedCase], in_others: Callable[[], Candidate | None], seed: int
) -> Sequence[Disagreement]:
    """The first disagreement with the explanation of all; without one, a wrong shape is a disagreement of its own.

    `in_others`: makes the candidate in other sizes.
    """
    wrong = [x for x in compared if x.wrong is not None]
    if not any(_is_far(x) for x in wrong):  # only as many small errors show it, which mistakes are not told apart by
        return [replace(disagreement(x), hint=_words([x.wrong for x in wrong])) for x in wrong[:1]]
    groups = tuple({x.right.case.group: None for x in compared})
    further = Repeatable(_observe_further(prepared, seed, groups))
    elsewhere = cache(partial(_in_other_sizes, prepared, in_others, seed, groups))
    step = _first_wrong_step(prepared, seed, wrong)
    observed = [x.observation for x in compared]
    if explanation := explain(observed, further, elsewhere, () if step is None else step.names):
        return (disagreement(wrong[0], explanation, step),)
    shaped = [observation for x, observation in zip(compared, observed, strict=True) if x.has_shapes]
    if in_turn := explain_in_turn(shaped, further, elsewhere):
        first = [next(x for x in wrong if x.observation.is_unmasked == is_unmasked) for is_unmasked in (True, False)]
        return tuple(map(disagreement, first, in_turn, (step, None)))
    firsts = [x for has_shapes in (True, False) for x in [y for y in wrong if y.has_shapes is has_shapes][:1]]
    if len(firsts) > 1:
        explanation = explain(shaped, further, elsewhere)
    return [disagreement(x, explanation, step) for x in firsts]


def _first_wrong_step(prepared: Candidate, seed: int, wrong: Sequence[ComparedCase]) -> FirstWrongStep | None:
    """Where the candidate leaves the reference in the first wrong case, and in another draw of it; None if no array can be recorded."""
    if (case := next((x.right.case for x in wrong if x.has_shapes), None)) is None:
        return None
    again = (x for x in prepared.draw_cases(seed + 1, (case.group,)) if x.name == case.name)
    calls = [divergence for x in (case, *islice(again, 1)) if (divergence := divergence_of(prepared, x)) is not None]
    return first_wrong_step(*calls) if calls else None


def divergence_of(prepared: Candidate, case: CheckCase) -> Divergence | None:
    """What a candidate makes in a call beside the steps of the reference; None if it is right, or cannot be recorded."""
    adapter = prepared.adapter
    if not (folders := source_folders(adapter.function)):
        return None
    trace = Trace(folders)
    with suppress(Exception):  # what it makes of arrays that record may differ from what it makes of others
        called = call(replace(prepared, adapter=replace(adapter, function=recorded(adapter.function, trace))), case)
        if called.wrong is not None and trace.is_complete:
            return Divergence(called.right.steps(), trace, called.right.dtype)
    return None


def _in_other_sizes(prepared: Candidate, make: Callable[[], Candidate | None], seed: int, groups: Collection[Group]) -> OtherSizes:
    """What the candidate returns in other sizes; an instance has its own heads and widths alone, and is called with other lengths."""
    other = make()
    if other is not None and other.module is not None:
        other.module.eval()
    drawn = other or prepared
    convention = drawn.adapter.convention
    lengths = other_lengths(drawn.spec, batched=convention.batched, tile=convention.tile)
    observed = observe(drawn, drawn.draw_cases(seed + 7_000_003, groups, lengths))
    heads, width = prepared.spec.num_heads, prepared.spec.head_dim
    return OtherSizes(Repeatable(observed), "" if other is not None else f"{heads} head{'s' if heads > 1 else ''} of {width} numbers")


def _observe_further(prepared: Candidate, seed: int, groups: Collection[Group]) -> Iterator[Observation]:
    """More cases that the candidate can be called on, which tell explanations apart that agree in all earlier ones."""
    for other in range(seed + 1, seed + 1 + FURTHER_SEEDS):
        lengths = prepared.lengths(larger=other % 2 != seed % 2)
        yield from observe(prepared, prepared.draw_cases(other * 1_000_003, groups, lengths))


def disagreement(
    compared: ComparedCase, explanation: Explanation = UNKNOWN, step: FirstWrongStep | None = None, hint: str = ""
) -> Disagreement:
    """The first wrong number, or the wrong shape, with its explanation, or another hint."""
    wrong, case = compared.wrong, compared.right.case.name
    assert wrong is not None
    if not wrong.has_shape:
        shapes = f"shape {list(wrong.expected.shape)}", f"shape {list(wrong.got.shape)}"
        return Disagreement(case, wrong.name, *shapes, hint=hint or str(explanation) or _explain_shape(wrong), explanation=explanation)
    errors = np.abs(wrong.got - wrong.expected)
    far = np.argwhere(~(errors <= wrong.tolerance))
    index = tuple(map(int, far[0] if len(far) else np.unravel_index(errors.argmax(), errors.shape)))
    expected, got = (f"{x[index]:.{17 if compared.right.dtype == 'float64' else 9}g}" for x in (wrong.expected, wrong.got))
    unexplained = _words([wrong]) or (UNEXPLAINED if np.isfinite(wrong.got).any() else NOT_FINITE)
    if wrong.name != "output":  # the steps, which the output shows, are right
        unexplained, step = f"{unexplained}: {OF_WEIGHTS}", None
    return Disagreement(case, wrong.name, expected, got, index, hint or str(explanation) or unexplained, explanation, step)


def _is_far(compared: ComparedCase) -> bool:
    """Whether a number is so wrong that no rounding of the dtype explains it."""
    wrong = compared.wrong
    return wrong is not None and not compared.expected.agrees(wrong.name, wrong.got)


def _words(wrong: Sequence[ComparedOutput | None]) -> str:
    """What the errors of outputs in half precision have in common, though each is small."""
    measures = [x for output in wrong if output is not None for x in output.measures if x.error > x.bound and x.words]
    return max(measures, key=lambda x: x.ratio).words if measures else ""


def _explain_shape(wrong: ComparedOutput) -> str | None:
    """A hint, if a known rearrangement of the expected array equals the received one; else None."""
    expected = wrong.expected
    known = [
        ("batch and heads are one axis: return [b, h, q, k]", expected.reshape(-1, *expected.shape[2:])),
        ("queries and keys are exchanged, and the numbers are right", expected.swapaxes(-1, -2)),
        ("batch and queries are exchanged, and the numbers are right: return [b, q, d_model]", expected.swapaxes(0, 1)),
    ]
    for hint, made in known:
        if made.shape == wrong.got.shape and np.allclose(made, wrong.got, rtol=0, atol=wrong.tolerance):
            return hint
    return None


def first_of(names: Sequence[str]) -> str:
    """A list of names; of many, the first and the number of the others."""
    return shortened(names, MOST_NAMES) or "none"
