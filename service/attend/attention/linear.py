"""The product of a projection, by MKL or by oneDNN.

torch's float32 `F.linear` uses MKL or OpenBLAS, which on AMD takes slow kernels. oneDNN's product with a reordered weight, which torch's
compiler uses, is 1.1 times as fast on Zen 4, more than twice on Zen 5, and about as fast elsewhere. It is an internal operation of torch.
It is tried when the first layer is made; if it is missing, or the processor has no instructions that it is fast with, `F.linear` is used.
A single row also goes to `F.linear`, which takes no longer than reading the weight; oneDNN takes twice as long. The choice depends on
machine, weight and number of rows, so every worker makes the same.
"""

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

MIN_INPUTS = 129  # inputs of a projection from which oneDNN's product is used; for fewer, `F.linear` is fast
MAX_REORDERED = 1 << 25  # most numbers (128 MB) of a weight that is reordered, which stores it twice


class Linear:
    """x W^T + b for x [..., in] and one weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._reordered = _reorder(weight) if suits_onednn(weight) and has_onednn() else None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        if self._reordered is None or torch.is_grad_enabled() or rows <= 1:
            return F.linear(x, self._weight, self._bias)
        if not (missing := _round_up(rows) - rows):
            return _onednn(x, self._reordered, self._bias)
        padded = torch.cat((x.reshape(rows, -1), x.new_zeros(missing, x.shape[-1])))
        return _onednn(padded, self._reordered, self._bias)[:rows].view(*x.shape[:-1], -1)


def suits_onednn(weight: Tensor) -> bool:
    """Whether oneDNN's product is used for this weight, if there is one: float32 on a CPU with at least MIN_INPUTS inputs."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.shape[1] >= MIN_INPUTS


@cache
@torch.inference_mode()
def has_onednn() -> bool:
    """Whether torch has oneDNN's product, and the processor AVX2 or AVX-512."""
    try:
        product = _onednn(torch.ones(1, 1), _reorder(torch.ones(1, 1)), None)
    except (AttributeError, NotImplementedError, RuntimeError):  # torch may lack this internal operation or reject its arguments
        return False
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and bool(product == 1)


def _round_up(rows: int) -> int:
    """Round up to a number of rows that many calls share: oneDNN compiles code for each, in half a millisecond and half a megabyte."""
    multiple = max(4, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // multiple) * multiple


def _reorder(weight: Tensor) -> Tensor:
    """The weight in oneDNN's opaque format, optimised for tens of rows; a weight of more than MAX_REORDERED numbers unchanged."""
    if weight.numel() > MAX_REORDERED:
        return weight
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    return reordered


def _onednn(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
    return product
