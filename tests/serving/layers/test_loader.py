"""Changes of layers that wait for other changes."""

import asyncio
import threading
from pathlib import Path

import pytest

from attend.errors import DeadlinePassed
from attend.serving.layers.files import ParsedLayer
from attend.serving.service import ServiceOptions, open_service
from attend.spec import LayerSpec
from support.waiting import PATIENCE

SPEC = LayerSpec(d_model=10, num_heads=5)


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "in a folder"])
def test_a_put_behind_another_ends_at_its_deadline(tmp_path: Path, stored: bool) -> None:
    """While the first layer is being read, the second caller gets its error, and nothing of it happens later."""
    reading, gate, read = threading.Event(), threading.Event(), []

    def slow() -> ParsedLayer:
        reading.set()
        gate.wait()
        return ParsedLayer(SPEC, None)

    def late() -> ParsedLayer:
        read.append("late")
        return ParsedLayer(SPEC, None)

    async def test() -> None:
        async with asyncio.timeout(PATIENCE):
            service = open_service("cpu", ServiceOptions(layers_dir=tmp_path if stored else None))
            await service.start({})
            first = asyncio.create_task(service.loader.put("first", slow))
            while not reading.is_set():
                await asyncio.sleep(0.01)
            with pytest.raises(DeadlinePassed, match="nothing has changed"):
                await service.loader.put("second", late, service.clock() + 0.05)
            assert not gate.is_set()
            gate.set()
            assert (await first).layer.name == "first"
            assert [layer.name for layer in service.registry.all()] == ["first"] and not read
            await service.loader.put("second", late, service.clock() + PATIENCE)
            assert read == ["late"]
            service.close()

    try:
        asyncio.run(test())
    finally:
        gate.set()


def test_a_removal_during_a_change_ends_at_its_deadline() -> None:
    async def test() -> None:
        async with asyncio.timeout(PATIENCE):
            service = open_service("cpu")
            await service.start({"a": SPEC})
            async with service.loader._changing:
                for change in (service.loader.remove, service.loader.unload):
                    with pytest.raises(DeadlinePassed, match="nothing has changed"):
                        await change("a", service.clock() + 0.05)
            assert service.registry.get("a") is not None
            await service.loader.remove("a", service.clock() + PATIENCE)
            service.close()

    asyncio.run(test())
