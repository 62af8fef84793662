"""RemoteMultiheadAttention: a torch module with the interface of `nn.MultiheadAttention` that computes in a service.

    attention = RemoteMultiheadAttention(client, "default", batch_first=True)      # was: nn.MultiheadAttention(64, 8, batch_first=True)
    output, weights = attention(x, x, x, key_padding_mask=padding)

The weights are in the service, so the module has no parameters. Gradients of query, key and value come from a second request. Masks have
torch's meaning (True = blocked) and are translated.

torch's Transformer layers have a fast path that computes with the weights of their attention module instead of calling it. Here the weights
are placeholders with `__torch_function__`, which disables that path.
"""

from functools import cached_property
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attend.checkpoints import read_layer
from attend.client.client import Client
from attend.errors import InvalidRequest, LayerConflict
from attend.spec import LayerSpec
from attend.spec_parts import Biases
from attend.tensors import DATATYPES, Array
from attend.wire.client_codec import from_torch
from attend.wire.schemas.layers import LayerInfo

BFLOAT16 = DATATYPES["BF16"].numpy
SEEDS = 2**32  # number of seeds of dropout
WHERE = "the weights of a RemoteMultiheadAttention are in its service; use client.layer_weights(name)"


class _RemoteWeight:
    """A placeholder for weights. Every use raises an error that says where the weights are."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise TypeError(WHERE)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no {name}: {WHERE}")


PLACEHOLDER = _RemoteWeight()


class WrongMask(InvalidRequest, AssertionError):
    """A mask that torch's module refuses with an AssertionError."""


class WrongDtype(InvalidRequest, RuntimeError):
    """Tensors of another dtype than the layer, which torch's module refuses with a RuntimeError."""


class RemoteMultiheadAttention(nn.Module):
    """The call signature, return shapes and attributes of `nn.MultiheadAttention` over a layer of a service.

    It works inside `nn.TransformerEncoderLayer` and can be copied, and pickled like its client. Differences from torch: fully masked rows
    have zero weights, not NaN; only the output has gradients, and a gradient of the weights or of a mask is refused; no parameters.
    Raises what `Client` raises. Inputs must have the layer's dtype, except under autocast. Attributes are those of the layer in the last
    reply, or of the layer at the time they are first read.
    """

    bias_k = bias_v = None
    add_zero_attn = False

    def __init__(self, client: Client, layer: str = "default", *, batch_first: bool = False, dropout: float = 0.0) -> None:
        """`batch_first` as in torch: [b, n, width] rather than [n, b, width]; `dropout` on the weights, while training."""
        super().__init__()
        self.client, self.layer = client, layer
        self.batch_first, self.dropout = batch_first, dropout

    @classmethod
    def copy_of(cls, module: nn.MultiheadAttention, client: Client, layer: str) -> "RemoteMultiheadAttention":
        """Put the weights of a local module into the service as the layer `layer`, and return the remote module.

        Raises InvalidRequest for `add_bias_kv` and `add_zero_attn`, which the service does not have, and TypeError for other modules.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"expected a torch.nn.MultiheadAttention, got a {type(module).__name__}")
        if module.bias_k is not None or module.add_zero_attn:
            raise InvalidRequest.where("", "a module without add_bias_kv and add_zero_attn", "one with add_bias_kv or add_zero_attn")
        tensors = {name: from_torch(tensor) for name, tensor in module.state_dict().items()}
        spec, weights = read_layer(tensors, layout="torch_mha", spec={"num_heads": module.num_heads})
        client.put_layer(layer, spec, weights)
        remote = cls(client, layer, batch_first=module.batch_first, dropout=module.dropout)
        return remote.train(module.training)

    @cached_property
    def _document(self) -> LayerInfo:
        return self.client.layer(self.layer)

    @property
    def spec(self) -> LayerSpec:
        """The layer's spec, fetched on first use, and again after a reply shows that the layer was replaced."""
        return self._document.spec

    def _forget_replaced_layer(self, fingerprint: str) -> None:
        if "_document" in self.__dict__ and self._document.fingerprint != fingerprint:
            self.__dict__.pop("_document", None)

    embed_dim = property(lambda self: self.spec.d_model)
    num_heads = property(lambda self: self.spec.num_heads)
    head_dim = property(lambda self: self.spec.head_dim)
    kdim = property(lambda self: self.spec.key_dim)
    vdim = property(lambda self: self.spec.value_dim)
    _qkv_same_embed_dim = property(lambda self: self.kdim == self.embed_dim == self.vdim)
    in_proj_weight = property(lambda self: PLACEHOLDER if self._qkv_same_embed_dim else None)
    q_proj_weight = property(lambda self: None if self._qkv_same_embed_dim else PLACEHOLDER)
    k_proj_weight = v_proj_weight = q_proj_weight
    in_proj_bias = property(lambda self: PLACEHOLDER if self._biased("query") else None)
    out_proj = property(lambda self: SimpleNamespace(weight=PLACEHOLDER, bias=PLACEHOLDER if self._biased("output") else None))

    def _biased(self, projection: str) -> bool:
        bias = self.spec.bias
        return bool(getattr(bias, projection) if isinstance(bias, Biases) else bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`output`, and with `need_weights` the weights [b, q, k] or per head [b, h, q, k]; without b for an unbatched query.

        `is_causal` is torch's hint that `attn_mask` is causal. Raises InvalidRequest for the hint without a mask, nested tensors, integer
        masks and other dtypes than the layer's; the backward pass raises it for a gradient of the weights (use `detach()`).
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise InvalidRequest.where("/query", "padded tensors and a key_padding_mask", "a nested tensor")
        _check_masks(key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        if is_causal and attn_mask is None:
            raise InvalidRequest.where("/attn_mask", "an attn_mask with the hint is_causal", "none")
        is_transposed = query.ndim == 3 and not self.batch_first
        batch = None if query.ndim == 2 else query.shape[1 if is_transposed else 0]
        if is_causal and key_padding_mask is None and not need_weights:  # as torch does: the hint replaces the mask
            fields: dict[str, Any] = {"causal": True, "query_offset": 0}
        else:
            fields = masks(key_padding_mask, attn_mask, batch)
        if self.training and self.dropout:
            fields["dropout"] = {"p": self.dropout, "seed": int(torch.randint(SEEDS, ()))}
        fields |= {"layer": self.layer, "outputs": ["output", "attention_weights"] if need_weights else ["output"]}
        selection = {"select": {"average": True}} if need_weights and average_attn_weights else {}
        inputs = tuple(x.transpose(0, 1) if is_transposed else x for x in (query, query if key is query else key, value))
        output, *weights = _Attend.apply(self, fields, selection, *inputs)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return output.transpose(0, 1) if is_transposed else output, weights[0] if need_weights else None

    def extra_repr(self) -> str:
        return f"layer={self.layer!r} at {self.client.base_url}, batch_first={self.batch_first}, dropout={self.dropout}"


class _Attend(torch.autograd.Function):
    """One request forward, and one backward for the needed gradients. The service keeps nothing in between."""

    @staticmethod
    def forward(
        ctx: Any, remote: RemoteMultiheadAttention, fields: dict[str, Any], selection: dict[str, Any], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        result = remote.client.attend(*inputs, **{**fields, **selection})
        remote._forget_replaced_layer(result.layer.fingerprint)
        arrays = [_tensor(array) for array in result.values()]
        _check_dtype(inputs, arrays[0].dtype)  # the dtype of the layer
        outputs = tuple(array.to(inputs[0]) for array in arrays)
        ctx.client, ctx.fields, ctx.layer = remote.client, fields, result.layer
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_weights: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if of_weights is not None and of_weights.any():
            got = "a gradient of the attention weights, which the service does not compute; detach() them"
            raise InvalidRequest.where("/attention_weights", "a loss of the output alone", got)
        if gradient is None:
            return None, None, None, *(torch.zeros_like(x) for x in ctx.saved_tensors)
        names = ("query_gradient", "key_gradient", "value_gradient")
        needed = dict(zip(names, ctx.needs_input_grad[3:], strict=True))
        raw = {**ctx.fields, "outputs": [name for name in names if needed[name]], "output_gradient": gradient}
        result = ctx.client.attend(*ctx.saved_tensors, **raw)
        if result.layer != ctx.layer:
            raise LayerConflict(f'the layer "{ctx.layer.name}" was replaced between the call and its gradients')
        gradients = (_tensor(result[name]).to(x) if needed[name] else None for name, x in zip(names, ctx.saved_tensors, strict=True))
        return None, None, None, *gradients


def _check_masks(**masks: Tensor | None) -> None:
    """Raises WrongMask for an integer mask, which could be boolean or additive."""
    for name, mask in masks.items():
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise WrongMask.where(f"/{name}", "a mask of torch.bool (True = blocked) or of floats (added to the scores)", str(mask.dtype))


def _check_dtype(inputs: tuple[Tensor, ...], expected: torch.dtype) -> None:
    """Raises WrongDtype for an input of another dtype than the layer's. Under autocast all but float64 are cast, as in torch."""
    for name, x in zip(("query", "key", "value"), inputs, strict=True):
        cast = torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64
        if x.dtype != expected and not cast:
            raise WrongDtype.where(f"/{name}", f"{expected}, the dtype of the layer", str(x.dtype))


def masks(key_padding_mask: Tensor | None, attn_mask: Tensor | None, batch: int | None) -> dict[str, Any]:
    """torch's masks as fields of a request: booleans are blocked where True, floats are added to the scores.

    `key_padding_mask` is [b, k] (or [k]), `attn_mask` [q, k] or [b * h, q, k] (or [h, q, k]). Two float masks become one bias.
    """
    fields: dict[str, Any] = {}
    added: list[Array] = []
    for name, mask, block in (("key_padding_mask", key_padding_mask, "block_keys"), ("attn_mask", attn_mask, "block_mask")):
        if mask is None:
            continue
        if mask.requires_grad:
            raise InvalidRequest.where(f"/{name}", "a mask without gradient", "one that requires a gradient")
        if name == "attn_mask" and mask.ndim == 3 and batch is not None:
            mask = mask.view(batch, -1, *mask.shape[1:])  # [b, h, q, k]
        if mask.dtype == torch.bool:
            fields[block] = mask
            continue
        if name == "key_padding_mask":
            mask = mask[..., None, :] if batch is None else mask[:, None, None, :]
        added.append(from_torch(mask.double()))
    if added:
        fields["bias"] = added[0] if len(added) == 1 else sum(added[1:], added[0])
    return fields


def _tensor(array: Array) -> Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
