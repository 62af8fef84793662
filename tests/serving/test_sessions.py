"""The registry of sessions without HTTP: owners, shares, eviction, idle sessions, and calls that are cancelled. Time is a number."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from attend.attention.cache import KeyValueCache, Page
from attend.errors import (
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    SessionEnded,
    SessionNotFound,
    WrongReplica,
)
from attend.limits import QueueLimits, ServingLimits
from attend.serving.layers.registry import LayerRegistry
from attend.serving.metrics import Metrics
from attend.serving.requests import Request
from attend.serving.service import Service, ServiceOptions, open_service
from attend.serving.sessions import registry
from attend.serving.sessions.ids import make_id, new_process
from attend.serving.sessions.locks import lock_session
from attend.serving.sessions.registry import SessionRegistry
from attend.serving.sessions.session import Session
from attend.serving.sessions.steps import STEP
from attend.spec import LayerSpec
from attend.wire.schemas.sessions import PostSession
from support.decoding import Gate
from support.scheduler import Clock, loop_iterations, run

SPEC = LayerSpec(d_model=6, num_heads=3, seed=1)
ROW_BYTES, FIRST_PAGE = 48, 16 * 48
PROCESS = new_process("one")


class Sessions:
    """A registry of sessions whose clock the test sets. Needs a running event loop."""

    def __init__(self, pages: int = 4, shared: bool = False, seconds: float = 300.0) -> None:
        """`pages`: the number of first pages that fit into its memory."""
        self.clock, self.metrics, self.seconds = Clock(), Metrics(), seconds
        self.layers = LayerRegistry(torch.device("cpu"), ServingLimits())
        self.layers.put(self.layers.make("default", SPEC))
        self.registry = SessionRegistry(self.layers, self.metrics, pages * FIRST_PAGE, PROCESS, shared, self.clock)

    async def create(self, owner: str = "", rows: int = 0) -> Session:
        session = self.registry.create(PostSession(idle_seconds=self.seconds), owner)
        if rows:
            await self.append(session, rows)
        return session

    async def append(self, session: Session, rows: int) -> None:
        stop = session.length + rows
        await self.registry.reserve(session.cache, stop)
        session.cache.write(session.length, {name: torch.zeros(3, rows, 2) for name in ("key", "value")})

    async def use(self, session: Session, rows: int = 0) -> None:
        async with lock_session(self.registry, session.id, session.owner, Request(b"")) as used:
            await self.append(used, rows)

    def reason(self, session: Session) -> str:
        """Why the session has ended; "" if it has not."""
        try:
            self.registry.find(session.id, session.owner)
        except SessionEnded as ended:
            return str(ended)
        return ""

    def ended(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("attend_sessions_ended_total", {"reason": reason}) or 0.0


def loop(test: Callable[[], Any]) -> Callable[[], None]:
    """Runs an asynchronous test, with a timeout."""

    def wrapped() -> None:
        run(test())

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


@loop
async def test_ten_thousand_abandoned_sessions_leave_no_memory() -> None:
    sessions = Sessions(pages=10_000)
    opened = [await sessions.create(rows=1) for _ in range(10_000)]
    assert sessions.registry.pool.used == 10_000 * FIRST_PAGE

    sessions.clock.now += 299
    await sessions.use(opened[5])
    sessions.clock.now += 1
    await sessions.registry.sweep()

    assert len(sessions.registry) == 1 and sessions.registry.pool.used == FIRST_PAGE
    assert sessions.ended("idle") == 9999
    assert "idle for longer than its idle_seconds" in sessions.reason(opened[9999])
    assert sessions.reason(opened[5]) == ""
    sessions.registry.close()


@loop
async def test_the_least_recently_used_session_of_the_same_owner_ends_first() -> None:
    """Never one that is in use or belongs to another owner. A step that gets no page changes nothing."""
    sessions = Sessions(pages=4)
    other, first, second, third = await sessions.create("other", 1), *[await sessions.create("owner", 1) for _ in range(3)]
    await sessions.use(first)

    async with lock_session(sessions.registry, second.id, "owner", Request(b"")):
        await sessions.append(await sessions.create("owner"), 1)  # ends the third: the second is in use
        assert "a session of the same owner needed its memory" in sessions.reason(third)
        with pytest.raises(OutOfMemory, match="session_memory"):
            await sessions.use(first, 48)  # would need the page of the second as well
        assert (first.length, first.cache.size) == (1, FIRST_PAGE)
    assert [sessions.reason(session) for session in (other, first, second)] == ["", "", ""]
    assert sessions.ended("memory") == 1
    with pytest.raises(SessionNotFound):
        sessions.registry.find(other.id, "owner")
    with pytest.raises(SessionNotFound):
        sessions.registry.find(third.id, "other")
    sessions.registry.close()


@loop
async def test_a_session_whose_next_call_waits_is_in_use() -> None:
    """Also between the end of one call and the beginning of the next, when nothing has the lock."""
    sessions, order = Sessions(pages=1), []
    session = await sessions.create(rows=1)

    async def call(number: int) -> None:
        async with lock_session(sessions.registry, session.id, "", Request(b"")) as used:
            order.append((number, used.length))
            await sessions.append(used, 1)

    async with lock_session(sessions.registry, session.id, "", Request(b"")):
        waiting = [asyncio.create_task(call(number)) for number in range(3)]
        await asyncio.sleep(0)
    assert not session.lock.locked()
    with pytest.raises(OutOfMemory):
        await sessions.create(rows=1)
    assert not session.lock.locked() and sessions.reason(session) == ""
    await asyncio.gather(*waiting)
    assert order == [(0, 1), (1, 2), (2, 3)] and session.calls == 0
    sessions.registry.close()


@loop
async def test_a_step_that_ends_many_sessions_looks_at_each_once_and_yields() -> None:
    """9,900 of them, beside those of another owner and one that is in use. The event loop does other work a hundred times."""
    pages, looked_at, turns, stepped = 9900, 0, 0, asyncio.Event()
    real = KeyValueCache.pages
    sessions = Sessions(pages=90 + 10_923)  # the new rows take two whole pages, as much as 10,923 first pages

    def counted(cache: KeyValueCache) -> Sequence[Page]:
        nonlocal looked_at
        looked_at += 1
        return real.__get__(cache)  # type: ignore[no-any-return]

    async def others() -> None:
        nonlocal turns
        while not stepped.is_set():
            turns += 1
            await asyncio.sleep(0)

    big = await sessions.create("owner")
    for owner, count in (("owner", pages), ("other", 90)):
        for _ in range(count):
            await sessions.create(owner, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyValueCache, "pages", property(counted))
        beside = asyncio.create_task(others())
        await sessions.use(big, 16 * pages)
        stepped.set()
        await beside
    assert len(sessions.registry.of_owner("owner")) == 1 and len(sessions.registry.of_owner("other")) == 90
    assert sessions.ended("memory") == pages
    assert looked_at < 1.1 * pages
    assert turns >= pages / registry.SESSIONS_AT_ONCE
    sessions.registry.close()


@loop
async def test_with_keys_no_owner_takes_all_memory_or_all_sessions() -> None:
    sessions = Sessions(pages=9, shared=True)
    for _ in range(8):
        await sessions.create("greedy", rows=1)
    assert sessions.registry.pool.of_owner["greedy"] == 6 * FIRST_PAGE  # two thirds of the memory: twice the three that stay free
    await sessions.create("modest", rows=1)
    assert len(sessions.registry.of_owner("greedy")) == 6 and sessions.ended("memory") == 2
    with pytest.raises(OutOfMemory, match="2 times the free bytes"):
        await sessions.create("late", rows=17)
    sessions.registry.close()


@loop
async def test_the_number_of_sessions_is_bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "MAX_SESSIONS", 9)
        sessions = Sessions(shared=True)
        created = [await sessions.create("greedy") for _ in range(20)]
        assert sessions.registry.of_owner("greedy") == created[-6:]
        fork = sessions.registry.fork(created[-1], None)
        assert sessions.registry.of_owner("greedy") == [*created[-5:], fork]
        for name in "abc":
            await sessions.create(name)
        with pytest.raises(Overloaded, match="at most 9 sessions"):
            await sessions.create("d")
        sessions.registry.close()


@loop
async def test_a_fork_that_cannot_be_added_shares_no_page() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "MAX_SESSIONS", 1)
        sessions = Sessions()
        session = await sessions.create(rows=1)
        async with lock_session(sessions.registry, session.id, "", Request(b"")):
            with pytest.raises(Overloaded):
                sessions.registry.fork(session, None)
        assert sessions.registry.pool.shared == 0
        sessions.registry.close()


@loop
async def test_the_memory_of_a_fork_counts_once_until_a_page_is_written() -> None:
    """A fork is not evicted to make room for a copy of a page that it shares: that would free no memory."""
    sessions = Sessions(pages=1)
    session = await sessions.create(rows=3)
    fork = sessions.registry.fork(session, 2)
    assert sessions.registry.pool.used == sessions.registry.pool.shared == FIRST_PAGE
    with pytest.raises(OutOfMemory):
        await sessions.use(fork, 1)
    sessions.registry.end(session, "deleted")
    await sessions.use(fork, 1)
    assert (fork.length, sessions.registry.pool.used, sessions.registry.pool.shared) == (3, FIRST_PAGE, 0)
    sessions.registry.close()


@loop
async def test_the_memory_of_a_session_that_ends_in_use_is_free_afterwards() -> None:
    sessions = Sessions()
    session = await sessions.create(rows=3)
    equal = sessions.layers.make("default", SPEC)
    sessions.layers.put(equal)
    async with lock_session(sessions.registry, session.id, "", Request(b"")) as used:
        assert used.layer is equal  # so the step before it needs no memory
        sessions.layers.put(sessions.layers.make("default", SPEC.model_copy(update={"seed": 2})))
        assert "its layer was replaced" in sessions.reason(session)
        assert sessions.registry.pool.used == FIRST_PAGE
    assert sessions.registry.pool.used == 0
    sessions.registry.close()


@loop
async def test_the_refusal_of_an_id_says_why_the_session_does_not_exist() -> None:
    sessions = Sessions()
    for process, error, words in (
        (new_process("one"), SessionEnded, "its process was restarted"),
        (new_process("two"), WrongReplica, "replica two has this session, and this is one"),
        (PROCESS, SessionEnded, "the session has ended"),
    ):
        with pytest.raises(error, match=words):
            sessions.registry.find(make_id(process), "")
    for text in ("", "s.", "s.é", make_id(PROCESS)[:-1], "x" * 44):
        with pytest.raises(SessionNotFound):
            sessions.registry.find(text, "")


def service_of(sessions: Sessions) -> Service:
    service = open_service("cpu", ServiceOptions(queue=QueueLimits(batch_delay=1e-4)))
    service.registry.put(sessions.layers.find("default"))
    service.engine.sessions = sessions.registry
    return service


async def step(service: Service, session: Session, rows: Any, **fields: Any) -> None:
    body = orjson.dumps({"query": rows.tolist(), "outputs": ["output"], **fields})
    await service.engine.answer(Request(body), STEP, session.id)


@loop
async def test_waiting_for_an_earlier_call_of_the_session_counts_as_queue() -> None:
    sessions = Sessions()
    service, session = service_of(sessions), await sessions.create()
    service.engine.clock = sessions.clock
    async with lock_session(sessions.registry, session.id, "", Request(b"")):
        request = Request(orjson.dumps({"query": [[0.5] * 6], "outputs": ["output"]}))
        waiting = asyncio.create_task(service.engine.answer(request, STEP, session.id))
        await loop_iterations()
        sessions.clock.now += 5
    await waiting
    phases = request.phases
    assert phases is not None
    assert phases.queue >= 5 and phases.decode == 0
    service.close()


@loop
async def test_a_cancelled_step_ends_before_the_next_one_begins() -> None:
    """The device's thread cannot be interrupted, so the session is in use until it ends. Rows of a cancelled step are not appended."""
    with pytest.MonkeyPatch.context() as patch:
        gate, sessions = Gate(patch), Sessions()
        service, session = service_of(sessions), await sessions.create()
        rows = np.random.default_rng(0).standard_normal((3, 1, 6))
        first, second, third = (asyncio.create_task(step(service, session, row)) for row in rows)
        await asyncio.to_thread(gate.wait)
        first.cancel()
        third.cancel()
        await asyncio.sleep(0)
        assert session.lock.locked() and not first.done()
        gate.opened.set()
        await asyncio.wait([first, second, third])
        assert first.cancelled() and third.cancelled() and second.exception() is None
        assert session.length == 1 and session.calls == 0
        alone = await sessions.create()
        await step(service, alone, rows[1])
        for name, tensor in session.cache.joined().items():
            assert torch.equal(tensor, alone.cache.joined()[name])
        sessions.registry.close()
        service.close()


@loop
async def test_a_step_whose_keys_overflow_appends_nothing() -> None:
    """Not even if its reply has no such number: every later step would have them."""
    sessions = Sessions(pages=16)
    service, session = service_of(sessions), await sessions.create()
    row = np.ones((1, 6))
    await step(service, session, row)
    with pytest.raises(InvalidRequest, match="keys and values are finite in float32"):
        await step(service, session, row, key=np.full((1, 6), 3e38).tolist())
    await step(service, session, row)
    assert session.length == 2
    sessions.registry.close()
    service.close()


@loop
async def test_a_step_whose_reply_is_an_error_appends_nothing() -> None:
    """For example a query without a key, which is known only after the computation, or missing memory."""
    sessions = Sessions(pages=16)
    service, session = service_of(sessions), await sessions.create()
    row = np.ones((1, 6))
    await step(service, session, row)
    with pytest.raises(InvalidRequest, match="fully_masked"):
        await step(service, session, np.ones((40, 6)), valid_lens=0, fully_masked="error")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **knobs: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(OutOfMemory, match="the memory for it was not there"):
            await step(service, session, np.ones((70, 6)))
    assert (session.length, session.calls) == (1, 0)
    sessions.registry.close()
    service.close()


@loop
async def test_rule_12_a_large_step_is_prepared_in_another_thread() -> None:
    """Its body is decoded, and its numbers have yet to be checked and cast."""
    sessions, on_loop = Sessions(pages=1000), []
    service, session = service_of(sessions), await sessions.create()

    prepare = STEP.prepare_for_session

    def prepare_for_session(*args: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return prepare(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STEP, "prepare_for_session", prepare_for_session)
        for rows in (1, 1000):
            await step(service, session, np.random.default_rng(0).standard_normal((rows, 6)))
    assert on_loop == [True, False]
    assert session.length == 1001
    sessions.registry.close()
    service.close()
