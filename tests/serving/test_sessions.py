"""The registry of sessions without HTTP: owners, shares, eviction, idle sessions, and calls that are cancelled. Time is a number."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from support.decoding import Gate
from support.scheduler import Clock, run
from support.waiting import PATIENCE

from service.errors import (
    CallerGone,
    DeadlinePassed,
    InvalidRequest,
    NotReady,
    OutOfMemory,
    SessionEnded,
    SessionNotFound,
    WrongReplica,
    WrongWorker,
)
from service.serving import engine
from service.serving.admission import ServingLimits
from service.serving.engine import ATTEND
from service.serving.layers.registry import LayerRegistry
from service.serving.metrics import Metrics
from service.serving.requests import RawRequest
from service.serving.scheduler import QueueLimits
from service.serving.service import Service, open_service
from service.serving.sessions import registry, steps
from service.serving.sessions.placement import Place, Workers, make_id, new_socket
from service.serving.sessions.registry import Session, SessionRegistry
from service.serving.sessions.turns import turn
from service.settings import Settings
from service.spec import LayerSpec
from service.web.app import create_service
from service.wire.limits import WireLimits
from service.wire.negotiation import CODECS, JSON
from service.wire.schemas.sessions import PostSession

SPEC = LayerSpec(d_model=6, num_heads=3, seed=1)
ROW_BYTES, FIRST_PAGE = 48, 16 * 48
PLACE = Place("one", 3, 1000)


class Sessions:
    """A registry of sessions whose clock the test sets. Needs a running event loop."""

    def __init__(self, pages: int = 4, shared: bool = False, seconds: float = 300.0) -> None:
        """`pages`: the number of first pages that fit into its memory."""
        self.clock, self.metrics, self.seconds = Clock(), Metrics(), seconds
        self.layers = LayerRegistry(torch.device("cpu"), ServingLimits())
        self.layers.put(self.layers.make("default", SPEC))
        self.registry = SessionRegistry(self.layers, self.metrics, pages * FIRST_PAGE, PLACE, shared, self.clock)

    def create(self, owner: str = "", rows: int = 0) -> Session:
        session = self.registry.create(PostSession(idle_seconds=self.seconds), owner)
        if rows:
            self.append(session, rows)
        return session

    def append(self, session: Session, rows: int) -> None:
        stop = session.length + rows
        self.registry.reserve(session.cache, stop)
        session.cache.write(session.length, {name: torch.zeros(3, rows, 2) for name in ("key", "value")})

    async def use(self, session: Session, rows: int = 0) -> None:
        async with turn(self.registry, session.id, session.owner, RawRequest(b"")) as used:
            self.append(used, rows)

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
    opened = [sessions.create(rows=1) for _ in range(10_000)]
    assert sessions.registry.pool.used == 10_000 * FIRST_PAGE

    sessions.clock.now += 299
    await sessions.use(opened[5])
    sessions.clock.now += 1
    sessions.registry._sweep()

    assert len(sessions.registry) == 1 and sessions.registry.pool.used == FIRST_PAGE
    assert sessions.ended("idle") == 9999
    assert "idle for longer than its idle_seconds" in sessions.reason(opened[9999])
    assert sessions.reason(opened[5]) == ""
    sessions.registry.close()


@loop
async def test_the_least_recently_used_session_of_the_same_owner_ends_first() -> None:
    """Never one that is in use or belongs to another owner. A step that gets no page changes nothing."""
    sessions = Sessions(pages=4)
    other, first, second, third = sessions.create("other", 1), *(sessions.create("owner", 1) for _ in range(3))
    await sessions.use(first)

    async with turn(sessions.registry, second.id, "owner", RawRequest(b"")):
        sessions.append(sessions.create("owner"), 1)  # ends the third: the second is in use
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
    session = sessions.create(rows=1)

    async def call(number: int) -> None:
        async with turn(sessions.registry, session.id, "", RawRequest(b"")) as used:
            order.append((number, used.length))
            sessions.append(used, 1)

    async with turn(sessions.registry, session.id, "", RawRequest(b"")):
        waiting = [asyncio.create_task(call(number)) for number in range(3)]
        await asyncio.sleep(0)
    assert not session.lock.locked() and not sessions.registry._evict("")
    await asyncio.gather(*waiting)
    assert order == [(0, 1), (1, 2), (2, 3)] and session.calls == 0
    sessions.registry.close()


@loop
async def test_with_keys_no_owner_takes_all_memory_or_all_sessions() -> None:
    sessions = Sessions(pages=9, shared=True)
    for _ in range(8):
        sessions.create("greedy", rows=1)
    assert sessions.registry.pool.of_owner["greedy"] == 6 * FIRST_PAGE  # two thirds of the memory: twice the three that stay free
    sessions.create("modest", rows=1)
    assert len(sessions.registry.of_owner("greedy")) == 6 and sessions.ended("memory") == 2
    with pytest.raises(OutOfMemory, match="2 times the free bytes"):
        sessions.create("late", rows=17)
    sessions.registry.close()


@loop
async def test_the_number_of_sessions_is_bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "MAX_SESSIONS", 9)
        sessions = Sessions(shared=True)
        created = [sessions.create("greedy") for _ in range(20)]
        assert sessions.registry.of_owner("greedy") == created[-6:]
        fork = sessions.registry.fork(created[-1], None)
        assert sessions.registry.of_owner("greedy") == [*created[-5:], fork]
        for name in "abc":
            sessions.create(name)
        with pytest.raises(OutOfMemory, match="9 sessions, of at most 9"):
            sessions.create("d")
        sessions.registry.close()


@loop
async def test_a_fork_that_cannot_be_added_shares_no_page() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "MAX_SESSIONS", 1)
        sessions = Sessions()
        session = sessions.create(rows=1)
        async with turn(sessions.registry, session.id, "", RawRequest(b"")):
            with pytest.raises(OutOfMemory):
                sessions.registry.fork(session, None)
        assert sessions.registry.pool.shared == 0
        sessions.registry.close()


@loop
async def test_the_memory_of_a_fork_counts_once_until_a_page_is_written() -> None:
    """A fork is not evicted to make room for a copy of a page that it shares: that would free no memory."""
    sessions = Sessions(pages=1)
    session = sessions.create(rows=3)
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
    session = sessions.create(rows=3)
    equal = sessions.layers.make("default", SPEC)
    sessions.layers.put(equal)
    async with turn(sessions.registry, session.id, "", RawRequest(b"")) as used:
        assert used.layer is equal  # so the step before it needs no memory
        sessions.layers.put(sessions.layers.make("default", SPEC.model_copy(update={"seed": 2})))
        assert "its layer was replaced" in sessions.reason(session)
        assert sessions.registry.pool.used == FIRST_PAGE
    assert sessions.registry.pool.used == 0
    sessions.registry.close()


@loop
async def test_the_refusal_of_an_id_says_why_the_session_does_not_exist() -> None:
    sessions = Sessions()
    for place, error, words in (
        (PLACE._replace(epoch=999), SessionEnded, "its process was restarted"),
        (PLACE._replace(replica="two"), WrongReplica, "replica two has this session, and this is one"),
        (PLACE, SessionEnded, "the session has ended"),
    ):
        with pytest.raises(error, match=words):
            sessions.registry.find(make_id(place), "")
    for text in ("", "s.", "s.é", make_id(PLACE)[:-1], "x" * 44):
        with pytest.raises(SessionNotFound):
            sessions.registry.find(text, "")


def test_workers_share_the_memory(tmp_path: Path) -> None:
    service = create_service(Settings(workers=3, session_memory=101), new_socket(tmp_path, 2))
    assert service.engine.sessions is not None
    assert service.engine.sessions.capacity == 33
    assert service.engine.sessions.place.worker == 2
    service.close()


def test_requests_of_sessions_and_sequences_are_sent_to_their_worker(tmp_path: Path) -> None:
    """While a worker is replaced, the old and the new one have the same number: the new one has the sequences, each its own sessions."""
    workers = Workers(tmp_path / "1.70.http", 3)
    for name in ("0.60.http", "1.9.http", "1.70.http", "1.70.grpc"):
        (tmp_path / name).touch()
    assert workers.number_and_epoch == (1, 70)
    assert [str(other.socket.name) for other in workers.others()] == ["0.60.http", "1.9.http"]
    workers.require_session(Place("r", 1, 70))
    for place, name in ((Place("r", 1, 9), "1.9.http"), (Place("r", 0, 60), "0.60.http")):
        with pytest.raises(WrongWorker) as wrong:
            workers.require_session(place)
        assert wrong.value.socket.name == name
    with pytest.raises(SessionEnded, match="its process was restarted"):
        workers.require_session(Place("r", 2, 50))

    found = {"here": 0, "0.60.http": 0, "is being started": 0}
    for sequence in range(60):
        try:
            workers.require_sequence("", "default", str(sequence))
            found["here"] += 1
        except WrongWorker as wrong:
            found[wrong.socket.name] += 1
        except NotReady:
            found["is being started"] += 1
    assert min(found.values()) > 9


@loop
async def test_work_ends_at_the_deadline_and_with_its_caller() -> None:
    service, disconnected, ended = create_service(Settings()), asyncio.get_running_loop().create_future(), []

    async def work(seconds: float = PATIENCE) -> int:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append(seconds)
            raise
        return 5

    assert await service.in_time(work(0), None, disconnected) == 5
    with pytest.raises(DeadlinePassed):
        await service.in_time(work(), service.clock() - 1, disconnected)
    disconnected.set_result(None)
    with pytest.raises(CallerGone):
        await service.in_time(work(), None, disconnected)
    await asyncio.sleep(0)
    assert len(ended) == 2
    service.close()


def service_of(sessions: Sessions) -> Service:
    service = open_service("cpu", WireLimits(), ServingLimits(), QueueLimits(delay=1e-4))
    service.registry.put(sessions.layers.find("default"))
    service.engine.sessions = sessions.registry
    return service


async def step(service: Service, session: Session, rows: Any, **fields: Any) -> None:
    body = orjson.dumps({"query": rows.tolist(), "outputs": ["output"], **fields})
    await service.engine.answer(RawRequest(body, CODECS[JSON], session=session.id), ATTEND)


@loop
async def test_a_cancelled_step_ends_before_the_next_one_begins() -> None:
    """The device's thread cannot be interrupted, so the session is in use until it ends. Rows of a cancelled step are not appended."""
    with pytest.MonkeyPatch.context() as patch:
        gate, sessions = Gate(patch), Sessions()
        service, session = service_of(sessions), sessions.create()
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
        alone = sessions.create()
        await step(service, alone, rows[1])
        for name, tensor in session.cache.joined().items():
            assert torch.equal(tensor, alone.cache.joined()[name])
        sessions.registry.close()
        service.close()


@loop
async def test_a_step_whose_reply_is_an_error_appends_nothing() -> None:
    """For example a query without a key, which is known only after the computation, or missing memory."""
    sessions = Sessions(pages=16)
    service, session = service_of(sessions), sessions.create()
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
async def test_rule_12_a_large_step_is_bound_in_another_thread() -> None:
    """Its body is decoded, and its numbers have yet to be checked and cast."""
    sessions, on_loop = Sessions(pages=1000), []
    service, session = service_of(sessions), sessions.create()

    def bind_step(*args: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return steps.bind_step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "bind_step", bind_step)
        for rows in (1, 1000):
            await step(service, session, np.random.default_rng(0).standard_normal((rows, 6)))
    assert on_loop == [True, False]
    assert session.length == 1001
    sessions.registry.close()
    service.close()
