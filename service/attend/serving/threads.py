"""Threads for heavy work: their number, from CPU affinity and cgroup quota before torch starts its pool; priority; the mode of MKL."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
NICE = 10  # the event loop gets nine tenths of a core that it shares with one such thread


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: the lesser of CPU affinity and cgroup quota, at least 1.

    With 40 threads and a quota of 4 cores, the kernel suspends the process nine tenths of the time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_quota(cgroup) or cores)))


def plan_threads(workers: int, threads: int | None, cores: int) -> int:
    """Threads for each of `workers` processes, by default an equal share. Raises ValueError if together they exceed the cores."""
    planned = threads if threads is not None else max(1, cores // workers)
    if workers * planned > cores:
        raise ValueError(f"{workers} workers with {planned} threads each exceed the {cores} cores this process may use")
    return planned


def prepare_torch(threads: int, cpuinfo: Path = CPUINFO) -> None:
    """Set the environment variables that OpenMP reads when torch is imported, and MKL at its first product.

    On AMD, MKL's kernels for small products sum in another order if an operand does not start at a multiple of 16 bytes. In its mode STRICT
    they do not, and are as fast (measured on Zen 4). Elsewhere nothing is set, nor where the operator has chosen a mode.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with suppress(OSError):
        if "AuthenticAMD" in cpuinfo.read_text():
            os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def lower_priority() -> None:
    """Make this thread, and threads that it starts, give way to the event loop, which computes inline calls."""
    if sys.platform == "linux":  # elsewhere priorities belong to the process
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call a function on the event loop, from another thread; do nothing if the loop has ended, and with it whoever waited."""
    with suppress(RuntimeError):  # a thread may work longer than a process that shuts down waits for it
        loop.call_soon_threadsafe(function, *args)


def _quota(cgroup: Path) -> float | None:
    """CPUs of the cgroup's quota, version 2 or 1; None if there is no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or not int(period):  # "max", -1, or an unknown format
        return None
    return int(quota) / int(period)
