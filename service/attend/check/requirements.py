"""What a kernel may require of its calls: a dtype, heads of a width, whole tiles of rows.

What raises in every call is called with these, first with one of them, and then with several.
"""

from collections.abc import Iterator
from itertools import product

from attend.check.convention import Convention

DTYPES = (None, "float16", "bfloat16", "float32")  # None: as usual
WIDTHS = (None, 64)  # of heads
TILES = (None, 16, 64, 128)  # rows: all lengths are multiples
USUAL_HEADS = 3
NOR = f"nor in half precision, with heads of {WIDTHS[-1]} numbers or with whole tiles of {TILES[-1]} rows"  # where it raises, too


def with_requirements(convention: Convention) -> Iterator[Convention]:
    """The convention with each set of requirements that its options leave open."""
    sets = sorted(product(DTYPES, WIDTHS, TILES), key=lambda values: sum(value is not None for value in values))
    for dtype, width, tile in sets[1:]:
        values = {"dtype": dtype, "d_model": width and width * (convention.num_heads or USUAL_HEADS), "tile": tile}
        if (other := convention.tried(**{name: value for name, value in values.items() if value is not None})) != convention:
            yield other


def requirements_in_words(before: Convention, after: Convention) -> Iterator[str]:
    """What was found that a candidate requires."""
    if after.dtype != before.dtype:
        yield f"it raises in {'float64' if after.framework == 'numpy' else 'float32'}, and takes {after.dtype}"
    if after.d_model != before.d_model:
        yield f"it raises with {before.d_model} numbers in all heads, and takes {after.d_model}"
    if after.one_length:
        yield "it takes as many keys as queries alone"
    if after.tile > 1:
        yield f"it takes whole tiles of {after.tile} rows alone"
