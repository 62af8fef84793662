"""Computes short calls without masks in C (`native/kernel.h`), where the overhead of torch's operations would exceed the arithmetic.

The extension is optional: without it, torch computes these calls like all others.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from service.attention.call import Call, Result, reduce_weights, select_weights
from service.attention.native.extension import extension
from service.spec import LayerSpec
from service.spec_parts import PROJECTIONS
from service.tensors import Array

MAX_WIDTH = 256  # d_model of a layer with short calls
MAX_PRODUCT = 1 << 20  # most multiplications in one product of a short call; for more, torch is as fast
MAX_PORTABLE = 1 << 18  # MAX_PRODUCT on a processor without vectors of eight floats
OUTPUTS = frozenset({"output", "attention_weights"})


class ShortKernel:
    """Computes short calls to one layer. Immutable."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Tensor], variant: str | None = None) -> None:
        """`variant`: one of the implementations in `extension.variants`, by default the fastest."""
        no_bias = torch.zeros(spec.d_model)
        variant = variant or extension.variants[0]
        self._layer = extension.layer(
            spec.d_model,
            spec.num_heads,
            variant,
            tuple(weights[f"{name}.weight"].contiguous().numpy() for name in PROJECTIONS),
            tuple(weights.get(f"{name}.bias", no_bias).numpy() for name in PROJECTIONS),
        )
        self._num_heads = spec.num_heads
        self._max_product = MAX_PORTABLE if variant == "portable" else MAX_PRODUCT

    @staticmethod
    def suits_layer(spec: LayerSpec, device: torch.device) -> bool:
        """Whether the layer is float32 on a CPU, narrow, has one width and number of heads, and no features beyond the four projections."""
        heads = spec.num_heads
        widths = {spec.d_model, spec.key_dim, spec.value_dim, spec.output_dim, heads * spec.head_dim, heads * spec.value_head_dim}
        is_plain = spec.projections and len(widths) == 1 and spec.d_model <= MAX_WIDTH and spec.num_kv_heads == heads
        features = spec.positional, spec.qk_norm, spec.sinks, spec.output_gate, spec.latent, spec.differential, spec.indexer
        has_more = any(features) or spec.normalizer != "softmax"
        return bool(extension and is_plain and not has_more and spec.dtype == "float32" and device.type == "cpu")

    def suits(self, call: Call) -> bool:
        """Whether the call is short, has no masks or modifiers, and requests only output and weights."""
        (items, queries, width), keys = call.query.shape, call.key.shape[1]
        largest_product = items * width * max(queries * width, keys * width, queries * keys)
        is_modified = call.softcap or call.dropout is not None or call.head_scale is not None or call.masks.bias is not None
        return (
            items * queries * keys > 0
            and largest_product <= self._max_product
            and call.outputs <= OUTPUTS
            and not (is_modified or call.masks.has_any or call.reproducible)
        )

    def forward(self, call: Call) -> Result | None:
        """Compute a call that suits. None if a number overflowed: torch then decides which ones do, since implementations differ."""
        return self.forward_arrays(call, call.query.contiguous().numpy(), call.key.contiguous().numpy(), call.value.contiguous().numpy())

    def forward_arrays(self, call: Call, query: Array, key: Array, value: Array) -> Result | None:
        """As `forward`, with inputs in contiguous arrays instead of the call's tensors."""
        (items, queries, _), keys = query.shape, key.shape[1]
        output, weights = np.empty(query.shape, np.float32), np.empty((items, self._num_heads, queries, keys), np.float32)
        if not extension.attend(self._layer, items, queries, keys, call.scale, query, key, value, output, weights):
            return None
        tensors = {"output": torch.from_numpy(output)} if "output" in call.outputs else {}
        if "attention_weights" in call.outputs:
            tensors |= reduce_weights(select_weights(torch.from_numpy(weights), call), call)
        return Result(tensors)
