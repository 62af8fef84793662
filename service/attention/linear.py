"""The product of a projection, and whether its rows may be computed together with those of other calls.

A library may sum a row in another order when there are more rows, and on another processor in yet another one. Serving promises that a
call in a batch gets the result it gets alone, within 1e-6 of the largest value in float32 (law 7). So every product is tried: a weight is
batch-invariant where a row's product is alike however many rows there are, and calls to a layer with other weights run alone. That holds
whichever product is taken and on any processor; only a reproducible call is promised the same bits.

torch's float32 `F.linear` goes to MKL or OpenBLAS, and is hardly ever so for long sums. oneDNN's product with a weight laid out for it,
the operation that torch's own compiler emits, mostly is, and on most processors it is the faster one. It is an internal operation: where
a release lacks it, or a processor is slow at it, the product is `F.linear`.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from torch import Tensor

NARROW = 128  # inputs of a projection: up to so many, `F.linear` is fast
FEW = 32  # inputs: sums of so few terms hardly depend on their order
TOLERANCE = 5e-7  # of a row's largest value: how far its products with others may be from each other. Calls may differ by 1e-6
SHARED = 1 << 26  # multiplications of one product for which calls share a batch at most: with more rows it is not tried
TRIED = (1, 2, 5, 8, 16, 33, 100, 256)  # rows
HEAVY = 1 << 25  # numbers of a weight: beyond, 128 MB, it is not laid out anew, and so not held twice
WORK = 1 << 24  # multiplications with which both products are timed: so many that not what is around them decides
ROWS = 8  # at least
PATIENCE = 4.0  # this many times the other's time is as much as oneDNN's may take: what is hopeless, not what a busy machine makes of it

_taken: dict[torch.Size, bool] = {}  # weight's shape -> whether oneDNN's product is
_batch_invariant: dict[tuple[torch.Size, bool], bool] = {}  # (weight's shape, whether by oneDNN) -> whether its products are


class Linear:
    """x W^T + b for x [..., in] and one weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, onednn: bool | None = None) -> None:
        """By oneDNN, or by torch; where nothing is said, as was measured."""
        self._weight, self._bias = weight, bias
        self._laid_out = _lay_out(weight) if (takes_onednn(weight) if onednn is None else onednn) else None

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


def is_batch_invariant(weight: Tensor) -> bool:
    """Whether a row's product with this weight depends so little on the rows beside it that calls may share it. Tried once for a shape:
    some milliseconds.
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
    """Whether oneDNN's product is considered, and the order of torch's sums shows."""
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


@torch.inference_mode()
def _difference(shape: torch.Size, onednn: bool) -> float:
    """The largest difference between a row's product among many rows and among few, relative to the row's largest value; over random rows
    and a random weight of that shape.
    """
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(min(outputs, inputs), inputs, generator=generator).repeat(-(-outputs // min(outputs, inputs)), 1)[:outputs]
    counts = [rows for rows in TRIED if rows <= max(ROWS, SHARED // shape.numel())]
    x = torch.randn(counts[-1], inputs, generator=generator)
    product = Linear(weight, None, onednn)
    among_many = product(x)
    among_few = [product(x[:rows]) for rows in counts[:-1]]
    if inputs <= NARROW:  # short calls alone are computed in NumPy
        among_few += [torch.from_numpy(x[:rows].numpy() @ weight.numpy().T) for rows in (1, ROWS)]
    largest = among_many.abs().amax(1)
    return max(float(((few - among_many[: len(few)]).abs().amax(1) / largest[: len(few)]).max()) for few in among_few)


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
