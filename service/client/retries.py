"""When a call is sent again, and after how long: a pure policy that both clients ask after each failure. Sends and sleeps nothing.

Sent again is what cannot double a change. A computation may be computed twice; a change goes again only where the first one was surely
not begun: no connection was made, the queue was full, or this service itself said that it takes nothing yet. Waits grow twofold and are
drawn at random up to that bound ("full jitter"), so that callers who failed together do not come back together; `Retry-After` is a
least wait, with jitter on top.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from service.client.calls import Call
from service.client.failures import doubted

Outcome = httpx.Response | Exception
LATER, GATEWAY = (429, 503), (502, 503)
PROBLEM_JSON = "application/problem+json"
BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError)  # in the middle of it; a ConnectError is one that never began


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a failed call is sent again at most, and the bounds of the waits in seconds."""

    times: int = 4
    first: float = 0.1
    longest: float = 5.0

    def begin(self, call: Call[Any], patience: float | None) -> "Attempts":
        """The attempts of one call whose caller waits for `patience` seconds in all; None waits for ever."""
        return Attempts(self, call, patience)


def as_retries(said: Retries | int | None) -> Retries:
    """What a caller says of retries: nothing, how many, or all of it."""
    return said if isinstance(said, Retries) else Retries() if said is None else Retries(times=int(said))


@dataclass(slots=True)
class Attempts:
    """One call, sent as often as it takes."""

    retries: Retries
    call: Call[Any]
    patience: float | None
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    failed: int = 0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def pause(self, outcome: Outcome) -> float | None:
        """Seconds to wait before the next attempt; None where this outcome is the last."""
        if self.failed >= self.retries.times or not repeats(self.call, outcome):
            return None
        bound = min(self.retries.longest, self.retries.first * 2**self.failed)
        self.failed += 1
        pause = self.draw() * bound + (retry_after(outcome) if isinstance(outcome, httpx.Response) else 0.0)
        left = None if self.patience is None else self.patience - (self.clock() - self._started)
        return pause if left is None or pause < left else None


def repeats(call: Call[Any], outcome: Outcome) -> bool:
    """Whether the call may be sent again after this. One that timed out is not: its caller has waited enough."""
    if call.repeat == "never":
        return False
    if isinstance(outcome, httpx.ConnectError):
        return doubted(outcome) is None  # nobody mends a certificate between two attempts
    if not isinstance(outcome, httpx.Response):
        return call.repeat == "always" and isinstance(outcome, BROKEN)
    ours = outcome.headers.get("content-type", "").startswith(PROBLEM_JSON)
    if call.repeat == "always":  # a 500 that is not ours is a proxy's, whose server left in the middle of it
        return outcome.status_code in (*LATER, *GATEWAY) or (outcome.status_code == 500 and not ours)
    return outcome.status_code in LATER and ours  # a proxy's 503 may come after the change was made


def retry_after(response: httpx.Response) -> float:
    """The seconds that the header `Retry-After` asks for, a number or a date; 0 without it."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
