"""Numbers as JSON text, read and written by a C extension that releases the GIL.

The extension is optional: without a compiler the package is installed without it. Then, and if the extension fails its self-test on this
processor, `read` and `write` return None, and Python does the work. They also return None for irregular lists.
"""

import json
from typing import Any

import numpy as np

from attend.tensors import Array

try:
    from attend.wire.native import _numbers

    HAS_BOOLEANS, HAS_MINUS_INFINITY = _numbers.HAS_BOOLEANS, _numbers.HAS_MINUS_INFINITY  # literals in a list
except (ImportError, AttributeError):  # none, or one compiled from an older version
    _numbers = None  # type: ignore[assignment]  # in place of a module
    HAS_BOOLEANS = HAS_MINUS_INFINITY = 0  # nothing is read that has them

PYTHON = "python"  # the variant without the extension
NO_LIMIT = -1
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
SAMPLES = ["0.1", "-12.5", "1e-07", "3.1415927", "16777216", "0.30000001192092896", "-1.17549435e-38", "2.5E+2", "9007199254740993"]
_variant = PYTHON


def variants() -> list[str]:
    """The variants that can run here, the fastest first."""
    return [*(_numbers.variants() if _numbers else []), PYTHON]


def variant() -> str:
    """The variant in use: "python", or the instruction set of the extension."""
    return _variant


def use(name: str) -> None:
    """Choose a variant for all threads. Raises ValueError if it cannot run here."""
    global _variant
    if name not in variants():
        raise ValueError(f"no variant {name}, only {variants()}")
    if name != PYTHON:
        _numbers.use(name)
    _variant = name


def read(text: bytes, start: int, stop: int, max_lists: int, dtype: np.dtype[Any] = FLOAT64) -> tuple[Array, int] | None:
    """The nested list of numbers text[start:stop] as an array, of float32 if `dtype` is, else of float64; and which literals it contains.

    In the array, true, false and "-inf" are 1, 0 and -inf. None for any other text, and for more than `max_lists` lists.
    """
    if _variant == PYTHON or (found := _numbers.read(text, start, stop, max_lists, dtype == FLOAT32)) is None:
        return None
    memory, shape, literals = found
    return np.frombuffer(memory, FLOAT32 if dtype == FLOAT32 else FLOAT64).reshape(shape), literals


def write(array: Array, decimals: int | None = None) -> bytes | None:
    """A float32 array as nested lists, in the fewest digits or with at most `decimals` digits after the point. Numbers that are not finite
    are null. None for other arrays."""
    if _variant == PYTHON or array.dtype != FLOAT32 or not 0 < array.ndim <= 4:
        return None
    return _numbers.write(np.ascontiguousarray(array), NO_LIMIT if decimals is None else decimals)


def _works() -> bool:
    """Whether the variant in use reads and writes a few numbers as Python does, in rows long enough for vector instructions."""
    rows = [SAMPLES * 15, SAMPLES[::-1] * 15]
    text = f"[[{','.join(rows[0])}],[{', '.join(rows[1])}]]".encode() + b" " * 64
    expected = np.array([list(map(float, row)) for row in rows])
    for dtype in (FLOAT32, FLOAT64):
        found = read(text, 0, len(text) - 64, 3, dtype)
        if found is None or found[0].tobytes() != expected.astype(dtype).tobytes():
            return False
    as_float32 = expected.astype(FLOAT32)
    rounded = np.round(as_float32.astype(FLOAT64), 3).astype(FLOAT32)
    for array, written in ((as_float32, write(as_float32)), (rounded, write(as_float32, 3))):
        if written is None or np.array(json.loads(written)).astype(FLOAT32).tolist() != array.tolist():
            return False
    return True


def choose() -> None:
    """Choose the fastest variant that works."""
    for name in variants():
        use(name)
        if name == PYTHON or _works():
            return


choose()
