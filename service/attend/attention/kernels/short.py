"""Computes short calls in C (`native/kernel.h`), where the overhead of torch's operations would exceed the arithmetic.

The extension is optional: without it, torch computes these calls like all others.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attend.attention.call import Call, Result, selected_weights
from attend.attention.dataflow import needed
from attend.attention.native.extension import extension
from attend.attention.program import program_of
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array

MAX_WIDTH = 256  # d_model of a layer with short calls
MAX_PRODUCT = 1 << 20  # most multiplications in one product of a short call; for more, torch is as fast
UNBOUNDED = 1 << 40  # keys on a side of a position without a bound: no sequence is longer
MAX_PORTABLE = 1 << 18  # MAX_PRODUCT on a processor without vectors of eight floats


class ShortKernel:
    """Short calls to one layer. Immutable."""

    # all steps of a plain layer, and those that calls add; of "fill" it knows in which calls it changes nothing
    fuses = frozenset({"project_query", "project_key", "project_value", "scaled_products", "softmax", "weighted_values", "merge", "output"})
    fuses |= {"visible_causal", "visible_intervals", "visible_sets", "mask", "sum_biases", "add_bias", "scale_heads", "fill"}
    outputs = frozenset({"output", "attention_weights"})

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
        self._has_features = lru_cache(64)(partial(self._fuses_all, spec))
        self._num_heads, self._width = spec.num_heads, spec.d_model
        self._max_product = MAX_PORTABLE if variant == "portable" else MAX_PRODUCT

    @classmethod
    def make(cls, spec: LayerSpec, weights: Mapping[str, Tensor], device: torch.device) -> "ShortKernel | None":
        """The kernel of a layer; None if it does not compute such layers, or there is no extension."""
        fits = extension is not None and spec.dtype == "float32" and device.type == "cpu" and _has_one_width(spec)
        return cls(spec, weights) if fits and cls._fuses_all(spec, frozenset(spec.features)) else None

    @classmethod
    def _fuses_all(cls, spec: LayerSpec, features: frozenset[str]) -> bool:
        """Whether it computes every step of calls with these features."""
        return {step.name for step in needed(program_of(spec, features), cls.outputs)} <= cls.fuses

    def computes(self, call: Call) -> bool:
        """Whether it computes calls with these features and outputs."""
        options = call.options
        if not options.outputs <= self.outputs or options.reproducible or call.cached is not None:
            return False
        return self._has_features(call.features)

    def is_short(self, call: Call) -> bool:
        """Whether the call is short."""
        options, width = call.options, self._width
        items, queries, keys = options.items, options.num_queries, options.num_keys
        largest_product = items * width * max(queries * width, keys * width, queries * keys)
        return items * queries * keys > 0 and largest_product <= self._max_product

    def compute(self, call: Call, masked: bool | None = None) -> Result | None:
        """The outputs of a call that it computes. `masked`: what `has_masks` says of it, if that is known.

        None if a number overflowed: torch then decides which ones do, as implementations differ. None for a fully masked row whose weights
        shall be uniform.
        """
        options = call.options
        items, queries, keys = options.items, options.num_queries, options.num_keys
        query, key, value = call.query.contiguous(), call.key.contiguous(), call.value.contiguous()
        output, weights = np.empty((items, queries, self._width), np.float32), np.empty((items, self._num_heads, queries, keys), np.float32)
        sizes, addresses = (items, queries, keys, options.scale), (query.data_ptr(), key.data_ptr(), value.data_ptr())
        fully_masked = None
        if has_masks(call) if masked is None else masked:
            empty = np.empty((items, self._num_heads, queries), np.bool_)
            is_finite = extension.attend(self._layer, *sizes, *addresses, output, weights, _masks(call, empty))
            if 1 in empty.tobytes():
                fully_masked = torch.from_numpy(empty)
        else:
            is_finite = extension.attend(self._layer, *sizes, *addresses, output, weights)
        if not is_finite or (fully_masked is not None and options.fully_masked == "uniform"):
            return None
        tensors = {}
        if "output" in options.outputs:
            tensors["output"] = torch.from_numpy(output)
        if "attention_weights" in options.outputs:
            tensors |= selected_weights(torch.from_numpy(weights), call)
        return Result(tensors, fully_masked)


def has_masks(call: Call) -> bool:
    """Whether masks, a bias or factors of heads change what is computed: the same for calls with equal options and kinds of masks."""
    return call.masks.has_any or call.masks.bias is not None or "head_scale" in call.optional_inputs


def _masks(call: Call, fully_masked: Array) -> tuple[Any, ...]:
    """The masks of a call as `extension.attend` takes them."""
    masks = call.masks
    left, right = UNBOUNDED if masks.left is None else masks.left, UNBOUNDED if masks.right is None else masks.right
    positions = None if left == right == UNBOUNDED and masks.chunk is None else masks.positions
    tensors = (positions, masks.lengths, masks.attend_mask, masks.attend_keys, masks.query_segments, masks.key_segments)
    arrays = [None if tensor is None else tensor.numpy() for tensor in (*tensors, masks.bias, call.optional_inputs.get("head_scale"))]
    return fully_masked, left, right, masks.chunk or 0, *arrays


def _has_one_width(spec: LayerSpec) -> bool:
    """Whether the layer is narrow, all its projections have one width, and every head has keys of its own."""
    heads = spec.num_heads
    widths = {spec.d_model, spec.key_dim, spec.value_dim, spec.output_dim, heads * spec.head_dim, heads * spec.value_head_dim}
    return spec.projections and len(widths) == 1 and spec.d_model <= MAX_WIDTH and spec.num_kv_heads == heads
