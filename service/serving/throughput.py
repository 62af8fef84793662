"""Estimates how long calls take, from earlier calls of their size. Pure: the caller measures the seconds."""

from bisect import bisect_left

LIGHT = 1 << 24  # operations: on a CPU well under a millisecond, less than the way to a thread and back costs others
SIZES = (LIGHT, 1 << 28, 1 << 32, 1 << 36)  # operations up to which a call belongs to each class; larger calls are one more class
MOMENT = 0.001  # seconds; what takes less says more of a call's overhead than of the device's speed
RATE = 1e9  # operations per second of a device of which nothing is known yet
WEIGHT = 0.25  # of a new measurement in the running mean


def size_class(operations: int) -> int:
    """The class of a call by its predicted operations: 0 for light calls; the calls of each further class cost up to 16 times as much."""
    return bisect_left(SIZES, operations)


class Throughput:
    """Seconds per operation, a running mean for each size class: large calls and small ones use a device in different ways."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def learn(self, operations: int, seconds: float) -> None:
        """Replace all estimates by that of this one call."""
        self._means = {size_class(operations): max(seconds, MOMENT / 10) / operations}

    def observe(self, size: int, operations: int, seconds: float) -> None:
        """Calls of that class, of so many operations together, took so long."""
        if seconds <= MOMENT or not operations:
            return
        mean = self._means.get(size, seconds / operations)
        self._means[size] = mean + WEIGHT * (seconds / operations - mean)

    def seconds(self, size: int, operations: int) -> float:
        """How long calls of that class, of so many operations together, are expected to take; by the nearest class that was measured."""
        nearest = min(self._means, key=lambda known: abs(known - size), default=None)
        return operations * (1 / RATE if nearest is None else self._means[nearest])
