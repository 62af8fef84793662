"""The registry of the layers of a process. Layers are immutable: a call keeps the layer it was prepared for, even if that is replaced."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from attend.attention.initialization import draw_weights
from attend.attention.layer import MultiHeadAttention
from attend.attention.program import formulas
from attend.checkpoints.detection import natural
from attend.checkpoints.reader import biases_of
from attend.errors import (
    InvalidRequest,
    LayerConflict,
    LayerNotFound,
    LayerUnloaded,
    Problem,
    TooLarge,
    Translate,
    did_you_mean,
    pointer,
    translating,
)
from attend.fingerprint import fingerprint
from attend.limits import ServingLimits
from attend.serving.casting import at_cache_line, cast, numpy_of
from attend.serving.prepared_cache import PreparedCache
from attend.serving.rounding import score_deviation
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array
from attend.wire.problems import describe_value, one_of
from attend.wire.schemas.layers import LayerInfo

BIASES = [f"{name}.bias" for name in PROJECTIONS]
MAX_NAMES_IN_ERROR = 8  # most layer names in an error
MAX_UNLOADED_LAYERS = 1000  # bounds the memory that callers can fill by creating and unloading layers


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """A loaded layer with its name, its fingerprint, and the cache of its prepared requests."""

    name: str
    spec: LayerSpec
    fingerprint: str
    attention: MultiHeadAttention
    score_deviation: float = 1.0  # standard deviation of its scores before scale, for inputs of unit variance
    origin: str | None = None  # where the weights are from, if that is known
    prepared_cache: PreparedCache = field(default_factory=PreparedCache, compare=False, repr=False)

    def arrays(self) -> dict[str, Array]:
        """The weights by canonical name, on the CPU."""
        return {name: numpy_of(self.attention.weights[name].cpu()) for name in self.spec.weight_shapes()}


@dataclass(frozen=True, slots=True)
class UnloadedLayer:
    """A layer that was unloaded. `weights` is None if they can be drawn from the spec or read from the folder."""

    name: str
    spec: LayerSpec
    fingerprint: str
    weights: Mapping[str, Array] | None = None
    origin: str | None = None


L = TypeVar("L", LoadedLayer, UnloadedLayer, LoadedLayer | UnloadedLayer)


class LayerRegistry:
    """Name -> layer. Only one thread may change it; `make` is slow, uses no shared state, and may run in any thread."""

    def __init__(self, device: torch.device, limits: ServingLimits) -> None:
        self.device, self.limits = device, limits
        self._layers: dict[str, LoadedLayer] = {}
        self.get = self._layers.get  # the layer of a name, or None
        self._unloaded: dict[str, UnloadedLayer] = {}
        self._parameters: dict[str, int] = {}  # of each layer whose weights are in memory
        self._all_parameters = 0

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    def find(self, name: str, at: str = "") -> LoadedLayer:
        """The layer of that name. `at`: where the body has the name.

        Raises LayerUnloaded, or LayerNotFound with the existing names.
        """
        if (layer := self._layers.get(name)) is None:
            if name in self._unloaded:
                raise LayerUnloaded(f'the layer "{name}" is unloaded; POST /v2/repository/models/{name}/load makes it available')
            raise LayerNotFound.where(at, f"a loaded layer ({self._named()})", f'"{name}"{did_you_mean(name, self._layers)}')
        return layer

    def require_room_for_unloaded(self) -> None:
        """Raises LayerConflict if no more layers may be unloaded."""
        if len(self._unloaded) >= MAX_UNLOADED_LAYERS:
            raise LayerConflict(f"{MAX_UNLOADED_LAYERS} layers are unloaded, which is the most; DELETE /layers/{{name}} removes one")

    def unloaded(self, name: str) -> UnloadedLayer | None:
        """The unloaded layer of that name, or None."""
        return self._unloaded.get(name)

    def with_unloaded(self) -> list[LoadedLayer | UnloadedLayer]:
        """All layers, including the unloaded ones, in any order."""
        return [*self._layers.values(), *self._unloaded.values()]

    def layer_info(self, name: str) -> LayerInfo:
        """Description of one layer, unloaded or not, with its steps. Raises LayerNotFound."""
        layer = self._unloaded.get(name) or self.find(name)
        return self.info_of(layer).model_copy(update={"steps": formulas(layer.spec.program)})

    def info_of(self, layer: LoadedLayer | UnloadedLayer) -> LayerInfo:
        return LayerInfo(
            name=layer.name,
            state="ready" if isinstance(layer, LoadedLayer) else "unloaded",
            spec=layer.spec,
            fingerprint=layer.fingerprint,
            parameters=layer.spec.num_parameters,
            device=str(self.device),
            origin=layer.origin,
        )

    def _named(self) -> str:
        """The first MAX_NAMES_IN_ERROR layer names and the number of the others, for an error."""
        names = sorted(self._layers)
        more = [f"and {len(names) - MAX_NAMES_IN_ERROR} more"] if len(names) > MAX_NAMES_IN_ERROR else []
        return ", ".join((*names[:MAX_NAMES_IN_ERROR], *more)) or "none"

    def all(self) -> list[LoadedLayer]:
        """The loaded layers, in any order."""
        return list(self._layers.values())

    def one(self) -> LoadedLayer | None:
        """A layer, for checks of the device; None if there is none."""
        return next(iter(self._layers.values()), None)

    def check_size(self, name: str, spec: LayerSpec) -> None:
        """Raises TooLarge if the layer exceeds a limit, alone or with the others. Allocates nothing."""
        limits, count = self.limits, spec.num_parameters
        if name not in self._layers and len(self._layers) >= limits.max_layers:
            raise TooLarge.where("", f"at most {limits.max_layers} layers (max_layers)", "one more")
        if count > limits.max_layer_parameters:
            raise TooLarge.where("/spec", f"at most {limits.max_layer_parameters} parameters (max_layer_parameters)", str(count))
        others = self._all_parameters - self._parameters.get(name, 0)
        if others + count > limits.max_total_parameters:
            expected = f"at most {limits.max_total_parameters} parameters in all layers (max_total_parameters)"
            raise TooLarge.where("/spec", expected, f"{count} in addition to {others} in other layers")
        if spec.widest > limits.max_layer_width:  # without projections, a layer of any width has no parameters
            raise TooLarge.where("/spec", f"widths of at most {limits.max_layer_width} (max_layer_width)", str(spec.widest))

    def make(
        self,
        name: str,
        spec: LayerSpec,
        weights: Mapping[str, Array] | None = None,
        origin: str | None = None,
        in_tensors: Translate | None = None,
    ) -> LoadedLayer:
        """A layer with these weights, by default drawn as the spec says. Raises InvalidRequest if they do not fit the spec, translated by
        `in_tensors`."""
        if weights is None:
            tensors = {key: at_cache_line(cast(key, array, spec.dtype)) for key, array in draw_weights(spec).items()}
        else:
            with translating(in_tensors):
                tensors = _cast_weights(spec, weights)
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}  # aligned; a view would keep the whole body in memory
        arrays = {key: numpy_of(tensor) for key, tensor in tensors.items()}
        moved = {key: tensor.to(self.device) for key, tensor in tensors.items()}
        attention = MultiHeadAttention(spec, moved, self.device)
        return LoadedLayer(name, spec, fingerprint(spec, arrays), attention, score_deviation(spec, tensors), origin)

    def put(self, layer: LoadedLayer) -> bool:
        """Add or replace the layer. Returns whether the name is new."""
        new = layer.name not in self._layers and layer.name not in self._unloaded
        self._unloaded.pop(layer.name, None)
        self._layers[layer.name] = layer
        self._count(layer.name, layer.spec.num_parameters)
        return new

    def unload(self, layer: UnloadedLayer) -> None:
        """Replace the layer of that name by an unloaded one."""
        self._layers.pop(layer.name, None)
        self._unloaded[layer.name] = layer
        self._count(layer.name, 0 if layer.weights is None else layer.spec.num_parameters)

    def remove(self, name: str) -> None:
        """Remove the layer of that name, unloaded or not."""
        self._layers.pop(name, None)
        self._unloaded.pop(name, None)
        self._count(name, 0)

    def _count(self, name: str, parameters: int) -> None:
        """Count the parameters of the layer of that name; 0 if its weights are not in memory."""
        self._all_parameters += parameters - self._parameters.pop(name, 0)
        if parameters:
            self._parameters[name] = parameters


def by_name(layers: Iterable[L]) -> list[L]:
    """The layers by their names, layer-2 before layer-10. To be called in a thread: the work grows with the number of layers."""
    return sorted(layers, key=lambda layer: (natural(layer.name), layer.name))


def _cast_weights(spec: LayerSpec, weights: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    shapes = spec.weight_shapes()
    missing = {name: f"a tensor of shape {list(shape)}" for name, shape in shapes.items() if name not in weights}
    fitting = f', or "bias": {json.dumps(biases_of(weights))} in the spec'
    problems = [
        Problem(f"/weights/{name}", expected + (fitting if name in BIASES else ""), "nothing") for name, expected in missing.items()
    ]
    problems += [
        Problem("/weights" + pointer([name]), one_of(shapes), describe_value(name) + did_you_mean(name, shapes))
        for name in weights
        if name not in shapes
    ]
    problems += [
        Problem(f"/weights/{name}", f"shape {list(shapes[name])}", f"shape {list(array.shape)}")
        for name, array in weights.items()
        if name in shapes and array.shape != shapes[name]
    ]
    if problems:
        raise InvalidRequest(problems=problems)
    return {name: cast(f"weights/{name}", weights[name], spec.dtype) for name in shapes}
