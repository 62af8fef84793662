"""The attention weights that a candidate really applies, recovered from its outputs, whatever it computes inside.

The output is linear in the values. So what takes projected heads returns its weights if the rows of the values are one-hot. Of a candidate
that projects its values, the output changes by the weights of a key if the value input of that key is changed, through matrices that are
known. What takes one input for queries, keys and values has no such calls: its weights are looked for among the arrays that it makes, and a
torch module gets other matrices of the values. If all this shows nothing, calls with other rows show at least which keys matter.

The weights are believed only if the reference with these weights returns the candidate's output, too.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from attend.check.adapter import CallFailed, NoCache
from attend.check.arrays import as_array
from attend.check.calls import ComparedCase, call
from attend.check.candidate import Candidate
from attend.check.cases import ALL, CheckCase
from attend.check.changes import replace_steps
from attend.check.computation import Computation
from attend.check.disagreements import divergence_of
from attend.check.layer import Layer
from attend.check.low_precision import HALF
from attend.check.weights import complete_weights, read_weights
from attend.tensors import Array

MOST_SECONDS = 1.0  # of this thread that the calls for one case may take: usual candidates take less than a tenth of it
TIMED_CALLS = 3  # by the fastest of which that is predicted
MOST_PARAMETERS = 2**24  # numbers that float32 tells apart
UNITS = {"float64": 1e-6, "float32": 1.0, "float16": 3e4, "bfloat16": 3e4}  # times more rounding than in float32
NEAR = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 5e-3,
    "bfloat16": 0.04,
}  # relative errors of the output that rounding explains after a recovery
MOVED = 8.0  # times the largest number of the value input is added to a key's, so that the difference loses few digits
PLAIN = {"project_value", "weighted_values", "merge", "output"}  # the only steps between the value input and the output, as matrices


@dataclass(frozen=True, slots=True)
class AppliedWeights:
    """What a candidate applies in a wrong case, beside what the reference computes there."""

    right: Computation
    weights: Array  # [b, h, q, k]
    noise: float  # the largest error of a weight by rounding
    found: str  # how they were found
    known: Array = field(default_factory=lambda: ALL)  # of which pairs something is known, broadcast
    has_numbers: bool = True  # not if it is only known which weights are not 0
    of_others: Array | None = None  # [b, h, q, b, kv heads, k]: the weights of the values of other items and heads


def applied_weights(candidate: Candidate, compared: ComparedCase) -> AppliedWeights | None:
    """The weights that the candidate applies in a case; None if its calls do not show them."""
    right, wrong = compared.right, compared.wrong
    if wrong is None or wrong.name != "output" or not wrong.has_shape or right.case.whole is not None:
        return None
    seconds = min(call(candidate, right.case).seconds for _ in range(TIMED_CALLS))  # any one may take longer, as the first of a shape does
    compared = replace(compared, seconds=seconds)
    unit, found = UNITS[right.dtype], "the weights that it applies, "
    for recover, words, noise in (
        (_of_one_hot_values, "found by calls with one-hot values", 1e-9 * unit),
        (_of_moved_values, "found by calls that change the value of one key each", 2e-6 * unit),
        (_of_arrays, "which are among the arrays that it makes", 1e-9 * unit),
        (_of_value_matrices, "found by calls with other matrices of the values", 2e-6 * unit),
    ):
        with suppress(CallFailed, NoCache, np.linalg.LinAlgError):
            for weights in recover(candidate, compared):
                if _gives(right, weights, wrong.got):
                    seen = np.where(np.abs(weights) < noise, 0.0, weights)
                    return AppliedWeights(right, seen, noise, found + words, has_numbers=right.dtype not in HALF)
    with suppress(CallFailed, NoCache):
        return _of_all_values(candidate, compared, 1e-9 * unit) or _of_changed_rows(candidate, compared)
    return None


def independent_of(candidate: Candidate, compared: ComparedCase) -> tuple[str, ...]:
    """The inputs of the candidate that may be others without a change of its output."""
    case, unchanged = compared.right.case, []
    if compared.wrong is None or case.whole is not None:
        return ()
    for role in ("query", "key", "value"):
        if role in candidate.adapter.roles:
            with suppress(CallFailed, NoCache):
                again = call(candidate, with_other(case, {role}))
                unchanged += [role] if _is_same(again, compared) else []
    return tuple(unchanged)


def _is_same(one: ComparedCase, two: ComparedCase) -> bool:
    return np.array_equal(one.outputs[0].got, two.outputs[0].got, equal_nan=True)


def with_other(case: CheckCase, roles: Collection[str]) -> CheckCase:
    """The case with the rows of these inputs in the opposite order and negated: numbers of the same size."""
    inputs: dict[str, Any] = {role: np.ascontiguousarray(-getattr(case, role)[:, ::-1]) for role in roles}
    return replace(case, **inputs)


def _gives(right: Computation, weights: Array, got: Array) -> bool:
    """Whether the reference with these weights returns the output that was got."""
    whole = replace(right, case=replace(right.case, chunks=(), rolled_back=None))
    made = replace_steps(mixed_weights=lambda layer, *given: weights)(whole).outputs()["output"]
    bound = NEAR[right.dtype] * float(np.abs(made).max())
    return bool(np.isfinite(got).all()) and float(np.abs(made - got).max()) <= bound


def _may_call(compared: ComparedCase, calls: int) -> bool:
    return calls * compared.seconds <= MOST_SECONDS


def _one_hot(candidate: Candidate, compared: ComparedCase, items: int, heads: int) -> Array | None:
    """What a function of projected heads returns for values whose rows are those of the identity matrix, a part at a time, in all items
    and heads at once or, of so many, in one of each alone: [b, h, q, items, heads, k]."""
    adapter, case, spec = candidate.adapter, compared.right.case, compared.right.spec
    (b, k, width), g, h = case.value.shape, spec.num_kv_heads, spec.num_heads
    d = width // g
    if not adapter.heads_given or "value" not in adapter.roles or not _may_call(compared, items * heads * -(-k // d)):
        return None
    found = np.zeros((b, h, case.query.shape[1], items, heads, k))
    for item, head, start in product(range(items), range(heads), range(0, k, d)):
        rows = np.zeros((b, k, g, d))
        rows[item::items, :, head::heads] = np.eye(k, d, -start)[:, None]
        output = adapter.call(replace(case.call, value=rows.reshape(b, k, width))).output
        if output.shape != (b, case.query.shape[1], h * d):
            return None
        found[..., item, head, start : start + d] = Layer.split_heads(output, h)[..., : k - start]
    return found


def _of_one_hot_values(candidate: Candidate, compared: ComparedCase) -> Iterator[Array]:
    """The weights of a function of projected heads."""
    if (found := _one_hot(candidate, compared, 1, 1)) is not None:
        yield found[..., 0, 0, :]


def _of_all_values(candidate: Candidate, compared: ComparedCase, noise: float) -> AppliedWeights | None:
    """The weights of a function of projected heads that mixes items or heads."""
    value, wrong, h, g = compared.right.case.value, compared.wrong, compared.right.spec.num_heads, compared.right.spec.num_kv_heads
    if wrong is None or (found := _one_hot(candidate, compared, b := len(value), g)) is None:
        return None
    made = Layer.merge_heads(np.einsum("bhqcgk,cgkd->bhqd", found, Layer.split_heads(value, g)))
    if not np.abs(made - wrong.got).max() <= NEAR[compared.right.dtype] * np.abs(made).max():
        return None
    items, heads = np.arange(b)[:, None], np.arange(h)[None]
    own = found[items, heads, :, items, heads // (h // g)]
    found[items, heads, :, items, heads // (h // g)] = 0.0
    words = "the weights that it applies, found by calls with one-hot values of one item and head"
    return AppliedWeights(compared.right, own, noise, words, of_others=found)


def _of_moved_values(candidate: Candidate, compared: ComparedCase) -> Iterator[Array]:
    """The weights of which the output is a sum, by what it changes if the value input of one key changes."""
    adapter, right = candidate.adapter, compared.right
    case, spec, matrices = right.case, right.spec, right.weights
    b, k, width = case.value.shape
    has_inputs = {"value", "key"} <= adapter.roles.keys() and {"value.weight", "output.weight"} <= matrices.keys()
    if adapter.heads_given or not has_inputs or not _is_plain(right) or not _may_call(compared, k):
        return
    moved = MOVED * float(np.abs(case.value).max()) * np.sign(np.random.default_rng(0).standard_normal((b, width)))
    heads = spec.num_heads
    values = Layer.split_heads((moved @ matrices["value.weight"].T)[:, None], spec.num_kv_heads)  # [b, kv heads, 1, d]
    values = np.repeat(values, heads // spec.num_kv_heads, axis=1)
    by_head = matrices["output.weight"].reshape(len(matrices["output.weight"]), heads, -1)  # [out, h, d]
    through = np.einsum("bhd,ohd->boh", values[:, :, 0], by_head)
    if through.shape[1] < heads:
        return
    inverse, before, found = np.linalg.pinv(through), adapter.call(case.call).output, []
    for j in range(k):
        value = case.value.copy()
        value[:, j] += moved
        found.append(np.einsum("bho,bqo->bhq", inverse, adapter.call(replace(case.call, value=value)).output - before))
    yield np.stack(found, axis=-1)


def _is_plain(right: Computation) -> bool:
    """Whether values become outputs by matrices alone."""
    names = [run.step.name for run in right.steps()]
    after = names[names.index("softmax") + 1 :] if "softmax" in names else ["unknown"]
    return PLAIN.issuperset(after) and not any(name.endswith("_value") and name not in PLAIN for name in names)


def _of_arrays(candidate: Candidate, compared: ComparedCase) -> Iterator[Array]:
    """The arrays of a call that have the size of the weights, the last first."""
    case, right = compared.right.case, compared.right
    shape = len(case.query), right.spec.num_heads, case.query.shape[1], case.key.shape[1]
    if case.chunks or (divergence := divergence_of(candidate, case)) is None:
        return
    axes: Callable[[Array], tuple[int, ...]] = lambda x: tuple(n for n in x.shape if n > 1)  # noqa: E731
    for made in reversed(divergence.made):
        numbers = made.numbers
        if numbers.size == np.prod(shape) and numbers.shape[-1] == shape[-1] and axes(numbers)[-2:] == axes(np.empty(shape))[-2:]:
            yield numbers.reshape(shape)


def _of_value_matrices(candidate: Candidate, compared: ComparedCase) -> Iterator[Array]:
    """The weights of a torch module of few rows, which can be given matrices that make one-hot values of its inputs."""
    right = compared.right
    case, spec, matrices, d = right.case, right.spec, right.weights, right.spec.value_head_dim
    b, k, width = case.value.shape
    parts = -(-k // d)
    if candidate.module is None or "value.weight" not in matrices or "output.weight" not in matrices or b * k > width:
        return
    if not _is_plain(right) or not _may_call(compared, parts):
        return
    inverse = np.linalg.pinv(case.value.reshape(b * k, width))  # [in, b * k]
    back, found = np.linalg.pinv(matrices["output.weight"].T), []
    for start in range(0, k, d):
        rows = np.tile(np.eye(k, d, -start), (b, spec.num_kv_heads))
        with with_weights(candidate, {"value.weight": (inverse @ rows).T, "value.bias": np.zeros(rows.shape[1])}):
            output = candidate.adapter.call(case.call).output - matrices.get("output.bias", 0.0)
        found.append(Layer.split_heads(output @ back, spec.num_heads))
    yield np.concatenate(found, axis=-1)[..., :k]


@contextmanager
def with_weights(candidate: Candidate, weights: Mapping[str, Array]) -> Iterator[None]:
    """Gives a torch module these weights, by canonical name, during the `with` block.

    Where each of their numbers is among the parameters is read off the weights of the module with its parameters numbered.
    """
    parameters, convention = [*candidate.module.parameters()], candidate.adapter.convention
    kept, count = [parameter.detach().clone() for parameter in parameters], 1
    try:
        for parameter in parameters:
            numbers = np.arange(count, count + parameter.numel(), dtype=np.float64).reshape(tuple(parameter.shape))
            parameter.copy_(as_array(numbers, "float64", "torch"))
            count += parameter.numel()
        if count > MOST_PARAMETERS:  # which float32 has no numbers for
            raise CallFailed
        places = complete_weights(read_weights(candidate.module, True, convention), candidate.spec, convention)
        given = np.concatenate([[0.0], *(x.cpu().double().numpy().ravel() for x in kept)])
        for name, x in weights.items():
            if name in places:
                given[places[name].astype(int)] = x
        begin = 1
        for parameter in parameters:
            part = given[begin : begin + parameter.numel()].reshape(tuple(parameter.shape))
            parameter.copy_(as_array(part, "float64", "torch"))
            begin += parameter.numel()
        yield
    finally:
        for parameter, before in zip(parameters, kept, strict=True):
            parameter.copy_(before)


def _of_changed_rows(candidate: Candidate, compared: ComparedCase) -> AppliedWeights | None:
    """Which keys have weight, by whether the output of a query changes if the rows of one key are others.

    Of what takes one input for queries and keys, nothing is known of the query's own key.
    """
    right, case = compared.right, compared.right.case
    seconds = max(compared.seconds, 1e-4)
    rows = np.arange(case.key.shape[1])
    if len(rows) * seconds > MOST_SECONDS:
        rows = np.unique(np.linspace(0, len(rows) - 1, max(2, int(MOST_SECONDS / seconds))).astype(int))
    before = candidate.adapter.call(case.call).output
    finite, is_one = np.asarray(np.isfinite(before).all(axis=-1)), "key" not in candidate.adapter.roles
    has = np.zeros((len(before), 1, before.shape[1], len(case.key[0])))
    for j in rows:
        inputs: dict[str, Any] = {role: getattr(case, role).copy() for role in ("query", "key", "value")}
        for role in inputs if is_one else ("key", "value"):
            inputs[role][:, j] = -inputs[role][:, j]
        changed = np.abs(candidate.adapter.call(replace(case.call, **inputs)).output - before).max(axis=-1)
        has[:, 0, :, j] = ~(changed <= 1e-6 * np.abs(before[finite]).max())
    known = finite[:, None, :, None] & np.isin(np.arange(has.shape[3]), rows) & (~np.eye(*has.shape[2:], dtype=bool) if is_one else ALL)
    return AppliedWeights(right, has, 1e-5, "found by calls that change the rows of one key each", known, has_numbers=False)
