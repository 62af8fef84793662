"""Readiness requires that the device computes: idle, busy, hung and broken devices."""

import asyncio
from typing import Any

import pytest
import torch

from attend.errors import Overloaded, ServiceFault
from attend.limits import BatchLimits, QueueLimits
from attend.serving.metrics import Metrics
from attend.serving.scheduler import Scheduler
from attend.serving.service import Service, open_service
from attend.spec import LayerSpec
from support.scheduler import HEAVY, Attention, Clock, heavy_call, layer_with, loop_iterations, run

SOON, EVER = 0.05, 60.0  # seconds: a deadline that passes, and one that does not


async def opened(attention: Attention) -> tuple[Service, Clock]:
    """A started service with that layer alone, long after its last computation."""
    service, clock = open_service("cpu"), Clock()
    await service.start({})
    service.clock = service.scheduler.clock = clock
    service.registry.put(layer_with(attention))
    return service, clock


def occupy(service: Service, attention: Attention) -> "asyncio.Task[Any]":
    """A call that the device's thread computes."""
    return asyncio.get_running_loop().create_task(service.scheduler.submit(heavy_call(attention)))


def test_readiness_probes_an_idle_device_with_a_tiny_call() -> None:
    """Not if a call has just been answered."""

    async def test() -> None:
        attention = Attention()
        service, clock = await opened(attention)
        assert await service.is_answering()
        assert attention.sizes == [1]
        assert await service.is_answering()
        assert attention.sizes == [1]
        clock.now += 10 * service.probe.timeout
        assert await service.is_answering()
        assert attention.sizes == [1, 1]
        service.close()

    run(test())


def test_a_hung_device_is_not_ready_until_it_responds() -> None:
    """However often readiness is requested, no probes pile up behind the hung call."""

    async def test() -> None:
        attention = Attention()
        service, clock = await opened(attention)
        service.probe.timeout = SOON
        attention.gate.clear()
        hung = occupy(service, attention)
        assert await asyncio.to_thread(attention.entered.acquire, timeout=EVER)
        clock.now += EVER
        for _ in range(3):
            assert not await service.is_answering()
            assert service.ready  # the state that does not depend on a probe
        assert not service.scheduler.waiting
        attention.gate.set()
        await hung
        assert await service.is_answering()
        service.close()

    run(test())


def test_a_busy_device_is_ready_if_it_finishes_anything() -> None:
    """A full queue does not delay the reply: results of other calls count."""

    async def test() -> None:
        attention = Attention()
        service, clock = await opened(attention)
        service.probe.timeout = EVER
        attention.gate.clear()
        busy = [occupy(service, attention) for _ in range(3)]
        assert await asyncio.to_thread(attention.entered.acquire, timeout=EVER)
        clock.now += 2 * EVER
        answering = asyncio.create_task(service.is_answering())
        await loop_iterations()
        assert not answering.done()
        attention.gate.set()
        assert await answering
        await asyncio.gather(*busy)
        service.close()

    run(test())


@pytest.mark.parametrize("iterations", range(4))
def test_a_cancelled_check_ends_although_the_device_answers_at_that_moment(iterations: int) -> None:
    """Otherwise a cancelled stream of health goes on for ever."""

    async def test() -> None:
        attention, answered = Attention(), asyncio.Event()
        service, _ = await opened(attention)
        compute = service.scheduler.submit

        async def submit(*_: Any) -> None:
            await answered.wait()

        async def answer() -> None:
            answered.set()

        async def finish() -> None:
            await compute(heavy_call(attention, 1))  # on the event loop, in this iteration

        service.scheduler.submit = submit  # type: ignore[assignment]
        for check, end in (service.probe.responds(service.registry.all()[0]), answer), (service.scheduler.wait_for_progress(EVER), finish):
            task = asyncio.create_task(check)
            await loop_iterations()
            assert not task.done()
            await end()
            for _ in range(iterations):
                await asyncio.sleep(0)
            if task.cancel():
                await asyncio.wait([task])
                assert task.cancelled(), f"after {iterations} iterations"
        service.close()

    run(test())


def test_a_long_call_is_overdue_only_after_ten_times_its_predicted_time() -> None:
    """A call predicted to take ten seconds has taken twenty: ready, without a wait. After 200 it is not."""

    async def test() -> None:
        attention = Attention()
        service, clock = await opened(attention)
        service.probe.timeout = SOON
        service.scheduler.calibrate(10**8, 0.01)
        attention.gate.clear()
        call = service.scheduler.submit(heavy_call(attention, 10**11))
        long = asyncio.create_task(call)
        assert await asyncio.to_thread(attention.entered.acquire, timeout=EVER)
        clock.now += 20
        assert await service.is_answering()
        clock.now += 180
        assert not await service.is_answering()
        attention.gate.set()
        await long
        assert await service.is_answering()
        service.close()

    run(test())


def test_a_device_that_fails_is_not_ready() -> None:
    async def test() -> None:
        attention = Attention()
        service, _ = await opened(attention)

        def fail(_: Any) -> None:
            raise RuntimeError("the device is lost")

        attention.fault = fail
        for _ in range(2):
            assert not await service.is_answering()
        with pytest.raises(ServiceFault):
            await occupy(service, attention)
        assert not await service.is_answering()
        attention.fault = lambda call: None
        assert await service.is_answering()
        service.close()

    run(test())


def test_the_device_is_not_probed_while_draining_or_without_layers() -> None:
    """Draining: not ready in any case. Without layers: ready."""

    async def test() -> None:
        attention = Attention()
        service, _ = await opened(attention)
        service.registry.remove("layer")
        assert await service.is_answering()
        service.draining = True
        assert not await service.is_answering()
        assert not attention.seen
        service.close()

    run(test())


def test_the_first_retry_after_uses_the_speed_measured_at_the_start() -> None:
    async def test() -> None:
        attention = Attention()
        scheduler = Scheduler(torch.device("cpu"), Metrics(), QueueLimits(max_queue_operations=10**11), BatchLimits())
        scheduler.calibrate(10**8, 0.01)  # 10^10 operations per second
        attention.gate.clear()
        calls = []
        for operations in (HEAVY, 10**11):
            calls.append(asyncio.create_task(scheduler.submit(heavy_call(attention, operations))))
            await loop_iterations()
        with pytest.raises(Overloaded) as refusal:
            await scheduler.submit(heavy_call(attention))
        attention.gate.set()
        await asyncio.gather(*calls)
        scheduler.close()
        assert refusal.value.retry_after == 10

    run(test())


@pytest.mark.parametrize(
    "spec", [{"d_model": 4, "num_heads": 2}, {"d_model": 512, "num_heads": 8}, {"d_model": 8, "num_heads": 2, "value_dim": 3}]
)
def test_the_speed_is_measured_at_the_start(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a call that takes long enough for a reliable measurement, whatever the layer."""
    measured: list[tuple[int, float]] = []
    monkeypatch.setattr(Scheduler, "calibrate", lambda self, operations, seconds: measured.append((operations, seconds)))

    async def test() -> None:
        service = open_service("cpu")
        await service.start({"layer": LayerSpec(**spec)})
        service.close()

    run(test())
    ((operations, seconds),) = measured
    assert operations > 2 * 10**7
    assert seconds > 0
