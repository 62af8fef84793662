"""Multi-head attention as a service. `from attend import Client` imports the Python client; the command `attend serve` starts the server.

The names of the client are imported when they are first used, so that the server does not load httpx. docs/design.md lists the packages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attend.version import __version__

if TYPE_CHECKING:
    from attend.client import AsyncClient, AsyncSession, Capture, Change, Client, Retries, Session, capture, interventions

__all__ = ["AsyncClient", "AsyncSession", "Capture", "Change", "Client", "Retries", "Session", "__version__", "capture", "interventions"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("attend.client"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
