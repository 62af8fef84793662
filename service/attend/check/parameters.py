"""Cases that pass each further parameter of a candidate a value that changes the result, alone and beside masks.

What such a value does is known from the parameter's role: the reference computes the layer with it. A candidate that ignores the value
returns the numbers of a call without it, and so disagrees. One that raises has refused the value, which is no disagreement: the parameter
then counts as not tried.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations
from operator import and_
from typing import Any

import numpy as np

from attend.check.cases import LARGEST, CaseKind, CheckCase, Draw
from attend.check.convention import Alignment
from attend.spec_parts import Window
from attend.tensors import Array


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of a parameter, and what it changes: fields of the layer, or the causality of the call."""

    words: str
    passed: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    causal: bool = False

    def __and__(self, other: "Setting") -> "Setting":
        """Both values in one call."""
        words = f"{self.words}{' and ' if ' with ' in self.words else ' with '}{other.words}"
        return Setting(words, {**self.passed, **other.passed}, {**self.fields, **other.fields}, self.causal or other.causal)

    @property
    def holds_for_one_query(self) -> bool:
        """Whether what it changes is the same wherever a single query is among many keys, and a call may have one."""
        return not self.causal and self.passed.keys().isdisjoint({"window", "page_table"})

    @property
    def of_case(self) -> dict[str, Any]:
        """The fields of a case with this value."""
        return {"group": "parameters", "passed": self.passed, "fields": self.fields} | ({"causal": True} if self.causal else {})


def draw_parameter_cases(
    draw: Draw,
    names: Mapping[str, str],
    mask_of: Mapping[CaseKind, str],
    *,
    is_torch: bool,
    adds_numbers: bool,
    decodes: bool,
    aligned: Alignment | None,
) -> Iterator[CheckCase]:
    """The cases for these parameters (role -> name), where `mask_of` has the roles of those that take the masks of each kind of case.

    `is_torch`: the candidate is torch's own, whose masks and causality exclude each other. `adds_numbers`: it is known that a mask may be
    any numbers, which are added to the scores. `decodes`: the candidate has a cache. `aligned`: where queries are known to be if there are
    more keys. If the last is at the last key, lengths of keys move the queries of a causal call.
    """
    queries, key_0, moves = draw.queries, np.arange(draw.queries) == 0, aligned == "bottom-right"
    with_key_0 = draw.mask(queries) | key_0  # so that a row has a key, whatever else is blocked
    masks: tuple[tuple[CaseKind, str, Array], ...] = (
        ("causal", "a causal mask", np.tri(queries, dtype=bool)),  # as a hint to torch.nn.MultiheadAttention, which needs both
        ("mask", "a mask", with_key_0),
        ("padding", "padded keys", draw.padding()),
    )
    settings = [*draw_settings(draw, names)]
    for setting in settings:
        more = setting.of_case
        yield draw.case(setting.words, "plain", queries, **more)
        for kind, words, mask in masks:
            excludes = setting.causal and mask_of.get(kind) == "mask"
            if moves and mask_of.get(kind) == "lengths" and (setting.causal or "window" in setting.passed):
                if setting.causal:
                    yield _moved(draw, f"{setting.words} with {names['lengths']}", more)
                continue
            if kind in mask_of and (setting.causal or kind != "causal") and not (excludes and is_torch and kind != "causal"):
                yield draw.case(f"{setting.words} with {words}", kind, queries, mask, undefined=excludes, **more)
        if setting.causal and mask_of.get("segments") in ("segments", "boundaries"):
            segments = draw.segments()
            apart = segments[:, :, None] == segments[:, None, :]
            yield replace(draw.case(f"{setting.words} with packed sequences", "segments", queries, apart, **more), segments=segments)
    for together in together_in_sets(settings):
        yield draw.case(together.words, "plain", queries, **together.of_case)
    for setting in _other_windows(draw, names):
        yield draw.case(setting.words, "plain", queries, **setting.of_case)
    if draw.keys_apart:
        yield from _of_one_query(draw, settings, mask_of)
    if aligned is not None:
        yield from draw_aligned(draw, names, mask_of, aligned)
    if decodes and draw.causal and mask_of.get("padding") in ("mask", "padding") and "padding" not in draw.masks_alone:
        padded = draw.case("decoding with a padded key", "padding", queries, np.arange(queries) != 1, group="parameters")
        yield replace(padded, chunks=(2, 1, queries - 3))
    yield from _masks_beside(draw, names, mask_of, with_key_0)
    if "mask" in mask_of and not (draw.spec.normalises_heads or draw.spec.softcap):
        yield draw.case("large logits with a mask", "mask", queries, with_key_0, largest=LARGEST, group="parameters")
    if "key_boundaries" in names and mask_of.get("segments") == "boundaries" and not draw.spec.positional and not draw.causal:
        yield _one_without_queries(draw)
    if "numbers" in mask_of:
        numbers = draw.rng.uniform(-2, 2, (draw.items("numbers"), queries, queries))
        numbers = np.broadcast_to(numbers, (draw.batch, queries, queries))
        yield draw.case("mask of numbers", "numbers", queries, numbers=numbers, group="parameters", undefined=not adds_numbers)
    if "return_weights" in names:
        of_case: dict[str, Any] = {"group": "parameters", "passed": {"return_weights": False}}
        yield draw.case("weights not returned", "plain", queries, **of_case)
        for kind, words, mask in masks[1:]:
            if kind in mask_of:
                yield draw.case(f"weights not returned with {words}", kind, queries, mask, **of_case)
    if "padding" in mask_of:  # one of which the first mask of this shape is kept shows
        padded = draw.case("other padded keys", "padding", queries, draw.padding(shorter=1), group="parameters")
        yield from [] if padded.reference(draw.spec, draw.weights).fully_masked_rows else [padded]
    if {"return_weights", "average"} <= names.keys():
        yield draw.case("averaged weights", "plain", queries, group="parameters", passed={"average": True})


def draw_aligned(draw: Draw, names: Mapping[str, str], mask_of: Mapping[CaseKind, str], aligned: Alignment) -> Iterator[CheckCase]:
    """Calls with more keys than queries whose numbers depend on where the queries are: with a window, by itself and beside causality, of
    one query, too, and with causality of packed sequences."""
    if "key" not in draw.inputs or draw.one_length:
        return
    settings, keys = [*draw_settings(draw, names)], draw.lengths.whole(2 * draw.queries + 1)
    causal = [x for x in settings if x.causal]
    for setting in (x for x in settings if "window" in x.passed):
        for each in (setting, *(x & setting for x in causal)):
            for queries in (draw.queries, 1):
                words = f"{queries} queries" if queries > 1 else "1 query"
                of_case = each.of_case | {"query_offset": keys - queries if aligned == "bottom-right" else 0, "is_optional": queries == 1}
                yield draw.case(f"{each.words}, {words}, {keys} keys", "plain", keys, queries=queries, **of_case)
    if mask_of.get("segments") in ("segments", "boundaries") and "key_boundaries" in names:
        for setting in causal:
            name = f"{setting.words} with packed sequences and other lengths of keys"
            yield _packed(draw, name, setting.of_case, aligned)


def _of_one_query(draw: Draw, settings: Sequence[Setting], mask_of: Mapping[CaseKind, str]) -> Iterator[CheckCase]:
    """Calls with one query, for which many have a path of its own, with a value of each parameter and with masks."""
    of_case: dict[str, Any] = {"queries": 1, "group": "parameters", "is_optional": True}
    keys = draw.lengths.keys
    for setting in settings:
        if setting.holds_for_one_query:
            yield draw.case(f"{setting.words}, 1 query", "plain", keys, **setting.of_case | of_case)
    if "mask" in mask_of:
        mask = draw.rng.random((draw.items("mask"), 1, keys)) < 0.5
        yield draw.case("mask, 1 query", "mask", keys, mask | (np.arange(keys) == 1), **of_case)
    if "padding" in mask_of:
        lengths = keys - 2 - np.arange(draw.items("padding")) % 2
        yield draw.case("padded keys, 1 query", "padding", keys, np.arange(keys) < lengths[:, None, None], **of_case)


def with_masks_of_heads(draw: Draw, name: str, **more: Any) -> CheckCase:
    """A call with masks [b, h, q, k], which a candidate may refuse."""
    case = draw.case(name, "mask", draw.queries, **more)
    masks = draw.rng.random((draw.batch, draw.spec.num_heads, draw.queries, draw.queries)) < 0.5
    masks |= np.eye(draw.queries, dtype=bool)
    return replace(case, mask=masks, visible=masks & case.own[:, None])


def _moved(draw: Draw, name: str, more: Mapping[str, Any]) -> CheckCase:
    """A causal call with more keys than queries, of which each item has its own number: its last query is at the last of them."""
    keys = draw.lengths.whole(2 * draw.queries + 1)
    lengths = keys - 1 - np.arange(draw.batch)[:, None, None] % draw.queries
    case = draw.case(name, "padding", keys, np.arange(keys) < lengths, **{**more, "causal": False})
    ends = lengths - draw.queries + np.arange(draw.queries)[:, None]
    return replace(case, visible=np.arange(keys) <= ends)


def _packed(draw: Draw, name: str, more: Mapping[str, Any], aligned: Alignment) -> CheckCase:
    """A causal call with packed sequences, each of which has another number of keys more than queries."""
    queries, keys = draw.segments(), draw.lengths.whole(2 * draw.queries + 1)
    share = np.arange(1, keys - draw.queries + 1) / (keys - draw.queries)
    more_keys = np.ceil(queries.max(axis=1, keepdims=True) * np.sqrt(share)).astype(int)  # a later sequence has more of them
    own = np.sort(np.concatenate((queries, more_keys), axis=1), axis=1)
    of_sequence = queries[:, :, None] == own[:, None, :]
    case = draw.case(name, "segments", keys, of_sequence, **{**more, "causal": False})
    if aligned == "bottom-right":
        visible = of_sequence & (_others(own, 1)[:, None, :] >= _others(queries, 1)[:, :, None])
    else:
        visible = of_sequence & (_others(own, -1)[:, None, :] <= _others(queries, -1)[:, :, None])
    return replace(case, visible=visible, segments=queries, key_segments=own)


def _one_without_queries(draw: Draw) -> CheckCase:
    """Three packed sequences, of which the second has keys and no queries."""
    queries, keys = 1 + 2 * (np.arange(draw.queries) * 2 // draw.queries), 1 + np.arange(draw.lengths.keys) * 3 // draw.lengths.keys
    of_items = [np.broadcast_to(x, (draw.batch, len(x))) for x in (queries, keys)]
    packed = draw.case("packed sequences, one without queries", "segments", len(keys), queries[:, None] == keys, group="parameters")
    return replace(packed, segments=of_items[0], key_segments=of_items[1])


def _others(segments: Array, direction: int) -> Array:
    """How many rows of its sequence are after each row, or before it, if the direction is -1: [b, n]."""
    same = segments[:, :, None] == segments[:, None, :]
    return np.asarray((np.triu(same, 1) if direction > 0 else np.tril(same, -1)).sum(axis=-1))


def together_in_sets(settings: Sequence[Setting]) -> Iterator[Setting]:
    """Each two of the values in one call, each three, and so on."""
    for count in range(2, len(settings) + 1):
        yield from (reduce(and_, chosen) for chosen in combinations(settings, count))


def draw_settings(draw: Draw, names: Mapping[str, str]) -> Iterator[Setting]:
    """A value for each parameter that changes the layer, and whether it makes the call causal."""
    spec = draw.spec
    if "causal" in names and not draw.causal:
        yield Setting(f"{names['causal']}=True", {"causal": True}, causal=True)
    if "scale" in names:
        scale = float(f"{0.6 * spec.scale:.3g}")
        yield Setting(f"{names['scale']}={scale:g}", {"scale": scale}, {"scale": scale})
    if "softcap" in names:
        softcap = 2.5 if spec.softcap is None else spec.softcap * 1.5
        yield Setting(f"{names['softcap']}={softcap:g}", {"softcap": softcap}, {"softcap": softcap})
    if "page_table" in names:
        yield Setting(names["page_table"], {"page_table": True})
    if "window" in names:
        yield _window(names["window"], 2, 0 if draw.causal else 1)


def _window(name: str, left: int | None, right: int | None) -> Setting:
    """A window of so many keys before and after the query's own; None for all."""
    sides = (-1 if left is None else left, -1 if right is None else right)
    return Setting(f"{name}={sides}", {"window": sides}, {"window": Window(left=left, right=right)})


def _other_windows(draw: Draw, names: Mapping[str, str]) -> Iterator[Setting]:
    """Windows that have an end on one side alone, or none after the query's own key."""
    if "window" in names:
        for left, right in ((2, None), *(() if draw.causal else ((None, 1), (2, 0)))):
            yield _window(names["window"], left, right)


def _masks_beside(draw: Draw, names: Mapping[str, str], mask_of: Mapping[CaseKind, str], mask: Array) -> Iterator[CheckCase]:
    """Padded keys by each parameter that takes them besides the first, and by each beside a mask over queries and keys."""
    padding = np.broadcast_to(draw.padding(), (draw.batch, draw.queries, draw.queries))
    roles = [role for role in ("padding", "lengths") if role in names]
    for i, role in enumerate(roles):
        passed = {role: padding}
        if i > 0:
            yield draw.case(f"padded keys by {names[role]}", "plain", draw.queries, beside=padding, group="parameters", passed=passed)
        if "mask" in mask_of:
            name = f"mask beside {names[role]}"
            yield draw.case(name, "mask", draw.queries, mask, beside=padding, group="parameters", passed=passed)
