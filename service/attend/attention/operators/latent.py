"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, equations 9 to 17): projections in two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from attend.attention.operators.declarations import CachedTensor, Cost, Variances, variance
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.attention.operators.qk_norm import QKNorm, normalise
from attend.attention.operators.stages import split_heads
from attend.spec_parts import Eps, Flag, Part, Width, field_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attend.attention.call import Call, CallOptions
    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields, Layer, Misfit
    from attend.attention.operators.stages import Product, Projected
    from attend.spec_parts import Dimensions
    from attend.tensors import Array


class Latent(Part):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): projections in two steps, and a part of the keys that heads share.

    Keys and values: c = norm(x W^T) with the weight `key_value_down.weight` [key_value_rank, key_dim]; `key.weight` and `value.weight` are
    applied to c. Queries likewise with `query_down.weight`, or in one step. The first `rope_key_dim` numbers of each key are the same for
    all heads, x W^T with `rope_key.weight` [rope_key_dim, key_dim], so `key.weight` has that many fewer rows for each head.
    """

    key_value_rank: Width = Field(examples=[16], description="Width of the latent vector of keys and values.")
    query_rank: Width | None = Field(default=None, description="Width of the latent vector of queries; null if they have none.")
    rope_key_dim: Width = Field(
        examples=[4], description="Number of dimensions of each key that all heads share; RoPE rotates the first ones."
    )
    eps: Eps = Field(default=1e-6, description="Of the RMS norms of the latent vectors.")
    bias: Flag = Field(default=False, description="Whether query_down, key_value_down and rope_key have biases.")


class LatentOperator(Operator):
    name, field, needs_projections = "latent", "latent", True
    equal_inputs = True
    matrices = ("query_down", "key_value_down", "rope_key")
    query_matrices = ("query_down",)
    key_matrices = ("key_value_down", "rope_key")
    axes: ClassVar[Axes] = {
        **{f"{name}.weight": ("out", "in") for name in ("key_value_down", "query_down", "rope_key")},
        **{f"{name}.bias": ("n",) for name in ("key_value_down", "query_down", "rope_key")},
        **dict.fromkeys(("key_value_down_norm.weight", "query_down_norm.weight"), ("n",)),
    }
    identifying_weight = "key_value_down.weight"
    own_outputs = ("latent", "rope_key")

    @classmethod
    def fill_in(cls, fields: Fields, width: int) -> None:
        """Keys and values have the same width."""
        if fields.get(cls.field):
            fields.setdefault("value_dim", fields.setdefault("key_dim", fields.get("value_dim", fields["d_model"])))

    @classmethod
    def check(cls, spec: Dimensions) -> None:
        latent: Latent = getattr(spec, cls.field)
        if latent.rope_key_dim >= spec.head_dim:
            raise field_error("/latent/rope_key_dim", f"less than head_dim {spec.head_dim}", str(latent.rope_key_dim))
        if spec.value_dim != spec.key_dim:
            expected = f"{spec.key_dim}, the key_dim, since latent projects keys and values by one matrix, key_value_down.weight"
            raise field_error("/value_dim", expected, str(spec.value_dim))

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        """The first step: its matrices, biases and norms. The second step has fewer inputs, and fewer rows of keys."""
        latent: Latent = getattr(spec, cls.field)
        down = {"key_value_down": (latent.key_value_rank, spec.key_dim), "rope_key": (latent.rope_key_dim, spec.key_dim)}
        down |= {"query_down": (latent.query_rank, spec.d_model)} if latent.query_rank else {}
        shapes: Shapes = {f"{name}.weight": shape for name, shape in down.items()}
        if latent.bias:
            shapes |= {f"{name}.bias": shape[:1] for name, shape in down.items()}
        shapes |= {f"{name}_norm.weight": shape[:1] for name, shape in down.items() if name != "rope_key"}
        key_rows = spec.num_kv_heads * (spec.head_dim - latent.rope_key_dim)
        shapes["query.weight"] = (spec.num_heads * spec.head_dim, latent.query_rank or spec.d_model)
        shapes["key.weight"] = (key_rows, latent.key_value_rank)
        shapes["value.weight"] = (spec.num_kv_heads * spec.value_head_dim, latent.key_value_rank)
        return shapes | ({"key.bias": (key_rows,)} if spec.has_bias("key") else {})

    @classmethod
    def infer_fields(cls, weights: Mapping[str, Array], num_heads: int, misfit: Misfit) -> Fields:
        """Ranks and widths; inputs are those of the first step of a projection."""
        down, head_dim = weights["key_value_down.weight"], len(weights["query.weight"]) // num_heads
        if (shared := weights.get("rope_key.weight")) is None or not 0 < len(shared) < head_dim:
            raise misfit("rope_key.weight", f"1 to {head_dim - 1} rows, for heads of {head_dim} numbers")
        query_down = weights.get("query_down.weight")
        ranks = {"query_rank": None if query_down is None else len(query_down), "key_value_rank": len(down), "rope_key_dim": len(shared)}
        query_width = (weights["query.weight"] if query_down is None else query_down).shape[1]
        inputs = {"d_model": query_width, "key_dim": down.shape[1], "value_dim": down.shape[1]}
        return {cls.field: {**ranks, "bias": "key_value_down.bias" in weights}, **inputs}

    @classmethod
    def shared_key_dim(cls, part: Mapping[str, Any]) -> int:
        return int(part["rope_key_dim"])

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        latent: Latent = getattr(spec, cls.field)
        down = {name: f"W_{name} + b_{name}" if latent.bias else f"W_{name}" for name in ("DQ", "DKV", "KR")}
        query, key, value = (f" + b_{name[0].upper()}" if spec.has_bias(name) else "" for name in ("query", "key", "value"))
        queries = f"RMSNorm(x {down['DQ']}) W_UQ" if latent.query_rank else "x W_Q"
        keys = f"c = RMSNorm(z {down['DKV']}),  Q = {queries}{query},  K = [z {down['KR']}, c W_UK{key}]"
        return {"project": f"{keys},  V = c W_UV{value}"}

    @classmethod
    def undefined_outputs(cls, spec: Dimensions) -> dict[str, str]:
        """`rope_key` is defined if the numbers that heads share are the same for all of them in the end."""
        latent, rope = getattr(spec, cls.field), getattr(spec, "rope", None)
        if getattr(spec, "qk_norm", None) or (rope and (rope.dims or 0) > latent.rope_key_dim):
            return {"rope_key": "whose qk_norm, or rope of more than rope_key_dim numbers, makes them differ between heads"}
        return {}

    @classmethod
    def widest(cls, spec: Dimensions) -> int:
        latent: Latent = getattr(spec, cls.field)
        return max(latent.key_value_rank, latent.query_rank or 1)

    @classmethod
    def cost(cls, spec: Dimensions, options: CallOptions, cached: int) -> Cost:
        """Latent vectors, the expansion of cached ones at each step, and the output `latent`; projections are counted with the others."""
        latent, keys = getattr(spec, cls.field), options.num_keys
        rows = spec.num_kv_heads * (spec.head_dim - latent.rope_key_dim + spec.value_head_dim)
        elements = options.num_queries * 2 * (latent.query_rank or 0) + keys * (2 * latent.key_value_rank + latent.rope_key_dim)
        once_more = keys * spec.key_dim if "latent" in options.outputs else 0
        return Cost(multiplications=(cached * rows + once_more) * latent.key_value_rank, elements=elements)

    @classmethod
    def variances(cls, spec: Dimensions, weights: Mapping[str, Tensor], before: Variances) -> Variances:
        """A share of each key is the part that all heads have."""
        share = getattr(spec, cls.field).rope_key_dim / spec.head_dim
        return before._replace(key=before.key + (variance(weights, "rope_key") - before.key) * share)

    @classmethod
    def cached(cls, spec: Dimensions) -> dict[str, CachedTensor]:
        """What keys and values are expanded from, if they are."""
        latent: Latent = getattr(spec, cls.field)
        widths = {"latent": latent.key_value_rank, "rope_key": latent.rope_key_dim} if cls.replaces_cached_keys(spec) else {}
        return {name: CachedTensor(1, width, shared=True) for name, width in widths.items()}

    @classmethod
    def replaces_cached_keys(cls, spec: Dimensions) -> bool:
        """Not if a norm or RoPE changes the heads' keys after that."""
        return "rope_key" not in cls.undefined_outputs(spec)

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Ranks that no other axis has."""
        ranks = {"query_rank": 11 if draw.flag() else None, "key_value_rank": 13}
        ranks["rope_key_dim"] = draw.integer(1, fields.get("head_dim", fields["d_model"] // fields["num_heads"]))
        return {**ranks, "bias": draw.flag(), "eps": draw.one_of(1e-6, 0.1)}

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.config: Latent = getattr(layer.spec, self.field)
        self.weights_of_norms = {name: x for name, x in layer.weights.items() if name.endswith("_down_norm.weight")}

    def project(self, call: Call, product: Product) -> Projected:
        """Heads of the latent vectors; keys begin with the part that all heads share."""
        query = call.query if self.config.query_rank is None else self.compress(call.query, "query_down", product)
        key = self.compress(call.key, "key_value_down", product)
        value = key if call.options.keys_as_values else self.compress(call.value, "key_value_down", product)
        rope_key = product(call.key, "rope_key")
        query = split_heads(product(query, "query"), self.spec.num_heads)
        return query, self._key(key, rope_key, product), split_heads(product(value, "value"), self.spec.num_kv_heads)

    def outputs(self, call: Call, projected: Projected, product: Product) -> dict[str, Tensor]:
        """`latent` [b, k, key_value_rank] of the key, and `rope_key` [b, k, rope_key_dim], what the keys of all heads begin with."""
        tensors = {"rope_key": projected[1][:, 0, :, : self.config.rope_key_dim]}
        if "latent" in call.options.outputs:
            cached = (call.cached or {}).get("latent")
            tensors["latent"] = self.compress(call.key, "key_value_down", product) if cached is None else cached
        return tensors

    def rows_to_cache(self, call: Call, projected: Projected, product: Product) -> dict[str, Tensor]:
        tensors = self.outputs(call.with_options(outputs=frozenset(self.own_outputs)), projected, product)
        return {name: tensor[:, None] for name, tensor in tensors.items()}

    def compress(self, x: Tensor, name: str, product: Product) -> Tensor:
        """The latent vectors [b, n, rank] of x [b, n, in]."""
        norm = QKNorm(eps=self.config.eps)
        return normalise(product(x, name), norm, self.weights_of_norms.get(f"{name}_norm.weight"), None, self.dtype)

    def expand(self, rows: Mapping[str, Tensor], product: Product) -> tuple[Tensor, Tensor]:
        return self._key(rows["latent"], rows["rope_key"], product), split_heads(product(rows["latent"], "value"), self.spec.num_kv_heads)

    def _key(self, latent: Tensor, rope_key: Tensor, product: Product) -> Tensor:
        """Every head's key after the part [b, k, r] that all heads share: [b, kv heads, k, head_dim]."""
        key = split_heads(product(latent, "key"), self.spec.num_kv_heads)
        return torch.cat((rope_key[:, None].expand(-1, key.shape[1], -1, -1), key), -1)
