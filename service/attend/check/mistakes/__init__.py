"""The known mistakes that no change of a step (`algebra/`) makes: for each its name, as in "this is what comes out when …", how it changes
a computation of the reference, and its arithmetic (`mistake.py`).

A mistake is one row of a file here, made of functions in `changes.py`.
"""

from attend.check.mistakes import decoding, masks, operators, precision, projections, scores
from attend.check.mistakes.mistake import Mistake

__all__ = ["MISTAKES", "Mistake"]

TABLES = (scores, masks, projections, operators, precision, decoding)
MISTAKES: dict[str, Mistake] = {name: mistake for table in TABLES for name, mistake in table.MISTAKES.items()}
