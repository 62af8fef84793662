"""What clients do with sessions, against a model: a session is a list of rows.

A reply without success changes nothing. If the client has left during a change, the session may have it or not: then the model has both
lists, until a reply tells them apart.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np

from simulation.caller import Lost, Reply
from simulation.configuration import WIDTH
from simulation.world import Actor, Failure, Resume, suspended
from support.safetensors_bodies import read_safetensors

Row = tuple[float, ...]
Rows = tuple[Row, ...]
MODEL = "sessions equal a list of rows"
ENDED = (404, 410)


@dataclass
class Known:
    """What a client knows of one of its sessions."""

    id: str
    layer: str
    idle_seconds: float
    used_at: float  # when it sent the last request for the session that succeeded
    states: set[Rows] = field(default_factory=lambda: {()})  # one of these lists is what it has
    file: tuple[bytes, Rows] | None = None  # an exported file, and its rows


@dataclass
class Part:
    """One of several calls that are under way together."""

    rows: Rows
    outcome: Reply | Lost | None = None
    mean: Any = None
    length: int = 0


class SessionActions:
    """The part of a client that uses sessions."""

    def begin_sessions(self: Any) -> None:
        self.sessions: list[Known] = []
        self.mine: set[str] = set()  # ids of all sessions that it has ever made
        self.deleting: set[str] = set()  # ids of those that it has tried to delete

    def session_actions(self: Any) -> list[tuple[Callable[[], Awaitable[None]], int]]:
        actions = [(self.create_session, 2)]
        if self.sessions:
            actions += [
                (self.step, 8),
                (self.look, 2),
                (self.two_steps_at_once, 2),
                (self.fork, 2),
                (self.roll_back, 2),
                (self.export, 2),
                (self.import_rows, 1),
                (self.analyse_session, 1),
                (self.delete_session, 1),
                (self.list_sessions, 1),
                (self.read_of_another, 1),
            ]
        return actions

    async def session(self: Any, known: Known, method: str, path: str = "", body: bytes = b"", **more: Any) -> Reply | Lost:
        """Send a request for a session; forget the session if it has ended, which needs a reason."""
        sent, kept = self.world.now, self.process.keeps(known.id)
        outcome: Reply | Lost = await self.ask(method, f"/sessions/{known.id}{path}", body, also=(*ENDED, *more.pop("also", ())), **more)
        if isinstance(outcome, Reply) and outcome.status < 300:
            if not kept:
                raise Failure("sessions end with their process", f"{known.id} of {self.name} is there after a restart")
            known.used_at = max(known.used_at, sent)
        elif isinstance(outcome, Reply) and outcome.status in ENDED:
            self._require_end(known, outcome)
        return outcome

    def _require_end(self: Any, known: Known, reply: Reply) -> None:
        """A session ends only for the reasons that the documentation has."""
        text = reply.body.decode("latin-1")
        if known in self.sessions:
            self.sessions.remove(known)
        sizes = self.chosen.sizes
        few = sizes["attend.serving.sessions.registry.MAX_SESSIONS"] < 10_000 or self.chosen.settings.session_memory < 1 << 20
        reasons = {
            "it was idle": self.world.now - known.used_at >= known.idle_seconds,
            "needed its memory": few,
            "its layer": known.layer not in ("plain", "windowed"),
            "it was deleted": known.id in self.deleting,
            "its process was restarted": not self.process.keeps(known.id),
        }
        forgotten = sizes["attend.serving.sessions.registry.MAX_ENDED"] < 10_000 and '"the session has ended"' in text
        if not (forgotten or any(words in text and possible for words, possible in reasons.items())):
            raise Failure("sessions end for a reason", f"{known.id} of {self.name}: {reply.status} {text[:300]}")

    async def create_session(self: Any) -> None:
        sent = self.world.now
        idle, layer = self.draw.choice((0.5, 5.0, 30.0)), self.draw.choice(("plain", "plain", "windowed"))
        body = json.dumps({"layer": layer, "idle_seconds": idle}).encode()
        reply = await self.ask("POST", "/sessions", body)
        if isinstance(reply, Reply) and reply.status == 201:
            document = json.loads(reply.body)
            self._add(Known(document["id"], layer, idle, sent), document, 0)

    def _add(self: Any, known: Known, document: dict[str, Any], length: int) -> None:
        if known.id in self.mine or document["length"] != length:
            raise Failure(MODEL, f"a new session of {self.name} is {document}, expected {length} rows and a new id")
        self.mine.add(known.id)
        self.sessions.append(known)

    def _step(self: Any, rows: Rows, **more: Any) -> bytes:
        zeros = np.zeros((len(rows), WIDTH)).tolist()
        return json.dumps({"query": zeros, "key": zeros, "value": rows, "outputs": ["output"], **more}).encode()

    def _some_rows(self: Any) -> Rows:
        return tuple(map(tuple, self.rows(self.draw.choice((1, 1, 1, 2, 5))).tolist()))

    async def step(self: Any) -> None:
        """Append rows; after an unknown end, sometimes again at once. With the length that the session must have, that doubles nothing."""
        known, rows = self.draw.choice(self.sessions), self._some_rows()
        if len(known.states) != 1 or self.draw.random() < 0.5:
            self._after_step(known, rows, await self.session(known, "POST", "/attend", self._step(rows)))
            return
        (before,) = known.states
        body = self._step(rows, expected_length=len(before))
        reply = await self.session(known, "POST", "/attend", body, settle=False)
        if isinstance(reply, Lost) and known in self.sessions:
            again = await self.session(known, "POST", "/attend", body, also=(412,))
            if isinstance(again, Reply) and again.status == 412:
                if not reply.begun:
                    raise Failure(MODEL, f"{known.id} has not the {len(before)} rows that {self.name} left in it")
                known.states = {before + rows}
                return
            await self.caller.settle()
            if isinstance(again, Lost) or again.status != 200:
                begun = reply.begun or (isinstance(again, Lost) and again.begun)
                known.states |= {before + rows} if begun else set()
                return
            reply = again
        self._after_step(known, rows, reply)

    def _after_step(self: Any, known: Known, rows: Rows, reply: Reply | Lost) -> None:
        if isinstance(reply, Lost):
            if reply.begun:
                known.states |= {state + rows for state in known.states}
        elif reply.status == 200:
            document = json.loads(reply.body)
            known.states = {state + rows for state in known.states if self._fits(known, state + rows, document, len(rows))}
            if not known.states:
                raise Failure(MODEL, f"the step of {len(rows)} rows by {self.name} in {known.id} got {document}")

    def _fits(self, known: Known, rows: Rows, document: dict[str, Any], queries: int) -> bool:
        """Whether a reply is that of the last `queries` rows of a session with these rows."""
        return document["session"]["length"] == len(rows) and self._means_fit(known, rows, document["output"], queries)

    def _means_fit(self, known: Known, rows: Rows, output: Any, queries: int) -> bool:
        """Whether every row of the output is the mean of what its query sees: all rows, or those in the layer's window."""
        values, got = np.array(rows), np.array(output)
        for i in range(queries):
            position = len(rows) - queries + i
            seen = values if known.layer != "windowed" else values[max(0, position - 5) : position + 1]
            if not np.allclose(got[i], seen.mean(0), rtol=1e-4):
                return False
        return True

    async def look(self: Any) -> None:
        """Attend to the rows of a session without a new one."""
        known = self.draw.choice(self.sessions)
        body = json.dumps({"query": [[1.0] * WIDTH], "append": False, "outputs": ["output", "log_sum_exp"]}).encode()
        reply = await self.session(known, "POST", "/attend", body, also=(422, 409))
        if isinstance(reply, Reply) and reply.status == 200 and known.layer == "plain":
            document = json.loads(reply.body)
            length = document["session"]["length"]
            fitting = {
                state
                for state in known.states
                if len(state) == length and (not state or self._means_fit(known, state, document["output"], 1))
            }
            if not fitting:
                raise Failure(MODEL, f"a look at {known.id} by {self.name} got {document}, expected {known.states}")
            known.states = fitting

    async def two_steps_at_once(self: Any) -> None:
        """Two calls to one session on two connections: some order of them must explain both replies."""
        known = self.draw.choice(self.sessions)
        parts = [Part(self._some_rows()), Part(self._some_rows())]

        async def send(part: Part, caller: Any) -> None:
            part.outcome = await self.session(known, "POST", "/attend", self._step(part.rows), caller=caller)

        def both(resume: Resume) -> None:
            left = len(parts)

            async def one(part: Part, caller: Any) -> None:
                nonlocal left
                await send(part, caller)
                left -= 1
                if not left:
                    resume(None)

            for part, caller in zip(parts, (self.caller, self.other_hand), strict=True):
                Actor(self.world, one(part, caller)).start(self.draw.choice((0.0, 1e-4, 1e-3)))

        await suspended(both)
        if any(isinstance(part.outcome, Reply) and part.outcome.status in ENDED for part in parts):
            return
        known.states = {after for order in permutations(parts) for state in known.states for after in self._explained(known, state, order)}
        if not known.states:
            raise Failure(MODEL, f"no order of two steps in {known.id} by {self.name} explains {[part.outcome for part in parts]}")

    def _explained(self, known: Known, state: Rows, order: Sequence[Part]) -> set[Rows]:
        """The lists of rows after these calls in this order, as far as their replies allow it."""
        states = {state}
        for part in order:
            outcome, after = part.outcome, {state + part.rows for state in states}
            if isinstance(outcome, Lost):
                states |= after if outcome.begun else set()
            elif outcome is not None and outcome.status == 200:
                document = json.loads(outcome.body)
                states = {rows for rows in after if self._fits(known, rows, document, len(part.rows))}
        return states

    async def fork(self: Any) -> None:
        known, sent = self.draw.choice(self.sessions), self.world.now
        if len(known.states) != 1:
            return
        (rows,) = known.states
        length = self.draw.choice((None, self.draw.randint(0, len(rows))))
        reply = await self.session(known, "POST", "/fork", json.dumps({"length": length}).encode(), also=(409,))
        if isinstance(reply, Reply) and reply.status == 201:
            kept = rows[:length]
            document = json.loads(reply.body)
            self._add(Known(document["id"], known.layer, known.idle_seconds, sent, {kept}), document, len(kept))

    async def roll_back(self: Any) -> None:
        known = self.draw.choice(self.sessions)
        length = self.draw.randint(0, min(map(len, known.states)))
        reply = await self.session(known, "PATCH", "", json.dumps({"length": length}).encode(), also=(409,))
        shorter = {state[:length] for state in known.states}
        if isinstance(reply, Lost):
            known.states |= shorter if reply.begun else set()
        elif reply.status == 200:
            known.states = shorter

    async def export(self: Any) -> None:
        """Read all rows, which tells the state of the session exactly."""
        known = self.draw.choice(self.sessions)
        reply = await self.session(known, "GET", "/cache")
        if not isinstance(reply, Reply) or reply.status != 200:
            return
        arrays, metadata = read_safetensors(reply.body)
        first, length = int(metadata["first"]), int(metadata["length"])
        values = arrays["value"].transpose(1, 0, 2).reshape(length - first, WIDTH)  # [heads, n, width of a head] -> rows
        found = {
            state
            for state in known.states
            if len(state) == length and np.array_equal(np.array(state).reshape(length, WIDTH)[first:], values)
        }
        if not found or (first and known.layer != "windowed"):
            raise Failure(MODEL, f"the export of {known.id} by {self.name} has {length} rows {values.tolist()}, expected {known.states}")
        known.states = found
        known.file = reply.body, next(iter(found))

    async def import_rows(self: Any) -> None:
        """Put exported rows into a session."""
        known = self.draw.choice(self.sessions)
        sources = [one.file for one in self.sessions if one.file is not None and one.layer == known.layer]
        if not sources:
            return
        body, rows = self.draw.choice(sources)
        reply = await self.session(known, "PUT", "/cache", body, headers={"Content-Type": "application/vnd.safetensors"}, also=(422, 409))
        if isinstance(reply, Lost):
            known.states |= {rows} if reply.begun else set()
        elif reply.status == 200:
            known.states = {rows}
            if json.loads(reply.body)["length"] != len(rows):
                raise Failure(MODEL, f"{known.id} has other rows than those imported: {reply.body[:300]!r}")

    async def analyse_session(self: Any) -> None:
        known = self.draw.choice(self.sessions)
        members = {"session": known.id, "query": [[1.0] * WIDTH], "metrics": ["entropy"]}
        headers = {"X-Attend-Session": known.id}
        reply = await self.ask("POST", "/attend/analysis", json.dumps(members).encode(), headers, also=(*ENDED, 422, 409))
        if isinstance(reply, Reply) and reply.status == 200 and known.layer == "plain":
            entropy = np.array(json.loads(reply.body)["metrics"]["entropy"])
            if not any(state and np.allclose(entropy, np.log(len(state)), atol=1e-4) for state in known.states):
                raise Failure(
                    MODEL, f"the entropy of {known.id} is {entropy.tolist()}, expected that of {sorted(map(len, known.states))} rows"
                )

    async def delete_session(self: Any) -> None:
        known = self.draw.choice(self.sessions)
        self.deleting.add(known.id)
        reply = await self.session(known, "DELETE")
        if isinstance(reply, Reply) and reply.status == 204:
            self.sessions.remove(known)
            after = await self.session(known, "GET")
            if isinstance(after, Reply) and after.status == 200:
                raise Failure(MODEL, f"{known.id} is there after its deletion was acknowledged")

    async def list_sessions(self: Any) -> None:
        reply = await self.ask("GET", "/sessions")
        if isinstance(reply, Reply) and reply.status == 200:
            owners = self.process.session_owners
            foreign = [one["id"] for one in json.loads(reply.body)["sessions"] if owners.get(one["id"], self.owner) != self.owner]
            if foreign:
                raise Failure("no caller sees another's data", f"{self.name} of {self.owner} lists {foreign}")
        self.process.session_owners |= dict.fromkeys(self.mine, self.owner)

    async def read_of_another(self: Any) -> None:
        """Ask for a session of another owner."""
        self.process.session_owners |= dict.fromkeys(self.mine, self.owner)
        others = [one for one, owner in self.process.session_owners.items() if owner != self.owner]
        if others:
            reply = await self.ask("GET", f"/sessions/{self.draw.choice(others)}{self.draw.choice(('', '/cache'))}", also=ENDED)
            if isinstance(reply, Reply) and reply.status == 200:
                raise Failure("no caller sees another's data", f"{self.name} of {self.owner} reads a session of another owner")
