"""The cache of prepared requests never changes a result: an engine with a cache against one without."""

import sys
from dataclasses import fields
from types import FrameType
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend.errors import AttendError, InvalidRequest
from attend.limits import ServingLimits
from attend.serving.engine import Engine
from attend.serving.layers.registry import LayerRegistry
from attend.serving.prepared import Prepared
from attend.serving.prepared_cache import MAX_KEY_CHARACTERS, MAX_REQUESTS, PreparedCache, cache_key
from attend.serving.request_type import ATTEND
from attend.serving.requests import Request
from attend.serving.service import ServiceOptions, open_service
from attend.spec import LayerSpec

SPECS = {"default": LayerSpec(d_model=6, num_heads=2, seed=3), "half": LayerSpec(d_model=6, num_heads=3, dtype="float16")}
OPTIONS: dict[str, list[Any]] = {  # valid and invalid values, and pairs that are equal in Python
    "layer": ["default", "half", "nobody", 1, ["default"], None],
    "causal": [True, False, 1, 0, "true", None],
    "scale": [1, 1.0, None, "1", 0.5],
    "softcap": [0, 2.0, -1],
    "query_offset": [0, 1, True, "end", "END", [0, 1]],
    "window": [{"left": 1, "right": 0}, {"left": True}, {"left": None, "right": 2}, 3],
    "outputs": [["output"], ["attention_weights", "output"], ["output", "output"], [], ["nothing"], "output"],
    "select": [{"heads": [1]}, {"heads": [2]}, {"queries": [1, 0], "average": True}, {"top_k": 2}, {"heads": [True]}],
    "dropout": [{"p": 0.5, "seed": 1}, {"p": 0.5, "seed": 2}, {"p": 1, "seed": 1}],
    "reply": [{"form": "flat"}, {"decimals": 2}, {"decimals": True}, {"datatype": "FP16"}],
    "valid_lens": [[1, 2], [2, 1], [0, 9]],
    "attend_keys": [[[1, 0, 1], [1, 1, 0]], [[0, 0, 2], [1, 1, 0]], [1, 0, 1], [True, False, True]],
    "block_mask": [[[0, 1, 0]], [[1, 1, 2]], [[True, False, True]]],
    "bias": [[[0.5, "-inf", -1]], [[0.5, 1, -1]], [[1e39, 0, 0]]],
    "head_scale": [[1, 0.5], [1e39, 1], [2, 3]],
    "segments": [[0, 1, 1], [0, -1, 0], [0, -2, 1]],
    "surplus": [1],
}
NUMBERS = st.sampled_from([0.0, 1.0, -2.5, 0.1, 7e4, 1e39])  # 7e4 is too large for float16, 1e39 for float32


SERVICE = open_service("cpu", ServiceOptions(limits=ServingLimits(max_scores=40)))


def engine() -> Engine:
    """A new engine, whose cache is empty."""
    registry = LayerRegistry(torch.device("cpu"), SERVICE.limits)
    for name, spec in SPECS.items():
        registry.put(registry.make(name, spec))
    return Engine(registry, SERVICE.scheduler, SERVICE.metrics, SERVICE.statistics, SERVICE.wire_limits, SERVICE.limits)


def prepare(engine: Engine, body: dict[str, Any]) -> Prepared:
    return engine.decode_and_prepare(Request(orjson.dumps(body)), ATTEND)[1]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Requests of few shapes, so that many have the same one."""
    batch = draw(st.sampled_from([(), (1,), (2,)]))
    body: dict[str, Any] = {}
    for name, rows in (("query", (2, 3)), ("key", (2, 3)), ("value", (3,))):
        if name == "query" or draw(st.booleans()):
            shape = *batch, draw(st.sampled_from(rows)), draw(st.sampled_from([6, 6, 6, 5]))
            body[name] = np.full(shape, draw(NUMBERS)).tolist()
    for name in draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=2, unique=True)):
        body[name] = draw(st.sampled_from(OPTIONS[name]))
    return body


def outcome(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """Everything about the call, or about its refusal."""
    try:
        prepared = prepare(engine, body)
    except AttendError as error:
        return {"error": type(error), "problems": error.problems}
    call, request = prepared.call, prepared.fields
    parts = {field.name: getattr(call, field.name) for field in fields(call) if field.name != "masks"}
    parts |= {f"masks.{name}": tensor for name, tensor in call.masks._asdict().items()}
    plain = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in parts.items()}
    same = {"self": call.key is call.query, "shared": call.value is call.key, "dtype": str(call.query.dtype)}
    plain_fields = {"layer": prepared.layer.name, "options": request.reply, "outputs": request.outputs, "shape": request.query.shape}
    shared = {"cost": prepared.cost, "in_parts": prepared.in_parts, "log_fields": prepared.log_fields}
    return {**plain, **same, **plain_fields, **shared, "batched": request.batched}


REMEMBERING = engine()


@given(requests())
def test_a_cached_request_gives_the_same_call_or_refusal_as_an_uncached_one(body: dict[str, Any]) -> None:
    anew = outcome(engine(), body)
    assert outcome(REMEMBERING, body) == anew
    assert outcome(REMEMBERING, body) == anew  # from the cache


def prepared_twice(*bodies: dict[str, Any]) -> tuple[Prepared, Prepared]:
    remembering = engine()
    first, second = (prepare(remembering, body) for body in bodies)
    return first, second


def test_a_cached_request_is_not_validated_again_and_has_its_own_numbers() -> None:
    first, second = prepared_twice(*({"query": np.full((1, 2, 6), n).tolist(), "causal": True} for n in (1.0, 2.0)))
    assert second.cost is first.cost
    assert (first.call.query == 1).all() and (second.call.query == 2).all()


def test_wrong_numbers_of_masks_are_refused_although_the_shape_is_known() -> None:
    query = np.ones((2, 3, 6)).tolist()
    for name, right, wrong in (("valid_lens", 2, 4), ("valid_lens", 2, -1), ("valid_lens", 2, 0.5)):
        with pytest.raises(InvalidRequest) as refusal:
            prepared_twice({"query": query, name: [1, right]}, {"query": query, name: [1, wrong]})
        assert refusal.value.problems[0].at == "/valid_lens/1"


def test_requests_whose_masks_differ_are_validated_once_and_have_their_own() -> None:
    query = np.ones((3, 6)).tolist()
    first, second = prepared_twice(*({"query": query, "block_mask": [[0, n, 1]], "bias": [[n, 2, "-inf"]]} for n in (0, 1)))
    assert second.cost is first.cost
    for n, prepared in enumerate((first, second)):
        assert prepared.call.masks.attend_mask.tolist() == [[[[True, not n, False]]]]
        assert prepared.call.masks.bias[..., 0].item() == n


def test_the_cache_is_bounded_and_keeps_no_numbers() -> None:
    remembering = engine()
    for n in range(1, MAX_REQUESTS + 20):
        prepare(remembering, {"query": np.ones((n, 2, 6)).tolist(), "outputs": ["output"]})
    assert len(remembering.registry.find("default").prepared_cache) == MAX_REQUESTS
    again = prepare(remembering, {"query": np.ones((MAX_REQUESTS + 19, 2, 6)).tolist(), "outputs": ["output"]})
    assert again.fields.query.strides == (0, 0, 0)


@pytest.mark.parametrize("same", [True, False], ids=["the same shape", "another shape"])
def test_concurrent_insertions_leave_the_cache_consistent(same: bool) -> None:
    """A second insertion runs completely between any two bytecode instructions of the first, as in another thread."""
    prepared = prepare(engine(), {"query": np.ones((1, 2, 6)).tolist()}).without_numbers()
    code = PreparedCache.keep.__code__
    instructions = place = 0
    cache = PreparedCache()

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal instructions
        frame.f_trace_opcodes = frame.f_code is code
        if frame.f_code is code and event == "opcode":
            instructions += 1
            if instructions == place:
                cache.keep("first" if same else "second", object())
        return interrupt

    before, most = sys.gettrace(), 1
    while place < most:
        place, instructions, cache = place + 1, 0, PreparedCache()
        for number in range(MAX_REQUESTS):
            cache.keep(number, object())
        sys.settrace(interrupt)
        try:
            cache.keep("first", prepared)
        finally:
            sys.settrace(before)
        most = instructions
        assert cache.get("first") is not None and len(cache) == MAX_REQUESTS
        for number in range(MAX_REQUESTS):
            cache.keep(("later", number), object())
        assert all(cache.get(("later", number)) is not None for number in range(MAX_REQUESTS))
        assert len(cache) == MAX_REQUESTS, f"an entry remained at instruction {place}"
    assert most > 30


def test_requests_with_long_plain_fields_are_not_cached() -> None:
    query = np.ones((1, 2, 6))
    assert cache_key({"query": query, "layer": "x"}) is not None
    assert cache_key({"query": query, "tokens": {"query": ["word" * MAX_KEY_CHARACTERS]}}) is None
    assert cache_key({"query": query, "bias": query}) != cache_key({"query": query, "bias": query.astype(np.float32)})
    assert cache_key({"query": query, "positions": query}) is None
    assert cache_key({"key": query}) is None


@pytest.mark.parametrize("largest", [1.0, 1e20], ids=["finite scores", "scores that overflow"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["unbatched", "batched"])
def test_a_cached_short_call_gives_the_result_of_the_first(batch: tuple[int, ...], largest: float) -> None:
    query = (largest * np.random.default_rng(3).standard_normal((*batch, 3, 6))).tolist()

    def computed(prepared: Prepared) -> dict[str, torch.Tensor]:
        attention = prepared.layer.attention
        return prepared.operation.run(attention, prepared.call).tensors

    first, second = map(computed, prepared_twice({"query": query}, {"query": query}))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(second[name], tensor)
