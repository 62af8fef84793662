"""The simulated world: its clock, the events that are due, its random numbers, and the history of a run.

The event loop of the process asks the world once per iteration what happens next. Whatever is not the event loop happens there, as an event
with a time: a thread finishes, bytes arrive, a client decides, a signal is delivered. So an event falls between any two iterations, as it
does for a real process. Events of the same time happen in any order. What threads do falls within an iteration too: before any `call_soon`.

No wall clock is read, and every random number comes from the seed.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from random import Random
from types import coroutine
from typing import Any

START = 1000.0  # seconds; a monotonic clock does not begin at 0
TICK = 20e-6  # mean seconds of one iteration of the event loop
HISTORY = 400  # events that are remembered, for the report of a failure

Resume = Callable[[Any], None]


class Failure(AssertionError):
    """A promise of the service that did not hold. `rule`: its number in docs/design.md, or its name in docs/reliability.md."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule, self.what = rule, what


class World:
    """The clock and the events of one run."""

    def __init__(self, seed: int, pauses: float = 0.0) -> None:
        """`pauses`: probability that the process does not run for some seconds before an iteration."""
        self.seed, self.pauses = seed, pauses
        self.now = START
        self.steps = 0  # iterations of the event loop
        self.most_steps = math.inf
        self.failure: BaseException | None = None
        self.interrupted = False  # whether the process runs no more
        self.history: deque[str] = deque(maxlen=HISTORY)
        self.digest = 0  # of everything in the history: two runs are equal if it is
        self.checks: list[Callable[[], None]] = []  # called before each iteration
        self.grpc: Any = None  # the gRPC server that was made last
        self.in_thread = False  # whether the job of a thread runs
        self.lacks_memory: Callable[[], bool] = lambda: False  # whether a job that reads, writes or draws finds no memory
        self.running = ""  # the name of the process that runs, if there are several
        self.elapsed = 0.0  # seconds that the job of a thread has taken so far, while it runs
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._threads: deque[Callable[[], None]] = deque()  # what threads do during this iteration
        self._numbers = count()
        self._schedule = self.random("schedule")

    def random(self, name: str) -> Random:
        """A generator of its own for each purpose: so a run without one client is like the run with it, for the others."""
        return Random(f"{self.seed}:{name}")

    def clock(self) -> float:
        """Monotonic seconds; in the job of a thread, with the time that it has taken so far."""
        return self.now + self.elapsed

    def spend(self, seconds: float) -> None:
        """Something takes so long: a job of a thread, or else the event loop."""
        if self.in_thread:
            self.elapsed += seconds
        else:
            self.now += seconds

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Let this happen in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, self._schedule.random(), next(self._numbers), action))

    def at_in_thread(self, seconds: float, action: Callable[[], None]) -> None:
        """Let a thread do this in so many seconds: between two iterations of the event loop, or while a callback runs."""
        put_off = self._schedule.random() < 0.5
        self.at(seconds, (lambda: self._threads.append(action)) if put_off else action)

    def let_threads_run(self) -> None:
        """A thread may do something now."""
        if self._threads and self._schedule.random() < 0.3:
            self._threads.popleft()()

    def note(self, *words: object) -> None:
        """Add a line to the history."""
        line = f"{self.now - START:10.4f} {' '.join(map(str, words))}"
        self.history.append(line)
        self.digest = hash_of(self.digest, line)

    def fail(self, failure: BaseException) -> None:
        """End the run with this failure, unless it has another."""
        self.failure = self.failure or failure

    @contextmanager
    def run_by(self, process: str) -> Iterator[None]:
        """Within this block, the process of that name runs."""
        before, self.running = self.running, process
        try:
            yield
        finally:
            self.running = before

    def end(self) -> None:
        """Forget everything that would still happen."""
        self._events.clear()
        self._threads.clear()
        self.checks.clear()
        self.pauses, self.most_steps = 0.0, math.inf

    def advance(self, timeout: float | None) -> bool:
        """What a selector does for an event loop: let time pass until something happens, at most `timeout` seconds (0: callbacks are ready;
        None: no timer is set). Returns False if nothing will ever happen again, the run has failed, or the process was killed."""
        self.steps += 1
        if self.steps > self.most_steps:
            self.fail(Failure("liveness", f"the run has not settled after {self.steps} iterations"))
        for check in self.checks:
            check()
        while self._threads:
            self._threads.popleft()()
            timeout = 0  # it wakes the loop
        self.now += self._schedule.expovariate(1 / TICK)
        if self.pauses and self._schedule.random() < self.pauses:
            seconds = self._schedule.choice((0.05, 1.0, 30.0))
            self.note("the process does not run for", seconds, "s")
            self.now += seconds
        until = math.inf if timeout is None else self.now + timeout
        events = self._events
        if timeout != 0:  # the loop sleeps until the first event or its timer
            self.now = max(self.now, min(until, events[0][0] if events else until))
            if math.isinf(self.now):
                return False
        now = self.now
        while events and events[0][0] <= now and self.failure is None and not self.interrupted:
            self.now = events[0][0]  # while the process computed or did not run, the others went on
            heapq.heappop(events)[3]()
        self.now = max(self.now, now)
        return self.failure is None and not self.interrupted


def hash_of(digest: int, line: str) -> int:
    """A digest that does not depend on the process, as `hash` of a text does."""
    for byte in line.encode():
        digest = (digest * 1099511628211 ^ byte) & (1 << 64) - 1
    return digest


class Actor:
    """Someone outside the process, such as a client: a coroutine that runs between iterations of the event loop."""

    def __init__(self, world: World, script: Coroutine[Any, Any, None]) -> None:
        self.world, self.script, self.done = world, script, False

    def start(self, seconds: float) -> None:
        self.world.at(seconds, lambda: self.resume(None))

    def resume(self, value: Any) -> None:
        """Run until it waits again."""
        try:
            wait = self.script.send(value)
        except StopIteration:
            self.done = True
        except Exception as error:
            self.done = True
            self.world.fail(error)
        else:
            resumed = False

            def once(value: Any = None) -> None:
                nonlocal resumed
                if not resumed:
                    resumed = True
                    self.resume(value)

            wait(once)


@coroutine
def suspended(register: Callable[[Resume], None]) -> Generator[Callable[[Resume], None], Any, Any]:
    """Let an actor wait until `register`'s argument is called; returns its value."""
    return (yield register)


async def sleep(world: World, seconds: float) -> None:
    """Let an actor wait."""
    await suspended(lambda resume: world.at(seconds, lambda: resume(None)))
