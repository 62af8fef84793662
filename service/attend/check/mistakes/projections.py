"""Mistakes in projections and heads: in inputs, matrices and biases, and in how they are split."""

from dataclasses import replace
from itertools import permutations

import numpy as np

from attend.check.changes import Function, all_of, change_scale, map_weights, repack, replace_steps, swap_weights
from attend.check.mistakes.mistake import Mistake, attention
from attend.check.weights import QKV, QUERY_GATE

# Splits of [b, n, h*d] into heads, with merges of [b, h, n, d], that do not leave batch, rows and heads where they are.
UNTRANSPOSED: dict[str, Function] = {
    "split_heads": lambda layer, x, h: x.reshape(*x.shape[:2], h, -1),
    "merge_heads": lambda layer, x: x.reshape(*x.shape[:2], -1),
}
SEQUENCE_FIRST: dict[str, Function] = {
    "split_heads": lambda layer, x, h: x.reshape(*x.shape[:2], h, -1).transpose(1, 2, 0, 3),
    "merge_heads": lambda layer, x: x.transpose(2, 0, 1, 3).reshape(x.shape[2], len(x), -1),
}
# Needed by splits that change the number of heads: keys and values are not repeated, and heads have no biases of their own.
ANY_HEAD_COUNT = replace_steps(repeat_kv_heads=lambda layer, x, heads=0: x, position_bias=lambda layer: np.zeros((1, 1, 1, 1)))

MISTAKES: dict[str, Mistake] = {
    "heads attend to each other at every position, since no transpose follows the split (see layout)": Mistake(
        all_of(ANY_HEAD_COUNT, replace_steps(**UNTRANSPOSED)),
        "x[b, n, h·d] -> [b, n, h, d]: attends over h",
        "x[b, n, h·d] -> [b, n, h, d] -> [b, h, n, d]",
    ),
    "the first axis is taken for the sequence and the second for the batch (see batch_first)": Mistake(
        replace_steps(**SEQUENCE_FIRST), "x[n, b, h·d]", "x[b, n, h·d]"
    ),
    "there is only one head": Mistake(
        all_of(ANY_HEAD_COUNT, replace_steps(split_heads=lambda layer, x, h: x[:, None]), change_scale(lambda c: c.spec.d_model**-0.5)),
        attention("Q Kᵀ / √d_model") + ", rows of d_model numbers",
        attention() + " for each head",
    ),
    "every matrix is applied the other way round (x @ W against x @ W.T, see orientation)": Mistake(
        map_weights(("query.weight", "key.weight", "value.weight", "output.weight"), np.transpose), "x Wᵀ + b", "x W + b"
    ),
    **{
        f"the matrices of query, key, value are taken to be those of {', '.join(order)}": Mistake(
            swap_weights(QKV, order), f"Q, K, V = x {', x '.join(f'W_{role[0]}' for role in order)}", "Q, K, V = x W_q, x W_k, x W_v"
        )
        for order in permutations(QKV)
        if order != QKV
    },
    **{
        f"one matrix for {words} is cut as [{wrong}] and not as [{right}] (see fused)": Mistake(
            repack(roles, *orders), f"[b, n, {n}·h·d] -> [b, n, {wrong}]", f"[b, n, {n}·h·d] -> [b, n, {right}]"
        )
        for words, roles, n in (("query, key and value", QKV, 3), ("query and gate", QUERY_GATE, 2))
        for wrong, right, orders in (
            (f"{n}, h, d", f"h, {n}, d", ("q,k,v", "per_head")),
            (f"h, {n}, d", f"{n}, h, d", ("per_head", "q,k,v")),
        )
    },
    "the halves of one matrix for query and gate are swapped": Mistake(
        swap_weights(QUERY_GATE, QUERY_GATE[::-1]), "gate, query = x W", "query, gate = x W"
    ),
    "the biases are left out": Mistake(map_weights(".bias", np.zeros_like), "x W", "x W + b"),
    "the biases of query, key and value are left out": Mistake(
        map_weights(("query.bias", "key.bias", "value.bias"), np.zeros_like), "Q, K, V = x W", "Q, K, V = x W + b"
    ),
    "key and value are exchanged": Mistake(
        lambda c: replace(c, case=replace(c.case, key=c.case.value, value=c.case.key)),
        "K = x_v W_k + b_k, V = x_k W_v + b_v",
        "K = x_k W_k + b_k, V = x_v W_v + b_v",
    ),
}
