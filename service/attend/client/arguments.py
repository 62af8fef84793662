"""Types of the operations' arguments that are no fields of requests, and of tensors. `fields.py` has the types of the other fields."""

from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    TensorLike: TypeAlias = ArrayLike
else:

    class TensorLike:
        """Anything that numpy converts to an array, or a torch tensor. numpy's own type would fill a signature with its parts."""


class UseClientDefault(Enum):
    """The type of a `timeout` argument that is left out."""

    USE_CLIENT_DEFAULT = "the client's timeout"

    def __repr__(self) -> str:
        return f"<{self.value}>"


USE_CLIENT_DEFAULT = UseClientDefault.USE_CLIENT_DEFAULT
Timeout = float | Literal[UseClientDefault.USE_CLIENT_DEFAULT] | None
