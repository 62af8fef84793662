"""Every call that a client can make: how it is asked, how its answer is read, and whether it may be sent twice. Pure functions, so that
`Client` and `AsyncClient` share one description of each; who sends, and when, is not their business.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote, urlencode

import httpx
import numpy as np

from service.client.failures import refusal
from service.client.result import AnalysisResult, AttendResult, read_metrics, read_result
from service.errors import BadReply, InvalidRequest, MalformedBody, RequestError
from service.spec import LayerSpec
from service.wire.client_codec import decode_document, encode_request, encode_tensors
from service.wire.negotiation import JSON, SAFETENSORS
from service.wire.problems import validate
from service.wire.schemas.analysis import AnalysisRequest
from service.wire.schemas.attend import AttendRequest, Document, LayerDocument, Layers, Plan, PutLayer
from service.wire.schemas.figure import FigureRequest

Model = TypeVar("Model", bound=Document)
T = TypeVar("T")
Repeat = Literal["always", "unbegun", "never"]


def as_it_came(response: httpx.Response) -> Any:
    """The reader of a call whose caller reads the response."""
    return response


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One HTTP request, as yet unsent, and the reader of its answer.

    `repeat` says when it may be sent again after a failure: a computation changes nothing, so always; a change only where it is sure that
    the first one was not begun. `plain` makes the same call in JSON, for a server or a proxy that takes nothing else.
    """

    method: str
    path: str
    body: bytes | None = None
    read: Callable[[httpx.Response], T] = as_it_came
    media_type: str = JSON
    accept: str = "*/*"
    repeat: Repeat = "always"
    plain: "Callable[[], Call[T]] | None" = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Accept": self.accept} if self.body is None else {"Accept": self.accept, "Content-Type": self.media_type}

    def in_json(self) -> "Call[T]":
        """The call for whoever takes nothing else; itself where it is so already."""
        return self if self.plain is None else self.plain()


def attend(fields: Mapping[str, Any]) -> Call[AttendResult]:
    """POST /attend, in safetensors: no form is faster at either end. A reply whose form is asked for, or its decimals, comes in JSON.

    What is given twice goes once: the same object as query and key, or as key and value.
    """
    fields = _once(fields)
    reply = dict(fields.get("reply") or {})
    in_text = reply.get("form") is not None or reply.get("decimals") is not None

    def plain() -> Call[AttendResult]:
        form = "base64" if reply.get("decimals") is None else "flat"  # both keep datatypes
        document = encode_request({**fields, "reply": {"form": form, **reply}}, AttendRequest.tensors)
        return Call("POST", "/attend", document, read_attend, accept=JSON)

    if in_text:
        return plain()
    body = encode_tensors(fields, AttendRequest.tensors)
    return Call("POST", "/attend", body, read_attend, SAFETENSORS, f"{SAFETENSORS}, {JSON};q=0.5", plain=plain)


def _once(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    query, key, value = (fields.get(name) for name in ("query", "key", "value"))
    if value is key:
        fields = {**fields, "value": None}
        if key is query:
            fields = {**fields, "key": None}
    return fields


def analysis(fields: Mapping[str, Any]) -> Call[AnalysisResult]:
    """POST /attend/analysis, with tensors in safetensors; the reply is JSON, in forms that keep datatypes unless others are asked for."""
    fields = _exact(fields)

    def plain() -> Call[AnalysisResult]:
        return Call("POST", "/attend/analysis", encode_request(fields, AnalysisRequest.tensors), read_analysis, accept=JSON)

    body = encode_tensors(_once(fields), AnalysisRequest.tensors)
    return Call("POST", "/attend/analysis", body, read_analysis, SAFETENSORS, JSON, plain=plain)


def plan(fields: Mapping[str, Any]) -> Call[Plan]:
    """POST /attend/plan. Of the large tensors only the shape is sent, since nothing is computed; `metrics` make it an analysis."""
    shapes = {
        name: {"shape": list(np.shape(fields[name]))}
        for name in ("query", "key", "value", "bias", "direction")
        if fields.get(name) is not None and not isinstance(fields[name], Mapping)
    }
    return Call("POST", "/attend/plan", encode_request({**fields, **shapes}, AnalysisRequest.tensors), read_plan)


def figure(fields: Mapping[str, Any], figure: Mapping[str, Any]) -> Call[bytes]:
    """POST /attend/figure."""
    body = encode_tensors({**_once(fields), "figure": figure}, FigureRequest.tensors)

    def plain() -> Call[bytes]:
        return Call("POST", "/attend/figure", encode_request({**fields, "figure": figure}, FigureRequest.tensors), _bytes)

    return Call("POST", "/attend/figure", body, _bytes, SAFETENSORS, plain=plain)


def layers() -> Call[list[LayerDocument]]:
    """GET /layers."""
    return Call("GET", "/layers", None, read_layers)


def layer(name: str) -> Call[LayerDocument]:
    """GET /layers/{name}."""
    return Call("GET", layer_path(name), None, read_layer)


def put_layer(name: str, spec: LayerSpec | Mapping[str, Any], weights: Mapping[str, Any] | None) -> Call[LayerDocument]:
    """PUT /layers/{name}."""
    document = spec.model_dump(mode="json") if isinstance(spec, LayerSpec) else spec
    body = encode_request({"spec": document, "weights": weights}, PutLayer.tensors)
    return Call("PUT", layer_path(name), body, read_layer, repeat="unbegun")


def delete_layer(name: str) -> Call[None]:
    """DELETE /layers/{name}."""
    return Call("DELETE", layer_path(name), None, lambda _: None, repeat="unbegun")


def ready() -> Call[httpx.Response]:
    """GET /health/ready, asked once: whoever wants to know now does not want to wait."""
    return Call("GET", "/health/ready", repeat="never")


def put_layer_file(name: str, body: bytes, layout: str | None, prefix: str | None, spec: Mapping[str, Any] | None) -> Call[LayerDocument]:
    """PUT /layers/{name} with safetensors."""
    given = {"layout": layout, "prefix": prefix, "spec": None if spec is None else json.dumps(dict(spec))}
    query = urlencode({key: value for key, value in given.items() if value is not None})
    return Call("PUT", layer_path(name) + (f"?{query}" if query else ""), body, read_layer, SAFETENSORS, repeat="unbegun")


def layer_file(name: str) -> Call[bytes]:
    """GET /layers/{name}/weights."""
    return Call("GET", f"{layer_path(name)}/weights", None, _bytes)


def layer_path(name: str) -> str:
    """/layers/{name}, whatever the name is made of."""
    return f"/layers/{quote(name, safe='')}"


def checked(response: httpx.Response) -> httpx.Response:
    """The response if it is a success. Raises the refusal it holds otherwise."""
    if not response.is_success:
        raise refusal(response)
    return response


def read_attend(response: httpx.Response) -> AttendResult:
    """What POST /attend answered. Raises BadReply where it is not that."""
    try:
        return read_result(response.content, response.headers)
    except (RequestError, KeyError, TypeError) as error:
        raise BadReply(f"the reply to POST /attend cannot be read: {error}") from None


def read_ready(response: httpx.Response) -> bool:
    """What GET /health/ready answered. Raises the refusal where it is neither yes nor no."""
    if response.status_code not in (200, 503):
        raise refusal(response)
    return response.status_code == 200


def read_analysis(response: httpx.Response) -> AnalysisResult:
    """What POST /attend/analysis answered. Raises BadReply where it is not that."""
    try:
        return read_metrics(response.content)
    except (MalformedBody, KeyError, TypeError) as error:
        raise BadReply(f"the reply to POST /attend/analysis cannot be read: {error}") from None


def read_plan(response: httpx.Response) -> Plan:
    """What POST /attend/plan answered."""
    return _read(Plan, response)


def read_layer(response: httpx.Response) -> LayerDocument:
    """What GET or PUT of a layer answered."""
    return _read(LayerDocument, response)


def read_layers(response: httpx.Response) -> list[LayerDocument]:
    """What GET /layers answered."""
    return _read(Layers, response).layers


def _bytes(response: httpx.Response) -> bytes:
    return response.content


def _exact(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, asking for forms that keep dtypes where they do not ask for one."""
    reply = dict(fields.get("reply") or {})
    reply.setdefault("form", "base64" if reply.get("decimals") is None else "flat")
    return {**fields, "reply": reply}


def _read(model: type[Model], response: httpx.Response) -> Model:
    try:
        return validate(model, decode_document(response.content))
    except (MalformedBody, InvalidRequest) as error:
        raise BadReply(f"the reply from {response.url.path} is not as this client knows it; is it older than the server? {error}") from None
