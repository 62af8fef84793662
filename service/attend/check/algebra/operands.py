"""A projection that is left out, or has another bias, matrix or input; and the heads of one role in place of those of another."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np

from attend.check.changes import Change, Impossible, at_heads, map_weights, only_if, replace_weights, swap_weights, with_input
from attend.check.computation import Computation
from attend.check.layer import CAUSES, Layer
from attend.check.mistakes.mistake import Mistake, Named
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array

SYMBOL = {"query": "Q", "key": "K", "value": "V", "output": "O"}


def changed_operands() -> Iterator[Named]:
    """The changes of the operands of projections, of RoPE, and of attention."""
    for role, source in permutations(CAUSES, 2):
        yield from _of_heads(role, source)
    for role in PROJECTIONS:
        yield from _of_parameters(role)


def _projection(role: str) -> str:
    """The projection of an input or of the heads."""
    return f"{SYMBOL[role]} = {'concat(o)' if role == 'output' else f'x_{role[0]}'} W_{role[0]} + b_{role[0]}"


def _of_parameters(role: str) -> Iterator[Named]:
    """A projection that is left out, has no bias, or that with the opposite sign, has a transposed matrix, or parameters of another one."""
    step, right, projected = (f"project_{role}", _projection(role), role) if role != "output" else ("output", _projection(role), "heads")
    rows: dict[str, tuple[str, Change]] = {
        f"the projection of the {projected} is left out": (right.partition(" W")[0], replace_weights(partial(_identity, role))),
        f"the bias of the {role} projection is left out": (right.rpartition(" + ")[0], map_weights(f"{role}.bias", np.zeros_like)),
        f"the bias of the {role} projection is subtracted and not added": (
            right.replace("+", "-"),
            map_weights(f"{role}.bias", np.negative),
        ),
        f"the matrix of the {role} projection is applied the other way round (x @ W against x @ W.T)": (
            right.replace(" + ", "ᵀ + "),
            map_weights(f"{role}.weight", np.transpose),
        ),
    }
    for source in PROJECTIONS:
        if source != role:
            wrong, other = right.replace(f"b_{role[0]}", f"b_{source[0]}"), f"W_{source[0]}"
            rows[f"the bias of the {source} projection is added to the projected {projected}"] = wrong, _use_bias(role, source)
            if "output" not in (role, source):
                matrix = wrong.replace(f"W_{role[0]}", other), swap_weights((role,), (source,))
                rows[f"the {role} is projected by the matrix of the {source}"] = matrix
    yield from ((name, Mistake(change, wrong, right, step)) for name, (wrong, change) in rows.items())


def _identity(role: str, c: Computation) -> Mapping[str, Array]:
    """The weights of a projection that changes nothing; empty if its widths differ."""
    weight = c.weights.get(f"{role}.weight")
    if weight is None or weight.shape[0] != weight.shape[1]:
        return {}
    return {f"{role}.weight": np.eye(len(weight)), f"{role}.bias": np.zeros(1)}


def _use_bias(role: str, source: str) -> Change:
    """Adds the bias of the projection `source`. Impossible if one has none, or another width."""

    def changed(c: Computation) -> Mapping[str, Array]:
        right, other = c.weights.get(f"{role}.bias"), c.weights.get(f"{source}.bias")
        return {} if right is None or other is None or right.shape != other.shape else {f"{role}.bias": other}

    return replace_weights(changed)


def _of_heads(role: str, source: str) -> Iterator[Named]:
    """The input or the heads of `source` in place of those of `role`: as they are projected, before RoPE, or as scores are computed."""
    right, wrong = _projection(role), f"{SYMBOL[source]} in place of {SYMBOL[role]}"
    reader = "weighted_values" if role == "value" else "scaled_products"
    for step, name, computed, change in (
        (
            f"project_{role}",
            f"the {role} is projected from the input of the {source}",
            right.replace(f"x_{role[0]}", f"x_{source[0]}"),
            _use_input(role, source),
        ),
        (f"project_{role}", f"the projected {source} is used in place of the projected {role}", wrong, _use_projection(role, source)),
        (
            f"rotate_{role}",
            f"the {source} as it is before RoPE (after its own norm, if any) is used in place of the {role}",
            f"{wrong}, before RoPE",
            _use_heads("projected", role, source),
        ),
        (
            reader,
            f"the {source} as it is when scores are computed (after norms and RoPE) is used in place of the {role}",
            f"{wrong}, after norms and RoPE",
            _use_heads("attended", role, source),
        ),
    ):
        yield name, Mistake(change, computed, right, step)


def _use_input(role: str, source: str) -> Change:
    def change(c: Computation) -> Computation:
        x, y = getattr(c.case, role), getattr(c.case, source)
        if x is y or x.shape[-1] != y.shape[-1]:
            raise Impossible
        return replace(c, case=with_input(c.case, role, y))

    return change


def _use_projection(role: str, source: str) -> Change:
    """Projects the input of `source` by its parameters, those of its norm too."""

    def changed(c: Computation) -> Computation:
        x, y = getattr(c.case, role), getattr(c.case, source)
        names = {name: name.replace(source, role, 1) for name in c.weights if name.startswith((f"{source}.", f"{source}_norm."))}
        if c.spec.latent or (not names and x is y):
            raise Impossible
        weights = {new: c.weights[name] for name, new in names.items()}
        if any(weights[name].shape != c.weights[name].shape for name in weights if name in c.weights):
            raise Impossible
        return replace(c, case=with_input(c.case, role, y), weights={**c.weights, **weights})

    return changed


def _use_heads(stage: str, role: str, source: str) -> Change:
    """Impossible in layers whose heads do not change after they are projected."""

    def changed(layer: Layer, heads: Mapping[str, Array]) -> Mapping[str, Array]:
        return {role: layer.repeat_kv_heads(heads[source]) if role == "query" else heads[source]}

    return only_if(lambda c: (c.spec.rope or c.spec.qk_norm) and c.spec.num_softmaxes == 1, at_heads(stage, changed))
