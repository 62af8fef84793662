"""The known mistakes: for each, its name, as in "this is what comes out when …", how it changes a computation of the reference, and its
arithmetic (`mistake.py`).

A mistake is one row of a file here, made of functions in `changes.py`. The key of a table says what its mistakes are about; mistakes about
the same are not combined.
"""

from attend.check.mistakes import (
    decoding,
    heads,
    masks,
    norms,
    outputs,
    packed,
    parts,
    positions,
    precision,
    projections,
    rope,
    scores,
    softmax,
)
from attend.check.mistakes.mistake import Mistake

__all__ = ["MISTAKES", "Mistake"]

TABLES = (scores, masks, softmax, heads, projections, outputs, parts, positions, rope, norms, precision, decoding, packed)
# What is changed -> the mistake, as in "this is what comes out when …" -> its change and arithmetic
MISTAKES: dict[str, dict[str, Mistake]] = {subject: rows for table in TABLES for subject, rows in table.MISTAKES.items()}
