"""Bounds the memory of a process as a whole, for what no budget counts: the gRPC library keeps header blocks that never end.

`ByteBudget` counts what callers send and receive, and `admission.py` what calls need. A process that takes much more than that closes by
itself, before the system ends it.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

STATM = Path("/proc/self/statm")
CGROUP = Path("/sys/fs/cgroup")
SHARE = 0.9  # of the memory that a process may use until it closes
CHECK_SECONDS = 0.25


def resident_bytes(statm: Path = STATM) -> int:
    """Resident memory of this process without pages of files, which the system can take back; 0 if the system does not say."""
    try:
        _, resident, of_files, *_ = map(int, statm.read_text().split())
    except OSError:
        return 0
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def default_limit(processes: int, cgroup: Path = CGROUP) -> int:
    """SHARE of the container's or machine's memory, divided among `processes`."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # version 2, version 1
        try:
            most = min(most, int((cgroup / name).read_text()))
        except (OSError, ValueError):  # there is no such file, or it says `max`
            continue
    return int(SHARE * most) // processes


class MemoryWatch:
    """Calls `exceeded(bytes)` once when the resident memory of this process is above `limit`. Must be made on the event loop."""

    def __init__(self, limit: int, exceeded: Callable[[int], object], read: Callable[[], int] = resident_bytes) -> None:
        self.limit, self._exceeded, self._read = limit, exceeded, read
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._check)

    def _check(self) -> None:
        if (used := self._read()) > self.limit:
            self._exceeded(used)
        else:
            self._next = self._loop.call_later(CHECK_SECONDS, self._check)

    def close(self) -> None:
        self._next.cancel()
