"""The engine: a finished request leaves nothing in memory."""

import gc
import json
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from attend.attention.call import Call
from attend.attention.layer import MultiHeadAttention
from attend.errors import AttendError
from attend.limits import BatchLimits
from attend.serving import batching
from attend.serving.batching import Job
from attend.serving.codec_pool import LARGE_BYTES, WorkItem
from attend.serving.request_type import ATTEND
from attend.serving.requests import Request
from attend.serving.service import open_service
from attend.spec import LayerSpec
from attend.wire.negotiation import CODECS, JSON, SAFETENSORS
from support.scheduler import REAL, run

KINDS = {
    "computed in a thread": (SAFETENSORS, {}, False),
    "decoded in a thread": (JSON, {}, False),
    "an unknown layer": (JSON, {"layer": "unknown"}, True),
    "an invalid field": (SAFETENSORS, {"unknown": 1}, True),
    "an invalid shape": (JSON, {"attend_keys": [1, 1]}, True),
    "a deadline that has passed": (SAFETENSORS, {}, True),
}


def requests_in_memory() -> list[Any]:
    """The calls that have numbers, which those of the cache do not, and the records of requests."""
    found = [found for found in gc.get_objects() if type(found) in (Call, Request, WorkItem, Job)]
    return [one for one in found if type(one) is not Call or one.query.numel()]


@contextmanager
def no_request_stays_in_memory() -> Iterator[None]:
    """Fail if a request of this block is still in memory after it. No cycles are collected meanwhile."""
    gc.collect()
    gc.disable()
    try:
        earlier, others = requests_in_memory(), {*threading.enumerate()}  # of other tests
        yield
        for thread in {*threading.enumerate()} - others:
            if thread.name.startswith(("codec", "compute")):
                thread.join()  # the service is closed; a thread holds its last job until it ends
        left = [found for found in requests_in_memory() if all(found is not x for x in earlier)]
    finally:
        gc.enable()
    assert not left


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_request_leaves_no_reference_cycle(kind: str) -> None:
    """A reference cycle would keep the tensors, megabytes for each request, until the next collection."""
    media, members, is_refused = KINDS[kind]
    query = np.random.default_rng(0).standard_normal((5, 509, 6)).astype("f4")
    if media == JSON:
        body = json.dumps({"layer": "layer", "query": query.tolist(), **members}).encode().ljust(LARGE_BYTES)
    else:
        body = save({"query": query}, {"request": json.dumps({"layer": "layer", **members})})

    async def test() -> None:
        service = open_service("cpu")
        service.registry.put(replace(REAL, name="layer"))
        for _ in range(3):
            deadline = service.clock() if kind == "a deadline that has passed" else None
            try:
                await service.engine.answer(Request(body, codec=CODECS[media], reply_codec=CODECS[media], deadline=deadline), ATTEND)
                assert not is_refused
            except AttendError:
                assert is_refused
        service.close()

    with no_request_stays_in_memory():
        run(test())


def test_a_failed_batch_leaves_no_reference_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of its error refer to the batch, and so do those of the thread that called them. The log still has its traceback."""

    logged: list[str] = []

    def fails(*_: Any) -> Any:
        raise RuntimeError("a fault of the device")

    monkeypatch.setattr(MultiHeadAttention, "forward", fails)
    body = save({"query": np.zeros((5, 509, 6), "f4")}, {"request": json.dumps({"layer": "layer"})})

    async def test() -> None:
        service = open_service("cpu")
        service.registry.put(replace(REAL, name="layer"))
        try:
            await service.engine.answer(Request(body, codec=CODECS[SAFETENSORS], reply_codec=CODECS[SAFETENSORS]), ATTEND)
        except AttendError as error:
            logged.extend(traceback.format_exception(error.__cause__))
        service.close()

    with no_request_stays_in_memory():
        run(test())
    assert "in fails" in "".join(logged)


def test_a_small_gradient_is_not_computed_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one loads modules of torch."""
    threads: list[bool] = []
    real = MultiHeadAttention.forward

    def forward(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return real(*args)

    monkeypatch.setattr(MultiHeadAttention, "forward", forward)

    async def check() -> None:
        service = open_service("cpu")
        service.registry.put(service.registry.make("default", LayerSpec(d_model=6, num_heads=3)))
        row = [[0.5] * 6]
        body = json.dumps({"query": row, "output_gradient": row, "outputs": ["query_gradient"]}).encode()
        await service.engine.answer(Request(body), ATTEND)
        service.close()

    run(check())
    assert threads and not any(threads)


@pytest.mark.parametrize("calls", [1, 2])
def test_the_numbers_that_decide_on_a_batch_are_read_where_the_body_is(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """A large bias in a thread; with batches of one call it is not read, nor for calls that are computed on the event loop."""
    real, threads = batching.may_amplify_rounding, []

    def recorded(*arguments: Any) -> bool:
        threads.append(threading.current_thread() is threading.main_thread())
        return real(*arguments)

    monkeypatch.setattr(batching, "may_amplify_rounding", recorded)
    rng = np.random.default_rng(0)
    tensors = {"query": rng.standard_normal((1, 1009, 6)).astype("f4"), "bias": rng.standard_normal((1, 1, 1009, 1009)).astype("f4")}
    body = save(tensors, {"request": json.dumps({"layer": "layer"})})

    async def check() -> None:
        service = open_service("cpu")
        service.registry.put(replace(REAL, name="layer"))
        service.scheduler.batch_limits = BatchLimits(calls)
        await service.engine.answer(Request(body, codec=CODECS[SAFETENSORS], reply_codec=CODECS[SAFETENSORS]), ATTEND)
        service.close()

    run(check())
    assert threads == [False] * (calls - 1)
