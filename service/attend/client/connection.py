"""The connections of both clients: their arguments, certificates, the exceptions for requests without a response, and retries.

A computation is always repeated. So is a step of a session, since it sends the length that the session must have. A change is repeated only
if the server certainly did not begin it: no connection was made, the queue was full, or the service itself refused with 503. Each delay is
drawn uniformly below a bound that doubles ("full jitter"), so that clients do not all retry at once. `Retry-After` is added to the drawn
delay. Nothing here sends or sleeps.
"""

import math
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from numbers import Real
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from attend.client.api_request import ApiRequest
from attend.client.arguments import USE_CLIENT_DEFAULT
from attend.errors import AttendError, TimedOut, Unreachable, Untrusted
from attend.version import __version__
from attend.wire.negotiation import PROBLEM_JSON

# The server closes connections that are idle for 75 seconds. An earlier expiry avoids a write into a connection that is being closed.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=60.0)
API_KEY = "ATTEND_API_KEY"  # environment variable with the API key, for commands and unpickled clients
CA = "ATTEND_CA"  # environment variable with the CA bundle, for commands
SECRET = {"authorization", "proxy-authorization", "x-api-key", "cookie"}  # headers that a pickle leaves out

Verify = ssl.SSLContext | str | Path | bool
Outcome = httpx.Response | Exception
LOST_CONNECTION = (httpx.NetworkError, httpx.RemoteProtocolError)  # ConnectError is a NetworkError, too; `may_repeat` checks it first
Transport = TypeVar("Transport", httpx.BaseTransport, httpx.AsyncBaseTransport)


@dataclass(frozen=True, slots=True)
class Retries:
    """The largest number of retries, and the first and longest delay in seconds."""

    times: int = 4
    first: float = 0.1
    longest: float = 5.0

    @classmethod
    def of(cls, retries: "Retries | int | None") -> "Retries":
        """Converts a client's argument: None is the default, a number is `times`."""
        return retries if isinstance(retries, Retries) else cls() if retries is None else cls(times=int(retries))


class Connections(Generic[Transport]):
    """The base class of both clients: their arguments."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        timeout: float | None = 60.0,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        retries: Retries | int | None = None,
        verify: Verify = True,
        transport: Transport | None = None,
    ) -> None:
        """`timeout` in seconds limits one response and all retries; None is no limit. Every method has its own `timeout`; both raise
        ValueError for what is no number of seconds.

        `api_key` is sent as a Bearer token, `headers` with every request. `Retries(times=0)` repeats nothing. `verify` is httpx's, or the
        file or folder of a CA bundle (OSError without certificates there); `transport` is httpx's.
        """
        self.base_url, self.timeout, self.retries = base_url, checked_timeout(timeout), Retries.of(retries)
        self._api_key, self._headers, self._verify = api_key, dict(headers or {}), verify
        self._transport: Transport | None = transport
        self._binary = True  # until a server or proxy accepts only JSON
        try:
            self._open()
        except httpx.InvalidURL as error:
            raise connection_error(error, base_url) from None

    def _open(self) -> None:
        raise NotImplementedError

    def _httpx_options(self) -> dict[str, Any]:
        """Keyword arguments of an httpx client. Raises OSError if certificates cannot be read."""
        headers = {"User-Agent": f"attend/{__version__}", **self._headers}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key.strip()}"  # a key from a file ends in a newline
        options = {"base_url": self.base_url, "timeout": self.timeout, "headers": headers, "limits": LIMITS}
        return {**options, "verify": ssl_context(self._verify), "transport": self._transport}


def checked_timeout(timeout: float | None) -> float | None:
    """The timeout of a client or of a call. Raises ValueError for what is no number of seconds."""
    if timeout is None or (isinstance(timeout, Real) and 0 <= timeout < math.inf):
        return timeout
    raise ValueError(f"expected a timeout in seconds, 0 or more, or None for no limit, got {timeout!r}")


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


@dataclass(slots=True)
class Attempts:
    """The attempts of one request. `timeout`: seconds for all attempts together, unless the request has its own; None is no limit."""

    retries: Retries
    request: ApiRequest[Any]
    timeout: float | None
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    failed: int = 0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()
        if self.request.timeout is not USE_CLIENT_DEFAULT:
            self.timeout = checked_timeout(self.request.timeout)

    @property
    def left(self) -> float | None:
        """Seconds that remain for this and all later attempts; None is no limit."""
        return None if self.timeout is None else max(0.001, self.timeout - (self.clock() - self._started))

    def next_delay(self, outcome: Outcome) -> float | None:
        """Seconds to wait before the next attempt; None if this outcome is final."""
        if may_be_computed(outcome):
            self.request.on_unanswered()
        if self.failed >= self.retries.times or not may_repeat(self.request, outcome):
            return None
        bound = min(self.retries.longest, self.retries.first * 2**self.failed)
        self.failed += 1
        delay = self.draw() * bound + (retry_after(outcome) if isinstance(outcome, httpx.Response) else 0.0)
        return delay if (left := self.left) is None or delay < left else None


def may_repeat(request: ApiRequest[Any], outcome: Outcome) -> bool:
    """Whether to repeat the request after this outcome. Timeouts are final."""
    if request.repeat == "never":
        return False
    if isinstance(outcome, httpx.ConnectError):
        return certificate_error(outcome) is None  # a retry does not help with an untrusted certificate
    if not isinstance(outcome, httpx.Response):
        return request.repeat == "always" and isinstance(outcome, LOST_CONNECTION)
    from_service = outcome.headers.get("content-type", "").startswith(PROBLEM_JSON)
    if request.repeat == "always":  # a 500 without a problem document comes from a proxy that lost its server
        return outcome.status_code in (429, 502, 503) or (outcome.status_code == 500 and not from_service)
    return outcome.status_code in (429, 503) and from_service  # a proxy's 503 may come after the change


def may_be_computed(outcome: Outcome) -> bool:
    """Whether the server may have computed the request, although this outcome is not the reply to it."""
    return outcome.status_code >= 500 if isinstance(outcome, httpx.Response) else not isinstance(outcome, httpx.ConnectError)


def retry_after(response: httpx.Response) -> float:
    """Seconds in the header `Retry-After`, which is a number or a date; 0 without it."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
