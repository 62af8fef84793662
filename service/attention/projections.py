"""The projections of a layer: linear maps, splitting into heads, norms and RoPE before attention, and the output projection after it."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from service.attention.call import Call
from service.attention.numerics import Linear, at_least_float32, torch_dtype
from service.attention.positions import rotate, rotate_halves, scale_queries
from service.spec import LayerSpec
from service.spec_parts import PROJECTIONS, Latent, QKNorm

Projected = tuple[Tensor, ...]  # query [b, h, q, head_dim], key [b, kv heads, k, head_dim], value [b, kv heads, k, value_head_dim]


class Projections:
    """The weights of a layer on one device, by canonical name, and their products."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec, self.weights, self.dtype = spec, weights, torch_dtype(spec.dtype)
        self._rotate = rotate if spec.differential is None else rotate_halves
        self._products: dict[str, Linear] = {}  # created when first needed, since each may store its weight a second time

    def project(self, call: Call) -> Projected:
        """Project, split into heads, norm and rotate: query [b, h, q, head_dim], key and value [b, kv heads, k, …]."""
        spec, norm = self.spec, self.spec.qk_norm
        query, key, value = self._project_heads(call)
        if norm is not None and not norm.after_rope:
            query, key = self._norm(norm, query, "query"), self._norm(norm, key, "key")
        if spec.rope is not None:
            query_positions, key_positions = call.rope_positions
            query, key = self._rotate(query, query_positions, spec.rope), self._rotate(key, key_positions, spec.rope)
        if norm is not None and norm.after_rope:
            query, key = self._norm(norm, query, "query"), self._norm(norm, key, "key")
        if spec.query_scale is not None:
            query = scale_queries(query, call.masks.positions, spec.query_scale)
        if norm is not None and norm.values:
            value = self._norm(norm, value, "value")
        return query, key, value

    def _project_heads(self, call: Call) -> Projected:
        """Project and split into heads; latent attention projects in two steps (DeepSeek-AI 2024, equations 9 to 17)."""
        spec, kv_heads = self.spec, self.spec.num_kv_heads
        query, key, value = call.query, call.key, call.value
        if spec.latent is not None:
            query = query if spec.latent.query_rank is None else self._compress(query, "query_down", spec.latent)
            key = self._compress(call.key, "key_value_down", spec.latent)
            value = key if call.value is call.key else self._compress(call.value, "key_value_down", spec.latent)
        if spec.projections:
            query, key, value = self.product(query, "query"), self.product(key, "key"), self.product(value, "value")
        query, key, value = _split_heads(query, spec.num_heads), _split_heads(key, kv_heads), _split_heads(value, kv_heads)
        if spec.latent is not None:
            key = _prepend_shared(self.product(call.key, "rope_key"), key)
        return query, key, value

    def _compress(self, x: Tensor, name: str, latent: Latent) -> Tensor:
        """The latent vectors [b, n, rank] of x [b, n, in]."""
        return self._norm(QKNorm(eps=latent.eps), self.product(x, name), name)

    def outputs(self, call: Call, projected: Projected) -> dict[str, Tensor]:
        """The call's outputs among the projections: `query_projection`, …, and `latent` and `rope_key` of latent attention.

        `latent` [b, k, key_value_rank] is that of the key, `rope_key` [b, k, rope_key_dim] what all heads' keys begin with, after RoPE.
        """
        tensors = {f"{name}_projection": x for name, x in zip(PROJECTIONS, projected, strict=False)}
        if (latent := self.spec.latent) is not None:
            tensors["rope_key"] = projected[1][:, 0, :, : latent.rope_key_dim]
            if "latent" in call.outputs:
                tensors["latent"] = self._compress(call.key, "key_value_down", latent)
        return {name: x for name, x in tensors.items() if name in call.outputs}

    def expand_latent(self, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value [b, kv heads, k, …] of the outputs `latent` [b, k, key_value_rank] and `rope_key` [b, k, rope_key_dim]."""
        key, value = (_split_heads(self.product(latent, name), self.spec.num_kv_heads) for name in ("key", "value"))
        return _prepend_shared(rope_key, key), value

    def _norm(self, norm: QKNorm, x: Tensor, name: str) -> Tensor:
        """RMS norm (Zhang & Sennrich 2019) or layer norm of x [b, heads, n, d] or [b, n, d], in float32 or better.

        The weight and bias, [d] or [heads, d], are those of `name`_norm, if the layer has them.
        """
        accumulate = at_least_float32(self.dtype)
        x, axes = x.to(accumulate), (-1,) if norm.over == "head" else (1, 3)
        if norm.kind == "layer":
            x = x - x.mean(axes, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + norm.eps)
        weight, bias = (self.weights.get(f"{name}_norm.{part}") for part in ("weight", "bias"))
        if weight is not None:
            x = x * weight.to(accumulate).unsqueeze(-2)
        if bias is not None:
            x = x + bias.to(accumulate).unsqueeze(-2)
        return x.to(self.dtype)

    def gate(self, query: Tensor) -> Tensor:
        """The gate on the head outputs, [b, h, q, value_head_dim], or [b, h, q, 1] if headwise (Qiu et al. 2025, equation 5).

        `query` [b, q, d_model] is the input of the layer, before its projections.
        """
        assert self.spec.output_gate is not None
        heads = self.spec.num_heads
        logits = self.product(query, "gate").view(*query.shape[:2], heads, self.spec.gate_dim // heads).transpose(1, 2)
        return logits.sigmoid() if self.spec.output_gate.activation == "sigmoid" else F.softplus(logits)

    def project_back(self, concatenated: Tensor) -> Tensor:
        """The output projection: [b, q, h * value_head_dim] -> [b, q, output_dim]; unchanged if the layer has no projections."""
        return self.product(concatenated, "output") if self.spec.projections else concatenated

    def product(self, x: Tensor, name: str) -> Tensor:
        """Apply a projection: [..., in] -> [..., out]."""
        if (product := self._products.get(name)) is None:
            product = self._products[name] = Linear(self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        return product(x)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[b, n, heads * d] -> [b, heads, n, d]."""
    return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def _prepend_shared(shared: Tensor, key: Tensor) -> Tensor:
    """Every head's key [b, kv heads, k, d] after the part [b, k, r] that all heads share: [b, kv heads, k, r + d]."""
    return torch.cat((shared[:, None].expand(-1, key.shape[1], -1, -1), key), -1)
