"""The changes of each step of a layer's program: what people do wrongly in any step of any layer.

A step is left out, done twice, done after the next one, or with the opposite sign (`steps.py`); it reads an operand of another one
(`operands.py`); it runs over another axis; heads and rows have another order, or are read from memory in another order of axes
(`orders.py`). Names and arithmetic are made of the step.
"""

from collections.abc import Iterator

from attend.check.algebra.operands import changed_operands
from attend.check.algebra.orders import changed_orders
from attend.check.algebra.steps import changed_steps
from attend.check.computation import Computation
from attend.check.mistakes.mistake import Named


def changes_of(c: Computation) -> Iterator[Named]:
    """The changes of the steps of a computation's program."""
    yield from changed_operands()
    yield from changed_steps([run.step for run in c.steps()])
    yield from changed_orders(c.spec)
