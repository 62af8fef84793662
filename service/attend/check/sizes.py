"""A candidate in other sizes: heads, widths and lengths that all differ from each other and from before.

A name for a mistake that holds in one size may be a coincidence, since a number of heads may equal a width or a length. So a mistake is
named only if the candidate has it in other sizes too. A class is constructed anew, and a function gets other inputs; an instance keeps its
widths, and only lengths change.
"""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np

from attend.check.candidate import Candidate
from attend.check.cases import Lengths, lengths_for
from attend.check.constructor import CONFIGURATION, meaning_of
from attend.check.lengths import resized
from attend.check.preparation import prepare
from attend.check.tried import Tried
from attend.spec import LayerSpec

HEAD_COUNTS = (5, 7, 3, 4, 6, 8)  # of keys and values, those first that are likely to differ from all else
HEAD_DIMS = (10, 14, 6, 18, 22, 16, 32)  # even, for RoPE
TRIES = 4  # sizes in which a candidate is constructed, until it can be called
WIDEST = 200  # if the layer can be so narrow
LENGTHS = Lengths(batch=4, queries=11, keys=13)


def in_other_sizes(tried: Tried, given: Candidate) -> Candidate | None:
    """The candidate with other heads and widths, one that can be called; None if there is none, as for an instance."""
    candidate, convention = tried.candidate, tried.convention
    if convention.weights is not None and not convention.names_weights:
        return None  # arrays of one size
    if isinstance(candidate, type):
        names = [name for name in inspect.signature(candidate).parameters if name not in convention.construct]
        meanings = {convention.sizes.get(name) or meaning_of(name) for name in names}
        heads = {"num_heads"} & meanings
        if any(CONFIGURATION.fullmatch(name.lower()) for name in names):
            meanings, heads = {"d_model"}, {"num_heads"}
        if "d_model" not in meanings:
            return None
    elif given.adapter.heads_given or given.adapter.matrices:
        heads = {"heads"} if given.adapter.heads_given or "heads" in given.adapter.roles else set()
        heads = set() if convention.layout == "b,n,d" and given.adapter.heads_given else heads
    else:
        return None
    for other in other_specs(given.spec, tried.seed, keeps_heads=not heads):
        changed = replace(convention, d_model=other.d_model, num_heads=other.num_heads if heads else convention.num_heads)
        with suppress(Exception):  # a class may take some sizes alone
            made = prepare(candidate, tried.spec and other, changed, tried.seed + 1)
            made.adapter.call(next(made.draw_cases(tried.seed)))
            return made
    return None


def other_lengths(spec: LayerSpec, *, batched: bool, tile: int = 1) -> Lengths:
    """Lengths that differ from the usual ones, and from heads and widths, if they may."""
    if tile > 1:
        return lengths_for(spec, batched=batched, like=replace(LENGTHS, queries=tile + 1), tile=tile)
    lengths = lengths_for(spec, batched=batched, like=LENGTHS)
    taken = {spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.d_model, lengths.queries}
    return replace(lengths, keys=next(keys for keys in (13, 17, 19, 23, 29, 31) if keys not in taken))


def other_specs(spec: LayerSpec, seed: int, *, keeps_heads: bool) -> Iterator[LayerSpec]:
    """The layer in other sizes, at most TRIES."""
    group = spec.num_heads // spec.num_kv_heads
    kept = [spec.num_kv_heads] if keeps_heads else [heads for heads in HEAD_COUNTS if heads != spec.num_kv_heads]
    dims = [dim for dim in HEAD_DIMS if dim > spec.head_dim] or [spec.head_dim + 2, spec.head_dim + 6, spec.head_dim + 16]
    taken = {*(LENGTHS.batch, LENGTHS.queries, LENGTHS.keys)}
    sizes = [(kv, dim) for kv, dim in product(kept, dims) if len({kv, kv * group, dim, *taken}) == len({kv, kv * group}) + 1 + len(taken)]
    narrow = [(kv, dim) for kv, dim in sizes if kv * group * dim <= WIDEST]
    sizes = narrow or sizes
    drawn = [sizes[i] for i in np.random.default_rng(seed).permutation(len(sizes))]
    # Those first that are a power of 2 and some more: wrong slopes of ALiBi may be right in others.
    drawn.sort(key=lambda size: min(2, size[0] * group - 2 ** ((size[0] * group).bit_length() - 1)), reverse=True)
    found = 0
    usual = [(kv, dim) for kv in kept for dim in (16, 32, 64, 128) if dim > spec.head_dim or dim < 64]  # of what takes no others
    for kv, dim in (*drawn[:2], *usual[:2], *drawn[2:], *usual[2:]):
        with suppress(ValueError):
            yield resized(spec, kv * group, kv, dim)
            found += 1
        if found == TRIES:
            return
