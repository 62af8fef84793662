"""The byte budget: how many bytes each caller may use, and which bytes of requests and replies it counts."""

import asyncio
import json
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from attend.errors import CallerGone, DeadlinePassed, Overloaded
from attend.serving.analysis import ANALYSIS
from attend.serving.byte_budget import MAX_RETRY_AFTER, RATE_TIME_CONSTANT, SHARE_OF_FREE, ByteBudget, Lease
from attend.serving.figures import FIGURE
from attend.serving.layer_requests import put_layer
from attend.serving.layers.files import CheckpointQuery
from attend.serving.plan import plan_call
from attend.serving.request_type import ATTEND
from attend.serving.requests import Request
from attend.serving.words import encoder, hashed
from attend.serving.words.sentence import Sentence
from attend.settings import Settings
from attend.web.app import create_app
from attend.web.errors import retry_after
from attend.web.replies import MAX_UNSPLIT_REPLY
from attend.web.request_reader import network_of
from attend.wire.negotiation import CODECS, JSON, SAFETENSORS
from support.scheduler import loop_iterations, run

CAPACITY = 1 << 20
PIECE = CAPACITY // 4096


def fill(budget: ByteBudget, caller: str) -> int:
    """The bytes that a caller gets by requests of `piece` bytes each, until one is refused."""
    used = 0
    try:
        while True:
            Lease(budget, caller).add(PIECE)
            used += PIECE
    except Overloaded:
        return used


def test_one_caller_can_use_two_thirds_of_the_budget() -> None:
    """The refusal names the bound."""
    budget = ByteBudget(CAPACITY)
    most = CAPACITY * SHARE_OF_FREE // (SHARE_OF_FREE + 1)
    assert most - PIECE < fill(budget, "a") <= most
    with pytest.raises(Overloaded, match="request bodies and replies of one caller"):
        Lease(budget, "a").add(PIECE)


@pytest.mark.parametrize("greedy", [1, 2, 5])
def test_there_is_always_room_for_another_caller(greedy: int) -> None:
    """Each caller takes its share of what the callers before it left free."""
    budget = ByteBudget(CAPACITY)
    for i in range(greedy):
        assert fill(budget, f"greedy {i}") > 0
    assert fill(budget, "another") > 0
    assert budget.held < CAPACITY


def test_a_request_counts_as_at_most_half_of_the_budget() -> None:
    """So the largest request is admitted together with others."""
    budget = ByteBudget(CAPACITY)
    Lease(budget, "others").add(CAPACITY // 5)
    largest = Lease(budget, "a")
    largest.add(3 * CAPACITY)
    assert budget.held == CAPACITY // 5 + 3 * CAPACITY
    with pytest.raises(Overloaded):
        Lease(budget, "b").add(3 * CAPACITY)
    Lease(budget, "b").add(PIECE)
    largest.resize(0)
    Lease(budget, "b").add(3 * CAPACITY)


def test_all_callers_together_stay_within_the_budget() -> None:
    """The refusal names the setting."""
    budget = ByteBudget(CAPACITY)
    Lease(budget, "a").add(CAPACITY // 2)
    Lease(budget, "b").add(CAPACITY // 4)
    with pytest.raises(Overloaded, match=f"{CAPACITY} bytes in all .max_buffered_bytes"):
        Lease(budget, "c").add(CAPACITY // 2)


def test_check_room_takes_no_bytes_and_a_lease_returns_all() -> None:
    """`resize` counts bytes that are in memory already without a check."""
    budget = ByteBudget(CAPACITY)
    with Lease(budget, "a") as lease:
        lease.check_room(CAPACITY // 2)
        assert budget.held == 0
        lease.resize(10 * CAPACITY)
        assert budget.held == lease.held == 10 * CAPACITY
        lease.resize(PIECE)
        assert budget.held == PIECE
    assert budget.held == lease.held == 0
    lease.resize(0)
    assert fill(budget, "a") > CAPACITY // 2


def test_rule_14_retry_after_is_estimated_from_the_rate_of_released_bytes() -> None:
    """Where nothing is released, it is the largest value."""
    now = [100.0]
    budget, size = ByteBudget(1000, lambda: now[0]), 100
    leases = [Lease(budget, str(caller)) for caller in range(10)]
    for lease in leases:
        lease.resize(size)

    def wait(caller: str, size: int) -> int:
        with pytest.raises(Overloaded) as refusal:
            Lease(budget, caller).check_room(size)
        return refusal.value.retry_after

    assert wait("new", size) == MAX_RETRY_AFTER
    for _ in range(200):  # 100 bytes are released each half second, and taken by others at once
        now[0] += 0.5
        leases[0].resize(0)
        leases[0].resize(size)
    assert wait("new", size) == 1
    assert [wait("new", size) for size in (400, 500)] == [2, 3]
    now[0] += RATE_TIME_CONSTANT
    assert wait("new", 400) > 4, "old releases count for less"
    now[0] += 3600
    assert wait("new", 400) == MAX_RETRY_AFTER
    leases[0].resize(0)
    assert wait("1", size) < MAX_RETRY_AFTER


def test_retry_after_is_randomly_increased_by_up_to_half() -> None:
    """Callers that were refused together return at different times."""
    refusal = Overloaded(10)
    assert (retry_after(refusal, lambda low, high: low), retry_after(refusal, lambda low, high: high)) == ("10", "15")
    assert retry_after(Overloaded(1), lambda low, high: high) == "2"


class Exchange:
    """One request to an ASGI application: `push` sends a part of its body; its reply is read piece by piece once `taking` is set."""

    def __init__(self, app: Any, size: int, address: str, path: str = "/attend", method: str = "POST", **headers: str) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.taking, self.status, self.reply = asyncio.Event(), 0, b""
        self.taking.set()
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "root_path": "", "client": (address, 1)}
        given = {"host": "localhost", "content-length": str(size), **headers}
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
        scope |= {"headers": pairs, "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
        self.answered = asyncio.create_task(app(scope, self.sent.get, self._take))

    def push(self, body: bytes, more: bool = False) -> None:
        self.sent.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def _take(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        if "body" in message:
            await self.taking.wait()
        self.reply += message.get("body", b"")


def _computed(app: Any) -> float | None:
    """The number of computed calls, from the metrics."""
    app.state.service.metrics.record()
    found: float | None = app.state.service.metrics.registry.get_sample_value("attend_phase_seconds_count", {"phase": "compute"})
    return found


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Any]:
    """A started application of these settings."""
    app = create_app(Settings(d_model=4, num_heads=2, access_log=False, **settings))
    async with app.router.lifespan_context(app):
        while not app.state.service.started:
            await asyncio.sleep(0.001)
        yield app


def test_rule_5_bodies_that_are_being_read_count_against_the_budget() -> None:
    """By the bytes received, not by those declared. Too many are refused, and the reply frees them."""
    size = 700_000  # the budget is 1 MiB
    body = b'{"query": [[1, 2, 3, 4]]}'.ljust(size)

    async def test() -> None:
        async with serving(max_buffered_bytes=1 << 20) as app:

            async def ask(address: str = "192.0.2.1") -> int:
                """The status of the answer to this body."""
                exchange = Exchange(app, size, address)
                exchange.push(body)
                await exchange.answered
                return exchange.status

            first = Exchange(app, size, "192.0.2.1")
            await loop_iterations()
            assert await ask() == 200  # no byte of the first has arrived
            first.push(body[:-1], more=True)
            while not app.state.service.budget.held:
                await loop_iterations()
            assert app.state.service.budget.held == size - 1
            assert await ask() == 429
            small = Exchange(app, 25, "192.0.2.2")
            small.push(body[:25])
            await small.answered
            assert small.status == 200
            first.push(body[-1:])
            await first.answered
            assert first.status == 200
            for _ in range(3):
                assert await ask() == 200
            assert app.state.service.budget.held == 0

    run(test())


@pytest.mark.parametrize("path", ["/attend", "/attend/analysis", "/attend/figure", "/v2/models/default/infer"])
def test_rule_5_replies_count_against_the_budget_until_they_are_sent(path: str) -> None:
    """A caller that does not read a long reply gets no second one, and nothing is computed for a refused request."""
    n = 300
    query = {"query": [[[0.5] * 4] * n]}
    document: dict[str, Any] = {
        "/attend": {**query, "outputs": ["attention_weights"]},
        "/attend/analysis": {**query, "metrics": ["entropy_per_query"]},
        "/attend/figure": {**query, "figure": {"format": "html"}},
        "/v2/models/default/infer": {
            "inputs": [{"name": "query", "shape": [1, n, 4], "datatype": "FP32", "data": [0.5] * 4 * n}],
            "outputs": [{"name": "attention_weights"}],
        },
    }[path]
    body = json.dumps(document).encode()

    async def test() -> None:
        async with serving(max_buffered_bytes=1 << 20) as app:
            budget = app.state.service.budget
            slow = Exchange(app, len(body), "192.0.2.1", path)
            slow.taking.clear()
            slow.push(body)
            while not slow.status:
                await asyncio.sleep(0.001)
            assert slow.status == 200
            await loop_iterations()
            size = budget.held
            if path in ("/attend", "/v2/models/default/infer"):
                computed = _computed(app)
                again = Exchange(app, len(body), "192.0.2.1", path)
                again.push(body)
                await again.answered
                assert again.status == 429
                assert "max_buffered_bytes" in again.reply.decode()
                assert computed == _computed(app)
            slow.taking.set()
            await slow.answered
            assert size == len(slow.reply) or len(slow.reply) < size <= MAX_UNSPLIT_REPLY  # a small request counts as a whole until then
            assert budget.held == 0

    run(test())


NAMED_LAYERS = {"words": {"d_model": 2048, "num_heads": 1, "projections": False}}
LONG_LISTS = {f"{i:060}": {"d_model": 2, "num_heads": 1, "projections": False} for i in range(130)}
UNPLANNED = {  # of each a request whose reply no call predicts, of at least 64 KiB: its layers and its body
    ("POST", "/words"): (NAMED_LAYERS, {"layer": "words", "text": "one two three four five six seven eight nine ten"}),
    ("GET", "/layers"): (LONG_LISTS, None),
    ("GET", "/v2/models/stats"): (LONG_LISTS, None),
    ("GET", "/openapi.json"): ({}, None),
}


@pytest.mark.parametrize(("method", "path"), UNPLANNED)
def test_rule_13_every_reply_is_reserved_at_its_size(method: str, path: str) -> None:
    """By its caller, until it is sent. If it does not fit, another reply says so."""
    layers, document = UNPLANNED[method, path]
    body = b"" if document is None else json.dumps(document).encode()

    async def test() -> None:
        async with serving(layers=layers, max_buffered_bytes=1 << 22) as app:

            def ask() -> Exchange:
                exchange = Exchange(app, len(body), "192.0.2.1", path, method)
                exchange.push(body)
                return exchange

            budget = app.state.service.budget
            slow = ask()
            slow.taking.clear()
            while not slow.status:
                await asyncio.sleep(0.001)
            await loop_iterations()
            size = budget.held
            with Lease(budget, "192.0.2.2") as other, Lease(budget, "192.0.2.3") as third:
                for lease in (other, third):
                    lease.resize((budget.capacity - size - 30_000) // 2)  # leaves room for the body
                refused = ask()
                await refused.answered
                assert (refused.status, "max_buffered_bytes" in refused.reply.decode()) == (429, True)
            slow.taking.set()
            await slow.answered
            assert slow.status == 200
            assert size == len(slow.reply) > MAX_UNSPLIT_REPLY
            again = ask()
            await again.answered
            assert (again.status, budget.held) == (200, 0)

    run(test())


def test_rule_13_vectors_of_words_do_not_wait_unreserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's vectors are gone, written as a reply that is reserved, before those of the next are made."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def hash_words(*args: Any) -> Sentence:
        alive.append(sum(vectors() is not None for vectors in made))
        sentence = hashed.hash_words(*args)
        made.append(weakref.ref(sentence.vectors))
        return sentence

    monkeypatch.setattr(encoder, "hash_words", hash_words)
    body = json.dumps({"layer": "words", "text": "one two three"}).encode()

    async def test() -> None:
        async with serving(layers=NAMED_LAYERS) as app:
            exchanges = [Exchange(app, len(body), "192.0.2.1", "/words") for _ in range(5)]
            for exchange in exchanges:
                exchange.push(body)
            for exchange in exchanges:
                await exchange.answered
            assert [exchange.status for exchange in exchanges] == [200] * 5

    run(test())
    assert alive == [0] * 5


def test_rule_13_words_of_links_count_against_the_budget() -> None:
    """As often as they may be repeated, before anything is computed; the plan has them, too."""
    n, word = 20, '\u00e9"\n' * 2_000
    query = {"query": [[0.5] * 4] * n, "key": [[0.5] * 4] * 2}  # a row that sees one key has no choice, and no link
    tokens = {"query": ["a"] * n, "key": [word] * 2}
    body = json.dumps({**query, "metrics": ["strongest_links"], "analysis": {"top_links": n}, "tokens": tokens}).encode()

    async def reply(app: Any, path: str, **headers: str) -> Exchange:
        exchange = Exchange(app, len(body), "192.0.2.1", path, **headers)
        exchange.push(body)
        await exchange.answered
        return exchange

    async def test() -> None:
        async with serving() as app:
            planned = json.loads((await reply(app, "/attend/plan")).reply)["reply_bytes"]
            answer = await reply(app, "/attend/analysis")
            binary = await reply(app, "/attend/analysis", accept=SAFETENSORS)
        assert 2 * n * len(json.dumps(word, ensure_ascii=False).encode()) <= len(answer.reply) <= planned < 2 * len(answer.reply)
        assert json.loads(answer.reply)["metrics"]["strongest_links"]["key_words"] == [[word] * n] * 2
        assert len(binary.reply) <= planned
        async with serving(max_reply_bytes=planned - 1) as app:
            refused = await reply(app, "/attend/analysis")
            assert (refused.status, "max_reply_bytes" in refused.reply.decode(), bool(_computed(app))) == (413, True, False)
        async with serving(max_buffered_bytes=1 << 20) as app:
            with Lease(app.state.service.budget, "192.0.2.2") as other:
                other.resize(500_000)
                refused = await reply(app, "/attend/analysis")
            assert (refused.status, "max_buffered_bytes" in refused.reply.decode(), bool(_computed(app))) == (429, True, False)

    run(test())


def test_rule_13_decoded_numbers_count_against_the_budget() -> None:
    """The text `0,` becomes a float64 and a float32. A request without room for them is refused before it is computed."""
    numbers = 4 * 7_001
    body = b'{"outputs": ["output"], "query": [' + b",".join([b"[0,0,0,0]"] * (numbers // 4)) + b"]}"

    async def test() -> None:
        async with serving() as app:
            service = app.state.service
            for taken in (0, 600_000):  # by another caller
                budget, used = ByteBudget(1 << 20), []
                with Lease(budget, "another") as other, Lease(budget, "caller") as lease:
                    other.add(taken)
                    lease.add(len(body))
                    look = partial(lambda budget, used: bool(used.append(budget.held)), budget, used)
                    answer = service.engine.answer(Request(body, caller="caller", lease=lease, gone=look), ATTEND)
                    if taken:
                        with pytest.raises(Overloaded):
                            await answer
                        assert max(used) == taken + len(body)
                    else:
                        assert (await answer)[1]
                        assert max(used) >= 12 * numbers
                assert budget.held == 0

    run(test())


@pytest.mark.parametrize("size", [100, 2_000_003], ids=["small", "large"])
def test_rule_12_a_large_body_is_joined_in_the_thread_that_decodes_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the pieces in which it arrived. A small one is joined on the event loop."""
    threads: list[int] = []
    take = Request.take_body

    def take_body(request: Request) -> bytes:
        threads.append(threading.get_ident())
        return take(request)

    async def test() -> None:
        monkeypatch.setattr(Request, "take_body", take_body)
        async with serving(max_buffered_bytes=1 << 30) as app:
            exchange = Exchange(app, size, "192.0.2.1")
            body = b'{"query": [[1, 2, 3, 4]]}'.ljust(size)
            exchange.push(body[:10], more=True)
            exchange.push(body[10:80], more=True)
            exchange.push(body[80:])
            await exchange.answered
            assert exchange.status == 200
            assert [thread == threading.get_ident() for thread in threads] == [size == 100]

    run(test())


def test_a_deadline_that_passes_while_the_body_is_read_is_504() -> None:
    async def test() -> None:
        async with serving() as app:
            exchange = Exchange(app, 1000, "192.0.2.1", x_request_timeout="0.01")
            exchange.push(b"{", more=True)
            while not exchange.reply:
                await loop_iterations()
            assert exchange.status == 504
            exchange.push(b"}".ljust(999))  # the rest is read after the refusal
            await exchange.answered
            assert "body" in json.loads(exchange.reply)["detail"]
            assert app.state.service.budget.held == 0

    run(test())


@pytest.mark.parametrize(
    ("knobs", "error"), [({"gone": lambda: True}, CallerGone), ({"deadline": 0.0}, DeadlinePassed)], ids=["gone", "late"]
)
@pytest.mark.parametrize(
    "call",
    [
        *(lambda service, request, kind=kind: service.engine.answer(request, kind) for kind in (ATTEND, ANALYSIS, FIGURE)),
        lambda service, request: plan_call(service.engine, request),
        lambda service, request: put_layer(service, "new", request, CheckpointQuery()),
    ],
    ids=["attend", "analysis", "figure", "plan", "put_layer"],
)
def test_a_body_is_not_decoded_after_its_caller_left_or_its_deadline_passed(call: Any, knobs: Any, error: type[Exception]) -> None:
    """A large body that waits for a thread of the codec pool."""

    async def test() -> None:
        async with serving() as app:
            request = Request(b"not JSON".ljust(1 << 20), **knobs)
            with pytest.raises(error):
                await call(app.state.service, request)
            assert len(request.body) == 1 << 20

    run(test())


def test_a_large_reply_is_not_encoded_after_its_caller_left() -> None:
    """The caller disconnects while its call is computed."""
    encoded: list[Any] = []

    def encode(*args: Any) -> Any:
        encoded.append(args)
        return CODECS[JSON].encode(*args)

    watched = replace(CODECS[JSON], encode=encode)

    async def test() -> None:
        async with serving() as app:
            service = app.state.service
            body = json.dumps({"query": [[0.5] * 4] * 300, "outputs": ["attention_weights"]}).encode()
            assert (await service.engine.answer(Request(body, reply_codec=watched), ATTEND))[1]
            computed = service.scheduler.finished_at
            request = Request(body, reply_codec=watched, gone=lambda: service.scheduler.finished_at > computed)
            with pytest.raises(CallerGone):
                await service.engine.answer(request, ATTEND)
            assert len(encoded) == 1

    run(test())


def test_ipv6_addresses_of_one_network_are_one_caller() -> None:
    assert network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of("no: address") == "no: address"


def test_callers_on_a_unix_socket_are_one_caller_with_a_name() -> None:
    """The process itself, which probes its device, is another one."""

    async def test() -> None:
        async with serving() as app:
            held = []
            exchange = Exchange(app, 700_000, "")
            exchange.push(b'{"query": [[1, 2, 3, 4]]}'.ljust(600_000), more=True)
            while not app.state.service.budget.held:
                await loop_iterations()
            held += [name for name, _ in app.state.service.budget.items()]
            exchange.push(b" " * 100_000)
            await exchange.answered
            assert (exchange.status, held) == (200, ["unix socket"])

    run(test())
