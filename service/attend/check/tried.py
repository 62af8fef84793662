"""Finds by calls what names and options of a candidate leave open, and says so."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attend.check.candidate import Candidate
from attend.check.convention import OF_MASKS, Convention
from attend.check.families import turns_few
from attend.check.mask_meaning import meanings_of_mask
from attend.check.positions import offset, one_length, positions_of
from attend.check.preparation import prepare
from attend.check.readings import read_by_calls
from attend.check.requirements import requirements_in_words
from attend.check.signatures import FUNCTIONS
from attend.check.trial import Trial
from attend.check.windows import window_in_words, with_window
from attend.spec import LayerSpec

WIDER = 4  # times as wide heads show its frequencies


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate, what is left of the conventions, what calls told, in words, and the layer: a given one, or one with positions."""

    candidate: Any
    seed: int
    convention: Convention
    found: tuple[str, ...]
    spec: LayerSpec | None
    is_given: bool  # whether the layer is

    @property
    def constructor(self) -> type | None:
        """The class, if no given layer says what its options are."""
        return self.candidate if isinstance(self.candidate, type) and not self.is_given else None

    def prepare(self, convention: Convention | None = None, *, further: int = 0, **fields: Any) -> Candidate:
        """The candidate; by another convention, with the layer with its window and these fields. `further`: another seed of its weights."""
        spec = self.spec
        if spec is not None and convention is not None:
            spec = LayerSpec.model_validate(with_window(spec, convention).model_dump(exclude_unset=True) | fields)
        return prepare(self.candidate, spec, convention or self.convention, self.seed + further)

    def but(self, found: str, **fields: Any) -> "Tried":
        """The same with other fields, and what was found about it."""
        return replace(self, found=(*self.found, found), **fields)

    def with_mask(self, role: str, meaning: tuple[Convention, str]) -> "Tried":
        """The same with the conventions of this mask, and what was found about it."""
        convention, words = meaning
        of_mask = {name: getattr(convention, name) for name in (*OF_MASKS[role], "arguments")}
        other = replace(self.convention, **of_mask)
        return self.but(words, convention=other) if words else replace(self, convention=other)


def try_conventions(candidate: Any, spec: LayerSpec | None, convention: Convention, seed: int, *, is_causal: bool = False) -> list[Tried]:
    """What calls tell about the convention; of several meanings of a mask that they leave open, the likeliest first.

    `is_causal`: so is the layer, and a candidate that nothing makes causal has to be. ValueError: no convention fits, and the message names
    the option that decides.
    """
    trial, is_given = Trial(candidate, spec, seed), spec is not None
    with np.errstate(all="ignore"):
        read, instead = read_by_calls(trial, convention)
        read = one_length(trial, offset(trial, read))
        positions = None
        if spec is None:
            read, positions = positions_of(trial, read)
        words = [*_words(convention, read), *([_instead(instead, read)] if instead else [])]
        if spec is None:
            found = trial.prepare(read).spec  # what it has by the names of its weights
            words += [f"it has {operator.summary(found)}" for operator in found.operators if operator.axes]
            words += [f"it has a softcap of {found.softcap:g}"] if found.softcap else []
            words += [window_in_words(read)] if read.window else []
        if positions is not None:
            name, spec = positions
            if (
                turns_few(spec)
                and isinstance(candidate, type)
                and (wide := convention.tried(d_model=WIDER * convention.d_model)) != convention
            ):
                with suppress(Exception):  # a class may take some sizes alone
                    return try_conventions(candidate, None, wide, seed, is_causal=is_causal)
            words, trial = [*words, f"it has {name}"], Trial(candidate, spec, seed)
        tried = [Tried(candidate, seed, read, tuple(words), spec, is_given)]
        for role in OF_MASKS:
            first, *others = tried
            meanings = meanings_of_mask(trial, role, first.convention)
            tried = [*(first.with_mask(role, x) for x in meanings), *(other.with_mask(role, meanings[0]) for other in others)]
        if is_causal and not {"mask", "causal"} & trial.prepare(read).adapter.roles.keys():
            tried = [replace(x, convention=x.convention.tried(causal=True)) for x in tried]
        return tried


def _instead(other: Convention, read: Convention) -> str:
    """What is said of a reading with fewer axes under which it would agree."""
    options = [] if other.layout == read.layout else [f"layout={other.layout}"]
    options += [] if other.batched == read.batched else ["batched=false"]
    return f"it would agree with {' and '.join(options)}, but it takes all axes and is compared with them"


def _words(before: Convention, after: Convention) -> Iterator[str]:
    """What was found, where it is not the default."""
    if after.causal and not before.causal:
        ends = {None: "", "start": ", query i at key i", "end": ", the last query at the last key"}
        yield f"it is always causal{ends[after.query_offset]}"
    if after.takes_one_query and not before.takes_one_query:
        yield (
            "it takes one query of each item, [b,h,d], and keys [b,n,h,d]"
            if after.batched
            else "it takes one query, [h,d], and keys [n,h,d]"
        )
    elif after.layout != before.layout:
        yield f"its axes are [{after.layout}]" + (
            f", not [{before.layout}] as those of {FUNCTIONS[after.like].title}" if after.like else ""
        )
    if after.batched != before.batched and not after.takes_one_query:
        yield "it takes one item, without a batch"
    if after.batch_first != before.batch_first and after.batch_first is not None:
        yield f"its inputs are {'[b, n, d_model]' if after.batch_first else '[n, b, d_model]'}"
    if after.fused != before.fused and after.fused is not None:
        rows = {"per_head": "[h, 3, d]", "per_number": "[d, 3, h]"}.get(after.fused, f"[3, h, d] of {after.fused}")
        yield f"rows of one matrix for query, key and value are {rows}"
    if after.orientation != before.orientation:
        yield f"its matrices are applied as x @ {'W' if after.orientation == 'in,out' else 'W.T'}"
    if after.paged:
        yield f"it gets pages of {after.page_size} keys in every call"
    if after.rope_tables != before.rope_tables:
        yield f"it gets cosines and sines [{after.rope_tables}]"
    if after.num_heads != before.num_heads:
        yield f"it has {after.num_heads} head{'s' if after.num_heads != 1 else ''}"
    if after.weights != before.weights:
        yield from (f"{name} is the weight of {role}" for role, name in (after.weights or {}).items())
    if after.left_out:
        yield f"its attention is compared without {' and '.join(after.left_out)}"
    if after.residual:
        yield "its input is added to the output"
    yield from requirements_in_words(before, after)
    yield from (f"{name} is {size}" for name, size in after.sizes.items())
    new = {name: role for name, role in after.arguments.items() if name not in before.arguments}
    yield from (f"it refuses {name}" if role == "unused" else f"{name} is the {role}" for name, role in new.items())
