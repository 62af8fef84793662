"""What a client gets back: the outputs by name as arrays, and what the reply says around them. Knows no HTTP but a few headers' names."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from service.tensors import Array
from service.wire.client_codec import decode_binary_reply, decode_metrics, decode_reply
from service.wire.negotiation import SAFETENSORS
from service.wire.schemas.attend import LayerReference

_PHASE = re.compile(r"([\w-]+);dur=([0-9.]+)")


class TopWeights(NamedTuple):
    """The largest attention weights of each row, largest first, and the keys they belong to."""

    keys: Array
    values: Array


@dataclass(frozen=True, slots=True)
class AttendResult(Mapping[str, Any]):
    """The outputs asked for: `result.output` or `result["output"]`; as a mapping it holds them alone, in the order asked for.

    An output is an array; `attention_weights` under `top_k` are `TopWeights`. `timing` maps decode, queue, compute, encode to milliseconds.
    """

    tensors: dict[str, Any]
    layer: LayerReference
    fully_masked_rows: int
    request_id: str = ""
    timing: dict[str, float] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.tensors:
            raise AttributeError(f"the result holds {', '.join(self.tensors)}, and no {name!r}; ask for it in outputs=[…]")
        return self.tensors[name]

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(getattr(tensor, 'values', tensor).shape)}" for name, tensor in self.tensors.items())
        return f"AttendResult({shapes}; layer {self.layer.name!r})"


@dataclass(frozen=True, slots=True)
class AnalysisResult(Mapping[str, Any]):
    """The metrics asked for: `result["entropy"]`; an array, or a dictionary of parts, of which those named `…_words` are lists."""

    metrics: dict[str, Any]
    layer: LayerReference
    fully_masked_rows: int

    def __getitem__(self, name: str) -> Any:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)


def read_metrics(body: bytes) -> AnalysisResult:
    """The metrics that a reply to POST /attend/analysis holds. Raises MalformedBody where it is none."""
    reply = decode_metrics(body)
    layer = LayerReference(name=reply.layer["name"], fingerprint=reply.layer["fingerprint"])
    return AnalysisResult(reply.metrics or {}, layer, reply.fully_masked_rows)


def read_result(body: bytes, headers: Mapping[str, str]) -> AttendResult:
    """The result that a reply to POST /attend holds, in the form that `headers` name. Raises from RequestError where it is none."""
    binary = headers.get("content-type", "").startswith(SAFETENSORS)
    reply = decode_binary_reply(body) if binary else decode_reply(body)
    tensors = {name: TopWeights(**tensor) if isinstance(tensor, dict) else tensor for name, tensor in reply.tensors.items()}
    timing = {phase: float(duration) for phase, duration in _PHASE.findall(headers.get("server-timing", ""))}
    layer = LayerReference(name=reply.layer["name"], fingerprint=reply.layer["fingerprint"])
    return AttendResult(tensors, layer, reply.fully_masked_rows, headers.get("x-request-id", ""), timing)
