"""A prepared candidate: how it is called, the spec and weights for the reference, and the cases that it is called on."""

import math
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, get_args

import numpy as np

from attend.check.adapter import Adapter
from attend.check.cases import (
    CaseKind,
    CheckCase,
    Draw,
    Group,
    Lengths,
    draw_long_cases,
    draw_one_row,
    draw_short_cases,
    lengths_for,
)
from attend.check.convention import ROPE_TABLES, Alignment, Convention
from attend.check.groups import draw_groups, draw_heads
from attend.check.lengths import Sweep, draw_sweeps
from attend.check.parameters import draw_aligned, draw_parameter_cases
from attend.check.rope_tables import rope_of
from attend.spec import LayerSpec
from attend.tensors import Array

GROUPS: tuple[Group, ...] = ("short", "parameters", "groups", "long")
OF_CALLS = (  # conventions of calls alone
    *("mask_means", "mask_shape", "mask_dtype", "mask_replaces_causality", "padding_means", "causal", "query_offset", "residual"),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """How to call a candidate, and the spec and weights for the reference."""

    adapter: Adapter
    spec: LayerSpec
    weights: Mapping[str, Array]  # canonical names
    module: Any  # the torch module, or None

    def called_by(self, convention: Convention) -> "Candidate":
        """The same candidate, called by a convention that differs in OF_CALLS alone."""
        of_calls = {name: getattr(convention, name) for name in OF_CALLS}
        return replace(self, adapter=replace(self.adapter, convention=replace(self.adapter.convention, **of_calls)))

    def draw_cases(self, seed: int, groups: Collection[Group] = GROUPS, lengths: Lengths | None = None) -> Iterator[CheckCase]:
        """The cases of these groups; the adapter cannot call the candidate on those with a `skip_reason`."""
        adapter, roles = self.adapter, self.adapter.roles
        draw = self.draw(seed, lengths)
        takes_back = not roles.keys().isdisjoint({"cache", "first_position"})
        decodes = takes_back or adapter.keeps_cache
        drawn = list[Iterator[CheckCase]]()
        if "short" in groups:
            drawn.append(draw_short_cases(draw, decodes=decodes, takes_back=takes_back, packs_keys="key_boundaries" in roles))
        if "parameters" in groups:
            more: dict[str, Any] = {
                "is_torch": adapter.is_torch,
                "adds_numbers": adapter.adds_numbers,
                "aligned": adapter.aligned,
                "decodes": decodes,
            }
            further = {role: name for role, name in roles.items() if not (adapter.paged and role == "page_table")}
            drawn.append(draw_parameter_cases(draw, further, self.mask_of, **more))
            if adapter.heads_given and adapter.framework in ("torch", "numpy"):  # whose views are no copies
                of_case: dict[str, Any] = {"group": "parameters", "views": True, "is_optional": True}
                drawn.append(iter([draw.case("inputs that are views", "plain", draw.queries, **of_case)]))
        if "groups" in groups and adapter.heads_given:
            over_pairs = adapter.mask_role("mask") is not None
            drawn.append(draw_groups(draw, roles, takes_masks=over_pairs))
        if "long" in groups:
            drawn.append(draw_long_cases(draw, decodes=decodes))
        if "one row" in groups:
            drawn.append(draw_one_row(draw))
        yield from map(self.as_passed, chain(*drawn))

    @property
    def mask_of(self) -> Mapping[CaseKind, str]:
        """The role of the parameter that takes the masks of each kind of case."""
        adds = self.adapter.adds_numbers or self.adapter.may_add_numbers
        roles = {kind: self.adapter.mask_role(kind) for kind in get_args(CaseKind) if kind != "numbers" or adds}
        return {kind: role for kind, role in roles.items() if role is not None and role != "causal"}

    def draw_aligned(self, seed: int, aligned: Alignment) -> Iterator[CheckCase]:
        """The calls whose numbers depend on where queries are if there are more keys, once that is known."""
        return map(self.as_passed, draw_aligned(self.draw(seed), self.adapter.roles, self.mask_of, aligned))

    def draw_sweeps(self, seed: int, longest: int) -> Iterator[Sweep]:
        """Calls of many lengths and widths, with at most `longest` rows."""
        adapter, longest = self.adapter, longest if "mask" not in self.adapter.required else 0
        over_pairs = adapter.mask_role("mask") is not None and not adapter.convention.takes_one_query
        takes = {"takes_heads": adapter.heads_given, "takes_masks": over_pairs}
        heads = (
            [draw_heads(self.draw(seed), adapter.roles, longest)] if adapter.heads_given and adapter.convention.layout != "b,n,d" else []
        )
        for sweep in (*draw_sweeps(self.draw(seed), adapter.roles, longest, **takes), *heads):
            yield replace(sweep, cases=tuple(map(self.as_passed, sweep.cases)))

    def lengths(self, *, larger: bool = False) -> Lengths:
        """Those of short cases (`lengths_for`)."""
        convention = self.adapter.convention
        return lengths_for(self.spec, batched=convention.batched, tile=convention.tile, larger=larger)

    def draw(self, seed: int, lengths: Lengths | None = None) -> Draw:
        """What draws the cases of this candidate."""
        roles, convention = self.adapter.roles.keys(), self.adapter.convention
        per_item = convention.mask_shape.startswith("b")
        masks: dict[CaseKind, bool] = {
            "mask": per_item,
            "numbers": per_item,
            "causal": False,
            "padding": per_item or bool(roles & {"padding", "lengths"}),
            "segments": per_item or "segments" in roles,
        }
        return Draw(
            spec=self.spec,
            weights=self.weights,
            rng=np.random.default_rng(seed),
            lengths=lengths or self.lengths(),
            dtype=self.adapter.dtype,
            causal=convention.causal,
            masks_alone=tuple(kind for kind in masks if convention.mask_replaces_causality and self.adapter.mask_role(kind) == "mask"),
            at_end=convention.query_offset == "end",
            one_length=convention.one_length,
            inputs=tuple(name for name in ("query", "key", "value") if name in roles),
            masks_per_item=tuple(kind for kind, differs in masks.items() if differs),
        )

    def as_passed(self, case: CheckCase) -> CheckCase:
        """The case with what each call has to pass: segments, fields of the layer that are no defaults; with one query if it takes one."""
        roles, spec = self.adapter.roles.keys(), case.layer(self.spec)
        if self.adapter.convention.takes_one_query:
            case = case.with_one_query(batched=self.adapter.convention.batched)
        one = np.ones(case.query.shape[:2], int) if case.segments is None else case.segments
        layer: dict[str, tuple[Any, bool]] = {  # role -> value, and whether it is usual
            "scale": (spec.scale, math.isclose(spec.scale, spec.head_dim**-0.5)),
            "softcap": (spec.softcap or 0.0, not spec.softcap),
            "window": (_sides(spec), not spec.window),
            "groups": (spec.num_kv_heads < spec.num_heads, spec.num_kv_heads == spec.num_heads),
        }
        needed = {role for role, (_, is_usual) in layer.items() if not is_usual} | self.adapter.required
        passed = {role: value for role, (value, _) in layer.items() if role in roles & needed} | dict(case.passed)
        if of_rope := roles & ROPE_TABLES:
            passed |= dict.fromkeys(of_rope, rope_of(spec))
        whole, rolled_back = (other and self.as_passed(other) for other in (case.whole, case.rolled_back))
        segments = one if roles & {"segments", "boundaries"} else None
        return replace(case, passed=passed, segments=segments, whole=whole, rolled_back=rolled_back)

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients during the `with` block; no effect unless the candidate is a module."""
        return evaluation_of(self.module)


def _sides(spec: LayerSpec) -> tuple[int, int]:
    """The window as FlashAttention takes it: keys before and after the query's own, -1 for all."""
    sides = (spec.window.left, spec.window.right) if spec.window else (None, None)
    left, right = (-1 if side is None else side for side in sides)
    return left, right


@contextmanager
def evaluation_of(module: Any) -> Iterator[None]:
    """Evaluation mode of a torch module, without gradients, during the `with` block; no effect without a module."""
    if module is None:
        yield
        return
    modes = [(part, part.training) for part in module.modules()]
    try:
        with sys.modules["torch"].no_grad():
            module.eval()
            yield
    finally:
        for part, training in modes:
            part.training = training
