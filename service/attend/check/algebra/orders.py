"""Heads and masks in another order, heads of other groups, and heads that are split or merged in another order of axes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations

import numpy as np

from attend.check.algebra.steps import NOUNS
from attend.check.changes import all_of, at_heads, at_step, at_steps, change_mask, replace_steps
from attend.check.layer import CAUSES, Layer
from attend.check.mistakes.mistake import Mistake, Named
from attend.spec import LayerSpec
from attend.tensors import Array

Order = Callable[[int], Sequence[int]]
ORDERS: dict[str, tuple[str, Order]] = {  # words, a formula, and from a number of places what each of them has
    "each has that of the one before": ("i - 1", lambda n: np.roll(range(n), 1).tolist()),
    "each has that of the one after": ("i + 1", lambda n: np.roll(range(n), -1).tolist()),
    "they are in the reverse order": ("n - 1 - i", lambda n: range(n)[::-1]),
    "the first two are exchanged": ("1, 0, 2, …", lambda n: [1, 0, *range(2, n)]),
    "the last two are exchanged": ("…, n - 1, n - 2", lambda n: [*range(n - 2), n - 1, n - 2]),
}
SAME: dict[str, tuple[str, Order]] = {"first": ("0", lambda n: [0] * n), "last": ("n - 1", lambda n: [n - 1] * n)}  # for every place
WORDS = {"bhnd": "by a reshape without a transpose", "bndh": "with the head as the fastest axis"}


def changed_orders(spec: LayerSpec) -> Iterator[Named]:
    """The changes of the order of what steps of a layer write."""
    for words, (index, order) in (ORDERS | SAME).items():
        yield from _of_heads(spec, words, index, order)
        yield from _of_masks(words, index, order)
    if 1 < spec.num_kv_heads < spec.num_heads:
        yield from _of_groups()
    for axes in map("".join, permutations("bhnd")):
        if axes != "bnhd":
            yield from _of_axes(spec, axes, WORDS.get(axes, f"as [{', '.join(axes)}] and not as [b, n, h, d]"))


def _of_heads(spec: LayerSpec, words: str, index: str, order: Order) -> Iterator[Named]:
    """The heads of queries, of keys, of values, of all of them, or those that are merged, in another order.

    Of all of them is that of those that are merged, but for the weights.
    """

    def reordered(layer: Layer, heads: Mapping[str, Array], roles: Sequence[str]) -> Mapping[str, Array]:
        return {role: heads[role][:, order(heads[role].shape[1])] for role in roles}

    together = [("key", "value"), CAUSES] if words in SAME else [("key", "value")]
    for roles in (*((role,) for role in CAUSES), *together) if spec.num_kv_heads > 1 else [CAUSES[:1]]:
        of = " and ".join(NOUNS[role] for role in roles).replace(" and ", ", ", len(roles) - 2)
        name = f"every head uses the {of} of the {words} head" if words in SAME else f"the heads of the {of} are in another order: {words}"
        change = at_heads("projected", partial(reordered, roles=roles))
        yield name, Mistake(change, f"head i has the {of} of head {index}", f"head i has the {of} of head i", f"project_{roles[0]}")
    if words not in SAME:
        change = at_step("merge", lambda compute, heads: compute(heads[:, order(heads.shape[1])]))
        mistake = Mistake(change, f"concat(o), place i has o of head {index}", "concat(o), place i has o of head i", "merge")
        yield f"heads are merged in another order: {words}", mistake


def _in_order(order: Order, axis: int, mask: Array) -> Array:
    return np.take(mask, order(mask.shape[axis]), axis)


def _of_masks(words: str, index: str, order: Order) -> Iterator[Named]:
    """The masks of queries, or of the items of a batch, in another order."""
    for axis, of, several in ((1, "query", "queries"), (0, "item", "items")):
        change = change_mask(partial(_in_order, order, axis))
        mistake = Mistake(change, f"softmax(S + M) V, M of {of} i is that of {index}", f"softmax(S + M) V, M of {of} i", "mask")
        same, other = f"all {several} have the mask of the {words}", f"the masks of the {several} are in another order: {words}"
        yield same if words in SAME else other, mistake


def _of_groups() -> Iterator[Named]:
    """Query heads that use the keys and values of other groups."""

    def tiled(layer: Layer, heads: Mapping[str, Array], roles: Sequence[str]) -> Mapping[str, Array]:
        return {role: np.tile(heads[role], (1, layer.spec.num_heads // heads[role].shape[1], 1, 1)) for role in roles}

    def regrouped(layer: Layer, heads: Mapping[str, Array]) -> Mapping[str, Array]:
        order = np.arange(layer.spec.num_heads).reshape(-1, layer.spec.num_kv_heads).T.ravel()
        return {"query": heads["query"][:, order]}

    right = "query head i uses kv head i // (heads / kv_heads)"
    for roles in (("key", "value"), ("key",), ("value",)):
        words, change = " and ".join(NOUNS[role] for role in roles), at_heads("attended", partial(tiled, roles=roles))
        wrong = f"query head i uses the {words} of kv head i % kv_heads"
        step = "weighted_values" if roles == ("value",) else "scaled_products"
        yield f"query head i uses head i mod num_kv_heads of the {words}", Mistake(change, wrong, right, step)
    orders = ("query head [group, kv head]", "query head [kv head, group]")
    mistake = Mistake(at_heads("projected", regrouped), *orders, "project_query")
    yield "the heads of the queries are in the order [group, kv head] and not [kv head, group]", mistake


def _of_axes(spec: LayerSpec, axes: str, words: str) -> Iterator[Named]:
    """Heads split, before or after their norm, or merged in another order of axes than [b, n, h, d]; split only where items stay apart."""
    order = ", ".join(axes)
    split: Callable[..., Array] = lambda compute, *operands: _read(compute(*operands), axes)  # noqa: E731
    arithmetic = f"[b, n, h·d] -> [{order}] -> [b, h, n, d]", "[b, n, h·d] -> [b, n, h, d] -> [b, h, n, d]"
    is_normed = spec.qk_norm is not None and not spec.qk_norm.after_rope
    for roles in (*((role,) for role in CAUSES), CAUSES) if axes[0] == "b" else ():
        of = "" if len(roles) > 1 else f"the {NOUNS[roles[0]]}: "
        for verbs in ({}, dict.fromkeys(("query", "key"), "norm")) if is_normed and roles[0] != "value" else ({},):
            steps = [f"{verbs.get(role, 'project')}_{role}" for role in roles]
            name = f"{of}heads are split {words}{', after their norm' if verbs else ''}"
            yield name, Mistake(at_steps(steps, split), *arithmetic, steps[0])
    merged = replace_steps(merge_heads=lambda layer, heads: _merged(heads, axes))
    if axes[0] == "b":
        both = all_of(at_steps([f"project_{role}" for role in CAUSES], split), merged)
        and_back = Mistake(both, f"x[b, n, h·d] -> [{order}] and back", "x[b, n, h·d] -> [b, n, h, d] and back", "project_query")
        yield f"heads are both split and merged {words}", and_back
    merge = Mistake(merged, f"o[b, h, n, d] -> [{order}] -> [b, n, h·d]", "o[b, h, n, d] -> [b, n, h, d] -> [b, n, h·d]", "merge")
    yield f"heads are merged {words}", merge


def _read(heads: Array, axes: str) -> Array:
    """Heads [b, h, n, d], whose memory is [b, n, h, d], read as if it had another order of axes."""
    sizes = dict(zip("bhnd", heads.shape, strict=True))
    memory = heads.transpose(0, 2, 1, 3).reshape([sizes[axis] for axis in axes])
    return memory.transpose([axes.index(axis) for axis in "bhnd"])


def _merged(heads: Array, axes: str) -> Array:
    """Heads [b, h, n, d] transposed to this order of axes, and reshaped to [b, n, h·d]."""
    b, h, n, d = heads.shape
    return heads.transpose(["bhnd".index(axis) for axis in axes]).reshape(b, n, h * d)
