"""Executing a batch: failures, results equal to those of calls alone, and running out of memory (rules 3, 7 and 9 of docs/design.md)."""

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from attend.attention import operations, stacking
from attend.attention.call import Call, Result
from attend.errors import OutOfMemory, ServiceFault
from attend.serving import probe, scheduler
from attend.serving.calls import make_call
from attend.serving.cost import Cost
from attend.serving.executor import Outcome
from attend.serving.prepared import Prepared
from attend.serving.scheduler import UNHEALTHY_AFTER
from attend.serving.service import open_service
from attend.settings import Settings
from attend.spec import LayerSpec
from attend.web.app import create_app
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from support.scheduler import (
    HEAVY,
    REAL,
    REGISTRY,
    Attention,
    Harness,
    assert_answers,
    heavy_call,
    layer_with,
    loop_iterations,
    outcomes_of,
    request,
    run,
)

# 3. A failure in sizing, stacking, computing or splitting reaches every call of that batch, and later batches are computed.


class FailsOnce:
    """Raises an exception when it is first called; later calls go to the function that it replaces."""

    def __init__(self, what: Callable[..., Any]) -> None:
        self.what, self.failed = what, False

    def __call__(self, *args: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise RuntimeError("the first call fails")
        return self.what(*args)


@pytest.mark.parametrize("stage", ["sizing", "counting", "stacking", "computing", "splitting"])
def test_rule_3_a_failure_reaches_every_call_of_its_batch(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever step it happens. The next batch is computed."""

    async def test() -> None:
        harness = Harness()
        if stage == "computing":
            monkeypatch.setattr(harness.attention, "forward", FailsOnce(harness.attention.forward))
        elif stage == "counting":
            monkeypatch.setattr(harness.metrics, "count_batch", FailsOnce(harness.metrics.count_batch))
        elif stage == "splitting":
            once = FailsOnce(Result.split)
            monkeypatch.setattr(Result, "split", lambda result, sizes: once(result, sizes))
        else:
            module, name = {"sizing": (scheduler, "form_batch"), "stacking": (operations, "stack")}[stage]
            monkeypatch.setattr(module, name, FailsOnce(getattr(module, name)))
        calls = [request(b, seed=b) for b in (1, 2, 3)]

        outcomes = await outcomes_of(*(harness.start(call) for call in calls))

        if stage == "counting" and any(isinstance(outcome, Outcome) for outcome in outcomes):
            assert_answers(outcomes, calls)  # the next batch is computed
        else:
            assert [type(outcome) for outcome in outcomes] == [ServiceFault] * 3
            assert [type(outcome.__cause__) for outcome in outcomes] == [RuntimeError] * 3
        assert_answers(await outcomes_of(*(harness.start(call) for call in calls)), calls)
        assert not harness.scheduler.waiting
        assert harness.scheduler.healthy
        harness.scheduler.close()

    run(test())


def test_rule_3_a_failure_of_a_inline_call_affects_no_other_call() -> None:
    async def test() -> None:
        harness = Harness()
        harness.attention.forward = FailsOnce(harness.attention.forward)  # type: ignore[method-assign]
        first, *others = await outcomes_of(*(harness.start(operations=1) for _ in range(3)))
        assert isinstance(first, ServiceFault)
        assert isinstance(first.__cause__, RuntimeError)
        assert_answers(others, [request(1)] * 2)
        assert harness.scheduler.healthy
        harness.scheduler.close()

    run(test())


def test_rule_3_a_failure_does_not_affect_other_batches() -> None:
    """Waiting calls to another layer are computed."""

    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        broken = Attention()
        broken.fault = lambda call: (_ for _ in ()).throw(ValueError("broken"))
        broken_layer = layer_with(broken)
        tasks = [harness.start(layer=broken_layer if i % 2 else harness.layer) for i in range(6)]
        await loop_iterations()
        harness.attention.gate.set()

        outcomes = await outcomes_of(busy, *tasks)

        assert_answers([outcomes[i] for i in (0, 1, 3, 5)], [request(1)] * 4)
        assert [type(outcomes[i]) for i in (2, 4, 6)] == [ServiceFault] * 3
        assert broken.sizes == [3]
        harness.scheduler.close()

    run(test())


# 7. A batched reply equals the reply alone; bit for bit with `reproducible`.


def test_rule_7_a_batched_result_equals_the_result_alone() -> None:
    """Calls with different masks and sizes; those of one shape are computed together."""

    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        sizes = [(1, 4), (3, 4), (2, 5), (4, 4), (5, 4), (1, 7), (2, 4), (1, 3), (3, 2), (2, 4), (1, 11), (2, 1)]  # batch and queries
        calls = []
        for seed, (b, queries) in enumerate(sizes):
            kinds: list[dict[str, Any]] = [
                {"valid_lens": np.repeat(queries // 2, b)},
                {"attend_mask": np.tri(queries)},
                {"causal": True},
                {"head_scale": [1.0, 0.5, 2.0]},
            ]
            calls.append(request(b, seed, queries, **kinds[seed % 4]))
        tasks = [harness.start(call) for call in calls]
        await loop_iterations()
        harness.attention.gate.set()

        outcomes = await outcomes_of(busy, *tasks)

        assert_answers(outcomes[1:], calls)
        assert max(outcome.batch for outcome in outcomes[1:]) > 1
        harness.scheduler.close()

    run(test())


def test_rule_7_reproducible_calls_are_bit_for_bit_equal_at_any_load() -> None:
    """They are computed alone, on one thread. Other calls keep their number of threads, also those that start at the same time."""

    async def test() -> None:
        harness = Harness()
        spec = LayerSpec(d_model=64, num_heads=8)
        layer = REGISTRY.make("wide", spec)
        counts: list[tuple[int, int]] = []  # number of torch's threads in the thread that computes, and in one that starts meanwhile

        def spied(call: Call) -> Result:
            with ThreadPoolExecutor(1) as other:
                counts.append((torch.get_num_threads(), other.submit(torch.get_num_threads).result()))
            return layer.attention.forward(call)

        harness.layer = layer_with(Attention(spied))
        query = np.random.default_rng(1).standard_normal((2, 32, 64))
        call = make_call(validate(AttendRequest, {"query": query, "reproducible": True}), spec)
        others = [make_call(validate(AttendRequest, {"query": query * i}), spec) for i in range(1, 5)]

        (lonely,) = await outcomes_of(harness.start(call))
        tasks = [harness.start(c) for c in (*others[:2], call, *others[2:], call)]
        crowded = await outcomes_of(*tasks)

        assert [outcome.batch for outcome in crowded] == [4, 4, 1, 4, 4, 1]
        for outcome in (crowded[2], crowded[5]):
            for name, tensor in lonely.result.tensors.items():
                assert torch.equal(outcome.result.tensors[name], tensor)
        assert counts == [(1, 2), (2, 2), (1, 2), (1, 2)]
        harness.scheduler.close()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(test())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# 9. A batch that runs out of memory is split, and its halves are computed.


def beyond(n: int, error: Callable[[], BaseException]) -> Callable[[Call], None]:
    """A fault as if there were memory for n items at once."""

    def fault(call: Call) -> None:
        if call.query.shape[0] > n:
            raise error()

    return fault


def what_torch_raises() -> BaseException:
    """The exception of its CPU allocator when there is no memory."""
    try:
        torch.empty(1 << 52)
    except RuntimeError as error:
        return error
    raise AssertionError("32 petabytes were there")


SHORTAGES = [
    pytest.param(lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), id="torch on a GPU"),
    pytest.param(what_torch_raises, id="torch on the CPU"),
    pytest.param(lambda: MemoryError(), id="numpy and Python"),
]


@pytest.mark.parametrize("error", SHORTAGES)
def test_rule_9_a_batch_that_runs_out_of_memory_is_split(error: Callable[[], BaseException]) -> None:
    """Memory for three items: calls of one to three items are answered, the one of five gets OutOfMemory."""

    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        calls = [request(b, seed=i) for i, b in enumerate([1, 2, 5, 3, 1, 1, 1])]
        tasks = [harness.start(call) for call in calls]
        await loop_iterations()
        harness.attention.fault = beyond(3, error)
        harness.attention.gate.set()

        outcomes = await outcomes_of(busy, *tasks)

        assert isinstance(outcomes[3], OutOfMemory)
        assert_answers([*outcomes[1:3], *outcomes[4:]], [*calls[:2], *calls[3:]])
        assert harness.attention.sizes[1] == 14
        assert harness.attention.sizes.count(5) == 1
        assert harness.counted("attend_out_of_memory_splits_total") >= 2
        assert max(b for b in harness.attention.sizes[2:] if b != 5) < 14
        assert harness.scheduler.healthy
        assert_answers(await outcomes_of(harness.start()), [request(1)])
        harness.scheduler.close()

    run(test())


def test_rule_9_running_out_of_memory_while_stacking_splits_the_batch() -> None:
    async def test() -> None:
        harness = Harness()
        busy = await harness.occupy()
        tasks = [harness.start(request(b)) for b in (2, 2, 2, 2)]
        await loop_iterations()

        def stack(calls: list[Call]) -> Call:
            if len(calls) > 1:
                raise MemoryError
            return stacking.stack(calls)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operations, "stack", stack)
            harness.attention.gate.set()
            outcomes = await outcomes_of(busy, *tasks)
        assert_answers(outcomes[1:], [request(2)] * 4)
        harness.scheduler.close()

    run(test())


def test_rule_9_memory_of_the_failed_batch_is_freed_before_the_halves_run() -> None:
    class Intermediate:
        """Stands for the scores of a batch that ran out of memory half way."""

    async def test() -> None:
        harness = Harness()
        held_still: list[int] = []
        intermediates: list[weakref.ref[Intermediate]] = []

        def attend(call: Call) -> Result:
            held_still.append(sum(ref() is not None for ref in intermediates))
            intermediate = Intermediate()
            intermediates.append(weakref.ref(intermediate))
            if call.query.shape[0] > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return REAL.attention.forward(call)

        harness.layer = layer_with(Attention(attend))
        outcomes = await outcomes_of(*(harness.start(request(1, seed)) for seed in range(4)))
        assert_answers(outcomes, [request(1, seed) for seed in range(4)])
        assert held_still == [0] * 7
        harness.scheduler.close()

    run(test())


def test_rule_9_readiness_falls_after_repeated_out_of_memory_and_recovers() -> None:
    """One call that does not fit changes nothing; several in a row do. The first that fits restores readiness."""

    async def test() -> None:
        service = open_service("cpu")
        await service.start({})
        service.registry.put(REAL)
        attention = Attention()
        attention.fault = beyond(1, MemoryError)
        layer = layer_with(attention)

        async def ask(b: int) -> bool:
            """Whether it fits."""
            try:
                await service.scheduler.submit(Prepared(layer, request(b), Cost({}, HEAVY, 0, 1, 0)))
            except OutOfMemory:
                return False
            return True

        assert service.ready
        for _ in range(UNHEALTHY_AFTER - 1):
            assert not await ask(2)
            assert service.ready
        assert not await ask(2)
        assert not service.ready
        assert not await ask(2)
        assert not service.ready
        assert await ask(1)
        assert service.ready
        for _ in range(UNHEALTHY_AFTER - 1):
            assert not await ask(2)
        assert service.ready
        service.close()

    run(test())


def test_rule_9_other_failures_do_not_split_the_batch() -> None:
    async def test() -> None:
        harness = Harness()
        harness.attention.fault = lambda call: (_ for _ in ()).throw(RuntimeError("illegal memory access"))
        outcomes = await outcomes_of(*(harness.start() for _ in range(8)))
        assert {type(outcome) for outcome in outcomes} == {ServiceFault}
        assert harness.attention.sizes == [8]
        harness.scheduler.close()

    run(test())


def test_rule_9_readiness_recovers_without_calls() -> None:
    """An unready server gets no calls. When there is memory again, /health/ready and the gauge say so."""

    async def test() -> None:
        app = create_app(Settings(d_model=6, num_heads=3, access_log=False))
        service, attention = app.state.service, Attention()
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            while not service.started:
                await asyncio.sleep(0.001)
            for layer in service.registry.all():
                service.registry.remove(layer.name)
            service.registry.put(layer_with(attention))

            async def fall() -> None:
                attention.fault = beyond(0, MemoryError)
                for _ in range(UNHEALTHY_AFTER):
                    with pytest.raises(OutOfMemory):
                        await service.scheduler.submit(heavy_call(attention))
                assert not service.ready

            await fall()
            assert (await client.get("/health/ready")).status_code == 503
            attention.fault = lambda call: None
            assert (await client.get("/health/ready")).status_code == 200
            assert service.ready

            await fall()
            attention.fault = lambda call: None
            while not service.ready:
                await asyncio.sleep(0.001)
            assert "\nattend_ready 1.0\n" in (await client.get("/metrics")).text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "RECOVERY_INTERVAL", 0.001)
        run(test())
