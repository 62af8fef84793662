"""Waiting for what a test has brought about: never for a time to pass, and never for ever."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0  # seconds after which a test that waits has failed; no test that passes comes near it


def until(condition: Callable[[], Any], what: str) -> None:
    """Returns once it holds. Raises AssertionError, naming it, when patience is at its end."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)
