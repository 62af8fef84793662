"""What clients do over gRPC, and with sequences of the Open Inference Protocol."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from attend.web.grpc import messages
from simulation.caller import Lost, Reply
from simulation.configuration import WIDTH
from simulation.rpc import CANCELLED, DIED, REFUSED, Ended, call_grpc
from simulation.world import Failure

SERVICE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"
ANY_TIME = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", CANCELLED, REFUSED, DIED)  # codes that any call may end with
PLAIN = ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex")


class RpcActions:
    """The part of a client that uses gRPC and sequences."""

    def begin_rpc(self: Any) -> None:
        self.calls = self.sequences = 0

    def rpc_actions(self: Any) -> list[tuple[Callable[[], Awaitable[None]], int]]:
        actions = [(self.sequence, 2)] if self.chosen.settings.session_memory else []
        if self.chosen.settings.grpc_port is not None:
            actions += [(self.infer_over_grpc, 3), (self.stream, 3), (self.ask_over_grpc, 2), (self.watch_health, 1)]
        return actions

    async def grpc(self: Any, method: str, sent: Sequence[bytes], also: tuple[str, ...] = ()) -> Ended:
        """Make a call. `also`: the codes that this one may end with besides OK and those of any call."""
        self.calls += 1
        manner, life = self.manner(), self.process.lives
        seconds = self.draw.choice((0.0001, 0.01, 1.0)) if self.draw.random() < 0.15 else None
        metadata = {"address": self.caller.address}
        if self.caller.secret is not None:
            metadata["authorization"] = f"Bearer {self.caller.secret}"
        whole, slow, leaves_after = manner.sends >= 1, manner.reads_late, manner.leaves_after
        if not whole and leaves_after is None and "Stream" in method:  # an idle stream stays open
            leaves_after = 30.0
        server, name = self.process.grpc, f"{self.name} {self.calls}"
        ended = await call_grpc(server, name, method, sent, metadata, seconds, leaves_after, whole, slow)
        if life != self.process.lives or self.process.killed:
            ended = ended._replace(code=DIED)
        self.world.note(self.name, method, manner, "->", ended.code, len(ended.replies))
        settings = self.chosen.settings
        explained = {
            "DEADLINE_EXCEEDED": seconds is not None or settings.request_timeout is not None or not whole or self.chosen.pauses > 0,
            "INTERNAL": self.chosen.faults.occurred,
            "CANCELLED": self.process.has_overrun(),
            "INVALID_ARGUMENT": not whole,
        }
        if ended.code not in ("OK", *ANY_TIME, *also) and not explained.get(ended.code, False):
            raise Failure("answered", f"{method} of {self.name} ended with {ended.code}: {ended.detail}")
        return ended

    def _infer_request(self: Any, tensors: Any, identity: str, **more: Any) -> bytes:
        inputs = [{"name": name, "shape": list(array.shape), "datatype": "FP32"} for name, array in tensors.items()]
        raw = [array.astype(np.float32).tobytes() for array in tensors.values()]
        outputs = [{"name": "output"}]
        request = messages.ModelInferRequest(
            model_name="plain", id=identity, inputs=inputs, outputs=outputs, raw_input_contents=raw, **more
        )
        return bytes(request.SerializeToString())

    def _require_response(self: Any, response: Any, tensors: Any, identity: str) -> None:
        if response.id != identity:
            raise Failure("the answer belongs to the request", f"{identity} got the answer of {response.id}")
        output = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(list(response.outputs[0].shape))
        self.require_mean(output, tensors, f"gRPC of {self.name}")

    async def infer_over_grpc(self: Any) -> None:
        tensors, identity = self.tensors(), f"{self.name} {self.draw.random()}"
        ended = await self.grpc(SERVICE + "ModelInfer", [self._infer_request(tensors, identity)])
        if ended.code == "OK":
            (reply,) = ended.replies
            self._require_response(messages.ModelInferResponse.FromString(reply), tensors, identity)

    async def stream(self: Any) -> None:
        """Several requests in one stream: their replies come in their order, also those of requests that fail."""
        several = [(self.tensors(), f"{self.name} {self.draw.random()}") for _ in range(self.draw.choice((1, 3, 20)))]
        ended = await self.grpc(SERVICE + "ModelStreamInfer", [self._infer_request(*one) for one in several])
        few = ended.code == "OK" and len(ended.replies) < len(several) and self.process.stopping_at is None
        if few or len(ended.replies) > len(several):
            raise Failure("answered exactly once", f"{len(several)} requests of a stream of {self.name} got {len(ended.replies)} replies")
        for (tensors, identity), written in zip(several, ended.replies, strict=False):
            reply = messages.ModelStreamInferResponse.FromString(written)
            if reply.error_message:
                if reply.infer_response.id not in ("", identity):
                    raise Failure("the answer belongs to the request", f"{identity} got the refusal of {reply.infer_response.id}")
            else:
                self._require_response(reply.infer_response, tensors, identity)

    async def ask_over_grpc(self: Any) -> None:
        method = self.draw.choice(PLAIN)
        request = getattr(messages, f"{method}Request")
        named = "name" in request.DESCRIPTOR.fields_by_name
        ended = await self.grpc(SERVICE + method, [request(**({"name": "plain"} if named else {})).SerializeToString()])
        if ended.code == "OK" and method == "ModelMetadata" and messages.ModelMetadataResponse.FromString(ended.replies[0]).name != "plain":
            raise Failure("the answer belongs to the request", f"the metadata of the layer plain are {ended.replies[0]!r}")

    async def watch_health(self: Any) -> None:
        """Watch the health for some time, or ask once."""
        method = self.draw.choice(("Watch", "Check"))
        ended = await self.grpc(HEALTH + method, [b""]) if method == "Check" else await self._watch()
        if ended.code == "OK" and not ended.replies:
            raise Failure("answered", f"{method} of {self.name} ended without a reply")

    async def _watch(self: Any) -> Ended:
        name, address, seconds = f"{self.name} watch", {"address": self.caller.address}, self.draw.choice((0.1, 3.0))
        return await call_grpc(self.process.grpc, name, HEALTH + "Watch", [b""], address, leaves_after=seconds)

    # Sequences

    async def sequence(self: Any) -> None:
        """A sequence from its start to its end: each part sees the rows of all before. After a refusal it is begun anew, once. Parts may
        come over HTTP and gRPC in turn."""
        self.sequences += 1
        number, rows = self.number * 1000 + self.sequences, np.empty((0, WIDTH))
        parts = self.draw.randint(1, 4)
        for i in range(parts):
            new = self.rows(self.draw.choice((1, 2)))
            output = await self._part(number, new, start=i == 0, end=i == parts - 1)
            if output is None:
                await self._part(number, new, start=True, end=True)  # it may have begun
                return
            rows = np.concatenate((rows, new))
            expected = [rows.mean(0)] * len(new)
            if not np.allclose(output.reshape(-1, WIDTH), expected, rtol=1e-4):
                raise Failure("sessions equal a list of rows", f"sequence {number} of {self.name} got {output}, expected {expected}")

    async def _part(self: Any, number: int, rows: Any, start: bool, end: bool) -> Any:
        """The output of a part of a sequence; None if it is refused or lost."""
        zeros = np.zeros_like(rows)
        tensors = {name: array[None] for name, array in {"query": zeros, "key": zeros, "value": rows}.items()}
        if self.chosen.settings.grpc_port is not None and self.draw.random() < 0.5:
            flags = {"sequence_start": start, "sequence_end": end}
            parameters = {"sequence_id": {"int64_param": number}, **{name: {"bool_param": flag} for name, flag in flags.items()}}
            request = self._infer_request(tensors, f"part of {number}", parameters=parameters)
            ended = await self.grpc(SERVICE + "ModelInfer", [request], ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"))
            if ended.code != "OK":
                return None
            return np.frombuffer(messages.ModelInferResponse.FromString(ended.replies[0]).raw_output_contents[0], np.float32)
        inputs = [
            {"name": name, "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}
            for name, array in tensors.items()
        ]
        sequence = {"sequence_id": number, "sequence_start": start, "sequence_end": end}
        body = json.dumps({"inputs": inputs, "outputs": [{"name": "output"}], "parameters": sequence}).encode()
        reply: Reply | Lost = await self.ask("POST", "/v2/models/plain/infer", body, also=(400, 404, 410, 507))
        if not isinstance(reply, Reply) or reply.status != 200:
            return None
        return np.array(json.loads(reply.body)["outputs"][0]["data"])
