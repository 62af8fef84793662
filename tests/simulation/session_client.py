"""What clients do with sessions, against a model: a session is a list of rows.

A reply without success changes nothing. If the client has left during a change, the session may have it or not: then the model has both
lists, until a reply tells them apart.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np

from simulation.caller import Lost, Reply, Request
from simulation.configuration import WIDTH
from simulation.world import Actor, Failure, Resume, suspended
from support.safetensors_bodies import read_safetensors, safetensors

Row = tuple[float, ...]
Rows = tuple[Row, ...]
MODEL = "sessions equal a list of rows"
ENDED = (404, 410)
SAFETENSORS = "application/vnd.safetensors"
MOST_ROWS = 5  # of a step


@dataclass
class Known:
    """What a client knows of one of its sessions."""

    id: str
    layer: str
    idle_seconds: float
    used_at: float  # when it sent the last request for the session that succeeded
    capacity: int | None = None
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
        actions = [(self.create_session, 2), (self.use_of_another, 2)]
        if self.sessions:
            actions += [
                (self.step, 8),
                (self.look, 2),
                (self.steps_at_once, 4),
                (self.steps_in_a_row, 2),
                (self.step_in_safetensors, 1),
                (self.step_of_zeros, 2),
                (self.step_at_another_length, 1),
                (self.describe, 1),
                (self.fork, 2),
                (self.roll_back, 2),
                (self.export, 2),
                (self.import_rows, 1),
                (self.analyse_session, 1),
                (self.delete_session, 1),
                (self.list_sessions, 1),
            ]
        return actions

    async def session(self: Any, known: Known, method: str, path: str = "", body: bytes = b"", **more: Any) -> Reply | Lost:
        """Send a request for a session; forget the session if it has ended, which needs a reason."""
        sent, kept = self.world.now, self.process.keeps(known.id)
        also = (*ENDED, *self._too_large(known), *more.pop("also", ()))
        outcome: Reply | Lost = await self.ask(method, f"/sessions/{known.id}{path}", body, also=also, **more)
        self._note_use(known, outcome, sent, kept)
        return outcome

    def _too_large(self, known: Known) -> tuple[int, ...]:
        """The status of a step beyond the session's capacity."""
        return () if known.capacity is None else (413,)

    def _note_use(self: Any, known: Known, outcome: Reply | Lost, sent: float, kept: bool) -> None:
        """What the outcome of a request tells of its session. `kept`: whether the process had the session when it was `sent`."""
        if isinstance(outcome, Reply) and outcome.status < 300:
            if not kept:
                raise Failure("sessions end with their process", f"{known.id} of {self.name} is there after a restart")
            known.used_at = max(known.used_at, sent)
        elif isinstance(outcome, Reply) and outcome.status in ENDED:
            self._require_end(known, outcome)

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
        capacity = self.draw.choice((None, None, None, None, 6, 20))
        body = json.dumps({"layer": layer, "idle_seconds": idle, "capacity": capacity}).encode()
        reply = await self.ask("POST", "/sessions", body)
        if isinstance(reply, Reply) and reply.status == 201:
            document = json.loads(reply.body)
            self._add(Known(document["id"], layer, idle, sent, capacity), document, 0)

    def _add(self: Any, known: Known, document: dict[str, Any], length: int) -> None:
        if known.id in self.mine or document["length"] != length:
            raise Failure(MODEL, f"a new session of {self.name} is {document}, expected {length} rows and a new id")
        self.mine.add(known.id)
        self.process.session_owners[known.id] = self.owner
        self.sessions.append(known)

    def _step(self: Any, rows: Rows, **more: Any) -> bytes:
        zeros = np.zeros((len(rows), WIDTH)).tolist()
        return json.dumps({"query": zeros, "key": zeros, "value": rows, "outputs": ["output"], **more}).encode()

    def _some_rows(self: Any, count: int | None = None) -> Rows:
        return tuple(map(tuple, self.rows(count or self.draw.choice((1, 1, 1, 2, MOST_ROWS))).tolist()))

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
            if self._is_beyond(known, (rows[0],) * document["session"]["length"]):
                raise Failure(MODEL, f"{known.id} of at most {known.capacity} rows has {document['session']}")
            known.states = {state + rows for state in known.states if self._fits(known, state + rows, document, len(rows))}
            if not known.states:
                raise Failure(MODEL, f"the step of {len(rows)} rows by {self.name} in {known.id} got {document}")
        elif reply.status == 413:
            known.states = {state for state in known.states if self._is_beyond(known, state + rows)}
            if not known.states:
                raise Failure(MODEL, f"the step of {len(rows)} rows by {self.name} in {known.id} got 413, of {known.capacity} rows")

    def _is_beyond(self, known: Known, rows: Rows) -> bool:
        """Whether the session may not have these rows."""
        return known.capacity is not None and len(rows) > known.capacity

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
        outputs = self.draw.choice((["output", "log_sum_exp"], ["output"]))
        body = json.dumps({"query": [[0.0] * WIDTH], "append": False, "outputs": outputs}).encode()
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

    async def steps_at_once(self: Any) -> None:
        """Steps of one session or of several at once, each on a connection of its own: for each session, some order of its steps must
        explain their replies."""
        callers = self.hands[: self.draw.randint(2, len(self.hands))]
        among = self.sessions if self.draw.random() < 0.6 else [self.draw.choice(self.sessions)]
        same = self.draw.choice((None, 1, 2))  # rows of each: steps with equal numbers of rows are computed together
        several = [(among[i % len(among)], Part(self._some_rows(same))) for i in range(len(callers))]

        async def send(known: Known, part: Part, caller: Any) -> None:
            part.outcome = await self.session(known, "POST", "/attend", self._step(part.rows), caller=caller)

        def all_of_them(resume: Resume) -> None:
            left = len(several)

            async def one(known: Known, part: Part, caller: Any) -> None:
                nonlocal left
                await send(known, part, caller)
                left -= 1
                if not left:
                    resume(None)

            for (known, part), caller in zip(several, callers, strict=True):
                Actor(self.world, one(known, part, caller)).start(self.draw.choice((0.0, 0.0, 1e-4, 1e-3)))

        await suspended(all_of_them)
        for known in {id(known): known for known, _ in several}.values():
            parts = [part for one, part in several if one is known]
            self._after_several(known, parts, permutations(parts))

    async def steps_in_a_row(self: Any) -> None:
        """Steps that the client sends at once on one connection: they take effect in their order."""
        known, sent = self.draw.choice(self.sessions), self.world.now
        kept = self.process.keeps(known.id)
        parts = [Part(self._some_rows()) for _ in range(self.draw.choice((2, 3, 5)))]
        requests = [Request("POST", f"/sessions/{known.id}/attend", self._step(part.rows)) for part in parts]
        outcomes = await self.ask_all(requests, (*ENDED, *self._too_large(known)))
        for part, outcome in zip(parts, outcomes, strict=True):
            part.outcome = outcome
            self._note_use(known, outcome, sent, kept)
        self._after_several(known, parts, [parts])

    def _after_several(self: Any, known: Known, parts: Sequence[Part], orders: Iterable[Sequence[Part]]) -> None:
        """What a session may be after several calls: one of these orders explains their replies."""
        if any(isinstance(part.outcome, Reply) and part.outcome.status in ENDED for part in parts):
            return
        known.states = {after for order in orders for state in known.states for after in self._explained(known, state, order)}
        if not known.states:
            raise Failure(MODEL, f"no order of {len(parts)} steps in {known.id} by {self.name} explains {[part.outcome for part in parts]}")

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
            elif outcome is not None and outcome.status == 413:
                states = {state for state in states if self._is_beyond(known, state + part.rows)}
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
            self._add(Known(document["id"], known.layer, known.idle_seconds, sent, known.capacity, {kept}), document, len(kept))

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
        reply = await self.session(known, "PUT", "/cache", body, headers={"Content-Type": SAFETENSORS}, also=(422, 409))
        if isinstance(reply, Lost):
            known.states |= {rows} if reply.begun else set()
        elif reply.status == 200:
            known.states = {rows}
            if json.loads(reply.body)["length"] != len(rows):
                raise Failure(MODEL, f"{known.id} has other rows than those imported: {reply.body[:300]!r}")

    async def step_in_safetensors(self: Any) -> None:
        known, rows = self.draw.choice(self.sessions), self._some_rows()
        zeros = np.zeros((len(rows), WIDTH), np.float32)
        tensors = {"query": zeros, "key": zeros, "value": np.array(rows, np.float32)}
        body = safetensors(tensors, request=json.dumps({"outputs": ["output"]}))
        headers = {"Content-Type": SAFETENSORS, "Accept": "application/json"}
        self._after_step(known, rows, await self.session(known, "POST", "/attend", body, headers=headers))

    async def step_of_zeros(self: Any) -> None:
        """Append rows whose keys and values are the query, as a call without key and value does."""
        known, count = self.draw.choice(self.sessions), self.draw.choice((1, 1, 2))
        rows = ((0.0,) * WIDTH,) * count
        body = json.dumps({"query": rows, "outputs": ["output"]}).encode()
        self._after_step(known, rows, await self.session(known, "POST", "/attend", body))

    async def step_at_another_length(self: Any) -> None:
        """A step with a length that the session has not is refused, and the refusal has the length."""
        known, rows = self.draw.choice(self.sessions), self._some_rows()
        lengths = {str(len(state)) for state in known.states}
        other = self.draw.choice([length for length in range(5) if str(length) not in lengths] or [1000])
        reply = await self.session(known, "POST", "/attend", self._step(rows, expected_length=other), also=(412,))
        if isinstance(reply, Reply) and (
            reply.status == 200 or (reply.status == 412 and json.loads(reply.body)["errors"][0]["expected"] not in lengths)
        ):
            raise Failure(MODEL, f"a step of {self.name} at {other} rows, where {known.id} has {lengths}, got {reply}")

    async def describe(self: Any) -> None:
        known = self.draw.choice(self.sessions)
        used_at = known.used_at
        reply = await self.session(known, "GET")
        known.used_at = used_at  # this is no use of it
        if isinstance(reply, Reply) and reply.status == 200:
            document = json.loads(reply.body)
            known.states = {state for state in known.states if len(state) == document["length"]}
            if not known.states or document["capacity"] != known.capacity:
                raise Failure(MODEL, f"{known.id} of {self.name} is described as {document}")

    async def analyse_session(self: Any) -> None:
        known = self.draw.choice(self.sessions)
        if self.draw.random() < 0.3:
            await self._use_elsewhere(known)
            return
        members = {"session": known.id, "query": [[0.0] * WIDTH], "metrics": ["entropy"]}
        headers = {"X-Attend-Session": known.id}
        reply = await self.ask("POST", "/attend/analysis", json.dumps(members).encode(), headers, also=(*ENDED, 422, 409))
        if isinstance(reply, Reply) and reply.status == 200 and known.layer == "plain":
            entropy = np.array(json.loads(reply.body)["metrics"]["entropy"])
            if not any(state and np.allclose(entropy, np.log(len(state)), atol=1e-4) for state in known.states):
                raise Failure(
                    MODEL, f"the entropy of {known.id} is {entropy.tolist()}, expected that of {sorted(map(len, known.states))} rows"
                )

    async def _use_elsewhere(self: Any, known: Known) -> None:
        """Draw a picture of a session, or plan a call to it."""
        members = {"session": known.id, "query": [[0.0] * WIDTH], **self.draw.choice(({}, {"figure": {"format": "png"}}))}
        path, headers = "/attend/figure" if "figure" in members else "/attend/plan", {"X-Attend-Session": known.id}
        reply = await self.ask("POST", path, json.dumps(members).encode(), headers, also=(*ENDED, 422, 409))
        if isinstance(reply, Reply) and reply.status == 200 and path == "/attend/plan":
            keys = json.loads(reply.body)["outputs"]["attention_weights"]["shape"][-1]
            if keys not in map(len, known.states):
                raise Failure(MODEL, f"a plan for {known.id} of {self.name} has {keys} keys, expected {sorted(map(len, known.states))}")

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

    async def use_of_another(self: Any) -> None:
        """Use a session of another owner: that is refused, and changes nothing."""
        others = [one for one, owner in self.process.session_owners.items() if owner != self.owner]
        if not others:
            return
        uses = [("GET", "", b""), ("GET", "/cache", b""), ("PATCH", "", b'{"length": 0}'), ("POST", "/fork", b"{}"), ("DELETE", "", b"")]
        method, path, body = self.draw.choice([*uses, ("POST", "/attend", self._step(self._some_rows()))])
        reply = await self.ask(method, f"/sessions/{self.draw.choice(others[-3:])}{path}", body, also=ENDED)
        if isinstance(reply, Reply) and reply.status < 300:
            raise Failure("no caller sees another's data", f"{method} {path} by {self.name} of {self.owner} of a session of another owner")
