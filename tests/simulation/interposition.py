"""Replaces what a process takes from outside, for the time of a run: threads, random numbers, pictures, memory, and drawn sizes.

The service has no hooks for this: clocks are arguments of it, and the names of everything else are replaced where it looks them up.
"""

import asyncio
import fcntl
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from attend.serving import executor, figures
from attend.serving.sessions import transfer
from simulation.configuration import Configuration
from simulation.loop import SimulatedLoop
from simulation.rpc import GrpcServer
from simulation.threads import InlineExecutor, SimulatedExecutor
from simulation.world import World

POOLS = ("scheduler", "codec_pool", "figures", "layers.loader")  # modules of `serving` that start threads
SLOWEST_BATCH = 1.5  # seconds; a device is broken that takes READY_SECONDS for a check
MEMORY_ERRORS = (lambda: MemoryError(), lambda: RuntimeError("can't allocate memory"), lambda: OSError(12, "Cannot allocate memory"))


@contextmanager
def interposed(world: World, chosen: Configuration) -> Iterator[None]:
    """Within this block, the service computes in simulated threads, with drawn sizes and faults. No garbage is collected meanwhile, so that
    whatever a reference cycle keeps alive is seen."""
    SimulatedExecutor.all.clear()
    figures._load_matplotlib()  # its import, in the thread of pictures, would stop the collection of garbage for good
    secrets = world.random("secrets")
    replaced = {f"attend.serving.{module}.ThreadPoolExecutor": partial(SimulatedExecutor, world) for module in POOLS}
    replaced |= chosen.sizes
    replaced |= {f"attend.web.{module}.run_in_threadpool": asyncio.to_thread for module in ("openapi", "v2.routes")}
    replaced |= {
        "attend.serving.executor.one_core": InlineExecutor,
        "attend.serving.service.one_core": InlineExecutor,
        "attend.serving.service.gc": SimpleNamespace(collect=lambda: None, freeze=lambda: None),
        "attend.serving.service.memory_in_use": lambda device: 0,
        "attend.serving.sessions.ids.secrets": SimpleNamespace(token_bytes=secrets.randbytes),
        "attend.serving.sessions.registry.time": SimpleNamespace(time=world.clock, monotonic=world.clock),
        "attend.serving.layers.store.token_hex": lambda size: secrets.randbytes(size).hex(),
        "attend.serving.sessions.transfer._file_of": transfer._file_of,  # which the rules replace
        "attend.cli.server.exit_within": lambda seconds, status: None,  # would end this process
        "attend.serving.figures.compose": lambda spec, tensors, metadata: tensors,
        "attend.serving.figures.draw": partial(_draw_picture, world),
        "attend.serving.executor._results": partial(_compute, world, chosen, world.random("compute"), executor._results),
        "attend.web.requests.getrandbits": secrets.getrandbits,
        "attend.web.grpc.server.grpc": SimpleNamespace(aio=SimpleNamespace(server=partial(_grpc_server, world))),
        "attend.web.grpc.server.MemoryWatch": lambda memory, end: SimpleNamespace(close=lambda: None),
        "attend.web.connections.os": SimpleNamespace(urandom=secrets.randbytes),
    }
    if chosen.files is not None:
        replaced |= {
            "attend.serving.layers.store.os": chosen.files.namespace(),
            "attend.serving.layers.store.fcntl": SimpleNamespace(**{**vars(fcntl), "flock": chosen.files.flock}),
        }
    world.lacks_memory = partial(_lacks_memory, world, chosen, world.random("memory"))
    collects = gc.isenabled()
    gc.disable()
    before = {name: _replace(name, value) for name, value in replaced.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of the calls of a run, none gains from more
    defaults = import_module("attend.web.errors").retry_after.__defaults__
    import_module("attend.web.errors").retry_after.__defaults__ = (secrets.randint,)
    try:
        yield
    finally:
        import_module("attend.web.errors").retry_after.__defaults__ = defaults
        for name, value in before.items():
            _replace(name, value)
        torch.set_num_threads(threads)
        _forget()
        if collects:
            gc.enable()


def _forget() -> None:
    """Let the processes of the run be garbage."""
    for task in list(getattr(asyncio.tasks, "_all_tasks", ())):
        if isinstance(task.get_loop(), SimulatedLoop) and task.cancelled():
            task._make_cancelled_error()  # forgets the exception: Python 3.11 does not find its cycle with the task


def _replace(name: str, value: Any) -> Any:
    """Set the attribute of that name; return its value before."""
    path, _, attribute = name.rpartition(".")
    try:
        owner: Any = import_module(path)
    except ModuleNotFoundError:  # an attribute of a module that the module imports
        parent, _, child = path.rpartition(".")
        owner = getattr(import_module(parent), child)
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    return before


def _grpc_server(world: World, options: Any) -> GrpcServer:
    world.grpc = GrpcServer(world)
    return world.grpc


def _draw_picture(world: World, tensors: Any, spec: Any, check: Callable[[], None]) -> bytes:
    """In place of matplotlib: takes some time, and checks at intervals whether the picture is still wanted, as the real one does."""
    for _ in range(3):
        world.spend(0.05)
        check()
    return b"picture of " + ",".join(sorted(tensors)).encode()


def _lacks_memory(world: World, chosen: Configuration, draw: Random) -> bool:
    if not chosen.faults.begun or draw.random() >= chosen.faults.memory:
        return False
    world.note("no memory for a job")
    chosen.faults.occurred = True
    return True


def _compute(world: World, chosen: Configuration, draw: Random, results: Callable[[Any], Any], batch: Any) -> Any:
    """The real arithmetic, which takes a drawn time, and fails before or after it with a drawn probability."""
    if chosen.compute_seconds:
        world.spend(min(draw.expovariate(1 / chosen.compute_seconds), SLOWEST_BATCH))
    fault = draw.random() if chosen.faults.compute and chosen.faults.begun else 1.0
    computed = results(batch) if fault >= chosen.faults.compute / 2 else None
    if fault < chosen.faults.compute:
        chosen.faults.occurred = True
        if draw.random() < 0.6:
            world.note("no memory for a batch of", len(batch))
            raise draw.choice(MEMORY_ERRORS)()
        world.note("a batch of", len(batch), "fails")
        raise RuntimeError("an injected fault")
    return computed
