"""A call that is cut along its keys, computed in parts and merged equals the whole call: random layers and masks, every output.

Without network; what would be sent is the same `Call` and `Result`.
"""

import asyncio
import pickle

import numpy as np
import orjson
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from attend.attention.reference import forward
from attend.check.random_cases import FEATURES, random_case
from attend.errors import DeadlinePassed, LayerConflict, LayerNotFound, OutOfMemory, TooLarge
from attend.limits import ServingLimits
from attend.serving.admission import Admission, cost_of_part
from attend.serving.calls import make_call
from attend.serving.cost import predict
from attend.serving.layers.registry import LayerRegistry
from attend.serving.plan import plan_call
from attend.serving.request_type import ATTEND
from attend.serving.requests import Request
from attend.serving.service import ServiceOptions, open_service
from attend.serving.shards import find_layer, merge_results, split_call
from attend.spec import LayerSpec
from attend.wire.schemas.attend import AttendRequest, Select

OUTPUTS = ["output", "attention_weights", "scores", "log_sum_exp", "query_projection", "key_projection", "value_projection"]
OUTPUTS += ["head_outputs", "concatenated"]
OF_ALL_KEYS = {"indexer", "forget_gate", "differential", "talking_heads", "normalizer"}  # steps of layers with these need all keys at once
WHOLE = sorted({*FEATURES} - {"dropout", "chunk_size", "query_scale"} - OF_ALL_KEYS)
REGISTRY = LayerRegistry(torch.device("cpu"), ServingLimits())
SELECTIONS = [None, {"top_k": 3}, {"average": True}, {"average": True, "top_k": 2}, {"queries": [0]}, {"heads": [0]}]


def compute(layer, call, shards):
    return merge_results(layer.attention, call, [layer.attention.forward(part) for part in split_call(call, shards)])


def close(expected, got, tolerance):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    finite = torch.isfinite(expected)
    assert torch.equal(got[~finite], expected[~finite])
    largest = expected[finite].abs().max().item() if finite.any() else 0.0
    assert torch.allclose(got[finite], expected[finite], rtol=0, atol=tolerance * max(largest, 1e-3))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@given(seed=st.integers(0, 2**32 - 1), select=st.sampled_from(SELECTIONS))
def test_merged_parts_equal_the_whole_call(dtype, seed, select):
    case = random_case(np.random.default_rng(seed), features=WHOLE, dtype=dtype)
    assume(case.spec.splits_over_keys)  # other layers are never computed in parts
    layer = REGISTRY.make("x", case.spec, case.weights)
    latent = [name for name in ("latent", "rope_key") if name in case.spec.outputs()]
    request = AttendRequest(**case.request, outputs=[*OUTPUTS, *latent], select=None if select is None else Select(**select))
    call = make_call(request, case.spec)
    expected = layer.attention.forward(call)
    scores = expected.tensors["scores"]
    largest = scores[torch.isfinite(scores)].abs().max().item() if torch.isfinite(scores).any() else 0.0
    # An absolute error of a score is a relative error of its weight. There is room for rounding before a cap, which hides larger scores.
    tolerance = 256 * np.finfo(dtype).eps * max(1.0, largest)
    for shards in (2, 64):
        got = compute(layer, call, shards)
        assert got.tensors.keys() == expected.tensors.keys()
        assert got.fully_masked_rows == expected.fully_masked_rows
        for name in expected.tensors:
            if name != "keys":  # rounding may change the order of equal weights
                close(expected.tensors[name], got.tensors[name], tolerance)
        if select is not None and "top_k" in select:
            weights = layer.attention.forward(call.with_options(top_k=None)).tensors["attention_weights"]
            close(expected.tensors["values"], weights.gather(-1, got.tensors["keys"]), tolerance)


@pytest.mark.parametrize("offset", [100, -100])
@pytest.mark.parametrize("sinks", [False, True])
def test_parts_of_a_layer_with_alibi_and_sinks_agree_with_the_reference(sinks, offset):
    """In float32, beyond the keys, in one part and in several."""
    rng = np.random.default_rng(3)
    spec = LayerSpec(d_model=8, num_heads=8, alibi=True, sinks=sinks)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in spec.weight_shapes().items()}
    if sinks:
        weights["sinks"] -= np.float32(2.0**-8 * abs(offset))  # near the last head's scores
    layer = REGISTRY.make("x", spec, weights)
    request = {"query": rng.standard_normal((2, 11, 8)).astype(np.float32), "query_offset": offset}
    expected = forward.attend(spec, weights, **request)
    call = make_call(AttendRequest(**request, outputs=OUTPUTS), spec)
    for got in (layer.attention.forward(call), *(compute(layer, call, shards) for shards in (2, 64))):
        for name in OUTPUTS:
            wanted, relative = getattr(expected, name), 1e-6 if name in ("scores", "log_sum_exp") else 0
            assert got.tensors[name].dtype == torch.float32
            np.testing.assert_allclose(got.tensors[name], wanted, rtol=relative, atol=1e-5)


@pytest.mark.parametrize("outputs", [["output"], ["attention_weights"], ["log_sum_exp"], ["value_projection"], ["concatenated", "scores"]])
def test_parts_compute_only_the_needed_outputs(outputs):
    layer = REGISTRY.make("x", LayerSpec(d_model=6, num_heads=2))
    call = make_call(AttendRequest(query=np.ones((2, 7, 6)), outputs=outputs), layer.spec)
    assert compute(layer, call, 3).tensors.keys() == set(outputs)
    parts = split_call(call, 3)
    assert [part.key.shape[1] for part in parts] == [2, 2, 3]
    assert all(("head_outputs" in part.options.outputs) == bool({"output", "concatenated"} & set(outputs)) for part in parts)


def test_a_pickled_part_contains_only_its_own_keys():
    layer = REGISTRY.make("x", LayerSpec(d_model=6, num_heads=2))
    request = AttendRequest(query=np.ones((1, 2, 6)), key=np.ones((1, 10_000, 6)), bias=np.zeros((2, 10_000)), outputs=["output"])
    call = make_call(request, layer.spec)
    whole = 10_000 * (6 + 2) * 4  # in float32; the value is the key, which is sent once
    assert all(whole / 5 < len(pickle.dumps(part)) < whole / 4 for part in split_call(call, 5))


def test_a_shard_refuses_replaced_and_removed_layers():
    registry = LayerRegistry(torch.device("cpu"), ServingLimits())
    first, second = (registry.make("x", LayerSpec(d_model=6, num_heads=2, seed=seed)) for seed in (1, 2))
    registry.put(first)
    assert find_layer(registry, "x", first.fingerprint) is first
    registry.put(second)
    assert find_layer(registry, "x", second.fingerprint) is second
    with pytest.raises(LayerConflict):
        find_layer(registry, "x", first.fingerprint)
    registry.remove("x")
    with pytest.raises(LayerNotFound):
        find_layer(registry, "x", second.fingerprint)


# --- through the engine ------------------------------------------------------------------------------------------------------------------

SPEC = LayerSpec(d_model=12, num_heads=3, seed=4, sinks=True, rope={})
BODY = {"query": np.random.default_rng(0).standard_normal((2, 41, 12)).tolist(), "causal": True, "select": {"queries": [40, 3]}}


class LocalShards:
    """Shards in this process."""

    def __init__(self, count, error=None, wait=0.0):
        self.count, self.error, self.wait, self.calls = count, error, wait, []

    async def compute(self, layer, parts, cost):
        self.calls.append((parts, cost))
        await asyncio.sleep(self.wait)
        if self.error:
            raise self.error
        return [layer.attention.forward(part) for part in parts]


def ask(shards, limits=None, deadline=None, **fields):
    """The reply's document, or the error, of an engine with these shards and limits."""

    async def run():
        service = open_service("cpu", ServiceOptions(limits=limits or ServingLimits()))
        try:
            await service.start({"default": SPEC})
            if shards is not None:
                service.engine.use_shards(shards)
            body = orjson.dumps({**BODY, **fields})
            until = None if deadline is None else service.clock() + deadline
            answer = await service.engine.answer(Request(body, deadline=until), ATTEND)
            plan = await plan_call(service.engine, Request(body))
            return orjson.loads(b"".join(answer[1])), plan
        finally:
            service.close()

    return asyncio.run(run())


def cost_of(**fields):
    return predict(AttendRequest(**{**BODY, **fields}), SPEC)


HALF = {
    "memory": lambda: ServingLimits(max_memory_bytes=cost_of().memory_bytes * 2 // 3),
    "operations": lambda: ServingLimits(max_operations=cost_of().operations * 2 // 3),
    "pairs": lambda: ServingLimits(max_pairs=cost_of().pairs * 2 // 3),
}


@pytest.mark.parametrize("limit", HALF)
def test_only_calls_too_large_for_one_process_go_to_shards(limit):
    (expected, _), shards = ask(None), LocalShards(2)
    (small, _) = ask(shards)
    assert small == expected and not shards.calls
    large, plan = ask(shards, HALF[limit]())
    assert len(shards.calls) == 1 and plan.admitted
    assert large.keys() == expected.keys() and large["layer"] == expected["layer"]
    for name in ("output", "attention_weights"):
        np.testing.assert_allclose(large[name], expected[name], rtol=0, atol=1e-6 * np.abs(expected[name]).max())


@pytest.mark.parametrize("shards", [None, LocalShards(0), LocalShards(1)])
def test_without_shards_a_call_beyond_the_limit_is_refused(shards):
    with pytest.raises(TooLarge, match="max_memory_bytes"):
        ask(shards, HALF["memory"]())


@pytest.mark.parametrize("fields", [{"dropout": {"p": 0.1, "seed": 1}}, {"output_gradient": BODY["query"], "outputs": ["query_gradient"]}])
def test_calls_with_dropout_or_gradients_are_not_cut(fields):
    fields = {**fields, "select": None}
    limits = ServingLimits(max_operations=cost_of(**fields).operations * 2 // 3)
    with pytest.raises(TooLarge, match="max_operations"):
        ask(LocalShards(2), limits, **fields)


def test_a_call_too_large_for_all_shards_is_refused():
    limits = ServingLimits(max_operations=cost_of().operations // 3)
    assert ask(LocalShards(4), limits)
    with pytest.raises(TooLarge, match="max_operations"):
        ask(LocalShards(2), limits)
    problems, in_parts = Admission(ServingLimits(max_scores=10), 64).refusals(cost_of(), may_be_cut=True)
    assert problems and not in_parts, "weights come together in one place"
    assert cost_of_part(cost_of(), 2).operations == -(-cost_of().operations // 2)


def test_a_deadline_ends_the_wait_for_shards():
    with pytest.raises(DeadlinePassed):
        ask(LocalShards(2, wait=30), HALF["memory"](), deadline=0.05)


def test_an_error_of_a_shard_reaches_the_caller():
    with pytest.raises(OutOfMemory):
        ask(LocalShards(2, error=OutOfMemory()), HALF["memory"]())
