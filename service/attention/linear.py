"""The matrix product of a projection: chooses a fast implementation, and tests whether its rows may be shared between calls.

The order in which a library sums the terms of a row depends on the number of rows and on the processor. Law 7 guarantees that a call in a
batch has the same result as alone, within 1e-6 of the largest value in float32. So every product is tested: a weight is batch-invariant if
the product of a row hardly depends on the number of rows. Calls to a layer with other weights run alone. Bitwise equality is guaranteed for
reproducible calls only.

torch's float32 `F.linear` uses MKL or OpenBLAS and is rarely batch-invariant for long sums. oneDNN's product with a reordered weight, which
torch's compiler uses, mostly is, and on most processors it is faster. It is an internal operation of torch: if it is missing or slow,
`F.linear` is used.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

NARROW = 128  # inputs of a projection; `F.linear` is fast for so many or fewer
FEW = 32  # inputs; the rounding of sums of so few terms hardly depends on their order
TOLERANCE = 5e-7  # largest relative difference for a batch-invariant product; half of the 1e-6 that law 7 allows
SHARED = 1 << 26  # most multiplications in a product that calls share; larger ones are not tested
TRIED = (1, 2, 5, 8, 16, 33, 100, 256)  # numbers of rows that are tested
HEAVY = 1 << 25  # most numbers (128 MB) of a weight that is reordered, which stores it twice
WORK = 1 << 24  # multiplications in a timed product, so many that overhead does not matter
ROWS = 8  # least rows in a tested or timed product
PATIENCE = 4.0  # oneDNN is rejected only if it takes more than this many times as long, so that noise of a busy machine does not decide

_taken: dict[torch.Size, bool] = {}  # weight's shape -> whether oneDNN's product is used
_batch_invariant: dict[tuple[torch.Size, bool], bool] = {}  # (weight's shape, uses oneDNN) -> batch-invariant


class Linear:
    """x W^T + b for x [..., in] and one weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, onednn: bool | None = None) -> None:
        """`onednn`: whether to use oneDNN's product; None: as measured."""
        self._weight, self._bias = weight, bias
        self._laid_out = _lay_out(weight) if (takes_onednn(weight) if onednn is None else onednn) else None

    def __call__(self, x: Tensor, fixed: bool = False) -> Tensor:
        """`fixed` uses `F.linear` whatever was measured, since another process may have measured otherwise."""
        if fixed or self._laid_out is None or torch.is_grad_enabled() or not x.numel():
            return F.linear(x, self._weight, self._bias)
        rows = x.numel() // x.shape[-1]
        if not (missing := _round(rows) - rows):
            return _onednn(x, self._laid_out, self._bias)
        filled = torch.cat((x.reshape(rows, -1), x.new_zeros(missing, x.shape[-1])))
        return _onednn(filled, self._laid_out, self._bias)[:rows].view(*x.shape[:-1], -1)


def takes_onednn(weight: Tensor) -> bool:
    """Whether oneDNN's product is used for this weight; False if it was not measured."""
    return _is_long(weight) and _taken.get(weight.shape, False)


def is_batch_invariant(weight: Tensor) -> bool:
    """Whether the product of a row with this weight depends so little on the number of rows that calls may share a product. The first
    test of a shape takes milliseconds.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or weight.shape[1] <= FEW:
        return True
    if _is_long(weight) and not takes_onednn(weight):
        return False
    tried = weight.shape, takes_onednn(weight)
    if tried not in _batch_invariant:
        _batch_invariant[tried] = _difference(*tried) <= TOLERANCE
    return _batch_invariant[tried]


def measure(weight: Tensor) -> None:
    """Choose the product for weights of this shape by measurement. A new shape takes milliseconds."""
    if _is_long(weight) and weight.shape not in _taken:
        _taken[weight.shape] = _is_fast(weight)


def set_precision(precision: str) -> None:
    """Set the precision of the following float32 products. It is global in torch; this is safe, since only one call computes at a time.

    "highest" is float32 throughout. "high" and "medium" let the hardware round the factors first: to TF32 (10 bits, relative error about
    5e-4 a factor) on GPUs that have it, to bfloat16 (7 bits, about 4e-3) on CPUs with AMX; elsewhere they change nothing.
    """
    if precision != torch.get_float32_matmul_precision():
        torch.set_float32_matmul_precision(precision)


def _round(rows: int) -> int:
    """Round the number of rows up: oneDNN compiles and keeps code for each number of rows that it encounters, in half a millisecond and
    half a megabyte.
    """
    step = max(4, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


def _is_long(weight: Tensor) -> bool:
    """Whether oneDNN's product is considered: float32 on a CPU with more than NARROW inputs."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.shape[1] > NARROW


def _lay_out(weight: Tensor) -> Tensor:
    """The weight in oneDNN's opaque format, optimised for tens of rows; a weight of more than HEAVY numbers unchanged."""
    if weight.numel() > HEAVY:
        return weight
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    return laid_out


def _onednn(x: Tensor, laid_out: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")
    return product


@torch.inference_mode()
def _difference(shape: torch.Size, onednn: bool) -> float:
    """The largest difference between the product of a row among many rows and among few, relative to the largest value of the row, for
    random rows and a random weight.
    """
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(min(outputs, inputs), inputs, generator=generator).repeat(-(-outputs // min(outputs, inputs)), 1)[:outputs]
    counts = [rows for rows in TRIED if rows <= max(ROWS, SHARED // shape.numel())]
    x = torch.randn(counts[-1], inputs, generator=generator)
    product = Linear(weight, None, onednn)
    among_many = product(x)
    among_few = [product(x[:rows]) for rows in counts[:-1]]
    if inputs <= NARROW:  # `short` computes single calls in NumPy
        among_few += [torch.from_numpy(x[:rows].numpy() @ weight.numpy().T) for rows in (1, ROWS)]
    largest = among_many.abs().amax(1)
    return max(float(((few - among_many[: len(few)]).abs().amax(1) / largest[: len(few)]).max()) for few in among_few)


def _is_fast(weight: Tensor) -> bool:
    try:
        laid_out = _lay_out(weight)
        x = torch.full((max(ROWS, WORK // weight.numel()), weight.shape[1]), 0.5)
        return _seconds(_onednn, x, laid_out) <= PATIENCE * _seconds(F.linear, x, weight)
    except (AttributeError, NotImplementedError, RuntimeError):  # torch may lack this internal operation or reject its arguments
        return False


def _seconds(product: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight: Tensor) -> float:
    """The shortest of five runs, so that other load on the machine does not decide."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        product(x, weight, None)
        times.append(time.perf_counter() - started)
    return min(times)
