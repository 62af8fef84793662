"""What the benchmarks share: request bodies, a server on one core, and load by wrk on another core."""

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

SERVER_CORE, LOAD_CORE = "0", "1"
BODIES = 8  # different bodies of each size, posted in turn
START_SECONDS = 120
SAFETENSORS = "application/vnd.safetensors"
POST = Path(__file__).with_name("post.lua")
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Size:
    """Shape of the query, key and value of one request: [batch, queries, d_model]; and the numbers of connections to measure."""

    name: str
    shape: tuple[int, int, int]
    num_heads: int
    connections: tuple[int, ...]


SIZES = {
    size.name: size
    for size in (
        Size("small", (1, 16, 64), 8, (1, 32)),
        Size("mid", (4, 128, 512), 8, (1, 4)),
        Size("large", (8, 256, 768), 12, (1,)),
    )
}
FORMS = ("json", "st", "v2json", "v2bin")
KINDS = ("plain", "causal", "lengths", "mask")  # of requests: what they say about masks


@dataclass(frozen=True)
class Payload:
    """Request bodies of one form, as files for wrk, and the headers that go with them."""

    paths: Sequence[Path]
    headers: Mapping[str, str]

    @property
    def first(self) -> bytes:
        return self.paths[0].read_bytes()


@dataclass(frozen=True)
class Figures:
    """What wrk measured. `bad` counts replies other than 200 and failed connections."""

    rate: float  # requests per second
    p50_ms: float
    p99_ms: float
    bad: int


@dataclass
class Server:
    """A running server: its address, its process, and what it writes."""

    url: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def failure(self, problem: str) -> SystemExit:
        """What ends a benchmark: the problem and the end of the server's log."""
        self.log.seek(0)
        return SystemExit(f"{self.url}: {problem}; its log ends:\n{self.log.read()[-2000:].decode(errors='replace')}")


def random_arrays(shape: tuple[int, ...], rng: np.random.Generator, names: Sequence[str] = ("query", "key", "value")) -> Arrays:
    return {name: rng.standard_normal(shape).astype(np.float32) for name in names}


def visible_keys(kind: str, rows: int) -> NDArray[np.bool_]:
    """Which keys each query of such a request may attend to, [rows, rows]."""
    row, column = np.ogrid[:rows, :rows]
    return {
        "plain": np.ones((rows, rows), np.bool_),
        "causal": column <= row,
        "lengths": np.broadcast_to(column < rows - 3, (rows, rows)),
        "mask": (row + column) % 3 > 0,
    }[kind]


def payloads(size: Size, folder: Path, kind: str = "plain", forms: Sequence[str] = FORMS) -> tuple[dict[str, Payload], Arrays]:
    """Bodies of these forms, written to `folder`, and the tensors of the first one. Numbers in JSON have nine digits."""
    batch, rows, _ = size.shape
    rng = np.random.default_rng(0)
    masks: dict[str, NDArray[Any]] = {}
    fields: dict[str, object] = {}
    drawn = [random_arrays(size.shape, rng) for _ in range(BODIES)]
    if kind == "mask":
        masks["attend_mask"] = visible_keys(kind, rows)
    elif kind == "lengths":
        fields["valid_lens"] = [rows - 3] * batch
    elif kind == "causal":
        fields["causal"] = True
    encoded = {form: [encode(form, {**arrays, **masks}, fields) for arrays in drawn] for form in forms}
    found = {}
    for form, bodies in encoded.items():
        paths = []
        for i, (body, _) in enumerate(bodies):
            paths.append(folder / f"{size.name}-{kind}-{form}-{i}")
            paths[-1].write_bytes(body)
        found[form] = Payload(paths, bodies[0][1])
    return found, drawn[0]


def encode(form: str, arrays: Arrays, fields: Mapping[str, object] = {}) -> tuple[bytes, dict[str, str]]:
    """One request as bytes, and its headers."""
    if form == "json":
        members = [f'"{name}":{nested(array)}' for name, array in arrays.items()]
        members += [f'"{name}":{json.dumps(value)}' for name, value in fields.items()]
        return ("{" + ",".join(members) + "}").encode(), {"Content-Type": "application/json"}
    if form == "st":
        return save(dict(arrays), {"request": json.dumps(fields)}), {"Content-Type": SAFETENSORS, "Accept": SAFETENSORS}
    inputs = [{"name": name, "shape": list(array.shape), "datatype": "FP32"} for name, array in arrays.items()]
    if form == "v2json":
        texts = [f'{json.dumps(entry)[:-1]},"data":[{numbers(arrays[str(entry["name"])])}]}}' for entry in inputs]
        return ('{"inputs":[' + ",".join(texts) + "]}").encode(), {"Content-Type": "application/json"}
    sized = [{**entry, "parameters": {"binary_data_size": arrays[str(entry["name"])].nbytes}} for entry in inputs]
    head = json.dumps({"inputs": sized, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return head + b"".join(array.tobytes() for array in arrays.values()), headers


def numbers(array: NDArray[Any]) -> str:
    return ",".join(np.char.mod("%.9g", array.ravel()))


def nested(array: NDArray[Any]) -> str:
    return f"[{numbers(array)}]" if array.ndim == 1 else f"[{','.join(map(nested, array))}]"


@contextmanager
def serve(command: str, port: int, env: Mapping[str, str] = {}, cwd: Path | None = None) -> Iterator[Server]:
    """The command as a process group on SERVER_CORE. It ends with the block. The caller waits until it is ready."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["taskset", "-c", SERVER_CORE, *command.split()],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield Server(f"http://127.0.0.1:{port}", process, log)
        finally:
            for sent in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, sent)
                    process.wait(8)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue


@contextmanager
def serve_attend(port: int, d_model: int, num_heads: int, command: str = "attend serve") -> Iterator[Server]:
    """`attend serve` with one layer, torch's nn.MultiheadAttention of seed 42; ready when the block begins."""
    flags = f"--port {port} --d-model {d_model} --num-heads {num_heads} --seed 42 --init torch_mha --no-access-log --drain-seconds 0"
    with serve(f"{command} {flags}", port) as server:
        wait_until_ready(server)
        yield server


def wait_until_ready(server: Server) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise server.failure("it did not get ready")


def wrk(url: str, payload: Payload, connections: int, seconds: float, paths: Sequence[str] = ()) -> Figures:
    """Post the bodies in turn from LOAD_CORE, to these paths of the server in turn. Raises SystemExit where wrk prints no result."""
    env = {"PATHS": "\n".join(paths)} if paths else {}
    env |= {"BODIES": "\n".join(map(str, payload.paths)), "HEADERS": "\n".join(f"{k}: {v}" for k, v in payload.headers.items())}
    duration = max(1, round(seconds))
    command = ["taskset", "-c", LOAD_CORE, "wrk", "-t1", f"-c{connections}", f"-d{duration}s", "--timeout", "60s", "-s", str(POST), url]
    printed = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    line = next((line for line in printed.stdout.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        raise SystemExit(f"wrk printed no result: {printed.stdout[-200:]}{printed.stderr[-200:]}")
    rate, p50, p99, bad = line.split()[1:]
    return Figures(float(rate), float(p50), float(p99), int(bad))


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """The rows as a Markdown table, with their keys as titles."""
    titles = list(rows[0])
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    for row in rows:
        print("| " + " | ".join(_cell(row[title]) for title in titles) + " |")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)
