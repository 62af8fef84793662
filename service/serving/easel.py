"""Where pictures are drawn: one thread of its own, since two must not share matplotlib's fonts, and a bound on what waits for it.

A drawing cannot be stopped from outside, so it looks at the clock itself now and then; whoever waits for it is let go at the deadline.
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from service.attention.call import Result
from service.attention.figures import draw
from service.errors import CallerGone, DeadlinePassed, Overloaded, Problem
from service.serving.sketch import Sketch

LONGEST = 30.0  # seconds that a drawing may take, and wait, where its caller sets no earlier deadline
WAITING = 32  # drawings; each is bounded in cells and pixels, so that their number bounds their cost


class Easel:
    """Draws one picture at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drawing")  # it starts with the first picture
        self._waiting = 0
        self._seconds = 0.5  # that a picture takes, learnt

    async def draw(self, sketch: Sketch, result: Result, deadline: float | None, gone: Callable[[], bool]) -> bytes:
        """The picture's bytes. Raises Overloaded, DeadlinePassed, CallerGone, and what `compose` and `draw` of the figures raise."""
        if self._waiting >= WAITING:
            wanted = f"at most {WAITING} pictures that wait to be drawn"
            raise Overloaded(math.ceil(self._waiting * self._seconds), problems=[Problem("", wanted, str(self._waiting + 1))])
        latest = self.clock() + LONGEST
        latest = latest if deadline is None else min(latest, deadline)
        self._waiting += 1
        try:
            drawing = asyncio.get_running_loop().run_in_executor(self._thread, self._draw, sketch, result, latest, gone)
            return await asyncio.wait_for(drawing, max(0.0, latest - self.clock()))
        except TimeoutError:
            raise _too_late() from None
        finally:
            self._waiting -= 1

    def _draw(self, sketch: Sketch, result: Result, latest: float, gone: Callable[[], bool]) -> bytes:
        started = self.clock()

        def check() -> None:
            if self.clock() > latest:
                raise _too_late()
            if gone():
                raise CallerGone

        drawn = draw(sketch.picture(result), sketch.spec, check)
        self._seconds += 0.2 * (self.clock() - started - self._seconds)
        return drawn

    def close(self) -> None:
        self._thread.shutdown()


def _too_late() -> DeadlinePassed:
    return DeadlinePassed("the deadline passed before the picture was drawn")
