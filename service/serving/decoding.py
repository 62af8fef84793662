"""Bodies that are no calls -> documents and layers: POST /words, PUT /layers/{name}, the model repository.

Every function raises subclasses of RequestError, and is to be run off the event loop.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from service.errors import InvalidRequest
from service.serving.layers.files import Source, given_weights, read_layer_file
from service.serving.requests import RawRequest
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.codec import CODECS
from service.wire.compression import unpack
from service.wire.json.strict import parse_strictly
from service.wire.limits import WireLimits
from service.wire.negotiation import JSON, SAFETENSORS
from service.wire.problems import shown, validate
from service.wire.schemas.attend import Document, PutLayer

D = TypeVar("D", bound=Document)


def read_document(raw: RawRequest, model: type[D], limits: WireLimits) -> D:
    """The body as a document of that model."""
    body = unpack(raw.take_body(), raw.coding, limits.body_bytes)
    return validate(model, raw.codec.decode(body, raw.parameters, model.tensors, limits).members)


def read_object(raw: RawRequest, largest: int) -> dict[str, Any]:
    """The body as a JSON object without tensors, of at most `largest` bytes unpacked; an empty one where there is no body."""
    text = unpack(raw.take_body(), raw.coding, largest)
    document = parse_strictly(text) if text.strip() else {}
    if not isinstance(document, dict):
        raise InvalidRequest.where("", "a JSON object", shown(document))
    return document


def read_layer(raw: RawRequest, source: Source, limits: WireLimits) -> tuple[LayerSpec, Mapping[str, Array] | None]:
    """Spec and weights of a layer; None for weights that are to be drawn."""
    if raw.codec is CODECS[SAFETENSORS]:
        return read_layer_file(unpack(raw.take_body(), raw.coding, limits.layer_bytes), source)
    for name in ("layout", "prefix", "spec"):
        if getattr(source, name) is not None:
            raise InvalidRequest.where(f"/{name}", f"a body of type {SAFETENSORS} beside it", JSON)
    document = read_document(raw, PutLayer, limits)
    return (document.spec, None) if document.weights is None else (given_weights(document.spec), document.weights)
