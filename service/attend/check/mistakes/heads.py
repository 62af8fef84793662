"""Mistakes in splitting, merging, choosing and repeating heads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from attend.check.changes import (
    ANY_HEAD_COUNT,
    MERGE,
    SPLIT,
    Change,
    Function,
    Impossible,
    all_of,
    change_scale,
    only_if,
    replace_steps,
    select_heads,
    share_by_reshape,
    share_by_reshape_after_rope,
    share_with_first_head,
    split_and_merge,
    tile_kv_heads,
)
from attend.check.computation import Computation
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, attention, computing
from attend.check.weights import QKV
from attend.tensors import Array

ROW = "{x}[b, n, h·d] -> [b, n, h, d] -> [b, h, n, d]"
BACK = "o[b, h, n, d] -> [b, n, h, d] -> [b, n, h·d]"
WORDS = {"reshape": "by a reshape without a transpose", "head fastest": "with the head as the fastest axis"}
SPLITS = {"reshape": "{x}[b, n, h·d] -> [b, h, n, d]", "head fastest": "{x}[b, n, d·h] -> [b, n, d, h] -> [b, h, n, d]"}
MERGES = {"reshape": "o[b, h, n, d] -> [b, n, h·d]", "head fastest": "o[b, h, n, d] -> [b, n, d, h] -> [b, n, d·h]"}


def split_role(role: str, split: Function) -> Change:
    """Splits the query, key or value in this wrong way, and the others as they should be."""

    def project_heads(layer: Layer, name: str, x: Array) -> Array:
        heads = Layer.project_heads(layer, name, x)
        return split(layer, Layer.merge_heads(heads), heads.shape[1]) if name == role else heads

    return replace_steps(project_heads=project_heads)


def exchange_head_sizes(c: Computation) -> Computation:
    """Takes head_dim for the number of heads and the number of heads for head_dim, with the scale as it was."""
    spec = c.spec
    if spec.num_kv_heads != spec.num_heads or spec.head_dim != spec.value_head_dim or spec.positional or spec.qk_norm:
        raise Impossible
    sizes = {"num_heads": spec.head_dim, "num_kv_heads": spec.head_dim, "head_dim": spec.num_heads, "value_head_dim": spec.num_heads}
    return replace(c, spec=spec.model_copy(update=sizes))


def cut_columns(start: Callable[[int, int], int], stop: Callable[[int, int], int]) -> Change:
    """Cuts columns `start` to `stop` of each row for head h of width d; both are functions of h and d.

    What several heads write to one column is added.
    """

    def columns(layer: Layer, width: int, heads: int) -> Array:
        chosen = np.zeros((heads, 1, width))
        for h in range(heads):
            chosen[h, 0, start(h, width // heads) : stop(h, width // heads)] = 1
        return chosen

    return all_of(
        ANY_HEAD_COUNT,
        replace_steps(
            split_heads=lambda layer, x, h: x[:, None] * columns(layer, x.shape[-1], h),
            merge_heads=lambda layer, x: (x * columns(layer, x.shape[-1], x.shape[1])).sum(axis=1),
        ),
    )


COLUMNS = {  # of head h, and where they begin and stop
    "h to (h + 1) * d": (lambda h, d: h, lambda h, d: (h + 1) * d),
    "h * d to h + 1": (lambda h, d: h * d, lambda h, d: h + 1),
    "h * d to (h + 2) * d": (lambda h, d: h * d, lambda h, d: (h + 2) * d),
    "h * d to h * d: there are none": (lambda h, d: h * d, lambda h, d: h * d),
    "h * d to (h - 1) * d": (lambda h, d: h * d, lambda h, d: (h - 1) * d),
    "0 to (h + 1) * d": (lambda h, d: 0, lambda h, d: (h + 1) * d),
    "0 to d for every h": (lambda h, d: 0, lambda h, d: d),
}
Order = Callable[[int], Sequence[int]]
ORDERS: dict[str, tuple[str, Order]] = {  # of heads: words, and from a number of heads the head that each place has
    "each head {uses} that of the head before": ("h - 1", lambda n: np.roll(range(n), 1).tolist()),
    "each head {uses} that of the head after": ("h + 1", lambda n: np.roll(range(n), -1).tolist()),
    "the heads {are} in the reverse order": ("heads - 1 - h", lambda n: range(n)[::-1]),
    "the first two heads {are} exchanged": ("1, 0, 2, …", lambda n: [1, 0, *range(2, n)]),
    "the last two heads {are} exchanged": ("…, n - 1, n - 2", lambda n: [*range(n - 2), n - 1, n - 2]),
}


def reorder_heads(names: Sequence[str], order: Order) -> Change:
    """Puts the heads of queries, keys or values (`names`) in another order; of "output", those that are merged."""

    def project_heads(layer: Layer, name: str, x: Array) -> Array:
        heads = Layer.project_heads(layer, name, x)
        return heads[:, order(heads.shape[1])] if name in names else heads

    def merge_heads(layer: Layer, x: Array) -> Array:
        return Layer.merge_heads(x[:, order(x.shape[1])])

    changed = replace_steps(merge_heads=merge_heads) if "output" in names else replace_steps(project_heads=project_heads)
    return only_if(lambda c: c.spec.num_kv_heads > 1 or (set(names) <= {"query", "output"} and c.spec.num_heads > 1), changed)


def merge_transposed(order: str) -> Change:
    """Transposes the outputs of heads [b, h, n, d] to another order of axes than b, n, h, d, and reshapes them to [b, n, h·d]."""
    axes = tuple("bhnd".index(axis) for axis in order)

    def merge_heads(layer: Layer, x: Array) -> Array:
        b, h, n, d = x.shape
        return x.transpose(axes).reshape(b, n, h * d)

    return replace_steps(merge_heads=merge_heads)


OTHER_MERGES = [order for order in map("".join, permutations("bhnd")) if order not in ("bnhd", "bhnd", "bndh")]


def group_fastest(heads: int, kv_heads: int) -> Sequence[int]:
    """The order [group, kv head] of heads, where it should be [kv head, group]."""
    return np.arange(heads).reshape(-1, kv_heads).T.ravel().tolist()


def tile_heads_of(role: str) -> Change:
    """Repeats the heads of keys or values (`role`) in the order 0 1 0 1 …, and the others as they should be."""

    def project_heads(layer: Layer, name: str, x: Array) -> Array:
        heads = Layer.project_heads(layer, name, x)
        return tile_kv_heads(layer, heads) if name == role else heads

    return only_if(lambda c: 1 < c.spec.num_kv_heads < c.spec.num_heads, replace_steps(project_heads=project_heads))


def regroup(layer: Layer, name: str, x: Array) -> Array:
    """Takes the heads of the queries as [group, kv head]."""
    heads = Layer.project_heads(layer, name, x)
    return heads[:, group_fastest(layer.spec.num_heads, layer.spec.num_kv_heads)] if name == "query" else heads


MISTAKES: dict[str, dict[str, Mistake]] = {
    "split": computing(
        ROW.format(x="x"),
        {
            f"heads are split {WORDS[kind]}": (SPLITS[kind].format(x="x"), replace_steps(split_heads=SPLIT[kind]))
            for kind in ("reshape", "head fastest")
        },
    ),
    "split of one": {
        f"the {role} is split {WORDS[kind]}": Mistake(split_role(role, SPLIT[kind]), SPLITS[kind].format(x=role), ROW.format(x=role))
        for role in QKV
        for kind in ("reshape", "head fastest")
    },
    "merge": computing(
        BACK,
        {f"heads are merged {WORDS[kind]}": (MERGES[kind], replace_steps(merge_heads=MERGE[kind])) for kind in ("reshape", "head fastest")}
        | {
            f"heads are merged in another order: {words.format(are='are', uses='has')}": (f"concat(o) in the order {short}", change)
            for words, (short, order) in ORDERS.items()
            for change in [reorder_heads(("output",), order)]
        }
        | {
            f"heads are transposed to [{', '.join(order)}] and not to [b, n, h, d] before they are merged": (
                f"o[b, h, n, d] -> [{', '.join(order)}] -> [b, n, h·d]",
                merge_transposed(order),
            )
            for order in OTHER_MERGES
        },
    ),
    "split + merge": {
        "heads are both split and merged by a reshape without a transpose": Mistake(
            split_and_merge("reshape"), "x[b, n, h·d] -> [b, h, n, d] and back", "x[b, n, h·d] -> [b, n, h, d] -> [b, h, n, d] and back"
        ),
        "heads are split and merged with the head as the fastest axis": Mistake(
            split_and_merge("head fastest"), "x[b, n, d·h] -> [b, n, d, h] -> [b, h, n, d] and back", ROW.format(x="x") + " and back"
        ),
        "heads attend to each other at every position, since no transpose follows the split (see layout)": Mistake(
            all_of(ANY_HEAD_COUNT, split_and_merge("not transposed")), "x[b, n, h·d] -> [b, n, h, d]: attends over h", ROW.format(x="x")
        ),
        "the first axis is taken for the sequence and the second for the batch (see batch_first)": Mistake(
            split_and_merge("sequence first"), "x[n, b, h·d]", "x[b, n, h·d]"
        ),
    },
    "split + merge + scale": computing(
        "h heads of d numbers",
        {
            "the number of heads and their width are exchanged": ("d heads of h numbers", exchange_head_sizes),
            "the number of heads and their width are exchanged, also in the scale": (
                "d heads of h numbers, / √h",
                all_of(exchange_head_sizes, change_scale(lambda c: c.spec.head_dim**-0.5)),
            ),
        },
    )
    | computing(
        "head h: columns h * d to (h + 1) * d",
        {
            f"the columns of head h are {words}, and not h * d to (h + 1) * d": (f"head h: columns {words}", cut_columns(start, stop))
            for words, (start, stop) in COLUMNS.items()
        },
    ),
    "split + scale": {
        "there is only one head": Mistake(
            all_of(ANY_HEAD_COUNT, replace_steps(split_heads=lambda layer, x, h: x[:, None]), change_scale(lambda c: c.spec.d_model**-0.5)),
            attention("Q Kᵀ / √d_model") + ", rows of d_model numbers",
            attention() + " for each head",
        )
    },
    "groups": computing(
        "query head i uses kv head i // (heads / kv_heads)",
        {
            "query head i uses head i mod num_kv_heads of the keys": (
                "query head i uses kv head i % kv_heads",
                replace_steps(repeat_kv_heads=tile_kv_heads),
            ),
            "query head i uses head i mod num_kv_heads of the keys, and the right one of the values": (
                "K of kv head i % kv_heads, V of kv head i // (heads / kv_heads)",
                tile_heads_of("key"),
            ),
            "query head i uses head i mod num_kv_heads of the values, and the right one of the keys": (
                "V of kv head i % kv_heads, K of kv head i // (heads / kv_heads)",
                tile_heads_of("value"),
            ),
            "the heads of the queries are in the order [group, kv head] and not [kv head, group]": (
                "query head [group, kv head]",
                only_if(lambda c: 1 < c.spec.num_kv_heads < c.spec.num_heads, replace_steps(project_heads=regroup)),
            ),
        },
    ),
    "heads": {
        f"every head uses the {words} of the {which} head": Mistake(
            replace_steps(project_heads=select_heads(names, index)), f"the {words} of the {which} head in each", "head h uses its own"
        )
        for words, names in (("query", ("query",)), ("key", ("key",)), ("value", ("value",)), ("query, key and value", QKV))
        for which, index in (("first", 0), ("last", -1))
    }
    | {
        f"the {role} has another order of heads: {words.format(are='are', uses='has')}": Mistake(
            reorder_heads((role,), order), f"head h uses the {role} of head {short}", f"head h uses the {role} of head h"
        )
        for role in QKV
        for words, (short, order) in ORDERS.items()
    },
    "rotary part": {
        f"the rotary part of the keys is not shared across heads, but {words}": Mistake(
            only_if(lambda c: c.spec.latent, change), f"k_rope: {words}", "k_rope: the same in every head"
        )
        for words, change in (
            ("in the first head alone", replace_steps(share=share_with_first_head)),
            ("spread by a reshape without a transpose", replace_steps(share=share_by_reshape)),
            ("spread by a reshape without a transpose, after RoPE", replace_steps(rotate=share_by_reshape_after_rope)),
        )
    },
}
