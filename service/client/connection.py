"""Types and constants of the connections of both clients, their certificates, and the exceptions for failed connections."""

import ssl
from enum import Enum
from pathlib import Path
from typing import Literal

import httpx

from service.errors import AttendError, TimedOut, Unreachable, Untrusted

# The server closes connections that are idle for 75 seconds. An earlier expiry avoids a write into a connection that is being closed.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=60.0)
API_KEY = "ATTEND_API_KEY"  # environment variable with the API key, for commands and unpickled clients
CA = "ATTEND_CA"  # environment variable with the CA bundle, for commands
SECRET = {"authorization", "proxy-authorization", "x-api-key", "cookie"}  # headers that a pickle leaves out

Verify = ssl.SSLContext | str | Path | bool


class UseClientDefault(Enum):
    """The type of a `timeout` argument that is left out."""

    USE_CLIENT_DEFAULT = "the client's timeout"

    def __repr__(self) -> str:
        return f"<{self.value}>"


USE_CLIENT_DEFAULT = UseClientDefault.USE_CLIENT_DEFAULT
Timeout = float | Literal[UseClientDefault.USE_CLIENT_DEFAULT] | None


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
