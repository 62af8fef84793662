"""`until` waits until a condition holds, and fails after a minute."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0  # seconds until a test that waits fails; a test that passes never waits that long


def until(condition: Callable[[], Any], what: str) -> None:
    """Returns once the condition holds. Raises AssertionError with `what` after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)
