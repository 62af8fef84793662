"""torch, imported when it is first used: specs, which consist of the operators' parts, are read where there is no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        """Stands for the module torch; keeps each name that it has looked up."""

        def __getattr__(self, name: str) -> object:
            import torch

            setattr(self, name, getattr(torch, name))
            return getattr(torch, name)

    torch = _Torch()

__all__ = ["torch"]
