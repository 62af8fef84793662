"""The projections of a layer: linear maps to heads and what its operators do to these before attention, and the output projection."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attend.attention.call import Call
from attend.attention.linear import Linear
from attend.attention.numerics import at_least_float32, torch_dtype
from attend.attention.operators import OPERATORS
from attend.attention.operators.operator import Layer, Operator
from attend.attention.operators.stages import Projected, methods_of, split_heads
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS


def make_operators(spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> tuple[Operator, ...]:
    """The operators of a layer, and those that calls may ask for."""
    layer = Layer(spec, weights, at_least_float32(torch_dtype(spec.dtype)), device)
    return tuple(operator(layer) for operator in OPERATORS if operator.of_calls or operator.is_active(spec))


class Projections:
    """The weights of a layer on one device, by canonical name, and their products."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], operators: Sequence[Operator]) -> None:
        self.spec, self.weights = spec, weights
        # no methods of this object: a cycle would keep weights until a collection
        names = ("project", "expand", "outputs", "rows_to_cache")
        self._replacement, self._expand, self._outputs, self._rows_to_cache = (methods_of(operators, name) for name in names)
        self._stages = [method for name in ("norm", "rotate", "rescale") for method in methods_of(operators, name)]
        self._products: dict[str, Linear] = {}  # created when first needed, since each may store its weight a second time

    def project(self, call: Call) -> Projected:
        """Project, split into heads, norm and rotate: query [b, h, q, head_dim], key and value [b, kv heads, k, …]."""
        heads: Projected = self._replacement[0](call, self.product) if self._replacement else self._project_heads(call)
        for apply in self._stages:
            heads = apply(heads, call)
        return heads

    def _project_heads(self, call: Call) -> Projected:
        """Project and split into heads."""
        inputs = {"query": (call.query, self.spec.num_heads)}
        inputs |= {"key": (call.key, self.spec.num_kv_heads), "value": (call.value, self.spec.num_kv_heads)}
        if self.spec.projections:
            return tuple(split_heads(self.product(x, name), heads) for name, (x, heads) in inputs.items())
        return tuple(split_heads(x, heads) for x, heads in inputs.values())

    def outputs(self, call: Call, projected: Projected) -> dict[str, Tensor]:
        """The call's outputs among the projections, `query_projection`, …, and those that its operators have."""
        tensors = {f"{name}_projection": x for name, x in zip(PROJECTIONS, projected, strict=False)}
        for outputs in self._outputs:
            tensors |= outputs(call, projected, self.product)
        return {name: x for name, x in tensors.items() if name in call.options.outputs}

    def rows_to_cache(self, call: Call, projected: Projected) -> dict[str, Tensor]:
        """What a cache may keep of the call's keys and values, [b, heads, k, width] by name."""
        tensors = {"key": projected[1], "value": projected[2]}
        for rows_to_cache in self._rows_to_cache:
            tensors |= rows_to_cache(call, projected, self.product)
        return tensors

    def keys_and_values(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The keys and values [1, kv heads, n, …] of rows of a cache."""
        if "key" in rows:
            return rows["key"][None], rows["value"][None]
        expanded: tuple[Tensor, Tensor] = self._expand[0](rows, self.product)
        return expanded

    def project_back(self, concatenated: Tensor) -> Tensor:
        """The output projection: [b, q, h * value_head_dim] -> [b, q, output_dim]; unchanged if the layer has no projections."""
        return self.product(concatenated, "output") if self.spec.projections else concatenated

    def product(self, x: Tensor, name: str) -> Tensor:
        """Apply a projection: [..., in] -> [..., out]."""
        if (product := self._products.get(name)) is None:
            product = self._products[name] = Linear(self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        return product(x)
