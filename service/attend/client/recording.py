"""Records what the attention layers of a model get in one pass: a model of transformers, or any torch module with layers of a known layout.

    layers, skipped = attention_layers(model)           where the layers are, their specs and weights
    with Recorder(model, layers) as recorder:
        recorder.run(inputs)
    recorder.calls(layers[3])                           inputs, mask, weights and output of each call of a layer

The table of families and layouts says where a layer's inputs are: they go into the modules that have its projections.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from attend.checkpoints import layers_in, read_layer, read_model_layer
from attend.checkpoints.detection import select
from attend.checkpoints.families import number_of_layers
from attend.checkpoints.layout import Fields, Weights
from attend.checkpoints.model import describe, parts_of
from attend.client.model_calls import Call
from attend.client.model_inputs import check_lengths
from attend.client.remote import masks
from attend.errors import InvalidRequest
from attend.spec import LayerSpec
from attend.tensors import Array
from attend.wire.client_codec import from_torch

PROJECTED = {  # input of a layer -> the weights that it is multiplied with, one of which a layout has
    "query": ("query_down.weight", "query.weight", "qkv.weight"),
    "key": ("key.weight", "kv.weight", "qkv.weight", "down.weight"),
    "value": ("value.weight", "kv.weight", "qkv.weight", "down.weight"),
    "output": ("output.weight",),
}
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")  # attributes of modules


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """An attention layer of a model: its place, its spec and weights, and the modules that its inputs go into and its output comes from."""

    part: str  # encoder, decoder, cross, …; "" in a torch module
    number: int
    spec: LayerSpec
    weights: Weights
    modules: Mapping[str, nn.Module]  # by query, key, value, output
    causal: bool | None = None  # as its family has it; None: unknown


def attention_layers(
    model: Any, layout: str | None = None, given: Mapping[str, Any] | None = None
) -> tuple[list[AttentionLayer], dict[str, str]]:
    """The model's attention layers; and of those that the service cannot compute, by name, why.

    A model of transformers is read by its config. Of other modules, layers are found by the names of their parameters; `layout` is needed
    where these fit several, and `given` has fields of their specs. Raises InvalidRequest if there is no layer.
    """
    if not isinstance(model, nn.Module):
        expected = "a model, as AutoModel.from_pretrained(NAME) returns it, or another torch module"
        raise InvalidRequest.where("/model", expected, f"the text {model!r}" if isinstance(model, str) else f"a {type(model).__name__}")
    tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor) and tensor.is_floating_point()}
    by_config = hasattr(model, "set_attn_implementation")
    found = _by_config(model, tensors) if by_config else _by_names(model, tensors, layout, given or {})
    layers, skipped = [], {}
    for name, layer in found:
        if isinstance(layer, InvalidRequest):
            skipped[name] = str(layer)
        else:
            layers.append(layer)
    if not layers:
        reasons = "; ".join(dict.fromkeys(skipped.values())) or "none whose tensors have names of a known layout"
        raise InvalidRequest.where("", "a model with attention layers that the service computes", reasons)
    return layers, skipped


def _by_config(model: Any, tensors: Mapping[str, Tensor]) -> list[tuple[str, AttentionLayer | InvalidRequest]]:
    """The layers that the config describes, by part and number. The table of families has the names of saved models."""
    config = json.loads(model.config.to_json_string())
    found: list[tuple[str, AttentionLayer | InvalidRequest]] = []
    as_saved: dict[str, Tensor] | None = None
    for part, (section, row) in parts_of(config).items():
        for number in range(number_of_layers(row, section)):
            try:
                described = describe(config, number, part)
                try:
                    names = described.tensors(tensors)
                except InvalidRequest:  # the model has other names than its file
                    as_saved = _as_saved(model, tensors) if as_saved is None else as_saved
                    names = described.tensors(as_saved)
                stored = tensors if as_saved is None else {**tensors, **as_saved}
                own = {name: _array(stored[name]) for name in names}
                fields, weights = read_model_layer(own, config, number, part)
                parameters = {role: _parameter(name, stored[name], tensors) for role, name in described.find(own).names.items()}
                modules = _modules(model, parameters)
            except InvalidRequest as refusal:
                found.append((f"{part} {number}", refusal))
                continue
            causal = row.causal or (part == "encoder" and bool(config.get("is_decoder")))  # BERT's layers may be those of a decoder
            found.append((f"{part} {number}", AttentionLayer(part, number, LayerSpec.model_validate(fields), weights, modules, causal)))
    return found


def _as_saved(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the names that `save_pretrained` would write; {} for a version of transformers in which all are the same."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {}
    return dict(revert_weight_conversion(model, dict(tensors)))


def _parameter(name: str, saved: Tensor, tensors: Mapping[str, Tensor]) -> str:
    """The name in the model of a tensor of its file; of one that is several in the model, side by side, the first of them."""
    if name in tensors:
        return name
    candidates = [own for own, tensor in tensors.items() if tensor.shape[1:] == saved.shape[1:] and len(tensor) <= len(saved)]
    same = next((own for own in candidates if tensors[own].data_ptr() == saved.data_ptr()), None)
    return same or next((own for own in candidates if torch.equal(tensors[own], saved[: len(tensors[own])])), name)


def _by_names(
    model: nn.Module, tensors: Mapping[str, Tensor], layout: str | None, given: Mapping[str, Any]
) -> list[tuple[str, AttentionLayer | InvalidRequest]]:
    """The layers that have the names of a known layout."""
    found: list[tuple[str, AttentionLayer | InvalidRequest]] = []
    for number, prefix in enumerate(dict.fromkeys(prefix for name, prefix in layers_in(tensors) if layout in (None, name))):
        try:
            own = {name: _array(tensor) for name, tensor in tensors.items() if f"{name}.".startswith(f"{prefix}." if prefix else "")}
            names = select(own, layout, prefix).names
            spec: Fields = {**_heads(model.get_submodule(prefix)), **given}
            fields, weights = read_layer(own, layout=layout, prefix=prefix, spec=spec)
            layer = AttentionLayer("", number, LayerSpec.model_validate(fields), weights, _modules(model, names))
        except InvalidRequest as refusal:
            found.append((prefix, refusal))
        else:
            found.append((prefix, layer))
    return found


def _heads(module: nn.Module) -> Fields:
    return next(({"num_heads": getattr(module, name)} for name in HEADS if type(getattr(module, name, None)) is int), {})


def _modules(model: nn.Module, names: Mapping[str, str]) -> dict[str, nn.Module]:
    """The module of each input's projection and of the output's. `names`: role -> name of the parameter."""
    roles = {name: next(role for role in choices if role in names) for name, choices in PROJECTED.items()}
    try:
        return {name: model.get_submodule(names[role].rpartition(".")[0]) for name, role in roles.items()}
    except AttributeError as missing:
        raise InvalidRequest.where("", "a model with the modules that its file describes", str(missing)) from None


class Recorder:
    """Hooks on the modules of layers; what passes through them while the `with` block runs the model."""

    def __init__(self, model: nn.Module, layers: list[AttentionLayer]) -> None:
        self.model, self.layers = model, layers
        self.inputs: dict[nn.Module, list[Array]] = {}  # of each call
        self.outputs: dict[nn.Module, list[Array]] = {}
        self.told: dict[nn.Module, list[Call]] = {}  # calls of nn.MultiheadAttention
        self.parents = {child: module for module in model.modules() for child in module.children()}
        self.pairs: dict[nn.Module, list[Tensor | None]] = {}  # of each call of a parent, [b or 1, 1, q, k]
        self.positions: list[Array] = []  # ids that RoPE rotates by: [b, n], and of several axes [axes, b, n] or [n, axes]
        self.attention: Any = None  # of a model of transformers: its attention calls
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        modules = {module for layer in self.layers for module in layer.modules.values()}
        for module in modules:
            if isinstance(module, nn.MultiheadAttention):
                self._hook(module.register_forward_hook(self._keep_told, with_kwargs=True))
            else:
                self._hook(module.register_forward_pre_hook(self._keep_input, with_kwargs=True))
                self._hook(module.register_forward_hook(self._keep_output))
        for parent in {self.parents[query] for layer in self.layers if (query := layer.modules["query"]) in self.parents}:
            self._hook(parent.register_forward_pre_hook(self._keep_pairs, with_kwargs=True))
        for module in self.model.modules():
            if "Rotary" in type(module).__name__ or "Rope" in type(module).__name__:
                self._hook(module.register_forward_pre_hook(self._keep_positions, with_kwargs=True))
        if hasattr(self.model, "set_attn_implementation"):
            from attend.client.transformers import EagerAttention, replaced_attention

            self.attention = EagerAttention(adds_booleans=cast(Any, self.model).config._attn_implementation == "eager")
            self._stack.enter_context(replaced_attention(cast(Any, self.model), self.attention))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _hook(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def run(self, arguments: Mapping[str, Any]) -> None:
        """One pass of the model. The fast path of torch's encoders is off: it packs padded rows into nested tensors."""
        self._keep_positions(self.model, (), arguments)  # for models that rotate by them without a module of their own
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            one_pass(self.model, arguments)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    def calls(self, layer: AttentionLayer) -> list[Call]:
        """The calls of a layer, in order. Layers that share their modules share the calls.

        Raises InvalidRequest if a call has keys that are not rows of this pass.
        """
        query = layer.modules["query"]
        if isinstance(query, nn.MultiheadAttention):
            return self.told.get(query, [])
        series = [self.inputs.get(layer.modules[name], []) for name in ("query", "key", "value")]
        calls = [Call(dict(zip(("query", "key", "value"), arrays, strict=True))) for arrays in zip(*series, strict=False)]
        for call, output in zip(calls, self.outputs.get(layer.modules["output"], []), strict=False):
            call.output = output
        for call, pairs in zip(calls, self.pairs.get(self.parents.get(query, self.model), []), strict=False):
            is_of_rows = pairs is not None and pairs.shape[2:] == (call.inputs["query"].shape[1], call.inputs["key"].shape[1])
            call.pairs = from_torch(pairs) if is_of_rows else None
        for call, seen in zip(calls, self._attention_calls(query), strict=False):
            rows, keys = call.inputs["key"].shape[1], seen.keys
            if keys != rows:
                raise InvalidRequest.where("/inputs", "a pass whose keys are rows of this pass", f"{keys} keys for {rows} rows")
            call.weights, call.mask, call.has_mask = seen.weights, seen.mask, True
        if layer.spec.coordinates:
            for call in calls:
                placed = [_coordinates(ids, layer.spec.coordinates.axes, *call.inputs["query"].shape[:2]) for ids in self.positions]
                fitting = [positions for positions in placed if positions is not None]
                if fitting and not np.array_equal(fitting[-1], np.arange(fitting[-1].shape[1])[None]):
                    call.inputs["positions"] = fitting[-1]
        return calls

    def _attention_calls(self, query: nn.Module) -> list[Any]:
        """Those of the attention function for the module that has this projection."""
        if self.attention is None:
            return []
        return next((calls for module, calls in self.attention.calls.items() if query in set(module.modules())), [])

    def _keep_input(self, module: nn.Module, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.inputs.setdefault(module, []).append(_rows(module, values[0] if values else next(iter(named.values()))))

    def _keep_output(self, module: nn.Module, _: Any, result: Any) -> None:
        self.outputs.setdefault(module, []).append(_rows(module, result))

    def _keep_pairs(self, module: nn.Module, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        tensors = (value for value in (*values, *named.values()) if isinstance(value, Tensor) and value.ndim == 4 and value.shape[1] == 1)
        self.pairs.setdefault(module, []).append(next(tensors, None))

    def _keep_told(self, module: nn.MultiheadAttention, values: tuple[Any, ...], named: Mapping[str, Any], result: Any) -> None:
        names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
        told = {**dict(zip(names, values, strict=False)), **named}
        batch_first = partial(_batch_first, batch_first=module.batch_first)
        rows = {name: batch_first(told[name]) for name in names[:3]}
        told_masks = masks(told.get("key_padding_mask"), told.get("attn_mask"), len(rows["query"]))
        fields = {name: from_torch(mask) if isinstance(mask, Tensor) else mask for name, mask in told_masks.items()}
        fields |= {name: mask[None] for name, mask in fields.items() if name != "block_keys" and mask.ndim == 2}  # of all items
        self.told.setdefault(module, []).append(Call(rows, batch_first(result[0]), fields=fields, has_mask=True))

    def _keep_positions(self, _: nn.Module, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        ids = named.get("position_ids", values[1] if len(values) > 1 else None)
        if isinstance(ids, Tensor) and ids.ndim > 1:
            self.positions.append(from_torch(ids.double()))


def _coordinates(ids: Array, axes: int, batch: int, rows: int) -> Array | None:
    """Position ids as the field `positions` of rows [b, n]: [b or 1, n], or [b or 1, n, axes]; None if they are those of other rows."""
    if axes > 1:
        placed = np.moveaxis(ids, 0, -1) if ids.ndim == 3 and len(ids) == 3 else ids.reshape(1, -1, ids.shape[-1])
        return placed if placed.shape[1:] == (rows, axes) else None
    return ids if ids.ndim == 2 and len(ids) in (1, batch) and ids.shape[1] == rows else None


def one_pass(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """What the model returns as it is used, without gradients and dropout. Raises InvalidRequest for more tokens than it has positions."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(**arguments)
    except (IndexError, RuntimeError, ValueError):  # the embeddings of positions end
        check_lengths(model, arguments)
        raise
    finally:
        model.train(training)


def as_arrays(arguments: Mapping[str, Any]) -> dict[str, Array]:
    """The tensors among a model's arguments."""
    return {name: from_torch(value) for name, value in arguments.items() if isinstance(value, Tensor)}


def _array(tensor: Tensor) -> Array:
    """A copy in float32."""
    return from_torch(tensor.float()).copy()


def _rows(module: nn.Module, value: Any) -> Array:
    """A tensor, or the first of several, as [b, n, width] in float32; n may be two axes, of a grid."""
    while isinstance(value, tuple | list):
        value = value[0]
    value = value.transpose(1, 2) if isinstance(module, nn.Conv1d) else value  # [b, width, n]
    rows: Array = from_torch(value.float()).reshape(len(value) if value.ndim > 2 else 1, -1, value.shape[-1]).copy()
    return rows


def _batch_first(value: Tensor, batch_first: bool) -> Array:
    """The rows of a torch attention module as [b, n, width]."""
    whole = value[None] if value.ndim == 2 else value if batch_first else value.transpose(0, 1)
    return from_torch(whole.float().contiguous()).copy()
