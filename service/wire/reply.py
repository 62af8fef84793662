"""A reply before it is encoded, and the conversion of its arrays to the requested datatype."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from service.errors import InvalidRequest
from service.tensors import BY_NUMPY, DATATYPES, Array
from service.wire.schemas.attend import ReplyOptions

Buffer: TypeAlias = bytes | memoryview  # a piece of an encoded reply; its len() is its bytes
MINUS_INFINITY_IS_A_VALUE = frozenset({"scores", "log_sum_exp"})


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply. A tensor is an array, or with `select.top_k` two arrays, `keys` and `values`."""

    layer: dict[str, str]  # name, fingerprint
    fully_masked_rows: int
    datatype: str  # V2 name of the datatype in which numbers are sent
    tensors: dict[str, Array | dict[str, Array]] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None  # of an analysis: name -> array, or parts by name; a part that is a list contains tokens
    session: dict[str, Any] | None = None  # id and length, of a call to a session

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Every array with its name; those of one tensor as `name.keys` and `name.values`."""
        for name, tensor in self.tensors.items():
            if isinstance(tensor, dict):
                yield from ((f"{name}.{part}", array) for part, array in tensor.items())
            else:
                yield name, tensor


def may_be_minus_infinity(name: str) -> bool:
    """Whether -inf is a value of this output, or of a part of it such as `scores.0`."""
    return name.partition(".")[0] in MINUS_INFINITY_IS_A_VALUE


def wire_array(name: str, array: Array, datatype: str, options: ReplyOptions) -> tuple[Array, Array | None]:
    """The array in its wire datatype, and a mask of its elements that are not finite (None: all are finite).

    Raises InvalidRequest, with output and index, if an element is NaN or overflowed and `options.nonfinite` is "error".
    """
    if array.dtype.kind in "iub":
        return array, None
    if array.dtype != (wanted := DATATYPES[datatype].numpy):
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(wanted)
    finite = np.isfinite(array)
    if 0 not in finite.tobytes():  # for few numbers, `finite.all()` takes four times as long
        return array, None
    if options.nonfinite == "error":
        wrong = ~finite
        if may_be_minus_infinity(name):
            wrong &= ~np.isneginf(array.astype(np.float64))
        if wrong.any():
            index = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), array.shape)]
            got = f"{name}{index} = {float(array[tuple(index)])}"
            raise InvalidRequest.where("/reply/nonfinite", f"finite numbers in {name} as {BY_NUMPY[array.dtype].name}", got)
    return array, ~finite
