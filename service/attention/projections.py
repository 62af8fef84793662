"""The projections of a layer: linear maps, splitting into heads, norms and RoPE before attention, and the output projection after it.

Rows are independent, so calls of any lengths can share one matrix product. For few rows, most of its time is reading the weights.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from service.attention.call import Call
from service.attention.linear import Linear, is_batch_invariant, measure
from service.attention.positions import rotate
from service.attention.weights import torch_dtype
from service.spec import PROJECTIONS, LayerSpec, QKNorm, Rope

Projected = tuple[Tensor, ...]  # query [b, h, q, head_dim], key [b, kv heads, k, head_dim], value [b, kv heads, k, value_head_dim]


class Projections:
    """The weights of a layer on one device, by canonical name, and their products. Immutable except for `tune`."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec, self.weights, self.dtype = spec, dict(weights), torch_dtype(spec.dtype)
        self._products: dict[str, Linear] = {}  # created when first needed, since each may store its weight a second time
        if spec.projections and spec.d_model == spec.key_dim == spec.value_dim and self._pack("query", "key", "value"):
            self._pack("key", "value", packed_in="query+key+value")
        elif spec.projections and spec.key_dim == spec.value_dim:
            self._pack("key", "value")
        self.are_batch_invariant = self._are_batch_invariant()  # whether calls may share products, see linear.py

    def _pack(self, *names: str, packed_in: str = "") -> bool:
        """Concatenate the weights of projections that may share an input, so that one product computes all of them.

        The single weights become views of the packed one. Does nothing and returns False if only some of them have a bias.
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
        """Choose the matrix products for this layer's weights by measurement. Slow for new shapes; must not run during a call."""
        for name in self._names:
            measure(self.weights[f"{name}.weight"])
        self._products.clear()
        self.are_batch_invariant = self._are_batch_invariant()

    def _are_batch_invariant(self) -> bool:
        return all(is_batch_invariant(self.weights[f"{name}.weight"]) for name in self._names)

    @property
    def _names(self) -> Iterable[str]:
        """Names of the projections, single and packed, that have a weight."""
        names = (*PROJECTIONS, "key+value", "query+key+value") if self.spec.projections else ()
        return (name for name in names if f"{name}.weight" in self.weights)

    def project(self, calls: Sequence[Call]) -> list[Projected]:
        """Project, split into heads, norm and rotate: query [b, h, q, head_dim], key and value [b, kv heads, k, …] of each call.

        All calls must agree in `key is query` and `value is key`; a reproducible call must be the only one.
        """
        projected, norm = self._split_heads(calls), self.spec.qk_norm
        if norm is not None and not norm.after_rope:
            projected = [self._normed(norm, *xs) for xs in projected]
        if (rope := self.spec.rope) is not None:
            projected = [self._rotated(call, rope, *xs) for call, xs in zip(calls, projected, strict=True)]
        if norm is not None and norm.after_rope:
            projected = [self._normed(norm, *xs) for xs in projected]
        return projected

    def _normed(self, norm: QKNorm, query: Tensor, key: Tensor, value: Tensor) -> Projected:
        value = self._norm(norm, value, "value") if norm.values else value
        return self._norm(norm, query, "query"), self._norm(norm, key, "key"), value

    def _rotated(self, call: Call, rope: Rope, query: Tensor, key: Tensor, value: Tensor) -> Projected:
        places = torch.arange(key.shape[2], device=key.device)[None]
        return rotate(query, call.masks.positions, rope), rotate(key, places, rope), value

    def _split_heads(self, calls: Sequence[Call]) -> list[Projected]:
        """Project and split into heads, [b, heads, n, …]. One product if query, key and value are one input with packed weights."""
        spec, kv_heads = self.spec, self.spec.num_kv_heads
        shapes = (spec.num_heads, spec.head_dim), (kv_heads, spec.head_dim), (kv_heads, spec.value_head_dim)
        if calls[0].query is calls[0].key is calls[0].value and "query+key+value.weight" in self.weights:
            packed = self._linear([call.query for call in calls], "query+key+value", calls[0].reproducible)
            projected: Iterable[tuple[Tensor, ...]] = [torch.split(x, [heads * width for heads, width in shapes], -1) for x in packed]
        else:
            projected = self._projected(calls) if self.spec.projections else [(call.query, call.key, call.value) for call in calls]
        return [tuple(x.view(*x.shape[:2], *shape).transpose(1, 2) for x, shape in zip(xs, shapes, strict=True)) for xs in projected]

    def _projected(self, calls: Sequence[Call]) -> Iterable[tuple[Tensor, ...]]:
        """Projected query, key and value, [b, n, heads * …]; one product for keys and values if they are one input."""
        queries, keys, values = ([getattr(call, name) for call in calls] for name in PROJECTIONS[:3])
        fixed = calls[0].reproducible
        if calls[0].value is calls[0].key and "key+value.weight" in self.weights:
            widths = [self.weights[f"{name}.weight"].shape[0] for name in PROJECTIONS[1:3]]
            split = [torch.split(x, widths, -1) for x in self._linear(keys, "key+value", fixed)]
            return [(query, *parts) for query, parts in zip(self._linear(queries, "query", fixed), split, strict=True)]
        return zip(*(self._linear(xs, name, fixed) for xs, name in zip((queries, keys, values), PROJECTIONS, strict=False)), strict=True)

    def _norm(self, norm: QKNorm, x: Tensor, name: str) -> Tensor:
        """RMS norm (Zhang & Sennrich 2019) or layer norm of x [b, heads, n, d], in float32 or better.

        The weight and bias, [d] or [heads, d], are those of `name`_norm, if the layer has them.
        """
        accumulate = torch.float64 if self.dtype == torch.float64 else torch.float32
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

    def project_back(self, concatenated: Sequence[Tensor], fixed: bool) -> Sequence[Tensor]:
        """The output projection of each, [b, q, h * value_head_dim] -> [b, q, output_dim]; unchanged if the layer has no projections."""
        return self._linear(concatenated, "output", fixed) if self.spec.projections else concatenated

    def _linear(self, xs: Sequence[Tensor], name: str, fixed: bool) -> Sequence[Tensor]:
        """Project each [b, n, in] -> [b, n, out], with all rows in one product."""
        if len(xs) == 1:
            return [self.product(xs[0], name, fixed)]
        made = self.product(torch.cat([x.flatten(0, 1) for x in xs]), name, fixed)
        parts = torch.split(made, [x.shape[0] * x.shape[1] for x in xs])
        return [part.view(*x.shape[:2], made.shape[-1]) for part, x in zip(parts, xs, strict=True)]

    def product(self, x: Tensor, name: str, fixed: bool = False) -> Tensor:
        """Apply a projection, or packed ones: [..., in] -> [..., out]. `fixed`: with `F.linear`."""
        if (product := self._products.get(name)) is None:
            product = self._products[name] = Linear(self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        return product(x, fixed)
