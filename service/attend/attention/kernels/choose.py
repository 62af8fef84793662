"""Chooses the kernels of a call by what they declare."""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from attend.attention.call import Call
from attend.attention.kernels.declaration import Declaration


class Kernel(Protocol):
    """A kernel of one layer, which its declaration has."""

    @property
    def declaration(self) -> Declaration: ...

    def suits(self, call: Call) -> bool:
        """Whether the sizes of a call that the declaration has are those for which the kernel is made."""
        ...


K = TypeVar("K", bound=Kernel)


def choose(kernels: Iterable[K | None], call: Call, outputs: frozenset[str]) -> Iterator[K]:
    """Yield those of a layer's kernels that compute these outputs of the call, in the given order.

    A kernel may still return None for numbers that it cannot compute exactly; the next one is then tried.
    """
    for kernel in kernels:
        if kernel is not None and kernel.declaration.has_call(call, outputs) and kernel.suits(call):
            yield kernel
