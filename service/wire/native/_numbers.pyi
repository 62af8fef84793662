"""The C extension; `numbers.h` and `module.c` beside this file say more."""

from typing import Any

def read(text: bytes, start: int, stop: int, most_lists: int, narrow: bool) -> tuple[bytearray, tuple[int, ...], int] | None:
    """The nested list of numbers text[start:stop], as the memory of a float64 (float32 if `narrow`) array, its shape, and which words it
    contains: 1 for true or false, 2 for "-inf". None for anything else, and for more than `most_lists` lists. Releases the GIL."""

def write(array: Any, decimals: int) -> bytes | None:
    """A contiguous float32 array as nested lists, with at most `decimals` digits after the point (-1: as many as needed). None for other
    arrays, and those without elements. Releases the GIL."""

def variants() -> list[str]:
    """The variants that this processor can run, the slowest first."""

def use(variant: str) -> None:
    """Choose the variant for all threads. Raises ValueError."""
