"""Which calls share a batch, and that a batched result equals the result of the call alone. Uses no event loop and no clock."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend.attention import decoding
from attend.attention.call import Call, Result
from attend.attention.operations import FORWARD
from attend.attention.reference.forward import attend
from attend.attention.stacking import stack
from attend.check.random_cases import FEATURES, Case, random_case
from attend.limits import BatchLimits, ServingLimits
from attend.serving.batching import MAX_EXAMINED, Job, batch_key, form_batch, limits_on
from attend.serving.calls import make_call
from attend.serving.cost import Cost, predict
from attend.serving.executor import Outcome, compute
from attend.serving.layer_checks import check_against_layer
from attend.serving.layers.registry import LayerRegistry, LoadedLayer
from attend.serving.prepared import Prepared
from attend.serving.queueing import Flow
from attend.serving.requests import Request
from attend.spec import LayerSpec
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from support.decoding import Sequence

REGISTRY = LayerRegistry(torch.device("cpu"), ServingLimits())
LAYER = REGISTRY.make("layer", LayerSpec(d_model=6, num_heads=3, seed=1))
UNLIMITED = BatchLimits(calls=10**6, operations=10**18, memory_bytes=10**18)
OUTPUTS = [
    "output",
    "attention_weights",
    "scores",
    "log_sum_exp",
    "query_projection",
    "key_projection",
    "value_projection",
    "head_outputs",
    "concatenated",
]
MODERATE_INITS = ("xavier_uniform", "torch_linear", "torch_mha")  # keeps scores as large as the inputs


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """One thread, unless a test sets more: several threads slow down calls this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


FLOW = Flow("", 0)


def call_and_cost(layer: LoadedLayer, **fields: Any) -> tuple[Call, Cost]:
    """The request as it comes out of decoding and preparing, and its predicted cost."""
    request = validate(AttendRequest, {"layer": layer.name, **fields})
    check_against_layer(request, layer.spec)
    return make_call(request, layer.spec), predict(request, layer.spec)


def entry(kind: int = 2, layer: LoadedLayer = LAYER, operations: int = 1, memory: int = 1, **knobs: Any) -> Job:
    """A waiting call; those of the same `kind`, which is its number of rows, can be stacked."""
    call, cost = call_and_cost(layer, query=np.ones((1, kind, layer.spec.d_model)))
    cost = replace(cost, operations=operations, memory_bytes=memory)
    return entry_of(layer, call, cost, **knobs)


def entry_of(layer: LoadedLayer, call: Call, cost: Cost, arrived: float = 0.0, **knobs: Any) -> Job:
    """A call that waits, with its batch key; `knobs` are those of its request."""
    return Job(Prepared(layer, call, cost, batch_key=batch_key(layer, call)), Request(**knobs), arrived, FLOW)


def job_of(prepared: Prepared, key: Any = None) -> Job:
    """The job of a prepared step."""
    return Job(prepared._replace(batch_key=key), Request(), 0.0, FLOW)


def remove_batch(waiting: deque[Job], limits: BatchLimits, now: float) -> tuple[list[Job], list[Job], list[Job]]:
    """The batch, the expired and the abandoned calls, all removed from the queue."""
    batch, expired, abandoned = form_batch(waiting, limits, now)
    leaving = {*batch, *expired, *abandoned}
    left = [one for one in waiting if one not in leaving]
    waiting.clear()
    waiting.extend(left)
    return batch, expired, abandoned


def next_batch(waiting: deque[Job], limits: BatchLimits = UNLIMITED, now: float = 0.0) -> list[Job]:
    """The batch; asserts that no call has expired or is abandoned."""
    batch, expired, abandoned = remove_batch(waiting, limits, now)
    assert not expired
    assert not abandoned
    return batch


# Forming a batch


def test_an_empty_queue_gives_an_empty_batch() -> None:
    assert remove_batch(deque(), UNLIMITED, 0.0) == ([], [], [])


def test_the_first_call_and_those_with_its_batch_key_form_the_batch_in_order() -> None:
    """Calls with other batch keys keep their places and order."""
    a, b, c, d, e, f = entry(2), entry(3), entry(2), entry(4), entry(3), entry(2)
    waiting = deque([a, b, c, d, e, f])

    assert next_batch(waiting) == [a, c, f]
    assert list(waiting) == [b, d, e]
    assert next_batch(waiting) == [b, e]
    assert next_batch(waiting) == [d]
    assert not waiting


def test_on_a_cpu_a_batch_is_one_call() -> None:
    assert limits_on(torch.device("cpu"), 64).calls == 1
    assert limits_on(torch.device("cuda:0"), 64).calls == 64


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        (BatchLimits(calls=3), [3, 3, 1]),
        (BatchLimits(calls=1), [1] * 7),
        (BatchLimits(calls=7), [7]),
        (BatchLimits(operations=29), [2, 2, 2, 1]),
        (BatchLimits(operations=30), [3, 3, 1]),
        (BatchLimits(memory_bytes=500), [5, 2]),
        (BatchLimits(memory_bytes=499), [4, 3]),
        (BatchLimits(calls=4, operations=30, memory_bytes=200), [2, 2, 2, 1]),
    ],
)
def test_a_batch_stays_within_each_limit(limits: BatchLimits, sizes: list[int]) -> None:
    """Seven equal calls of 10 operations and 100 bytes: exact limits by number, operations and memory."""
    waiting = deque(entry(operations=10, memory=100) for _ in range(7))
    before = list(waiting)

    batches = [next_batch(waiting, limits) for _ in sizes]

    assert [len(batch) for batch in batches] == sizes
    assert [one for batch in batches for one in batch] == before
    assert not waiting


def test_rule_4_a_call_beyond_a_limit_runs_alone() -> None:
    """Too many operations or too much memory: no other call joins it, and it joins no other batch."""
    for knobs in ({"operations": 1000}, {"memory": 1000}):
        small, big, after = entry(), entry(**knobs), entry()
        limits = BatchLimits(operations=100, memory_bytes=100)
        waiting = deque([small, big, after])

        assert next_batch(waiting, limits) == [small, after]
        assert next_batch(waiting, limits) == [big]
        assert next_batch(deque([big, small]), limits) == [big]


@pytest.mark.parametrize("kind", [2, 3])
def test_rule_4_a_large_call_runs_after_the_calls_that_arrived_before_it(kind: int) -> None:
    """However many small calls keep arriving, with equal or other batch keys."""
    limits = BatchLimits(calls=2, operations=100)
    big = entry(kind, operations=1000)
    waiting = deque([entry(2), entry(2), entry(2), big])

    turns = []
    while big in waiting:
        waiting.extend([entry(2), entry(2)])
        turns.append(next_batch(waiting, limits))

    assert turns[-1] == [big]
    assert len(turns) <= 3


queued = st.tuples(
    st.sampled_from([2, 3, 4]), st.integers(0, 150), st.integers(0, 150), st.sampled_from(["waits", "waits", "late", "gone"])
)


@given(st.lists(st.lists(queued, max_size=6), min_size=1, max_size=8))
def test_every_call_leaves_the_queue_once_and_is_not_starved(rounds: list[list[tuple[int, int, int, str]]]) -> None:
    """Random queues with arrivals between batches: each call is computed, expired or abandoned exactly once, and later calls do not all
    overtake it."""
    limits = BatchLimits(calls=3, operations=100, memory_bytes=100)
    waiting: deque[Job] = deque()
    fates: dict[int, str] = {}
    ahead: dict[int, int] = {}
    submitted, arriving = [], iter(rounds)

    while (new := next(arriving, None)) is not None or waiting:
        for kind, operations, memory, fate in new or []:
            one = entry(kind, operations=operations, memory=memory, gone=lambda fate=fate: fate == "gone")
            one.request.deadline = 1.0 if fate == "late" else None
            ahead[id(one)] = len(waiting)
            submitted.append((one, fate))
            waiting.append(one)
        before = list(waiting)
        batch, expired, abandoned = remove_batch(waiting, limits, 1.0)

        live = [one for one in before if one not in expired and one not in abandoned]
        assert [one for one in before if one in waiting] == list(waiting)
        assert batch[:1] == live[:1]
        assert batch == [one for one in before if one in batch]
        assert len(batch) == 1 or (
            len(batch) <= limits.calls
            and sum(one.prepared.cost.operations for one in batch) <= limits.operations
            and sum(one.prepared.cost.memory_bytes for one in batch) <= limits.memory_bytes
        )
        assert len({one.prepared.call.query.shape[1] for one in batch}) <= 1
        for name, group in (("waits", batch), ("late", expired), ("gone", abandoned)):
            for one in group:
                assert id(one) not in fates
                fates[id(one)] = name
        for one in waiting:
            ahead[id(one)] -= 1
            assert ahead[id(one)] >= 0, "it still waits after as many batches as there were calls before it"

    assert [fates[id(one)] for one, _ in submitted] == [fate for _, fate in submitted]


# Expired and abandoned


def test_expired_and_abandoned_calls_are_removed_before_the_batch_is_full() -> None:
    """At the head, among calls with the same batch key, and among others. Those behind a full batch are not looked at."""
    head_gone, head_late, first, other_late, same_key_gone, same_key, full, behind_gone, behind_late, other = (
        entry(3, gone=lambda: True),
        entry(3, deadline=5.0),
        entry(2),
        entry(3, deadline=5.0),
        entry(2, gone=lambda: True),
        entry(2, deadline=6.0),
        entry(2),
        entry(2, gone=lambda: True),
        entry(2, deadline=1.0),
        entry(3),
    )
    waiting = deque([head_gone, head_late, first, other_late, same_key_gone, same_key, full, behind_gone, behind_late, other])

    batch, expired, abandoned = remove_batch(waiting, BatchLimits(calls=2), 5.0)

    assert batch == [first, same_key]
    assert expired == [head_late, other_late]
    assert abandoned == [head_gone, same_key_gone]
    assert list(waiting) == [full, behind_gone, behind_late, other]


def test_forming_a_batch_looks_at_a_bounded_number_of_calls() -> None:
    """One that must run alone: at no other. Calls that may join it are found among the next MAX_EXAMINED."""
    looks = [0]

    def gone() -> bool:
        looks[0] += 1
        return False

    def looked_at(waiting: list[Job], limits: BatchLimits = UNLIMITED) -> int:
        looks[0] = 0
        form_batch(waiting, limits, 0.0)
        return looks[0]

    alone, others = entry(2, gone=gone), [entry(3, gone=gone)] * (2 * MAX_EXAMINED)
    assert looked_at([alone, *others]) == MAX_EXAMINED + 1
    assert looked_at([alone, *others], BatchLimits(calls=1)) == 1
    key = batch_key(LAYER, alone.prepared.call.with_options(reproducible=True))
    assert looked_at([replace(alone, prepared=alone.prepared._replace(batch_key=key)), *others]) == 1
    assert looked_at([entry(3, gone=gone), *others], BatchLimits(calls=7)) == 7


def test_a_call_expires_at_its_deadline_not_before() -> None:
    """Without a deadline it never expires."""
    assert next_batch(deque([entry(deadline=2.0)]), now=1.999)
    assert [len(group) for group in remove_batch(deque([entry(deadline=2.0)]), UNLIMITED, 2.0)] == [0, 1, 0]
    assert [len(group) for group in remove_batch(deque([entry(deadline=2.0)]), UNLIMITED, 2.001)] == [0, 1, 0]
    assert next_batch(deque([entry()]), now=float("inf"))


def test_an_expired_call_of_a_disconnected_caller_counts_as_abandoned() -> None:
    late_and_gone = entry(deadline=1.0, gone=lambda: True)
    assert remove_batch(deque([late_and_gone]), UNLIMITED, 2.0) == ([], [], [late_and_gone])


def test_a_queue_of_abandoned_calls_is_emptied_in_one_step() -> None:
    waiting = deque(entry(gone=lambda: True) for _ in range(5))
    batch, expired, abandoned = remove_batch(waiting, UNLIMITED, 0.0)
    assert (len(batch), len(expired), len(abandoned), len(waiting)) == (0, 0, 5, 0)


# Batch keys

Q, K, H = 4, 4, 3
RNG = np.random.default_rng(5)


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape)


def base() -> dict[str, Any]:
    """A request of one batch item in which everything can be varied: self-attention of four rows."""
    return {"query": numbers(1, Q, 6)}


BITS = RNG.integers(0, 2, (1, H, Q, K))
UNLIKE_REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "fewer queries": {"query": numbers(1, 3, 6)},
    "key": {"key": numbers(1, K, 6)},
    "longer key": {"key": numbers(1, 5, 6)},
    "key and value": {"key": numbers(1, K, 6), "value": numbers(1, K, 6)},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 2.0},
    "fully_masked uniform": {"fully_masked": "uniform"},
    "fully_masked error": {"fully_masked": "error"},
    "head_scale": {"head_scale": [1.0, 2.0, 3.0]},
    "outputs": {"outputs": ["output"]},
    "more outputs": {"outputs": ["output", "attention_weights", "scores"]},
    "heads": {"select": {"heads": [0, 1]}},
    "heads in another order": {"select": {"heads": [1, 0]}},
    "queries": {"select": {"queries": [0, 1]}},
    "average": {"select": {"average": True}},
    "top 1": {"select": {"top_k": 1}},
    "top 2": {"select": {"top_k": 2}},
    "pairs [q,k]": {"attend_mask": BITS[0, 0]},
    "pairs [b,h,q,k]": {"attend_mask": BITS},
    "pairs [b,1,1,k]": {"attend_mask": BITS[:, :1, :1]},
    "pairs [b,1,q,1]": {"attend_mask": BITS[:, :1, :, :1]},
    "bias [q,k]": {"bias": numbers(Q, K)},
    "bias [b,h,q,k]": {"bias": numbers(1, H, Q, K)},
    "keys": {"attend_keys": BITS[:, 0, 0]},
    "segments": {"segments": [[0, 1, 1, -1]]},
    "lengths [b]": {"valid_lens": [2]},
    "lengths [b,q]": {"valid_lens": [[1, 2, 3, 4]]},
    "causal": {"causal": True},
    "window left": {"window": {"left": 1}},
    "window right": {"window": {"right": 1}},
    "window both": {"window": {"left": 1, "right": 1}},
    "offset": {"causal": True, "query_offset": 1},
    "pairs and keys": {"attend_mask": BITS[0, 0], "attend_keys": BITS[:, 0, 0]},
    "pattern [q,k]": {"pattern": np.eye(Q)},
    "pattern [b,h,q,k]": {"pattern": np.ones((1, H, Q, K))},
    "pattern of heads": {"pattern": np.eye(Q), "pattern_rows": [0, 1, 1]},
    "pattern of rows": {"pattern": np.eye(Q), "pattern_rows": BITS[..., 0]},
    "head_outputs": {"head_outputs": np.ones((1, H, Q, 2))},
    "head_outputs of heads": {"head_outputs": np.ones((1, H, Q, 2)), "head_output_rows": [0, 1, 1]},
    "everything": {"attend_mask": BITS, "bias": numbers(1, H, Q, K), "valid_lens": [2], "causal": True, "head_scale": [1.0, 2.0, 3.0]},
}


def key_with(**fields: Any) -> Any:
    """The batch key of a call with these fields."""
    return batch_key(LAYER, call_and_cost(LAYER, **{**base(), **fields})[0])


def test_calls_that_cannot_be_stacked_have_different_batch_keys() -> None:
    """Each pair differs in a property that a stacked call has only once. The same call with other numbers has the same key."""
    keys = {name: key_with(**fields) for name, fields in UNLIKE_REQUESTS.items()}

    for name, one in keys.items():
        assert one is not None, name
        assert [other for other, its in keys.items() if its == one] == [name]
        assert key_with(**UNLIKE_REQUESTS[name]) == one, name


def test_calls_to_another_layer_with_equal_name_and_weights_are_not_stacked() -> None:
    """Calls prepared for a layer that was replaced are computed by that layer."""
    call, _ = call_and_cost(LAYER, **base())
    again = REGISTRY.make("layer", LAYER.spec)
    assert batch_key(LAYER, call) != batch_key(again, call)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({}, {"query": numbers(5, Q, 6)}, id="batch size"),
        pytest.param({}, {"query": numbers(Q, 6)}, id="no batch"),
        pytest.param({}, {"query": 2 * numbers(1, Q, 6)}, id="values"),
        pytest.param({}, {"scale": LAYER.spec.scale, "softcap": 0.0}, id="the layer's own scale, given"),
        pytest.param({"attend_mask": BITS[0, 0]}, {"attend_mask": BITS[:, 0]}, id="a mask for all and one per item"),
        pytest.param({"attend_mask": BITS[0, 0]}, {"block_mask": BITS[0, 0]}, id="attend and block"),
        pytest.param({"bias": np.zeros((Q, K))}, {"bias": np.full((Q, K), -np.inf)}, id="a bias that blocks"),
        pytest.param({"valid_lens": [0]}, {"valid_lens": [4]}, id="lengths"),
        pytest.param({"causal": True}, {"causal": True, "query_offset": 0}, id="an offset of 0, given"),
        pytest.param(
            {"causal": True, "query_offset": 1},
            {"query": numbers(2, Q, 6), "causal": True, "query_offset": [3, -2]},
            id="an offset for all and one per item",
        ),
        pytest.param(
            {"head_scale": [1.0, 2.0, 3.0]},
            {"query": numbers(2, Q, 6), "head_scale": numbers(2, H)},
            id="factors for all and per item",
        ),
        pytest.param({"causal": True}, {"window": {"right": 0}}, id="causal by two names"),
    ],
)
def test_calls_that_differ_in_numbers_and_batch_size_have_equal_batch_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert key_with(**one) == key_with(**other) is not None


@pytest.mark.parametrize(
    "fields",
    [{"dropout": {"p": 0.5, "seed": 1}}, {"reproducible": True}, {"scale": 100.0}],
    ids=["dropout", "reproducible", "large scores"],
)
def test_dropout_reproducible_and_large_score_calls_have_no_batch_key(fields: dict[str, Any]) -> None:
    """The dropout's stream has the shape of the call alone, `reproducible` must be bit for bit equal, and large scores amplify rounding."""
    call, cost = call_and_cost(LAYER, **{**base(), **fields})
    twins = [entry_of(LAYER, call, cost) for _ in range(2)]
    call, cost = call_and_cost(LAYER, **base())
    plain = entry_of(LAYER, call, cost)

    for first, second in (twins, (twins[0], plain), (plain, twins[0])):
        waiting = deque([first, second])
        assert next_batch(waiting) == [first]
        assert next_batch(waiting) == [second]


# Stacking and splitting


def test_stacking_one_call_copies_nothing() -> None:
    """Nor does splitting its result."""
    call, _ = call_and_cost(LAYER, **base())
    result = LAYER.attention.forward(call)
    assert stack([call]) is call
    assert result.split([1])[0] is result


def test_splitting_a_result_gives_views() -> None:
    """In the order of the calls."""
    result = LAYER.attention.forward(call_and_cost(LAYER, query=numbers(6, Q, 6))[0])
    parts = result.split([2, 1, 3])
    for name, whole in result.tensors.items():
        assert [part.tensors[name].shape[0] for part in parts] == [2, 1, 3]
        assert torch.equal(torch.cat([part.tensors[name] for part in parts]), whole)
        assert all(part.tensors[name].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in parts)


def test_masks_that_are_equal_in_all_calls_are_stacked_once() -> None:
    """Different ones are repeated for each item. Self-attention remains self-attention."""
    mask, other = np.tril(np.ones((Q, K))), np.ones((Q, K))
    calls = [call_and_cost(LAYER, query=numbers(b, Q, 6), attend_mask=mask)[0] for b in (1, 3)]
    stacked = stack(calls)
    assert stacked.query.shape[0] == 4
    assert stacked.key is stacked.query
    assert stacked.value is stacked.key
    assert stacked.masks.attend_mask is not None
    assert stacked.masks.attend_mask.shape[0] == 1

    differing = stack([*calls, call_and_cost(LAYER, query=numbers(2, Q, 6), attend_mask=other)[0]])
    assert differing.masks.attend_mask is not None
    assert differing.masks.attend_mask[:, 0].sum((1, 2)).tolist() == [10] * 4 + [16] * 2


def test_stacked_calls_keep_their_own_replaced_heads() -> None:
    """The same pattern for all items, others for each; rows of all items and of each. The float64 reference computes each call alone."""
    spec, weights = LAYER.spec, {name: array.astype(np.float64) for name, array in LAYER.arrays().items()}
    rows = RNG.integers(0, 2, (3, H, Q))
    replaced: list[dict[str, Any]] = [
        {"pattern": numbers(Q, K), "pattern_rows": [1, 0, 1], "head_outputs": numbers(1, H, Q, 2), "head_output_rows": [0, 1, 0]},
        {"pattern": numbers(3, 1, Q, K), "pattern_rows": [0, 1, 0], "head_outputs": numbers(3, H, Q, 2), "head_output_rows": rows[:, :, 0]},
    ]
    requests = [{"query": numbers(b, Q, 6), **fields} for b, fields in zip((1, 3), replaced, strict=True)]
    calls = [call_and_cost(LAYER, **fields)[0] for fields in requests]
    key, other = (batch_key(LAYER, call) for call in calls)
    assert key == other is not None
    for result, fields in zip(FORWARD.run_batch(LAYER.attention, [(FORWARD, call) for call in calls]), requests, strict=True):
        expected = attend(spec, weights, **fields)
        np.testing.assert_allclose(result.tensors["output"], expected.output, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(result.tensors["attention_weights"], expected.attention_weights, rtol=1e-5, atol=1e-6)


# Results of batches


def similar_request(case: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Another request of the case's kind: other numbers, another batch size, masks for all items or for each, maybe without a batch."""
    b = int(rng.integers(1, 5))
    single = b == 1 and rng.random() < 0.5
    fields: dict[str, Any] = {}
    for name, value in case.request.items():
        if name in ("query", "key", "value"):
            fields[name] = rng.standard_normal((b, *value.shape[1:]))
        elif name in ("attend_mask", "block_mask", "bias"):
            array = value[None] if value.ndim == 2 else value
            array = array[rng.integers(0, len(array), b if rng.random() < 0.6 else 1)]
            array = rng.permuted(array, axis=-1)
            if name == "bias" and rng.random() < 0.5:
                array = np.where(np.isneginf(array), 0.0, array)
            fields[name] = array[0] if len(array) == 1 and array.ndim == 3 and rng.random() < 0.5 else array
        elif name in ("attend_keys", "block_keys", "valid_lens", "query_segments", "key_segments"):
            fields[name] = value[rng.integers(0, len(value), b)]
        elif name == "query_offset" and not isinstance(value, str):
            grid = case.spec.grid_bias
            lowest, highest = (-3, 5) if grid is None else (0, grid.num_tokens - case.request["query"].shape[1] + 1)
            fields[name] = rng.integers(lowest, highest, b) if rng.random() < 0.5 else int(rng.integers(max(lowest, 1), highest))
        elif name in ("positions", "key_positions"):
            fields[name] = rng.uniform(-9, 30, (b if rng.random() < 0.5 else 1, *value.shape[1:]))
        elif name == "head_scale":
            heads = value.shape[-1]
            fields[name] = rng.standard_normal((b, heads) if rng.random() < 0.5 else heads)
        else:
            fields[name] = value
    return _without_batch(fields) if single else fields


def _without_batch(fields: dict[str, Any]) -> dict[str, Any]:
    """The unbatched request of its only item: every field without its leading axis."""
    for name, value in fields.items():
        pairwise = name in ("attend_mask", "block_mask", "bias")
        drops = isinstance(value, np.ndarray) and not (pairwise and value.ndim == 2) and not (name == "head_scale" and value.ndim == 1)
        if drops:
            fields[name] = int(value[0]) or 1 if name == "query_offset" else value[0]  # 0 is the default
    return fields


def random_outputs(rng: np.random.Generator, layer: LoadedLayer, queries: int) -> dict[str, Any]:
    """Random fields `outputs` and `select`: all outputs, one of them, or some of the weights."""
    choice, outputs = rng.integers(5), [name for name in OUTPUTS if name in layer.spec.outputs()]
    if choice < 2:
        return {"outputs": outputs}
    if choice == 2:
        return {"outputs": [outputs[rng.integers(len(outputs))]]}
    heads = rng.permutation(layer.spec.num_heads)[: rng.integers(1, layer.spec.num_heads + 1)].tolist()
    rows = rng.permutation(queries)[: rng.integers(1, queries + 1)].tolist()
    select = {"heads": heads, "queries": rows, "average": bool(rng.random() < 0.3), "top_k": [None, 3][rng.integers(2)]}
    return {"outputs": ["output", "attention_weights"], "select": select}


def assert_same(got: Result, alone: Result, dtype: str, note: str) -> None:
    """|a - b| <= 1e-6 max|b| where the layer computes in float32, 1e-12 in float64; infinities, keys and empty rows exactly."""
    assert got.fully_masked_rows == alone.fully_masked_rows, note
    assert got.first_fully_masked(10**6) == alone.first_fully_masked(10**6), note
    assert got.tensors.keys() == alone.tensors.keys(), note
    for name, b in alone.tensors.items():
        a = got.tensors[name]
        assert a.shape == b.shape, f"{note} {name}"
        assert a.dtype == b.dtype, f"{note} {name}"
        if not b.is_floating_point():
            assert torch.equal(a, b), f"{note} {name}"
            continue
        finite = torch.isfinite(b)
        assert torch.equal(a[~finite], b[~finite]), f"{note} {name}"
        largest = b[finite].abs().max().item() if finite.any() else 0.0
        error = (a[finite] - b[finite]).abs().max().item() if finite.any() else 0.0
        assert error <= {"float32": 1e-6, "float64": 1e-12}[dtype] * largest, f"{note} {name}: {error / largest:.2g} of the largest"


def stackable_requests(seed: int, count: int, init: str | None = None, dtype: str | None = None) -> tuple[LoadedLayer, list[Call]]:
    """A random layer, and calls to it that can be stacked."""
    rng = np.random.default_rng(seed)
    init = init or MODERATE_INITS[seed % len(MODERATE_INITS)]
    case = random_case(rng, features=[f for f in FEATURES if f != "dropout"], batched=True, init=init, dtype=dtype)  # type: ignore[arg-type]
    layer = REGISTRY.make("case", case.spec, case.weights)
    more = random_outputs(rng, layer, case.request["query"].shape[1])
    calls = [call_and_cost(layer, **similar_request(case, rng), **more)[0] for _ in range(count)]
    return layer, calls


def assert_rule_7(layer: LoadedLayer, calls: list[Call], note: str, limits: BatchLimits = UNLIMITED) -> list[int]:
    """Calls computed in batches from a queue get the results that they get alone. Returns the sizes of the batches."""
    alone = {id(call): layer.attention.forward(call) for call in calls}
    waiting, sizes = deque(entry_of(layer, call, Cost({}, 1, 0, 1, 0)) for call in calls), []
    while waiting:
        batch = next_batch(waiting, limits)
        for one, got in computed(batch):
            assert_same(
                got,
                alone.pop(id(one.prepared.call)),
                layer.spec.dtype,
                f"{note}, {one.prepared.call.query.shape[0]} items in a batch of {len(batch)}",
            )
        sizes.append(len(batch))
    assert not alone
    return sizes


def computed(batch: list[Job]) -> Iterator[tuple[Job, Result]]:
    """Every call of the batch with its result."""
    for one, outcome in compute(batch, lambda: 0.0):
        assert isinstance(outcome, Outcome), outcome
        assert outcome.batch == len(batch)
        yield one, outcome.result


def score_kinds(spec: LayerSpec) -> set[str]:
    """What affects how large the scores of a layer are, or how large they may be before its calls must run alone."""
    factors = {
        "float64": spec.dtype == "float64",
        "amplified rounding": any(operator.amplifies_rounding for operator in spec.operators),
        "query_scale": spec.query_scale is not None,
        "scalable_softmax": spec.normalizer == "scalable_softmax",
    }
    return {kind for kind, present in factors.items() if present} or {"plain float32"}


@pytest.mark.parametrize("init", MODERATE_INITS)
def test_rule_7_a_stacked_call_equals_the_call_alone(init: str) -> None:
    """Random layers and requests with every kind of mask, stacked and split. Layers of every kind are stacked."""
    sizes, empty, batches, stacked = set(), 0, Counter[str](), Counter[str]()
    for seed in range(100):
        layer, calls = stackable_requests(seed, 2 + seed % 4, init)
        kinds = score_kinds(layer.spec)
        batches.update(kinds)
        if assert_rule_7(layer, calls, f"seed {seed}") == [len(calls)]:
            stacked.update(kinds)
        sizes |= {call.query.shape[0] for call in calls}
        empty += sum(layer.attention.forward(call).fully_masked_rows for call in calls)
    assert sizes == {1, 2, 3, 4}
    assert empty > 100
    assert batches.keys() == {"float64", "amplified rounding", "query_scale", "scalable_softmax", "plain float32"}
    assert stacked["float64"] == batches["float64"]
    assert stacked["plain float32"] >= 0.9 * batches["plain float32"]
    assert all(stacked[kind] >= batches[kind] / 3 for kind in batches), f"stacked {stacked} of {batches}"


ORDINARY: dict[str, dict[str, Any]] = {
    "ordinary numbers": {},
    "weights of size 1": {"init": "numpy_normal"},
    "positive weights": {"init": "numpy_uniform"},
    "numbers of size 10": {"size": 10.0},
    "a scale of 5": {"scale": 5.0},
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("what", ORDINARY.values(), ids=ORDINARY)
def test_rule_7_holds_for_large_scores(what: dict[str, Any], dtype: str, threads: Callable[[int], None]) -> None:
    """Softmax turns their absolute error into a relative one, whether weights, inputs or scale made them large."""
    threads(2)  # how a product is shared out among threads, and so the order of its sums, depends on the size of the batch
    spec = LayerSpec.model_validate({"d_model": 64, "num_heads": 8, "dtype": dtype, "init": what.get("init", "xavier_uniform")})
    layer, rng = REGISTRY.make("wide", spec), np.random.default_rng(0)
    fields = {"outputs": ["output", "attention_weights", "scores"], "scale": what.get("scale")}
    for _ in range(3):
        calls = [call_and_cost(layer, query=what.get("size", 1.0) * rng.standard_normal((b, 9, 64)), **fields)[0] for b in (1, 2, 1, 3)]
        assert_rule_7(layer, calls, "")


@pytest.mark.parametrize(
    ("fields", "dtype", "stacked"),
    [
        ({}, "float32", True),
        ({"query": 10 * numbers(1, Q, 6)}, "float32", False),
        ({"key": 100 * numbers(1, K, 6)}, "float32", False),
        ({"scale": 50.0}, "float32", False),
        ({"bias": np.full((Q, K), 100.0)}, "float32", False),
        ({"bias": np.full((Q, K), -np.inf)}, "float32", True),
        ({"query": 10 * numbers(1, Q, 6), "scale": 50.0, "bias": np.full((Q, K), 100.0)}, "float64", True),
    ],
)
def test_calls_with_large_scores_are_not_stacked(fields: dict[str, Any], dtype: str, stacked: bool) -> None:
    """Softmax amplifies the rounding of scores in the hundreds beyond the tolerance of rule 7 on some processors."""
    layer = REGISTRY.make("layer", LayerSpec.model_validate({**LAYER.spec.model_dump(), "dtype": dtype}))
    calls = [call_and_cost(layer, **{"query": numbers(1, Q, 6), "key": numbers(1, K, 6), **fields})[0] for _ in range(2)]
    one, other = (batch_key(layer, call) for call in calls)
    assert one == other
    assert (one is not None) is stacked


def test_overflow_in_a_blocked_key_does_not_affect_other_calls_of_the_batch() -> None:
    """Where the key is not blocked, only its own call is affected."""
    query = numbers(1, Q, 6)
    huge = query.copy()
    huge[0, -1] = 3e38
    calls = [
        call_and_cost(LAYER, query=x, valid_lens=[3], select={"queries": [0, 1, 2]}, outputs=["attention_weights", "output"])[0]
        for x in (query, huge)
    ]
    assert batch_key(LAYER, calls[1]) is None  # calls with scores of that size are not stacked, although they could be

    own, spoilt = LAYER.attention.forward(stack(calls)).split([1, 1])

    assert_same(own, LAYER.attention.forward(calls[0]), "float32", "the neighbour")
    assert torch.isfinite(own.tensors["output"]).all()
    assert torch.isfinite(spoilt.tensors["output"][:, :3]).all()


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (0, 0), (0, 1, 0), (2, 0), (0, 3, 1)])
def test_a_call_with_zero_batch_items_can_be_stacked(sizes: tuple[int, ...]) -> None:
    """Its result has no rows and no fully masked rows of the other calls."""
    calls = [
        call_and_cost(LAYER, query=np.ones((b, Q, 6)), attend_keys=np.zeros((1, K))[:b] if b < 2 else np.zeros((b, K)))[0] for b in sizes
    ]
    assert len({batch_key(LAYER, call) for call in calls}) == 1

    together = LAYER.attention.forward(stack(calls)).split(sizes)

    assert [result.fully_masked_rows for result in together] == [b * H * Q for b in sizes]
    assert [len(result.first_fully_masked()) for result in together] == [4 if b else 0 for b in sizes]
    for got, call in zip(together, calls, strict=True):
        assert_same(got, LAYER.attention.forward(call), "float32", f"{call.query.shape[0]} items")


def test_rule_7_holds_for_a_mixed_queue() -> None:
    """Calls of many lengths, masks and layers, shuffled, some of which run alone."""
    rng = np.random.default_rng(99)
    entries: list[Job] = []
    alone: dict[int, Result] = {}
    for seed in range(12):
        layer, calls = stackable_requests(1000 + seed, count=5)
        for call in [*calls, calls[0].with_options(dropout=(0.5, seed), outputs=frozenset({"output", "attention_weights"}))]:
            one = entry_of(layer, call, Cost({}, int(rng.integers(1, 50)), 0, 1, 0))
            alone[id(one)] = layer.attention.forward(call)
            entries.append(one)
    waiting = deque(entries[i] for i in rng.permutation(len(entries)))

    sizes = []
    while waiting:
        batch = next_batch(waiting, BatchLimits(calls=4, operations=120))
        for one, got in computed(batch):
            assert_same(got, alone.pop(id(one)), one.prepared.layer.spec.dtype, f"{one.prepared.layer.spec}")
        sizes.append(len(batch))

    assert not alone
    assert len(entries) == sum(sizes) == 72
    assert max(sizes) == 4
    assert sizes.count(1) >= 12  # those with a dropout


def test_the_comparison_detects_wrong_results() -> None:
    """A result of another call, one wrong number just above the tolerance, and a missing fully masked row."""
    layer, calls = stackable_requests(3, count=2)
    a, b = (layer.attention.forward(call) for call in calls)
    wrong: list[Callable[[], None]] = [lambda: assert_same(a, b, layer.spec.dtype, "")]
    name, tensor = next((n, t) for n, t in a.tensors.items() if t.is_floating_point() and torch.isfinite(t).all())
    nudged = tensor.clone()
    nudged[(0,) * nudged.ndim] += 1e-5 * tensor.abs().max()
    wrong.append(lambda: assert_same(replace(a, tensors={**a.tensors, name: nudged}), a, layer.spec.dtype, ""))
    wrong.append(lambda: assert_same(replace(a, fully_masked=torch.ones(1, 1, 1, dtype=torch.bool)), a, layer.spec.dtype, ""))
    for check in wrong:
        with pytest.raises(AssertionError):
            check()


@pytest.mark.parametrize(("factor", "shares"), [(1, True), (10, False), (100, False)])
def test_steps_share_a_batch_if_rounding_does_not_matter(factor: float, shares: bool) -> None:
    """The rows of earlier steps may be so large that softmax amplifies the rounding of the new ones."""
    rng, case = np.random.default_rng(0), Case(LayerSpec(d_model=64, num_heads=8), {})
    first = Sequence(case)
    alone, prepared = [], []
    for i in range(8):
        sequence = Sequence(case, first.pool, first.layer)
        for rows in rng.standard_normal((2, 20, 64)) * (factor if i else 1):
            past = sequence.prepare({"query": rows.astype("f4")})
            past.operation.run(first.layer.attention, past.call)
        query, fork = rng.standard_normal((1, 64)).astype("f4"), sequence.fork(40)
        solo = fork.prepare({"query": query, "outputs": ["output"]})
        alone.append(solo.operation.run(first.layer.attention, solo.call).tensors["output"])
        prepared.append(sequence.prepare({"query": query, "outputs": ["output"]}))
    waiting = [job_of(each, batch_key(each.layer, each.call, each.operation)) for each in prepared]
    batch, _, _ = form_batch(waiting, UNLIMITED, 0.0)
    assert len(batch) == (8 if shares else 1)
    for (_, outcome), expected in zip(compute(batch, lambda: 0.0), alone, strict=False):
        assert (outcome.result.tensors["output"] - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_steps_of_a_batch_that_runs_out_of_memory_append_their_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed again alone, after the batch has written rows."""
    real, sizes = decoding.forward_cached, []

    def forward_cached(layer: Any, steps: Any) -> Any:
        sizes.append(len(steps))
        results = real(layer, steps)
        if len(steps) > 1:
            raise MemoryError
        return results

    monkeypatch.setattr(decoding, "forward_cached", forward_cached)
    rng, case = np.random.default_rng(0), Case(LayerSpec(d_model=6, num_heads=3), {})
    first = Sequence(case)
    sequences, starts = [first, *(Sequence(case, first.pool, first.layer) for _ in range(4))], (3, 0, 17, 2, 5)
    for sequence, start in zip(sequences, starts, strict=True):
        if start:
            sequence.step(sequence.draw(rng, start, start))
    steps = [sequence.draw(rng, 1, 1) for sequence in sequences]
    prepared = [sequence.prepare(members) for sequence, members in zip(sequences, steps, strict=True)]
    waiting = [job_of(each) for each in prepared]
    outcomes = compute(waiting, lambda: 0.0)
    assert [size for size in sizes if size > 1] == [5, 2, 3, 2]
    assert sizes.count(1) == 5
    for sequence, members, start, (_, outcome) in zip(sequences, steps, starts, outcomes, strict=True):
        sequence.keep(members)
        assert sequence.length == start + 1
        sequence.check(outcome.result, members, start)
