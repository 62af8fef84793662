"""Up to 64 replicas with sessions behind a gateway, which knows nothing but the names in ids and which replicas are ready."""

import dataclasses
import math
import re
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from attend.deploy.routing import replica_of
from simulation.caller import REFUSED, UNSEEN, Caller, Lost, Manner, Reply, Request
from simulation.clients import Client
from simulation.configuration import Configuration
from simulation.side_by_side import SETTLE_SECONDS, Member
from simulation.world import Actor, Failure, World, sleep

SESSION = re.compile(r"/sessions/([^/]+)")
HEALTH_SECONDS = 0.5  # between two looks of the gateway at a replica
DRAIN_SECONDS = 5.0
START_SECONDS = (0.2, 1.0, 8.0)  # until a new process serves


class Replica(Member):
    """One replica. `starts`: its process does not serve yet."""

    starts = True

    def next_at(self) -> float:
        return math.inf if self.starts else super().next_at()

    def start(self) -> None:
        """Start a process, for the first time or again."""
        if self.ended:
            self.begin()
        self.ended, self.starts, self.hangs_until = False, True, 0.0
        life = self.lives
        seconds = self.world.random(f"start {self.name}{life}").choice(START_SECONDS)
        self.world.at(seconds, lambda: self.run() if life == self.lives and not self.ended else None)

    def run(self) -> None:
        self.starts = False
        super().run()

    def is_up(self) -> bool:
        """What /health/ready answers."""
        return not (self.ended or self.starts) and self.accepts and self.service.ready

    def get_sigterm(self) -> None:
        if self.signals is None:
            self.end(-signal.SIGTERM)
        else:
            self.stopping_at = self.world.now
            self.world.note(self.name, "gets SIGTERM")
            self.signals.drain(signal.SIGTERM, None)


class Replicas:
    """The replicas and their gateway."""

    killed = False
    lives = 1

    def __init__(self, world: World, chosen: Configuration) -> None:
        """To be made within `interposed`."""
        self.world, self.chosen = world, chosen
        self.draw = world.random("gateway")
        self.misroutes = world.random("configuration misroutes").choice((0.0, 0.0, 0.1))
        self.all: dict[str, Replica] = {}
        for number in range(world.random("configuration replicas").choice((2, 3, 5, 5, 64))):
            settings = chosen.settings.model_copy(update={"replica_name": f"r{number}"})
            self.all[f"r{number}"] = Replica(world, dataclasses.replace(chosen, settings=settings), f"replica r{number} ")
        self.up: set[str] = set()
        self.load: Counter[str] = Counter()  # requests without a session, by replica
        self.session_owners: dict[str, str] = {}
        self.loses = False  # whether replicas are killed or hang, so that requests may be lost
        for replica in self.all.values():
            replica.start()

    def living(self) -> Iterator[Replica]:
        return (replica for replica in self.all.values() if not replica.ended)

    async def check_health(self) -> None:
        """What the gateway does for ever."""
        while True:
            for name, replica in self.all.items():
                if replica.is_up():
                    self.up.add(name)
                else:
                    self.up.discard(name)
            await sleep(self.world, HEALTH_SECONDS)

    def choose(self, session: str, tried: Collection[str]) -> str | None:
        """The replica for a request; None if there is none to try any more."""
        name = replica_of(session, self.all if session.startswith("s.") else sorted(self.up))
        if name is not None:
            return None if name in tried else name
        return self.draw.choice([name for name in self.all if name in self.up and name not in tried] or [None])

    def keeps(self, session_id: str) -> bool:
        return any(replica.keeps(session_id) for replica in self.living())

    def has_overrun(self) -> bool:
        return any(replica.has_overrun() for replica in self.all.values())


class GatewayCaller(Caller):
    """A client of the gateway, which has a connection to each replica for it. The gateway sends a request again on a new connection if the
    replica closed the old one before it arrived; to another replica if the first one has not begun it, or it may be repeated, and it names
    no session."""

    process: Any

    def __init__(self, replicas: Any, name: str, address: str, secret: str | None) -> None:
        super().__init__(replicas, name, address, secret)
        self._upstream: dict[str, Caller] = {}

    async def call(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None, manner: Manner | None = None
    ) -> Reply | Lost:
        gateway, manner = self.process, manner or Manner()
        found = SESSION.search(target)
        session = found[1] if found else (headers or {}).get("X-Attend-Session", "")
        tried: set[str] = set()
        outcome: Reply | Lost = Lost(REFUSED, begun=False)
        while (name := gateway.choose(session, tried)) is not None:
            right = name
            if session and gateway.draw.random() < gateway.misroutes:
                name = gateway.draw.choice(list(gateway.all))
            tried.add(right)
            outcome = await self._to(name).call(method, target, body, headers, manner)
            if isinstance(outcome, Lost) and outcome.why == UNSEEN and manner == Manner():  # an idle connection was closed meanwhile
                outcome = await self._to(name).call(method, target, body, headers, manner)
            if name != right:
                self._require_refusal_of_stranger(outcome, f"{method} {target} at {name}")
                return Lost("misrouted", begun=False)
            if not session:
                gateway.load[name] += 1
            begun = isinstance(outcome, Lost) and outcome.begun and not (method == "GET" or target.startswith("/attend"))
            if isinstance(outcome, Reply) or session or begun or manner != Manner():
                break
        if isinstance(outcome, Lost) and not (gateway.loses or session or manner != Manner()):
            raise Failure("no request is lost while replicas roll", f"{method} {target} of {self.name}: {outcome.why} of {tried}")
        return outcome

    async def call_all(self, requests: Sequence[Request], manner: Manner | None = None) -> list[Reply | Lost]:
        """One after the other: the gateway sends no two requests at once on a connection."""
        return [await self.call(*request, manner) for request in requests]

    def _require_refusal_of_stranger(self, outcome: Reply | Lost, what: str) -> None:
        if isinstance(outcome, Reply) and outcome.status < 300:
            raise Failure("sessions are answered by their replica", f"{what} got {outcome.status}")

    def _to(self, name: str) -> Caller:
        if name not in self._upstream:
            self._upstream[name] = Caller(self.process.all[name], f"{self.name} to {name}", self.address, self.secret)
        return self._upstream[name]

    async def settle(self) -> None:
        for caller in self._upstream.values():
            await caller.settle()

    def close(self) -> None:
        for caller in self._upstream.values():
            caller.close()


class ReplicasDirector:
    """Who starts the clients, rolls and kills replicas, requires that all is quiet then, and ends the processes."""

    def __init__(self, replicas: Replicas, clients: Sequence[Client]) -> None:
        self.replicas, self.world, self.clients = replicas, replicas.world, clients
        self.draw = self.world.random("director")
        self.world.checks[:] = [self._allow_faults]
        self.actors = [Actor(self.world, client.act()) for client in clients]
        self.scripts = [Actor(self.world, self._direct()), Actor(self.world, self._disturb())]
        self.gateway = Actor(self.world, replicas.check_health())
        for actor in (*self.scripts, self.gateway):
            actor.start(0.0)
        self.kills, self.hangs = self.draw.choice(((0.0, 0.0), (0.0, 0.0), (0.5, 0.0), (0.3, 0.2)))
        replicas.loses = bool(self.kills or self.hangs or replicas.chosen.faults.compute)

    def _allow_faults(self) -> None:
        self.replicas.chosen.faults.begun = self.actors[0].done or len(self.replicas.up) == len(self.replicas.all) if self.actors else False

    def finished(self) -> bool:
        return all(actor.done for actor in self.scripts) and not any(True for _ in self.replicas.living())

    async def _until_up(self, replicas: Collection[Replica]) -> None:
        began = self.world.now
        while not all(replica.is_up() and replica.name.split()[1] in self.replicas.up for replica in replicas):
            for replica in replicas:
                if replica.ended:
                    replica.start()
            if self.world.now - began > SETTLE_SECONDS:
                raise Failure("replicas", f"after {SETTLE_SECONDS:g} s some are not ready")
            await sleep(self.world, 0.1)

    async def _disturb(self) -> None:
        """Start the clients once all replicas serve; then roll, kill and stop replicas while they call."""
        draw, replicas = self.draw, self.replicas
        await self._until_up(list(replicas.all.values()))
        for actor in self.actors:
            actor.start(draw.choice((0.0, 1.0, draw.uniform(0, 20))))
        while not all(actor.done for actor in self.actors):
            await sleep(self.world, draw.choice((0.1, 1.0, 5.0)))
            replica = draw.choice(list(replicas.living()))
            if draw.random() < self.kills:
                replica.end(-signal.SIGKILL)
                await sleep(self.world, draw.choice((0.0, 3.0)))
            elif draw.random() < self.hangs:
                replica.hangs_until = self.world.now + draw.choice((1.0, 30.0))
            else:
                replica.get_sigterm()
                while not replica.ended:
                    await sleep(self.world, 0.1)
            await self._until_up([one for one in replicas.all.values() if one is replica or one.ended])

    async def _direct(self) -> None:
        replicas = self.replicas
        while not self.scripts[1].done:
            await sleep(self.world, 0.1)
        self.world.note("the clients have finished")
        replicas.chosen.faults.stop()
        for replica in replicas.living():
            replica.hangs_until = 0.0
        await self._until_up(list(replicas.all.values()))
        began = self.world.now
        while unsettled := [f"{one.name}: {what}" for one in replicas.living() for what in one.rules.unsettled()]:
            if self.world.now - began > SETTLE_SECONDS:
                raise Failure("all returns to 0 when quiet", f"after {SETTLE_SECONDS:g} s there are {unsettled}")
            await sleep(self.world, 0.5)
        for replica in replicas.living():
            replica.get_sigterm()

    def close(self) -> None:
        """End the clients."""
        for actor in (*self.actors, *self.scripts, self.gateway):
            actor.script.close()


def replicas_configuration(world: World, chosen: Configuration) -> Configuration:
    """The configuration for replicas: with sessions, without a folder of layers and gRPC."""
    changes = {"grpc_port": None, "layers_dir": None, "drain_seconds": DRAIN_SECONDS}
    return dataclasses.replace(
        chosen, settings=chosen.settings.model_copy(update=changes), kill_after=None, files=None, uses=("sessions",), theme=None
    )
