"""The product of a projection: exact, fast, and the same for a row whatever rows are beside it.

torch's float32 `F.linear` goes to MKL or OpenBLAS, which sum in another order for few rows than for many. For short sums that makes no
difference worth having; for long ones, those of wide layers, a call computed with others would differ from the same call alone by more
than law 7 of serving allows. oneDNN's product with a weight laid out for it, the operation that torch's own compiler emits, sums every
row alike, and on most processors is the faster one. It is an internal operation: where a release lacks it, or a processor is slow at it,
the product is `F.linear`, and calls to wide layers keep to themselves.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

NARROW = 128  # inputs of a projection: up to so many, `F.linear` is fast and its rows are alike enough
HEAVY = 1 << 25  # numbers of a weight: beyond, 128 MB, it is not laid out anew, and so not held twice
WORK = 1 << 24  # multiplications with which both products are timed: so many that not what is around them decides
ROWS = 8  # at least
PATIENCE = 4.0  # this many times the other's time is as much as oneDNN's may take: what is hopeless, not what a busy machine makes of it

_taken: dict[torch.Size, bool] = {}  # weight's shape -> whether oneDNN's product is


class Product:
    """x W^T + b for x [..., in] and one weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._laid_out = _lay_out(weight) if takes_onednn(weight) else None

    def __call__(self, x: Tensor, fixed: bool = False) -> Tensor:
        """`fixed` takes torch's own, whatever was measured: another process may have measured otherwise."""
        if fixed or self._laid_out is None or torch.is_grad_enabled() or not x.numel():
            return F.linear(x, self._weight, self._bias)
        rows = x.numel() // x.shape[-1]
        if not (missing := _round(rows) - rows):
            return _onednn(x, self._laid_out, self._bias)
        filled = torch.cat((x.reshape(rows, -1), x.new_zeros(missing, x.shape[-1])))
        return _onednn(filled, self._laid_out, self._bias)[:rows].view(*x.shape[:-1], -1)


def takes_onednn(weight: Tensor) -> bool:
    """Whether the product with this weight is oneDNN's, as far as it has been measured."""
    return _is_long(weight) and _taken.get(weight.shape, False)


def is_steady(weight: Tensor) -> bool:
    """Whether a row's product with this weight depends so little on the rows beside it that calls may share it."""
    return takes_onednn(weight) or not _is_long(weight)


def measure(weight: Tensor) -> None:
    """Decides by measurement which product is taken with weights of this shape. Some milliseconds for one that was not seen before."""
    if _is_long(weight) and weight.shape not in _taken:
        _taken[weight.shape] = _is_fast(weight)


def set_precision(precision: str) -> None:
    """Of the float32 products that follow: torch keeps it for the whole process, and only one call computes at a time.

    "highest" is float32 throughout. "high" and "medium" let the hardware round the factors first: to TF32 (10 bits, relative error about
    5e-4 a factor) on GPUs that have it, to bfloat16 (7 bits, about 4e-3) on CPUs with AMX; elsewhere they change nothing.
    """
    if precision != torch.get_float32_matmul_precision():
        torch.set_float32_matmul_precision(precision)


def _round(rows: int) -> int:
    """How many rows are computed in place of so many, at most an eighth more: oneDNN makes code for every number of rows that it meets, in
    half a millisecond and half a megabyte, and keeps it.
    """
    step = max(4, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


def _is_long(weight: Tensor) -> bool:
    """Whether the sums are such that their order shows."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.shape[1] > NARROW


def _lay_out(weight: Tensor) -> Tensor:
    """The weight as oneDNN likes it best, for some tens of rows, opaque to everything else; a heavy one as it is."""
    if weight.numel() > HEAVY:
        return weight
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    return laid_out


def _onednn(x: Tensor, laid_out: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")
    return product


def _is_fast(weight: Tensor) -> bool:
    try:
        laid_out = _lay_out(weight)
        x = torch.full((max(ROWS, WORK // weight.numel()), weight.shape[1]), 0.5)
        return _seconds(_onednn, x, laid_out) <= PATIENCE * _seconds(F.linear, x, weight)
    except (AttributeError, NotImplementedError, RuntimeError):  # an internal operation: a release may lack it, or refuse these arguments
        return False


def _seconds(product: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight: Tensor) -> float:
    """The least of several runs, so that a neighbour's noise does not choose."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        product(x, weight, None)
        times.append(time.perf_counter() - started)
    return min(times)
