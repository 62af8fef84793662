"""The operations and the memory of a call: sums over the steps of its program, whose axes say what they multiply and store.

The steps are those of a call without masks of its own. One that does not depend on queries is computed for the keys that no cache has.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from attend.attention.call import CallOptions
from attend.attention.dataflow import is_pair, needed, sources
from attend.attention.program import program_of
from attend.attention.rows import MAX_BLOCK_SCORES
from attend.axes import GRADIENTS
from attend.spec import LayerSpec
from attend.tensors import BY_TORCH

ELEMENT_OPERATIONS = 10  # of products that take as long as one number of a step without products, such as the softmax
SIZES = {"bool": 1, "int64": 8, "float64": 8}  # of numbers that do not have the datatype of the layer


class Term(NamedTuple):
    """A number for each element of some axes: that of those whose length a layer has, and the axes whose length a call has."""

    factor: int
    axes: tuple[str, ...]

    def at(self, spec: LayerSpec, lengths: Mapping[str, int]) -> int:
        return self.factor * math.prod([lengths[axis] if axis in lengths else spec.length_of(axis, lengths) for axis in self.axes])


class StepCost(NamedTuple):
    """The cost of a step for one item."""

    of_keys: bool  # whether it depends on keys alone
    of_pairs: bool  # whether it is computed for a block of rows at a time
    operations: tuple[Term, ...]
    stored_bytes: tuple[Term, ...]


def cost_of_steps(spec: LayerSpec, options: CallOptions, cached: int = 0) -> tuple[int, int]:
    """The operations of one item of a call, and the bytes of all, without those of outputs. The first `cached` keys are in a cache."""
    b, q, k = options.items, options.num_queries, options.num_keys
    rows = min(q, max(1, MAX_BLOCK_SCORES // max(1, b * spec.num_heads * k)))
    whole, new, block = ({"q": i, "k": j, "q + k": i + j} for i, j in ((q, k), (q, k - cached), (rows, k)))
    operations = 0
    stored = BY_TORCH[spec.dtype].size * (q * spec.query_dim + (k - cached) * (spec.key_dim + spec.value_dim))
    for step in _step_costs(spec, options.features | spec.features, options.outputs - {*GRADIENTS} | {"output"}):
        operations += sum([term.at(spec, new if step.of_keys else whole) for term in step.operations])
        stored += sum([term.at(spec, block if step.of_pairs else whole) for term in step.stored_bytes])
    return operations, b * stored


@lru_cache(1024)
def _step_costs(spec: LayerSpec, features: frozenset[str], outputs: frozenset[str]) -> tuple[StepCost, ...]:
    """The costs of the steps that compute these outputs, but of those that depend on weights alone. Products in float64 cost double."""
    program = needed(program_of(spec, features), outputs)
    size, counted = BY_TORCH[spec.dtype].size, {*outputs}
    dtypes = {name: value.dtype for step in program for name, value in step.writes.items()}
    costs = []
    for step, source in zip(program, sources(program), strict=True):
        if source == "weights":
            continue
        of_pairs = any(is_pair(value.axes) for value in step.writes.values())
        factor = 4 if "float64" in {dtypes.get(name) for name in (*step.reads, *step.writes)} else 2
        operations = [_term(spec, axes, factor) for axes in step.products]
        stored = [_term(spec, axes, 8) for axes in step.scratch]
        for name, value in step.writes.items():
            operations += [] if step.products else [_term(spec, value.axes, ELEMENT_OPERATIONS)]
            number = SIZES.get(value.dtype) or (max(4, size) if of_pairs else size)
            stored += [] if name in counted else [_term(spec, value.axes, number)]
        counted |= {*step.writes}
        costs.append(StepCost(source == "keys", of_pairs, tuple(operations), tuple(stored)))
    return tuple(costs)


def _term(spec: LayerSpec, axes: str, factor: int) -> Term:
    """The numbers of these axes, without that of batch items, each times a factor."""
    of_call = []
    for axis in axes.split(","):
        if {*axis.removeprefix("?").split(" ")} & {"q", "k"} or axis.startswith("?"):
            of_call.append(axis)
        elif axis != "b":
            factor *= spec.length_of(axis)
    return Term(factor, tuple(of_call))
