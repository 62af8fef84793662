"""Ready means that the device computes: a hung one, a broken one, a busy one and an idle one, and what each is called."""

import asyncio
from typing import Any

import pytest
import torch
from support.scheduler import ASIDE, Attention, Clock, held, request, run, turns

from service.errors import Overloaded, ServiceFault
from service.serving.batching import BatchLimits
from service.serving.cost import Cost, ServingLimits
from service.serving.engine import Engine, open_engine
from service.serving.metrics import Metrics
from service.serving.scheduler import QueueLimits, Scheduler
from service.spec import LayerSpec
from service.wire.limits import WireLimits

SOON, EVER = 0.05, 60.0  # seconds of a deadline that is to pass, and of one that is not


async def opened(attention: Attention) -> tuple[Engine, Clock]:
    """A started engine with that layer alone, long after anything was computed."""
    engine, clock = open_engine("cpu", WireLimits(), ServingLimits()), Clock()
    await engine.start({})
    engine.clock = engine.scheduler.clock = clock
    engine.registry.put(held(attention))
    return engine, clock


def occupy(engine: Engine, attention: Attention) -> "asyncio.Task[Any]":
    """A call that the device's thread computes."""
    return asyncio.get_running_loop().create_task(engine.scheduler.submit(held(attention), request(1), Cost({}, ASIDE, 0, 1, 0)))


def test_an_idle_device_is_given_a_tiny_call() -> None:
    """Once for each question; one just answered counts for the next."""

    async def test() -> None:
        attention = Attention()
        engine, clock = await opened(attention)
        assert await engine.answers()
        assert attention.sizes == [1]
        assert await engine.answers()
        assert attention.sizes == [1]
        clock.now += 10 * engine.probe.timeout
        assert await engine.answers()
        assert attention.sizes == [1, 1]
        engine.close()

    run(test())


def test_a_hung_device_is_not_ready_and_comes_back() -> None:
    """Nothing comes back within the deadline: not ready, however often it is asked; and nothing piles up behind it."""

    async def test() -> None:
        attention = Attention()
        engine, clock = await opened(attention)
        engine.probe.timeout = SOON
        attention.door.clear()
        hung = occupy(engine, attention)
        assert await asyncio.to_thread(attention.entered.acquire, timeout=EVER)
        clock.now += EVER
        for _ in range(3):
            assert not await engine.answers()
            assert engine.ready  # what is not asked of the device says so still
        assert not engine.scheduler.waiting
        attention.door.set()
        await hung
        assert await engine.answers()
        engine.close()

    run(test())


def test_a_busy_device_is_ready_if_it_finishes_anything() -> None:
    """A full queue does not keep the question waiting: what others get back is the answer."""

    async def test() -> None:
        attention = Attention()
        engine, clock = await opened(attention)
        engine.probe.timeout = EVER
        attention.door.clear()
        busy = [occupy(engine, attention) for _ in range(3)]
        assert await asyncio.to_thread(attention.entered.acquire, timeout=EVER)
        clock.now += 2 * EVER
        asked = asyncio.create_task(engine.answers())
        await turns()
        assert not asked.done()
        attention.door.set()
        assert await asked
        await asyncio.gather(*busy)
        engine.close()

    run(test())


def test_a_long_call_does_not_make_the_server_unready() -> None:
    """A call predicted to take ten seconds has taken twenty: the device is trusted with it, at once. After 200 it is not."""

    async def test() -> None:
        attention = Attention()
        engine, clock = await opened(attention)
        engine.probe.timeout = SOON
        engine.scheduler.learn(10**8, 0.01)
        attention.door.clear()
        call = engine.scheduler.submit(held(attention), request(1), Cost({}, 10**11, 0, 1, 0))
        long = asyncio.create_task(call)
        assert await asyncio.to_thread(attention.entered.acquire, timeout=EVER)
        clock.now += 20
        assert await engine.answers()
        clock.now += 180
        assert not await engine.answers()
        attention.door.set()
        await long
        assert await engine.answers()
        engine.close()

    run(test())


def test_a_device_that_fails_is_not_ready() -> None:
    """It comes back at once, with nothing."""

    async def test() -> None:
        attention = Attention()
        engine, _ = await opened(attention)

        def fail(_: Any) -> None:
            raise RuntimeError("the device is lost")

        attention.fault = fail
        for _ in range(2):
            assert not await engine.answers()
        with pytest.raises(ServiceFault):
            await occupy(engine, attention)
        assert not await engine.answers()
        attention.fault = lambda call: None
        assert await engine.answers()
        engine.close()

    run(test())


def test_when_the_device_is_not_asked() -> None:
    """About to leave: no, whatever it would say. Without any layer there is nothing to ask it: layers may come."""

    async def test() -> None:
        attention = Attention()
        engine, _ = await opened(attention)
        engine.registry.remove("layer")
        assert await engine.answers()
        engine.draining = True
        assert not await engine.answers()
        assert not attention.seen
        engine.close()

    run(test())


def test_the_first_advice_is_of_the_devices_own_speed() -> None:
    """A call is timed at the start; whoever is refused then hears when the queue will really be empty."""

    async def test() -> None:
        attention = Attention()
        scheduler = Scheduler(torch.device("cpu"), Metrics(), QueueLimits(operations=10**11), BatchLimits())
        scheduler.learn(10**8, 0.01)  # ten thousand million a second
        attention.door.clear()
        calls = []
        for operations in (ASIDE, 10**11):
            calls.append(asyncio.create_task(scheduler.submit(held(attention), request(1), Cost({}, operations, 0, 1, 0))))
            await turns()
        with pytest.raises(Overloaded) as refusal:
            await scheduler.submit(held(attention), request(1), Cost({}, 1, 0, 1, 0))
        attention.door.set()
        await asyncio.gather(*calls)
        scheduler.close()
        assert refusal.value.retry_after == 10

    run(test())


@pytest.mark.parametrize(
    "spec", [{"d_model": 4, "num_heads": 2}, {"d_model": 512, "num_heads": 8}, {"d_model": 8, "num_heads": 2, "value_dim": 3}]
)
def test_the_speed_is_measured_at_the_start(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a call that takes long enough to tell, whatever the layer."""
    learnt: list[tuple[int, float]] = []
    monkeypatch.setattr(Scheduler, "learn", lambda self, operations, seconds: learnt.append((operations, seconds)))

    async def test() -> None:
        engine = open_engine("cpu", WireLimits(), ServingLimits())
        await engine.start({"layer": LayerSpec(**spec)})
        engine.close()

    run(test())
    ((operations, seconds),) = learnt
    assert operations > 2 * 10**7
    assert seconds > 0
