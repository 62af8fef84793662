"""Where `attend bench` puts what it measures with: a server that runs already or one started for it, the load, the floor's process.

A server that is started here gets one core to itself and the load the others, where there are two. The process that measures the floor
has the server's cores and as many threads.
"""

import os
import platform
import re
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from service import __version__
from service.cli.backend import server_client
from service.cli.child import child_server
from service.cli.measurements import Target
from service.client import BadReply, Client, calls
from service.client.connection import API_KEY
from service.errors import AttendError
from service.serving.threads import usable_cores
from service.spec import LayerSpec

LOOPBACK = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True, slots=True)
class Stage:
    """Where everything runs: a server that is there or started here, on which cores; threads and device of its arithmetic."""

    url: str | None
    threads: int
    device: str = "cpu"
    server: frozenset[int] = frozenset()  # cores; none: wherever the system puts it
    load: frozenset[int] = frozenset()

    def about(self) -> dict[str, Any]:
        """What a figure means nothing without."""
        try:
            processor = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        except OSError:
            processor = None
        return {
            "attend": __version__,
            **{name: version(name) for name in ("torch", "numpy")},
            "python": platform.python_version(),
            "processor": processor[1] if processor else platform.machine(),
            "cores": len(self.server | self.load) or usable_cores(),
            "url": self.url,
            "threads": self.threads,
            "device": self.device,
            "server_cores": sorted(self.server),
            "load_cores": sorted(self.load),
        }

    def __str__(self) -> str:
        about = self.about()
        versions = ", ".join(f"{name} {about[name]}" for name in ("attend", "torch", "numpy", "python"))
        place = f"server at {self.url}" if self.url else "server and load on the same cores"
        if self.server:
            place = f"server on core {','.join(map(str, about['server_cores']))}, load on {','.join(map(str, about['load_cores']))}"
        return f"{versions}; {about['processor']}, cores: {about['cores']}; {place}; {self.device}, threads: {self.threads}"

    @contextmanager
    def opened(self, spec: LayerSpec) -> Iterator[Target]:
        """A server with such a layer. One that is started here ends with the block; elsewhere a layer that was made is removed."""
        with ExitStack() as stack:
            if self.url is None:
                url, process = self._start(stack)
                client = stack.enter_context(Client(url, transport=httpx.HTTPTransport()))  # whatever proxies there are
                yield Target(url, stack.enter_context(_layer(client, spec)), process)
                return
            client = stack.enter_context(server_client(self.url))
            yield Target(self.url, stack.enter_context(_layer(client, spec)), key=os.environ.get(API_KEY))

    def _start(self, stack: ExitStack) -> tuple[str, int | None]:
        others = _children()
        with pinned(self.server):
            url = stack.enter_context(child_server())
        stack.enter_context(pinned(self.load))
        return url, next(iter(_children() - others), None)

    @contextmanager
    def bench(self) -> Iterator[Executor | None]:
        """A process with the server's cores and threads; none where the server is on another machine."""
        if self.url is not None and urlsplit(self.url).hostname not in LOOPBACK:
            yield None
            return
        with ProcessPoolExecutor(1, get_context("spawn"), _stand_in, (self.server, self.threads)) as pool:
            yield pool


def find_stage(url: str | None) -> Stage:
    """What there is to measure with. Raises AttendError where no server of ours answers at the URL."""
    if url is None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if min(len(cores), usable_cores()) < 2:
            return Stage(None, usable_cores())
        return Stage(None, 1, server=frozenset(cores[:1]), load=frozenset(cores[1:]))
    with server_client(url) as client:
        response = client.send(calls.Call("GET", "/"))
    try:
        index = response.json()
        return Stage(url, int(index["threads"]), str(index["device"]))
    except (ValueError, TypeError, KeyError):
        raise BadReply(f"expected the index of a server at {url}, got {response.text[:80]!r}") from None


@contextmanager
def pinned(cores: frozenset[int]) -> Iterator[None]:
    """This thread, and the threads and processes that it starts, on these cores alone; no cores: as it is."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _stand_in(cores: frozenset[int], threads: int) -> None:
    """Makes this process like the server's, before torch is loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it will end it
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if cores:
        os.sched_setaffinity(0, cores)


def _children() -> set[int]:
    """The processes that this one has started; none where there is no /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


@contextmanager
def _layer(client: Client, spec: LayerSpec) -> Iterator[str]:
    """The name of a layer of that spec: one that is held, whatever its weights, or one made for the time being."""
    for held in client.layers():
        if held.spec.model_copy(update={"seed": spec.seed, "init": spec.init}) == spec:
            yield held.name
            return
    name = f"bench-{secrets.token_hex(6)}"
    client.put_layer(name, spec)
    try:
        yield name
    finally:
        with suppress(AttendError):
            client.delete_layer(name)
