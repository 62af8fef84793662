"""Runs one seed: clients call a process until they have what they want, then everything must settle, and the process must end."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import prometheus_client
import structlog

from attend.cli.server import FIRST_REQUEST
from attend.cli.signals import EXIT_SECONDS
from attend.web.keys import SCOPES, make_key
from simulation.caller import Caller
from simulation.clients import draw_clients
from simulation.configuration import KEYS, Configuration, draw_configuration
from simulation.interposition import interposed
from simulation.process import Process, discard
from simulation.replicas import GatewayCaller, Replicas, ReplicasDirector, replicas_configuration
from simulation.rules import Rules, kept_by
from simulation.side_by_side import SETTLE_SECONDS, run_side_by_side
from simulation.workers import Workers, WorkersDirector, supervised, workers_configuration
from simulation.world import START, Actor, Failure, World, sleep

MOST_STEPS = 400_000  # iterations of the event loop of one run
LINE, LOG_LINES = 250, 20  # characters of a line, and lines, of the log in the history
Kept = frozenset[int] | None


@dataclass
class Outcome:
    """How a run ended."""

    seed: int
    failure: BaseException | None
    history: list[str]
    digest: int
    steps: int
    seconds: float  # on the world's clock
    load: list[int]  # requests without a session that each replica got, from the most to the least; empty without replicas


def run(seed: int, clients: Kept = None, actions: int | None = None, of: str = "process") -> Outcome:
    """Run one seed of RUNS, if need be with these clients alone, and at most so many actions of each."""
    world = World(seed)
    chosen = draw_configuration(world, keys_file())
    world.pauses, world.most_steps = chosen.pauses, MOST_STEPS
    chosen.actions = min(chosen.actions, actions or chosen.actions)
    log = io.StringIO()
    with quiet(log):
        failure, load = RUNS[of](world, chosen, clients)
    history = [*world.history, *[line[:LINE] for line in log.getvalue().splitlines() if "event=" in line][-LOG_LINES:]]
    return Outcome(seed, failure, history, world.digest, world.steps, world.now - START, load)


def run_process(world: World, chosen: Configuration, clients: Kept) -> tuple[BaseException | None, list[int]]:
    """One process, which may be killed and begin again."""
    with interposed(world, chosen):
        process = Process(world, chosen)
        director = Director(process, clients)
        live(process)
        while process.killed and world.failure is None:
            process.bury()
            process.begin()
            director.watch()
            live(process)
        rules = director.rules
        if world.failure is None:
            director.require_end()
        failure = world.failure
        end(process)
        director.close()
        if failure is None and process.service.started and (kept := rules.kept_tensors()):
            failure = Failure("memory", f"the tensors of {kept} answered calls are kept by {kept_by(rules._tensors)}")
    return failure, []


def run_workers(world: World, chosen: Configuration, clients: Kept) -> tuple[BaseException | None, list[int]]:
    """A supervisor and its workers."""
    chosen, world.pauses = workers_configuration(world, chosen), 0.0
    with interposed(world, chosen), supervised(world):
        workers = Workers(world, chosen)
        director = WorkersDirector(workers, draw_clients(workers, secrets(), clients))
        return run_to_the_end(world, workers, director), []


def run_replicas(world: World, chosen: Configuration, clients: Kept) -> tuple[BaseException | None, list[int]]:
    """Replicas behind a gateway."""
    chosen, world.pauses = replicas_configuration(world, chosen), 0.0
    with interposed(world, chosen):
        replicas = Replicas(world, chosen)
        world.most_steps *= 1 + len(replicas.all) // 8  # each has timers of its own
        director = ReplicasDirector(replicas, draw_clients(replicas, secrets(), clients, GatewayCaller))
        failure = run_to_the_end(world, replicas, director)
        return failure, sorted((replicas.load[name] for name in replicas.all), reverse=True)


def run_to_the_end(world: World, several: Workers | Replicas, director: WorkersDirector | ReplicasDirector) -> BaseException | None:
    """Run several processes until they have ended; returns what failed."""
    run_side_by_side(world, several.living, director.finished)
    failure = world.failure
    if failure is None and not director.finished():
        failure = Failure("liveness", "nothing will ever happen again, and the processes have not ended")
    world.end()
    for member in several.living():
        discard(member.loop)
    director.close()
    return failure


RUNS = {"process": run_process, "workers": run_workers, "replicas": run_replicas}


def live(process: Process) -> None:
    """Run the process until it ends or is killed, or the run fails."""
    world = process.world
    try:
        process.loop.run_until_complete(process.serve())
    except RuntimeError as error:  # the loop was stopped before the server had ended
        if world.failure is None and not process.killed:
            world.fail(Failure("liveness", f"nothing will ever happen again, and the process has not ended ({error})"))
    except SystemExit as error:
        world.fail(Failure("rule 10", f"the process exits with {error.code}"))


class Director:
    """Who starts the clients, waits until they have finished, requires that all is quiet then, and ends the process."""

    def __init__(self, process: Process, clients: Kept) -> None:
        self.process, self.world = process, process.world
        self.clients = draw_clients(process, secrets(), clients)
        self.rules: Rules | None = None
        self.watch()
        self.draw = self.world.random("director")
        self.actors = [Actor(self.world, client.act()) for client in self.clients]
        self.early = self.draw.random() < 0.2  # whether the clients do not wait until the process has started
        if self.early:
            self._start_clients()
        self.script = Actor(self.world, self._direct())
        self.script.start(0.0)
        if process.chosen.stop_after is not None:
            self.world.at(process.chosen.stop_after, self._terminate)

    def _start_clients(self) -> None:
        for actor in self.actors:
            actor.start(self.draw.choice((0.0, 0.0, 1.0, self.draw.uniform(0, 3))))

    def watch(self) -> None:
        """Check the rules of the process that has begun."""
        if self.rules is not None:
            self.rules.close()
        self.rules = Rules(self.process)
        self.world.checks[:] = [self.rules.check, self._allow_faults]

    def _allow_faults(self) -> None:
        self.process.chosen.faults.begun = self.process.service.started

    def _terminate(self) -> None:
        if self.process.spared:  # the script sends it
            return
        if self.process.signals is None:  # it has not started
            self.world.at(0.1, self._terminate)
        else:
            self.process.terminate()

    async def _direct(self) -> None:
        while self.process.stopping_at is None and not self.process.service.started:
            await sleep(self.world, 0.01)
        if not self.early:
            self._start_clients()
        while not all(actor.done for actor in self.actors):
            await sleep(self.world, 0.1)
        self.world.note("the clients have finished")
        chosen = self.process.chosen
        chosen.faults.stop()
        self.world.pauses = 0.0
        if self.process.stopping_at is None:
            self.process.spare()
            await self._require_quiet()
            await self._require_answer()
            for client in self.clients:
                await client.require_layers()
            await self._require_quiet()
            self.process.terminate()
        await self._require_exit()

    async def _require_quiet(self) -> None:
        """Wait until everything has settled."""
        began = self.world.now
        while self.process.service._starting is None or not self.process.service._starting.done():
            await sleep(self.world, 0.1)
        while unsettled := self.rules.unsettled():
            if self.world.now - began > SETTLE_SECONDS:
                raise Failure("all returns to 0 when quiet", f"after {SETTLE_SECONDS:g} s there are {'; '.join(unsettled)}")
            await sleep(self.world, 0.5)

    async def _require_answer(self) -> None:
        """A process that has settled answers at once."""
        key = secrets()[KEYS[0]] if self.process.chosen.settings.keys_file is not None else None
        caller = Caller(self.process, "the last client", "127.0.0.1", key)
        body = b'{"layer": "plain", "query": [[1, 2, 3, 4]], "outputs": ["output"]}'
        wanted = [("GET", "/health/ready", b""), ("POST", "/attend", body), ("GET", "/layers", b"")]
        for method, target, content in wanted:
            reply = await caller.call(method, target, content, {"Content-Type": "application/json"})
            if getattr(reply, "status", None) != 200:
                raise Failure("rule 9: a process that has settled serves", f"{method} {target} got {reply}")
        caller.close()

    async def _require_exit(self) -> None:
        """SIGTERM ends the process in the time that its settings allow."""
        settings, process = self.process.chosen.settings, self.process
        assert process.stopping_at is not None
        allowed = settings.drain_seconds + FIRST_REQUEST + settings.shutdown_seconds + EXIT_SECONDS
        while process.ended_at is None:
            if self.world.now - process.stopping_at > allowed + 31:  # the clients may have ended later; a pause takes 30 s
                raise Failure("rule 10: the drain ends", f"the process has not ended {allowed:g} s after SIGTERM: {self.rules.unsettled()}")
            await sleep(self.world, 0.1)

    def close(self) -> None:
        """End the clients, and watch no more."""
        for actor in (*self.actors, self.script):
            actor.script.close()
        if self.rules is not None:
            self.rules.close()

    def require_end(self) -> None:
        """The server has ended: nothing waits for it any more."""
        process = self.process
        if process.stopping_at is None:
            self.world.fail(Failure("rule 10", "the process ended without a signal"))
        scheduler, budget = process.service.scheduler, process.service.budget
        if (len(scheduler._queue) or budget.used) and not process.has_overrun():  # then requests are cut off
            self.world.fail(Failure("rule 10", f"the process ended with {len(scheduler._queue)} waiting calls and {budget.used} bytes"))


def end(process: Process) -> None:
    """Throw the process away, as its end does."""
    process.world.end()
    discard(process.loop)


@contextmanager
def quiet(log: io.StringIO) -> Iterator[None]:
    """Write the log of the service to `log`."""
    before = structlog.get_config()
    prometheus_client.disable_created_metrics()
    structlog.configure([structlog.processors.KeyValueRenderer()], logger_factory=structlog.PrintLoggerFactory(log))
    try:
        with redirect_stderr(log):
            yield
    finally:
        structlog.configure(**before)


@cache
def _keys() -> tuple[Path, dict[str, str]]:
    """The file of keys of this Python process, and the secrets by owner."""
    folder = Path(tempfile.mkdtemp(prefix="attend-simulation-"))
    made = {name: make_key(name, SCOPES) for name in KEYS}
    path = folder / "keys"
    path.write_text("".join(f"{key.name} {','.join(sorted(key.scopes))} {key.digest}\n" for _, key in made.values()))
    return path, {name: secret for name, (secret, _) in made.items()}


def keys_file() -> Path:
    return _keys()[0]


def secrets() -> dict[str, str]:
    return _keys()[1]


def new_seeds() -> Iterator[int]:
    """Seeds that were not tried before, most likely."""
    draw = Random()
    while True:
        yield draw.getrandbits(32)
