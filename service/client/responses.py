"""Turns responses into results or exceptions.

A refusal is a problem document; its title selects a class of `service/errors.py`. For a response without such a document (a proxy's page),
the status selects the class.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import httpx

from service.errors import (
    AttendError,
    BadReply,
    CapacityError,
    InvalidRequest,
    MalformedBody,
    Overloaded,
    Problem,
    RequestError,
    ServiceFault,
)
from service.tensors import Array
from service.wire.client_codec import decode_binary_reply, decode_document, decode_metrics, decode_reply
from service.wire.negotiation import SAFETENSORS
from service.wire.problems import validate
from service.wire.reply import Reply
from service.wire.schemas.attend import Document, LayerReference, ProblemDocument

Model = TypeVar("Model", bound=Document)
EXCERPT = 200  # characters of a response that is no problem document
TRANSIENT = {429, 503, 504, 507}
_PHASE = re.compile(r"([\w-]+);dur=([0-9.]+)")


class TopWeights(NamedTuple):
    """The largest attention weights of each row, largest first, and their keys."""

    keys: Array
    values: Array


@dataclass(frozen=True, slots=True)
class AttendResult(Mapping[str, Any]):
    """The requested outputs, as `result.output` or `result["output"]`; iterates over their names in the requested order.

    An output is an array; `attention_weights` with `top_k` are `TopWeights`. `timing` maps decode, queue, compute, encode to milliseconds.
    """

    tensors: dict[str, Any]
    layer: LayerReference
    fully_masked_rows: int
    request_id: str = ""
    timing: dict[str, float] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.tensors:
            raise AttributeError(f"no {name!r} among the outputs {', '.join(self.tensors)}; request it in outputs=[…]")
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
    """The requested metrics, as `result["entropy"]`: an array, or a dictionary of arrays; those named `…_words` are lists."""

    metrics: dict[str, Any]
    layer: LayerReference
    fully_masked_rows: int

    def __getitem__(self, name: str) -> Any:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)


def read_attend(response: httpx.Response) -> AttendResult:
    """Decodes a reply to POST /attend, by its Content-Type. Raises BadReply if it cannot be read."""
    headers = response.headers
    try:
        binary = headers.get("content-type", "").startswith(SAFETENSORS)
        reply = decode_binary_reply(response.content) if binary else decode_reply(response.content)
        tensors = {name: TopWeights(**tensor) if isinstance(tensor, dict) else tensor for name, tensor in reply.tensors.items()}
        timing = {phase: float(duration) for phase, duration in _PHASE.findall(headers.get("server-timing", ""))}
        return AttendResult(tensors, _layer(reply), reply.fully_masked_rows, headers.get("x-request-id", ""), timing)
    except (RequestError, KeyError, TypeError) as error:
        raise BadReply(f"the reply to POST /attend cannot be read: {error}") from None


def read_analysis(response: httpx.Response) -> AnalysisResult:
    """Decodes a reply to POST /attend/analysis. Raises BadReply if it cannot be read."""
    try:
        reply = decode_metrics(response.content)
        return AnalysisResult(reply.metrics or {}, _layer(reply), reply.fully_masked_rows)
    except (MalformedBody, KeyError, TypeError) as error:
        raise BadReply(f"the reply to POST /attend/analysis cannot be read: {error}") from None


def _layer(reply: Reply) -> LayerReference:
    return LayerReference(name=reply.layer["name"], fingerprint=reply.layer["fingerprint"])


def read_document(model: type[Model], response: httpx.Response) -> Model:
    """Validates a JSON response as `model`. Raises BadReply if it does not fit."""
    try:
        return validate(model, decode_document(response.content))
    except (MalformedBody, InvalidRequest) as error:
        message = f"the reply from {response.url.path} does not fit this client; is the client older than the server? {error}"
        raise BadReply(message) from None


def read_ready(response: httpx.Response) -> bool:
    """True for status 200 of GET /health/ready, False for 503. Raises for every other status."""
    if response.status_code not in (200, 503):
        raise refusal(response)
    return response.status_code == 200


def raise_for_status(response: httpx.Response) -> httpx.Response:
    """The response if it is a success. Raises its refusal otherwise."""
    if not response.is_success:
        raise refusal(response)
    return response


def refusal(response: httpx.Response) -> AttendError:
    """The exception for a response that is no success; its note has the status and the request id."""
    try:
        document = validate(ProblemDocument, decode_document(response.content))
    except (MalformedBody, InvalidRequest):
        text = " ".join(response.text.split())[:EXCERPT]
        error = _class_of(response.status_code)(f"HTTP {response.status_code} {response.reason_phrase}: {text}")
    else:
        kind = CLASSES.get(document.title) or _class_of(document.status)
        problems = [Problem(item.at, item.expected, item.got) for item in document.errors]
        wait = response.headers.get("retry-after", "")
        overloaded = Overloaded(int(wait) if wait.isdigit() else 1, document.detail, problems) if kind is Overloaded else None
        error = overloaded or kind(document.detail, problems)
    error.add_note(f"HTTP {response.status_code}, request id {response.headers.get('x-request-id', 'unknown')}")
    return error


def _tree(root: type[AttendError]) -> Iterator[type[AttendError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


CLASSES = {kind.title: kind for kind in _tree(AttendError)}


def _class_of(status: int) -> type[AttendError]:
    if status in TRANSIENT:
        return CapacityError
    if 400 <= status < 500:
        return RequestError
    return ServiceFault if status >= 500 else BadReply
