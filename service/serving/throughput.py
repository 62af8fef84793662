"""Estimates how long calls take from the measured seconds of earlier calls of similar size."""

from bisect import bisect_left

LIGHT = 1 << 24  # operations; on a CPU well under a millisecond, less than a thread switch costs other calls
SIZES = (LIGHT, 1 << 28, 1 << 32, 1 << 36)  # most operations of each size class; larger calls form one more class
MOMENT = 0.001  # seconds; shorter measurements show overhead, not the device's speed
RATE = 1e9  # operations per second, assumed before any measurement
WEIGHT = 0.25  # weight of a new measurement in the moving average


def size_class(operations: int) -> int:
    """The size class of a call with so many predicted operations: 0 for light calls; the bound of each class is 16 times the last."""
    return bisect_left(SIZES, operations)


class Throughput:
    """Moving averages of the seconds per operation, one for each size class, since large and small calls use a device differently."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def learn(self, operations: int, seconds: float) -> None:
        """Discard all averages and start from this measurement."""
        self._means = {size_class(operations): max(seconds, MOMENT / 10) / operations}

    def observe(self, size: int, operations: int, seconds: float) -> None:
        """Record that calls of size class `size` with `operations` in total took `seconds`."""
        if seconds <= MOMENT or not operations:
            return
        mean = self._means.get(size, seconds / operations)
        self._means[size] = mean + WEIGHT * (seconds / operations - mean)

    def seconds(self, size: int, operations: int) -> float:
        """Expected seconds for calls of size class `size` with `operations` in total, from the nearest class that was measured."""
        nearest = min(self._means, key=lambda known: abs(known - size), default=None)
        return operations * (1 / RATE if nearest is None else self._means[nearest])
