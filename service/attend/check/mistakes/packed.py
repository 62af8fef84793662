"""Mistakes of a candidate that computes packed sequences one after the other."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attend.check.changes import Change, Impossible, only_if, replace_steps
from attend.check.computation import Computation
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, computing
from attend.tensors import Array


def leave_out(left_out: Callable[[Array], Array], becomes: Callable[[Computation, Array], Computation], *, alone: bool) -> Change:
    """Does not compute the rows that `left_out` chooses by their segments [b, n]; `becomes` says what is in their place.

    `alone`: nor a sequence that is alone in its row.
    """
    return only_if(lambda c: alone or c.case.kind == "segments", lambda c: becomes(c, left_out(_segments(c))))


def _segments(c: Computation) -> Array:
    """The number of the sequence of each row: [b, n]. Impossible if the candidate does not get them."""
    if c.case.segments is None:
        raise Impossible
    return c.case.segments


def _last_of_batch(segments: Array) -> Array:
    """The rows of the highest number in the batch. Impossible in one item, where they are those of its last sequence."""
    if len(segments) == 1:
        raise Impossible
    return np.asarray(segments == segments.max())


def zero_heads(c: Computation, rows: Array) -> Computation:
    """The outputs of heads are 0 in these rows."""

    def mixed_weights(layer: Layer, weights: Array, blocked: Array) -> Array:
        return np.asarray(np.where(rows[:, None, :, None], 0.0, c.layer.mixed_weights(layer, weights, blocked)))

    return replace_steps(mixed_weights=mixed_weights)(c)


def heads_of_queries(c: Computation, rows: Array) -> Computation:
    """The outputs of heads are the queries of the heads in these rows."""
    heads = dict[str, Array]()

    def raw_scores(layer: Layer, q: Array, k: Array) -> Array:
        heads["query"] = q
        return c.layer.raw_scores(layer, q, k)

    def apply_weights(layer: Layer, weights: Array, values: Array) -> Array:
        return np.where(rows[:, None, :, None], heads["query"], c.layer.apply_weights(layer, weights, values))

    return replace_steps(raw_scores=raw_scores, apply_weights=apply_weights)(c)


def replace_output(output: Callable[[Computation], Array]) -> Callable[[Computation, Array], Computation]:
    """Replaces rows of the output after its projection. Impossible in a layer without one."""

    def becomes(c: Computation, rows: Array) -> Computation:
        def project(layer: Layer, x: Array, name: str) -> Array:
            projected = c.layer.project(layer, x, name)
            return np.where(rows[:, :, None], output(c), projected) if name == "output" else projected

        return only_if(lambda c: c.spec.projections, replace_steps(project=project))(c)

    return becomes


def missing_rows(c: Computation, rows: Array) -> Computation:
    """The output without these rows. Impossible in a batch whose items have not equally many of them."""
    if len({*rows.sum(axis=1)}) > 1:
        raise Impossible
    kept = ~rows[0]
    return replace(c, case=replace(c.case, query=c.case.query[:, kept], visible=c.case.visible[:, kept]))


def begin_at_first_row(roles: tuple[str, ...]) -> Change:
    """The keys or values of each sequence are as many rows as it has, from row 0. Impossible in one sequence."""

    def change(c: Computation) -> Computation:
        segments = _segments(c)
        n, begins = segments.shape[1], np.argmax(segments[:, :, None] == segments[:, None], axis=2)
        rows = np.maximum(np.arange(n) - begins[:, :, None], 0)  # in place of row j, for query i: [b, q, k]

        def raw_scores(layer: Layer, q: Array, k: Array) -> Array:
            scores = c.layer.raw_scores(layer, q, k)
            return np.take_along_axis(scores, np.broadcast_to(rows[:, None], scores.shape), -1) if "key" in roles else scores

        def apply_weights(layer: Layer, weights: Array, values: Array) -> Array:
            if "value" in roles:
                weights = np.einsum("bhij,bijk->bhik", weights, rows[..., None] == np.arange(n))
            return c.layer.apply_weights(layer, weights, values)

        return replace_steps(raw_scores=raw_scores, apply_weights=apply_weights)(c)

    return only_if(lambda c: c.case.kind == "segments", change)


LAST = ("last of the packed sequences", lambda segments: segments == segments[:, -1:])
FIRST = ("first of the packed sequences", lambda segments: segments == segments[:, :1])
MISTAKES: dict[str, dict[str, Mistake]] = {
    "packed rows": computing(
        "o_i = Σ_j P_ij v_j in the rows i of every sequence",
        {
            f"the {which} is not computed{', nor is one alone' if alone else ''}: {what}": (
                f"{computed} in the rows i of this sequence",
                leave_out(left_out, becomes, alone=alone),
            )
            for alone in (False, True)
            for which, left_out in (LAST, FIRST, ("packed sequence with the highest number in the batch", _last_of_batch))
            for what, computed, becomes in (
                ("the outputs of its heads stay 0", "o_i = 0", zero_heads),
                ("its queries stay in place of the outputs of its heads", "o_i = q_i", heads_of_queries),
                ("its output stays 0", "output_i = 0", replace_output(lambda c: np.zeros(1))),
                ("its input stays in place of its output", "output_i = x_i", replace_output(lambda c: c.case.query)),
            )
        }
        | {
            f"the {which} is not computed: its rows are missing": (
                "no o_i for the rows i of this sequence",
                leave_out(left_out, missing_rows, alone=False),
            )
            for which, left_out in (LAST, FIRST)
        },
    ),
    "packed keys": computing(
        "query i sees the keys of its sequence, from its start to its end",
        {
            f"the {words} of each packed sequence are rows 0 to its length, and not those from its start": (
                f"{symbol} = {symbol}[0 : end - start]",
                begin_at_first_row(roles),
            )
            for words, symbol, roles in (
                ("keys and values", "K, V", ("key", "value")),
                ("keys", "K", ("key",)),
                ("values", "V", ("value",)),
            )
        },
    ),
}
