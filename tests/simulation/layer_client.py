"""What clients do with layers, against a model: a name is in the state in which the last acknowledged change left it.

A state is the fingerprint of the layer, ABSENT, or UNLOADED before the fingerprint. It holds after a crash too. A change that was not
acknowledged is made or not: then the model has both states, until a reply tells them apart.
"""

import json
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import torch

from attend.limits import ServingLimits
from attend.serving.layers.registry import LayerRegistry
from attend.serving.layers.store import UNANNOUNCED
from attend.spec import LayerSpec
from simulation.caller import Caller, Lost, Reply
from simulation.configuration import HEADS, WIDTH
from simulation.world import Failure

ABSENT, UNLOADED = "", "unloaded "
MODEL = "layers are as the last acknowledged change left them"
SEEDS = range(4)
UNCHANGED = (b"nothing has changed", b"the layers are as they were")  # in a refusal
Outcome = Reply | Lost


@cache
def fingerprint_of(seed: int) -> str:
    """The fingerprint of the layer that clients put with that seed."""
    spec = LayerSpec(**_fields(seed))
    return LayerRegistry(torch.device("cpu"), ServingLimits()).make("any", spec, None).fingerprint


def _fields(seed: int) -> dict[str, int]:
    return {"d_model": WIDTH, "num_heads": HEADS, "seed": seed}


class LayerActions:
    """The part of a client that changes layers. Each client has names of its own, so that it alone changes them."""

    def begin_layers(self: Any) -> None:
        self.layers: dict[str, set[str]] = {
            f"own-{self.number}-{letter}": {ABSENT} for letter in self.draw.choice(("a", "ab"))
        }  # possible states
        self.life = self.process.lives  # in which they are so
        self.changed: set[str] = set()  # layers that it has tried to change
        self.loose: set[str] = set()  # layers whose last change failed when it may have been in the folder: it may still take effect

    def layer_actions(self: Any) -> list[tuple[Callable[[], Awaitable[None]], int]]:
        changes = [(self.put_layer, 3), (self.copy_layer, 1), (self.delete_layer, 2), (self.unload_layer, 1), (self.load_layer, 1)]
        return [*changes, (self.read_layer, 1), (self.call_layer, 1), (self.read_circuits, 1)]

    def one_layer(self: Any) -> str:
        """The name of a layer. Without a folder they end with their process."""
        if self.chosen.files is None and self.life != self.process.lives:
            self.layers = {name: {ABSENT} for name in self.layers}
        self.life = self.process.lives
        return str(self.draw.choice(list(self.layers)))

    async def put_layer(self: Any, name: str = "") -> None:
        name, seed = name or self.one_layer(), self.draw.choice(SEEDS)
        reply = await self.ask("PUT", f"/layers/{name}", json.dumps({"spec": _fields(seed)}).encode())
        self._after_put(name, reply, {fingerprint_of(seed)})
        await self._read_elsewhere(name, reply)

    async def _read_elsewhere(self: Any, name: str, reply: Outcome) -> None:
        """After a change that was acknowledged, each process has the layer: read it from those that take the client's other connections."""
        if self.chosen.settings.workers > 1 and isinstance(reply, Reply) and reply.status < 300 and self.draw.random() < 0.5:
            for hand in self.hands[1:]:
                await self.read_layer(name, plainly=True, caller=hand)

    def _after_put(self: Any, name: str, reply: Outcome, expected: set[str]) -> None:
        before = self.layers[name]
        self._after_change(name, reply, expected)
        if isinstance(reply, Reply) and reply.status in (200, 201):
            if ABSENT not in before and reply.status == 201:
                raise Failure(MODEL, f"{name} existed, and PUT says that it is new")
            self._require_state(name, reply)
        alone = self.chosen.settings.workers == 1  # others may take the space that a process has reserved
        if isinstance(reply, Reply) and reply.status == 507 and alone and UNANNOUNCED.encode() in reply.body:
            raise Failure("a full disk changes nothing", f"PUT of {name} got {reply.body!r}")

    def _after_change(self: Any, name: str, reply: Outcome, expected: set[str]) -> None:
        """What the layer may be after a change to one of the `expected`."""
        self.changed.add(name)
        if isinstance(reply, Lost):
            self.layers[name] |= expected if reply.begun else set()
            if reply.begun and self.chosen.settings.workers > 1:  # the others may not have seen it yet
                self.loose.add(name)
        elif reply.status == 404 and name in self.loose:
            self.layers[name] |= expected  # the process has not seen that change yet
        elif reply.status in (200, 201, 204, 404):
            self.layers[name] = set(expected)
            self.loose.discard(name)
        elif reply.status in (500, 503, 504, 507) and not any(words in reply.body for words in UNCHANGED):
            self.layers[name] |= expected
            self.loose.add(name)

    async def copy_layer(self: Any) -> None:
        """Read the weights of one layer and put them under the name of another."""
        source, target = self.one_layer(), self.one_layer()
        reply = await self.ask("GET", f"/layers/{source}/weights", also=(404, 409))
        if isinstance(reply, Reply) and reply.status == 200:
            kind = {"Content-Type": "application/vnd.safetensors"}
            copied = await self.ask("PUT", f"/layers/{target}", reply.body, kind)
            self._after_put(target, copied, {state for state in self.layers[source] if state and not state.startswith(UNLOADED)})
            await self._read_elsewhere(target, copied)

    async def delete_layer(self: Any) -> None:
        await self._change_existing("DELETE", "/layers/{}", lambda state: ABSENT)

    async def unload_layer(self: Any) -> None:
        await self._change_existing("POST", "/v2/repository/models/{}/unload", lambda state: UNLOADED + state.removeprefix(UNLOADED))

    async def load_layer(self: Any) -> None:
        await self._change_existing("POST", "/v2/repository/models/{}/load", lambda state: state.removeprefix(UNLOADED))

    async def _change_existing(self: Any, method: str, path: str, become: Callable[[str], str]) -> None:
        """Send a change that a layer must exist for, mostly of one that does; `become` gives the state after it, from the one before."""
        name = self.one_layer()
        if self.layers[name] == {ABSENT} and self.draw.random() < 0.8:
            await self.put_layer(name)
        target, before = path.format(name), self.layers[name]
        reply = await self.ask(method, target, also=(404,))
        missing = isinstance(reply, Reply) and reply.status == 404
        if isinstance(reply, Reply) and (before == {ABSENT} if reply.status < 300 else missing and ABSENT not in before):
            raise Failure(MODEL, f"{method} {target} got {reply.status}, and the layer was {before}")
        may_change_nothing = method == "POST" and name in self.loose  # then it is not a change that all processes have acknowledged
        self._after_change(name, reply, {ABSENT} if missing else {become(state) for state in before - {ABSENT}})
        if may_change_nothing:
            self.loose.add(name)
            self.layers[name] |= before
        else:
            await self._read_elsewhere(name, reply)

    async def read_layer(self: Any, name: str = "", plainly: bool = False, caller: Caller | None = None) -> None:
        name = name or self.one_layer()
        self._require_state(name, await self.ask("GET", f"/layers/{name}", also=(404,), plainly=plainly, caller=caller))

    def _require_state(self: Any, name: str, reply: Outcome) -> None:
        """Fail if the reply tells of a state that the layer cannot have."""
        if not isinstance(reply, Reply) or reply.status not in (200, 201, 404, 409):
            return
        if reply.status == 404:
            told = {ABSENT}
        elif reply.status == 409:
            told = {state for state in self.layers[name] if state.startswith(UNLOADED)}
        else:
            layer = json.loads(reply.body)
            layer = layer.get("layer", layer)
            told = {(UNLOADED if layer.get("state") == "unloaded" else "") + layer["fingerprint"]}
        if not told & self.layers[name]:
            raise Failure(MODEL, f"{name} is {told} by {reply.status}, expected {self.layers[name]}")
        if name not in self.loose:
            self.layers[name] &= told

    async def call_layer(self: Any) -> None:
        """Compute with the layer, and see in the reply which one it was."""
        name = self.one_layer()
        body = json.dumps({"layer": name, "query": self.rows(2).tolist(), "outputs": ["output"]}).encode()
        self._require_state(name, await self.ask("POST", "/attend", body, also=(404, 409)))

    async def read_circuits(self: Any) -> None:
        name = self.one_layer()
        reply = await self.ask("GET", f"/layers/{name}/circuits", also=(404, 409))
        self._require_state(name, reply)
        if isinstance(reply, Reply) and reply.status == 200 and len(json.loads(reply.body)["copying_score"]) != HEADS:
            raise Failure("the answer belongs to the request", f"the circuits of {name} are {reply.body!r}")

    async def require_change(self: Any) -> None:
        """A layer can be changed at once where every process is well."""
        name = self.one_layer()
        body = json.dumps({"spec": _fields(SEEDS[0])}).encode()
        reply = await self.ask("PUT", f"/layers/{name}", body, plainly=True)
        if isinstance(reply, Lost) or reply.status not in (200, 201, 504):  # 504 where the settings have a deadline
            raise Failure("rule 9: a process that has settled serves", f"PUT of {name} got {reply}")
        self.caller.close()

    async def require_layers(self: Any) -> None:
        """Each layer that it has tried to change is as the model has it."""
        self.one_layer()
        for name in filter(self.changed.__contains__, self.layers):
            await self.read_layer(name, plainly=True)
        self.caller.close()
