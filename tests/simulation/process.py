"""One process of `attend serve` in the world: the real server, application and service, on a simulated event loop."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import uvicorn

from attend.cli.server import Server
from attend.cli.signals import SignalHandlers
from attend.serving.service import Service
from attend.serving.sessions.ids import process_of
from attend.web.app import create_app
from attend.web.connections import Connection
from simulation.configuration import Configuration
from simulation.loop import NO_EVENTS, SimulatedLoop
from simulation.network import Peer, Transport
from simulation.rpc import DIED, Ended, GrpcServer
from simulation.threads import SimulatedExecutor
from simulation.world import World

MOST_DEATHS = 4  # of the process, in one run


class OrderedSet(dict[Any, None]):
    """A set that is iterated in the order of its insertions: that of a set of objects depends on their addresses."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    remove = discard


class Listening:
    """The listening socket, and the server that accepts its connections."""

    def __init__(self) -> None:
        self.make: Callable[[], Any] | None = None
        self.closed = False
        self.backlog: list[Peer] = []  # connections that nobody has accepted

    def dup(self) -> "Listening":
        """Another descriptor of the socket, which has the same backlog."""
        other = Listening()
        other.backlog = self.backlog
        return other

    def __enter__(self) -> "Listening":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def setblocking(self, blocking: bool) -> None:
        pass

    def accept(self) -> tuple[Any, None]:
        if not self.backlog:
            raise BlockingIOError
        return self.backlog.pop(0), None

    def close(self) -> None:
        """Stop to listen; connections in the backlog are reset. Of the server: stop to accept."""
        self.make, self.closed = None, True

    async def wait_closed(self) -> None:
        pass


class Process:
    """A process that serves, and its clients' way to it."""

    def __init__(self, world: World, chosen: Configuration, name: str = "") -> None:
        """To be made within `interposed`. `name`: of one of several processes in the world."""
        self.world, self.chosen, self.name, self.alone = world, chosen, name, not name
        self.lives = self.connections = 0
        self.killed = False  # whether it is to begin again
        self.spared = False  # whether it is not killed any more
        self.session_owners: dict[str, str] = {}  # of the sessions that clients have told, by id
        if chosen.files is not None:
            chosen.files.die = self.kill
        self.begin()

    def begin(self) -> None:
        """Start the process, for the first time or again."""
        world, settings = self.world, self.chosen.settings
        self.lives += 1
        self.killed = world.interrupted = False
        self.unfinished_before = files.unfinished() if (files := self.chosen.files) is not None and self.alone else frozenset()
        self.transports: list[Transport] = []
        self.listening = Listening()
        world.grpc = None
        self._draw_death()
        self.loop = SimulatedLoop(world, self._serve, self.alone)
        with world.run_by(self.name):
            self.app = create_app(settings, clock=world.clock)
        self.service: Service = self.app.state.service
        config = uvicorn.Config(
            self.app,
            http=Connection,
            lifespan="on",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.keepalive_timeout,  # type: ignore[arg-type]
            timeout_graceful_shutdown=settings.shutdown_seconds,
        )
        self.server = Server(config)
        self.server.server_state.connections = OrderedSet()  # type: ignore[assignment]
        self.server.server_state.tasks = OrderedSet()  # type: ignore[assignment]
        self.signals: SignalHandlers | None = None
        self.stopping_at: float | None = None  # when it got SIGTERM
        self.ended_at: float | None = None

    def _draw_death(self) -> None:
        """Draw when this life ends by a kill: after some time, or in a change of the files."""
        draw, mean, life = self.world.random(f"life {self.name}{self.lives}"), self.chosen.kill_after, self.lives
        if mean is None or life > MOST_DEATHS or self.spared:
            return
        if self.chosen.files is not None and draw.random() < 0.5:
            self.chosen.files.dies_in = int(draw.expovariate(1 / (10 * mean)))
        else:
            self.world.at(draw.expovariate(1 / mean), lambda: self.kill() if self.lives == life else None)

    async def serve(self) -> None:
        settings = self.chosen.settings
        self.signals = SignalHandlers(self.service, settings.drain_seconds, is_worker=settings.workers > 1)
        self.signals.uvicorn_handlers = dict.fromkeys((signal.SIGTERM, signal.SIGINT), self.server.handle_exit)
        await self.server._serve([self.listening])  # type: ignore[list-item]
        self.ended_at = self.world.now

    def _serve(self, listening: Listening, make: Callable[[], Any]) -> Listening:
        listening.make = make
        return listening

    def connect(self, address: str) -> Peer | None:
        """A client's new connection; None if it is refused."""
        if not self.accepts:
            return None
        self.connections += 1
        peer = Peer(self.world, address, self.chosen.kernel, f"connection {self.name}{self.connections}")
        self.accept(peer)
        return peer

    @property
    def accepts(self) -> bool:
        """Whether it accepts connections."""
        return self.listening.make is not None and not self.listening.closed

    def accept(self, peer: Peer) -> None:
        assert self.listening.make is not None
        peer.process, peer.life = self, self.lives
        self.transports.append(peer.transport)  # a thread may kill the process meanwhile
        with self.loop.running():
            peer.transport.connect(self.loop, self.listening.make)

    def must_accept(self) -> bool:
        """Whether a refused connection would be a fault: the process has started, and its drain is not over. Without memory for its
        configured layers, it exits by itself."""
        draining = self.stopping_at is not None and self.world.now < self.stopping_at + self.chosen.settings.drain_seconds
        return self.server.started and not self.server.failed and (self.stopping_at is None or draining)

    def keeps(self, session_id: str) -> bool:
        """Whether this life of the process has made the session."""
        sessions = self.service.engine.sessions
        return sessions is not None and process_of(session_id) == sessions.process

    def terminate(self) -> None:
        """SIGTERM."""
        assert self.signals is not None
        self.spare()
        if self.stopping_at is None:
            if self.chosen.files is not None:
                self.chosen.files.may_block_loop = True  # at its end
            self.world.note("SIGTERM")
            self.stopping_at = self.world.now
        self.signals.drain(signal.SIGTERM, None)

    @property
    def grpc(self) -> GrpcServer | None:
        """The gRPC server, once there is one."""
        return self.world.grpc

    def has_overrun(self) -> bool:
        """Whether the time that it has to stop is over."""
        settings = self.chosen.settings
        return self.stopping_at is not None and self.world.now >= self.stopping_at + settings.drain_seconds + settings.shutdown_seconds

    def kill(self) -> None:
        """SIGKILL, or the machine loses its power. `bury` must follow once the event loop has stopped."""
        if not self.spared and not self.killed:
            self.world.note("the process is killed")
            self.killed = True
            self.world.interrupted = self.alone
            for transport in self.transports:
                transport.die()
            for call in list(self.grpc.calls if self.grpc is not None else ()):
                call.end(Ended(DIED, "", list(call.replies)))
            if self.chosen.files is not None and self.alone:
                self.chosen.files.dead = True

    def spare(self) -> None:
        """Let the process live until it ends by itself."""
        self.spared = True
        if self.chosen.files is not None:
            self.chosen.files.dies_in = None

    def bury(self) -> None:
        """Do what the operating system does with a process that is dead: its connections end, its files are closed."""
        for executor in SimulatedExecutor.all:
            if executor.process == self.name:
                executor.kill()
        SimulatedExecutor.all[:] = [executor for executor in SimulatedExecutor.all if not executor.dead]
        discard(self.loop)
        if (files := self.chosen.files) is not None and self.alone:
            files.restart(lost_power=files.draw.random() < 0.5)
        elif files is not None:
            files.close_all(self.name)


def discard(loop: SimulatedLoop) -> None:
    """Throw an event loop away, with its tasks."""
    loop.set_exception_handler(lambda *_: None)
    loop._selector = NO_EVENTS
    for _ in range(20):
        for task in asyncio.all_tasks(loop):  # again and again: some finish what they do first
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
