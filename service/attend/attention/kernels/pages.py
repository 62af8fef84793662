"""Computes the attention of one query to the pages of a cache in C (`native/pages.h`), without joining the pages.

The extension is optional: without it, pages are joined, and such steps are computed like all others.
"""

import numpy as np
import torch
from torch import Tensor

from attend.attention.cache import KeyValueCache, cached_tensors
from attend.attention.call import Call
from attend.attention.kernels.declaration import BIAS_FIELDS, OUTER_FIELDS, Declaration
from attend.attention.kernels.eager import Eager
from attend.attention.native.extension import extension
from attend.spec import LayerSpec

MAX_HEAD_DIM = 256  # largest head_dim that the extension computes


class PagesKernel:
    """Attention of one query of one layer to the pages of a cache. Immutable."""

    declaration = Declaration(
        fields=OUTER_FIELDS | BIAS_FIELDS | {"sinks"},
        options=frozenset({"head_scale", "head_outputs", "bias", "intervals", "uniform_rows"}),
        outputs=frozenset({"head_outputs"}),
        dtypes=frozenset({"float32"}),
        devices=frozenset({"cpu"}),
    )

    def __init__(self, eager: Eager) -> None:
        """`eager` has the layer's biases and sinks."""
        self._eager, self._spec = eager, eager.spec

    @classmethod
    def make(cls, eager: Eager, device: torch.device) -> "PagesKernel | None":
        """The kernel of a layer; None if it does not compute such layers, or there is no extension."""
        spec = eager.spec
        suits = extension is not None and cls.declaration.has_layer(spec, device) and _suits_cache(spec)
        return cls(eager) if suits else None

    def suits(self, call: Call) -> bool:
        """Whether there is one query."""
        return call.query.shape[:2] == (1, 1)

    def compute(self, call: Call, inputs: tuple[Tensor, KeyValueCache], outputs: frozenset[str]) -> dict[str, Tensor] | None:
        """Head outputs [1, h, 1, value_head_dim] of query [1, h, 1, d]; None if it may attend to no key, or scores overflow."""
        query, cache = inputs
        masks, spec, one = call.masks, self._spec, slice(0, 1)
        first, last = (int(index) for index in masks.interval(one))
        if last < first:
            return None
        heads, keys = spec.num_heads, slice(first, last + 1)
        bias = self._eager.bias(query, call, one, keys)
        bias = None if bias is None else bias.to(query.dtype).expand(1, heads, 1, last + 1 - first).contiguous()
        rows = query.view(spec.num_kv_heads, heads // spec.num_kv_heads, -1)  # heads that share keys, as rows of one product
        if (result := attend_to_pages(rows, call.options.scale, cache, keys, bias)) is None:
            return None
        head_outputs, totals = result
        if (sinks := self._eager.sinks(None)) is not None:
            shift = self._eager.shift(call, one)
            total_sinks = sinks[:, 0] if shift is None else sinks[:, 0] - shift[0, :, 0]
            head_outputs = (head_outputs * torch.sigmoid(totals - total_sinks)[:, None]).to(query.dtype)
        return {"head_outputs": head_outputs.view(1, heads, 1, -1)}


def _suits_cache(spec: LayerSpec) -> bool:
    """Whether caches have keys and values, of widths that the extension computes."""
    width = spec.head_dim
    return "key" in cached_tensors(spec) and spec.value_head_dim == width and width <= MAX_HEAD_DIM


def attend_to_pages(
    rows: Tensor, scale: float, cache: KeyValueCache, keys: slice, bias: Tensor | None = None, variant: str = ""
) -> tuple[Tensor, Tensor] | None:
    """Outputs [heads, d] and log-sum-exps [heads] of rows [kv heads, group, d] and some keys of a cache; None if scores overflow.

    `bias` [1, heads, 1, these keys] is added to the scores. `variant`: one of `extension.variants`, by default the fastest.
    """
    kv_heads, group, width = rows.shape
    pages = []
    for page in cache.pages:
        if keys.start < page.stop and page.start < keys.stop:
            first, stop = max(keys.start, page.start), min(keys.stop, page.stop)
            pages.append((page.tensors["key"].numpy(), page.tensors["value"].numpy(), first - page.start, stop - page.start))
    output, total = np.empty((kv_heads * group, width), np.float32), np.empty(kv_heads * group, np.float32)
    sizes = torch.get_num_threads(), kv_heads, group, width
    query, added = rows.contiguous().numpy(), None if bias is None else bias.numpy()
    if not extension.attend_cache(variant or extension.variants[0], *sizes, scale, query, tuple(pages), added, output, total):
        return None
    return torch.from_numpy(output), torch.from_numpy(total)
