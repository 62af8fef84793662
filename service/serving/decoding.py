"""Bytes -> requests, layers, and calls that nothing can be wrong with any more: decode, validate, fit, admit, bind.

Pure but for the registry, which tells the layers; run on the event loop for small bodies, off it for large ones.
"""

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from service.errors import InvalidRequest, Problem, TooLarge
from service.serving import analysis, cost
from service.serving.binding import bind, fit
from service.serving.bound_call import BoundCall
from service.serving.figures import BoundFigure, bind_figure
from service.serving.layers.files import Source, given_weights, read_layer_file
from service.serving.layers.registry import HeldLayer, LayerRegistry
from service.serving.requests import RawRequest
from service.serving.shards import refusals
from service.serving.validation_cache import shape_of
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.arrays import Kind
from service.wire.codec import CODECS
from service.wire.compression import unpack
from service.wire.json.strict import parse_slowly
from service.wire.limits import WireLimits
from service.wire.negotiation import SAFETENSORS
from service.wire.problems import shown, validate
from service.wire.schemas.analysis import AnalysisRequest
from service.wire.schemas.attend import AttendRequest, Document, PutLayer
from service.wire.schemas.figure import FigureRequest

D = TypeVar("D", bound=Document)
DEFAULT_LAYER = AttendRequest.model_fields["layer"].default


class Decoder:
    """Decodes request bodies, with the layers and the limits of this process. Every method raises subclasses of RequestError."""

    def __init__(self, registry: LayerRegistry, wire_limits: WireLimits, limits: cost.ServingLimits) -> None:
        self.registry, self.wire_limits, self.limits = registry, wire_limits, limits
        self.parts = 0  # into which a call too large for this process may be cut

    def document(self, raw: RawRequest, model: type[D]) -> D:
        """The body as a document of that model."""
        return validate(model, self._parsed(raw, model.tensors))

    def plain_object(self, raw: RawRequest, largest: int) -> dict[str, Any]:
        """The body as a JSON object without tensors, of at most so many bytes; an empty one where there is no body."""
        text = unpack(raw.take_body(), raw.coding, largest)
        document = parse_slowly(text) if text.strip() else {}
        if not isinstance(document, dict):
            raise InvalidRequest.where("", "a JSON object", shown(document))
        return document

    def layer(self, raw: RawRequest, source: Source) -> tuple[LayerSpec, Mapping[str, Array] | None]:
        """Spec and weights; None for weights that are to be drawn."""
        if raw.form == SAFETENSORS:
            return read_layer_file(unpack(raw.take_body(), raw.coding, self.wire_limits.layer_bytes), source)
        for name in ("layout", "prefix", "spec"):
            if getattr(source, name) is not None:
                raise InvalidRequest.where(f"/{name}", f"a body of type {SAFETENSORS} beside it", raw.form)
        document = self.document(raw, PutLayer)
        return (document.spec, None) if document.weights is None else (given_weights(document.spec), document.weights)

    def fitted(self, raw: RawRequest, document: type[AttendRequest] | None, shapes_alone: bool = False) -> tuple[AttendRequest, HeldLayer]:
        """The request as such a document, and its layer; without one, the document is told by whether there are metrics."""
        return self._fitted(self._parsed(raw, (document or AnalysisRequest).tensors, shapes_alone), document)

    def _fitted(self, members: dict[str, Any], document: type[AttendRequest] | None) -> tuple[AttendRequest, HeldLayer]:
        request = validate(document or (AnalysisRequest if "metrics" in members else AttendRequest), members)
        layer = self.registry.find(request.layer)
        fit(request, layer.spec)
        if isinstance(request, AnalysisRequest):
            analysis.fit(request, layer.spec)
        return request, layer

    def bound(self, raw: RawRequest, document: type[AttendRequest] = AttendRequest) -> BoundCall:
        """The call of a request that fits its layer and is admitted."""
        bound = self._bound(raw, document)
        if raw.own is not None and raw.own.largest_reply is not None:
            setting, largest = raw.own.largest_reply
            if (size := cost.tensor_bytes(bound.cost.outputs, bound.request.reply.datatype, bound.layer.spec)) > largest:
                raise TooLarge.where("", f"a reply of at most {largest} bytes ({setting}); ask for fewer outputs, or over HTTP", str(size))
        return bound

    def _bound(self, raw: RawRequest, document: type[AttendRequest]) -> BoundCall:
        members = self._parsed(raw, document.tensors)
        shape = shape_of(members) if document is AttendRequest else None
        if shape is not None and (bound := self._as_before(shape, members)) is not None:
            return bound
        request, layer = self._fitted(members, document)
        predicted = predict(request, layer.spec)
        problems, in_parts = self.refusals(request, predicted)
        if problems:
            raise TooLarge(problems=problems)
        call = bind(request, layer.spec)
        operation = analysis.operation_of(request, layer.spec, call) if isinstance(request, AnalysisRequest) else None
        if shape is not None:
            layer.prepared.keep(shape, request, call, predicted, in_parts)
        return BoundCall(request, layer, call, predicted, in_parts, operation)

    def _as_before(self, shape: Hashable, members: dict[str, Any]) -> BoundCall | None:
        """The call of a request that differs from an earlier one of its layer in its numbers alone."""
        name = members.get("layer", DEFAULT_LAYER)
        layer = self.registry.get(name) if isinstance(name, str) else None
        prepared = None if layer is None else layer.prepared.get(shape)
        if layer is None or prepared is None:
            return None
        return BoundCall(prepared.request, layer, prepared.filled(members, layer.spec), prepared.cost, prepared.in_parts)

    def refusals(self, request: AttendRequest, predicted: cost.Cost) -> tuple[list[Problem], bool]:
        """Why the request is not taken, none if it is; and whether it is to be cut among shards."""
        whole = isinstance(request, AnalysisRequest)  # metrics see all keys of a row at once
        return refusals(request, predicted, self.limits, 0 if whole else self.parts)

    def figure(self, raw: RawRequest) -> BoundFigure:
        """A figure's call, and how it is to be drawn."""
        request = validate(FigureRequest, self._parsed(raw, FigureRequest.tensors))
        layer = self.registry.find(request.layer)
        fit(request, layer.spec)
        return bind_figure(request, layer, raw.reply_form, self.limits)

    def _parsed(self, raw: RawRequest, kinds: dict[str, Kind], shapes_alone: bool = False) -> dict[str, Any]:
        form, limits = raw.own or CODECS[raw.form], self.wire_limits
        return form.parse(unpack(raw.take_body(), raw.coding, limits.body_bytes), kinds, limits, shapes_alone)


def predict(request: AttendRequest, spec: LayerSpec) -> cost.Cost:
    """The cost of a request that fits the layer."""
    if not isinstance(request, AnalysisRequest):
        return cost.predict(request, spec)
    plain = request.model_copy(update={"outputs": ["output"], "select": None})
    return analysis.predict(request, spec, cost.predict(plain, spec))
