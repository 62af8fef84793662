"""The thread that draws: what waits for it has a bound, a deadline, and a caller who may go. A drawing here lasts until it is let go."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from service.attention.figures import FigureSpec, Picture
from service.attention.figures.picture import Axis, Panel, Scale
from service.errors import CallerGone, DeadlinePassed, Overloaded
from service.serving.easel import WAITING, Easel


class Held:
    """A sketch that begins to be drawn, and goes on when the test says so."""

    def __init__(self):
        self.begun, self.go, self.times = threading.Event(), threading.Event(), 0
        self.spec = FigureSpec(format="svg")

    def picture(self, result):
        self.times += 1
        self.begun.set()
        assert self.go.wait(60)
        return Picture("", (Panel("", Axis("query", 1), Axis("key", 1), np.ones((1, 1))),), Scale("", 0.0, 1.0))


@pytest.fixture
def easel():
    made = Easel()
    yield made
    made.close()


async def begin(easel, sketch, deadline=None, gone=lambda: False):
    task = asyncio.create_task(easel.draw(sketch, SimpleNamespace(), deadline, gone))
    await asyncio.sleep(0)
    return task


def test_what_waits_has_a_bound(easel):
    async def scenario():
        held = Held()
        tasks = [await begin(easel, held) for _ in range(WAITING)]
        with pytest.raises(Overloaded) as refusal:
            await easel.draw(held, SimpleNamespace(), None, lambda: False)
        for task in tasks:
            task.cancel()
        held.go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return refusal.value

    refusal = asyncio.run(scenario())

    assert refusal.retry_after >= 1
    assert refusal.problems[0].got == str(WAITING + 1)


def test_a_drawing_whose_deadline_comes_while_it_waits_never_begins(easel):
    async def scenario():
        first, second = Held(), Held()
        task = await begin(easel, first)
        with pytest.raises(DeadlinePassed):
            await easel.draw(second, SimpleNamespace(), easel.clock() + 0.01, lambda: False)
        task.cancel()
        first.go.set()
        await asyncio.gather(task, return_exceptions=True)
        easel.close()  # waits for whatever is still to be drawn
        return second.times

    assert asyncio.run(scenario()) == 0


def test_a_caller_who_has_gone_ends_the_drawing(easel):
    async def scenario():
        held, gone = Held(), threading.Event()
        task = await begin(easel, held, gone=gone.is_set)
        await asyncio.to_thread(held.begun.wait)
        gone.set()
        held.go.set()
        with pytest.raises(CallerGone):
            await task

    asyncio.run(scenario())


def test_a_late_drawing_is_given_up_by_whoever_waits_and_by_the_thread():
    seen = []

    async def scenario():
        now = [0.0]
        easel = Easel(lambda: now[0])
        held = Held()
        task = await begin(easel, held, deadline=5.0)
        await asyncio.to_thread(held.begun.wait)
        now[0] = 6.0
        held.go.set()
        with pytest.raises(DeadlinePassed):
            await task
        seen.append(easel._waiting)
        easel.close()

    asyncio.run(scenario())
    assert seen == [0]
