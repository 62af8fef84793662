"""Chunks: a query attends to the keys of its own chunk of positions (Llama 4). `attention/masks.py` has the mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attend.attention.operators.declarations import Interval, LeftOut
from attend.attention.operators.operator import Operator

if TYPE_CHECKING:
    from attend.attention.operators.operator import Draw, Fields
    from attend.spec_parts import Dimensions


class ChunksOperator(Operator):
    name, field, positional = "chunks", "chunk_size", True
    left_out = LeftOut("the division into chunks", "all keys (that no mask blocks) are seen", "keys of other chunks are blocked")

    @classmethod
    def interval(cls, spec: Dimensions) -> Interval:
        return Interval(chunk=getattr(spec, cls.field))

    @classmethod
    def is_relative(cls, spec: Dimensions) -> bool:
        """Where a chunk begins depends on the position itself."""
        return False

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Fewer positions than most calls have keys."""
        return draw.integer(1, 6)
