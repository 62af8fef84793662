"""The rules of serving (docs/design.md) about the queue, on a real event loop and device thread. test_executor.py has those about batches.

A device is busy until the test sets an event; nothing is timed. A clock is a number that the test sets.
"""

import asyncio
import gc
import gzip
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn

from attend.attention.call import Call, Result
from attend.attention.operations import ForwardPass
from attend.errors import AttendError, DeadlinePassed, InvalidRequest, Overloaded, ServiceFault
from attend.serving import scheduler
from attend.serving.batching import Job, batch_key
from attend.serving.calls import make_call
from attend.serving.cost import Cost, predict
from attend.serving.executor import Outcome
from attend.serving.layer_checks import check_against_layer
from attend.serving.prepared import Prepared
from attend.serving.queueing import Flow
from attend.serving.request_type import ATTEND
from attend.serving.requests import Request
from attend.serving.service import open_service
from attend.settings import Settings
from attend.web.app import create_app
from attend.web.connections import Connection
from attend.wire.codec import Decoded
from attend.wire.negotiation import CODECS, JSON
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from support.scheduler import (
    HEAVY,
    REAL,
    SPEC,
    Attention,
    Clock,
    Harness,
    assert_answers,
    heavy_call,
    layer_with,
    loop_iterations,
    outcomes_of,
    request,
    run,
)
from support.waiting import PATIENCE


@pytest.fixture
def no_inline_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is computed on the device's thread, however little it costs."""
    monkeypatch.setattr(scheduler, "INLINE_OPERATIONS", -1)


# 1. Requests are decoded and validated first; only valid ones are queued.


@pytest.mark.usefixtures("no_inline_calls")
@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b'{"layer": "layer", "query": [[1, 2, 3]]}',
        b'{"layer": "nobody", "query": [[1, 2, 3, 4, 5, 6]]}',
        b'{"layer": "layer", "query": [[1, 2, 3, 4, 5, 1e39]]}',
        b'{"layer": "layer", "query": [[1, 2, 3, 4, 5, 6]], "attend_mask": [[1, 1]]}',
    ],
    ids=["malformed", "too narrow", "no such layer", "beyond float32", "a mask that does not fit"],
)
def test_rule_1_an_invalid_request_is_refused_before_it_is_queued(body: bytes) -> None:
    """While the device is busy. It is neither in the queue nor in a batch."""

    async def test() -> None:
        service = open_service("cpu")
        attention = Attention()
        service.registry.put(layer_with(attention))
        good = Request(b'{"layer": "layer", "query": [[1, 2, 3, 4, 5, 6]]}')
        attention.gate.clear()
        busy = asyncio.create_task(service.scheduler.submit(heavy_call(attention)))
        assert await asyncio.to_thread(attention.entered.acquire, timeout=PATIENCE)
        waiting = asyncio.create_task(service.engine.answer(good, ATTEND))
        await loop_iterations()

        before = list(service.scheduler.waiting)
        with pytest.raises(AttendError):
            await service.engine.answer(Request(body), ATTEND)
        assert list(service.scheduler.waiting) == before
        assert len(before) == 1

        attention.gate.set()
        await busy
        assert b'"output"' in b"".join((await waiting)[1])
        assert attention.sizes == [1, 1]
        service.close()

    run(test())


# 2. A future is settled only if it is not done; a call whose client has disconnected is dropped before it is computed, and counted.


def test_rule_2_a_cancelled_call_is_not_computed_and_is_counted() -> None:
    """Other waiting calls are not affected."""

    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        calls = [request(b, seed=b) for b in (1, 2, 3)]
        tasks = [harness.start(call) for call in calls]
        await loop_iterations()
        tasks[1].cancel()
        harness.attention.gate.set()

        outcomes = await outcomes_of(busy, *tasks)

        assert isinstance(outcomes[2], asyncio.CancelledError)
        assert_answers([outcomes[1], outcomes[3]], [calls[0], calls[2]])
        assert harness.attention.sizes == [1, 1 + 3]
        assert harness.counted("attend_abandoned_calls_total") == 1
        assert harness.counted("attend_batch_calls_sum") == 3
        assert not harness.unhandled
        harness.scheduler.close()

    run(test())


def test_rule_2_a_call_of_a_disconnected_caller_is_not_computed_and_is_counted() -> None:
    """`gone` returns True, but the call is not cancelled."""

    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        hung_up = [False, False]
        tasks = [harness.start(request(2), gone=lambda i=i: hung_up[i]) for i in range(2)]
        await loop_iterations()
        hung_up[0] = True
        harness.attention.gate.set()

        outcomes = await outcomes_of(busy, tasks[1])

        assert_answers(outcomes, [request(1), request(2)])
        assert harness.attention.sizes == [1, 2]
        assert harness.counted("attend_abandoned_calls_total") == 1
        await outcomes_of(tasks[0])
        harness.scheduler.close()

    run(test())


@pytest.mark.usefixtures("no_inline_calls")
@pytest.mark.parametrize("size", [0, 1 << 20], ids=["small", "so large that reading was paused"])
def test_rule_2_closing_the_connection_drops_the_waiting_call(size: int) -> None:
    """Through a real server with a busy device."""

    async def test() -> None:
        app = create_app(Settings(d_model=6, num_heads=3, access_log=False))
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_config=None, timeout_graceful_shutdown=1))
        listening = socket.create_server(("127.0.0.1", 0))
        served = asyncio.create_task(server.serve([listening]))
        service, attention = app.state.service, Attention()
        while not service.started:
            await asyncio.sleep(0.001)
        service.registry.put(layer_with(attention))
        attention.gate.clear()
        busy = asyncio.create_task(service.scheduler.submit(heavy_call(attention)))
        assert await asyncio.to_thread(attention.entered.acquire, timeout=PATIENCE)

        _, writer = await asyncio.open_connection(*listening.getsockname())
        body = b'{"layer": "layer", "query": [[1, 2, 3, 4, 5, 6]]}'.ljust(size)
        writer.write(b"POST /attend HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while not service.scheduler.waiting:
            await asyncio.sleep(0.001)
        (waits,) = service.scheduler.waiting
        assert not waits.request.gone()
        writer.close()
        while not waits.request.gone():
            await asyncio.sleep(0.001)
        attention.gate.set()
        await busy
        while server.server_state.tasks:
            await asyncio.sleep(0.001)

        assert attention.sizes == [1]
        assert service.metrics.registry.get_sample_value("attend_abandoned_calls_total") == 1
        server.should_exit = True
        await served

    run(test())


@pytest.mark.parametrize("hung_up", [False, True], ids=["cancelled", "hung up"])
def test_rule_2_a_disconnect_during_computation_does_not_affect_the_batch(hung_up: bool) -> None:
    """The other calls of the batch get their results."""

    async def test() -> None:
        harness = Harness()
        harness.attention.gate.clear()
        gone = [False]
        calls = [request(b, seed=b) for b in (2, 3)]
        tasks = [harness.start(calls[0], gone=lambda: gone[0]), harness.start(calls[1])]
        await harness.until_entered()
        gone[0] = True
        if not hung_up:
            tasks[0].cancel()
            await loop_iterations()
            assert tasks[0].cancelled()
        harness.attention.gate.set()

        outcomes = await outcomes_of(*tasks)

        assert_answers(outcomes[1:], calls[1:])
        assert harness.attention.sizes == [5]
        assert not harness.unhandled
        harness.scheduler.close()

    run(test())


def test_the_failure_of_a_call_that_must_be_finished_is_no_error_of_the_event_loop() -> None:
    """Its caller has left while it was computed, so nobody else looks at the failure."""

    class Changing(ForwardPass):
        changes_state = True

    def failing(call: Call) -> None:
        raise MemoryError

    async def test() -> None:
        harness = Harness()
        harness.attention.gate.clear()
        harness.attention.fault = failing
        task = harness.start(operation=Changing())
        await harness.until_entered()
        task.cancel()
        await loop_iterations()
        assert not task.done()
        harness.attention.gate.set()
        await asyncio.wait([task])

        assert task.cancelled()
        del task
        gc.collect()
        assert not harness.unhandled
        harness.scheduler.close()

    run(test())


def test_rule_2_a_settled_future_is_not_set_again() -> None:
    """Deadline, cancellation and result in any order: the first counts, the others are dropped."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        outcome = Outcome(REAL.attention.forward(request(1)), 0.0, 0.0, 1, 1, 1)
        late, fault = DeadlinePassed("late"), ServiceFault("fault")

        def job() -> Job:
            return Job(Prepared(REAL, request(1), Cost({}, 1, 0, 1, 0)), Request(), 0.0, Flow("", 0), loop.create_future())

        for first in (outcome, late):
            one = job()
            for what in (first, outcome, late, fault):
                one.settle(what)
            assert one.future is not None
            assert (one.future.exception() or one.future.result()) is first
            assert not one.is_abandoned()
        cancelled = job()
        assert cancelled.future is not None
        cancelled.future.cancel()
        cancelled.settle(outcome)
        assert cancelled.future.cancelled()
        assert cancelled.is_abandoned()

    run(test())


# 4. A call larger than the batch limit but within the memory limit runs alone. Every call is computed or refused.


@pytest.mark.parametrize("knobs", [{"operations": 10**15}, {"memory": 10**12}], ids=["work", "memory"])
def test_rule_4_a_call_beyond_the_batch_limit_runs_alone_in_its_turn(knobs: dict[str, int]) -> None:
    """Small calls wait before and behind it, and new ones keep arriving."""

    async def test() -> None:
        harness = Harness(calls=4, operations=10**16, memory_bytes=10**13)
        busy = await harness.occupy()
        others = [harness.start() for _ in range(3)]
        big = harness.start(request(9), **knobs)
        others += [harness.start() for _ in range(3)]
        await loop_iterations()
        harness.attention.gate.set()
        while not big.done():
            others.append(harness.start())
            await loop_iterations(2)
            assert len(others) < 10_000, "small calls are always served first"

        outcomes = await outcomes_of(busy, big, *others)

        assert_answers(outcomes, [request(1), request(9), *[request(1)] * len(others)])
        assert 9 in harness.attention.sizes
        assert outcomes[1].batch == 1
        harness.scheduler.close()

    run(test())


# 5. Calls beyond the bounds of the queue are refused. The queue is bounded by cost, not by number.


@pytest.mark.parametrize("limit", ["operations", "memory"])
def test_rule_5_a_call_that_exceeds_the_queue_is_refused_at_once(limit: str) -> None:
    """With Retry-After. One caller may fill the queue until as much is free. The waiting calls are computed; then there is room."""

    async def test() -> None:
        harness = Harness(operations=20 * HEAVY, memory_bytes=2000)
        busy = await harness.occupy()
        waiting = [harness.start(memory=50) for _ in range(8)]
        await loop_iterations()
        too_much = {"operations": HEAVY * 3} if limit == "operations" else {"memory": 601}
        enough = {"operations": HEAVY * 2} if limit == "operations" else {"memory": 600}

        with pytest.raises(Overloaded) as refusal:
            await harness.start(**too_much)
        fits = harness.start(**enough)
        await loop_iterations()

        assert refusal.value.retry_after >= 1
        assert isinstance(refusal.value.retry_after, int)
        assert {"operations": "max_queue_operations", "memory": "max_queue_bytes"}[limit] in refusal.value.detail
        assert not fits.done()
        harness.attention.gate.set()
        await outcomes_of(busy, fits, *waiting)
        assert isinstance(await harness.start(**too_much), Outcome)
        harness.scheduler.close()

    run(test())


def test_rule_5_an_empty_queue_accepts_any_call() -> None:
    """Even one larger than the bound: it was admitted, and could otherwise never be computed."""

    async def test() -> None:
        harness = Harness(operations=10, memory_bytes=10)
        assert isinstance(await harness.start(operations=10**15, memory=10**15), Outcome)
        harness.scheduler.close()

    run(test())


@pytest.mark.usefixtures("no_inline_calls")
def test_rule_5_the_queue_is_bounded_by_cost_not_by_number() -> None:
    """Thousands of small calls may wait where two large ones may not."""

    async def test() -> None:
        harness = Harness(operations=10**6, memory_bytes=10**6)
        busy = await harness.occupy()
        small = [harness.start(operations=100, memory=100) for _ in range(2000)]
        await loop_iterations()
        assert len(harness.scheduler.waiting) == 2000
        with pytest.raises(Overloaded):
            await harness.start(operations=900_000, memory=1)
        for task in small:
            task.cancel()
        harness.attention.gate.set()
        await busy
        await loop_iterations()
        assert not harness.scheduler.waiting
        harness.scheduler.close()

    run(test())


@pytest.mark.usefixtures("no_inline_calls")
def test_rule_5_abandoned_calls_free_their_room_in_the_queue() -> None:
    async def test() -> None:
        harness = Harness(operations=1000)
        busy = await harness.occupy()
        impatient = [harness.start(operations=100) for _ in range(10)]
        await loop_iterations()
        for task in impatient:
            task.cancel()
        await loop_iterations()

        patient = harness.start(operations=100)
        await loop_iterations()
        harness.attention.gate.set()

        outcomes = await outcomes_of(busy, patient)
        assert_answers(outcomes, [request(1)] * 2)
        harness.scheduler.close()

    run(test())


def test_rule_12_the_work_for_a_batch_does_not_grow_with_the_number_of_waiting_calls() -> None:
    """499 calls that cannot share a batch: each is looked at when it is computed or removed, not for every batch before it. Half of them
    leave or expire meanwhile, and free their room at once."""
    looks = [0]

    def gone() -> bool:
        looks[0] += 1
        return False

    async def test() -> None:
        clock = Clock()
        harness = Harness(clock)
        busy = await harness.occupy()
        call = request(1, reproducible=True)
        tasks = [harness.start(call, gone=gone, deadline=clock.now + 0.01 if i % 4 == 1 else None) for i in range(499)]
        await loop_iterations()
        for task in tasks[::4]:
            task.cancel()
        await asyncio.wait([task for i, task in enumerate(tasks) if i % 4 == 1], timeout=PATIENCE)
        assert harness.scheduler.load[0] == len(harness.scheduler.waiting) == 249
        assert harness.counted("attend_abandoned_calls_total") == 125
        harness.attention.gate.set()
        outcomes = await outcomes_of(busy, *tasks)
        assert sum(isinstance(outcome, Outcome) for outcome in outcomes) == 250
        assert looks[0] <= 2 * 499
        harness.scheduler.close()

    run(test())


def test_rule_5_retry_after_grows_with_the_queue() -> None:
    """It falls when the device is measured to be faster."""

    async def test() -> None:
        clock = Clock()
        harness = Harness(clock, operations=10**13)
        busy = await harness.occupy()
        advice = []
        for operations in (10**9, 10**11, 10**12):
            harness.start(operations=operations).add_done_callback(lambda task: task.cancelled() or task.exception())
            await loop_iterations()
            with pytest.raises(Overloaded) as refusal:
                await harness.start(operations=10**13)
            advice.append(refusal.value.retry_after)

        assert 1 <= advice[0] < advice[1] < advice[2]
        harness.attention.gate.set()
        await busy
        harness.scheduler.close()

    run(test())


@pytest.mark.parametrize("operations", [0, 1000], ids=["no work", "hardly any work"])
def test_rule_5_small_calls_do_not_distort_retry_after(operations: int) -> None:
    """Thousands of calls with few operations take a moment each, which does not show the speed for large ones: the estimate stays within a
    few times of what it was."""

    async def advice(small: int) -> int:
        ticks = iter(range(10**9))
        harness = Harness(lambda: next(ticks) * 1e-4, operations=10**12)
        for _ in range(small):
            await harness.start(nothing, operations=operations, memory=0)
        waiting = [await harness.occupy(), harness.start(operations=9 * 10**11)]
        await loop_iterations()
        with pytest.raises(Overloaded) as refusal:
            await harness.start(operations=2 * 10**11)
        harness.attention.gate.set()
        await outcomes_of(*waiting)
        harness.scheduler.close()
        return refusal.value.retry_after

    async def test() -> None:
        assert await advice(3000) <= 10 * await advice(0)

    nothing = request(0)
    run(test())


# 6. The batch is what is queued when the device becomes free; no delay by default.


def test_rule_6_the_batch_is_what_waits_when_the_device_becomes_free() -> None:
    """A single call that finds the device idle is a batch too."""

    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        calls = [request(b, seed=b) for b in (1, 2, 3, 4)]
        tasks = []
        for call in calls:
            tasks.append(harness.start(call))
            await loop_iterations()
        assert harness.attention.sizes == [1]
        harness.attention.gate.set()

        outcomes = await outcomes_of(busy, *tasks)

        assert_answers(outcomes[1:], calls)
        assert harness.attention.sizes == [1, 10]
        assert [outcome.batch for outcome in outcomes] == [1, 4, 4, 4, 4]
        assert harness.counted("attend_batch_calls_sum") == 5
        assert harness.counted("attend_batch_calls_count") == 2
        assert (await harness.start()).batch == 1
        harness.scheduler.close()

    run(test())


def test_rule_6_without_a_delay_no_timer_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that arrive in the same iteration of the event loop are computed together, at once."""

    async def test() -> None:
        harness = Harness()
        loop = asyncio.get_running_loop()
        timers: list[Any] = []
        monkeypatch.setattr(loop, "call_later", lambda *args, **kwargs: timers.append(args))
        together = [harness.start() for _ in range(3)]
        outcomes = await asyncio.gather(*together)
        monkeypatch.undo()
        assert [outcome.batch for outcome in outcomes] == [3, 3, 3]
        assert not timers
        harness.scheduler.close()

    run(test())


def test_rule_6_a_delay_sets_one_timer_for_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call sets the timer; calls that arrive before it ends join the batch."""

    async def test() -> None:
        harness = Harness(delay=7.5)
        timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, what, *args: timers.append((delay, what, args)))
        tasks = []
        for _ in range(3):
            tasks.append(harness.start())
            await loop_iterations()
        assert not harness.attention.seen
        assert [delay for delay, _, _ in timers] == [7.5]
        _, what, args = timers[0]
        what(*args)
        outcomes = await asyncio.gather(*tasks)
        monkeypatch.undo()
        assert [outcome.batch for outcome in outcomes] == [3, 3, 3]
        assert harness.attention.sizes == [3]
        harness.scheduler.close()

    run(test())


def test_rule_6_a_delay_applies_only_to_an_idle_device() -> None:
    """Several batches wait; only the first call found the device idle."""

    async def test() -> None:
        harness = Harness(delay=7.5, calls=2)
        timers: list[Callable[[], None]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, what, *args: timers.append(partial(what, *args)))
            tasks = [harness.start() for _ in range(5)]
            await loop_iterations()
            assert not harness.attention.seen
            timers[0]()
            assert_answers(await asyncio.gather(*tasks), [request(1)] * 5)
            assert len(timers) == 1

            later = harness.start()  # the device is idle again
            await loop_iterations()
            assert len(timers) == 2
            timers[1]()
            await later
        harness.scheduler.close()

    run(test())


# 8. The clock is monotonic and injected.


def test_rule_8_only_the_injected_clock_is_read() -> None:
    """The clock moves by hours between arrival and computation; queue and compute times come from it alone."""

    async def test() -> None:
        clock = Clock()
        harness = Harness(clock)
        busy = await harness.occupy()
        waits = harness.start()
        await loop_iterations()
        clock.now += 7200.0

        def tick(call: Call) -> None:
            clock.now += 0.25

        harness.attention.fault = tick
        harness.attention.gate.set()
        first, second = await outcomes_of(busy, waits)

        assert (first.queue, first.compute) == (0.0, 7200.25)
        assert (second.queue, second.compute) == (7200.25, 0.25)
        harness.scheduler.close()

    run(test())


# Deadlines


def test_a_deadline_that_passes_in_the_queue() -> None:
    """By the injected clock it has passed when the device becomes free: the call gets an error and is not computed."""

    async def test() -> None:
        clock = Clock()
        harness = Harness(clock)
        busy = await harness.occupy()
        calls = [request(2), request(3)]
        late, in_time = harness.start(calls[0], deadline=clock.now + 100), harness.start(calls[1], deadline=clock.now + 1000)
        await loop_iterations()
        clock.now += 100
        harness.attention.gate.set()

        outcomes = await outcomes_of(busy, late, in_time)

        assert isinstance(outcomes[1], DeadlinePassed)
        assert_answers(outcomes[2:], calls[1:])
        assert harness.attention.sizes == [1, 3]
        assert harness.counted("attend_abandoned_calls_total") == 0
        harness.scheduler.close()

    run(test())


def test_a_deadline_is_reported_while_the_device_is_still_busy() -> None:
    """At the deadline, not when the device becomes free. The call is not counted as abandoned."""

    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        with pytest.raises(DeadlinePassed):
            await harness.start(request(2), deadline=harness.scheduler.clock() + 0.02)
        assert not busy.done()
        harness.attention.gate.set()
        await outcomes_of(busy, harness.start())
        assert harness.attention.sizes == [1, 1]
        assert harness.counted("attend_abandoned_calls_total") == 0
        harness.scheduler.close()

    run(test())


def test_a_deadline_that_passes_during_computation() -> None:
    """The result is dropped; the other calls of the batch get theirs."""

    async def test() -> None:
        harness = Harness()
        harness.attention.gate.clear()
        deadline = harness.scheduler.clock() + 0.02
        tasks = [harness.start(request(1)), harness.start(request(2), deadline=deadline), harness.start(request(3))]
        await harness.until_entered()
        with pytest.raises(DeadlinePassed):
            await tasks[1]
        assert not tasks[0].done()
        harness.attention.gate.set()

        outcomes = await outcomes_of(tasks[0], tasks[2], harness.start(request(4)))

        assert_answers(outcomes, [request(1), request(3), request(4)])
        assert harness.attention.sizes in ([6, 4], [4, 4])
        assert not harness.unhandled
        harness.scheduler.close()

    run(test())


@pytest.mark.parametrize("operations", [1, HEAVY], ids=["on the loop", "on the thread"])
def test_a_call_whose_deadline_has_passed_is_not_computed(operations: int) -> None:
    async def test() -> None:
        clock = Clock()
        harness = Harness(clock)
        for deadline in (clock.now, clock.now - 5):
            with pytest.raises(DeadlinePassed):
                await harness.start(operations=operations, deadline=deadline)
        assert not harness.attention.seen
        assert not harness.scheduler.waiting
        harness.scheduler.close()

    run(test())


def test_a_settled_call_leaves_no_timer() -> None:
    """A timer until a distant deadline would keep the call and its tensors in memory."""

    async def test() -> None:
        harness = Harness()
        loop = asyncio.get_running_loop()
        handles: list[asyncio.TimerHandle] = []
        real = loop.call_later

        def call_later(*args: Any, **knobs: Any) -> asyncio.TimerHandle:
            handles.append(real(*args, **knobs))
            return handles[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_later", call_later)
            await harness.start(deadline=harness.scheduler.clock() + 10**6)
        assert [handle.cancelled() for handle in handles] == [True]
        harness.scheduler.close()

    run(test())


# 12. Nothing long runs on the event loop.


@pytest.mark.parametrize(
    ("small", "fields"),
    [
        pytest.param(True, {"query": np.ones((1, 16, 6))}, id="small"),
        pytest.param(False, {"query": np.ones((8, 512, 6))}, id="many operations"),
        pytest.param(False, {"query": np.ones((1, 800, 6)), "select": {"top_k": 5}}, id="millions of weights to sort"),
        pytest.param(False, {"query": np.ones((1, 800, 6)), "dropout": {"p": 0.5, "seed": 1}}, id="millions of random numbers"),
    ],
)
def test_rule_12_only_inline_calls_are_computed_on_the_event_loop(small: bool, fields: dict[str, Any]) -> None:
    """All others are computed on the device's thread."""

    async def test() -> None:
        harness = Harness()
        body = validate(AttendRequest, {"layer": "layer", **fields})
        check_against_layer(body, SPEC)
        await harness.scheduler.submit(Prepared(harness.layer, make_call(body, SPEC), predict(body, SPEC)))
        assert (harness.attention.threads == [threading.get_ident()]) == small
        harness.scheduler.close()

    run(test())


def test_rule_12_a_compressed_body_is_decoded_in_a_thread() -> None:
    """Its size is that after decompression."""
    threads: list[int] = []

    def decode(*args: Any) -> Decoded:
        threads.append(threading.get_ident())
        return CODECS[JSON].decode(*args)

    async def test() -> None:
        service = open_service("cpu")
        service.registry.put(REAL)
        row = b"[0,0,0,0,0,0],"
        for rows in (10, 400_000):
            body = b'{"layer": "layer", "outputs": ["log_sum_exp"], "key": [[0,0,0,0,0,0]], "query": [' + (row * rows)[:-1] + b"]}"
            packed = gzip.compress(body)
            assert len(packed) < 64 * 1024
            await service.engine.answer(Request(packed, replace(CODECS[JSON], decode=decode), coding="gzip"), ATTEND)
        service.close()
        assert len(threads) == 2
        assert threads[1] != threading.get_ident()

    run(test())


# 14. No caller, however heavy, delays callers of small calls by more than a few of the longest single calls.


def test_rule_14_inline_calls_do_not_wait_for_the_device() -> None:
    """On a CPU they are computed on the event loop on arrival, while the device's thread computes another call."""

    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        light = Attention()
        calls = [request(b, seed=b) for b in (1, 2, 3)]
        layer = layer_with(light)
        tasks = [harness.start(call, operations=1, layer=layer, caller="the same") for call in calls]
        heavy = [harness.start(caller="the same") for _ in range(20)]

        assert_answers(await outcomes_of(*tasks), calls)

        assert light.sizes == [1, 2, 3]
        assert set(light.threads) == {threading.get_ident()}
        assert harness.counted("attend_batch_calls_count") == 4
        assert harness.attention.sizes == [1]
        harness.attention.gate.set()
        await outcomes_of(busy, *heavy)
        harness.scheduler.close()

    run(test())


def test_a_small_reproducible_call_does_not_block_the_event_loop() -> None:
    """The one thread that computes such calls may be busy with a long one."""

    async def test() -> None:
        harness = Harness()
        task = harness.start(request(2).with_options(reproducible=True), operations=1)
        await outcomes_of(task)
        assert harness.attention.threads and threading.get_ident() not in harness.attention.threads
        assert harness.counted("attend_batch_calls_count") == 1
        busy = await harness.occupy()
        waits = harness.start(request(1).with_options(reproducible=True), operations=1)
        await loop_iterations()
        assert len(harness.scheduler.waiting) == 1
        harness.attention.gate.set()
        await outcomes_of(busy, waits)
        harness.scheduler.close()

    run(test())


def test_rule_14_inline_calls_do_not_make_a_hung_device_ready() -> None:
    """They are computed on the event loop and do not show that the device's thread works."""

    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        finished_at = harness.scheduler.finished_at
        await harness.start(operations=1, layer=layer_with(Attention()))
        assert harness.scheduler.finished_at == finished_at
        harness.attention.gate.set()
        await busy
        assert harness.scheduler.finished_at > finished_at
        harness.scheduler.close()

    run(test())


def test_rule_14_a_call_waits_for_at_most_one_call_of_each_other_caller() -> None:
    """Ten heavy calls of each of three callers wait; the one call of a fourth is among the next four."""

    async def test() -> None:
        harness = Harness(calls=1)
        busy = await harness.occupy()
        heavy = [harness.start(request(2), operations=10**9, caller=name) for _ in range(10) for name in "abc"]
        await loop_iterations()
        last = harness.start(request(3), operations=10**9, caller="d")
        await loop_iterations()
        harness.attention.gate.set()
        await outcomes_of(busy, last, *heavy)
        assert harness.attention.sizes.index(3) <= 4
        harness.scheduler.close()

    run(test())


@pytest.mark.usefixtures("no_inline_calls")
def test_rule_14_small_calls_do_not_wait_for_heavy_calls_of_the_same_caller() -> None:
    """Calls of another size class are another flow: two programs may share an address."""

    async def test() -> None:
        harness = Harness(calls=1)
        busy = await harness.occupy()
        heavy = [harness.start(request(2), operations=10**11, caller="address") for _ in range(5)]
        await loop_iterations()
        small = [harness.start(request(3), operations=10**6, caller="address") for _ in range(5)]
        await loop_iterations()
        harness.attention.gate.set()
        await outcomes_of(busy, *heavy, *small)
        assert harness.attention.sizes == [1, 2, 3, 3, 3, 3, 3, 2, 2, 2, 2]
        harness.scheduler.close()

    run(test())


def test_rule_14_one_caller_can_use_half_of_the_queue() -> None:
    """Calls of others, and its own of another size class, are still accepted."""

    async def test() -> None:
        harness = Harness(operations=10**12)
        busy = await harness.occupy()
        waiting = [harness.start(operations=10**11, caller="a") for _ in range(5)]
        await loop_iterations()
        with pytest.raises(Overloaded):
            await harness.start(operations=10**11, caller="a")
        waiting += [harness.start(operations=10**11, caller="b"), harness.start(operations=10**9, caller="a")]
        await loop_iterations()
        harness.attention.gate.set()
        assert all(isinstance(outcome, Outcome) for outcome in await outcomes_of(busy, *waiting))
        harness.scheduler.close()

    run(test())


def test_rule_14_retry_after_uses_the_speed_of_each_size_class() -> None:
    """A heavy call takes 10 s; four wait behind one that has run for 4 s: 46 s remain. Small calls, ten times slower per operation, do not
    change that."""

    async def test() -> None:
        clock = Clock()
        harness = Harness(clock, operations=10**13)

        def took(seconds: float) -> Callable[[Call], None]:
            def pass_time(call: Call) -> None:
                clock.now += seconds

            return pass_time

        harness.attention.fault = took(10.0)
        await harness.start(operations=10**11)
        harness.attention.fault = took(0.1)
        for _ in range(20):
            await harness.start(operations=10**8)
        harness.attention.fault = lambda call: None
        harness.attention.gate.clear()
        while harness.attention.entered.acquire(blocking=False):
            pass
        tasks = [harness.start(request(1, reproducible=True), operations=10**11) for _ in range(5)]
        await harness.until_entered()
        clock.now += 4.0
        with pytest.raises(Overloaded) as refusal:
            await harness.start(operations=10**13)
        assert refusal.value.retry_after == 46
        harness.attention.gate.set()
        await outcomes_of(*tasks)
        harness.scheduler.close()

    run(test())


# All rules together


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hang_ups", [0.0, 0.1], ids=["nobody hangs up", "some hang up"])
def test_every_call_gets_exactly_one_outcome(seed: int, hang_ups: float) -> None:
    """Hundreds of callers, some of which cancel, disconnect, set short deadlines, exceed limits or meet a failure. Each result belongs to
    its call."""
    rng = np.random.default_rng(seed)

    async def test() -> None:
        clock = Clock()
        harness = Harness(clock, operations=200 * HEAVY, calls=int(rng.integers(1, 9)))

        def attend(call: Call) -> Result:
            clock.now += 0.001
            if call.query.shape[0] > 12:
                raise MemoryError
            if bool((call.query == -1).any()):
                raise ValueError("a poisoned batch")
            return Result({"output": call.query * 2 + call.key.shape[1]})

        others = [layer_with(Attention(attend), name) for name in ("a", "b")]
        outcomes: dict[int, Any] = {}
        wanted: dict[int, torch.Tensor] = {}
        hung_up: set[int] = set()

        async def caller(i: int) -> None:
            b, length = int(rng.choice([1, 2, 5, 13])), int(rng.choice([2, 3]))
            query = torch.full((b, 4, 6), -1.0 if rng.random() < 0.02 else float(i + 1))
            call = replace(request(1), query=query, key=torch.zeros(b, length, 6), value=torch.zeros(b, length, 6))
            call = call.with_options(items=b, num_queries=4, num_keys=length, self_attention=False, keys_as_values=False)
            wanted[i] = call.query * 2 + length
            deadline = clock.now + float(rng.choice([0.0, 0.004, 1e6])) if rng.random() < 0.2 else None
            try:
                layer = others[int(rng.integers(2))]
                cost, sent = Cost({}, int(rng.choice([1, HEAVY])), 0, 1, 0), Request(deadline=deadline, gone=lambda: i in hung_up)
                outcomes[i] = await harness.scheduler.submit(Prepared(layer, call, cost, batch_key=batch_key(layer, call)), sent)
            except (AttendError, asyncio.CancelledError) as error:
                outcomes[i] = error

        tasks = []
        for i in range(300):
            tasks.append(asyncio.create_task(caller(i)))
            if rng.random() < 0.3:
                await loop_iterations(int(rng.integers(1, 4)))
            if rng.random() < 0.1:
                tasks[int(rng.integers(len(tasks)))].cancel()
            if rng.random() < hang_ups:
                hung_up |= set(rng.integers(max(0, i - 10), i + 1, 3).tolist())
        _, pending = await asyncio.wait(tasks, timeout=PATIENCE)
        for task in pending:
            task.cancel()
        assert not pending, f"{len(pending)} callers do not end"

        answered = {i: one for i, one in outcomes.items() if isinstance(one, Outcome)}
        never_ran = {i for i, task in enumerate(tasks) if task.cancelled()}
        assert set(outcomes) | never_ran == set(range(300))
        assert len(answered) > 30
        for i, outcome in answered.items():
            assert torch.equal(outcome.result.tensors["output"], wanted[i])
        assert not harness.scheduler.waiting
        assert not harness.unhandled
        harness.scheduler.close()

    run(test())


def test_the_checks_detect_lost_and_swapped_outcomes() -> None:
    async def test() -> None:
        never: asyncio.Task[Any] = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            wait = asyncio.wait
            patch.setattr(asyncio, "wait", lambda tasks, timeout: wait(tasks, timeout=0.01))
            with pytest.raises(AssertionError, match="do not end"):
                await outcomes_of(never)
        harness = Harness()
        outcomes = await outcomes_of(harness.start(request(1, seed=1)))
        with pytest.raises(AssertionError):
            assert_answers(outcomes, [request(1, seed=2)])
        with pytest.raises(AssertionError):
            assert_answers([InvalidRequest("no")], [request(1)])
        harness.scheduler.close()

    run(test())
