"""A caller: sends HTTP requests over simulated connections, and judges whether each is answered, once, and in time."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httptools

from simulation.network import Peer, Received
from simulation.process import Process
from simulation.world import Failure, Resume, World, sleep, suspended

PATIENCE = 200.0  # seconds; every reply must have come by then
REFUSED = "refused"  # the process does not listen
CLOSED, LATE, LEFT = "closed", "late", "left"  # why there is no reply
UNSEEN = "closed before the request"


class Request(NamedTuple):
    method: str
    target: str
    body: bytes = b""
    headers: Mapping[str, str] = {}


class Reply(NamedTuple):
    """A reply. `headers` have names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Lost(NamedTuple):
    """There is no reply, and that is no fault of the service: the client left, or the process did not accept the request.

    `begun`: whether the service may have acted on it.
    """

    why: str
    begun: bool


@dataclass
class Manner:
    """How a client behaves during a request, or several that it sends at once."""

    leaves_after: float | None = None  # seconds until it disconnects
    by_reset: bool = False
    sends: float = 1.0  # the part of what it wants to send that it sends
    hesitates: tuple[float, float] | None = None  # a part of what it sends, and seconds between that and the rest
    reads_late: float = 0.0  # seconds in which it does not read the reply


@dataclass
class _Exchange:
    """One request on a connection, and what has come back."""

    request: Request
    start: int  # its first byte among all of the connection
    received: Received
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    answer: Any = None  # a reply, or why there is none


class _Connection:
    """The state of one connection: the exchanges that are under way, in their order."""

    def __init__(self, world: World, peer: Peer) -> None:
        self.world, self.peer = world, peer
        self.exchanges: deque[_Exchange] = deque()
        self.resume: Resume = lambda value: None  # once none is under way
        self.parser = httptools.HttpResponseParser(self)
        self.sent, self.sent_at = 0, world.now  # bytes, and when the last request was sent
        self.usable = True
        self.idle = False  # whether a reply was the last thing that happened, and it allows another request
        peer.on_data, peer.on_end = self._received, self._ended

    def _received(self, data: bytes) -> None:
        if not self.exchanges:
            self.world.fail(Failure("answered exactly once", f"bytes that nobody asked for: {data[:200]!r}"))
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.world.fail(Failure("answered exactly once", f"{error} in {data[:200]!r}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.exchanges[0].headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self.exchanges[0].body += data

    def on_message_complete(self) -> None:
        exchange = self.exchanges.popleft()
        self.usable = self.parser.should_keep_alive() and not self.peer.ended
        self.idle = self.usable and not self.exchanges
        exchange.answer = Reply(self.parser.get_status_code(), exchange.headers, bytes(exchange.body))
        if not self.exchanges:
            self.resume(None)

    def _ended(self) -> None:
        if self.idle and not self._may_close():
            self.world.fail(Failure("answered", "a connection is closed after a reply without `Connection: close`"))
        self.usable = self.idle = False
        self.give_up(CLOSED)

    def _may_close(self) -> bool:
        """Whether the server may close the connection after a reply that allows another request."""
        process = self.peer.process
        if self.peer.left or process is None or not process.alone or process.killed or self.peer.life != process.lives:
            return True
        keepalive = process.chosen.settings.keepalive_timeout
        return process.stopping_at is not None or process.chosen.pauses > 0 or self.world.now - self.sent_at > keepalive / 2

    def give_up(self, why: str) -> None:
        """The exchanges that are under way get no reply."""
        if self.exchanges:
            for exchange in self.exchanges:
                exchange.answer = why
            self.exchanges.clear()
            self.resume(None)


class Caller:
    """One client with an address and perhaps a key. It reuses its connection as long as the server keeps it."""

    def __init__(self, process: Process, name: str, address: str, secret: str | None) -> None:
        self.process, self.world, self.name, self.address, self.secret = process, process.world, name, address, secret
        self._connection: _Connection | None = None
        self._left: list[Peer] = []  # connections that the server may not have closed yet

    async def call(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        manner: Manner | None = None,
    ) -> Reply | Lost:
        """Send one request and wait for its reply. Fails the run if the service owes one and does not send it."""
        (outcome,) = await self.call_all([Request(method, target, body, headers or {})], manner)
        return outcome

    async def call_all(self, requests: Sequence[Request], manner: Manner | None = None) -> list[Reply | Lost]:
        """Send requests at once on one connection (HTTP pipelining), and wait for all replies, which come in their order."""
        manner = manner or Manner()
        connection = self._connect()
        if connection is None:
            self._require_refusal()
            return [Lost(REFUSED, begun=False) for _ in requests]
        peer, start, whole = connection.peer, connection.sent, b""
        exchanges = []
        for request in requests:
            begins = start + len(whole)
            whole += self._written(request)
            exchanges.append(_Exchange(request, begins, peer.watch(start + len(whole))))
        sent = whole[: max(1, int(len(whole) * manner.sends))]
        connection.sent += len(sent)
        connection.sent_at, connection.idle = self.world.now, False
        part, seconds = manner.hesitates or (1.0, 0.0)
        size = int(len(sent) * part)

        def send(resume: Resume) -> None:
            connection.exchanges, connection.resume = deque(exchanges), resume
            peer.send(sent[:size])
            self.world.at(seconds, lambda: None if peer.left or peer.ended else peer.send(sent[size:]))
            if manner.reads_late:
                peer.pause()
                self.world.at(manner.reads_late, peer.resume)
            if manner.leaves_after is not None:
                self.world.at(manner.leaves_after, lambda: self._leave(connection, exchanges[-1], manner.by_reset))
            self.world.at(PATIENCE, lambda: connection.give_up(LATE) if exchanges[-1].answer is None else None)

        began = self.world.now
        await suspended(send)
        if self.world.now <= began + seconds and connection.usable:  # the reply came first: the rest is sent before the next request
            await sleep(self.world, began + seconds - self.world.now + 1e-6)
        outcomes: list[Reply | Lost] = []
        for exchange in exchanges:
            outcomes.append(self._judge(exchange, manner, connection, outcomes))
            outcome = outcomes[-1]
            words = exchange.request.method, exchange.request.target, manner
            self.world.note(self.name, *words, "->", outcome.status if isinstance(outcome, Reply) else outcome.why)
        if not isinstance(outcomes[-1], Reply) or not connection.usable or manner.sends < 1:
            self._drop(connection)
        return outcomes

    def _written(self, request: Request) -> bytes:
        """The request as bytes."""
        given = {"Host": "localhost", "Content-Length": str(len(request.body)), **request.headers}
        if self.secret is not None:
            given["Authorization"] = f"Bearer {self.secret}"
        lines = [f"{request.method} {request.target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + request.body

    def _judge(self, exchange: _Exchange, manner: Manner, connection: _Connection, earlier: Sequence[Reply | Lost]) -> Reply | Lost:
        """What the client makes of the end of an exchange. `earlier`: the outcomes of those before it on the connection."""
        answer, peer = exchange.answer, connection.peer
        if isinstance(answer, Reply):
            return answer
        if answer == LEFT:
            return Lost("the client leaves", begun=True)  # what is under way may still arrive
        process, what = peer.process, f"{exchange.request.method} {exchange.request.target} of {self.name}"
        if process is not None and (peer.life != process.lives or process.killed):
            return Lost("the process died", begun=True)
        if answer == LATE:
            raise Failure("rule 4: every call is computed or refused", f"{what} ({manner}) has no reply after {PATIENCE:g} s")
        if peer.delivered <= exchange.start:
            return Lost(UNSEEN, begun=False)
        if earlier and isinstance(earlier[-1], Reply) and earlier[-1].headers.get("connection") == "close":
            return Lost("closed after an earlier reply", begun=False)
        settings = process.chosen.settings
        if exchange.received.stop > connection.sent or manner.reads_late > settings.client_timeout / 2:
            return Lost("cut off", begun=True)
        if process.stopping_at is not None:
            closing, received = process.stopping_at + settings.drain_seconds, exchange.received.at
            if received is None or received > closing or self.world.now > closing + settings.shutdown_seconds:
                return Lost("the process stops", begun=True)
        if earlier and not isinstance(earlier[-1], Reply):
            return earlier[-1]
        raise Failure("answered exactly once", f"{what} was received and its connection closed without a reply")

    async def settle(self) -> None:
        """Wait until processes have finished all requests of connections that this client has left."""
        began = self.world.now
        while not all(peer.transport.lost for peer in self._left):
            await self._tick(began)
        processes = {id(peer.process): peer.process for peer in self._left if peer.process is not None}.values()
        tasks = [(process, process.lives, task) for process in processes for task in process.server.server_state.tasks]
        while any(process.lives == life and not task.done() for process, life, task in tasks):  # a dead process does nothing more
            await self._tick(began)
        self._left.clear()

    async def _tick(self, began: float) -> None:
        await sleep(self.world, 0.01)
        if self.world.now - began > PATIENCE:
            raise Failure("liveness", f"the process still works for {self.name}, who left {PATIENCE:g} s ago")

    def _require_refusal(self) -> None:
        """Fail if the process listens no more although it has not been told to stop, or its drain is not over."""
        if self.process.must_accept():
            raise Failure("rule 10: requests are accepted until the drain is over", f"a connection of {self.name} is refused")

    def _connect(self) -> _Connection | None:
        if self._connection is None or not self._connection.usable or self._connection.peer.ended:
            peer = self.process.connect(self.address)
            self._connection = None if peer is None else _Connection(self.world, peer)
        return self._connection

    def _leave(self, connection: _Connection, last: _Exchange, by_reset: bool) -> None:
        if last.answer is not None:  # all were answered before
            return
        if by_reset:
            connection.peer.reset()
        else:
            connection.peer.close()
        connection.give_up(LEFT)

    def _drop(self, connection: _Connection) -> None:
        connection.usable = False
        connection.exchanges.clear()
        self._left.append(connection.peer)
        if not connection.peer.left:
            connection.peer.close()
        if self._connection is connection:
            self._connection = None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._drop(self._connection)
