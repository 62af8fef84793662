"""Where the queries of a causal call are, if it has more or fewer keys than queries: libraries disagree.

Top-left: query i attends to keys 0 to i, as in torch's scaled_dot_product_attention. Bottom-right: the last query attends to all keys, as
in FlashAttention since version 2.1. A candidate with a parameter for causality is called with q < k and with q > k, and its numbers are
compared with both. Rows that have no key, which only bottom-right has, are left out, since libraries disagree about them too.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attend.check.adapter import CallFailed
from attend.check.calls import RAISED, Calls, CaseResult, ComparedCase, call
from attend.check.candidate import Candidate
from attend.check.cases import CheckCase
from attend.check.convention import Alignment
from attend.check.disagreements import disagreement
from attend.check.further.look import Extent
from attend.check.report import Disagreement
from attend.check.signatures import FUNCTIONS, function_like

PAIRS = ((5, 11), (11, 5), (65, 193))  # queries and keys; the last are more than tiles of 64 and 128 hold
WORDS: dict[Alignment, str] = {
    "top-left": "top-left (query i attends to keys 0 to i)",
    "bottom-right": "bottom-right (the last query attends to all keys)",
}


def look(called: Calls, extent: Extent) -> Disagreement | None:
    """A causal call with q != k that has none of the two alignments, or not the one that it has to have."""
    found = [_compare(called, cases) for cases in draw_alignments(called.prepared, extent.tried.seed, extent.longest)]
    if (misaligned := next(filter(None, found), None)) is None:
        return _elsewhere(called, extent) if called.alignments and called.prepared.adapter.aligned is None else None
    hint = "with q = k it is causal; with q != k, its numbers are those of neither top-left nor bottom-right alignment"
    if called.alignments:
        first = called.alignments[0]
        known = FUNCTIONS[called.prepared.adapter.convention.like or "flash_attn"]
        hint = f"with q != k, causality is {WORDS[first]}; that of {known.title} is {WORDS[known.alignment or first]}"
        if known.alignment in (first, None):
            hint = f"with fewer rows, causality is {WORDS[first]}, and here it is not"
    return disagreement(misaligned, hint=hint)


def _elsewhere(called: Calls, extent: Extent) -> Disagreement | None:
    """The first wrong call with a window or with packed sequences, by the alignment that causal calls have."""
    kept, aligned = len(called.compared), called.alignments[0]
    called.results += [called.result_of(case) for case in called.prepared.draw_aligned(extent.tried.seed, aligned)]
    wrong = next((x for x in called.compared[kept:] if x.wrong is not None), None)
    return None if wrong is None else disagreement(wrong, hint=f"with q != k, causality is {WORDS[aligned]} in other calls")


def causality(called: Calls) -> str:
    """Which alignment causal calls have, and which one the candidate's signature stands for; empty if that was not tried."""
    if not called.alignments:
        return ""
    adapter, found = called.prepared.adapter, dict.fromkeys(called.alignments)
    words = " with q < k, ".join(WORDS[x] for x in found) + (" with q > k" if len(found) > 1 else "")
    of = FUNCTIONS[like] if (like := function_like(adapter.signature)) else None
    differs = of is not None and of.alignment is not None and [*found] != [of.alignment]
    expected = f"; that of {of.title}, whose parameters it has, is {WORDS[of.alignment]}" if of and of.alignment and differs else ""
    return f"with q != k, {adapter.roles['causal']} is {words}{expected}"


def draw_alignments(candidate: Candidate, seed: int, longest: int) -> Iterator[dict[Alignment, CheckCase]]:
    """For each pair of lengths of at most `longest` rows, the causal call as either alignment computes it; nothing if no parameter makes
    calls causal."""
    adapter, draw = candidate.adapter, candidate.draw(seed)
    if not {"causal", "key"} <= adapter.roles.keys() or not draw.keys_apart or "mask" in adapter.required:
        return
    pairs = dict.fromkeys((draw.lengths.whole(queries), draw.lengths.whole(keys)) for queries, keys in PAIRS)
    for queries, keys in (pair for pair in pairs if max(pair) <= max(longest, PAIRS[0][1]) and len({*pair}) > 1):
        words = f"{adapter.roles['causal']}=True, {queries} queries, {keys} keys"
        top = draw.case(words, "plain", keys, queries=queries, group="parameters", causal=True, passed={"causal": True}, query_offset=0)
        if adapter.skip_reason(top):
            continue
        if queries <= keys:
            bottom = replace(top, query_offset=keys - queries).seeing()
        else:
            rows: dict[str, Any] = {part: getattr(top, part)[:, -keys:] for part in ("query", "mask")}
            bottom = replace(top, whole=top, **rows).seeing()
        yield {"top-left": candidate.as_passed(top), "bottom-right": candidate.as_passed(bottom)}


def _compare(called: Calls, cases: dict[Alignment, CheckCase]) -> ComparedCase | None:
    """Finds which alignment a causal call has, and adds what came of it. Returns the call if that is wrong."""
    adapter, case = called.prepared.adapter, cases["top-left"]
    if adapter.roles["causal"] in called.refused:
        return None
    try:
        compared = {alignment: call(called.prepared, x) for alignment, x in cases.items()}
    except CallFailed as failure:
        called.results.append(CaseResult(case.name, skipped=f"{RAISED} {failure}", untried=True))
        return None
    required = adapter.aligned  # the only right one; None: either is
    if required is None and called.alignments and case.query.shape[1] < case.key.shape[1]:
        required = called.alignments[0]  # of shorter calls
    right: list[Alignment] = [alignment for alignment, x in compared.items() if x.wrong is None]
    shown = compared[required or (right[0] if right else "bottom-right")]
    called.results.append(shown.result)
    called.keys = max(called.keys, case.key.shape[1])
    called.alignments += right[:1]
    return None if shown.wrong is None else shown
