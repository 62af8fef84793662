"""The operations of the API, shared by `Client` and `AsyncClient`: pure functions that make the request and read the response of each."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote, urlencode

import httpx
import numpy as np

from service.checkpoints import ModelFolder
from service.client.responses import AnalysisResult, AttendResult, read_analysis, read_attend, read_document
from service.spec import LayerSpec
from service.wire.client_codec import encode_request, encode_tensors
from service.wire.negotiation import JSON, SAFETENSORS
from service.wire.safetensors import write_tensors
from service.wire.schemas.analysis import AnalysisRequest
from service.wire.schemas.attend import AttendRequest, LayerDocument, Layers, Plan, PutLayer
from service.wire.schemas.figure import FigureRequest

T = TypeVar("T")
Repeat = Literal["always", "unbegun", "never"]


def read_response(response: httpx.Response) -> Any:
    """The response itself."""
    return response


def read_bytes(response: httpx.Response) -> bytes:
    return response.content


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """One HTTP request and the reader of its response.

    `repeat`: after a failure, a computation may "always" be repeated; a change only if the server certainly did not begin it ("unbegun").
    `fallback` returns the same operation with a JSON body, for servers and proxies that refuse safetensors.
    """

    method: str
    path: str
    body: bytes | None = None
    read: Callable[[httpx.Response], T] = read_response
    media_type: str = JSON
    accept: str = "*/*"
    repeat: Repeat = "always"
    fallback: "Callable[[], Operation[T]] | None" = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Accept": self.accept} if self.body is None else {"Accept": self.accept, "Content-Type": self.media_type}

    def as_json(self) -> "Operation[T]":
        """The operation with a JSON body."""
        return self if self.fallback is None else self.fallback()


def attend(fields: Mapping[str, Any]) -> Operation[AttendResult]:
    """POST /attend with safetensors, the fastest format; with JSON if `reply` has a form or decimals, which only JSON replies have.

    An object that is both query and key, or key and value, is sent once.
    """
    fields = _without_repeats(fields)
    reply = dict(fields.get("reply") or {})

    def in_json() -> Operation[AttendResult]:
        form = "base64" if reply.get("decimals") is None else "flat"  # both keep datatypes
        document = encode_request({**fields, "reply": {"form": form, **reply}}, AttendRequest.tensors)
        return Operation("POST", "/attend", document, read_attend, accept=JSON)

    if reply.get("form") is not None or reply.get("decimals") is not None:
        return in_json()
    body = encode_tensors(fields, AttendRequest.tensors)
    return Operation("POST", "/attend", body, read_attend, SAFETENSORS, f"{SAFETENSORS}, {JSON};q=0.5", fallback=in_json)


def analysis(fields: Mapping[str, Any]) -> Operation[AnalysisResult]:
    """POST /attend/analysis, with tensors in safetensors. The reply is JSON; its default form keeps datatypes."""
    reply = dict(fields.get("reply") or {})
    reply.setdefault("form", "base64" if reply.get("decimals") is None else "flat")
    fields = {**fields, "reply": reply}

    def in_json() -> Operation[AnalysisResult]:
        return Operation("POST", "/attend/analysis", encode_request(fields, AnalysisRequest.tensors), read_analysis, accept=JSON)

    body = encode_tensors(_without_repeats(fields), AnalysisRequest.tensors)
    return Operation("POST", "/attend/analysis", body, read_analysis, SAFETENSORS, JSON, fallback=in_json)


def plan(fields: Mapping[str, Any]) -> Operation[Plan]:
    """POST /attend/plan. Only the shapes of large tensors are sent. With `metrics` it plans an analysis."""
    shapes = {
        name: {"shape": list(np.shape(fields[name]))}
        for name in ("query", "key", "value", "bias", "direction")
        if fields.get(name) is not None and not isinstance(fields[name], Mapping)
    }
    body = encode_request({**fields, **shapes}, AnalysisRequest.tensors)
    return Operation("POST", "/attend/plan", body, lambda response: read_document(Plan, response))


def figure(fields: Mapping[str, Any], figure: Mapping[str, Any]) -> Operation[bytes]:
    """POST /attend/figure."""
    fields = _without_repeats({**fields, "figure": figure})

    def in_json() -> Operation[bytes]:
        return Operation("POST", "/attend/figure", encode_request(fields, FigureRequest.tensors), read_bytes)

    return Operation("POST", "/attend/figure", encode_tensors(fields, FigureRequest.tensors), read_bytes, SAFETENSORS, fallback=in_json)


def layers() -> Operation[list[LayerDocument]]:
    """GET /layers."""
    return Operation("GET", "/layers", None, lambda response: read_document(Layers, response).layers)


def layer(name: str) -> Operation[LayerDocument]:
    """GET /layers/{name}."""
    return Operation("GET", layer_path(name), None, read_layer)


def put_layer(name: str, spec: LayerSpec | Mapping[str, Any], weights: Mapping[str, Any] | None) -> Operation[LayerDocument]:
    """PUT /layers/{name}."""
    document = spec.model_dump(mode="json") if isinstance(spec, LayerSpec) else spec
    body = encode_request({"spec": document, "weights": weights}, PutLayer.tensors)
    return Operation("PUT", layer_path(name), body, read_layer, repeat="unbegun")


def put_layer_file(
    name: str, body: bytes, layout: str | None, prefix: str | None, spec: Mapping[str, Any] | None
) -> Operation[LayerDocument]:
    """PUT /layers/{name} with safetensors."""
    parameters = {"layout": layout, "prefix": prefix, "spec": None if spec is None else json.dumps(dict(spec))}
    query = urlencode({key: value for key, value in parameters.items() if value is not None})
    path = layer_path(name) + (f"?{query}" if query else "")
    return Operation("PUT", path, body, read_layer, SAFETENSORS, repeat="unbegun")


def model_layer(path: str | Path, layer: int, part: str | None = None) -> bytes:
    """One layer of a model's folder as a body for PUT /layers/{name}: its tensors, and the model's config in the metadata."""
    folder = ModelFolder(Path(path))
    description, tensors = folder.layer(layer, part)
    metadata = {"config": folder.config_text, "layer": str(layer), "part": description.part}
    return b"".join(write_tensors(tensors, metadata))


def delete_layer(name: str) -> Operation[None]:
    """DELETE /layers/{name}."""
    return Operation("DELETE", layer_path(name), None, lambda _: None, repeat="unbegun")


def layer_file(name: str) -> Operation[bytes]:
    """GET /layers/{name}/weights."""
    return Operation("GET", f"{layer_path(name)}/weights", None, read_bytes)


def ready() -> Operation[httpx.Response]:
    """GET /health/ready, never repeated."""
    return Operation("GET", "/health/ready", repeat="never")


def layer_path(name: str) -> str:
    """/layers/{name}, with the name escaped."""
    return f"/layers/{quote(name, safe='')}"


def read_layer(response: httpx.Response) -> LayerDocument:
    return read_document(LayerDocument, response)


def _without_repeats(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields without a value that is the key, and a key that is the query: these are the service's defaults."""
    query, key, value = (fields.get(name) for name in ("query", "key", "value"))
    if value is key:
        fields = {**fields, "value": None}
        if key is query:
            fields = {**fields, "key": None}
    return fields
