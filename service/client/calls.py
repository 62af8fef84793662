"""Every call that a client can make: how it is asked, and how its answer is read. Pure functions, so that a client which waits and one
which does not share them; who sends, and when, is not their business.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx
import numpy as np

from service.client.failures import BadReply, refusal
from service.client.result import AnalysisResult, AttendResult, read_metrics, read_result
from service.errors import InvalidRequest, MalformedBody
from service.spec import LayerSpec
from service.wire.analysis import AnalysisRequest
from service.wire.answer import decode_document
from service.wire.documents import AttendRequest, Document, LayerDocument, Layers, Plan, PutLayer
from service.wire.figure import FigureRequest
from service.wire.negotiation import JSON, SAFETENSORS
from service.wire.refusals import validate
from service.wire.request import encode_request

Model = TypeVar("Model", bound=Document)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, as yet unsent; a body is JSON unless `media` says otherwise."""

    method: str
    path: str
    body: bytes | None = None
    media: str = JSON


def attend(fields: Mapping[str, Any]) -> Call:
    """POST /attend. Unless the fields say otherwise, numbers come back as base64, or flat where they are rounded: both keep dtypes."""
    return Call("POST", "/attend", encode_request(_exact(fields), AttendRequest.tensors))


def analysis(fields: Mapping[str, Any]) -> Call:
    """POST /attend/analysis, numbers as those of `attend`."""
    return Call("POST", "/attend/analysis", encode_request(_exact(fields), AnalysisRequest.tensors))


def plan(fields: Mapping[str, Any]) -> Call:
    """POST /attend/plan. Of the large tensors only the shape is sent, since nothing is computed; `metrics` make it an analysis."""
    shapes = {
        name: {"shape": list(np.shape(fields[name]))}
        for name in ("query", "key", "value", "bias", "direction")
        if fields.get(name) is not None and not isinstance(fields[name], Mapping)
    }
    return Call("POST", "/attend/plan", encode_request({**fields, **shapes}, AnalysisRequest.tensors))


def figure(fields: Mapping[str, Any], figure: Mapping[str, Any]) -> Call:
    """POST /attend/figure."""
    return Call("POST", "/attend/figure", encode_request({**fields, "figure": figure}, FigureRequest.tensors))


def put_layer(name: str, spec: LayerSpec | Mapping[str, Any], weights: Mapping[str, Any] | None) -> Call:
    """PUT /layers/{name}."""
    document = spec.model_dump(mode="json") if isinstance(spec, LayerSpec) else spec
    return Call("PUT", layer_path(name), encode_request({"spec": document, "weights": weights}, PutLayer.tensors))


def put_layer_file(name: str, body: bytes, layout: str | None, prefix: str | None, spec: Mapping[str, Any] | None) -> Call:
    """PUT /layers/{name} with safetensors."""
    given = {"layout": layout, "prefix": prefix, "spec": None if spec is None else json.dumps(dict(spec))}
    query = urlencode({key: value for key, value in given.items() if value is not None})
    return Call("PUT", layer_path(name) + (f"?{query}" if query else ""), body, SAFETENSORS)


def layer_file(name: str) -> Call:
    """GET /layers/{name}/weights."""
    return Call("GET", f"{layer_path(name)}/weights")


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
    except (MalformedBody, KeyError, TypeError) as error:
        raise BadReply(f"the reply to POST /attend cannot be read: {error}") from None


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
