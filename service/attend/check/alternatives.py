"""What a wrong candidate may be meant to be, where its calls leave that open, and which of these is told."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from attend.check.applied_weights import independent_of
from attend.check.calls import call, call_on
from attend.check.constructor import OTHERS, meaning_of
from attend.check.convention import Convention
from attend.check.disagreements import UNEXPLAINED, divergence_of
from attend.check.families import most_common_of_each_kind, with_positions
from attend.check.fitting import width_of_scale
from attend.check.lengths import resized
from attend.check.report import Comparison
from attend.check.requirements import USUAL_HEADS
from attend.check.tried import Tried, try_conventions
from attend.check.windows import window_in_words, with_and_without_window


def unexplained(comparison: Comparison) -> int:
    """How many disagreements no mistake explains."""
    return sum((x.hint or "").startswith(UNEXPLAINED) for x in comparison.disagreements)


def alternatives(tried: Tried, comparison: Comparison) -> Iterator[Tried]:
    """What a wrong candidate may be meant to be, if no mistake gives its numbers: causal, which a mistake hides, or with positions."""
    if not unexplained(comparison):
        return
    convention, prepared = tried.convention, tried.prepare()
    if tried.spec is None:
        for windowed in with_and_without_window(tried.candidate, prepared, convention):
            if windowed.window and (windowed.window[1] is None) is convention.causal:
                yield tried.but(window_in_words(windowed), convention=windowed)
    if comparison.results[0].agrees:
        return
    if not convention.causal and "causal" not in convention.given and not {"mask", "causal"} & prepared.adapter.roles.keys():
        yield tried.but("it is always causal", convention=convention.tried(causal=True))
    if tried.spec is None:
        others = [tried.but(f"it has {name}", spec=spec) for name, spec in with_positions(prepared.spec)]
        steps: dict[int, Tried] = {}
        for other in (tried, *others):
            with suppress(ValueError):
                steps.setdefault(_steps_in(other), other)
        most, usual = steps[max(steps)], most_common_of_each_kind([other.spec for other in others if other.spec])
        yield from (most,) if most is not tried else (other for other in others if other.spec in usual)


def with_flag_for_keys(tried: Tried, given: Convention) -> Iterator[Tried]:
    """A class that ignores the keys that it gets and is right without them, with each flag on that is off by default and whose name says
    nothing, as BERT's `is_cross_attention`. `given`: the convention before it was tried."""
    prepared, spec = tried.prepare(), tried.spec if tried.is_given else None
    optional = [name for role, name in prepared.adapter.roles.items() if role in ("key", "value") and role not in prepared.adapter.required]
    with prepared.evaluating():
        first = call(prepared, next(iter(prepared.draw_cases(tried.seed, {"short"}))))
        if not optional or "key" not in independent_of(prepared, first):
            return
    arguments = {**given.arguments, **dict.fromkeys(optional, "unused")}
    alone, *_ = try_conventions(tried.candidate, spec, replace(given, arguments=arguments), tried.seed)
    with (prepared := alone.prepare()).evaluating():
        if not call_on(prepared, tried.seed, {"short"}).agree:
            return
    for name, parameter in inspect.signature(tried.candidate).parameters.items():
        if parameter.default is False and meaning_of(name) is None and name not in {**OTHERS, **given.construct}:
            with suppress(Exception):  # a class may require more with it
                turned_on = replace(given, construct={**given.construct, name: True})
                for other in try_conventions(tried.candidate, spec, turned_on, tried.seed):
                    yield other.but(f"it is constructed with {name}=True")


def in_wide_heads(tried: Tried, comparison: Comparison) -> Iterator[Tried]:
    """A candidate that has the scale of heads of one width in all, with heads of this width, if that is all that is wrong."""
    if len(comparison.disagreements) != 1 or (made := comparison.disagreements[0].explanation.made) is None:
        return
    prepared = tried.prepare()
    with prepared.evaluating():
        right = call(prepared, next(iter(prepared.draw_cases(tried.seed, {"short"})))).right
    if (width := width_of_scale(made, right)) is not None:
        spec, heads = tried.spec, prepared.spec.num_heads
        spec = resized(spec, heads, prepared.spec.num_kv_heads, width) if spec else None
        convention = tried.convention.tried(d_model=width * (tried.convention.num_heads or USUAL_HEADS))
        found = f"its scores are divided by {width**0.5:.4g}, as those of heads of {width} numbers are, which it gets"
        yield tried.but(found, convention=convention, spec=spec)


def with_fewest_mistakes(compared: Sequence[tuple[Comparison, Tried]]) -> tuple[Comparison, Tried]:
    """The first of the comparisons that fewest mistakes explain; if none is explained, the one of whose layer most steps occur."""
    explained = [x for x in compared if not unexplained(x[0])]
    if explained:
        return min(explained, key=lambda x: len(x[0].disagreements))
    return max(compared, key=lambda x: _steps_in(x[1]))


def _steps_in(tried: Tried) -> int:
    """How many steps of the layer occur in what the candidate makes in the first call; 0 if that cannot be recorded."""
    prepared = tried.prepare()
    with prepared.evaluating():
        divergence = divergence_of(prepared, next(iter(prepared.draw_cases(tried.seed, {"short"}))))
    return 0 if divergence is None else divergence.occurring
