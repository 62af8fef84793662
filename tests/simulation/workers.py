"""`attend serve --workers N`: the real supervisor, whose workers are processes of the world that share a listening socket.

The supervisor is synchronous code. It runs in a greenlet, which gives way whenever it would block.
"""

import dataclasses
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import greenlet
from uvicorn.supervisors import multiprocess

from attend.cli import processes
from attend.cli.processes import Supervisor
from attend.cli.server import FIRST_REQUEST
from attend.cli.signals import SKIP_DRAIN, exit_timeout_of
from simulation.clients import Client
from simulation.configuration import Configuration
from simulation.network import Peer
from simulation.side_by_side import SETTLE_SECONDS, Member
from simulation.world import Actor, Failure, Resume, World, sleep

POLL = 0.1  # seconds between two looks of the supervisor at a worker
IMPORT_SECONDS = (0.2, 1.0, 8.0)  # until a new process serves; signals end it meanwhile


class Blocking:
    """A synchronous function as the script of an actor: it waits in `block`."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._greenlet = greenlet.greenlet(lambda _: function())

    def send(self, value: Any) -> Any:
        wait = self._greenlet.switch(value)
        if self._greenlet.dead:
            raise StopIteration
        return wait

    def close(self) -> None:
        if self._greenlet:
            self._greenlet.throw()


def block(register: Callable[[Resume], None]) -> Any:
    """Wait until the argument of `register` is called; returns its value."""
    parent = greenlet.getcurrent().parent
    assert parent is not None
    return parent.switch(register)


class Worker(Member):
    """A worker. It imports for some time before it serves."""

    def __init__(self, world: World, chosen: Configuration, name: str, number: int) -> None:
        super().__init__(world, chosen, name)
        self.number, self.imports = number, True

    def next_at(self) -> float:
        return math.inf if self.imports else super().next_at()

    def run(self) -> None:
        if not self.ended:
            self.imports = False
            super().run()

    def get(self, number: int) -> None:
        """A signal arrives."""
        if self.ended:
            return
        self.world.note(self.name, "gets", signal.Signals(number).name)
        if self.chosen.files is not None:
            self.chosen.files.may_block_loop = True  # at its end
        if number == signal.SIGKILL or self.signals is None:
            self.end(-number)
        elif number == SKIP_DRAIN:
            self.signals._stop_after_drain()
        elif number == signal.SIGHUP:
            self.stopping_at = self.stopping_at or self.world.now
            self.signals.retire(number, None)
        else:
            self.stopping_at = self.stopping_at or self.world.now
            self.signals.drain(number, None)


class WorkerHandle:
    """What the supervisor has of a worker, in place of `attend.cli.processes.Worker`, which has a real process."""

    has_served = ended = False
    replace_at = 0.0

    def __init__(self, config: Any, sockets: list[Any]) -> None:
        self.workers: Workers = sockets[0].workers
        self.process = self

    def start(self) -> None:
        self.worker = self.workers.start_worker()
        self.pid = self.worker.number

    @property
    def exitcode(self) -> int | None:
        return self.worker.exit_status

    def is_alive(self) -> bool:
        return not self.worker.ended

    def ping(self, timeout: float = 5, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Whether the worker responds; it does not while it hangs."""
        deadline = self.workers.world.now + timeout
        while self.worker.hangs_until > self.workers.world.now and not self.worker.ended:
            if interrupted():
                return True
            if self.workers.world.now > deadline:
                return False
            self.workers.wait(POLL)
        self.workers.wait(1e-4)
        self.has_served |= self.worker.server.started
        return not self.worker.ended

    def wait_until_ready(self, timeout: float) -> bool:
        self.workers.wait(timeout)
        return self.worker.server.started and not self.worker.ended

    def join(self, timeout: float | None = None) -> None:
        deadline = self.workers.world.now + (math.inf if timeout is None else timeout)
        while not self.worker.ended and self.workers.world.now < deadline:
            self.workers.wait(min(POLL, deadline - self.workers.world.now))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        self.worker.get(number)


class Event:
    """In place of threading.Event."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        self._set, self._wait = False, wait

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def wait(self, timeout: float) -> bool:
        if not self._set:
            self._wait(timeout)
        return self._set


class Workers:
    """The supervisor, its workers, and their clients' way to them."""

    killed = False
    lives = 1

    def __init__(self, world: World, chosen: Configuration) -> None:
        """To be made within `interposed` and `supervised`."""
        self.world, self.chosen = world, chosen
        self.draw = world.random("workers")
        self.all: list[Worker] = []
        self.backlog: list[Peer] = []  # of the shared socket
        self.connections = 0
        self.session_owners: dict[str, str] = {}
        self.ended_at: float | None = None
        self.stopping_at: float | None = None
        self.could_drain = False  # whether a worker served when the supervisor got SIGTERM: one that imports ends at once
        self.open = False  # whether the supervisor has its copy of the socket open
        self.supervisors: list[Blocking] = []  # of all lives
        self.begin()

    def begin(self) -> None:
        """Start a supervisor."""
        self.open = True
        config: Any = SimpleNamespace(workers=self.chosen.settings.workers, timeout_worker_healthcheck=60)
        listening: Any = SimpleNamespace(workers=self, close=self._close)
        self.supervisor = Supervisor(config, [listening], exit_timeout_of(self.chosen.settings))
        self.supervisor.should_exit = Event(self.wait)  # type: ignore[assignment]
        self.supervisors.append(Blocking(self._supervise))
        Actor(self.world, self.supervisors[-1]).start(0.0)  # type: ignore[arg-type]

    def _supervise(self) -> None:
        self.supervisor.run()
        self.ended_at = self.world.now
        if self.supervisor.failed:
            raise Failure("workers", "the supervisor ends since no worker can start")

    def wait(self, seconds: float) -> None:
        """Let the supervisor sleep. One that was killed sleeps for ever."""
        me = self.supervisor
        block(lambda resume: self.world.at(seconds, lambda: resume(None) if self.supervisor is me else None))

    def _close(self) -> None:
        self.open = False

    def start_worker(self) -> Worker:
        number = len(self.all) + 1
        worker = Worker(self.world, self.chosen, f"worker {number} ", number)
        self.all.append(worker)
        self.world.note(worker.name, "starts")
        self.world.at(self.draw.choice(IMPORT_SECONDS), worker.run)
        return worker

    def living(self) -> Iterator[Worker]:
        return (worker for worker in self.all if not worker.ended)

    # For clients

    def connect(self, address: str) -> Peer | None:
        """A connection to any worker that accepts, or into the backlog; None if no process has the socket open."""
        accepting = self.accepting()
        if not accepting and not self.open:
            return None
        self.connections += 1
        peer = Peer(self.world, address, self.chosen.kernel, f"connection {self.connections}")
        if accepting:
            self.draw.choice(accepting).accept(peer)
        else:
            self.backlog.append(peer)
        return peer

    def accepting(self) -> list[Worker]:
        return [worker for worker in self.living() if not worker.imports and worker.accepts]

    def serve_backlog(self) -> None:
        """Let a worker accept the connections that wait. If none can any more, they are reset."""
        accepting = self.accepting()
        while self.backlog and accepting:
            peer = self.backlog.pop(0)
            if not peer.transport.lost:
                self.draw.choice(accepting).accept(peer)
        if not self.open and not any(not worker.imports for worker in self.living()):
            while self.backlog:
                self.backlog.pop().transport.die()

    def must_accept(self) -> bool:
        stopping_at, drain_seconds = self.stopping_at, self.chosen.settings.drain_seconds
        draining = self.could_drain and stopping_at is not None and self.world.now < stopping_at + drain_seconds
        return self.supervisor is not None and self.supervisor._serves and (self.stopping_at is None or draining)

    def keeps(self, session_id: str) -> bool:
        return False

    def has_overrun(self) -> bool:
        return any(worker.has_overrun() for worker in self.all)

    # What happens to them

    def get(self, number: int) -> None:
        """The supervisor gets a signal."""
        self.world.note("the supervisor gets", signal.Signals(number).name)
        if number == signal.SIGKILL:
            self.supervisor = None  # type: ignore[assignment]
            self.open = False
            for worker in list(self.living()):
                self._orphan(worker)
            return
        if number == signal.SIGTERM and self.stopping_at is None:
            self.stopping_at, self.could_drain = self.world.now, bool(self.accepting())
        self.supervisor.signal_queue.append(number)

    def _orphan(self, worker: Worker) -> None:
        """What `exit_with_supervisor` does in each worker."""
        exit_timeout = exit_timeout_of(self.chosen.settings)
        self.world.at(self.draw.choice((1e-4, 0.01)), lambda: worker.get(signal.SIGTERM))
        self.world.at(exit_timeout, lambda: worker.end(-signal.SIGKILL))


def workers_configuration(world: World, chosen: Configuration) -> Configuration:
    """The configuration for several workers: without sessions and gRPC, which need one."""
    number = world.random("configuration workers").choice((2, 3, 4))
    changes = {"workers": number, "session_memory": 0, "grpc_port": None, "layers_dir": chosen.files.path if chosen.files else None}
    settings = chosen.settings.model_copy(update=changes)
    return dataclasses.replace(
        chosen, settings=settings, kill_after=None, uses=("layers",) if chosen.files else (), theme=chosen.theme and "layers"
    )


@contextmanager
def supervised(world: World) -> Iterator[None]:
    """Within this block, supervisors have simulated workers, events and clocks."""
    module, library = processes, multiprocess
    before = module.Worker, module.time, module.mark_process_dead, library.signal
    module.Worker, module.time = WorkerHandle, SimpleNamespace(monotonic=world.clock)  # type: ignore[assignment, misc]
    module.mark_process_dead = lambda pid: None
    library.signal = SimpleNamespace(signal=lambda *_: None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.Worker, module.time, module.mark_process_dead, library.signal = before  # type: ignore[misc, attr-defined]


class WorkersDirector:
    """Who starts the clients of workers, sends signals to the processes, requires that all is quiet then, and ends them."""

    def __init__(self, workers: Workers, clients: Sequence[Client]) -> None:
        self.workers, self.world, self.clients = workers, workers.world, clients
        self.draw = self.world.random("director")
        self.world.checks[:] = [workers.serve_backlog, self._allow_faults, self._require_workers]
        self.have_served = False  # whether all workers have served
        self.undisturbed = True  # whether workers were only replaced so far
        self.actors = [Actor(self.world, client.act()) for client in clients]
        for actor in self.actors:
            actor.start(self.draw.choice((0.0, 1.0, 10.0, self.draw.uniform(0, 20))))
        self.scripts = [Actor(self.world, self._direct()), Actor(self.world, self._disturb())]
        for script in self.scripts:
            script.start(0.0)

    def _allow_faults(self) -> None:
        """Before any worker has served, one that cannot start ends the server."""
        self.workers.chosen.faults.begun = self.workers.supervisor is not None and self.workers.supervisor._serves

    def _require_workers(self) -> None:
        """While workers are replaced, no fewer of them accept connections than the settings say."""
        workers, wanted = self.workers, self.workers.chosen.settings.workers
        accepting = len(workers.accepting())
        self.have_served |= accepting == len(workers.all) == wanted  # before the first signal
        if self.have_served and self.undisturbed and workers.stopping_at is None and accepting < wanted:
            self.world.fail(Failure("workers", f"{accepting} of {wanted} workers accept connections while others are replaced"))

    def finished(self) -> bool:
        return all(actor.done for actor in self.scripts) and not any(True for _ in self.workers.living())

    async def _disturb(self) -> None:
        """Send signals while the clients call."""
        draw, workers = self.draw, self.workers
        for _ in range(draw.choice((0, 1, 3, 6))):
            await sleep(self.world, draw.choice((0.1, 1.0, 5.0, 20.0)))
            living = list(workers.living())
            if workers.stopping_at is not None or workers.supervisor is None or self._clients_are_done():
                return
            what = draw.choice(("kill a worker", "kill a worker", "hang", "replace", "replace", "kill the supervisor", "stop"))
            self.undisturbed &= what == "replace"
            if what == "kill a worker" and living:
                draw.choice(living).get(signal.SIGKILL)
            elif what == "hang" and living:
                worker, seconds = draw.choice(living), draw.choice((1.0, 10.0, 100.0))
                self.world.note(worker.name, "hangs for", seconds, "s")
                worker.hangs_until = self.world.now + seconds
            elif what == "replace":
                workers.get(signal.SIGHUP)
            elif what == "kill the supervisor":
                workers.get(signal.SIGKILL)
                await self._until(
                    lambda: not list(workers.living()), exit_timeout_of(workers.chosen.settings) + 1, lambda: "workers outlive it"
                )
                workers.begin()
            elif what == "stop":
                workers.get(signal.SIGTERM)

    def _clients_are_done(self) -> bool:
        return all(actor.done for actor in self.actors)

    async def _until(self, holds: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
        began = self.world.now
        while not holds():
            if self.world.now - began > seconds:
                raise Failure("workers", f"after {seconds:g} s {what()}")
            await sleep(self.world, 0.1)

    async def _direct(self) -> None:
        workers, settings = self.workers, self.workers.chosen.settings
        while not self._clients_are_done() or not self.scripts[1].done:
            await sleep(self.world, 0.1)
        self.world.note("the clients have finished")
        workers.chosen.faults.stop()
        if workers.chosen.files is not None:
            workers.chosen.files.free_space()
        for worker in workers.living():
            worker.hangs_until = 0.0
        if workers.stopping_at is None:
            await self._until(self._all_serve, SETTLE_SECONDS, lambda: f"there are not {settings.workers} workers that serve")
            await self._until(lambda: not self._unsettled(), SETTLE_SECONDS, lambda: f"there are {self._unsettled()}")
            for client in self.clients:
                for worker in workers.living():
                    client.caller.process = worker
                    await client.require_layers()
                client.caller.process = workers
                if "layers" in workers.chosen.uses:
                    await client.require_change()
            if self.draw.random() < 0.3:
                self.world.note("a worker hangs from now on")
                self.draw.choice(list(workers.living())).hangs_until = math.inf
            workers.get(signal.SIGTERM)
        allowed = exit_timeout_of(settings) + FIRST_REQUEST + 2
        await self._until(lambda: workers.ended_at is not None, allowed, lambda: "the drain has not ended")

    def _all_serve(self) -> bool:
        living, supervisor = list(self.workers.living()), self.workers.supervisor
        if supervisor.signal_queue or supervisor._replaced:
            return False
        return len(living) == self.workers.chosen.settings.workers and all(
            not worker.imports and worker.accepts and worker.service.ready for worker in living
        )

    def _unsettled(self) -> list[str]:
        return [f"{worker.name}: {one}" for worker in self.workers.living() for one in worker.rules.unsettled()]

    def close(self) -> None:
        """End the clients and what is left of supervisors: greenlets that wait are not garbage."""
        for actor in (*self.actors, *self.scripts):
            actor.script.close()
        for supervisor in self.workers.supervisors:
            supervisor.close()
