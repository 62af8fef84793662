"""Calls of many lengths and widths, which a candidate gets if it agrees in the others.

Kernels compute in tiles of rows, and what is wrong at the edge of a tile shows only in calls that end just before it, at it, or just after
it. Lengths of queries and keys are therefore 1, and t - 1, t, t + 1 and 2t + 1 of tiles t of 16 to 256 rows, of queries and keys apart
where a candidate takes both. Long calls have more rows than a block of tiles, or than positions that bfloat16 can tell apart. Of those
whose queries are as many, the last alone are compared, so the reference stays fast.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attend.check.cases import CheckCase, Draw
from attend.check.parameters import draw_settings, together_in_sets, with_masks_of_heads
from attend.spec import LayerSpec
from attend.tensors import Array

TILES = (16, 32, 64, 128, 256)
LENGTHS = (1, *sorted({n for t in TILES for n in (t - 1, t, t + 1, 2 * t + 1)}))
FEW_QUERIES, FEW_KEYS = 7, 11  # of calls with many keys, and with many queries
OF_ONE_QUERY = (33, 129, 257, 513)  # keys of calls with one query, for which kernels split the keys
BOTH = ((129, 257), (257, 129))  # many queries and keys
CAUSAL = (65, 129, 257)  # rows of calls with a causal flag
ROWS_WITH_PARAMETERS = 193  # of calls with values of further parameters
LONGEST = 4097  # rows of the longest call, by default
LAST = 5  # rows of queries of it that are compared, if it has as many queries as keys
WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))  # of heads of queries and keys, and of values
DERIVED = ("head_dim", "value_head_dim", "key_dim", "value_dim", "output_dim", "scale")
POSITIONS = (2048, 32768)  # from which positions count, where they are an argument


@dataclass(frozen=True, slots=True)
class Sweep:
    """Cases that are reported together."""

    name: str
    cases: tuple[CheckCase, ...]


def draw_sweeps(draw: Draw, roles: Mapping[str, str], longest: int, *, takes_heads: bool, takes_masks: bool) -> Iterator[Sweep]:
    """The sweeps for a candidate with parameters of these roles (role -> name); `takes_heads`: as many as it is given, of any width;
    `takes_masks`: over queries and keys."""
    lengths = sorted({rows for n in LENGTHS if (rows := draw.lengths.whole(n)) <= longest})
    longest = longest // draw.lengths.tile * draw.lengths.tile
    if longest >= TILES[0] and all(extent.negative for extent in draw.spec.extents):  # else the number of rows is fixed
        yield Sweep("lengths", (*_of_lengths(draw, roles, lengths),))
        if longest > LENGTHS[-1] and draw.keys_apart:
            yield Sweep("many keys or queries", (*_long_apart(draw, longest, takes_masks=takes_masks),))
        elif longest > LENGTHS[-1]:
            yield Sweep("last rows of a long call", (_long_together(draw, longest, decodes="cache" in roles or "first_position" in roles),))
        if longest >= ROWS_WITH_PARAMETERS:
            yield Sweep("parameters in long calls", (*_long_settings(draw, roles, takes_masks=takes_masks),))
    if takes_heads:
        yield Sweep("widths of heads", (*_wide(draw),))
        if takes_masks:
            yield Sweep("masks of each head", (with_masks_of_heads(draw, "masks of each head", group="groups", is_optional=True),))
    if "positions" in roles and draw.spec.rope:
        yield Sweep("distant positions", (*_distant(draw),))
        if draw.batch > 1:
            yield Sweep("positions of each item", (_with_positions_of_items(draw),))


def _of_lengths(draw: Draw, roles: Collection[str], lengths: Sequence[int]) -> Iterator[CheckCase]:
    """As many queries as keys, of every length; or every length of keys with few queries, of queries with few keys, and some of both. Then
    calls with a causal flag, if there is one. All are rows of one large case."""
    whole = draw.case("", "plain", lengths[-1], queries=lengths[-1], batch=1, group="lengths")
    few = [(FEW_QUERIES, n) for n in lengths] + [(1, n) for n in OF_ONE_QUERY] + [(n, FEW_KEYS) for n in lengths]
    pairs = [*few, *BOTH] if draw.keys_apart else [(n, n) for n in lengths]
    pairs = [(draw.lengths.whole(queries), draw.lengths.whole(keys)) for queries, keys in pairs]
    yield from (_rows(whole, *pair) for pair in dict.fromkeys(pairs) if max(pair) <= lengths[-1])
    for n in map(draw.lengths.whole, CAUSAL if "causal" in roles and not draw.causal else ()):
        if n <= lengths[-1]:
            yield replace(_rows(whole, n, n), name=f"{n} keys, causal", causal=True, passed={"causal": True}).seeing()


def _rows(case: CheckCase, queries: int, keys: int) -> CheckCase:
    """The first rows of a case alone."""
    of_keys = f"{keys} keys" if keys > 1 else "1 key"
    name = of_keys if queries == keys else f"{queries} {'queries' if queries > 1 else 'query'}, {of_keys}"
    mask = np.ones((1, queries, keys), bool)
    rows: dict[str, Any] = {"query": case.query[:, :queries], "key": case.key[:, :keys], "value": case.value[:, :keys]}
    return replace(case, name=name, mask=mask, visible=mask, **rows).seeing()


def _long_settings(draw: Draw, roles: Mapping[str, str], *, takes_masks: bool) -> Iterator[CheckCase]:
    """Calls of more rows than tiles hold, with a value of each parameter and all sets of them, and with a mask."""
    settings = [*draw_settings(draw, roles)]
    rows = draw.lengths.whole(ROWS_WITH_PARAMETERS)
    for setting in (*settings, *together_in_sets(settings)):
        more = setting.of_case | {"group": "lengths", "queries": rows, "batch": 1}
        yield draw.case(f"{rows} keys, {setting.words}", "plain", rows, **more)
    if takes_masks:
        yield draw.case(f"{rows} keys, mask", "mask", rows, _long_mask(draw, rows, rows), queries=rows, batch=1, group="lengths")


def _long_apart(draw: Draw, longest: int, *, takes_masks: bool) -> Iterator[CheckCase]:
    """Many keys with few queries, and many queries with few keys; with a mask, too."""
    for queries, keys in ((draw.lengths.whole(LAST), longest), (longest, draw.lengths.whole(LAST))):
        of_case: dict[str, Any] = {"queries": queries, "batch": 1, "group": "lengths"}
        name = f"{queries} queries, {keys} keys"
        yield draw.case(name, "plain", keys, **of_case)
        if takes_masks:
            yield draw.case(f"{name}, mask", "mask", keys, _long_mask(draw, queries, keys), **of_case)


def _long_mask(draw: Draw, queries: int, keys: int) -> Array:
    """A random mask [q, k] in which each query sees the first key."""
    return np.asarray((draw.rng.random((queries, keys)) < 0.5) | (np.arange(keys) == 0))


def _long_together(draw: Draw, rows: int, decodes: bool) -> CheckCase:
    """As many queries as keys, of which the last queries are compared; decoded after a long first call, if there is a cache."""
    last = draw.case(f"{rows} keys", "plain", rows, queries=LAST, batch=1, group="lengths", query_offset=rows - LAST)
    same_widths = last.query.shape[2] == last.key.shape[2]
    if "key" not in draw.inputs and same_widths:
        query = last.key
        last = replace(last, query=query[:, -LAST:])
    else:
        before = draw.rng.standard_normal((1, rows - LAST, last.query.shape[2])) * last.query.std()
        query = np.concatenate([before, last.query], axis=1)
    everything: Array = np.broadcast_to(np.ones((), bool), (1, rows, rows))
    chunks = (rows - LAST, 1, LAST - 1) if decodes and draw.causal else ()
    whole = replace(last, query=query, mask=everything, visible=everything, chunks=chunks, query_offset=0)
    return replace(last, whole=whole, relative=_of_angles(rows) if draw.spec.rope else 0.0)


def _wide(draw: Draw) -> Iterator[CheckCase]:
    """Heads of other widths."""
    for width, value_width in WIDTHS:
        try:
            spec = resized(draw.spec, draw.spec.num_heads, draw.spec.num_kv_heads, width)
            if width != value_width:
                spec = LayerSpec.model_validate(_fields(spec, DERIVED) | {"head_dim": width, "value_head_dim": value_width})
        except ValueError:  # the layer cannot have such heads
            continue
        name = f"heads of {width}" if width == value_width else f"heads of {width}/{value_width}"
        fields = differing_fields(spec, draw.spec)
        keys = draw.lengths.keys if draw.keys_apart else draw.queries
        yield replace(draw, spec=spec).case(name, "plain", keys, group="widths", fields=fields, is_optional=True)


def differing_fields(spec: LayerSpec, other: LayerSpec) -> dict[str, Any]:
    """The fields in which two layers differ."""
    return {name: getattr(spec, name) for name in LayerSpec.model_fields if getattr(spec, name) != getattr(other, name)}


def _distant(draw: Draw) -> Iterator[CheckCase]:
    """Positions that are so large that few digits do not tell them apart. Only their differences change the numbers."""
    for first in POSITIONS:
        case = draw.case(f"positions from {first}", "plain", draw.queries, group="lengths")
        yield replace(case, first_row=first, relative=_of_angles(first))


def _with_positions_of_items(draw: Draw) -> CheckCase:
    """A call in which each item skips another number of positions, as with rows that are left out."""
    rows = np.arange(draw.queries)
    positions = rows + (rows >= draw.queries // 2) * np.arange(draw.batch)[:, None]
    return replace(draw.case("positions of each item", "plain", draw.queries, group="lengths", is_optional=True), positions=positions)


def _of_angles(position: int) -> float:
    """The relative error of scores that rounding the angles of RoPE to float32 makes, at a position."""
    return 2.0**-24 * position


def resized(spec: LayerSpec, heads: int, kv_heads: int, head_dim: int) -> LayerSpec:
    """The layer with these heads. ValueError: it cannot have them."""
    usual = LayerSpec.model_validate(_fields(spec, DERIVED) | {"head_dim": spec.head_dim})
    fields = _fields(spec, [name for name in DERIVED if getattr(spec, name) == getattr(usual, name) or name == "head_dim"])
    d_model = heads * head_dim if spec.d_model == spec.num_heads * spec.head_dim else spec.d_model + 2 * head_dim
    if spec.rope is not None:
        if spec.rope.dims == spec.head_dim:  # all of a head is rotated
            fields["rope"] = fields["rope"] | {"dims": head_dim}
        if spec.rope.scaling is not None:  # mscale multiplies the usual scale of any width
            fields["scale"] = spec.scale * (spec.head_dim / head_dim) ** 0.5
    if spec.value_head_dim != spec.head_dim:
        fields["value_head_dim"] = spec.value_head_dim + 2
    return LayerSpec.model_validate(fields | {"d_model": d_model, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim})


def is_known_in_others(spec: LayerSpec) -> bool:
    """Whether a layer is known in other sizes: what RoPE rotates of a head may be so many numbers or a share, and a scale of its own
    may be a number or depend on widths."""
    rotates_all = spec.rope is None or spec.rope.dims in (None, spec.head_dim)
    return rotates_all and spec.latent is None and any(math.isclose(spec.scale, usual) for usual in (1.0, spec.head_dim**-0.5))


def _fields(spec: LayerSpec, left_out: Any) -> dict[str, Any]:
    return {name: value for name, value in spec.model_dump(mode="json").items() if name not in left_out and value is not None}
