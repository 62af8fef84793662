"""Changes of a call of the reference, of which mistakes are made: of its spec, weights, mask, inputs, or of functions that it calls.

The reference then computes as ever, so a mistake can be made in every kind of layer.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from service.attention.compare.cases import CheckCase
from service.attention.compare.tolerance import tolerance
from service.attention.compare.weights import cut, pack
from service.attention.reference import forward
from service.spec import LayerSpec
from service.tensors import BY_TORCH, Array

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Result:
    """The output and the weights of a computation. `rows` [b, q] are those to compare: libraries differ in rows without a key."""

    outputs: Mapping[str, Array]
    tolerances: Mapping[str, float]
    rows: Array

    def agrees(self, name: str, got: Array) -> bool:
        """Whether an output of a candidate has these numbers."""
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
    added: Array | None = None  # [b, q, k], added to the scores
    functions: Mapping[str, Any] = field(default_factory=dict)  # name -> what replaces that function of `reference.forward`
    residual: bool = False
    returned: str = "attention_weights"  # which output is compared with the weights

    def run(self) -> Result:
        """ValueError: shapes for which a change is impossible."""
        case = self.case
        mask = None if case.visible.all() else case.visible
        replaced = patch.multiple(forward, **self.functions) if self.functions else nullcontext()
        with replaced, np.errstate(all="ignore"):
            inputs: dict[str, Any] = {"query": case.query, "key": case.key, "value": case.value}
            result = forward.attend(self.spec, self.weights, **inputs, attend_mask=mask, bias=self.added)
        output = result.output + case.query if self.residual else result.output
        outputs = {"output": output, "attention_weights": getattr(result, self.returned)}
        rows = np.ones(case.query.shape[:2], bool) if mask is None else np.logical_not(result.fully_masked.any(axis=1))
        norm, relative = self.spec.qk_norm is not None, self.tolerance
        tolerances = {name: tolerance(x, self.dtype, result.scores, norm=norm, relative=relative) for name, x in outputs.items()}
        return Result(outputs, tolerances, rows)


Change = Callable[[Computation], Computation]


class Impossible(ValueError):
    """The change would change nothing in this layer."""


def in_spec(**fields: Function) -> Change:
    """Replaces fields of the spec by functions of it."""

    def change(c: Computation) -> Computation:
        changed = {name: value(c.spec) for name, value in fields.items()}
        if all(getattr(c.spec, name) == value for name, value in changed.items()):
            raise Impossible
        return replace(c, spec=c.spec.model_copy(update=changed))

    return change


def in_part(name: str, **fields: Any) -> Change:
    """Replaces fields of a part of the spec, such as rope, where the layer has that part."""
    return in_spec(**{name: lambda spec: (part := getattr(spec, name)) and part.model_copy(update=fields)})


def in_weights(changed: Callable[[Computation], Mapping[str, Array]]) -> Change:
    """Replaces the weights that `changed` gives."""

    def change(c: Computation) -> Computation:
        if not (weights := changed(c)):
            raise Impossible
        return replace(c, weights={**c.weights, **weights})

    return change


def each_weight(ends: str | tuple[str, ...], changed: Callable[[Array], Array]) -> Change:
    """Replaces every weight whose name ends so."""
    return in_weights(lambda c: {name: changed(w) for name, w in c.weights.items() if name.endswith(ends)})


def exchange(roles: Sequence[str], sources: Sequence[str]) -> Change:
    """Takes the weights and biases of `sources` for those of `roles`."""

    def changed(c: Computation) -> Mapping[str, Array]:
        if any(f"{role}.weight" not in c.weights for role in roles):
            return {}
        pairs = [(f"{role}.{kind}", f"{source}.{kind}") for role, source in zip(roles, sources, strict=True) for kind in ("weight", "bias")]
        return {name: c.weights.get(source, np.zeros(1)) for name, source in pairs}

    return in_weights(changed)


def recut(roles: Sequence[str], order: str, other: str) -> Change:
    """Packs the rows of several weights in the other order and cuts them in this one."""

    def changed(c: Computation) -> Mapping[str, Array]:
        rows: dict[str, Array] = {}
        for kind in ("weight", "bias"):
            if all(f"{role}.{kind}" in c.weights for role in roles):
                packed = pack([c.weights[f"{role}.{kind}"] for role in roles], roles, c.spec, other)
                rows |= {f"{role}.{kind}": part for role, part in cut(roles, packed, c.spec, order).items()}
        return rows

    return in_weights(changed)


def in_mask(changed: Callable[[Array, Array], Array]) -> Change:
    """Replaces the mask, from the one that is passed and the one with the candidate's own causality: [b, q, k]."""
    return lambda c: replace(c, case=replace(c.case, visible=changed(c.case.mask, c.case.visible)))


UNMASK = in_mask(lambda _, visible: np.ones_like(visible))


def add_mask(changed: Callable[[Array], Array]) -> Change:
    """Adds numbers made of the mask to the scores, and blocks nothing."""
    return lambda c: UNMASK(replace(c, added=changed(c.case.visible).astype(np.float64)))


def in_functions(**functions: Function) -> Change:
    """Replaces functions of the reference."""
    return lambda c: replace(c, functions={**c.functions, **functions})


def in_softmax(wrapped: Callable[[Function, Computation], Function]) -> Change:
    """Replaces the softmax, (scores [b, h, q, k], sinks) -> (weights, log_sum_exp), by the function that `wrapped` returns for it."""
    return lambda c: in_functions(softmax=wrapped(c.functions.get("softmax", forward.softmax), c))(c)


def overflow(_: Function, c: Computation) -> Function:
    """exp of the scores themselves, in the candidate's dtype."""

    def softmax(scores: Array, sinks: Array | None = None) -> tuple[Array, Array]:
        exponentials = np.exp(scores.astype(BY_TORCH[c.dtype].numpy)).astype(np.float64)
        sink = 0.0 if sinks is None else np.exp(sinks[..., None])
        return exponentials / (exponentials.sum(axis=-1, keepdims=True) + sink), scores[..., 0]

    return softmax


def fill_with_zero(softmax: Function, _: Computation) -> Function:
    return lambda scores, sinks=None: softmax(np.where(np.isneginf(scores), 0.0, scores), sinks)


def over_axis(axis: int) -> Change:
    """Takes the softmax over another axis."""

    def wrapped(softmax: Function, _: Computation) -> Function:
        return lambda scores, sinks=None: (np.moveaxis(softmax(np.moveaxis(scores, axis, -1))[0], -1, axis), scores[..., 0])

    return in_softmax(wrapped)


def block_after_softmax(c: Computation) -> Computation:
    """Sets the weights of blocked keys to 0."""
    visible = c.case.visible[:, None]
    return UNMASK(in_softmax(lambda softmax, _: lambda scores, sinks=None: (softmax(scores, sinks)[0] * visible, scores[..., 0]))(c))


def spread_rotary_part(function: str, spread: Callable[[Array, int], Array]) -> Change:
    """Replaces the part of latent keys that all heads share, [b, n, r] -> [b, h, n, r], in what a function of the reference returns."""
    original = getattr(forward, function)

    def change(c: Computation) -> Computation:
        if c.spec.latent is None:
            raise Impossible
        width = c.spec.latent.rope_key_dim

        def changed(*arguments: Any) -> Array:
            x: Array = original(*arguments)
            if not np.array_equal(x[:, 1:, :, :width], x[:, :-1, :, :width]):  # queries or values
                return x
            return np.concatenate([spread(x[:, 0, :, :width], x.shape[1]), x[..., width:]], axis=-1)

        return in_functions(**{function: changed})(c)

    return change
