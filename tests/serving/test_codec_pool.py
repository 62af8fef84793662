"""Threads for codecs: fairness, priorities and errors. Jobs block on events that the test sets; nothing is timed."""

import asyncio
import gzip
import os
import random
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from attend.serving.byte_budget import Lease
from attend.serving.codec_pool import LARGE_BYTES, CodecPool
from attend.serving.metrics import Metrics
from attend.serving.request_type import ATTEND
from attend.serving.requests import Request
from attend.serving.scheduler import Scheduler
from attend.serving.service import open_service
from attend.serving.threads import NICE
from attend.wire.codec import Decoded
from attend.wire.negotiation import CODECS, JSON
from support.scheduler import REAL, Attention, heavy_call, loop_iterations, run
from support.waiting import PATIENCE


class Work:
    """Functions that record their names when they run, and block until the test sets `free`."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.free = threading.Event()
        self.entered = threading.Semaphore(0)

    def function(self, name: str) -> Callable[[], str]:
        def block() -> str:
            self.order.append(name)
            self.entered.release()
            assert self.free.wait(PATIENCE), "the test did not set `free`"
            return name

        return block

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=PATIENCE)


def pooled(test: Callable[[CodecPool, Work], Coroutine[Any, Any, None]], threads: int = 2) -> None:
    """Run the test on an event loop, with a pool and blocking functions."""

    async def with_pool() -> None:
        pool, work = CodecPool(threads), Work()
        try:
            await test(pool, work)
        finally:
            work.free.set()
            pool.close()

    run(with_pool())


def start(pool: CodecPool, function: Callable[[], Any], size: int, caller: str = "") -> "asyncio.Task[Any]":
    return asyncio.get_running_loop().create_task(pool.run(function, size, caller))


def test_small_bodies_run_beside_heavy_ones() -> None:
    """Ten heavy jobs were queued first; one of them runs."""

    async def test(pool: CodecPool, work: Work) -> None:
        heavy = [start(pool, work.function("heavy"), LARGE_BYTES) for _ in range(10)]
        await work.until_entered()
        assert await asyncio.gather(*(start(pool, lambda i=i: i, LARGE_BYTES - 1) for i in range(5))) == [0, 1, 2, 3, 4]
        assert work.order == ["heavy"]
        work.free.set()
        assert await asyncio.gather(*heavy) == 10 * ["heavy"]

    pooled(test)


def test_large_bodies_have_their_own_thread() -> None:
    """It is not one of the threads for light jobs."""

    async def test(pool: CodecPool, work: Work) -> None:
        tasks = [start(pool, work.function(name), LARGE_BYTES) for name in ("first", "second")]
        await work.until_entered()
        assert await start(pool, lambda: "light", 1) == "light"
        assert work.order == ["first"]
        work.free.set()
        await asyncio.gather(*tasks)
        assert work.order == ["first", "second"]

    pooled(test, threads=1)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_threads_of_heavy_work_have_a_lower_priority() -> None:
    """Heavy bodies and computation have a lower priority than the event loop; light bodies have the same."""

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)  # of the calling thread

    async def test(pool: CodecPool, _: Work) -> None:
        scheduler, computing = Scheduler(torch.device("cpu"), Metrics()), list[int]()
        attention = Attention()
        attention.fault = lambda call: computing.append(priority())
        await scheduler.submit(heavy_call(attention))
        lower = min(19, priority() + NICE)
        assert await pool.run(priority, LARGE_BYTES, "") == computing.pop() == lower
        assert await pool.run(priority, 1, "") == priority() != lower
        scheduler.close()

    pooled(test)


def test_callers_share_the_threads_fairly() -> None:
    """However many bodies one caller has sent."""

    async def test(pool: CodecPool, work: Work) -> None:
        tasks = [start(pool, work.function("a"), LARGE_BYTES, "a") for _ in range(5)]
        await work.until_entered()
        tasks += [start(pool, work.function("b"), LARGE_BYTES, "b") for _ in range(2)]
        await loop_iterations()
        work.free.set()
        await asyncio.gather(*tasks)
        assert "".join(work.order) in ("ababaaa", "abaabaa", "abbaaaa")

    pooled(test)


def test_an_exception_reaches_only_the_caller_of_that_job() -> None:
    """The thread runs the next job."""

    async def test(pool: CodecPool, work: Work) -> None:
        for size in (1, LARGE_BYTES):
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda: 1 // 0, size, "")
            assert await pool.run(lambda: 7, size, "") == 7

    pooled(test)


def test_cancelled_jobs_are_skipped() -> None:
    """A job cancelled while it waits never runs. The result of one cancelled while it runs is dropped."""

    async def test(pool: CodecPool, work: Work) -> None:
        tasks = [start(pool, work.function(name), LARGE_BYTES) for name in ("runs", "waits", "last")]
        await work.until_entered()
        for task in tasks[:2]:
            task.cancel()
        await loop_iterations()
        work.free.set()
        assert await tasks[2] == "last"
        assert work.order == ["runs", "last"]

    pooled(test)


def test_a_medium_body_is_decoded_while_large_ones_wait() -> None:
    """Through the engine: one large body is being decoded, others wait, and a medium one is answered."""
    work = Work()

    async def test() -> None:
        service = open_service("cpu")
        service.registry.put(replace(REAL, name="layer"))

        def decode_slowly(body: bytes, *more: Any) -> Decoded:
            if len(body) >= LARGE_BYTES:
                work.function("large")()
            return CODECS[JSON].decode(body, *more)

        def answer(size: int) -> Coroutine[Any, Any, Any]:
            return service.engine.answer(Request(text.ljust(size), replace(CODECS[JSON], decode=decode_slowly), caller="a"), ATTEND)

        text = b'{"layer": "layer", "outputs": ["output"], "query": [[1, 2, 3, 4, 5, 6]]}'
        large = [asyncio.create_task(answer(LARGE_BYTES)) for _ in range(4)]
        await work.until_entered()
        assert (await answer(LARGE_BYTES // 2))[1]
        assert work.order == ["large"]
        work.free.set()
        await asyncio.gather(*large)
        service.close()

    run(test())


def test_a_compressed_body_is_decoded_as_one_of_its_true_size() -> None:
    """Few bytes that unpack to many wait for the thread of large bodies, and leave those of small bodies to a body that is small, although
    it is larger as it was sent. The budget counts the decompressed bytes."""
    work = Work()

    async def test() -> None:
        service = open_service("cpu")
        service.registry.put(replace(REAL, name="layer"))
        sizes = list[int]()

        def decode_slowly(body: bytes, *more: Any) -> Decoded:
            sizes.append(len(body))
            if len(body) >= LARGE_BYTES:
                work.function("large")()
            return CODECS[JSON].decode(body, *more)

        def answered(size: int, lease: Lease | None = None) -> "asyncio.Task[Any]":
            body = gzip.compress(text.ljust(size) if size >= LARGE_BYTES else text + bytes(random.Random(3).choices(b" \t\r\n", k=size)))
            request = Request(body, replace(CODECS[JSON], decode=decode_slowly), coding="gzip", caller="a", lease=lease)
            return asyncio.create_task(service.engine.answer(request, ATTEND))

        text = b'{"layer": "layer", "outputs": ["output"], "query": [[1, 2, 3, 4, 5, 6]]}'
        with Lease(service.budget, "a") as lease:
            large = [answered(LARGE_BYTES, lease)]
            await work.until_entered()
            large += [answered(LARGE_BYTES) for _ in range(3)]
            assert (await answered(LARGE_BYTES // 2))[1]
            assert work.order == ["large"] and sizes[0] == LARGE_BYTES and sizes[1] < LARGE_BYTES
            assert lease.held > LARGE_BYTES - 5000
            work.free.set()
            await asyncio.gather(*large)
        service.close()

    run(test())


def test_a_thread_that_cannot_start_fails_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool runs the next job."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test(pool: CodecPool, _: Work) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                await pool.run(lambda: 1, LARGE_BYTES, "caller")
        assert await pool.run(lambda: 2, LARGE_BYTES, "caller") == 2

    pooled(test)
