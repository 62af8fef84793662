"""Calls of a function with heads in groups that share a key and a value, and with many heads, which it need not take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attend.check.cases import CheckCase, Draw
from attend.check.lengths import OF_ONE_QUERY, ROWS_WITH_PARAMETERS, Sweep, differing_fields, resized
from attend.check.parameters import draw_settings, with_masks_of_heads

HEADS, KEY_HEADS = 6, 3
IN_GROUPS = f"{HEADS} heads, {KEY_HEADS} of keys"  # the name of a case
OTHER_HEADS, OTHER_KEY_HEADS = 12, 4  # of long calls
MANY_HEADS = 17


def draw_groups(draw: Draw, roles: Mapping[str, str], *, takes_masks: bool) -> Iterator[CheckCase]:
    """The calls with several queries and with one, with and without a value of each parameter (role -> name), and with masks if it
    `takes_masks` over queries and keys; none if its number of heads is fixed."""
    lengths = [(draw.queries, draw.lengths.keys), (1, draw.lengths.keys)] if draw.keys_apart else [(draw.queries, draw.queries)]
    yield from _of_heads(draw, roles, HEADS, KEY_HEADS, lengths, draw.queries, takes_masks=takes_masks)


def draw_heads(draw: Draw, roles: Mapping[str, str], longest: int) -> Sweep:
    """Many heads, and groups in calls of more rows than tiles hold."""
    rows, many = draw.lengths.whole(ROWS_WITH_PARAMETERS), draw.lengths.whole(OF_ONE_QUERY[-1])
    lengths = [(rows, rows), *([(1, many)] if draw.keys_apart and longest >= many else [])]
    cases = [*_of_heads(draw, roles, MANY_HEADS, MANY_HEADS, [(draw.queries, draw.queries)], 0)]
    if longest >= rows:
        cases += _of_heads(draw, roles, OTHER_HEADS, OTHER_KEY_HEADS, lengths, rows, batch=1)
    return Sweep("numbers of heads", tuple(cases))


def _of_heads(
    draw: Draw,
    roles: Mapping[str, str],
    heads: int,
    kv_heads: int,
    lengths: Sequence[tuple[int, int]],
    rows: int,
    takes_masks: bool = False,
    **more: Any,
) -> Iterator[CheckCase]:
    """Calls with so many heads of queries and of keys, and these numbers of queries and keys; with values of parameters, of so many
    `rows`."""
    if draw.spec.num_heads != draw.spec.num_kv_heads or draw.weights or "heads" in roles:
        return
    try:
        spec = resized(draw.spec, heads, kv_heads, draw.spec.head_dim)
    except ValueError:  # the layer cannot have them
        return
    draw, fields = replace(draw, spec=spec), differing_fields(spec, draw.spec)
    name = f"{heads} heads, {kv_heads} of keys" if kv_heads < heads else f"{heads} heads"
    passed = {"groups": True} if "groups" in roles and kv_heads < heads else {}
    of_case: dict[str, Any] = {"group": "groups", "fields": fields, "is_optional": True, **more}
    for queries, keys in lengths:
        words = ", 1 query" if queries == 1 else f", {keys} keys" if queries > draw.queries else ""
        yield draw.case(f"{name}{words}", "plain", keys, queries=queries, passed=passed, **of_case)
    for setting in draw_settings(draw, roles) if rows else ():
        both = {"passed": passed | dict(setting.passed), "fields": fields | dict(setting.fields)}
        of_setting = setting.of_case | of_case | both
        words = f", {rows} keys" if rows > draw.queries else ""
        yield draw.case(f"{name}{words}, {setting.words}", "plain", rows, **of_setting | {"queries": rows})
        if draw.keys_apart and setting.holds_for_one_query:
            yield draw.case(f"{name}, {setting.words}, 1 query", "plain", draw.lengths.keys, **of_setting | {"queries": 1})
    if takes_masks:
        yield with_masks_of_heads(draw, f"{name}, masks of each head", passed=passed, **of_case)
