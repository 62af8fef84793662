"""Calls of a function with heads in groups that share a key and a value, which it need not take."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from attend.check.cases import CheckCase, Draw
from attend.check.lengths import differing_fields, resized

HEADS, KEY_HEADS = 6, 3
IN_GROUPS = f"{HEADS} heads, {KEY_HEADS} of keys"  # the name of a case


def draw_groups(draw: Draw, roles: Mapping[str, str]) -> Iterator[CheckCase]:
    """The calls with several queries, with one, and with a causal flag, for a candidate with parameters of these roles (role -> name);
    none if its number of heads is fixed."""
    if draw.spec.num_heads != draw.spec.num_kv_heads or draw.weights or "heads" in roles:
        return
    try:
        spec = resized(draw.spec, HEADS, KEY_HEADS, draw.spec.head_dim)
    except ValueError:  # the layer cannot have groups
        return
    draw, fields = replace(draw, spec=spec), differing_fields(spec, draw.spec)
    passed = {"groups": True} if "groups" in roles else {}
    of_case: dict[str, Any] = {"group": "groups", "fields": fields, "is_optional": True}
    keys = draw.lengths.keys if draw.keys_apart else 0
    for queries in (draw.queries, 1) if keys else (draw.queries,):
        words = IN_GROUPS if queries > 1 else f"{IN_GROUPS}, 1 query"
        yield draw.case(words, "plain", keys or queries, queries=queries, passed=passed, **of_case)
    if "causal" in roles and not draw.causal:
        passed = {**passed, "causal": True}
        yield draw.case(f"{IN_GROUPS}, causal", "plain", draw.queries, causal=True, passed=passed, **of_case)
