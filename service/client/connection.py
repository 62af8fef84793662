"""What both clients tell httpx: where, how long, who, whom to believe. The one place where a key becomes a header, and what keeps it out of
pickles. Knows no call.
"""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import httpx

from service import __version__

# A server closes connections that are idle for 75 seconds; letting go earlier means not to write into one that is being closed.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=60.0)
API_KEY = "ATTEND_API_KEY"  # the variable that holds a caller's key, where nobody hands one over
CA = "ATTEND_CA"  # the variable that names certificates, for commands
SECRET = {"authorization", "proxy-authorization", "x-api-key", "cookie"}

Verify = ssl.SSLContext | str | Path | bool


class Default(Enum):
    """What a parameter is where a call says nothing of it."""

    CLIENTS = "the client's"

    def __repr__(self) -> str:
        return f"<{self.value}>"


CLIENTS = Default.CLIENTS
Timeout = float | Literal[Default.CLIENTS] | None


@dataclass(frozen=True, slots=True)
class Connection:
    """Everything that an httpx client is made of; it can be pickled, and then holds no secret.

    A key, and headers that hold one, stay behind; where it is unpickled the key is that of the variable ATTEND_API_KEY.
    """

    base_url: str
    timeout: float | None
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    verify: Verify = True

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `httpx.Client` and `httpx.AsyncClient`. Raises OSError where certificates cannot be read."""
        given = {"User-Agent": f"attend/{__version__}", **self.headers}
        if self.api_key is not None:
            given["Authorization"] = f"Bearer {self.api_key.strip()}"  # a file that holds a key ends in a newline
        return {"base_url": self.base_url, "timeout": self.timeout, "headers": given, "limits": LIMITS, "verify": trusted(self.verify)}

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.verify, ssl.SSLContext):
            raise TypeError("a client that was given an SSLContext cannot be pickled; give it the path of the certificates")
        told = {name: text for name, text in self.headers.items() if name.lower() not in SECRET}
        keyed = self.api_key is not None or len(told) < len(self.headers)
        return _unpickled, (self.base_url, self.timeout, told, self.verify, keyed)


def _unpickled(base_url: str, timeout: float | None, headers: Mapping[str, str], verify: Verify, keyed: bool) -> Connection:
    return Connection(base_url, timeout, os.environ.get(API_KEY) if keyed else None, headers, verify)


def trusted(verify: Verify) -> ssl.SSLContext | bool:
    """What httpx takes: of a file or a folder of certificates, the context that believes in them alone. Raises OSError without any."""
    if isinstance(verify, bool | ssl.SSLContext):
        return verify
    path = Path(verify)
    try:
        return ssl.create_default_context(capath=path) if path.is_dir() else ssl.create_default_context(cafile=path)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise OSError(f"expected the file of one or more certificates in PEM form, got {path}: {reason}") from None
