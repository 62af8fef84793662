"""The operations of the API. Each function makes one `ApiRequest`; `Client` and `AsyncClient` have a method of the same name and arguments.

In every operation, `timeout` in seconds replaces that of the client; None is no limit.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack
from urllib.parse import urlencode

import httpx
import numpy as np

from attend.checkpoints import ModelFolder
from attend.client.api_request import ApiRequest, Repeat
from attend.client.arguments import USE_CLIENT_DEFAULT, TensorLike, Timeout
from attend.client.fields import AnalysisFields, AttendFields, FigureFields, FigureOptions, PlanFields
from attend.client.responses import (
    AnalysisResult,
    AttendResult,
    Picture,
    WordsResult,
    read_analysis,
    read_attend,
    read_document,
    read_words,
)
from attend.errors import InvalidRequest, pointer
from attend.spec import LayerSpec
from attend.tensors import Array
from attend.wire.client_codec import decode_document, encode_binary_request, encode_json_request
from attend.wire.negotiation import JSON, SAFETENSORS
from attend.wire.problems import unknown_field
from attend.wire.safetensors import read_tensors, write_tensors
from attend.wire.schemas.analysis import AnalysisRequest
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.figure import FigureRequest
from attend.wire.schemas.layers import Circuits, LayerInfo, Layers, PutLayer
from attend.wire.schemas.plan import Plan
from attend.wire.schemas.schema import require_layer_name
from attend.wire.schemas.sessions import SessionInfo, Sessions
from attend.wire.schemas.words import TokenizedText, Vocabulary

T = TypeVar("T")
read_layer = partial(read_document, LayerInfo)


def attend(
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    *,
    layer: str = "default",
    timeout: Timeout = USE_CLIENT_DEFAULT,
    **more: Unpack[AttendFields],
) -> ApiRequest[AttendResult]:
    """Attention of `query` over `key` and `value`, [b, n, width] or [n, width]: arrays, torch tensors or nested lists.

    A missing key is the query, a missing value the key; None leaves a field out. Arrays have the layer's dtype, or that of
    `reply={"datatype": …}`.
    """
    return attend_at("/attend", request_fields(AttendRequest, layer=layer, query=query, key=key, value=value, **more), timeout)


def analysis(
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    *,
    layer: str | None = "default",
    metrics: Sequence[str] | None = None,
    timeout: Timeout = USE_CLIENT_DEFAULT,
    **more: Unpack[AnalysisFields],
) -> ApiRequest[AnalysisResult]:
    """Metrics of each head; `metrics` has their names, by default all cheap ones that these arguments suffice for.

    Tensors are those of `attend`. Undefined numbers are NaN, undefined indices -1.
    """
    layer = _layer_beside(more.get("session"), layer)
    fields = request_fields(AnalysisRequest, layer=layer, query=query, key=key, value=value, metrics=metrics, **more)
    return _computation("/attend/analysis", AnalysisRequest, fields, read_analysis, timeout, JSON)


def plan(
    query: TensorLike | Mapping[str, Any],
    key: TensorLike | Mapping[str, Any] | None = None,
    value: TensorLike | Mapping[str, Any] | None = None,
    *,
    layer: str | None = "default",
    metrics: Sequence[str] | None = None,
    timeout: Timeout = USE_CLIENT_DEFAULT,
    **more: Unpack[PlanFields],
) -> ApiRequest[Plan]:
    """Shapes and cost of `attend` with the same arguments, and whether it is admitted; with `metrics`, of `analysis`.

    A tensor may be `{"shape": [2, 9, 64]}`. Only the shapes of large tensors are sent.
    """
    layer = _layer_beside(more.get("session"), layer)
    fields = request_fields(AnalysisRequest, layer=layer, query=query, key=key, value=value, metrics=metrics, **more)
    shapes = {
        name: {"shape": list(np.shape(fields[name]))}
        for name in ("query", "key", "value", "bias", "pattern", "head_outputs", "direction")
        if fields.get(name) is not None and not isinstance(fields[name], Mapping)
    }
    body = encode_json_request({**fields, **shapes}, AnalysisRequest.tensor_kinds)
    return ApiRequest("POST", "/attend/plan", body, partial(read_document, Plan), timeout, session=fields.get("session"))


def figure(
    query: TensorLike,
    key: TensorLike | None = None,
    value: TensorLike | None = None,
    *,
    kind: Literal["heads", "head", "mean", "std", "similarity", "concatenation"] = "heads",
    format: Literal["png", "svg", "html"] = "png",
    layer: str | None = "default",
    figure: FigureOptions | None = None,
    timeout: Timeout = USE_CLIENT_DEFAULT,
    **more: Unpack[FigureFields],
) -> ApiRequest[Picture]:
    """A figure of the heads of `attend` with the same arguments: the bytes of a PNG, an SVG or an HTML page, which a notebook shows.

    `figure` has the other options of the picture, such as `{"theme": "dark", "title": …, "heads": [0, 3]}`; `tokens={"query": […],
    "key": […]}` label the axes.
    """
    options = {"kind": kind, "format": format, **(figure or {})}
    layer = _layer_beside(more.get("session"), layer)
    fields = request_fields(FigureRequest, layer=layer, query=query, key=key, value=value, figure=options, **more)
    return _computation("/attend/figure", FigureRequest, fields, lambda response: Picture(response.content), timeout)


def _layer_beside(session: str | None, layer: str | None) -> str | None:
    """The layer to send: with a session, which has a layer, none unless one was named."""
    return None if session is not None and layer == "default" else layer


def words(
    text: str, *, layer: str = "default", part: Literal["query", "key", "value"] = "query", timeout: Timeout = USE_CLIENT_DEFAULT
) -> ApiRequest[WordsResult]:
    """The tokens of a text, and a vector of each for the input `part` of a layer.

    A layer of a trained model gets its inputs in that model; any other gets vectors drawn from a hash of each word, which mean nothing.
    """
    body = encode_json_request({"text": text, "layer": layer, "part": part}, {})
    return ApiRequest("POST", "/words", body, read_words, timeout)


def vocabulary(*, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[Vocabulary]:
    """The trained models whose layers `words` can load, by name; and, in the note, what to install on the server for others."""
    return ApiRequest("GET", "/words", None, partial(read_document, Vocabulary), timeout)


def tokens(tokenizer: str, text: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[TokenizedText]:
    """The tokens of a text by a tokenizer, the text of a model's tokenizer.json. The server needs the package `tokenizers`, and must allow
    changes of layers."""
    body = encode_json_request({"tokenizer": tokenizer, "text": text}, {})
    return ApiRequest("POST", "/words/tokens", body, partial(read_document, TokenizedText), timeout)


def layers(*, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[list[LayerInfo]]:
    """All layers of the server."""
    return ApiRequest("GET", "/layers", None, lambda response: read_document(Layers, response).layers, timeout)


def layer(name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[LayerInfo]:
    """One layer: its spec with all defaults filled in, its fingerprint, its device."""
    return ApiRequest("GET", layer_path(name), None, read_layer, timeout)


def put_layer(
    name: str,
    spec: LayerSpec | Mapping[str, Any],
    weights: Mapping[str, TensorLike] | None = None,
    *,
    timeout: Timeout = USE_CLIENT_DEFAULT,
) -> ApiRequest[LayerInfo]:
    """Create or replace a layer, with weights drawn from the spec's `init` and `seed`, or given, by canonical names or those of another
    framework, such as `W_q`."""
    drawn = {"init", "seed", "gain"} if weights is not None else None  # a LayerSpec has them, but then nothing is drawn
    document = spec.model_dump(mode="json", exclude=drawn) if isinstance(spec, LayerSpec) else spec
    body = encode_json_request({"spec": document, "weights": weights}, PutLayer.tensor_kinds)
    return ApiRequest("PUT", layer_path(name), body, read_layer, timeout, repeat="if_not_begun")


def put_layer_file(
    name: str,
    file: bytes | str | Path,
    *,
    layout: str | None = None,
    prefix: str | None = None,
    spec: Mapping[str, Any] | None = None,
    timeout: Timeout = USE_CLIENT_DEFAULT,
) -> ApiRequest[LayerInfo]:
    """Create or replace a layer from safetensors, a path or bytes: a result of `layer_file`, or a checkpoint.

    One layer of a checkpoint is read: `prefix` selects it if there are several, `layout` is needed if the names fit several frameworks,
    `spec` has what the tensors do not determine (`{"num_heads": 12}`).
    """
    body = file if isinstance(file, bytes) else Path(file).read_bytes()
    parameters = {"layout": layout, "prefix": prefix, "spec": None if spec is None else json.dumps(dict(spec))}
    query = urlencode({key: value for key, value in parameters.items() if value is not None})
    path = layer_path(name) + (f"?{query}" if query else "")
    return ApiRequest("PUT", path, body, read_layer, timeout, SAFETENSORS, repeat="if_not_begun")


def put_layer_from(
    name: str,
    path: str | Path,
    layer: int,
    *,
    part: str | None = None,
    spec: Mapping[str, Any] | None = None,
    timeout: Timeout = USE_CLIENT_DEFAULT,
) -> ApiRequest[LayerInfo]:
    """Create or replace a layer from a model's folder as `save_pretrained` writes it; the model's config.json decides what it computes.

    Only the tensors of layer number `layer` are read and sent. `part` is encoder, decoder, cross, …, where the model has several. `spec`
    has what no config says, such as `dtype`. Raises InvalidRequest for a model that the service cannot compute exactly.
    """
    folder = ModelFolder(Path(path))
    description, tensors = folder.layer(layer, part)
    metadata = {"config": folder.config_text, "layer": str(layer), "part": description.part}
    return put_layer_file(name, b"".join(write_tensors(tensors, metadata)), spec=spec, timeout=timeout)


def layer_file(name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[bytes]:
    """A layer as safetensors: weights by canonical name, its spec in the metadata."""
    return ApiRequest("GET", f"{layer_path(name)}/weights", None, lambda response: response.content, timeout)


def layer_weights(name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[dict[str, Array]]:
    """A layer's weights by canonical name, in its dtype; read-only views of the response."""
    return ApiRequest("GET", f"{layer_path(name)}/weights", None, lambda response: read_tensors(response.content)[0], timeout)


def circuits(name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[dict[str, Array]]:
    """The QK and OV circuits of a layer's heads: `qk_singular_values` and `ov_singular_values` [h, n], `matching_score` and
    `copying_score` [h]. Undefined numbers are NaN."""

    def read(response: httpx.Response) -> dict[str, Array]:
        numbers = read_document(Circuits, response).model_dump(exclude={"layer"})
        return {name: np.array(value, np.float64) for name, value in numbers.items()}

    return ApiRequest("GET", f"{layer_path(name)}/circuits", None, read, timeout)


def delete_layer(name: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[None]:
    """Remove a layer."""
    return ApiRequest("DELETE", layer_path(name), None, lambda _: None, timeout, repeat="if_not_begun")


def ready(*, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[bool]:
    """Whether the server responds and has loaded its layers."""
    return ApiRequest("GET", "/health/ready", None, lambda _: True, timeout, repeat="never")


def live(*, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[bool]:
    """Whether the server responds."""
    return ApiRequest("GET", "/health/live", None, lambda _: True, timeout, repeat="never")


def started(*, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[bool]:
    """Whether the server responds and its start is over."""
    return ApiRequest("GET", "/health/startup", None, lambda _: True, timeout, repeat="never")


def about(*, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[dict[str, Any]]:
    """Version, threads, device, limits and layers of the server."""
    return ApiRequest("GET", "/", None, lambda response: decode_document(response.content), timeout, accept=JSON)


def metrics(*, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[str]:
    """The metrics of the server, in Prometheus' format."""
    return ApiRequest("GET", "/metrics", None, lambda response: response.text, timeout)


def sessions(*, timeout: Timeout = USE_CLIENT_DEFAULT) -> ApiRequest[list[SessionInfo]]:
    """The sessions of this API key, least recently used first."""
    return ApiRequest("GET", "/sessions", None, lambda response: read_document(Sessions, response).sessions, timeout)


def post(path: str, body: bytes, repeat: Repeat = "always") -> ApiRequest[httpx.Response]:
    """The response to a JSON body."""
    return ApiRequest("POST", path, body, lambda response: response, repeat=repeat)


def layer_path(name: str) -> str:
    """/layers/{name}. Raises InvalidRequest for a name that no layer can have."""
    require_layer_name(name)
    return f"/layers/{name}"


def request_fields(model: type[AttendRequest], **fields: Any) -> dict[str, Any]:
    """The fields without a value that is the key, and a key that is the query: these are the service's defaults.

    Raises InvalidRequest for fields that `model` does not have.
    """
    unknown = [unknown_field(pointer([name]), name, model) for name in fields if name not in model.model_fields]
    if unknown:
        raise InvalidRequest(problems=unknown)
    if not isinstance(session := fields.get("session"), str | None):
        raise InvalidRequest.where("/session", "a string, the `id` of a session", type(session).__name__)
    query, key, value = (fields.get(name) for name in ("query", "key", "value"))
    if value is key:
        fields["value"] = None
        if key is query:
            fields["key"] = None
    return fields


def attend_at(path: str, fields: dict[str, Any], timeout: Timeout) -> ApiRequest[AttendResult]:
    """POST /attend, or a call with the same body and reply at another path."""
    reply = fields.get("reply") or {}
    only_json = reply.get("form") is not None or reply.get("decimals") is not None
    read = partial(read_attend, select=fields.get("select"), tokens=fields.get("tokens"))
    return _computation(path, AttendRequest, fields, read, timeout, JSON if only_json else f"{SAFETENSORS}, {JSON};q=0.5")


def _computation(
    path: str,
    model: type[AttendRequest],
    fields: dict[str, Any],
    read: Callable[[httpx.Response], T],
    timeout: Timeout,
    accept: str = "*/*",
) -> ApiRequest[T]:
    """A POST of these fields. A reply in JSON has its tensors in a form that keeps their datatypes, unless `reply` chooses another."""
    reply = fields.get("reply") or {}
    fields["reply"] = {"form": "base64" if reply.get("decimals") is None else "flat", **reply}
    body, json_body = encode_binary_request(fields, model.tensor_kinds), partial(encode_json_request, fields, model.tensor_kinds)
    return ApiRequest("POST", path, body, read, timeout, SAFETENSORS, accept, json_body=json_body, session=fields.get("session"))
