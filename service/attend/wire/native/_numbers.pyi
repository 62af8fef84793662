"""The C extension of `module.c`; `numbers.h` describes its parts."""

from typing import Any

HAS_BOOLEANS: int
"""A list contains true or false."""
HAS_MINUS_INFINITY: int
"""A list contains "-inf"."""

def read(text: bytes, start: int, stop: int, max_lists: int, is_float32: bool) -> tuple[bytearray, tuple[int, ...], int] | None:
    """The nested list of numbers text[start:stop]: the memory of an array of float64, or of float32 if `is_float32`, its shape, and which
    literals it contains: HAS_BOOLEANS, HAS_MINUS_INFINITY. None for anything else, or for more than `max_lists` lists.

    Releases the GIL.
    """

def write(array: Any, decimals: int) -> bytes | None:
    """A contiguous float32 array as nested lists, with at most `decimals` digits after the point (-1: as many as needed). None for other
    arrays, and those without elements. Releases the GIL."""

def variants() -> list[str]:
    """The variants that this processor can run, the fastest first."""

def use(variant: str) -> None:
    """Choose the variant for all threads. Raises ValueError."""
