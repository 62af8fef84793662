"""The retry policy of both clients: whether a failed operation is repeated, and after what delay. It neither sends nor sleeps.

A computation is always repeated, and so is a step of a session, since it says which length the session must have. A change is repeated only
if the server certainly did not begin it: no connection was made, the queue was full, or the service itself refused with 503. Each delay is
drawn uniformly below a bound that doubles ("full jitter"), so that clients do not all retry at once. `Retry-After` is added to the drawn
delay.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from service.client.connection import USE_CLIENT_DEFAULT, certificate_error
from service.client.operations import Operation
from service.wire.negotiation import PROBLEM_JSON

Outcome = httpx.Response | Exception
LOST_CONNECTION = (httpx.NetworkError, httpx.RemoteProtocolError)  # during a request; `may_repeat` checks ConnectError first


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


@dataclass(slots=True)
class Attempts:
    """The attempts of one operation. `timeout`: seconds for all attempts together, unless the operation has its own; None is no limit."""

    retries: Retries
    operation: Operation[Any]
    timeout: float | None
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    failed: int = 0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()
        if self.operation.timeout is not USE_CLIENT_DEFAULT:
            self.timeout = self.operation.timeout

    @property
    def left(self) -> float | None:
        """Seconds that remain for this and all later attempts; None is no limit."""
        return None if self.timeout is None else max(0.001, self.timeout - (self.clock() - self._started))

    def next_delay(self, outcome: Outcome) -> float | None:
        """Seconds to wait before the next attempt; None if this outcome is final."""
        if may_be_computed(outcome):
            self.operation.on_unanswered()
        if self.failed >= self.retries.times or not may_repeat(self.operation, outcome):
            return None
        bound = min(self.retries.longest, self.retries.first * 2**self.failed)
        self.failed += 1
        delay = self.draw() * bound + (retry_after(outcome) if isinstance(outcome, httpx.Response) else 0.0)
        return delay if (left := self.left) is None or delay < left else None


def may_repeat(operation: Operation[Any], outcome: Outcome) -> bool:
    """Whether to repeat the operation after this outcome. Timeouts are final."""
    if operation.repeat == "never":
        return False
    if isinstance(outcome, httpx.ConnectError):
        return certificate_error(outcome) is None  # a retry does not help with an untrusted certificate
    if not isinstance(outcome, httpx.Response):
        return operation.repeat == "always" and isinstance(outcome, LOST_CONNECTION)
    from_service = outcome.headers.get("content-type", "").startswith(PROBLEM_JSON)
    if operation.repeat == "always":  # a 500 without a problem document comes from a proxy that lost its server
        return outcome.status_code in (429, 502, 503) or (outcome.status_code == 500 and not from_service)
    return outcome.status_code in (429, 503) and from_service  # a proxy's 503 may come after the change


def may_be_computed(outcome: Outcome) -> bool:
    """Whether the server may have computed the operation although this is no reply to it."""
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
