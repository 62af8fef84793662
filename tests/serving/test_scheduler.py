"""The rules of serving (docs/design.md), one by one, on a real event loop and a real device thread.

A device is busy until the test sets an event; nothing is timed. A clock is a number that the test sets.
"""

import asyncio
import gzip
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from support.scheduler import HEAVY, LOST, PATIENCE, REAL, REGISTRY, SPEC, Attention, Bench, Clock, held, request, run, settled, turns

from service.attention.call import Call, Result
from service.errors import AttendError, DeadlinePassed, InvalidRequest, OutOfMemory, Overloaded, ServiceFault
from service.serving import batching, executor, probe, scheduler
from service.serving.admission import ServingLimits
from service.serving.batching import Entry
from service.serving.binding import check_against_layer, make_call
from service.serving.cost import Cost, predict
from service.serving.engine import ATTEND
from service.serving.executor import Execution, Outcome
from service.serving.requests import RawRequest
from service.serving.scheduler import UNHEALTHY_AFTER
from service.serving.service import open_service
from service.settings import Settings
from service.spec import LayerSpec
from service.web.app import create_app
from service.web.connections import Connection
from service.wire.codec import Decoded, NativeCodec
from service.wire.json.reader import parse
from service.wire.json.writer import encode_json
from service.wire.limits import WireLimits
from service.wire.negotiation import JSON
from service.wire.problems import validate
from service.wire.schemas.attend import AttendRequest


@pytest.fixture
def no_light_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is computed on the device's thread, however little it costs."""
    monkeypatch.setattr(scheduler, "LIGHT_OPERATIONS", -1)


def assert_answers(outcomes: list[Any], calls: list[Call]) -> None:
    """Every outcome is the result of its own call."""
    for outcome, call in zip(outcomes, calls, strict=True):
        assert isinstance(outcome, Outcome), repr(outcome)
        expected = REAL.attention.forward(call)
        for name, tensor in expected.tensors.items():
            error = (outcome.result.tensors[name] - tensor).abs().max().item() if tensor.numel() else 0.0
            assert error <= 1e-6 * tensor.abs().max().item() if tensor.numel() else True
            assert outcome.result.tensors[name].shape == tensor.shape


# 1. Decode and validate first; batch only what is bound.


@pytest.mark.usefixtures("no_light_calls")
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
def test_law_1_an_invalid_request_is_refused_before_it_is_queued(body: bytes) -> None:
    """While the device is busy. It is neither in the queue nor in a batch."""

    async def test() -> None:
        service = open_service("cpu", WireLimits(), ServingLimits())
        attention = Attention()
        service.registry.put(held(attention))
        good = RawRequest(b'{"layer": "layer", "query": [[1, 2, 3, 4, 5, 6]]}')
        attention.door.clear()
        busy = asyncio.create_task(service.scheduler.submit(held(attention), request(1), Cost({}, HEAVY, 0, 1, 0)))
        assert await asyncio.to_thread(attention.entered.acquire, timeout=PATIENCE)
        waiting = asyncio.create_task(service.engine.answer(good, ATTEND))
        await turns()

        before = list(service.scheduler.waiting)
        with pytest.raises(AttendError):
            await service.engine.answer(RawRequest(body), ATTEND)
        assert list(service.scheduler.waiting) == before
        assert len(before) == 1

        attention.door.set()
        await busy
        assert b'"output"' in b"".join((await waiting).pieces)
        assert attention.sizes == [1, 1]
        service.close()

    run(test())


# 2. A future is settled only if it is not done; a call whose client has disconnected is dropped before it is computed, and counted.


def test_law_2_a_cancelled_call_is_not_computed_and_is_counted() -> None:
    """Other waiting calls are not affected."""

    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        calls = [request(b, seed=b) for b in (1, 2, 3)]
        tasks = [bench.start(call) for call in calls]
        await turns()
        tasks[1].cancel()
        bench.attention.door.set()

        outcomes = await settled(busy, *tasks)

        assert isinstance(outcomes[2], asyncio.CancelledError)
        assert_answers([outcomes[1], outcomes[3]], [calls[0], calls[2]])
        assert bench.attention.sizes == [1, 1 + 3]
        assert bench.counted("attend_abandoned_calls_total") == 1
        assert bench.counted("attend_batch_calls_sum") == 3
        assert not bench.unhandled
        bench.scheduler.close()

    run(test())


def test_law_2_a_call_of_a_disconnected_caller_is_not_computed_and_is_counted() -> None:
    """`gone` returns True; nothing cancels the call."""

    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        hung_up = [False, False]
        tasks = [bench.start(request(2), gone=lambda i=i: hung_up[i]) for i in range(2)]
        await turns()
        hung_up[0] = True
        bench.attention.door.set()

        outcomes = await settled(busy, tasks[1])

        assert_answers(outcomes, [request(1), request(2)])
        assert bench.attention.sizes == [1, 2]
        assert bench.counted("attend_abandoned_calls_total") == 1
        await settled(tasks[0])
        bench.scheduler.close()

    run(test())


@pytest.mark.usefixtures("no_light_calls")
@pytest.mark.parametrize("size", [0, 1 << 20], ids=["small", "so large that reading was paused"])
def test_law_2_closing_the_connection_drops_the_waiting_call(size: int) -> None:
    """Through a real server with a busy device."""

    async def test() -> None:
        app = create_app(Settings(d_model=6, num_heads=3, access_log=False))
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_config=None, timeout_graceful_shutdown=1))
        listening = socket.create_server(("127.0.0.1", 0))
        served = asyncio.create_task(server.serve([listening]))
        service, attention = app.state.service, Attention()
        while not service.started:
            await asyncio.sleep(0.001)
        service.registry.put(held(attention))
        attention.door.clear()
        busy = asyncio.create_task(service.scheduler.submit(held(attention), request(1), Cost({}, HEAVY, 0, 1, 0)))
        assert await asyncio.to_thread(attention.entered.acquire, timeout=PATIENCE)

        _, writer = await asyncio.open_connection(*listening.getsockname())
        body = b'{"layer": "layer", "query": [[1, 2, 3, 4, 5, 6]]}'.ljust(size)
        writer.write(b"POST /attend HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while not service.scheduler.waiting:
            await asyncio.sleep(0.001)
        (waits,) = service.scheduler.waiting
        assert not waits.gone()
        writer.close()
        while not waits.gone():
            await asyncio.sleep(0.001)
        attention.door.set()
        await busy
        while server.server_state.tasks:
            await asyncio.sleep(0.001)

        assert attention.sizes == [1]
        assert service.metrics.registry.get_sample_value("attend_abandoned_calls_total") == 1
        server.should_exit = True
        await served

    run(test())


@pytest.mark.parametrize("hung_up", [False, True], ids=["cancelled", "hung up"])
def test_law_2_a_disconnect_during_computation_does_not_affect_the_batch(hung_up: bool) -> None:
    """The other calls of the batch get their results."""

    async def test() -> None:
        bench = Bench()
        bench.attention.door.clear()
        gone = [False]
        calls = [request(b, seed=b) for b in (2, 3)]
        tasks = [bench.start(calls[0], gone=lambda: gone[0]), bench.start(calls[1])]
        await bench.until_entered()
        gone[0] = True
        if not hung_up:
            tasks[0].cancel()
            await turns()
            assert tasks[0].cancelled()
        bench.attention.door.set()

        outcomes = await settled(*tasks)

        assert_answers(outcomes[1:], calls[1:])
        assert bench.attention.sizes == [5]
        assert not bench.unhandled
        bench.scheduler.close()

    run(test())


def test_law_2_a_settled_future_is_not_set_again() -> None:
    """Deadline, cancellation and result in any order: the first counts, the others are dropped."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        outcome = Outcome(REAL.attention.forward(request(1)), 0.0, 0.0, 1, Execution(1))
        late, fault = DeadlinePassed("late"), ServiceFault("fault")

        def entry() -> Entry:
            return Entry(REAL, request(1), Cost({}, 1, 0, 1, 0), 0.0, future=loop.create_future())

        for first in (outcome, late):
            one = entry()
            for what in (first, outcome, late, fault):
                one.settle(what)
            assert one.future is not None
            assert (one.future.exception() or one.future.result()) is first
            assert one.is_settled()
            assert not one.is_abandoned()
        cancelled = entry()
        assert cancelled.future is not None
        cancelled.future.cancel()
        cancelled.settle(outcome)
        assert cancelled.future.cancelled()
        assert cancelled.is_abandoned()

    run(test())


# 3. A failure in sizing, stacking, computing or splitting reaches every call of that batch, and the loop goes on.


class Once:
    """Raises an exception when it is first called; later calls go to the function that it replaces."""

    def __init__(self, what: Callable[..., Any]) -> None:
        self.what, self.failed = what, False

    def __call__(self, *args: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise RuntimeError("out of order")
        return self.what(*args)


@pytest.mark.parametrize("stage", ["sizing", "counting", "stacking", "computing", "splitting"])
def test_law_3_a_failure_reaches_every_call_of_its_batch(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it happens. The next batch is computed."""

    async def test() -> None:
        bench = Bench()
        if stage == "computing":
            monkeypatch.setattr(bench.attention, "forward", Once(bench.attention.forward))
        elif stage == "counting":
            monkeypatch.setattr(bench.metrics, "batched", Once(bench.metrics.batched))
        elif stage == "splitting":
            once = Once(Result.split)
            monkeypatch.setattr(Result, "split", lambda result, sizes: once(result, sizes))
        else:
            name = {"sizing": "form_batch", "stacking": "stack"}[stage]
            monkeypatch.setattr(scheduler if name == "form_batch" else executor, name, Once(getattr(batching, name)))
        calls = [request(b, seed=b) for b in (1, 2, 3)]

        outcomes = await settled(*(bench.start(call) for call in calls))

        if stage == "counting" and any(isinstance(outcome, Outcome) for outcome in outcomes):
            assert_answers(outcomes, calls)  # no harm done
        else:
            assert [type(outcome) for outcome in outcomes] == [ServiceFault] * 3
            assert [type(outcome.__cause__) for outcome in outcomes] == [RuntimeError] * 3
        assert_answers(await settled(*(bench.start(call) for call in calls)), calls)
        assert not bench.scheduler.waiting
        assert bench.scheduler.healthy
        bench.scheduler.close()

    run(test())


def test_law_3_a_failure_of_a_light_call_affects_no_other_call() -> None:
    async def test() -> None:
        bench = Bench()
        bench.attention.forward = Once(bench.attention.forward)  # type: ignore[method-assign]
        first, *others = await settled(*(bench.start(operations=1) for _ in range(3)))
        assert isinstance(first, ServiceFault)
        assert isinstance(first.__cause__, RuntimeError)
        assert_answers(others, [request(1)] * 2)
        assert bench.scheduler.healthy
        bench.scheduler.close()

    run(test())


def test_law_3_a_failure_does_not_affect_other_batches() -> None:
    """Waiting calls to another layer are computed."""

    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        broken = Attention()
        broken.fault = lambda call: (_ for _ in ()).throw(ValueError("broken"))
        broken_layer = held(broken)
        tasks = [bench.start(layer=broken_layer if i % 2 else bench.layer) for i in range(6)]
        await turns()
        bench.attention.door.set()

        outcomes = await settled(busy, *tasks)

        assert_answers([outcomes[i] for i in (0, 1, 3, 5)], [request(1)] * 4)
        assert [type(outcomes[i]) for i in (2, 4, 6)] == [ServiceFault] * 3
        assert broken.sizes == [3]
        bench.scheduler.close()

    run(test())


# 4. A call larger than the batch limit but below the memory limit runs alone. None waits for ever.


@pytest.mark.parametrize("knobs", [{"operations": 10**15}, {"memory": 10**12}], ids=["work", "memory"])
def test_law_4_a_call_beyond_the_batch_limit_runs_alone_in_its_turn(knobs: dict[str, int]) -> None:
    """Small calls wait before and behind it, and new ones keep arriving."""

    async def test() -> None:
        bench = Bench(calls=4, operations=10**16, memory_bytes=10**13)
        busy = await bench.occupy()
        others = [bench.start() for _ in range(3)]
        big = bench.start(request(9), **knobs)
        others += [bench.start() for _ in range(3)]
        await turns()
        bench.attention.door.set()
        while not big.done():
            others.append(bench.start())
            await turns(2)
            assert len(others) < 10_000, "small calls for ever"

        outcomes = await settled(busy, big, *others)

        assert_answers(outcomes, [request(1), request(9), *[request(1)] * len(others)])
        assert 9 in bench.attention.sizes
        assert outcomes[1].batch == 1
        bench.scheduler.close()

    run(test())


# 5. A full queue is an answer, bounded by cost, not by count.


@pytest.mark.parametrize("limit", ["operations", "memory"])
def test_law_5_a_call_that_exceeds_the_queue_is_refused_at_once(limit: str) -> None:
    """With Retry-After. The waiting calls are computed; then there is room."""

    async def test() -> None:
        bench = Bench(operations=10 * HEAVY, memory_bytes=1000)
        busy = await bench.occupy()
        waiting = [bench.start(memory=50) for _ in range(8)]
        await turns()
        too_much = {"operations": HEAVY * 3} if limit == "operations" else {"memory": 601}
        enough = {"operations": HEAVY * 2} if limit == "operations" else {"memory": 600}

        with pytest.raises(Overloaded) as refusal:
            await bench.start(**too_much)
        fits = bench.start(**enough)
        await turns()

        assert refusal.value.retry_after >= 1
        assert isinstance(refusal.value.retry_after, int)
        assert {"operations": "max_queue_operations", "memory": "max_queue_bytes"}[limit] in refusal.value.detail
        assert not fits.done()
        bench.attention.door.set()
        await settled(busy, fits, *waiting)
        assert isinstance(await bench.start(**too_much), Outcome)
        bench.scheduler.close()

    run(test())


def test_law_5_an_empty_queue_accepts_any_call() -> None:
    """Even one larger than the bound: it was admitted, and could otherwise never be computed."""

    async def test() -> None:
        bench = Bench(operations=10, memory_bytes=10)
        assert isinstance(await bench.start(operations=10**15, memory=10**15), Outcome)
        bench.scheduler.close()

    run(test())


@pytest.mark.usefixtures("no_light_calls")
def test_law_5_the_queue_is_bounded_by_cost_not_by_number() -> None:
    """Thousands of small calls may wait where two large ones may not."""

    async def test() -> None:
        bench = Bench(operations=10**6, memory_bytes=10**6)
        busy = await bench.occupy()
        small = [bench.start(operations=100, memory=100) for _ in range(2000)]
        await turns()
        assert len(bench.scheduler.waiting) == 2000
        with pytest.raises(Overloaded):
            await bench.start(operations=900_000, memory=1)
        for task in small:
            task.cancel()
        bench.attention.door.set()
        await busy
        await turns()
        assert not bench.scheduler.waiting
        bench.scheduler.close()

    run(test())


@pytest.mark.usefixtures("no_light_calls")
def test_law_5_abandoned_calls_free_their_room_in_the_queue() -> None:
    async def test() -> None:
        bench = Bench(operations=1000)
        busy = await bench.occupy()
        impatient = [bench.start(operations=100) for _ in range(10)]
        await turns()
        for task in impatient:
            task.cancel()
        await turns()

        patient = bench.start(operations=100)
        await turns()
        bench.attention.door.set()

        outcomes = await settled(busy, patient)
        assert_answers(outcomes, [request(1)] * 2)
        bench.scheduler.close()

    run(test())


def test_law_5_retry_after_grows_with_the_queue() -> None:
    """It falls when the device is measured to be faster."""

    async def test() -> None:
        clock = Clock()
        bench = Bench(clock, operations=10**13)
        busy = await bench.occupy()
        advice = []
        for operations in (10**9, 10**11, 10**12):
            bench.start(operations=operations).add_done_callback(lambda task: task.cancelled() or task.exception())
            await turns()
            with pytest.raises(Overloaded) as refusal:
                await bench.start(operations=10**13)
            advice.append(refusal.value.retry_after)

        assert 1 <= advice[0] < advice[1] < advice[2]
        bench.attention.door.set()
        await busy
        bench.scheduler.close()

    run(test())


@pytest.mark.parametrize("operations", [0, 1000], ids=["no work", "hardly any work"])
def test_law_5_small_calls_do_not_distort_retry_after(operations: int) -> None:
    """Thousands of calls with few operations take a moment each, which does not show the speed for large ones: the estimate stays within a
    few times of what it was."""

    async def advice(small: int) -> int:
        ticks = iter(range(10**9))
        bench = Bench(lambda: next(ticks) * 1e-4, operations=10**12)
        for _ in range(small):
            await bench.start(nothing, operations=operations, memory=0)
        waiting = [await bench.occupy(), bench.start(operations=9 * 10**11)]
        await turns()
        with pytest.raises(Overloaded) as refusal:
            await bench.start(operations=2 * 10**11)
        bench.attention.door.set()
        await settled(*waiting)
        bench.scheduler.close()
        return refusal.value.retry_after

    async def test() -> None:
        assert await advice(9000) <= 10 * await advice(0)

    nothing = request(0)
    run(test())


# 6. The batch is what waits when the device becomes free; there is no delay by default.


def test_law_6_the_batch_is_what_waits_when_the_device_becomes_free() -> None:
    """A single call that finds the device idle is a batch too."""

    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        calls = [request(b, seed=b) for b in (1, 2, 3, 4)]
        tasks = []
        for call in calls:
            tasks.append(bench.start(call))
            await turns()
        assert bench.attention.sizes == [1]
        bench.attention.door.set()

        outcomes = await settled(busy, *tasks)

        assert_answers(outcomes[1:], calls)
        assert bench.attention.sizes == [1, 10]
        assert [outcome.batch for outcome in outcomes] == [1, 4, 4, 4, 4]
        assert bench.counted("attend_batch_calls_sum") == 5
        assert bench.counted("attend_batch_calls_count") == 2
        assert (await bench.start()).batch == 1
        bench.scheduler.close()

    run(test())


def test_law_6_without_a_delay_no_timer_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that arrive in the same iteration of the event loop are computed together, at once."""

    async def test() -> None:
        bench = Bench()
        loop = asyncio.get_running_loop()
        timers: list[Any] = []
        monkeypatch.setattr(loop, "call_later", lambda *args, **kwargs: timers.append(args))
        together = [bench.start() for _ in range(3)]
        outcomes = await asyncio.gather(*together)
        monkeypatch.undo()
        assert [outcome.batch for outcome in outcomes] == [3, 3, 3]
        assert not timers
        bench.scheduler.close()

    run(test())


def test_law_6_a_delay_sets_one_timer_for_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call sets the timer; calls that arrive before it ends join the batch."""

    async def test() -> None:
        bench = Bench(delay=7.5)
        timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, what, *args: timers.append((delay, what, args)))
        tasks = []
        for _ in range(3):
            tasks.append(bench.start())
            await turns()
        assert not bench.attention.seen
        assert [delay for delay, _, _ in timers] == [7.5]
        _, what, args = timers[0]
        what(*args)
        outcomes = await asyncio.gather(*tasks)
        monkeypatch.undo()
        assert [outcome.batch for outcome in outcomes] == [3, 3, 3]
        assert bench.attention.sizes == [3]
        bench.scheduler.close()

    run(test())


def test_law_6_a_delay_applies_only_to_an_idle_device() -> None:
    """Several batches wait; only the first call found the device idle."""

    async def test() -> None:
        bench = Bench(delay=7.5, calls=2)
        timers: list[Callable[[], None]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, what, *args: timers.append(partial(what, *args)))
            tasks = [bench.start() for _ in range(5)]
            await turns()
            assert not bench.attention.seen
            timers[0]()
            assert_answers(await asyncio.gather(*tasks), [request(1)] * 5)
            assert len(timers) == 1

            later = bench.start()  # finds it idle again
            await turns()
            assert len(timers) == 2
            timers[1]()
            await later
        bench.scheduler.close()

    run(test())


# 7. A batched answer equals the solo answer; bit for bit with `reproducible`.


def test_law_7_a_batched_result_equals_the_result_alone() -> None:
    """Calls with different masks and sizes; those of one shape are computed together."""

    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        sizes = [(1, 4), (3, 4), (2, 5), (4, 4), (5, 4), (1, 7), (2, 4), (1, 3), (3, 2), (2, 4), (1, 11), (2, 1)]  # batch and queries
        calls = []
        for seed, (b, queries) in enumerate(sizes):
            kinds: list[dict[str, Any]] = [
                {"valid_lens": np.repeat(queries // 2, b)},
                {"attend_mask": np.tri(queries)},
                {"causal": True},
                {"head_scale": [1.0, 0.5, 2.0]},
            ]
            calls.append(request(b, seed, queries, **kinds[seed % 4]))
        tasks = [bench.start(call) for call in calls]
        await turns()
        bench.attention.door.set()

        outcomes = await settled(busy, *tasks)

        assert_answers(outcomes[1:], calls)
        assert max(outcome.batch for outcome in outcomes[1:]) > 1
        bench.scheduler.close()

    run(test())


def test_law_7_reproducible_calls_are_bit_for_bit_equal_at_any_load() -> None:
    """They are computed alone, on one thread. Other calls keep their number of threads, also those that start at the same time."""

    async def test() -> None:
        bench = Bench()
        spec = LayerSpec(d_model=64, num_heads=8)
        layer = REGISTRY.make("wide", spec)
        counts: list[tuple[int, int]] = []  # threads of arithmetic in the thread that computes, and in one that starts meanwhile

        def spied(call: Call) -> Result:
            with ThreadPoolExecutor(1) as other:
                counts.append((torch.get_num_threads(), other.submit(torch.get_num_threads).result()))
            return layer.attention.forward(call)

        bench.layer = held(Attention(spied))
        query = np.random.default_rng(1).standard_normal((2, 32, 64))
        call = make_call(validate(AttendRequest, {"query": query, "reproducible": True}), spec)
        company = [make_call(validate(AttendRequest, {"query": query * i}), spec) for i in range(1, 5)]

        (lonely,) = await settled(bench.start(call))
        tasks = [bench.start(c) for c in (*company[:2], call, *company[2:], call)]
        crowded = await settled(*tasks)

        assert [outcome.batch for outcome in crowded] == [4, 4, 1, 4, 4, 1]
        for outcome in (crowded[2], crowded[5]):
            for name, tensor in lonely.result.tensors.items():
                assert torch.equal(outcome.result.tensors[name], tensor)
        assert counts == [(1, 2), (2, 2), (1, 2), (1, 2)]
        bench.scheduler.close()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(test())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# 8. The clock is monotonic and injected.


def test_law_8_only_the_injected_clock_is_read() -> None:
    """Hours pass between arrival and computation if the clock says so; queue and compute times come from it alone."""

    async def test() -> None:
        clock = Clock()
        bench = Bench(clock)
        busy = await bench.occupy()
        waits = bench.start()
        await turns()
        clock.now += 7200.0

        def tick(call: Call) -> None:
            clock.now += 0.25

        bench.attention.fault = tick
        bench.attention.door.set()
        first, second = await settled(busy, waits)

        assert (first.queue, first.compute) == (0.0, 7200.25)
        assert (second.queue, second.compute) == (7200.25, 0.25)
        bench.scheduler.close()

    run(test())


# 9. Out of memory splits the batch and tries the halves.


def beyond(n: int, error: Callable[[], BaseException]) -> Callable[[Call], None]:
    """There is memory for n items at once."""

    def fault(call: Call) -> None:
        if call.query.shape[0] > n:
            raise error()

    return fault


def what_torch_raises() -> BaseException:
    """What its CPU allocator raises when there is no memory."""
    try:
        torch.empty(1 << 52)
    except RuntimeError as error:
        return error
    raise AssertionError("32 petabytes were there")


SHORTAGES = [
    pytest.param(lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), id="torch on a GPU"),
    pytest.param(what_torch_raises, id="torch on the CPU"),
    pytest.param(lambda: MemoryError(), id="numpy and Python"),
]


@pytest.mark.parametrize("error", SHORTAGES)
def test_law_9_a_batch_that_runs_out_of_memory_is_split(error: Callable[[], BaseException]) -> None:
    """Memory for three items: calls of one to three items are answered, the one of five gets OutOfMemory."""

    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        calls = [request(b, seed=i) for i, b in enumerate([1, 2, 5, 3, 1, 1, 1])]
        tasks = [bench.start(call) for call in calls]
        await turns()
        bench.attention.fault = beyond(3, error)
        bench.attention.door.set()

        outcomes = await settled(busy, *tasks)

        assert isinstance(outcomes[3], OutOfMemory)
        assert_answers([*outcomes[1:3], *outcomes[4:]], [*calls[:2], *calls[3:]])
        assert bench.attention.sizes[1] == 14
        assert bench.attention.sizes.count(5) == 1
        assert bench.counted("attend_out_of_memory_splits_total") >= 2
        assert max(b for b in bench.attention.sizes[2:] if b != 5) < 14
        assert bench.scheduler.healthy
        assert_answers(await settled(bench.start()), [request(1)])
        bench.scheduler.close()

    run(test())


def test_law_9_running_out_of_memory_while_stacking_splits_the_batch() -> None:
    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        tasks = [bench.start(request(b)) for b in (2, 2, 2, 2)]
        await turns()

        def stack(calls: list[Call]) -> Call:
            if len(calls) > 1:
                raise MemoryError
            return batching.stack(calls)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "stack", stack)
            bench.attention.door.set()
            outcomes = await settled(busy, *tasks)
        assert_answers(outcomes[1:], [request(2)] * 4)
        bench.scheduler.close()

    run(test())


def test_law_9_memory_of_the_failed_batch_is_freed_before_the_halves_run() -> None:
    class Intermediate:
        """Stands for the scores of a batch that ran out of memory half way."""

    async def test() -> None:
        bench = Bench()
        held_still: list[int] = []
        intermediates: list[weakref.ref[Intermediate]] = []

        def attend(call: Call) -> Result:
            held_still.append(sum(ref() is not None for ref in intermediates))
            intermediate = Intermediate()
            intermediates.append(weakref.ref(intermediate))
            if call.query.shape[0] > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return REAL.attention.forward(call)

        bench.layer = held(Attention(attend))
        outcomes = await settled(*(bench.start(request(1, seed)) for seed in range(4)))
        assert_answers(outcomes, [request(1, seed) for seed in range(4)])
        assert held_still == [0] * 7
        bench.scheduler.close()

    run(test())


def test_law_9_readiness_falls_after_repeated_out_of_memory_and_recovers() -> None:
    """One call that does not fit changes nothing; several in a row do. The first that fits restores readiness."""

    async def test() -> None:
        service = open_service("cpu", WireLimits(), ServingLimits())
        await service.start({})
        service.registry.put(REAL)
        attention = Attention()
        attention.fault = beyond(1, MemoryError)
        layer = held(attention)

        async def ask(b: int) -> bool:
            """Whether it fits."""
            try:
                await service.scheduler.submit(layer, request(b), Cost({}, HEAVY, 0, 1, 0))
            except OutOfMemory:
                return False
            return True

        assert service.ready
        for _ in range(UNHEALTHY_AFTER - 1):
            assert not await ask(2)
            assert service.ready
        assert not await ask(2)
        assert not service.ready
        assert not await ask(2)
        assert not service.ready
        assert await ask(1)
        assert service.ready
        for _ in range(UNHEALTHY_AFTER - 1):
            assert not await ask(2)
        assert service.ready
        service.close()

    run(test())


def test_law_9_other_failures_do_not_split_the_batch() -> None:
    async def test() -> None:
        bench = Bench()
        bench.attention.fault = lambda call: (_ for _ in ()).throw(RuntimeError("illegal memory access"))
        outcomes = await settled(*(bench.start() for _ in range(8)))
        assert {type(outcome) for outcome in outcomes} == {ServiceFault}
        assert bench.attention.sizes == [8]
        bench.scheduler.close()

    run(test())


def test_law_9_readiness_recovers_without_calls() -> None:
    """An unready server gets no calls. When there is memory again, /health/ready and the gauge say so."""

    async def test() -> None:
        app = create_app(Settings(d_model=6, num_heads=3, access_log=False))
        service, attention = app.state.service, Attention()
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            while not service.started:
                await asyncio.sleep(0.001)
            for layer in service.registry.all():
                service.registry.remove(layer.name)
            service.registry.put(held(attention))

            async def fall() -> None:
                attention.fault = beyond(0, MemoryError)
                for _ in range(UNHEALTHY_AFTER):
                    with pytest.raises(OutOfMemory):
                        await service.scheduler.submit(held(attention), request(1), Cost({}, HEAVY, 0, 1, 0))
                assert not service.ready

            await fall()
            assert (await client.get("/health/ready")).status_code == 503
            attention.fault = lambda call: None
            assert (await client.get("/health/ready")).status_code == 200
            assert service.ready

            await fall()
            attention.fault = lambda call: None
            while not service.ready:
                await asyncio.sleep(0.001)
            assert "\nattend_ready 1.0\n" in (await client.get("/metrics")).text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "RECOVERY_INTERVAL", 0.001)
        run(test())


# Deadlines


def test_a_deadline_that_passes_in_the_queue() -> None:
    """By the injected clock it has passed when the device becomes free: the call gets an error and is not computed."""

    async def test() -> None:
        clock = Clock()
        bench = Bench(clock)
        busy = await bench.occupy()
        calls = [request(2), request(3)]
        late, in_time = bench.start(calls[0], deadline=clock.now + 100), bench.start(calls[1], deadline=clock.now + 1000)
        await turns()
        clock.now += 100
        bench.attention.door.set()

        outcomes = await settled(busy, late, in_time)

        assert isinstance(outcomes[1], DeadlinePassed)
        assert_answers(outcomes[2:], calls[1:])
        assert bench.attention.sizes == [1, 3]
        assert bench.counted("attend_abandoned_calls_total") == 0
        bench.scheduler.close()

    run(test())


def test_a_deadline_is_reported_while_the_device_is_still_busy() -> None:
    """At the deadline, not when the device becomes free. The call is not counted as abandoned."""

    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        with pytest.raises(DeadlinePassed):
            await bench.start(request(2), deadline=bench.scheduler.clock() + 0.02)
        assert not busy.done()
        bench.attention.door.set()
        await settled(busy, bench.start())
        assert bench.attention.sizes == [1, 1]
        assert bench.counted("attend_abandoned_calls_total") == 0
        bench.scheduler.close()

    run(test())


def test_a_deadline_that_passes_during_computation() -> None:
    """The result is dropped; the other calls of the batch get theirs."""

    async def test() -> None:
        bench = Bench()
        bench.attention.door.clear()
        deadline = bench.scheduler.clock() + 0.02
        tasks = [bench.start(request(1)), bench.start(request(2), deadline=deadline), bench.start(request(3))]
        await bench.until_entered()
        with pytest.raises(DeadlinePassed):
            await tasks[1]
        assert not tasks[0].done()
        bench.attention.door.set()

        outcomes = await settled(tasks[0], tasks[2], bench.start(request(4)))

        assert_answers(outcomes, [request(1), request(3), request(4)])
        assert bench.attention.sizes in ([6, 4], [4, 4])
        assert not bench.unhandled
        bench.scheduler.close()

    run(test())


@pytest.mark.parametrize("operations", [1, HEAVY], ids=["on the loop", "on the thread"])
def test_a_call_whose_deadline_has_passed_is_not_computed(operations: int) -> None:
    async def test() -> None:
        clock = Clock()
        bench = Bench(clock)
        for deadline in (clock.now, clock.now - 5):
            with pytest.raises(DeadlinePassed):
                await bench.start(operations=operations, deadline=deadline)
        assert not bench.attention.seen
        assert not bench.scheduler.waiting
        bench.scheduler.close()

    run(test())


def test_a_settled_call_leaves_no_timer() -> None:
    """A timer until a distant deadline would keep the call and its tensors in memory."""

    async def test() -> None:
        bench = Bench()
        loop = asyncio.get_running_loop()
        handles: list[asyncio.TimerHandle] = []
        real = loop.call_later

        def call_later(*args: Any, **knobs: Any) -> asyncio.TimerHandle:
            handles.append(real(*args, **knobs))
            return handles[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_later", call_later)
            await bench.start(deadline=bench.scheduler.clock() + 10**6)
        assert [handle.cancelled() for handle in handles] == [True]
        bench.scheduler.close()

    run(test())


# 12. Nothing long sits on the event loop.


@pytest.mark.parametrize(
    ("small", "fields"),
    [
        pytest.param(True, {"query": np.ones((1, 16, 6))}, id="small"),
        pytest.param(False, {"query": np.ones((8, 512, 6))}, id="many operations"),
        pytest.param(False, {"query": np.ones((1, 800, 6)), "select": {"top_k": 5}}, id="millions of weights to sort"),
        pytest.param(False, {"query": np.ones((1, 800, 6)), "dropout": {"p": 0.5, "seed": 1}}, id="millions of random numbers"),
    ],
)
def test_law_12_only_light_calls_are_computed_on_the_event_loop(small: bool, fields: dict[str, Any]) -> None:
    """All others are computed on the device's thread."""

    async def test() -> None:
        bench = Bench()
        asked = validate(AttendRequest, {"layer": "layer", **fields})
        check_against_layer(asked, SPEC)
        await bench.scheduler.submit(bench.layer, make_call(asked, SPEC), predict(asked, SPEC))
        assert (bench.attention.threads == [threading.get_ident()]) == small
        bench.scheduler.close()

    run(test())


def test_law_12_a_compressed_body_is_decoded_in_a_thread() -> None:
    """Its size is that after decompression."""
    threads: list[int] = []

    class Watched(NativeCodec):
        def decode(self, *args: Any) -> Decoded:
            threads.append(threading.get_ident())
            return super().decode(*args)

    async def test() -> None:
        service = open_service("cpu", WireLimits(), ServingLimits())
        service.registry.put(REAL)
        row = b"[0,0,0,0,0,0],"
        for rows in (10, 400_000):
            body = b'{"layer": "layer", "outputs": ["log_sum_exp"], "key": [[0,0,0,0,0,0]], "query": [' + (row * rows)[:-1] + b"]}"
            packed = gzip.compress(body)
            assert len(packed) < 64 * 1024
            await service.engine.answer(RawRequest(packed, Watched(JSON, parse, encode_json), "gzip"), ATTEND)
        service.close()
        assert len(threads) == 2
        assert threads[1] != threading.get_ident()

    run(test())


# 14. Fairness: no caller, however heavy, keeps light callers waiting longer than a few of the longest single calls.


def test_law_14_light_calls_do_not_wait_for_the_device() -> None:
    """On a CPU they are computed on the event loop on arrival, while the device's thread computes another call."""

    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        light = Attention()
        calls = [request(b, seed=b) for b in (1, 2, 3)]
        layer = held(light)
        tasks = [bench.start(call, operations=1, layer=layer, caller="the same") for call in calls]
        heavy = [bench.start(caller="the same") for _ in range(20)]

        assert_answers(await settled(*tasks), calls)

        assert light.sizes == [1, 2, 3]
        assert set(light.threads) == {threading.get_ident()}
        assert bench.counted("attend_batch_calls_count") == 4
        assert bench.attention.sizes == [1]
        bench.attention.door.set()
        await settled(busy, *heavy)
        bench.scheduler.close()

    run(test())


def test_a_light_reproducible_call_does_not_block_the_event_loop() -> None:
    """The one thread that computes such calls may be busy with a long one."""

    async def test() -> None:
        bench = Bench()
        task = bench.start(replace(request(2), reproducible=True), operations=1)
        await settled(task)
        assert bench.attention.threads and threading.get_ident() not in bench.attention.threads
        assert bench.counted("attend_batch_calls_count") == 1
        busy = await bench.occupy()
        waits = bench.start(replace(request(1), reproducible=True), operations=1)
        await turns()
        assert len(bench.scheduler.waiting) == 1
        bench.attention.door.set()
        await settled(busy, waits)
        bench.scheduler.close()

    run(test())


def test_law_14_light_calls_do_not_make_a_hung_device_ready() -> None:
    """They are computed on the event loop and do not show that the device's thread works."""

    async def test() -> None:
        bench = Bench()
        busy = await bench.occupy()
        finished_at = bench.scheduler.finished_at
        await bench.start(operations=1, layer=held(Attention()))
        assert bench.scheduler.finished_at == finished_at
        bench.attention.door.set()
        await busy
        assert bench.scheduler.finished_at > finished_at
        bench.scheduler.close()

    run(test())


def test_law_14_a_call_waits_for_at_most_one_call_of_each_other_caller() -> None:
    """Ten heavy calls of each of three callers wait; the one call of a fourth is among the next four."""

    async def test() -> None:
        bench = Bench(calls=1)
        busy = await bench.occupy()
        heavy = [bench.start(request(2), operations=10**9, caller=name) for _ in range(10) for name in "abc"]
        await turns()
        last = bench.start(request(3), operations=10**9, caller="d")
        await turns()
        bench.attention.door.set()
        await settled(busy, last, *heavy)
        assert bench.attention.sizes.index(3) <= 4
        bench.scheduler.close()

    run(test())


@pytest.mark.usefixtures("no_light_calls")
def test_law_14_small_calls_do_not_wait_for_heavy_calls_of_the_same_caller() -> None:
    """Calls of another size class are another flow: two programs may share an address."""

    async def test() -> None:
        bench = Bench(calls=1)
        busy = await bench.occupy()
        heavy = [bench.start(request(2), operations=10**11, caller="address") for _ in range(5)]
        await turns()
        small = [bench.start(request(3), operations=10**6, caller="address") for _ in range(5)]
        await turns()
        bench.attention.door.set()
        await settled(busy, *heavy, *small)
        assert bench.attention.sizes == [1, 2, 3, 3, 3, 3, 3, 2, 2, 2, 2]
        bench.scheduler.close()

    run(test())


def test_law_14_one_caller_can_use_half_of_the_queue() -> None:
    """Calls of others, and its own of another size class, are still accepted."""

    async def test() -> None:
        bench = Bench(operations=10**12)
        busy = await bench.occupy()
        waiting = [bench.start(operations=10**11, caller="a") for _ in range(5)]
        await turns()
        with pytest.raises(Overloaded):
            await bench.start(operations=10**11, caller="a")
        waiting += [bench.start(operations=10**11, caller="b"), bench.start(operations=10**9, caller="a")]
        await turns()
        bench.attention.door.set()
        assert all(isinstance(outcome, Outcome) for outcome in await settled(busy, *waiting))
        bench.scheduler.close()

    run(test())


def test_law_14_retry_after_uses_the_speed_of_each_size_class() -> None:
    """A heavy call takes 10 s; four wait behind one that has run for 4 s: 46 s remain. Small calls, ten times slower per operation, do not
    change that."""

    async def test() -> None:
        clock = Clock()
        bench = Bench(clock, operations=10**13)

        def took(seconds: float) -> Callable[[Call], None]:
            def pass_time(call: Call) -> None:
                clock.now += seconds

            return pass_time

        bench.attention.fault = took(10.0)
        await bench.start(operations=10**11)
        bench.attention.fault = took(0.1)
        for _ in range(20):
            await bench.start(operations=10**8)
        bench.attention.fault = lambda call: None
        bench.attention.door.clear()
        while bench.attention.entered.acquire(blocking=False):
            pass
        tasks = [bench.start(request(1, reproducible=True), operations=10**11) for _ in range(5)]
        await bench.until_entered()
        clock.now += 4.0
        with pytest.raises(Overloaded) as refusal:
            await bench.start(operations=10**13)
        assert refusal.value.retry_after == 46
        bench.attention.door.set()
        await settled(*tasks)
        bench.scheduler.close()

    run(test())


# All at once


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hang_ups", [0.0, 0.1], ids=["nobody hangs up", "some hang up"])
def test_every_call_gets_exactly_one_outcome(seed: int, hang_ups: float) -> None:
    """Hundreds of callers, some of which cancel, disconnect, set short deadlines, exceed limits or meet a failure. Each result belongs to
    its call."""
    rng = np.random.default_rng(seed)

    async def test() -> None:
        clock = Clock()
        bench = Bench(clock, operations=200 * HEAVY, calls=int(rng.integers(1, 9)))

        def attend(call: Call) -> Result:
            clock.now += 0.001
            if call.query.shape[0] > 12:
                raise MemoryError
            if bool((call.query == -1).any()):
                raise ValueError("a poisoned batch")
            return Result({"output": call.query * 2 + call.key.shape[1]})

        others = [held(Attention(attend), name) for name in ("a", "b")]
        outcomes: dict[int, Any] = {}
        wanted: dict[int, torch.Tensor] = {}
        hung_up: set[int] = set()

        async def caller(i: int) -> None:
            b, length = int(rng.choice([1, 2, 5, 13])), int(rng.choice([2, 3]))
            call = replace(request(1), query=torch.full((b, 4, 6), float(i + 1)))
            call = replace(call, key=torch.zeros(b, length, 6), value=torch.zeros(b, length, 6))
            if rng.random() < 0.02:
                call = replace(call, query=torch.full((b, 4, 6), -1.0))
            wanted[i] = call.query * 2 + length
            deadline = clock.now + float(rng.choice([0.0, 0.004, 1e6])) if rng.random() < 0.2 else None
            try:
                outcomes[i] = await bench.scheduler.submit(
                    others[int(rng.integers(2))],
                    call,
                    Cost({}, int(rng.choice([1, HEAVY])), 0, 1, 0),
                    deadline,
                    lambda: i in hung_up,
                )
            except (AttendError, asyncio.CancelledError) as error:
                outcomes[i] = error

        tasks = []
        for i in range(300):
            tasks.append(asyncio.create_task(caller(i)))
            if rng.random() < 0.3:
                await turns(int(rng.integers(1, 4)))
            if rng.random() < 0.1:
                tasks[int(rng.integers(len(tasks)))].cancel()
            if rng.random() < hang_ups:
                hung_up |= set(rng.integers(max(0, i - 10), i + 1, 3).tolist())
        _, pending = await asyncio.wait(tasks, timeout=LOST)
        for task in pending:
            task.cancel()
        assert not pending, f"{len(pending)} callers wait for ever"

        answered = {i: one for i, one in outcomes.items() if isinstance(one, Outcome)}
        never_ran = {i for i, task in enumerate(tasks) if task.cancelled()}
        assert set(outcomes) | never_ran == set(range(300))
        assert len(answered) > 30
        for i, outcome in answered.items():
            assert torch.equal(outcome.result.tensors["output"], wanted[i])
        assert not bench.scheduler.waiting
        assert not bench.unhandled
        bench.scheduler.close()

    run(test())


def test_the_checks_detect_lost_and_swapped_outcomes() -> None:
    async def test() -> None:
        never: asyncio.Task[Any] = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            wait = asyncio.wait
            patch.setattr(asyncio, "wait", lambda tasks, timeout: wait(tasks, timeout=0.01))
            with pytest.raises(AssertionError, match="wait for ever"):
                await settled(never)
        bench = Bench()
        outcomes = await settled(bench.start(request(1, seed=1)))
        with pytest.raises(AssertionError):
            assert_answers(outcomes, [request(1, seed=2)])
        with pytest.raises(AssertionError):
            assert_answers([InvalidRequest("no")], [request(1)])
        bench.scheduler.close()

    run(test())
