"""A caller: sends HTTP requests over simulated connections, and judges whether each is answered, once, and in time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httptools

from simulation.network import Peer
from simulation.process import Process
from simulation.world import Failure, Resume, World, sleep, suspended

PATIENCE = 200.0  # seconds; every reply must have come by then
REFUSED = "refused"  # the process does not listen


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
    """How a client behaves during one request."""

    leaves_after: float | None = None  # seconds until it disconnects
    by_reset: bool = False
    sends: float = 1.0  # the part of the request that it sends
    reads_late: float = 0.0  # seconds in which it does not read the reply


@dataclass
class _Exchange:
    """One request on a connection, and what has come back."""

    resume: Resume
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class _Connection:
    """The state of one connection: the exchange that is under way."""

    def __init__(self, world: World, peer: Peer) -> None:
        self.world, self.peer = world, peer
        self.exchange: _Exchange | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.sent = 0
        self.usable = True
        peer.on_data, peer.on_end = self._received, self._ended

    def _received(self, data: bytes) -> None:
        if self.exchange is None:
            self.world.fail(Failure("answered exactly once", f"bytes that nobody asked for: {data[:200]!r}"))
            return
        self.parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.exchange is not None
        self.exchange.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        assert self.exchange is not None
        self.exchange.body += data

    def on_message_complete(self) -> None:
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        keep_alive = self.parser.should_keep_alive()
        status, self.parser = self.parser.get_status_code(), httptools.HttpResponseParser(self)
        self.usable = keep_alive and not self.peer.ended
        exchange.resume(Reply(status, exchange.headers, bytes(exchange.body)))

    def _ended(self) -> None:
        self.usable = False
        if self.exchange is not None:
            exchange, self.exchange = self.exchange, None
            exchange.resume(None)


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
        manner = manner or Manner()
        connection = self._connect()
        if connection is None:
            self._require_refusal()
            return Lost(REFUSED, begun=False)
        peer = connection.peer
        given = {"Host": "localhost", "Content-Length": str(len(body)), **(headers or {})}
        if self.secret is not None:
            given["Authorization"] = f"Bearer {self.secret}"
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value)]
        request = ("\r\n".join(lines) + "\r\n\r\n").encode() + body
        request = request[: max(1, int(len(request) * manner.sends))]
        connection.sent += len(request)
        began = self.world.now

        def exchange(resume: Resume) -> None:
            connection.exchange = mine = _Exchange(resume)
            peer.watch(connection.sent)
            peer.send(request)
            if manner.reads_late:
                peer.pause()
                self.world.at(manner.reads_late, peer.resume)
            if manner.leaves_after is not None:
                self.world.at(manner.leaves_after, lambda: self._leave(connection, mine, manner.by_reset))
            self.world.at(PATIENCE, lambda: resume("late"))

        before = peer.delivered
        answer = await suspended(exchange)
        connection.exchange = None
        outcome = self._judge(answer, manner, peer, before, f"{method} {target}")
        if not isinstance(outcome, Reply) or not connection.usable or manner.sends < 1:
            self._drop(connection)
        self.world.note(self.name, method, target, manner, "->", outcome.status if isinstance(outcome, Reply) else outcome.why)
        if isinstance(outcome, Reply):
            self.last_seconds = self.world.now - began
        return outcome

    def _judge(self, answer: Any, manner: Manner, peer: Peer, before: int, what: str) -> Reply | Lost:
        """What the client makes of the end of an exchange."""
        if isinstance(answer, Reply):
            return answer
        if answer == "left":
            return Lost("the client leaves", begun=True)  # what is under way may still arrive
        process = peer.process
        if process is not None and (peer.life != process.lives or process.killed):
            return Lost("the process died", begun=True)
        if answer == "late":
            raise Failure(
                "rule 4: every call is computed or refused", f"{what} of {self.name} ({manner}) has no reply after {PATIENCE:g} s"
            )
        if peer.delivered == before:
            return Lost("closed before the request", begun=False)
        settings = process.chosen.settings
        if manner.sends < 1 or manner.reads_late > settings.client_timeout / 2:
            return Lost("cut off", begun=True)
        if process.stopping_at is not None:
            closing = process.stopping_at + settings.drain_seconds
            if peer.complete_at is None or peer.complete_at > closing or self.world.now > closing + settings.shutdown_seconds:
                return Lost("the process stops", begun=True)
        raise Failure("answered exactly once", f"{what} of {self.name} was received and its connection closed without a reply")

    async def settle(self) -> None:
        """Wait until processes have finished all requests of connections that this client has left."""
        began = self.world.now
        while not all(peer.transport.lost for peer in self._left):
            await self._tick(began)
        processes = {id(peer.process): peer.process for peer in self._left if peer.process is not None}.values()
        tasks = [task for process in processes for task in process.server.server_state.tasks]
        while any(not task.done() for task in tasks):
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

    def _leave(self, connection: _Connection, exchange: _Exchange, by_reset: bool) -> None:
        if connection.exchange is not exchange:  # it was answered before
            return
        connection.exchange = None
        if by_reset:
            connection.peer.reset()
        else:
            connection.peer.close()
        exchange.resume("left")

    def _drop(self, connection: _Connection) -> None:
        connection.usable = False
        connection.exchange = None
        self._left.append(connection.peer)
        if not connection.peer.left:
            connection.peer.close()
        if self._connection is connection:
            self._connection = None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._drop(self._connection)
