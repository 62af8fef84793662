"""Clients with intentions: what each wants of the service, and what it must then get.

Each row of values has numbers that no other row of the run has. A layer without projections, given keys of zeros, returns the mean of the
values, so an answer tells which rows it is of.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from random import Random
from typing import Any

import numpy as np

from simulation.caller import Caller, Lost, Manner, Reply, Request
from simulation.configuration import HEADS, WIDTH, Configuration
from simulation.layer_client import LayerActions
from simulation.process import Process
from simulation.rpc_client import RpcActions
from simulation.session_client import SessionActions
from simulation.world import Failure, World, sleep
from support.safetensors_bodies import read_safetensors, safetensors

JSON_TYPE, SAFETENSORS_TYPE = "application/json", "application/vnd.safetensors"
ANSWERED = "rule 7: the answer is that of the call alone"
HESITATIONS = (1e-3, 0.02, 0.2)  # seconds within a request, far less than the least `client_timeout`
Outcome = Reply | Lost


class Client(SessionActions, LayerActions, RpcActions):
    """A client that does drawn things one after the other."""

    def __init__(self, process: Process, number: int, secret: str | None, owner: str, make_caller: type[Caller] = Caller) -> None:
        self.process, self.world, self.chosen = process, process.world, process.chosen
        self.number, self.owner = number, owner
        self.draw = self.world.random(f"client {number}")
        self.name = f"client {number}"
        own = self.draw.choice(("sessions", "sessions", "layers", "rpc", "none"))
        self.preference = self.chosen.theme or own
        address = f"10.0.0.{number % 3}" if number % 2 else f"2001:db8::{number}"
        self.caller = make_caller(process, self.name, address, secret)
        self.hands = [self.caller, *(make_caller(process, f"{self.name}'s connection {i}", address, secret) for i in (2, 3, 4))]
        self.begin_sessions()
        self.begin_layers()
        self.begin_rpc()

    async def act(self) -> None:
        """Do everything that this client wants."""
        chosen = self.chosen
        for _ in range(self.draw.randint(1, chosen.actions)):
            await self.draw.choices(*zip(*self._actions(), strict=True))[0]()
            if self.draw.random() < 0.4:
                await sleep(self.world, self.draw.choice(chosen.waits))
        for hand in self.hands:
            hand.close()

    def _actions(self) -> list[tuple[Callable[[], Awaitable[None]], int]]:
        """What it may do next, with weights."""
        everywhere: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.attend_in_json, 4),
            (self.several_at_once, 1),
            (self.attend_in_safetensors, 2),
            (self.infer, 3),
            (self.analyse, 1),
            (self.picture, 1),
            (self.plan, 1),
            (self.words, 1),
            (self.wrong_request, 1),
            (self.read_something, 1),
        ]
        preferred = {"calls": everywhere, "sessions": self.session_actions(), "layers": self.layer_actions(), "rpc": self.rpc_actions()}
        wanted = preferred.get(self.preference, []) if self.preference in ("calls", *self.chosen.uses) else []
        more = [(action, 6 * weight) for action, weight in wanted]
        actions = [*everywhere, *chain.from_iterable(preferred[use] for use in self.chosen.uses), *more]
        factor = self.chosen.preferences.factor
        return [(action, weight * factor(action.__name__)) for action, weight in actions if factor(action.__name__)] or actions

    # How a request is sent, and what may come back

    def manner(self) -> Manner:
        """How it behaves during the next request."""
        faults, draw = self.chosen.faults, self.draw
        manner = Manner()
        if draw.random() < faults.leaves:
            manner.leaves_after, manner.by_reset = draw.choice((0.0, 1e-4, 1e-3, 0.01, 0.1)), draw.random() < 0.5
        if draw.random() < faults.stalls:
            stalled = draw.choice(("sending", "reading", "both"))
            if stalled != "reading":
                manner.sends = draw.random()
            if stalled != "sending":
                manner.reads_late = draw.choice((0.01, 1.0, 100.0))
        if draw.random() < 0.1 * self.chosen.preferences.factor("hesitate"):
            manner.hesitates = draw.random(), draw.choice(HESITATIONS)
        return manner

    def deadline(self) -> dict[str, str]:
        """The header of a deadline, or none."""
        often = min(0.5, 0.15 * self.chosen.preferences.factor("deadline"))
        return {"X-Request-Timeout": self.draw.choice(("0.0001", "0.01", "1"))} if self.draw.random() < often else {}

    async def ask(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        caller: Caller | None = None,
        also: tuple[int, ...] = (),
        plainly: bool = False,
        settle: bool = True,
    ) -> Outcome:
        """Send one request; `also` has the statuses that this one may get besides success and those that any request may get.
        `settle`: if the client leaves, it waits until the service has noticed, so that nothing changes later."""
        headers, manner = dict(headers or {}), Manner() if plainly else self.manner()
        if not plainly:
            headers |= self.deadline()
        if body and "Content-Type" not in headers:
            headers["Content-Type"] = JSON_TYPE
        caller = caller or self.caller
        outcome = await caller.call(method, target, body, headers, manner)
        if isinstance(outcome, Lost) and settle:
            await caller.settle()
        if isinstance(outcome, Reply) and outcome.status >= 300:
            self._require_reason(outcome, f"{method} {target}", headers, manner, also)
            if outcome.status == 503 and self.draw.random() < 0.7:  # it starts, or finds no memory
                await sleep(self.world, self.draw.choice((0.05, 1.0)))
            elif outcome.status == 504 and self.draw.random() < 0.5:  # it gives the service time, and keeps its connection
                await sleep(self.world, self.draw.choice((1.0, 30.0)))
        return outcome

    async def ask_all(self, requests: Sequence[Request], also: tuple[int, ...] = ()) -> list[Outcome]:
        """Send requests at once on one connection. `also`: as in `ask`."""
        requests = [request._replace(headers={"Content-Type": JSON_TYPE, **request.headers, **self.deadline()}) for request in requests]
        manner = self.manner()
        outcomes = await self.caller.call_all(requests, manner)
        if any(isinstance(outcome, Lost) for outcome in outcomes):
            await self.caller.settle()
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Reply) and outcome.status >= 300:
                self._require_reason(outcome, f"{request.method} {request.target}", request.headers, manner, also)
        return outcomes

    def _require_reason(self, reply: Reply, what: str, headers: Mapping[str, str], manner: Manner, also: tuple[int, ...]) -> None:
        """Fail if nothing in this run explains the refusal."""
        chosen, status = self.chosen, reply.status
        if status in also or status in (429, 503):
            return
        timed = "X-Request-Timeout" in headers or chosen.settings.request_timeout is not None or "figure" in what
        explained = {
            408: manner.sends < 1 or chosen.pauses > 0,
            500: chosen.faults.occurred or self.process.has_overrun(),  # then uvicorn ends what is left
            504: timed,
            507: chosen.faults.occurred or "/sessions" in what or "session" in what,
        }
        if not explained.get(status, False):
            raise Failure("answered", f"{what} of {self.name} got {status}: {reply.body[:300].decode('latin-1')}")

    # Calls without a session

    def rows(self, count: int) -> Any:
        """Rows of values that nobody else has, as [count, WIDTH]."""
        return np.array([[self.draw.randint(1, 1 << 20) for _ in range(WIDTH)] for _ in range(count)], float)

    def tensors(self) -> dict[str, Any]:
        """Query, key and value of a call, as [b, n, WIDTH]."""
        b, q, k = self.draw.randint(1, 3), self.draw.randint(1, 5), self.draw.choice((1, 3, 7, 30))
        if self.chosen.alike:
            q, k = 2, 3
        values = np.stack([self.rows(k) for _ in range(b)])
        return {"query": np.ones((b, q, WIDTH)), "key": np.zeros((b, k, WIDTH)), "value": values}

    def require_mean(self, output: Any, tensors: Mapping[str, Any], what: str) -> None:
        """Fail unless every row of the output is the mean of the values."""
        expected = np.broadcast_to(tensors["value"].mean(-2, keepdims=True), tensors["query"].shape)
        require_equal(np.asarray(output), expected, f"{what} of {self.name}")

    def some_call(self) -> tuple[bytes, Any]:
        """A call in JSON, and the output that it must have: that of the mean of the values, or of what the call has in its place."""
        tensors, draw = self.tensors(), self.draw
        members: dict[str, Any] = {name: array.tolist() for name, array in tensors.items()}
        members |= {"layer": "plain", "outputs": ["output"], "reproducible": draw.random() < 0.2}
        expected = np.broadcast_to(tensors["value"].mean(-2, keepdims=True), tensors["query"].shape)
        (b, q, _), k = tensors["query"].shape, tensors["key"].shape[1]
        replaced = draw.choice((None, None, None, "pattern", "head_outputs", "head_scale", "valid_lens"))
        if replaced == "pattern":  # each query sees one key alone
            seen = [draw.randrange(k) for _ in range(q)]
            members["pattern"], expected = np.eye(k)[seen].tolist(), tensors["value"][:, seen]
        elif replaced == "head_outputs":
            outputs = np.stack([np.stack([self.rows(q)[:, : WIDTH // HEADS] for _ in range(HEADS)]) for _ in range(b)])
            members["head_outputs"], expected = outputs.tolist(), outputs.transpose(0, 2, 1, 3).reshape(b, q, WIDTH)
        elif replaced == "head_scale":
            factors = [draw.choice((0, 1, 2)) for _ in range(HEADS)]
            members["head_scale"], expected = factors, expected * np.repeat(factors, WIDTH // HEADS)
        elif replaced == "valid_lens":
            lengths = [draw.randint(1, k) for _ in range(b)]
            means = np.stack([values[:length].mean(0) for values, length in zip(tensors["value"], lengths, strict=True)])
            members["valid_lens"], expected = lengths, np.broadcast_to(means[:, None], expected.shape)
        return json.dumps(members).encode(), expected

    def require_output(self, reply: Outcome, expected: Any) -> None:
        """Fail if the reply of a call has another output."""
        if isinstance(reply, Reply) and reply.status == 200:
            require_equal(np.array(json.loads(reply.body)["output"]), expected, f"attend of {self.name}")

    async def attend_in_json(self) -> None:
        body, expected = self.some_call()
        self.require_output(await self.ask("POST", "/attend", body), expected)

    async def several_at_once(self) -> None:
        """Calls that the client sends at once on one connection, without waiting for the replies, which come in the order of the calls."""
        calls = [self.some_call() for _ in range(self.draw.choice((2, 3, 8)))]
        replies = await self.ask_all([Request("POST", "/attend", body) for body, _ in calls])
        for reply, (_, expected) in zip(replies, calls, strict=True):
            self.require_output(reply, expected)

    async def plan(self) -> None:
        """The plan of a call, which has the shape of its output."""
        body, expected = self.some_call()
        reply = await self.ask("POST", "/attend/plan", body)
        if isinstance(reply, Reply) and reply.status == 200:
            shape = json.loads(reply.body)["outputs"]["output"]["shape"]
            if shape == list(expected.shape):
                return
            raise Failure("the answer belongs to the request", f"the plan of an output {expected.shape} is {reply.body[:300]!r}")

    async def words(self) -> None:
        text = " ".join(self.draw.choice(("the", "cat", "sat", "on", "a", "mat")) for _ in range(self.draw.randint(1, 8)))
        reply = await self.ask("POST", "/words", json.dumps({"text": text, "layer": "plain"}).encode())
        if isinstance(reply, Reply) and reply.status == 200 and "".join(json.loads(reply.body)["tokens"]).lower() != text.replace(" ", ""):
            raise Failure("the answer belongs to the request", f"the words of {text} are {reply.body[:300]!r}")

    async def attend_in_safetensors(self) -> None:
        tensors = self.tensors()
        body = safetensors({name: array.astype(np.float32) for name, array in tensors.items()}, request=json.dumps({"layer": "plain"}))
        reply = await self.ask("POST", "/attend", body, {"Content-Type": SAFETENSORS_TYPE, "Accept": SAFETENSORS_TYPE})
        if isinstance(reply, Reply) and reply.status == 200:
            arrays, _ = read_safetensors(reply.body)
            self.require_mean(arrays["output"], tensors, "attend in safetensors")
            q, k = tensors["query"].shape[1], tensors["key"].shape[1]
            require_equal(arrays["attention_weights"], np.full((len(tensors["query"]), 2, q, k), 1 / k), "weights")

    async def infer(self) -> None:
        """The Open Inference Protocol, with numbers in the JSON or after it."""
        tensors, binary = self.tensors(), self.draw.random() < 0.5
        inputs, tail = [], b""
        for name, array in tensors.items():
            entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": "FP32"}
            if binary:
                data = array.astype(np.float32).tobytes()
                entry["parameters"] = {"binary_data_size": len(data)}
                tail += data
            else:
                entry["data"] = array.ravel().tolist()
            inputs.append(entry)
        identity = f"{self.name} {self.draw.random()}"
        head = json.dumps({"id": identity, "inputs": inputs, "outputs": [{"name": "output"}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"} if binary else {}
        reply = await self.ask("POST", "/v2/models/plain/infer", head + tail, headers)
        if isinstance(reply, Reply) and reply.status == 200:
            document = json.loads(reply.body)
            if document["id"] != identity:
                raise Failure("the answer belongs to the request", f"{identity} got the answer of {document['id']}")
            (output,) = document["outputs"]
            self.require_mean(np.reshape(output["data"], output["shape"]), tensors, "infer")

    async def analyse(self) -> None:
        tensors = self.tensors()
        members = {name: array.tolist() for name, array in tensors.items()} | {"layer": "plain", "metrics": ["normalised_entropy"]}
        reply = await self.ask("POST", "/attend/analysis", json.dumps(members).encode())
        if isinstance(reply, Reply) and reply.status == 200 and tensors["key"].shape[1] > 1:
            entropies = np.array(json.loads(reply.body)["metrics"]["normalised_entropy"])
            require_equal(entropies, np.ones_like(entropies), f"analysis of {self.name}")

    async def picture(self) -> None:
        members = {name: array.tolist() for name, array in self.tensors().items()} | {"layer": "plain", "figure": {"format": "png"}}
        reply = await self.ask("POST", "/attend/figure", json.dumps(members).encode())
        if isinstance(reply, Reply) and reply.status == 200 and not reply.body.startswith(b"picture of "):
            raise Failure("the answer belongs to the request", f"a picture is {reply.body[:80]!r}")

    async def wrong_request(self) -> None:
        """Requests that are refused, each with its status."""
        wrong: list[tuple[str, str, bytes, dict[str, str], int]] = [
            ("POST", "/attend", b'{"query": [[1, 2', {}, 400),
            ("POST", "/attend", b'{"layer": "plain", "query": [[1, 2]]}', {}, 422),
            ("POST", "/attend", b'{"layer": "absent", "query": [[1, 2]]}', {}, 404),
            ("POST", "/attend", b"abc", {"Content-Encoding": "gzip"}, 400),
            ("GET", "/absent", b"", {}, 404),
            ("DELETE", "/attend", b"", {}, 405),
            ("POST", "/attend", b"{}", {"Content-Type": "text/plain"}, 415),
            ("POST", "/absent", bytes(1000), {}, 404),  # which is answered before its body has arrived
            ("PATCH", "/attend", bytes(300), {}, 405),
        ]
        method, target, body, headers, status = self.draw.choice(wrong)
        reply = await self.ask(method, target, body, headers, also=(status,))
        if isinstance(reply, Reply) and reply.status < 300:
            raise Failure("rule 1: validate first", f"{method} {target} with {body!r} got {reply.status} instead of {status}")

    async def read_something(self) -> None:
        targets = ("/", "/words", "/v2/models/stats", "/v2/models/plain/versions/1/stats", "/v2/models/plain/config")
        targets += ("/layers", "/layers/plain", "/health/live", "/health/ready", "/health/startup", "/v2", "/v2/models/plain", "/metrics")
        target = self.draw.choice(targets)
        several = target.endswith("stats") and self.chosen.settings.workers > 1  # there are no statistics
        reply = await self.ask("GET", target, also=(403,) if target == "/metrics" else (409,) if several else ())
        if isinstance(reply, Reply) and target == "/layers/plain" and reply.status == 200 and json.loads(reply.body)["name"] != "plain":
            raise Failure("the answer belongs to the request", f"the description of the layer plain is {reply.body[:200]!r}")


def require_equal(array: Any, expected: Any, what: str) -> None:
    """Fail unless the arrays are equal up to rounding."""
    if array.shape != expected.shape or not np.allclose(array, expected, rtol=1e-5, atol=1e-6):
        raise Failure(ANSWERED, f"{what}: expected {np.ravel(expected)[:8]}, got {np.ravel(array)[:8]} of shape {array.shape}")


def draw_clients(
    process: Any, secrets: Mapping[str, str], only: frozenset[int] | None = None, make_caller: type[Caller] = Caller
) -> list[Client]:
    """The clients of a run. `secrets`: the keys by the names of their owners; `only`: the numbers of the clients to keep."""
    chosen: Configuration = process.chosen
    world: World = process.world
    draw: Random = world.random("clients")
    clients = []
    for number in range(chosen.clients):
        owner = draw.choice(list(secrets)) if chosen.settings.keys_file is not None else ""
        if only is None or number in only:
            clients.append(Client(process, number, secrets.get(owner), owner, make_caller))
    return clients
