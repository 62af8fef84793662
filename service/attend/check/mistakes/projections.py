"""Mistakes in projections: in inputs, matrices and biases, and which of them are used."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from attend.check.changes import (
    Change,
    change_softmax,
    map_weights,
    only_if,
    repack,
    replace_weights,
    swap_weights,
    with_input,
)
from attend.check.computation import Computation
from attend.check.mistakes.mistake import Mistake, computing
from attend.check.weights import QKV, QUERY_GATE
from attend.tensors import Array


def reorder_rows(names: Sequence[str], order: Callable[[Array], Array]) -> Change:
    """Puts the rows of these projections into another order within each head: `order` of 0, 1, …, d - 1."""

    def changed(c: Computation) -> Mapping[str, Array]:
        made: dict[str, Array] = {}
        for name, w in c.weights.items():
            role, _, kind = name.partition(".")
            if role not in names or kind not in ("weight", "bias") or c.spec.latent:
                continue
            width = c.spec.value_head_dim if role == "value" else c.spec.head_dim
            if len(w) % width or width % 2:
                continue
            made[name] = w.reshape(-1, width, *w.shape[1:])[:, order(np.arange(width))].reshape(w.shape)
        return made

    return replace_weights(changed)


ROW_ORDERS: dict[str, Callable[[Array], Array]] = {  # of 0, 1, …, d - 1
    "0, d/2, 1, d/2 + 1, …": lambda rows: rows.reshape(2, -1).T.ravel(),
    "0, 2, 4, …, 1, 3, 5, …": lambda rows: rows.reshape(-1, 2).T.ravel(),
    "d/2, …, d - 1, 0, …, d/2 - 1": lambda rows: np.roll(rows, len(rows) // 2),
    "d - 1, …, 1, 0": lambda rows: rows[::-1],
}
MISTAKES: dict[str, dict[str, Mistake]] = {
    "weights": {
        "every matrix is applied the other way round (x @ W against x @ W.T, see orientation)": Mistake(
            map_weights(("query.weight", "key.weight", "value.weight", "output.weight"), np.transpose), "x Wᵀ + b", "x W + b"
        ),
    }
    | {
        f"the matrices of query, key, value are taken to be those of {', '.join(order)}": Mistake(
            swap_weights(QKV, order), f"Q, K, V = x {', x '.join(f'W_{role[0]}' for role in order)}", "Q, K, V = x W_q, x W_k, x W_v"
        )
        for order in permutations(QKV)
        if order != QKV
    },
    "order": {
        "one matrix for query, key and value is cut as [3, h, d] and not as [h, 3, d] (see fused)": Mistake(
            repack(QKV, "q,k,v", "per_head"), "qkv[b, n, 3·h·d] -> [b, n, 3, h, d]", "qkv[b, n, 3·h·d] -> [b, n, h, 3, d]"
        ),
        "one matrix for query, key and value is cut as [h, 3, d] and not as [3, h, d] (see fused)": Mistake(
            repack(QKV, "per_head", "q,k,v"), "qkv[b, n, 3·h·d] -> [b, n, h, 3, d]", "qkv[b, n, 3·h·d] -> [b, n, 3, h, d]"
        ),
    },
    "biases": {
        "the biases are left out": Mistake(map_weights(".bias", np.zeros_like), "x W", "x W + b"),
        "the biases of query, key and value are left out": Mistake(
            map_weights(("query.bias", "key.bias", "value.bias"), np.zeros_like), "Q, K, V = x W", "Q, K, V = x W + b"
        ),
    },
    "rows": {
        f"the rows of the matrix of {' and '.join(names)} are in the order {words} within each head": Mistake(
            reorder_rows(names, order), f"rows {words}", "rows 0, 1, 2, …, d - 1"
        )
        for words, order in ROW_ORDERS.items()
        for names in (("query",), ("key",), ("query", "key"))
    },
    "inputs": {
        "key and value are exchanged": Mistake(
            lambda c: replace(c, case=replace(c.case, key=c.case.value, value=c.case.key)),
            "K = x_v W_k + b_k, V = x_k W_v + b_v",
            "K = x_k W_k + b_k, V = x_v W_v + b_v",
        )
    },
    "number of keys": computing(
        "softmax(S) V over all k keys",
        {
            "the keys after the first q are left out, where q is the number of queries": (
                "softmax(S) V over the first q keys",
                only_if(
                    lambda c: c.case.key.shape[1] > c.case.query.shape[1],
                    lambda c: replace(c, case=with_input(c.case, "key", c.case.key[:, : c.case.query.shape[1]])),
                ),
            ),
            "the scores of the keys after the first q stay 0, where q is the number of queries": (
                "S_ij = 0 for j ≥ q",
                only_if(
                    lambda c: c.case.key.shape[1] > c.case.query.shape[1],
                    change_softmax(
                        lambda c, softmax, scores, sinks: softmax(
                            np.where(np.arange(scores.shape[-1]) < scores.shape[-2], scores, 0.0), sinks
                        )
                    ),
                ),
            ),
        },
    ),
    "gate": {
        "the halves of one matrix for query and gate are swapped": Mistake(
            swap_weights(QUERY_GATE, QUERY_GATE[::-1]), "gate, query = x W", "query, gate = x W"
        ),
        "one matrix for query and gate is cut as [2, h, d] and not as [h, 2, d] (see fused)": Mistake(
            repack(QUERY_GATE, "q,k,v", "per_head"), "[b, n, 2·h·d] -> [b, n, 2, h, d]", "[b, n, 2·h·d] -> [b, n, h, 2, d]"
        ),
        "one matrix for query and gate is cut as [h, 2, d] and not as [2, h, d] (see fused)": Mistake(
            repack(QUERY_GATE, "per_head", "q,k,v"), "[b, n, 2·h·d] -> [b, n, h, 2, d]", "[b, n, 2·h·d] -> [b, n, 2, h, d]"
        ),
    },
}
