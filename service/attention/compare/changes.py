"""`Computation`, a call of the reference, and functions that make a `Change` of one: of its spec, weights, mask, inputs or steps.

Mistakes are made of such changes. The reference itself computes the changed call, so a mistake can be made in every kind of layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from service.attention.compare.cases import CheckCase
from service.attention.compare.tolerance import tolerance
from service.attention.compare.weights import pack, split_packed
from service.attention.reference.forward import Layer
from service.attention.reference.request import Request
from service.spec import LayerSpec
from service.tensors import Array

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """The output and the weights of a computation, and how far a candidate's may be from them."""

    outputs: Mapping[str, Array]
    tolerances: Mapping[str, float]
    rows: Array  # [b, q], those that have a key: libraries differ in the others

    def agrees(self, name: str, got: Array) -> bool:
        """Whether an output of a candidate has these numbers, in rows that have a key."""
        expected = self.outputs[name]
        if got.shape != expected.shape:
            return False
        if not self.rows.all():  # [b, q, d], or [b, h, q, k] -> [b, q, h, k]
            got, expected = (np.moveaxis(x, -2, 1)[self.rows] for x in (got, expected))
        return np.allclose(got, expected, rtol=0, atol=self.tolerances[name], equal_nan=True)


@dataclass(frozen=True, slots=True)
class Computation:
    """A call of the reference."""

    spec: LayerSpec
    weights: Mapping[str, Array]
    case: CheckCase
    dtype: str = "float64"  # of the candidate: it decides where exp overflows, and the tolerance
    tolerance: float | None = None  # relative; None: by dtype
    average_weights: bool = False  # whether the weights are averaged over the heads
    added: Array | None = None  # [b, q, k], added to the scores
    layer: type[Layer] = Layer  # a subclass replaces steps
    residual: bool = False
    returned: str = "attention_weights"  # which output is compared with the weights

    @np.errstate(all="ignore")
    def run(self) -> Expected:
        """ValueError: shapes for which a change is impossible."""
        case = self.case
        mask = None if case.visible.all() else case.visible
        request = Request(query=case.query, key=case.key, value=case.value, attend_mask=mask, bias=self.added)
        result = self.layer(self.spec, self.weights).attend(request)
        weights = getattr(result, self.returned)
        outputs = {
            "output": result.output + case.query if self.residual else result.output,
            "attention_weights": weights.mean(axis=1) if self.average_weights else weights,
        }
        rows = np.ones(case.query.shape[:2], bool) if mask is None else np.logical_not(result.fully_masked.any(axis=1))
        norm, relative = self.spec.qk_norm is not None, self.tolerance
        tolerances = {name: tolerance(x, self.dtype, result.scores, norm=norm, relative=relative) for name, x in outputs.items()}
        return Expected(outputs, tolerances, rows)


Change = Callable[[Computation], Computation]  # raises Impossible, or ValueError for shapes that do not fit


class Impossible(ValueError):
    """The change would change nothing in this layer."""


def change_spec(**fields: Function) -> Change:
    """Replaces fields of the spec by the values of these functions of the spec."""

    def change(c: Computation) -> Computation:
        changed = {name: value(c.spec) for name, value in fields.items()}
        if all(getattr(c.spec, name) == value for name, value in changed.items()):
            raise Impossible
        return replace(c, spec=c.spec.model_copy(update=changed))

    return change


def change_part(name: str, **fields: Any) -> Change:
    """Replaces fields of a part of the spec, such as rope, where the layer has that part."""
    return change_spec(**{name: lambda spec: (part := getattr(spec, name)) and part.model_copy(update=fields)})


def replace_weights(changed: Callable[[Computation], Mapping[str, Array]]) -> Change:
    """Replaces weights by those that `changed` returns, by canonical name."""

    def change(c: Computation) -> Computation:
        if not (weights := changed(c)):
            raise Impossible
        return replace(c, weights={**c.weights, **weights})

    return change


def map_weights(ends: str | tuple[str, ...], changed: Callable[[Array], Array]) -> Change:
    """Applies a function to every weight whose name ends with `ends`."""
    return replace_weights(lambda c: {name: changed(w) for name, w in c.weights.items() if name.endswith(ends)})


def swap_weights(roles: Sequence[str], sources: Sequence[str]) -> Change:
    """Gives each role the weight and bias of the source at the same place: ("query", "gate") those of ("gate", "query")."""

    def changed(c: Computation) -> Mapping[str, Array]:
        if any(f"{role}.weight" not in c.weights for role in roles):
            return {}
        pairs = [(f"{role}.{kind}", f"{source}.{kind}") for role, source in zip(roles, sources, strict=True) for kind in ("weight", "bias")]
        return {name: c.weights.get(source, np.zeros(1)) for name, source in pairs}

    return replace_weights(changed)


def repack(roles: Sequence[str], order: str, other: str) -> Change:
    """Packs the rows of several weights in the order `other` and splits them as if they were in `order`."""

    def changed(c: Computation) -> Mapping[str, Array]:
        rows: dict[str, Array] = {}
        for kind in ("weight", "bias"):
            if all(f"{role}.{kind}" in c.weights for role in roles):
                packed = pack([c.weights[f"{role}.{kind}"] for role in roles], roles, c.spec, other)
                rows |= {f"{role}.{kind}": part for role, part in split_packed(roles, packed, c.spec, order).items()}
        return rows

    return replace_weights(changed)


def change_mask(changed: Callable[[Array, Array], Array]) -> Change:
    """Replaces the mask, from the one that is passed and the one with the candidate's own causality: [b, q, k]."""
    return lambda c: replace(c, case=replace(c.case, visible=changed(c.case.mask, c.case.visible)))


UNMASK = change_mask(lambda _, visible: np.ones_like(visible))


def add_mask(changed: Callable[[Array], Array]) -> Change:
    """Adds numbers made of the mask to the scores, and blocks nothing."""
    return lambda c: UNMASK(replace(c, added=changed(c.case.visible).astype(np.float64)))


def replace_steps(**methods: Function) -> Change:
    """Replaces steps of the reference, which are methods of `Layer`."""
    return lambda c: replace(c, layer=type("Mistaken", (c.layer,), methods))


def only_if(needed: Callable[[Computation], Any], change: Change) -> Change:
    """The change; Impossible unless `needed` is true of the computation."""

    def checked(c: Computation) -> Computation:
        if not needed(c):
            raise Impossible
        return change(c)

    return checked


def all_of(*changes: Change) -> Change:
    """The changes one after the other."""
    return lambda c: reduce(lambda changed, change: change(changed), changes, c)
