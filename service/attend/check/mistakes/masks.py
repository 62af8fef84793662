"""Mistakes in masks, whether passed or a candidate's own causal mask, and in how scores are blocked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from attend.check.changes import (
    UNMASK,
    Change,
    Impossible,
    add_mask,
    all_of,
    change_causality,
    change_mask,
    change_softmax,
    change_spec,
    mask_everywhere,
    only_if,
)
from attend.check.computation import LARGE, Computation
from attend.check.mistakes.mistake import Mistake, attention, computing, seeing
from attend.spec_parts import Window
from attend.tensors import Array


def _zero_padded(roles: tuple[str, ...]) -> Change:
    """Multiplies these inputs by 0 where a key is padded, and blocks nothing. Impossible where no keys are padded."""

    def change(c: Computation) -> Computation:
        case, kept = c.case, c.case.mask[:, 0, :, None]
        if case.kind != "padding" or (case.is_cross and "query" in roles):
            raise Impossible
        inputs: dict[str, Any] = {role: getattr(case, role) * kept for role in roles}
        return replace(c, case=replace(case, visible=case.own, **inputs))

    return change


def _without_second_mask(c: Computation) -> Computation:
    return _seeing_beside(c, c.case.mask)


def _without_first_mask(c: Computation) -> Computation:
    return _seeing_beside(c, c.case.not_padded)


def _seeing_beside(c: Computation, mask: Array) -> Computation:
    """Passes one of two masks alone. Impossible unless there are two."""
    if c.case.beside is None or c.case.kind != "mask":
        raise Impossible
    return replace(c, case=replace(c.case, visible=mask & c.case.own))


def _without_numbers(c: Computation) -> Computation:
    if c.case.numbers is None:
        raise Impossible
    return replace(c, case=replace(c.case, numbers=None))


def _offset(own: Array) -> int:
    """The key at which the first query of a causal mask is."""
    return int(own[0, 0].sum()) - 1


def _keys_up_to(by: int) -> Callable[[Array], Array]:
    """Query i sees the keys up to its own plus `by`."""
    return lambda own: np.tril(np.ones_like(own), _offset(own) + by)


def _keys_from(by: int) -> Callable[[Array], Array]:
    """Query i sees its own key plus `by`, and later ones."""
    return lambda own: np.triu(np.ones_like(own), _offset(own) + by)


def _may_be_aligned_elsewhere(c: Computation) -> bool:
    """Whether some cases have more keys than queries: not with one input, nor where results depend on positions."""
    return not (c.case.causal or c.spec.positional or np.array_equal(c.case.query, c.case.key))


def _fill_blocked(fill: float) -> Change:
    return change_softmax(lambda c, softmax, scores, sinks: softmax(np.where(np.isneginf(scores), fill, scores), sinks))


def _transposed(mask: Array) -> Array:
    """The mask of keys over queries; Impossible unless there are as many."""
    if mask.shape[1] != mask.shape[2]:
        raise Impossible
    return mask.swapaxes(1, 2)


def _blocked_for_all(mask: Array) -> Array:
    """The mask of the keys that no query may attend to; Impossible if there is none."""
    if (visible := mask.any(axis=1, keepdims=True)).all():
        raise Impossible
    return np.broadcast_to(visible, mask.shape)


def _wider(window: Window | None, by: int) -> Window | None:
    return window and window.model_copy(update={"left": None if window.left is None else max(window.left + by, 0)})


RAISED = 300.0  # gives a key all the weight, as any larger number does, and loses few digits of the scores
MISTAKES: dict[str, dict[str, Mistake]] = {
    "mask": computing(
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
            "the causal mask blocks each query's own key (off by one)": (
                "softmax(S + M) V, M_ij = -inf where j ≥ i",
                only_if(lambda c: c.case.kind == "causal", change_mask(lambda mask: np.tril(mask, -1))),
            ),
            "the mask of query i and key j is that of query i and key i": (
                "softmax(S_ij + M_ii) V",
                change_mask(lambda mask: np.broadcast_to(np.diagonal(mask, axis1=1, axis2=2)[..., None], mask.shape)),
            ),
            "the mask of query i and key j is that of query j and key j": (
                "softmax(S_ij + M_jj) V",
                change_mask(lambda mask: np.broadcast_to(np.diagonal(_transposed(mask), axis1=1, axis2=2)[:, None], mask.shape)),
            ),
            "every key is blocked wherever a mask is passed": (
                "softmax(S + M) V, M = -inf everywhere",
                change_mask(np.zeros_like),
            ),
            "only the keys that are blocked for all queries are blocked": (
                "softmax(S + M) V, M_ij = -inf where key j is blocked for all",
                change_mask(_blocked_for_all),
            ),
        },
    ),
    "causality": computing(
        seeing("j ≤ i"),
        {
            "causality is forgotten: queries attend to keys after their own": ("softmax(S) V", change_causality(np.ones_like)),
            "its causal mask is aligned at the last key: query i sees the keys up to i + k - q, and not up to i": (
                seeing("j ≤ i + k - q"),
                change_causality(lambda own: np.tril(np.ones_like(own), own.shape[2] - own.shape[1])),
            ),
            "its causal mask blocks each query's own key (off by one)": (seeing("j < i"), change_causality(_keys_up_to(-1))),
            "its causal mask lets each query see the next key (off by one)": (
                seeing("j ≤ i + 1"),
                change_causality(_keys_up_to(1)),
            ),
            "its causal mask is transposed: queries attend to their own key and later ones": (
                seeing("j ≥ i"),
                change_causality(_keys_from(0)),
            ),
            "its causal mask blocks every key": ("softmax(S + M) V, query i sees no key", change_causality(np.zeros_like)),
            "its causal mask is inverted: queries attend to later keys alone": (
                seeing("j > i"),
                change_causality(np.logical_not),
            ),
            "its causal mask leaves each query its own key alone": (
                seeing("j = i"),
                change_causality(lambda own: own & _keys_from(0)(own)),
            ),
        },
    )
    | computing(
        seeing("j ≤ i + k - q"),
        {
            "its causal mask is aligned at the first key: query i sees the keys up to i, and not up to i + k - q": (
                seeing("j ≤ i"),
                change_causality(np.tril),
            ),
        },
    )
    | computing(
        "softmax(S + M) V, query i sees all keys that no mask blocks",
        {
            "it is causal without being asked (see causal)": (
                seeing("j ≤ i"),
                only_if(lambda c: not c.case.causal, mask_everywhere(np.tril)),
            ),
            "it is causal without being asked, aligned at the last key (see causal and query_offset)": (
                seeing("j ≤ i + k - q"),
                only_if(
                    _may_be_aligned_elsewhere,
                    mask_everywhere(lambda visible: np.tril(visible, visible.shape[2] - visible.shape[1])),
                ),
            ),
            "it is causal without being asked, and each query sees the next key too": (
                seeing("j ≤ i + 1"),
                only_if(lambda c: not c.case.causal, mask_everywhere(lambda visible: np.tril(visible, 1))),
            ),
        },
    ),
    "blocked": computing(
        attention(),
        {
            "blocked scores are +inf and not -inf, as where the mask's numbers are subtracted and not added": (
                "softmax(where(blocked, inf, S)) V",
                change_softmax(lambda c, softmax, scores, sinks: softmax(np.where(scores <= -min(LARGE), -scores, scores), sinks)),
            ),
            "a large number is added to blocked scores, and not subtracted": (
                "softmax(S + M) V, M_ij = 10000 where blocked",
                add_mask(lambda visible: np.where(visible, 0.0, RAISED)),
            ),
            "blocked scores are set to about 0 and not to -inf": ("softmax(where(blocked, 0, S)) V", _fill_blocked(0.0)),
            "the weights of blocked keys are set to 0 after the softmax, so that rows no longer sum to 1": (
                "where(blocked, 0, softmax(S)) V",
                all_of(change_softmax(lambda c, softmax, scores, sinks: softmax(scores, sinks) * c.case.visible[:, None]), UNMASK),
            ),
            "the weights of blocked keys are set to -inf after the softmax": (
                "where(blocked, -inf, softmax(S)) V",
                all_of(
                    change_softmax(lambda c, softmax, scores, sinks: np.where(c.case.visible[:, None], softmax(scores, sinks), -np.inf)),
                    UNMASK,
                ),
            ),
        },
    ),
    "two masks": computing(
        "softmax(S + M + P) V, M: the mask, P: the padding mask",
        {
            "the padding mask is ignored where there is a mask, too": ("softmax(S + M) V", _without_second_mask),
            "the mask is ignored where there is a padding mask, too": ("softmax(S + P) V", _without_first_mask),
        },
    )
    | computing(
        "softmax(S + M) V, M: numbers",
        {"the numbers of a mask of numbers are not added to the scores": ("softmax(S) V", _without_numbers)},
    ),
    "padded inputs + blocked": computing(
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
    "window length": computing(
        "query i sees the keys j ≥ i - left",
        {
            "the window has one key more": (
                "query i sees the keys j ≥ i - left - 1",
                change_spec(window=lambda spec: _wider(spec.window, 1)),
            ),
            "the window has one key less": (
                "query i sees the keys j ≥ i - left + 1",
                change_spec(window=lambda spec: _wider(spec.window, -1)),
            ),
        },
    ),
}
