"""The connection arguments of both clients, which omit secrets when pickled, and the exceptions for failed connections."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import httpx

from service import __version__
from service.errors import AttendError, TimedOut, Unreachable, Untrusted

# The server closes connections that are idle for 75 seconds. An earlier expiry avoids a write into a connection that is being closed.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=60.0)
API_KEY = "ATTEND_API_KEY"  # environment variable with the API key, for commands and unpickled clients
CA = "ATTEND_CA"  # environment variable with the CA bundle, for commands
SECRET = {"authorization", "proxy-authorization", "x-api-key", "cookie"}

Verify = ssl.SSLContext | str | Path | bool


class UseClientDefault(Enum):
    """The type of a `timeout` argument that is left out."""

    USE_CLIENT_DEFAULT = "the client's timeout"

    def __repr__(self) -> str:
        return f"<{self.value}>"


USE_CLIENT_DEFAULT = UseClientDefault.USE_CLIENT_DEFAULT
Timeout = float | Literal[UseClientDefault.USE_CLIENT_DEFAULT] | None


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The arguments of an httpx client. A pickle has no key and no secret headers; unpickling takes the key from ATTEND_API_KEY."""

    base_url: str
    timeout: float | None
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    verify: Verify = True

    def for_httpx(self) -> dict[str, Any]:
        """Keyword arguments for `httpx.Client` and `httpx.AsyncClient`. Raises OSError if certificates cannot be read."""
        headers = {"User-Agent": f"attend/{__version__}", **self.headers}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key.strip()}"  # a key from a file ends in a newline
        return {
            "base_url": self.base_url,
            "timeout": self.timeout,
            "headers": headers,
            "limits": LIMITS,
            "verify": ssl_context(self.verify),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.verify, ssl.SSLContext):
            raise TypeError("a client with an SSLContext cannot be pickled; pass the path of the certificates as verify")
        headers = {name: text for name, text in self.headers.items() if name.lower() not in SECRET}
        had_key = self.api_key is not None or len(headers) < len(self.headers)
        return _unpickle, (self.base_url, self.timeout, headers, self.verify, had_key)


def _unpickle(base_url: str, timeout: float | None, headers: Mapping[str, str], verify: Verify, had_key: bool) -> ConnectionOptions:
    return ConnectionOptions(base_url, timeout, os.environ.get(API_KEY) if had_key else None, headers, verify)


def ssl_context(verify: Verify) -> ssl.SSLContext | bool:
    """httpx's `verify`; from a path, a context that trusts only the certificates there. Raises OSError if there are none."""
    if isinstance(verify, bool | ssl.SSLContext):
        return verify
    path = Path(verify)
    try:
        return ssl.create_default_context(capath=path) if path.is_dir() else ssl.create_default_context(cafile=path)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise OSError(f"expected a file or folder of certificates in PEM format, got {path}: {reason}") from None


def connection_error(error: Exception, url: str) -> AttendError:
    """The exception for a request that got no response."""
    if isinstance(error, httpx.TimeoutException):
        return TimedOut(f"no answer from {url} in time ({type(error).__name__})")
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return Unreachable(f"expected a URL such as http://127.0.0.1:8000, got {url!r}")
    if (certificate := certificate_error(error)) is not None:
        return Untrusted(f"the certificate of {url} is not trusted: {certificate.verify_message}")
    return Unreachable(f"no answer from {url}: {str(error) or type(error).__name__}")


def certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The failed verification of a certificate that caused an error; None if the cause is another."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error
