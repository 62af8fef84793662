"""Mistakes in projections: in inputs, matrices and biases, and which of them are used."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np

from attend.check.changes import (
    Change,
    Impossible,
    change_softmax,
    map_weights,
    only_if,
    repack,
    replace_weights,
    swap_weights,
    use_heads_before_rope_of,
    use_heads_of,
    use_projection_of,
    with_input,
)
from attend.check.computation import Computation
from attend.check.mistakes.mistake import Mistake, computing
from attend.check.weights import QKV, QUERY_GATE
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array


def _identity(role: str, c: Computation) -> Mapping[str, Array]:
    """The weights of a projection that changes nothing; empty if its widths differ."""
    weight = c.weights.get(f"{role}.weight")
    if weight is None or weight.shape[0] != weight.shape[1]:
        return {}
    return {f"{role}.weight": np.eye(len(weight)), f"{role}.bias": np.zeros(1)}


def use_input_of(role: str, source: str) -> Change:
    """Projects the input of `source` as the `role`."""

    def change(c: Computation) -> Computation:
        x, y = getattr(c.case, role), getattr(c.case, source)
        if x is y or x.shape[-1] != y.shape[-1]:
            raise Impossible
        return replace(c, case=with_input(c.case, role, y))

    return change


def use_bias_of(role: str, source: str) -> Change:
    """Adds the bias of the projection `source` in place of that of the `role`. Impossible if one has none, or another width."""

    def changed(c: Computation) -> Mapping[str, Array]:
        right, other = c.weights.get(f"{role}.bias"), c.weights.get(f"{source}.bias")
        return {} if right is None or other is None or right.shape != other.shape else {f"{role}.bias": other}

    return replace_weights(changed)


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
SYMBOL = {"query": "Q", "key": "K", "value": "V", "output": "O"}


def _of(role: str) -> str:
    """The projection of an input or of the heads."""
    return f"{SYMBOL[role]} = {'concat(o)' if role == 'output' else f'x_{role[0]}'} W_{role[0]} + b_{role[0]}"


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
    }
    | {
        f"the bias of the {role} projection is left out": Mistake(
            map_weights(f"{role}.bias", np.zeros_like), _of(role).rpartition(" + ")[0], _of(role)
        )
        for role in PROJECTIONS
    }
    | {
        f"the bias of the {role} projection is subtracted and not added": Mistake(
            map_weights(f"{role}.bias", np.negative), _of(role).replace(" + ", " - "), _of(role)
        )
        for role in PROJECTIONS
    }
    | {
        f"the bias of the {source} projection is added to the projected {'heads' if role == 'output' else role}": Mistake(
            use_bias_of(role, source), _of(role).replace(f"b_{role[0]}", f"b_{source[0]}"), _of(role)
        )
        for role, source in permutations(PROJECTIONS, 2)
    },
    "rows": {
        f"the rows of the matrix of {' and '.join(names)} are in the order {words} within each head": Mistake(
            reorder_rows(names, order), f"rows {words}", "rows 0, 1, 2, …, d - 1"
        )
        for words, order in ROW_ORDERS.items()
        for names in (("query",), ("key",), ("query", "key"))
    },
    "projected": {
        f"the projected {source} is used in place of the projected {role}": Mistake(
            use_projection_of(role, source), f"{SYMBOL[source]} in place of {SYMBOL[role]}", _of(role)
        )
        for role, source in permutations(QKV, 2)
    }
    | {
        f"the {role} is not projected": Mistake(replace_weights(partial(_identity, role)), f"{SYMBOL[role]} = x_{role[0]}", _of(role))
        for role in QKV
    }
    | {
        f"the matrix of the {role} projection is applied the other way round (x @ W against x @ W.T)": Mistake(
            map_weights(f"{role}.weight", np.transpose), _of(role).replace(" + ", "ᵀ + "), _of(role)
        )
        for role in PROJECTIONS
    }
    | {
        f"the {role} is projected by the matrix of the {source}": Mistake(
            swap_weights((role,), (source,)), f"{SYMBOL[role]} = x_{role[0]} W_{source[0]} + b_{source[0]}", _of(role)
        )
        for role, source in permutations(QKV, 2)
    },
    "inputs": {
        "key and value are exchanged": Mistake(
            lambda c: replace(c, case=replace(c.case, key=c.case.value, value=c.case.key)),
            "K = x_v W_k + b_k, V = x_k W_v + b_v",
            "K = x_k W_k + b_k, V = x_v W_v + b_v",
        )
    }
    | {
        f"the {role} is projected from the input of the {source}": Mistake(
            use_input_of(role, source), _of(role).replace(f"x_{role[0]}", f"x_{source[0]}"), _of(role)
        )
        for role, source in permutations(QKV, 2)
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
    "attended": {
        f"the {source} as it is when scores are computed (after norms and RoPE) is used in place of the {role}": Mistake(
            use_heads_of(role, source),
            f"{SYMBOL[source]} after norms and RoPE in place of {SYMBOL[role]}",
            SYMBOL[role],
        )
        for role, source in permutations(QKV, 2)
    }
    | {
        f"the {source} as it is before RoPE (after its own norm, if any) is used in place of the {role}": Mistake(
            use_heads_before_rope_of(role, source), f"R {SYMBOL[source]} in place of R {SYMBOL[role]}", f"R {SYMBOL[role]}"
        )
        for role, source in permutations(QKV, 2)
        if role != "value"
    },
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
