"""Fixtures that tests of several folders share."""

import os

# Before NumPy and torch are imported: several processes test side by side, and threads of one that wait for work would spin on the cores
# of the others. Servers plan their own threads.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ["PYTHONSAFEPATH"] = "1"  # processes that tests start import the installed package, not the checkout

import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from typing import Any

import httpx
import numpy as np
import pytest
import structlog
from hypothesis import settings

from attend.client import Client
from attend.wire.native import numbers
from support.processes import events
from support.server import Server, fork_server, start_server
from support.v2 import LAYERS
from support.waiting import until

# Hypothesis draws 25 examples for each test, the same in every run; with `--hypothesis-profile thorough`, 40 new ones.
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=40, deadline=None)
settings.load_profile("quick")
# Log exceptions as `attend serve` does: structlog's default also renders the local variables of every frame, which takes seconds.
renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure([renderer], logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
# Clients share the certificates that they trust by default: each would read them again, in 20 ms.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)
# Leave out tests of an extra or a compiled extension that is not installed.
NEEDED = {"deploy/test_ray.py": "ray", "check/test_jax.py": "jax"}  # by tests that CI runs in environments of their own
collect_ignore_glob = [path for path, package in NEEDED.items() if not find_spec(package)]
collect_ignore_glob += [] if numbers.variants()[1:] else ["wire/native/test_numbers.py"]


@pytest.hookimpl(tryfirst=True)  # before the selection by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need more than the extra `test` installs as slow."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("checkpoint", "browser", "gateway", "ray")):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def own_seed(request: pytest.FixtureRequest) -> None:
    """Each test draws the same numbers from its module's generator and from torch's, whichever tests ran before it."""
    rng, seed = getattr(request.module, "RNG", None), zlib.crc32(request.node.name.encode())
    if isinstance(rng, np.random.Generator):
        rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    elif isinstance(rng, np.random.RandomState):
        rng.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@pytest.fixture(params=sorted({numbers.variants()[0], numbers.variants()[-1]}))
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Numbers in JSON are read and written by Python, and by the compiled extension if there is one."""
    before = numbers.variant()
    numbers.use(request.param)
    yield
    numbers.use(before)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server, shared by all tests that restore its state."""
    running = fork_server("--max-body-bytes", str(4 * 1024 * 1024), "--session-memory", str(256 * 1024 * 1024))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers behind one port that share a folder of layers, both ready. Tests remove their layers, and may kill a worker."""
    folder = tmp_path_factory.mktemp("layers")
    running = start_server("--workers", "2", "--threads", "1", "--layers-dir", str(folder), "--max-layers", "3", "--grpc-port", "0")
    until(lambda: len(events(running, "ready")) == 2, "both ready")
    yield running
    running.stop()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts servers, each in its own process; they stop when the test ends."""
    running: list[Server] = []

    def begin(*flags: str, env: dict[str, str] | None = None) -> Server:
        begin_one = start_server if "--workers" in flags else fork_server  # workers import every module again, as their supervisor did
        running.append(begin_one(*flags, env=env))
        return running[-1]

    yield begin
    for one in running:
        one.stop()


@pytest.fixture
def start_here() -> Iterator[Callable[..., str]]:
    """Starts servers with given settings in this process, for tests that do not test processes, signals or the command line."""
    from support.app import Settings, serve_here  # imports torch, which not every test needs

    with ExitStack() as servers:
        yield lambda **settings: servers.enter_context(serve_here(Settings(access_log=False, **settings)))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium for the tests of one file."""
    from support.browser import chromium  # few tests need it

    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    """A plain HTTP client of the shared server."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[Client]:
    """The Python client of the shared server."""
    with Client(server.url) as client:
        yield client


@pytest.fixture(scope="session")
def v2_server() -> Iterator[Server]:
    """A server for the tests of the Open Inference Protocol, with gRPC. The tests count its calls, and load and unload its layers."""
    running = fork_server("--grpc-port", "0", "--max-body-bytes", str(1 << 20), env={"ATTEND_LAYERS": json.dumps(LAYERS)})
    yield running
    running.stop()


@pytest.fixture(scope="session")
def v2(v2_server: Server) -> Iterator[httpx.Client]:
    """A plain HTTP client of that server, which sends no Content-Type."""
    with httpx.Client(base_url=v2_server.url, timeout=60, headers={"Content-Type": ""}) as client:
        yield client


@pytest.fixture
def receiver() -> Iterator[Any]:
    """A collector of traces and metrics."""
    from support.otlp import Receiver

    one = Receiver()
    thread = threading.Thread(target=one.serve_forever)
    thread.start()
    yield one
    one.shutdown()
    thread.join()
    one.server_close()
