"""Reads layers from safetensors bytes and writes them: files of this service, with the spec in the metadata, and other checkpoints.

Arrays are views of the body, so no memory is allocated for weights before the registry has admitted the spec.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from attend.attention.operators import OPERATORS
from attend.checkpoints.detection import Match
from attend.checkpoints.model import describe
from attend.checkpoints.reader import FLAGS, UNSEEN, find_layer, read_match
from attend.errors import InvalidRequest, Problem, TooLarge, Translate, pointer, translating
from attend.serving.casting import cast
from attend.serving.layers.registry import LoadedLayer
from attend.spec import LayerSpec
from attend.spec_parts import Part
from attend.tensors import BY_TORCH, Array
from attend.wire.codec import Buffer, in_places
from attend.wire.json.strict import parse_nested
from attend.wire.problems import describe_value, validate
from attend.wire.safetensors import read_tensors, write_tensors

MAX_ORIGIN = 200  # characters
SPEC, FINGERPRINT, ORIGIN = "spec", "fingerprint", "origin"  # entries of the metadata of this service's files
CONFIG, LAYER, PART = "config", "layer", "part"  # entries for a layer of a model with its config.json
# where a safetensors file has the members of PUT /layers, with its spec in the metadata, and without; None: in the query
IN_OWN_FILE = {"spec": "/__metadata__/spec", "weights": ""}
IN_CHECKPOINT = {
    **dict.fromkeys(("layout", "prefix", "spec")),
    **{name: f"/__metadata__/{name}" for name in (CONFIG, LAYER, PART)},
    "weights": "",
}
ASSUMABLE = ("scale", *dict.fromkeys(operator.field for operator in OPERATORS if operator.field not in FLAGS))  # tensors tell the flags


@dataclass(frozen=True, slots=True)
class CheckpointQuery:
    """The query of PUT /layers/{name}: which layer of a checkpoint to read, and spec fields (JSON) that its tensors do not determine."""

    layout: str | None = None
    prefix: str | None = None
    spec: str | None = None


class ParsedLayer(NamedTuple):
    """The layer of a request or a file; weights are None if they are to be drawn from the spec's `init` and `seed`."""

    spec: LayerSpec
    weights: Mapping[str, Array] | None
    assumed: Mapping[str, Any] = MappingProxyType({})  # fields of the spec that neither tensors nor caller gave
    origin: str | None = None  # where the weights are from, if that is known
    translate: Translate | None = None  # a problem of spec or tensors as one of the body
    in_tensors: Translate | None = None  # a problem of the weights as one of the tensors that they were made from; reads all numbers


def read_layer_file(body: bytes, source: CheckpointQuery) -> ParsedLayer:
    """The layer, with weights that are views of the body. Raises MalformedBody, TooLarge or InvalidRequest with the tensor or field."""
    tensors, metadata = read_tensors(body)
    translate = partial(in_places, places=IN_OWN_FILE if SPEC in metadata else IN_CHECKPOINT)
    with translating(translate):
        return _read_file(tensors, metadata, source)._replace(translate=translate)


def _read_file(tensors: Mapping[str, Array], metadata: Mapping[str, str], source: CheckpointQuery) -> ParsedLayer:
    """The layer of a file. Raises as `read_layer_file`, with pointers into layout, prefix, spec, weights, and the config's entries."""
    if SPEC not in metadata:
        given = _object(source.spec or "{}", "/spec")
        if CONFIG in metadata:
            return _read_by_config(tensors, metadata, source, given)
        return read_checkpoint(tensors, source, given)
    for name in ("layout", "prefix", "spec"):
        if (given := getattr(source, name)) and (name, given) != ("layout", "attend"):
            raise InvalidRequest.where("", f"no query parameter {name}, since the file has its spec in the metadata", "one")
    spec = without_init(validate(LayerSpec, _object(metadata[SPEC], "/spec"), "/spec"))
    return ParsedLayer(spec, tensors, origin=_origin(metadata))


def read_checkpoint(tensors: Mapping[str, Array], source: CheckpointQuery, given: Mapping[str, Any]) -> ParsedLayer:
    """The layer of these tensors by the names of any framework. `given`: fields of its spec. Raises InvalidRequest."""
    match = find_layer(tensors, source.layout, source.prefix or "", given)
    fields, weights = read_match(match, tensors, dict(given))
    layer = _converted(match, tensors, fields, weights)
    unseen = [name for name in UNSEEN if layer.spec.projections and name not in fields]
    return layer._replace(assumed=assumed_fields(layer.spec, given, unseen))


def _converted(match: Match, tensors: Mapping[str, Array], fields: Mapping[str, Any], weights: Mapping[str, Array]) -> ParsedLayer:
    """The layer of these fields and weights, which were made from the tensors of the match."""
    spec = spec_of_given_weights(validate(LayerSpec, fields, "/spec"))
    own = {name: tensors[name] for name in match.names.values()}
    return ParsedLayer(spec, weights, in_tensors=partial(_in_tensors, names=match.names, tensors=own, dtype=spec.dtype))


def _in_tensors(problem: Problem, names: Mapping[str, str], tensors: Mapping[str, Array], dtype: str) -> Problem:
    """A problem of a canonical weight as one of the tensors that it was made from: the first number of these that is not finite in `dtype`.

    If all of them are finite, the conversion made another number or none; the problem is then that of a whole tensor, or of all weights.
    """
    for name, array in tensors.items():
        try:
            cast(pointer(["weights", name]).removeprefix("/"), array, dtype)
        except InvalidRequest as refusal:
            return refusal.problems[0]
    weight = problem.at.removeprefix("/weights/")
    sent = names.get(weight.partition("/")[0])
    return Problem("/weights" if sent is None else pointer(["weights", sent]), f"{problem.expected}, for {weight}", problem.got)


def assumed_fields(spec: LayerSpec, given: Mapping[str, Any], unseen: Iterable[str]) -> dict[str, Any]:
    """The fields that change results, no tensor determines and the caller left out: `{"scale": 0.125, "rope.interleaved": false}`.

    `unseen`: flags that tensors of this layout do not determine.
    """
    assumed: dict[str, Any] = {}
    for name in (*ASSUMABLE, *unseen):
        value, own = getattr(spec, name), given.get(name)
        if isinstance(value, Part):
            inner = value.model_dump(mode="json", exclude={"buckets", "dims"})  # which a table or a tensor's shape determines
            assumed |= {f"{name}.{field}": x for field, x in inner.items() if not (isinstance(own, Mapping) and field in own)}
        elif name not in given:
            assumed[name] = value
    return assumed


def _read_by_config(
    tensors: Mapping[str, Array], metadata: Mapping[str, str], source: CheckpointQuery, spec: Mapping[str, Any]
) -> ParsedLayer:
    """The layer that the metadata name, as the model's config.json describes it. Raises InvalidRequest."""
    for name in ("layout", "prefix"):
        if getattr(source, name):
            raise InvalidRequest.where("", f"no query parameter {name}, since the file has its model's config in the metadata", "one")
    number = metadata.get(LAYER, "none")
    if not (number.isascii() and number.isdigit() and len(number) < 9):
        raise InvalidRequest.where("/layer", "the number of a layer, which config requires", number[:60])
    config = _object(metadata[CONFIG], "/config", nonfinite=True)  # some models have Infinity there
    described = describe(config, int(number), metadata.get(PART))
    match = described.find(tensors)
    layer = _converted(match, tensors, *described.read(match, tensors, spec))
    return layer._replace(origin=f"layer {metadata[LAYER]} of a model, by its config.json")


def read_stored(body: bytes) -> tuple[ParsedLayer, str]:
    """The layer and its fingerprint ("" if there is none) in a file that this service stored. Raises as `read_layer_file` does."""
    tensors, metadata = read_tensors(body)
    if SPEC not in metadata:
        raise InvalidRequest.where("/__metadata__", "the spec of a layer in the entry spec", "none")
    spec = validate(LayerSpec, _object(metadata[SPEC], "/__metadata__/spec"), "/spec")
    return ParsedLayer(spec, tensors, origin=_origin(metadata)), metadata.get(FINGERPRINT, "")


def _origin(metadata: Mapping[str, str]) -> str | None:
    """The origin in the metadata of a file, cut, since any file may have any text there."""
    return metadata.get(ORIGIN, "")[:MAX_ORIGIN] or None


def spec_of_given_weights(spec: LayerSpec) -> LayerSpec:
    """The spec without init and seed, which another layer's spec may have. Raises InvalidRequest for a gain, which would be ignored."""
    if spec.gain != 1:
        raise InvalidRequest.where("/spec/gain", "nothing, since the weights are given and none is drawn", describe_value(spec.gain))
    return without_init(spec)


def without_init(spec: LayerSpec) -> LayerSpec:
    """The spec without init, seed and gain, for a layer whose weights are given."""
    return spec.model_copy(update={"init": None, "seed": None, "gain": 1.0})


def stored_pieces(layer: LoadedLayer) -> list[Buffer]:
    """The file in which the store keeps a layer: as exported, with its fingerprint in the metadata."""
    return write_layer_file(layer, fingerprint=layer.fingerprint)


def require_storable(layer: LoadedLayer, largest: int) -> None:
    """Raises TooLarge if the layer's file would exceed `largest` bytes, since it could not be loaded again."""
    _require_file_size(sum(memoryview(piece).nbytes for piece in stored_pieces(layer)), largest)


def require_storable_spec(spec: LayerSpec, largest: int) -> None:
    """Raises TooLarge if weights and spec alone exceed `largest` bytes. Checked before weights are drawn, which is slow."""
    _require_file_size(spec.num_parameters * BY_TORCH[spec.dtype].size + len(spec.model_dump_json()), largest)


def _require_file_size(size: int, largest: int) -> None:
    if size > largest:
        raise TooLarge.where("/spec", f"a layer whose file has at most {largest} bytes (max_layer_bytes)", str(size))


def write_layer_file(layer: LoadedLayer, **more: str) -> list[Buffer]:
    """The layer as safetensors, in pieces: canonical names; the spec and `more` in the metadata."""
    known = {} if layer.origin is None else {ORIGIN: layer.origin}
    return write_tensors(layer.arrays(), {SPEC: layer.spec.model_dump_json(), **known, **more})


def _object(text: str, at: str, nonfinite: bool = False) -> Mapping[str, Any]:
    """The JSON object in a text. Raises MalformedBody, InvalidRequest or TooLarge, with pointers below `at`."""
    if not isinstance(document := parse_nested(text, at, nonfinite), dict):
        raise InvalidRequest.where(at, "a JSON object", describe_value(document))
    return document
