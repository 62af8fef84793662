"""The fastest exact product for a projection, chosen by measurement.

torch's float32 `F.linear` goes to MKL, which takes slow kernels on some processors; the same product through oneDNN, the operation that
torch's own compiler emits, can be more than twice as fast for many rows and slower for few. Which, and from how many rows on, depends
on the machine: so the candidates are timed once for each shape of weight, and what came out is kept here, in one place. Both are
exact float32 products; they differ by rounding. Where a torch release lacks the operation, or on another device, it is `F.linear`.
"""

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

ROWS = (32, 128, 512)  # row counts at which the candidates meet
LARGEST = 1 << 27  # multiplications of one trial, some milliseconds; of a weight too large for any row count, the first is tried
ADVANTAGE = 0.9  # the other must take less than this share of F.linear's time
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_threshold: dict[tuple[torch.Size, int], float] = {}  # weight's shape and threads -> rows of an item from which oneDNN is taken


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b for x [..., n, in] and W [out, in].

    The rows that decide are those of one item: how many items are computed together must not choose another product for any of them.
    """
    rows = x.shape[-2]
    if rows >= ROWS[0] and rows >= rows_for_onednn(weight) and _applies(x, weight):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def rows_for_onednn(weight: Tensor) -> float:
    """From how many rows of an item on the product with this weight is oneDNN's, as far as it has been measured."""
    return _threshold.get((weight.shape, torch.get_num_threads()), math.inf)


def _applies(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype == torch.float32 and not weight.is_cuda and not torch.is_grad_enabled()


def set_precision(precision: str) -> None:
    """Of the float32 products that follow: torch keeps it for the whole process, and only one call computes at a time.

    "highest" is float32 throughout. "high" and "medium" let the hardware round the factors first: to TF32 (10 bits, relative error about
    5e-4 a factor) on GPUs that have it, to bfloat16 (7 bits, about 4e-3) on CPUs with AMX; elsewhere they change nothing.
    """
    if precision != torch.get_float32_matmul_precision():
        torch.set_float32_matmul_precision(precision)


def choose(weight: Tensor) -> float:
    """Measures the candidates for a weight [out, in] and remembers the choice: the rows from which oneDNN is taken, or infinity.

    Takes some tens of milliseconds for a shape not seen before.
    """
    if weight.dtype != torch.float32 or weight.is_cuda:
        return math.inf
    key = (weight.shape, torch.get_num_threads())
    if key not in _threshold:
        _threshold[key] = _measure(weight)
    return _threshold[key]


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _measure(weight: Tensor) -> float:
    threshold = math.inf
    try:
        for rows in reversed([rows for rows in ROWS if rows * weight.numel() <= LARGEST] or ROWS[:1]):
            x = torch.full((rows, weight.shape[1]), 0.5)
            if _seconds(_onednn, x, weight) > ADVANTAGE * _seconds(F.linear, x, weight):
                break
            threshold = rows
    except (AttributeError, RuntimeError):  # an internal operation: a release may lack it, or refuse these arguments
        return math.inf
    return threshold


def _seconds(product: Product, x: Tensor, weight: Tensor) -> float:
    """The least of several runs, so that a neighbour's noise does not choose."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        product(x, weight, None)
        times.append(time.perf_counter() - started)
    return min(times)
