"""Mistakes in masks, whether passed or a candidate's own causal mask, and in how scores are blocked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from attend.check.changes import (
    UNMASK,
    Change,
    Impossible,
    all_of,
    change_causality,
    change_mask,
    change_softmax,
    impossible,
    mask_everywhere,
    only_if,
)
from attend.check.computation import LARGE, Computation
from attend.check.mistakes.mistake import Mistake, attention, computing, seeing
from attend.tensors import Array

RAISED = 300.0  # gives a key all the weight, as any larger number does, and loses few digits of the scores
# A candidate's own causal mask, by how many places the key is after the query.
OWN: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "causality is forgotten: queries attend to keys after their own": ("softmax(S) V", lambda after: np.ones_like(after, bool)),
    "its causal mask blocks each query's own key (off by one)": (seeing("j < i"), lambda after: after < 0),
    "its causal mask lets each query see the next key (off by one)": (seeing("j ≤ i + 1"), lambda after: after <= 1),
    "its causal mask is transposed: queries attend to their own key and later ones": (seeing("j ≥ i"), lambda after: after >= 0),
}


def _own(sees: Callable[[Array], Array]) -> Change:
    def changed(own: Array) -> Array:
        offset = int(own[0, 0].sum()) - 1  # the key at which the first query is
        after = np.arange(own.shape[2]) - np.arange(own.shape[1])[:, None] - offset
        return np.broadcast_to(sees(after), own.shape)

    return change_causality(changed)


def _at_last_key(visible: Array) -> Array:
    """Without the keys after the query's own, if the last query is at the last key."""
    return np.tril(visible, visible.shape[2] - visible.shape[1])


def _may_be_aligned_elsewhere(c: Computation) -> bool:
    """Whether some cases have more keys than queries: not with one input, nor where results depend on positions."""
    return not (c.case.causal or c.spec.positional or np.array_equal(c.case.query, c.case.key))


def _fill(filled: Callable[[Array], Array]) -> Change:
    """Replaces the scores, which are -inf where a key is blocked."""
    return change_softmax(lambda c, softmax, scores, sinks: softmax(filled(scores), sinks))


def _raised(c: Computation) -> Computation:
    """Adds a large number to the scores of blocked keys. Impossible without a mask."""
    if c.case.visible.all():
        raise Impossible
    numbers = np.where(c.case.visible, 0.0, RAISED) + (0.0 if c.case.numbers is None else c.case.numbers)
    return UNMASK(replace(c, case=replace(c.case, numbers=numbers)))


def _zero_padded(roles: tuple[str, ...]) -> Change:
    """Multiplies these inputs by 0 where a key is padded, and blocks nothing. Impossible where no keys are padded."""

    def change(c: Computation) -> Computation:
        case, kept = c.case, c.case.mask[:, 0, :, None]
        if case.kind != "padding" or (case.is_cross and "query" in roles):
            raise Impossible
        inputs: dict[str, Any] = {role: getattr(case, role) * kept for role in roles}
        return replace(c, case=replace(case, visible=case.own, **inputs))

    return change


def _seeing_beside(mask: Callable[[Computation], Array]) -> Change:
    """Passes one of two masks alone. Impossible unless there are two."""
    return only_if(
        lambda c: c.case.beside is not None and c.case.kind == "mask",
        lambda c: replace(c, case=replace(c.case, visible=mask(c) & c.case.own)),
    )


def _transposed(mask: Array) -> Array:
    """The mask of keys over queries; Impossible unless there are as many."""
    return mask.swapaxes(1, 2) if mask.shape[1] == mask.shape[2] else impossible()


MISTAKES: dict[str, Mistake] = {
    **computing(
        "softmax(S + M) V, M_ij = -inf where key j is blocked for query i",
        {
            "the mask is inverted: it blocks what it should let through (see mask_means)": (
                "softmax(S + M) V, M_ij = -inf where key j may be attended to",
                change_mask(np.logical_not),
            ),
            "sequences leak across segments: queries attend to keys of other sequences in their row": (
                "softmax(S) V over all sequences of the row",
                only_if(lambda c: c.case.kind == "segments", change_mask(np.ones_like)),
            ),
            "the mask is ignored": ("softmax(S) V", change_mask(np.ones_like)),
            "the mask is transposed": ("softmax(S + Mᵀ) V", change_mask(_transposed)),
        },
    ),
    **computing(
        seeing("j ≤ i"),
        {name: (computed, _own(sees)) for name, (computed, sees) in OWN.items()}
        | {
            "its causal mask is aligned at the last key: query i sees the keys up to i + k - q, and not up to i": (
                seeing("j ≤ i + k - q"),
                change_causality(lambda own: _at_last_key(np.ones_like(own))),
            ),
        },
    ),
    "its causal mask is aligned at the first key: query i sees the keys up to i, and not up to i + k - q": Mistake(
        change_causality(np.tril), seeing("j ≤ i"), seeing("j ≤ i + k - q")
    ),
    **computing(
        "softmax(S + M) V, query i sees all keys that no mask blocks",
        {
            "it is causal without being asked (see causal)": (
                seeing("j ≤ i"),
                only_if(lambda c: not c.case.causal, mask_everywhere(np.tril)),
            ),
            "it is causal without being asked, aligned at the last key (see causal and query_offset)": (
                seeing("j ≤ i + k - q"),
                only_if(_may_be_aligned_elsewhere, mask_everywhere(_at_last_key)),
            ),
        },
    ),
    **computing(
        attention(),
        {
            "blocked scores are +inf and not -inf, as where the mask's numbers are subtracted and not added": (
                "softmax(where(blocked, inf, S)) V",
                _fill(lambda scores: np.where(scores <= -min(LARGE), -scores, scores)),
            ),
            "a large number is added to blocked scores, and not subtracted": (
                "softmax(S + M) V, M_ij = 10000 where blocked",
                _raised,
            ),
            "blocked scores are set to about 0 and not to -inf": (
                "softmax(where(blocked, 0, S)) V",
                _fill(lambda scores: np.where(np.isneginf(scores), 0.0, scores)),
            ),
            "the weights of blocked keys are set to 0 after the softmax, so that rows no longer sum to 1": (
                "where(blocked, 0, softmax(S)) V",
                all_of(change_softmax(lambda c, softmax, scores, sinks: softmax(scores, sinks) * c.case.visible[:, None]), UNMASK),
            ),
        },
    ),
    **computing(
        "softmax(S + M + P) V, M: the mask, P: the padding mask",
        {
            "the padding mask is ignored where there is a mask, too": ("softmax(S + M) V", _seeing_beside(lambda c: c.case.mask)),
            "the mask is ignored where there is a padding mask, too": ("softmax(S + P) V", _seeing_beside(lambda c: c.case.not_padded)),
        },
    ),
    "the numbers of a mask of numbers are not added to the scores": Mistake(
        only_if(lambda c: c.case.numbers is not None, lambda c: replace(c, case=replace(c.case, numbers=None))),
        "softmax(S) V",
        "softmax(S + M) V, M: numbers",
    ),
    **computing(
        "softmax(S + M) V, M_ij = -inf where key j is padded",
        {
            f"the inputs of padded {words} are multiplied by 0, and padded keys are not blocked": (
                f"softmax(S) V, {symbol} = 0 where key j is padded",
                _zero_padded(roles),
            )
            for words, symbol, roles in (
                ("keys", "the input of K_j", ("key",)),
                ("keys and values", "the inputs of K_j and V_j", ("key", "value")),
                ("rows", "x_j", ("query", "key", "value")),
            )
        },
    ),
}
