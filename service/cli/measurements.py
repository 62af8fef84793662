"""What `attend bench` measures, row by row: throughput beside its floor, growth with the size of bodies, health checks under load.

The floor is decode + bind + compute + encode in one process without HTTP, through the functions that the engine calls. In the growth
table the batch grows and its items stay as they are (128 queries, 512 wide, 8 heads), so that the work per byte is the same in every row
and only what the server adds can grow. Knows no terminal, and not where the server runs: it is handed to it.
"""

import http.client
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from service.cli.load import MEDIA, Case, Load, Replies
from service.errors import AttendError
from service.spec import LayerSpec

Row = dict[str, Any]
KB, MB = 1_000, 1_000_000
CASES = {
    "small": Case("small", (1, 16, 64), 8, (1, 32)),
    "mid": Case("mid", (4, 128, 512), 8, (1, 4)),
    "large": Case("large", (8, 256, 768), 12, (1,)),
}
WARM = 1 / 8  # of the seconds, before anything is counted
BODY_SIZES = (KB, 10 * KB, 100 * KB, MB, 10 * MB, 100 * MB)
QUERIES, WIDTH, HEADS = 128, 512, 8
NARROW = 64  # for bodies that do not hold one row of WIDTH numbers
LEAST = 3  # requests, however long they take
HEALTH = Case("health", (4, 120, WIDTH), HEADS)  # 8 MB of JSON, answered by as much
CONNECTIONS = 4
PAUSE = 0.003  # seconds between a health check's answer and the next


@dataclass(frozen=True, slots=True)
class Target:
    """A server, a layer that it holds, and its process where that is ours to look at."""

    url: str
    layer: str
    process: int | None = None
    key: str | None = field(default=None, repr=False)

    def load(self, bodies: Sequence[bytes], form: str, connections: int) -> Load:
        """So many callers with these bodies."""
        return Load(self.url, bodies, form, connections, self.key)


Opened = Callable[[LayerSpec], AbstractContextManager[Target]]


def measure_throughput(
    opened: Opened,
    cases: Sequence[Case],
    forms: Sequence[str],
    connections: Sequence[int],
    seconds: float,
    bench: Executor | None,
    device: str,
) -> Iterator[Row]:
    """One row per size, form and number of connections. The floor is measured in a process of `bench`; nowhere without it."""
    for case in cases:
        with opened(case.spec) as target:
            for form in forms:
                floor = None if bench is None else bench.submit(measure_floor, case, form, seconds, device).result()
                bodies = case.bodies(form, target.layer)
                for count in connections or case.connections:
                    load = target.load(bodies, form, count)
                    load.run(seconds * WARM, count)
                    figures = load.run(seconds, count).figures()
                    ratio = figures["rate"] / floor if floor else None
                    yield {"size": case.name, "form": form, "connections": count, **figures, "floor": floor, "of_floor": ratio}


def measure_floor(case: Case, form: str, seconds: float, device: str) -> float:
    """Requests per second without a server. To be called in a process that has the server's cores and threads."""
    bodies = case.bodies(form, "default")
    answer = _path(case.spec, MEDIA[form], device)
    for body in bodies:
        answer(body)
    began, count = time.perf_counter(), 0
    for body in cycle(bodies):
        answer(body)
        count += 1
        took = time.perf_counter() - began
        if took >= seconds and count >= LEAST:
            break
    return count / took


def _path(spec: LayerSpec, media: str, device: str) -> Callable[[bytes], object]:
    """Bytes -> bytes, one after the other, through the engine's own functions: what is not theirs is the server's."""
    import torch

    from service.serving.batches import Entry
    from service.serving.computing import compute
    from service.serving.cost import ServingLimits
    from service.serving.engine import open_engine
    from service.serving.exchange import Asked
    from service.serving.replying import written
    from service.wire.limits import WireLimits

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engine = open_engine(device, WireLimits(), ServingLimits())
    layer = engine.catalogue.make("default", spec)
    layer.attention.tune()
    engine.catalogue.put(layer)

    def answer(body: bytes) -> object:
        asked = Asked(body, media, reply_form=media)
        bound = engine.decoder.bound(asked)
        [(_, outcome)] = compute([Entry(bound.layer, bound.call, bound.cost, 0.0)], engine.clock)
        if isinstance(outcome, AttendError):
            raise outcome
        return written(bound, outcome.result, asked)

    return answer


def case_of(size: int, form: str) -> Case:
    """The case whose bodies have about so many bytes."""
    fields = {"outputs": ["output"]}
    for width in (WIDTH, NARROW):
        sample = Case("", (1, 8, width), HEADS, tensors=("query",), fields=fields).bodies(form, "default")[0]
        row = len(sample) / 8
        if size >= row:
            break
    rows = max(1, round(size / row))
    shape = (1, rows, width) if rows < QUERIES else (round(rows / QUERIES), QUERIES, width)
    return Case("growth", shape, HEADS, tensors=("query",), fields=fields)


def measure_growth(opened: Opened, forms: Sequence[str], sizes: Sequence[int], seconds: float) -> Iterator[Row]:
    """One row per form and size, each from a server of its own where `opened` starts them, so that a peak is the row's own."""
    for form in forms:
        for size in sizes:
            case = case_of(size, form)
            with opened(case.spec) as target:
                bodies = case.bodies(form, target.layer)
                yield {
                    "form": form,
                    "size": size,
                    "bytes": len(bodies[0]),
                    "shape": list(case.shape),
                    **_row(target, bodies, form, seconds),
                }


def _row(target: Target, bodies: list[bytes], form: str, seconds: float) -> Row:
    """One connection, so that time per byte is that of a request which has the server to itself."""
    idle = resident(target.process)
    load = target.load(bodies, form, 1)
    load.run(0)
    figures = load.run(seconds, LEAST).figures()
    peak = resident(target.process, peak=True)
    used = None if idle is None or peak is None else peak - idle
    length, median = len(bodies[0]), figures["p50_ms"]
    return {
        **figures,
        "ns_per_byte": None if median is None else median * 1e6 / length,
        "idle_bytes": idle,
        "peak_bytes": used,
        "peak_to_body": None if used is None else used / length,
    }


def relate(rows: list[Row]) -> list[Row]:
    """Adds to each row its time per byte beside that of 1 MB in the same form; None where that was not measured."""
    standard = {row["form"]: row["ns_per_byte"] for row in rows if row["size"] == MB}
    for row in rows:
        time_per_byte, at_mb = row["ns_per_byte"], standard.get(row["form"])
        row["to_1mb"] = time_per_byte / at_mb if time_per_byte and at_mb else None
    return rows


def resident(process: int | None, peak: bool = False) -> int | None:
    """Bytes of memory that a process has now, or had at most since it was last asked for now; None where Linux does not tell."""
    if process is None:
        return None
    status = Path(f"/proc/{process}/status")
    try:
        found = re.search(rf"^Vm{'HWM' if peak else 'RSS'}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if not peak:
            status.with_name("clear_refs").write_text("5")  # sets the peak back to what is held now
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def measure_health(opened: Opened, seconds: float) -> Iterator[Row]:
    """One row: how long GET /health/live takes on a connection of its own while 8 MB JSON bodies are served over four others."""
    with opened(HEALTH.spec) as target, ThreadPoolExecutor(1) as pool:
        bodies = HEALTH.bodies("json", target.layer)
        load = target.load(bodies, "json", CONNECTIONS)
        load.run(0, CONNECTIONS)
        loaded = pool.submit(load.run, seconds, CONNECTIONS)
        checks = _check(target.url, loaded)
        under = loaded.result().figures()
    figures = checks.figures()
    yield {
        **{name: figures[name] for name in ("requests", "bad", "seconds", "p50_ms", "p99_ms", "failure")},
        "max_ms": max(checks.latencies) * 1e3 if checks.latencies else None,
        "load_bytes": len(bodies[0]),
        "load_connections": CONNECTIONS,
        **{f"load_{name}": figure for name, figure in under.items()},
    }


def _check(url: str, loaded: "Future[Replies]") -> Replies:
    """Asks again and again until the load is over. That thread is nearly always in the kernel, and so leaves this one the GIL."""
    parts, replies, began = urlsplit(url), Replies(), time.perf_counter()
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=60)
    while not loaded.done():
        started = time.perf_counter()
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}/health/live")
            reply = connection.getresponse()
            text = reply.read()
            replies.add(f"HTTP/1.1 {reply.status} {reply.reason}\r\n".encode(), time.perf_counter() - started, text)
        except (OSError, http.client.HTTPException) as error:
            replies.failed(str(error) or type(error).__name__)
            connection.close()
        time.sleep(PAUSE)
    connection.close()
    replies.seconds = time.perf_counter() - began
    return replies
