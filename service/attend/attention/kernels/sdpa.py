"""Computes head outputs with torch's scaled_dot_product_attention, for calls that request neither weights nor scores.

It does not store [queries, keys]. On a CPU torch would, if values have another width than keys: the narrower ones then get zeros. Masks and
biases are made for one block of query rows at a time, so memory is linear in the length.
"""

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

from attend.attention.kernels.fusion import Inexact, Kernel
from attend.attention.numerics import at_least_float32
from attend.attention.torch_arithmetic import all_finite
from attend.spec import LayerSpec


class SdpaKernel(Kernel):
    """torch's fused kernels for one layer. Immutable.

    They mask by adding -inf to scores, and multiply weights of 0, so a NaN or overflow of a key without influence reaches the outputs;
    outputs that are not finite are therefore rejected. They return zeros for a row whose scores all overflow to -inf, as for a fully masked
    one; outputs with zeros are rejected if scores may have overflowed. They add biases in the dtype of the query, so with biases in a wider
    one they get queries, keys and values in it.
    """

    name = "sdpa"
    fuses = frozenset({"scaled_products", "add_bias", "mask", "softmax", "weighted_values"})
    needs = frozenset({"weighted_values"})
    reads: tuple[str, ...] = (
        *("query_projection", "key_projection", "value_projection"),
        *("scale", "score_bias", "visible", "fully_masked"),
    )
    writes = "head_outputs"
    is_causal = False

    def __init__(self, spec: LayerSpec) -> None:
        self._shared_keys = spec.num_heads > spec.num_kv_heads

    def compute(
        self,
        *,
        query_projection: Tensor,
        key_projection: Tensor,
        value_projection: Tensor,
        scale: float,
        fully_masked: Tensor | None = None,
        score_bias: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Head outputs [b, h, q, value_head_dim], 0 in fully masked rows.

        Raises Inexact if torch's kernels do not compute the call exactly.
        """
        query, key, value = query_projection, key_projection, value_projection
        if 0 in (*query.shape[:3], key.shape[2]):
            raise Inexact
        mask = visible
        if score_bias is not None:
            if score_bias.dtype != query.dtype and torch.promote_types(score_bias.dtype, query.dtype) != query.dtype:
                query, key, value = (x.to(score_bias.dtype) for x in (query, key, value))
            mask = (score_bias if visible is None else score_bias.masked_fill(~visible, -torch.inf)).to(query.dtype)
        if mask is not None:
            mask = mask.expand(-1, -1, query.shape[2], key.shape[2])
        width = value.shape[-1]
        if query.device.type == "cpu":
            query, key, value = _of_one_width(query, key, value)
        heads = F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.is_causal, scale=scale, enable_gqa=self._shared_keys)
        heads = heads[..., :width]
        if fully_masked is not None:
            heads = heads.masked_fill(fully_masked[..., None], 0)
        if bool(heads.sum().isfinite() & heads[..., 0].all()):  # one answer of the device for both
            return heads.to(query_projection.dtype)
        if not all_finite(heads) or (not heads[..., 0].all() and _may_overflow(scale, query, key)):
            raise Inexact
        return heads.to(query_projection.dtype)


class CausalSdpaKernel(SdpaKernel):
    """The same for calls whose only mask is causal and aligned with q = k: torch needs no mask of pairs."""

    name = "causal sdpa"
    fuses = frozenset({"visible_causal", "scaled_products", "mask", "softmax", "weighted_values"})
    needs = frozenset({"visible_causal", "weighted_values"})
    reads = ("query_projection", "key_projection", "value_projection", "scale", "fully_masked")
    implied = frozenset({"masks"})
    is_causal = True


def _of_one_width(*heads: Tensor) -> list[Tensor]:
    """The heads, the narrow ones with zeros at their ends, which change no score: on a CPU torch stores all scores for unequal widths."""
    width = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in heads]


def _may_overflow(scale: float, query: Tensor, key: Tensor) -> bool:
    """Whether |scale · query · key| may exceed the largest number of the scores, which are float32 for narrower inputs."""
    largest = torch.finfo(at_least_float32(query.dtype)).max
    bound = abs(scale) * query.shape[-1]
    for rows in (query, key):
        bound *= float(rows.abs().amax())
    return not bound < largest
