"""Turns responses into results or exceptions.

A refusal is a problem document; its title selects a class of `attend.errors`. For a response without such a document (the page of a proxy),
the status selects the class.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy as np

from attend.client.notebook import heat_maps, metric_tables, metric_text, word_table
from attend.errors import (
    AttendError,
    BadReply,
    CapacityError,
    InvalidRequest,
    LengthMismatch,
    MalformedBody,
    Overloaded,
    Problem,
    RequestError,
    ServiceFault,
    did_you_mean,
)
from attend.tensors import Array
from attend.wire.client_codec import decode_binary_reply, decode_document, decode_json_reply, decode_tensor
from attend.wire.negotiation import SAFETENSORS
from attend.wire.problems import validate
from attend.wire.schemas.schema import LayerReference, ProblemDocument, Schema
from attend.wire.schemas.words import Words

Model = TypeVar("Model", bound=Schema)
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

    An output is an array; `attention_weights` with `top_k` are `TopWeights`; weights and scores with `query_lengths` are a list of arrays.
    `timing` maps decode, queue, compute, encode to milliseconds. `select` and `tokens` are those of the request. A notebook shows a heat
    map of the weights of each head. `session_length`: rows of the session after the call.
    """

    tensors: dict[str, Any]
    layer: LayerReference
    fully_masked_rows: int
    request_id: str = ""
    timing: dict[str, float] = field(default_factory=dict)
    select: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    session_length: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.tensors:
            raise AttributeError(self._missing(name))
        return self.tensors[name]

    def __getitem__(self, name: str) -> Any:
        if name not in self.tensors:
            raise KeyError(self._missing(name))
        return self.tensors[name]

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self.tensors})

    def _missing(self, name: str) -> str:
        return f"no {name!r} among the outputs {', '.join(self.tensors)}{did_you_mean(name, self.tensors)}; request it in outputs=[…]"

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {_shape(tensor)}" for name, tensor in self.tensors.items())
        return f"AttendResult({shapes}; layer {self.layer.name!r})"

    def _repr_html_(self) -> str | None:
        """Heat maps for a notebook; None, for which it shows `repr`, without attention weights, or with negative ones."""
        weights = self.tensors.get("attention_weights")
        if not isinstance(weights, np.ndarray) or (weights < 0).any():
            return None
        return heat_maps(weights, self.select, self.tokens, repr(self))


@dataclass(frozen=True, slots=True)
class AnalysisResult(Mapping[str, Any]):
    """The requested metrics, as `result["entropy"]`: an array, or a dictionary of arrays; those named `…_words` are lists.

    `print` shows the numbers. A notebook shows a table of the metrics that are one number for each head, and the strongest links.
    """

    metrics: dict[str, Any]
    layer: LayerReference
    fully_masked_rows: int

    def __getitem__(self, name: str) -> Any:
        if name not in self.metrics:
            raise KeyError(f"no {name!r} among the metrics {', '.join(self.metrics)}{did_you_mean(name, self.metrics)}")
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def __repr__(self) -> str:
        return f"AnalysisResult({', '.join(self.metrics)}; layer {self.layer.name!r})"

    def __str__(self) -> str:
        return metric_text(self.metrics, f"layer {self.layer.name!r}")

    def _repr_html_(self) -> str | None:
        return metric_tables(self.metrics, f"layer {self.layer.name!r}")


class Picture(bytes):
    """The bytes of a PNG, an SVG or an HTML page, which `print` does not show. A notebook shows the picture."""

    def __repr__(self) -> str:
        kind = "PNG" if self.startswith(b"\x89PNG") else "SVG" if self.startswith(b"<?xml") else "HTML"
        return f"Picture({kind}, {len(self)} bytes)"

    __str__ = __repr__  # that of bytes is as long as the picture

    def _repr_png_(self) -> bytes | None:
        return bytes(self) if self.startswith(b"\x89PNG") else None

    def _repr_svg_(self) -> str | None:
        return self.decode() if self.startswith(b"<?xml") else None

    def _repr_html_(self) -> str | None:
        """The page in a frame, whose scripts cannot reach the notebook."""
        if not self.startswith(b"<!DOCTYPE"):
            return None
        return f'<iframe sandbox="allow-scripts" width="100%" height="640" style="border:0" srcdoc="{escape(self.decode())}"></iframe>'


@dataclass(frozen=True, slots=True)
class WordsResult:
    """The tokens of a text, and a vector for each, [tokens, width]. `meaningful`: whether `layer` was trained on such vectors.

    `options`: fields of a request, as in the model's own calls; `heads`: what each head has learned, where that is known.
    """

    tokens: list[str]
    vectors: Array
    layer: LayerReference
    meaningful: bool
    note: str
    options: dict[str, Any]
    heads: list[str]

    @property
    def request(self) -> dict[str, Any]:
        """Arguments of `attend`, `analysis`, `figure` and `plan` for self-attention of the text: layer, query, tokens and options."""
        return {"layer": self.layer.name, "query": self.vectors, "tokens": {"query": self.tokens}, **self.options}

    def __repr__(self) -> str:
        return f"WordsResult({' '.join(self.tokens)!r}; vectors {list(self.vectors.shape)} for layer {self.layer.name!r})"

    def _repr_html_(self) -> str:
        return word_table(self.tokens, self.vectors, f"layer {self.layer.name!r}; {self.note}")


def _of_parts(parts: dict[str, Array]) -> TopWeights | list[Array]:
    """The largest weights, or an array for each of several sequences in one query."""
    return TopWeights(**parts) if "keys" in parts else [parts[str(i)] for i in range(len(parts))]


def _shape(tensor: Array | TopWeights | list[Array]) -> str:
    if isinstance(tensor, list):
        return "of " + " and ".join(map(_shape, tensor)) if len(tensor) < 4 else f"of {len(tensor)} sequences"
    return str(list((tensor.values if isinstance(tensor, TopWeights) else tensor).shape))


def read_attend(response: httpx.Response, select: Any = None, tokens: Any = None) -> AttendResult:
    """Decodes a reply to POST /attend, by its Content-Type. `select` and `tokens` are the request's. Raises BadReply."""
    headers = response.headers
    try:
        binary = headers.get("content-type", "").startswith(SAFETENSORS)
        metadata, content = decode_binary_reply(response.content) if binary else decode_json_reply(response.content)
        tensors = {name: _of_parts(tensor) if isinstance(tensor, dict) else tensor for name, tensor in content.items()}
        timing = {phase: float(duration) for phase, duration in _PHASE.findall(headers.get("server-timing", ""))}
        length = None if metadata.session is None else metadata.session.length
        return AttendResult(
            tensors, metadata.layer, metadata.fully_masked_rows, headers.get("x-request-id", ""), timing, select or {}, tokens or {}, length
        )
    except (RequestError, KeyError, TypeError) as error:
        raise BadReply(f"the reply to POST /attend cannot be read: {error}") from None


def read_analysis(response: httpx.Response) -> AnalysisResult:
    """Decodes a reply to POST /attend/analysis. Raises BadReply if it cannot be read."""
    try:
        metadata, content = decode_json_reply(response.content)
        return AnalysisResult(content["metrics"], metadata.layer, metadata.fully_masked_rows)
    except (RequestError, KeyError, TypeError) as error:
        raise BadReply(f"the reply to POST /attend/analysis cannot be read: {error}") from None


def read_words(response: httpx.Response) -> WordsResult:
    """Decodes a reply to POST /words. Raises BadReply if it cannot be read."""
    words = read_document(Words, response)
    try:
        vectors = decode_tensor(words.vectors.model_dump(), "/vectors")
    except MalformedBody as error:
        raise BadReply(f"the reply to POST /words cannot be read: {error}") from None
    return WordsResult(words.tokens, vectors, words.layer, words.meaningful, words.note, words.options, words.heads)


def read_document(model: type[Model], response: httpx.Response) -> Model:
    """Validates a JSON response as `model`. Raises BadReply if it does not fit."""
    try:
        return validate(model, decode_document(response.content))
    except (MalformedBody, InvalidRequest) as error:
        message = f"the reply from {response.url.path} does not fit this client; is the client older than the server? {error}"
        raise BadReply(message) from None


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
        error: AttendError = _class_of(response.status_code)(f"HTTP {response.status_code} {response.reason_phrase}: {text}")
    else:
        error_class = CLASSES.get(document.title) or _class_of(document.status)
        problems = [Problem(item.at, item.expected, item.got) for item in document.errors]
        if error_class is Overloaded:
            wait = response.headers.get("retry-after", "")
            error = Overloaded(int(wait) if wait.isdigit() else 1, document.detail, problems)
        elif error_class is LengthMismatch:
            error = LengthMismatch(document.detail, problems, document.length)
        else:
            error = error_class(document.detail, problems)
    error.add_note(f"HTTP {response.status_code}, request id {response.headers.get('x-request-id', 'unknown')}")
    return error


def _tree(root: type[AttendError]) -> Iterator[type[AttendError]]:
    yield root
    for error_class in root.__subclasses__():
        yield from _tree(error_class)


CLASSES = {error_class.title: error_class for error_class in _tree(AttendError)}


def _class_of(status: int) -> type[AttendError]:
    if status in TRANSIENT:
        return CapacityError
    if 400 <= status < 500:
        return RequestError
    return ServiceFault if status >= 500 else BadReply
