"""What `attend bench --client` measures: a call through `service.client`, beside the same bytes through httpx alone.

Both send the same body and get the same reply, in turn, call by call: whatever else the machine does slows down both. httpx is given bytes
and gives bytes back; the client makes them of arrays, and arrays of the reply, so what it adds is encoding, decoding and its policy of
retries. Knows no terminal, and not where the server runs.
"""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import httpx
import numpy as np

from service.cli.load import Case
from service.cli.measurements import LEAST, WARM, Opened, Row
from service.client import Client, Retries, calls


def measure_client(opened: Opened, cases: Sequence[Case], seconds: float) -> Iterator[Row]:
    """One row per size: medians of both in milliseconds, and how they relate. A refusal is raised as the client raises it."""
    for case in cases:
        with opened(case.spec) as target:
            # a server that was started here is asked directly, whatever proxies there are
            transports = [httpx.HTTPTransport() if target.process else None for _ in range(2)]
            with (
                Client(target.url, api_key=target.key, retries=Retries(times=0), transport=transports[0]) as client,
                httpx.Client(base_url=target.url, headers=_key(target.key), timeout=client.timeout, transport=transports[1]) as bare,
            ):
                asked = _both(case, target.layer, client, bare)
                _alternate(asked, seconds * WARM)
                times = _alternate(asked, seconds)
        yield {"size": case.name, **_related(*times)}


def _both(case: Case, layer: str, client: Client, bare: httpx.Client) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same question, asked by each: the client first, which raises what is wrong with it."""
    rng = np.random.default_rng(0)
    fields: dict[str, Any] = {"layer": layer, **{name: rng.standard_normal(case.shape, np.float32) for name in case.tensors}}
    call = calls.attend(fields)

    def by_httpx() -> object:
        return bare.request(call.method, call.path, content=call.body, headers=call.headers).raise_for_status().content

    return lambda: client.attend(**fields), by_httpx


def _alternate(asked: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """The seconds that each took, in turn, until so many have passed; each goes first every other time."""
    times: list[list[float]] = [[] for _ in asked]
    began, turn = perf_counter(), list(range(len(asked)))
    while perf_counter() - began < seconds or len(times[0]) < LEAST:
        for i in turn:
            started = perf_counter()
            asked[i]()
            times[i].append(perf_counter() - started)
        turn.reverse()
    return times


def _related(client: list[float], bare: list[float]) -> Row:
    httpx_ms, client_ms = float(np.median(bare)) * 1e3, float(np.median(client)) * 1e3
    return {
        "requests": len(bare) + len(client),
        "bad": 0,
        "failure": "",
        "httpx_ms": httpx_ms,
        "client_ms": client_ms,
        "added_ms": client_ms - httpx_ms,
        "to_httpx": client_ms / httpx_ms,
    }


def _key(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.strip()}"} if key else {}
