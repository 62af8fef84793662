"""Models of transformers whose attention a service computes, with the weights of every layer and head.

    attention = register(client)                  # or register(client, layers=[0, 5])
    model = AutoModel.from_pretrained(NAME, attn_implementation="attend")
    with torch.no_grad():
        model(**inputs)
    attention.weights[3][-1]                      # of layer 3 in its last call: [batch, heads, queries, keys]

A model with this implementation sends its projected queries, keys and values, after norms and RoPE, with its mask as a bias: the service
adds scores, softmax and weighted values. Fused kernels, which transformers chooses otherwise, return no weights.
"""

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attend.client.client import Client
from attend.client.responses import AttendResult
from attend.errors import AttendError, LayerNotFound
from attend.tensors import Array
from attend.wire.client_codec import from_torch

NAME, REPLACED = "attend", "attend-replaced"  # of implementations of attention
REFUSED = {  # arguments of transformers that change attention and have no counterpart here
    "sinks": "sinks of each query",
    "head_mask": "head masks",
    "cache": "paged caches",
}


# Computes a call: the module, the fields of the request, and the shapes that `pattern` and `head_outputs` of it may have
Compute = Callable[[nn.Module, Mapping[str, Any], Mapping[str, tuple[int, ...]]], AttendResult]


class Attention:
    """Attention in transformers' calling convention, for float64 models in float64, for others in float32."""

    def __init__(
        self, client: Client, layers: Container[int] | None = None, compute: Compute | None = None, calls_per_module: int = 1
    ) -> None:
        """`layers`: indices of the layers that the service computes, all if None; the others stay local and have no weights.

        `compute` takes the place of `attend`, which by default computes each call; the weights are then not kept here.
        `calls_per_module`: of how many calls of a module the weights are kept; more than 1 where layers share one, as in ALBERT.
        """
        self.client, self.layers, self.compute, self.calls_per_module = client, layers, compute or self._keep, calls_per_module
        self._calls: WeakKeyDictionary[nn.Module, deque[Array]] = WeakKeyDictionary()  # the module that was called last is the last
        self._layers: dict[str, tuple[dict[str, Any], dict[str, Tensor] | None]] = {}  # name -> spec and weights
        self._created: set[str] = set()  # layers that the service did not have before

    @property
    def weights(self) -> dict[int, list[Array]]:
        """Of each layer by its index, the weights of the last call of each module, in the order of these calls. An encoder-decoder has
        several modules of an index. Modules without an index have -1."""
        weights: dict[int, list[Array]] = {}
        for module, calls in self._calls.items():
            weights.setdefault(_index(module), []).extend(calls)
        return weights

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`query` [b, h, q, d], `key` [b, kv heads, k, d], `value` [b, kv heads, k, dv], `attention_mask` added to the scores, or bool;
        `more` may have the keys that an indexer selects, and a sink of each head, `s_aux` [h].

        Returns the output [b, q, h, dv] and the weights [b, h, q, k]. Raises ValueError for what the service does not compute (head
        masks, paged caches, dropout, gradients), and what `Client` raises.
        """
        attention_mask = _with_selected_keys(module, query, key, attention_mask, more)
        if self.layers is not None and _index(module) not in self.layers:
            attend_here = _local_attention(module)
            local: tuple[Tensor, Tensor | None] = attend_here(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **{**more, "is_causal": False}
            )
            return local
        if refused := [what for name, what in REFUSED.items() if more.get(name) is not None]:
            raise ValueError(f'attn_implementation="{NAME}" does not compute {", ".join(refused)}')
        if dropout or (torch.is_grad_enabled() and query.requires_grad):
            raise ValueError(f'attn_implementation="{NAME}" has no dropout and no gradients: use model.eval() and torch.no_grad()')
        biases = [_bias(mask) for mask in (attention_mask, more.get("position_bias")) if mask is not None]
        fields = {
            "query": _merge_heads(query),
            "key": _merge_heads(key),
            "value": _merge_heads(value),
            "layer": self._layer(query, key, value, more.get("s_aux")),
            "bias": sum(biases[1:], biases[0]) if biases else None,
            "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
            "softcap": more.get("softcap") or 0.0,
            "outputs": ["head_outputs", "attention_weights"],
        }
        rows = tuple(query.shape[:3])
        reply = self.compute(module, fields, {"pattern": (*rows, key.shape[2]), "head_outputs": (*rows, value.shape[3])})
        output, weights = (torch.from_numpy(array).to(query) for array in (reply.head_outputs, reply.attention_weights))
        return output.transpose(1, 2).contiguous(), weights

    def attend(self, fields: Mapping[str, Any]) -> AttendResult:
        """The reply of the service. Its layer is put again if the service has lost it, as after a restart. Raises what `Client` raises."""
        try:
            return self.client.attend(**fields)
        except LayerNotFound:
            self._put(fields["layer"])
            return self.client.attend(**fields)

    def remove_layers(self) -> None:
        """Remove the layers that the service did not have before, as far as it can be reached."""
        for name in self._created:
            with suppress(AttendError):
                self.client.delete_layer(name)
        self._created.clear()
        self._layers.clear()

    def _keep(self, module: nn.Module, fields: Mapping[str, Any], _: object) -> AttendResult:
        """The reply of the service, whose weights are kept."""
        reply = self.attend(fields)
        calls = self._calls.pop(module, deque[Array](maxlen=self.calls_per_module))
        calls.append(reply.attention_weights)
        self._calls[module] = calls
        return reply

    def _layer(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> str:
        """The name of a layer without projections of these shapes, with these sinks [h], which is put when it is first used."""
        heads, kv_heads, head_dim, value_head_dim = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
        name = f"transformers-{heads}-{kv_heads}-{head_dim}-{value_head_dim}"
        spec: dict[str, Any] = {
            "d_model": heads * head_dim,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "value_head_dim": value_head_dim,
            "projections": False,
        }
        weights = None
        if query.dtype == torch.float64:
            name, spec["dtype"] = f"{name}-float64", "float64"
        if sinks is not None:
            weights = {"sinks": to_float(sinks)}
            name, spec["sinks"] = f"{name}-{hashlib.sha256(from_torch(weights['sinks']).tobytes()).hexdigest()[:16]}", True
        if name not in self._layers:
            self._layers[name] = spec, weights
            self._put(name)
        return name

    def _put(self, name: str) -> None:
        """Put a layer into the service."""
        try:
            self.client.layer(name)
        except LayerNotFound:
            self._created.add(name)
        self.client.put_layer(name, *self._layers[name])


def register(client: Client, layers: Container[int] | None = None, *, calls_per_module: int = 1) -> Attention:
    """Make `attn_implementation="attend"` compute the attention of these layers, all if None, by the client's service.

    A model whose attention is code of its own, such as BLOOM, is refused with ValueError when it is made. Of how many calls of a module
    the weights are kept is `calls_per_module`: more than 1 where layers share a module, as in ALBERT.
    """
    attention = Attention(client, layers, calls_per_module=calls_per_module)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)  # without it, transformers passes no mask
    if PreTrainedModel.get_correct_attn_implementation is not _checked_implementation:
        PreTrainedModel.get_correct_attn_implementation = _checked_implementation  # type: ignore[method-assign, assignment]  # replaced
    return attention


_transformers_check = PreTrainedModel.get_correct_attn_implementation


def _checked_implementation(model: PreTrainedModel, requested: str | None, *more: Any, **options: Any) -> Any:
    """transformers' check of the implementation that a model is made with, which does not ask whether the model calls one: BLOOM would
    ignore it, and Falcon has no class for it. Raises ValueError also for such a model."""
    if requested == NAME and not takes_functions(model):
        expected = f'attn_implementation="{NAME}" needs a model that calls the attention functions of transformers'
        raise ValueError(f"{expected}; the attention of {type(model).__name__} is code of its own")
    return _transformers_check(model, requested, *more, **options)


def takes_functions(model: Any) -> bool:
    """Whether the model calls attention functions of transformers, as far as its class tells."""
    return bool(getattr(model, "_can_set_attn_implementation", lambda: True)())


class AttentionCall(NamedTuple):
    """A call of an attention function: the mask [b or 1, h or 1, q, k], added to the scores or bool, and the weights [b, h, q, k]."""

    mask: Array | None
    weights: Array | None
    keys: int


class EagerAttention:
    """The eager attention of each module's own model. `calls`: those of each module, in order."""

    def __init__(self, adds_booleans: bool = False) -> None:
        """`adds_booleans`: masks of booleans are added to the scores as numbers, as eager attention does; else True is visible, as to
        fused kernels."""
        self.adds_booleans = adds_booleans
        self.calls: dict[nn.Module, list[AttentionCall]] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As `Attention`."""
        attention_mask = _with_selected_keys(module, query, key, attention_mask, more)
        added = attention_mask
        if added is not None and added.dtype == torch.bool and not self.adds_booleans:
            added = torch.zeros(added.shape, dtype=query.dtype, device=query.device).masked_fill(~added, torch.finfo(query.dtype).min)
        output, weights = _local_attention(module)(module, query, key, value, added, **{**more, "is_causal": False})
        self.calls.setdefault(module, []).append(AttentionCall(_array(attention_mask), _array(weights), key.shape[2]))
        return output, weights


@contextmanager
def replaced_attention(model: PreTrainedModel, attention: Callable[..., tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """In the `with` block, this function computes the attention of the model, if its family takes one; else its eager code does.

    The model then has the implementation that it had before.
    """
    before, outer = model.config._attn_implementation, ALL_ATTENTION_FUNCTIONS.get(REPLACED, sdpa_attention_forward)
    AttentionInterface.register(REPLACED, attention)
    AttentionMaskInterface.register(REPLACED, eager_mask)
    try:
        try:
            model.set_attn_implementation(REPLACED)
        except ValueError:  # an older family, without attention functions
            model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface.register(REPLACED, outer)  # of a block around this one


def _local_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The eager attention of the module's own model, which has all that the model needs, such as soft caps; else torch's fused kernels."""
    model = sys.modules[type(module).__module__]
    return getattr(model, "eager_attention_forward", sdpa_attention_forward)


def _with_selected_keys(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, more: Mapping[str, Any]) -> Tensor | None:
    """The mask without the keys that the module's indexer did not select, which models leave to fused kernels: `indices` [b, q, n] of keys,
    or `block_indices` of blocks of keys."""
    (b, _, queries, _), keys, indices, blocks = query.shape, key.shape[2], more.get("indices"), more.get("block_indices")
    if blocks is not None:
        positions = torch.arange(keys - queries, keys, device=key.device) if more.get("position_ids") is None else more["position_ids"]
        own: Tensor = module.indexer.build_block_mask(blocks, mask, keys, query.dtype, query.device, positions.expand(b, queries))
        return own
    if indices is None:
        return mask
    hidden = torch.ones((b, queries, keys), dtype=torch.bool, device=key.device).scatter(-1, indices.long(), False)[:, None]
    if mask is None or mask.dtype == torch.bool:
        return ~hidden if mask is None else mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _array(tensor: Tensor | None) -> Array | None:
    """The tensor in float32, or bool."""
    return None if tensor is None else from_torch(tensor.float() if tensor.is_floating_point() else tensor)


def _index(module: nn.Module) -> int:
    """The index of the module's layer; -1 if it has none."""
    index: int | None = getattr(module, "layer_idx", None)
    return -1 if index is None else index


def to_float(x: Tensor) -> Tensor:
    """The tensor without gradient in float32, or float64 if it is."""
    return x.detach() if x.dtype == torch.float64 else x.detach().float()


def _merge_heads(x: Tensor) -> Array:
    """[b, h, n, d] -> [b, n, h * d] in float32 or float64."""
    array: Array = to_float(x).transpose(1, 2).flatten(2).cpu().numpy()
    return array


def _bias(mask: Tensor) -> Array:
    """A mask as numbers that are added to the scores; of booleans, True is visible."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask.cpu(), -np.inf)
    array: Array = to_float(mask).cpu().numpy()
    return array
