"""Chooses the kernels of a call by what they declare, and computes it with the first one that can."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from attend.attention.call import Call
from attend.attention.kernels.declaration import Declaration

Inputs = TypeVar("Inputs", contravariant=True)
Given = TypeVar("Given")


class Heads(NamedTuple):
    """What the attention of heads is computed from: query [b, h, q, d], key and value [b, kv heads, k, …], fully masked rows [b, h, q]."""

    query: Tensor
    key: Tensor
    value: Tensor
    fully_masked: Tensor | None


class Kernel(Protocol[Inputs]):
    """A kernel of one layer. `Inputs` is what it gets beside a call: `Heads`, the pages of a cache, or None for a whole call."""

    @property
    def declaration(self) -> Declaration: ...

    def suits(self, call: Call) -> bool:
        """Whether the sizes of a call that the declaration has are those for which the kernel is made."""
        ...

    def compute(self, call: Call, inputs: Inputs, outputs: frozenset[str]) -> dict[str, Tensor] | None:
        """These outputs of a call that the declaration has and that suits; None if the kernel cannot compute its numbers exactly."""
        ...


def choose(kernels: Sequence[Kernel[Given]], call: Call, outputs: frozenset[str]) -> Iterator[Kernel[Given]]:
    """Yield those of a layer's kernels that are made for these outputs of the call, in the given order."""
    return (kernel for kernel in kernels if kernel.declaration.has_call(call, outputs) and kernel.suits(call))


def compute(kernels: Sequence[Kernel[Given]], call: Call, inputs: Given, outputs: frozenset[str]) -> dict[str, Tensor] | None:
    """These outputs, from the first kernel that computes them; None if none does."""
    for kernel in choose(kernels, call, outputs):
        if (tensors := kernel.compute(call, inputs, outputs)) is not None:
            return tensors
    return None
