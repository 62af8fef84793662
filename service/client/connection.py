"""What both clients tell httpx: where, how long, who. The one place where a key becomes a header."""

from collections.abc import Mapping
from typing import Any

import httpx

from service import __version__

# uvicorn closes a connection that is idle for 5 seconds; letting go a little earlier means not to write into one that is being closed.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=4.0)


def options(base_url: str, timeout: float | None, api_key: str | None, headers: Mapping[str, str] | None) -> dict[str, Any]:
    """The keyword arguments of `httpx.Client` and `httpx.AsyncClient`."""
    given = {"User-Agent": f"attend/{__version__}", **(headers or {})}
    if api_key is not None:
        given["Authorization"] = f"Bearer {api_key.strip()}"  # a file that holds a key ends in a newline
    return {"base_url": base_url, "timeout": timeout, "headers": given, "limits": LIMITS}
