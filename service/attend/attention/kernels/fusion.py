"""Which kernels compute a program: a kernel declares the steps that it fuses, and is used if these are all that it would replace.

A new step that no kernel declares is never ignored: programs that have it between fused steps are computed step by step.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from attend.attention.operators.step import Step, Value
from attend.attention.program import Program


class Kernel(ABC):
    """A kernel of one layer."""

    name: str
    fuses: frozenset[str]  # names of steps
    needs: frozenset[str]  # those of them that a program must have
    reads: tuple[str, ...]  # values that it gets if the fused steps read them
    implied: frozenset[str] = frozenset()  # other values that the fused steps may read: it knows them from what it fuses
    brings: tuple[str, ...] = ()  # values that it gets although no step reads them
    writes: str  # the value that it computes

    @abstractmethod
    def compute(self, *args: Any, **values: Any) -> Any:
        """The value that it writes, from those that it reads. Raises Inexact."""


class Inexact(Exception):
    """A kernel cannot compute the numbers of a call exactly: they are computed step by step."""


def fuse(program: Sequence[Step], kernel: Kernel, wanted: Collection[str]) -> Program | None:
    """The program with a step of the kernel in place of those that it fuses; None if it does not compute the wanted values.

    `program` has only steps that the wanted values need. No other step may read, or stand between the fused ones and change, what they
    write.
    """
    fused = [step for step in program if step.name in kernel.fuses]
    if not kernel.needs <= {step.name for step in fused}:
        return None
    inner: set[str] = set()  # values as fused steps wrote them
    reads: set[str] = set()
    last = max(i for i, step in enumerate(program) if step.name in kernel.fuses)
    for i, step in enumerate(program):
        if step.name in kernel.fuses:
            reads |= {name for name in step.reads if name not in inner}
            inner |= {*step.writes}
        elif any(name in inner and (name != kernel.writes or i < last) for name in (*step.reads, *step.writes)):
            return None
    if not reads <= {*kernel.reads} | kernel.implied or inner & {*wanted} - {kernel.writes} or {step.name for step in fused} & {*wanted}:
        return None
    names = (*(name for name in kernel.reads if name in reads), *kernel.brings)
    axes: Value = next(step.writes[kernel.writes] for step in reversed(fused) if kernel.writes in step.writes)
    formula = ";  ".join(step.formula for step in fused)
    replacement = Step(
        kernel.name, names, {kernel.writes: axes}, formula, lambda m, *values: kernel.compute(**dict(zip(names, values, strict=True)))
    )
    others = [step for step in program[: last + 1] if step.name not in kernel.fuses]
    return (*others, replacement, *program[last + 1 :])
