"""The operations and the memory of a call: sums over the steps of its program, whose axes say what they multiply and store.

The steps are those of a call without masks of its own. One that does not depend on queries is computed for the keys that no cache has.
"""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

from attend.attention.call import CallOptions
from attend.attention.dataflow import needed, sources
from attend.attention.program import program_of
from attend.attention.rows import MAX_BLOCK_SCORES
from attend.axes import GRADIENTS
from attend.spec import LayerSpec
from attend.spec_properties import is_of_calls
from attend.tensors import BY_TORCH

ELEMENT_OPERATIONS = 10  # of products that take as long as one number of a step without products, such as the softmax
SIZES = {"bool": 1, "int64": 8, "float64": 8}  # of numbers that do not have the datatype of the layer


Terms: TypeAlias = Mapping[tuple[str, tuple[str, ...]], int]  # (which rows, the axes whose length a call has) -> factor of their product


def cost_of_steps(spec: LayerSpec, options: CallOptions, cached: int = 0) -> tuple[int, int]:
    """The operations of one item of a call, and the bytes of all, without those of outputs. The first `cached` keys are in a cache."""
    b, q, k = options.items, options.num_queries, options.num_keys
    rows = min(q, max(1, MAX_BLOCK_SCORES // max(1, b * spec.num_heads * k)))
    counts = {"all": (q, k), "new": (q, k - cached), "block": (rows, k)}
    lengths = {name: {"q": i, "k": j, "q + k": i + j} for name, (i, j) in counts.items()}
    terms = _terms(spec, options.features | spec.features | spec.implied_features(k), options.outputs - {*GRADIENTS} | {"output"})
    operations, stored = (_sum(spec, some, lengths) for some in terms)
    inputs = q * spec.query_dim + (k - cached) * (spec.key_dim + spec.value_dim)
    return operations, b * (stored + BY_TORCH[spec.dtype].size * inputs)


@lru_cache(1024)
def _terms(spec: LayerSpec, features: frozenset[str], outputs: frozenset[str]) -> tuple[Terms, Terms]:
    """The operations and the bytes of the steps that compute these outputs, but of those that depend on weights alone.

    Products in float64 cost double. A step that depends on keys alone is computed for `new` ones; what has an element for each pair of
    query and key is stored for a `block` of rows, even if it is an output.
    """
    program = needed(program_of(spec, features), outputs)
    written = {name: value for step in program for name, value in step.writes.items()}
    size, counted = BY_TORCH[spec.dtype].size, {name for name in outputs if name in written and not written[name].of_pairs}
    operations: Counter[tuple[str, tuple[str, ...]]] = Counter()
    stored: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for step, source in zip(program, sources(program), strict=True):
        if source == "weights":
            continue
        of_pairs = any(value.of_pairs for value in step.writes.values())
        computed, kept = "new" if source == "keys" else "all", "block" if of_pairs else "all"
        dtypes = {written[name].dtype for name in (*step.reads, *step.writes) if name in written}
        factor = 4 if "float64" in dtypes else 2
        for axes in step.products:
            _add(operations, spec, computed, axes, factor)
        for axes in step.scratch:
            _add(stored, spec, kept, axes, 8)
        for name, value in step.writes.items():
            if not step.products:
                _add(operations, spec, computed, value.axes, ELEMENT_OPERATIONS)
            if name not in counted:
                _add(stored, spec, kept, value.axes, SIZES.get(value.dtype) or (max(4, size) if of_pairs else size))
        counted |= {*step.writes}
    return operations, stored


def _add(terms: Counter[tuple[str, tuple[str, ...]]], spec: LayerSpec, which: str, axes: str, factor: int) -> None:
    """Adds a factor for each element of these axes of one item."""
    of_call = []
    for axis in axes.split(","):
        if axis == "b":
            continue
        if is_of_calls(axis):
            of_call.append(axis)
        else:
            factor *= spec.length_of(axis)
    terms[which, tuple(of_call)] += factor


def _sum(spec: LayerSpec, terms: Terms, lengths: Mapping[str, Mapping[str, int]]) -> int:
    """The sum of the terms; `lengths`: by which rows, those of the axes `q`, `k` and `q + k`."""
    total = 0
    for (which, axes), product in terms.items():
        known = lengths[which]
        for axis in axes:
            product *= known[axis] if axis in known else spec.length_of(axis, known)
        total += product
    return total
