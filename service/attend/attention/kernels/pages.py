"""Computes the attention of one query to the pages of a cache in C (`native/pages.h`), without joining the pages.

The extension is optional: without it, pages are joined, and such steps are computed like all others.
"""

import numpy as np
import torch
from torch import Tensor

from attend.attention.cache import KeyValueCache, cached_tensors
from attend.attention.kernels.fusion import Inexact, Kernel
from attend.attention.masks import MaskBlock
from attend.attention.native.extension import extension
from attend.spec import LayerSpec

MAX_HEAD_DIM = 256  # largest head_dim that the extension computes


class PagesKernel(Kernel):
    """Attention of one query of one layer to the pages of a cache. Immutable."""

    name = "pages"
    fuses = frozenset(
        {
            *("visible_causal", "visible_intervals", "all_visible", "scaled_products", "add_bias", "mask"),
            *("softmax", "sum_exponentials", "sinks", "sum_with_sinks", "weighted_values"),
        }
    )
    needs = frozenset({"weighted_values"})
    reads = ("masks", "query_projection", "scale", "score_bias", "sinks")
    implied = frozenset({"key_projection", "value_projection", "keys", "fully_masked"})
    brings = ("cache",)
    writes = "head_outputs"

    def __init__(self, spec: LayerSpec) -> None:
        self._spec = spec

    @classmethod
    def make(cls, spec: LayerSpec, device: torch.device) -> "PagesKernel | None":
        """The kernel of a layer; None if it does not compute such layers, or there is no extension."""
        return cls(spec) if extension is not None and device.type == "cpu" and cls.suits(spec) else None

    @staticmethod
    def suits(spec: LayerSpec) -> bool:
        """Whether caches have keys and values of a datatype and of widths that the extension computes."""
        width = spec.head_dim
        return spec.dtype == "float32" and "key" in cached_tensors(spec) and spec.value_head_dim == width and width <= MAX_HEAD_DIM

    def compute(
        self,
        *,
        query_projection: Tensor,
        scale: float,
        cache: KeyValueCache,
        masks: MaskBlock | None = None,
        score_bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Head outputs [1, h, 1, value_head_dim] of query [1, h, 1, d]. Raises Inexact if scores overflow."""
        spec, keys = self._spec, slice(0, cache.length) if masks is None else masks.keys
        heads, bias = spec.num_heads, None
        if score_bias is not None:
            bias = score_bias.to(query_projection.dtype).expand(1, heads, 1, keys.stop - keys.start).contiguous()
        rows = query_projection.view(spec.num_kv_heads, heads // spec.num_kv_heads, -1)  # heads that share keys, as rows of one product
        if (result := attend_to_pages(rows, scale, cache, keys, bias)) is None:
            raise Inexact
        head_outputs, totals = result
        if sinks is not None:
            head_outputs = (head_outputs * torch.sigmoid(totals - sinks)[:, None]).to(query_projection.dtype)
        return head_outputs.view(1, heads, 1, -1)


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
