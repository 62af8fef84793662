"""Functions that make a `Change` of a computation: of its spec, weights, mask, inputs or steps; and wrong ways to do a step.

Mistakes are made of such changes. The reference itself computes the changed call, so a mistake can be made in every kind of layer. Wrong
steps are methods in place of those of the reference's `Layer`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NoReturn

import numpy as np

from attend.attention.operators.step import Step
from attend.check.cases import CheckCase
from attend.check.computation import Computation
from attend.check.layer import Layer
from attend.check.weights import pack, split_packed
from attend.spec import LayerSpec
from attend.tensors import Array

Function = Callable[..., Any]
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


def change_scale(scale: Callable[[Computation], float]) -> Change:
    """Replaces the factor on the scores; Impossible if it is the same."""

    def change(c: Computation) -> Computation:
        changed = scale(c)
        if math.isclose(changed, c.scale):
            raise Impossible
        return c.with_scale(changed)

    return change


def change_part(name: str, **fields: Any) -> Change:
    """Replaces fields of a part of the spec, such as rope, where the layer has that part; by a value, or a function of the part."""

    def changed(spec: LayerSpec) -> Any:
        part = getattr(spec, name)
        return part and part.model_copy(update={field: x(part) if callable(x) else x for field, x in fields.items()})

    return change_spec(**{name: changed})


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


def with_input(case: CheckCase, role: str, x: Array) -> CheckCase:
    """The case with another query, key or value, which may have another number of rows.

    Of unequal numbers of keys and values, the first ones are used. More queries than masks attend to everything.
    """
    rows: dict[str, Any] = {role: x}
    changed = replace(case, **rows)
    queries, keys = changed.query.shape[1], min(changed.key.shape[1], changed.value.shape[1])
    visible = np.ones((len(x), queries, keys), bool)
    given = case.visible[:, :queries, :keys]
    visible[:, : given.shape[1], : given.shape[2]] = given
    return replace(changed, key=changed.key[:, :keys], value=changed.value[:, :keys], visible=visible)


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


def change_mask(changed: Callable[[Array], Array]) -> Change:
    """Replaces the mask that is passed: [b, q, k]. Impossible in a case without one."""

    def change(c: Computation) -> Computation:
        return _with_case(c, c.case.seeing(mask=changed(c.case.mask))) if not c.case.mask.all() else impossible()

    return change


def change_causality(changed: Callable[[Array], Array]) -> Change:
    """Replaces the candidate's own causal mask: [b, q, k]. Impossible for a candidate without one."""

    def change(c: Computation) -> Computation:
        return _with_case(c, c.case.seeing(own=changed(c.case.own))) if c.case.causal else impossible()

    return change


def _with_case(c: Computation, case: CheckCase) -> Computation:
    """The computation of another case. Impossible if the same keys are visible."""
    return replace(c, case=case) if not np.array_equal(case.visible, c.case.visible) else impossible()


def impossible() -> NoReturn:
    raise Impossible


UNMASK: Change = lambda c: replace(c, case=replace(c.case, visible=np.ones_like(c.case.visible)))  # noqa: E731  # as the other changes


def mask_everywhere(changed: Callable[[Array], Array]) -> Change:
    """Replaces the mask [b, q, k] also where all keys are visible."""
    return lambda c: replace(c, case=replace(c.case, visible=changed(c.case.visible)))


def replace_steps(**methods: Function) -> Change:
    """Replaces steps of the reference, which are methods of `Layer`."""
    return lambda c: replace(c, layer=type("Mistaken", (c.layer,), methods))


METHODS = {"scaled_products": "raw_scores", "softmax": "weights_of", "weighted_values": "apply_weights"}  # that compute these steps


def at_step(name: str, changed: Callable[..., Any]) -> Change:
    """Replaces what a step computes by `changed(compute, *operands)`, a function of what computes it, and of what it reads."""

    def change(c: Computation) -> Computation:
        def compute(layer: Layer, step: Step, reads: Sequence[Any]) -> Any:
            right = partial(c.layer.compute, layer, step)
            return changed(lambda *operands: right(operands), *reads) if step.name == name else right(reads)

        def method(layer: Layer, *operands: Any) -> Any:
            return changed(partial(getattr(c.layer, METHODS[name]), layer), *operands)

        return replace_steps(**({METHODS[name]: method} if name in METHODS else {"compute": compute}))(c)

    return change


def at_steps(names: Sequence[str], changed: Callable[..., Any]) -> Change:
    """The same of several steps."""
    return all_of(*(at_step(name, changed) for name in names))


def exchange_steps(first: str, second: str) -> Change:
    """Computes a step after a later one that changes the same value."""

    def change(c: Computation) -> Computation:
        moved: dict[str, Any] = {}

        def compute(layer: Layer, step: Step, reads: Sequence[Any]) -> Any:
            right = partial(c.layer.compute, layer)
            if step.name == first:
                moved.update(step=step, operands=reads[1:])
                return reads[0]
            return right(moved["step"], [right(step, reads), *moved["operands"]]) if step.name == second and moved else right(step, reads)

        return replace_steps(compute=compute)(c)

    return change


def at_heads(stage: str, changed: Callable[[Layer, Mapping[str, Array]], Mapping[str, Array]]) -> Change:
    """Replaces heads of roles at a stage of `Layer.heads_at`."""

    def change(c: Computation) -> Computation:
        def heads_at(layer: Layer, at: str, heads: Mapping[str, Array]) -> Mapping[str, Array]:
            right = c.layer.heads_at(layer, at, heads)
            return {**right, **changed(layer, right)} if at == stage else right

        return replace_steps(heads_at=heads_at)(c)

    return change


def change_softmax(weights: Callable[[Computation, Function, Array, Array | None], Array]) -> Change:
    """Replaces the softmax by `weights`, a function of the computation, the right softmax (scores, sinks) -> weights, scores and sinks."""

    def change(c: Computation) -> Computation:
        def weights_of(layer: Layer, scores: Array, sinks: Array | None) -> tuple[Array, Array]:
            return weights(c, lambda *args: c.layer.weights_of(layer, *args)[0], scores, sinks), scores[..., 0]

        return replace_steps(weights_of=weights_of)(c)

    return change


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


def softmax_over(axes: tuple[int, ...]) -> Change:
    """Takes the softmax over other axes of [b, h, q, k]. Where they have no visible element, the weights are NaN."""

    def weights(c: Computation, softmax: Function, scores: Array, sinks: Array | None) -> Array:
        exponentials = np.exp(scores - scores.max(axis=axes, keepdims=True))
        return np.asarray(exponentials / exponentials.sum(axis=axes, keepdims=True))

    return change_softmax(weights)
