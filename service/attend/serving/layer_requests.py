"""Reads the bodies of requests about layers (PUT /layers, the model repository), of POST /words and /sessions; exports layers, and their
circuits.

Bodies are decoded and layers exported in threads of the codec pool. The functions raise subclasses of RequestError.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from attend.attention.call import Result
from attend.checkpoints.detection import complementary_match, find_matches, refusal_of_weights
from attend.checkpoints.families import COMPOSITES, FAMILIES
from attend.checkpoints.model import SECTIONS
from attend.errors import InvalidRequest, translating
from attend.heads.circuits import CircuitsOperation, require_circuits
from attend.limits import WireLimits
from attend.serving.cost import predict_circuits
from attend.serving.layers.files import (
    CheckpointQuery,
    ParsedLayer,
    read_checkpoint,
    read_layer_file,
    spec_of_given_weights,
    write_layer_file,
)
from attend.serving.layers.loader import AddedLayer
from attend.serving.layers.registry import LoadedLayer
from attend.serving.prepared import Prepared
from attend.serving.requests import Request
from attend.serving.service import Service
from attend.tensors import BY_TORCH
from attend.wire.codec import Buffer, Decoded, in_places
from attend.wire.compression import unpack
from attend.wire.json.strict import parse_strictly
from attend.wire.negotiation import FILE_CODEC, JSON, SAFETENSORS
from attend.wire.problems import describe_value, validate
from attend.wire.schemas.layers import Circuits, PutLayer
from attend.wire.schemas.schema import LayerReference, Schema

D = TypeVar("D", bound=Schema)
CIRCUITS_OPERATIONS = 1 << 30  # predicted operations of the heads whose circuits are computed at once


async def read_body(service: Service, request: Request, model: type[D]) -> D:
    """Decode the body and validate it as `model`. An empty body has no fields."""
    await service.engine.unpack(request, service.wire_limits.max_body_bytes)
    return await service.engine.run(request, request.size, _decode_body, request, model, service.wire_limits)


async def read_object(service: Service, request: Request, largest: int) -> dict[str, Any]:
    """The body as a JSON object of at most `largest` bytes after decompression; {} if it is empty."""
    await service.engine.unpack(request, largest)
    return await service.engine.run(request, request.size, _decode_object, request, service.wire_limits)


async def put_layer(service: Service, name: str, request: Request, source: CheckpointQuery) -> AddedLayer:
    """PUT /layers/{name}: load the layer. Returns once calls to it are answered."""
    read = partial(service.engine.check_and_run, request, _decode_layer, request, source, service.wire_limits)
    return await service.loader.put(name, read, request.deadline)


async def make_layer(service: Service, name: str, decoded: Decoded, deadline: float | None) -> AddedLayer:
    """The same for a seeded layer, whose spec is decoded, but not validated."""
    return await service.loader.put(name, partial(_layer_of, decoded), deadline)


async def export_layer(service: Service, name: str, request: Request) -> list[Buffer]:
    """GET /layers/{name}/weights: the layer as safetensors, which PUT accepts. Raises Overloaded before anything is copied."""
    layer = service.registry.find(name)
    size = layer.spec.num_parameters * BY_TORCH[layer.spec.dtype].size
    if request.lease is not None:
        request.lease.add(size)
    return await service.engine.run(request, size, write_layer_file, layer)


async def layer_circuits(service: Service, name: str, request: Request) -> str:
    """GET /layers/{name}/circuits: the circuits of the layer, as JSON. They are computed a few heads at a time, in their turn among the
    calls to layers; if the caller leaves, or at its deadline, no more heads are computed.

    Raises InvalidRequest for a layer without them, TooLarge for a cost beyond the limits, and what `Scheduler.submit` raises.
    """
    layer, engine = service.registry.find(name), service.engine
    require_circuits(layer.spec)
    cost, of_head = (predict_circuits(layer.spec, heads) for heads in (layer.spec.num_heads, 1))
    engine.admission.require(cost)
    if request.lease is not None:
        request.lease.add(cost.reply_bytes)
    results = []
    step = max(1, CIRCUITS_OPERATIONS // of_head.operations)
    for first in range(0, layer.spec.num_heads, step):
        heads = range(first, min(first + step, layer.spec.num_heads))
        prepared = Prepared(layer, None, predict_circuits(layer.spec, len(heads)), CircuitsOperation(heads))
        results.append((await engine.scheduler.submit(prepared, request)).result)
    return await engine.run_by_size(request, cost.reply_bytes, _circuits_text, layer, results)


def _circuits_text(layer: LoadedLayer, results: Sequence[Result]) -> str:
    numbers: dict[str, Any] = {name: torch.cat([result.tensors[name] for result in results]).tolist() for name in results[0].tensors}
    return Circuits(layer=LayerReference(name=layer.name, fingerprint=layer.fingerprint), **numbers).model_dump_json()


def _decode_body(request: Request, model: type[D], limits: WireLimits) -> D:
    return validate(model, _decode_members(request.take_body(), request, model, limits) if request.body else {})


def _decode_members(body: bytes, request: Request, model: type[Schema], limits: WireLimits) -> dict[str, Any]:
    return dict(request.codec.decode(body, request.codec_parameters, model.tensor_kinds, limits).members)


def _decode_object(request: Request, limits: WireLimits) -> dict[str, Any]:
    text = request.take_body()
    document = parse_strictly(text, limits=limits) if text.strip() else {}
    if not isinstance(document, dict):
        raise InvalidRequest.where("", "a JSON object", describe_value(document))
    return document


def _decode_layer(request: Request, source: CheckpointQuery, limits: WireLimits) -> ParsedLayer:
    """The layer of the body of a PUT. The loader has one thread, and decompresses the body there: few such bodies are in memory at once."""
    body = unpack(request.take_body(), request.coding, limits.max_layer_bytes if request.codec is FILE_CODEC else limits.max_body_bytes)
    if request.codec is FILE_CODEC:
        return read_layer_file(body, source)
    members = _decode_members(body, request, PutLayer, limits)
    checkpoint = _is_checkpoint(members)
    for name in ("spec",) if checkpoint else ("layout", "prefix", "spec"):
        if getattr(source, name) is not None:
            raise InvalidRequest.where("", f"a body of type {SAFETENSORS} with the query parameter {name}", JSON)
    if checkpoint:
        if others := {name: value for name, value in members["weights"].items() if not isinstance(value, np.ndarray)}:
            raise refusal_of_weights([(name, "a tensor", describe_value(value)) for name, value in others.items()])
        spec = {name: value for name, value in members["spec"].items() if value is not None or name != "dtype"}
        with translating(partial(in_places, places={"layout": None, "prefix": None})):
            return read_checkpoint(members["weights"], source, {"dtype": "float32", **spec})  # numbers in text have no dtype
    return _layer_of(Decoded(members))


def _layer_of(decoded: Decoded) -> ParsedLayer:
    with translating(decoded.translate):
        body = validate(PutLayer, decoded.members)
        spec = body.spec if body.weights is None else spec_of_given_weights(body.spec)
    return ParsedLayer(spec, body.weights, translate=decoded.translate)


def _is_checkpoint(members: dict[str, Any]) -> bool:
    """Whether the weights of a PUT have names of another framework, such as W_q, if only beside canonical ones."""
    spec, weights = members.get("spec"), members.get("weights")
    if len(members) != 2 or not isinstance(spec, dict) or not isinstance(weights, dict):
        return False
    matches = find_matches(weights)
    ours = next((match for match in matches if match.layout.name == "attend" and not match.stem), None)
    return bool(matches) if ours is None else complementary_match(ours, matches) is not None


def known_families() -> dict[str, Any]:
    """What tells the parts of a model by its config, as `checkpoints.model.parts_of` reads it, for JSON.

    Of each model_type the parts; of each part the field of a config that says whether it is there, or "", and those that count its layers.
    """
    families = {
        model_type: {part: {"flag": row.flag, "layers": row.layers} for part, row in family.items()}
        for model_type, family in FAMILIES.items()
    }
    return {"families": families, "composites": COMPOSITES.split(), "sections": SECTIONS}
