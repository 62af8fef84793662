"""The projections of a layer: its weights, laid out for few products; heads split, normed and turned. Everything before and after the
attention itself. Knows no mask but the positions that RoPE needs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.initialise import torch_dtype
from service.attention.positions import rotate
from service.attention.products import choose, linear
from service.spec import PROJECTIONS, LayerSpec


class Projections:
    """A layer's weights on one device, by canonical name, and what they do. Immutable."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec, self.weights, self.dtype = spec, dict(weights), torch_dtype(spec.dtype)
        if not spec.projections:
            return
        if spec.d_model == spec.key_dim == spec.value_dim and self._pack("query", "key", "value"):
            self._pack("key", "value", packed_in="query+key+value")
        elif spec.key_dim == spec.value_dim:
            self._pack("key", "value")

    def _pack(self, *names: str, packed_in: str = "") -> bool:
        """Lays the weights of projections that may share an input side by side, so that one product serves them all.

        The single weights become views of the packed one; nothing is held twice. False, and nothing done, where only some have a bias.
        """
        if len({self.spec.has_bias(name) for name in names}) > 1:
            return False
        for part in ("weight", "bias"):
            tensors = [self.weights[f"{name}.{part}"] for name in names if f"{name}.{part}" in self.weights]
            if tensors:
                rows = sum(map(len, tensors))
                packed = self.weights[f"{packed_in}.{part}"][-rows:] if packed_in else torch.cat(tensors)
                self.weights["+".join(names) + f".{part}"] = packed
                views = torch.split(packed, [len(tensor) for tensor in tensors])
                self.weights |= {f"{name}.{part}": view for name, view in zip(names, views, strict=True)}
        return True

    def tune(self) -> None:
        """Chooses the products for this layer's weights. Slow the first time a shape is seen; not while another call computes."""
        for name, weight in self.weights.items():
            if name.endswith(".weight") and weight.ndim == 2:
                choose(weight)

    def project(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Query [batch, heads, q, head_dim], key and value [batch, kv heads, k, …]: projected, split, normed, and turned by RoPE."""
        spec = self.spec
        query, key, value = self._split(call)
        if spec.qk_norm is not None:
            query, key = (self._norm(x, f"{name}_norm.weight") for name, x in (("query", query), ("key", key)))
        if spec.rope is not None:
            query = rotate(query, call.masks.positions, spec.rope)
            key = rotate(key, torch.arange(key.shape[2], device=key.device)[None], spec.rope)
        return query, key, value

    def _split(self, call: Call) -> tuple[Tensor, ...]:
        """Projected and split into heads, [batch, heads, n, …]: one product where inputs are the same and weights side by side."""
        spec, kv = self.spec, self.spec.num_kv_heads
        shapes = ((spec.num_heads, spec.head_dim), (kv, spec.head_dim), (kv, spec.value_head_dim))
        if call.query is call.key is call.value and "query+key+value.weight" in self.weights:
            together = self._linear(call.query, "query+key+value")
            if shapes[0] == shapes[1] == shapes[2]:
                return together.view(*together.shape[:2], 3, *shapes[0]).permute(2, 0, 3, 1, 4).unbind(0)
            projected = torch.split(together, [heads * width for heads, width in shapes], -1)
        else:
            projected = self._projected(call) if spec.projections else (call.query, call.key, call.value)
        return tuple(x.view(*x.shape[:2], *shape).transpose(1, 2) for x, shape in zip(projected, shapes, strict=True))

    def _projected(self, call: Call) -> tuple[Tensor, ...]:
        """Query, key and value side by side, [batch, n, heads * …]; one product for keys and values where their inputs are the same."""
        if call.value is call.key and "key+value.weight" in self.weights:
            widths = [self.weights[f"{name}.weight"].shape[0] for name in PROJECTIONS[1:3]]
            return (self._linear(call.query, "query"), *torch.split(self._linear(call.key, "key+value"), widths, -1))
        return tuple(self._linear(x, name) for name, x in zip(PROJECTIONS, (call.query, call.key, call.value), strict=False))

    def _norm(self, x: Tensor, weight: str) -> Tensor:
        """RMS norm (Zhang & Sennrich 2019) or layer norm without bias, over head_dim, in float32 or better."""
        assert self.spec.qk_norm is not None
        accumulate = torch.float64 if self.dtype == torch.float64 else torch.float32
        x = x.to(accumulate)
        if self.spec.qk_norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.qk_norm.eps)
        return (x * self.weights[weight].to(accumulate)).to(self.dtype)

    def project_back(self, concatenated: Tensor) -> Tensor:
        """[batch, queries, heads * value_head_dim] -> [batch, queries, output_dim]; as it is where nothing is projected."""
        return self._linear(concatenated, "output") if self.spec.projections else concatenated

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
