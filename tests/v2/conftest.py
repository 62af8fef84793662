"""One server with several layers for all tests of the protocol."""

import json
from collections.abc import Iterator

import httpx
import pytest
from support.server import Server, start_server
from support.v2 import LAYERS


@pytest.fixture(scope="session")
def v2_server() -> Iterator[Server]:
    """A server of these tests' own: it counts, and its layers come and go."""
    running = start_server("--grpc-port", "0", "--max-body-bytes", str(1 << 20), env={"ATTEND_LAYERS": json.dumps(LAYERS)})
    yield running
    running.stop()


@pytest.fixture(scope="session")
def v2(v2_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=v2_server.url, timeout=60, headers={"Content-Type": ""}) as client:
        yield client
