"""The drawing thread: its bound on waiting drawings, deadlines and disconnected callers. Drawings block until the test releases them."""

import asyncio
import gc
import json
import math
import subprocess
import sys
import threading

import pytest

from attend.errors import CallerGone, DeadlinePassed, Overloaded
from attend.serving.figures import FIGURE, MAX_WAITING, FigureRenderer, no_full_collection
from attend.serving.requests import Request
from attend.serving.service import open_service
from attend.spec import LayerSpec


class BlockedFigure:
    """A figure whose drawing sets `started`, and ends once the test sets `go`."""

    def __init__(self):
        self.started, self.go, self.times = threading.Event(), threading.Event(), 0

    def draw(self, check):
        self.times += 1
        self.started.set()
        assert self.go.wait(60)
        check()
        return b""


@pytest.fixture
def renderer():
    made = FigureRenderer()
    yield made
    made.close()


async def begin(renderer, figure, deadline=None, gone=lambda: False, caller=""):
    task = asyncio.create_task(renderer.draw(figure.draw, Request(b"", deadline=deadline, gone=gone, caller=caller)))
    await asyncio.sleep(0)
    return task


def test_too_many_waiting_drawings_are_overloaded(renderer):
    """One caller has at most half of them, and any other one still gets its picture drawn."""

    async def scenario():
        figure = BlockedFigure()
        tasks = [await begin(renderer, figure, caller="many") for _ in range(MAX_WAITING // 2)]
        with pytest.raises(Overloaded, match="of one caller"):
            await renderer.draw(figure.draw, Request(b"", caller="many"))
        tasks += [await begin(renderer, figure, caller=f"one {i}") for i in range(MAX_WAITING - len(tasks))]
        with pytest.raises(Overloaded) as refusal:
            await renderer.draw(figure.draw, Request(b"", caller="another"))
        for task in tasks:
            task.cancel()
        figure.go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return refusal.value

    refusal = asyncio.run(scenario())

    assert refusal.retry_after == math.ceil((MAX_WAITING + 1) * 0.5)  # seconds, as long as none has been measured
    assert refusal.problems[0].expected == f"at most {MAX_WAITING} pictures at once"


def test_a_drawing_whose_deadline_passes_while_it_waits_never_starts(renderer):
    async def scenario():
        first, second = BlockedFigure(), BlockedFigure()
        task = await begin(renderer, first)
        with pytest.raises(DeadlinePassed):
            await renderer.draw(second.draw, Request(b"", deadline=renderer.clock() + 0.01))
        task.cancel()
        first.go.set()
        await asyncio.gather(task, return_exceptions=True)
        renderer.close()  # waits for the remaining drawings
        return second.times

    assert asyncio.run(scenario()) == 0


def test_a_disconnected_caller_ends_the_drawing(renderer):
    async def scenario():
        figure, gone = BlockedFigure(), threading.Event()
        task = await begin(renderer, figure, gone=gone.is_set)
        await asyncio.to_thread(figure.started.wait)
        gone.set()
        figure.go.set()
        with pytest.raises(CallerGone):
            await task

    asyncio.run(scenario())


def test_at_the_deadline_the_caller_gets_an_error_and_the_thread_stops_drawing():
    seen = []

    async def scenario():
        now = [0.0]
        renderer = FigureRenderer(lambda: now[0])
        figure = BlockedFigure()
        task = await begin(renderer, figure, deadline=5.0)
        await asyncio.to_thread(figure.started.wait)
        now[0] = 6.0
        figure.go.set()
        with pytest.raises(DeadlinePassed):
            await task
        seen.append(renderer.waiting.used)
        renderer.close()

    asyncio.run(scenario())
    assert seen == [0]


def test_matplotlib_is_imported_without_a_full_garbage_collection() -> None:
    """A full collection among matplotlib's objects would pause every thread, including the event loop's."""
    script = """
import asyncio, gc, sys
from attend.serving.figures import FigureRenderer
from attend.serving.requests import Request

async def draw():
    renderer, full = FigureRenderer(), []
    gc.freeze()
    gc.collect()
    gc.set_threshold(700, 1, 1)  # a few thousand objects from here on cause a full collection
    gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
    await renderer.draw(lambda check: b"", Request(b""))
    assert "matplotlib" in sys.modules and gc.isenabled() and not full, full
    renderer.close()

assert "matplotlib" not in sys.modules
asyncio.run(draw())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_rule_12_a_picture_of_many_heads_begins_no_full_garbage_collection():
    """It would pause all threads. Nor does the picture leave its objects to a later one."""
    from matplotlib.axes import Axes

    generations = []

    def note(phase, about):
        if phase == "start" and threading.current_thread().name.startswith("drawing"):
            generations.append(about["generation"])

    async def scenario():
        service = open_service("cpu")
        await service.start({"default": LayerSpec(d_model=40, num_heads=40)})
        body = json.dumps({"query": [[0.5] * 40] * 3, "figure": {"format": "svg"}}).encode()
        gc.callbacks.append(note)
        try:
            assert (await service.engine.answer(Request(body, codec_parameters={}), FIGURE))[1]
        finally:
            gc.callbacks.remove(note)
        left = sum(isinstance(found, Axes) for found in gc.get_objects())
        service.close()
        return left

    others = {*threading.enumerate()}
    assert asyncio.run(scenario()) == 0
    for thread in {*threading.enumerate()} - others:
        if thread.name.startswith("drawing"):
            thread.join()  # it restores the thresholds after it has answered
    assert set(generations) == {0, 1}
    assert gc.get_threshold()[2] < 1000


def test_pictures_of_two_threads_leave_no_threshold_of_the_garbage_collector_changed():
    """One that is left behind ends after the next one has begun."""
    first, second = no_full_collection(), no_full_collection()
    before = gc.get_threshold()
    for each in (first, second):
        each.__enter__()
    for each in (first, second):
        each.__exit__(None, None, None)
    assert gc.get_threshold() == before
