"""Requests per second of attend and of other inference servers, for the same bytes, in one run.

`bare` is torch's module with no server, `echo` a FastAPI route that sends the body back, `canned` an ASGI one that computes nothing.
A reply of any other is compared with torch's output before anything is measured. With --with, every named peer is installed into a virtual
environment of its own under --cache.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from load import (
    FORMS,
    KINDS,
    SERVER_CORE,
    SIZES,
    START_SECONDS,
    Arrays,
    Payload,
    Server,
    Size,
    payloads,
    print_table,
    serve,
    serve_attend,
    visible_keys,
    wrk,
)
from numpy.typing import NDArray
from safetensors.numpy import load as load_safetensors

CONTENDERS = Path(__file__).with_name("contenders")
INFER = "/v2/models/default/infer"
PATHS = {"json": "/attend", "st": "/attend", "v2json": INFER, "v2bin": INFER}  # of attend, by form
UVICORN = "{bin}/python -m uvicorn %s:app --port {port} --log-level critical --no-access-log"
FASTAPI = ("fastapi", "uvicorn[standard]")
TOLERANCE = 1e-5  # of a reply's output from torch's


@dataclass(frozen=True)
class Peer:
    """Another server: its packages from PyPI, its command, and its path for each form that it reads."""

    packages: tuple[str, ...]
    command: str
    paths: Mapping[str, str]
    folder: Path = CONTENDERS


PEERS = {
    "canned": Peer(FASTAPI, UVICORN % "canned", {"json": "/attend", "st": "/attend"}),
    "echo": Peer(FASTAPI, UVICORN % "echo", {"json": "/attend", "st": "/attend"}),
    "naive": Peer(FASTAPI, UVICORN % "naive", {"json": "/attend"}),
    "litserve": Peer(("litserve",), "{bin}/python litserve_api.py", {"json": "/predict"}),
    "mlserver": Peer(("mlserver",), "{bin}/mlserver start .", {"v2json": INFER}, CONTENDERS / "mlserver"),
    "kserve": Peer(("kserve",), "{bin}/python kserve_model.py", {"v2json": INFER, "v2bin": INFER}),
    "bentoml": Peer(("bentoml",), "{bin}/python -m bentoml serve bento:Attend --host 127.0.0.1 --port {port}", {"json": "/attend"}),
    "ray": Peer(("ray[serve]",), "{bin}/python ray_serve.py", {"json": "/attend"}),
    "pytriton": Peer(("nvidia-pytriton",), "{bin}/python pytriton_model.py", {"v2json": INFER, "v2bin": INFER}),
}


def environment(name: str, packages: tuple[str, ...], cache: Path) -> Path:
    """The folder of executables of a peer's virtual environment, with this interpreter's version of torch."""
    folder = cache / name
    executables = folder / "bin"
    if not (folder / "complete").exists():
        print(f"installing {name}", file=sys.stderr)
        torch = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.__version__.split('+')[0])"], capture_output=True, text=True
        )
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(executables / "pip"), "install", "--quiet", f"torch=={torch.stdout.strip()}", "numpy", *packages]
        subprocess.run(install, check=True)
        (folder / "complete").touch()
    return executables


def measure_bare(size: Size, kind: str, seconds: float, executables: Path, cache: Path, arrays: Arrays) -> tuple[Any, Any]:
    """torch's output [batch, queries, d_model] for the first body, and the figures of its module without a server."""
    inputs, outputs = cache / f"{size.name}-inputs.npz", cache / f"{size.name}-output.npy"
    np.savez(inputs, **arrays, visible=visible_keys(kind, size.shape[1]))
    command = ["taskset", "-c", SERVER_CORE, str(executables / "python"), "bare.py", str(inputs), str(outputs), str(seconds)]
    env = {**os.environ, **layer_environment(size), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, cwd=CONTENDERS, env=env, capture_output=True, text=True, check=True).stdout
    rate, p50, p99 = map(float, printed.split())
    return np.load(outputs), {"connections": 1, "rate": rate, "p50_ms": p50, "p99_ms": p99, "bad": 0}


def layer_environment(size: Size) -> dict[str, str]:
    return {"D_MODEL": str(size.shape[-1]), "NUM_HEADS": str(size.num_heads)}


def first_reply(server: Server, url: str, payload: Payload) -> tuple[Mapping[str, str], bytes]:
    """Headers and body of the first good reply. Raises SystemExit where there is none in START_SECONDS."""
    until, problem = time.monotonic() + START_SECONDS, "no reply"
    while time.monotonic() < until and server.process.poll() is None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, payload.first, dict(payload.headers)), timeout=60) as reply:
                return dict(reply.headers), reply.read()
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.read()[:200]!r}"
        except OSError as error:
            problem = str(error)
        time.sleep(0.5)
    raise server.failure(problem)


def output_of(form: str, headers: Mapping[str, str], body: bytes) -> NDArray[np.float32]:
    """The flat tensor `output` of a reply."""
    if form == "st":
        return load_safetensors(body)["output"].ravel()
    length = next((int(value) for name, value in headers.items() if name.lower() == "inference-header-content-length"), None)
    document = json.loads(body[:length])
    if "outputs" not in document:
        return np.array(document["output"], np.float32).ravel()
    offset = length or 0
    for tensor in document["outputs"]:
        size = tensor.get("parameters", {}).get("binary_data_size", 0)
        if tensor["name"] == "output":
            return np.frombuffer(body[offset : offset + size], "<f4") if size else np.array(tensor["data"], np.float32)
        offset += size
    raise SystemExit("the reply has no tensor `output`")


def rows_of(
    name: str, form: str, size: Size, server: Server, url: str, payload: Payload, seconds: float, want: Any
) -> Iterator[dict[str, Any]]:
    headers, body = first_reply(server, url, payload)
    if name not in ("canned", "echo"):
        error = float(np.abs(output_of(form, headers, body) - want.ravel()).max())
        if error > TOLERANCE:
            raise SystemExit(f"{name}: the output is {error:.1e} away from torch's")
    for connections in size.connections:
        figures = wrk(url, payload, connections, seconds)
        yield {"connections": connections, **asdict(figures)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="peers", default="bare", help=f"comma-separated: bare,{','.join(PEERS)}; or all")
    parser.add_argument("--sizes", default="small,mid", help=f"comma-separated: {','.join(SIZES)}")
    parser.add_argument("--forms", default=",".join(FORMS), help="st: safetensors; v2json, v2bin: the Open Inference Protocol")
    parser.add_argument("--kinds", default="plain", help=f"comma-separated: {','.join(KINDS)}; of requests")
    parser.add_argument("--seconds", type=float, default=4, help="a row of small; other sizes take three times as long")
    parser.add_argument("--turns", type=int, default=1, help="repetitions of the whole comparison; rates are their medians")
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--attend", action="append", help="NAME=COMMAND that starts attend (attend='attend serve'); may be repeated")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "attend-benchmarks")
    parser.add_argument("--json", type=Path, help="write all rows of all turns here as well")
    args = parser.parse_args()
    args.attend = dict(command.split("=", 1) for command in args.attend or ["attend=attend serve"])
    args.cache.mkdir(parents=True, exist_ok=True)
    names = ["bare", *PEERS] if args.peers == "all" else [name for name in args.peers.split(",") if name]
    forms, measured = args.forms.split(","), []
    for _ in range(args.turns):
        for size in [SIZES[name] for name in args.sizes.split(",")]:
            for kind in args.kinds.split(","):
                for row in compare(size, kind, names, forms, args):
                    measured.append({"size": size.name, "request": kind, **row})
                    print(json.dumps(measured[-1]), file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1))
    print_table(medians(measured))


def compare(size: Size, kind: str, names: list[str], forms: list[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of requests of one size and kind, of every attend and every peer; of kinds that peers do not read, of attend and torch alone."""
    seconds = args.seconds * (1 if size.name == "small" else 3)
    if kind != "plain":
        names, forms = [name for name in names if name == "bare"], [form for form in forms if form in ("json", "st")]
    wire, arrays = payloads(size, args.cache, kind, forms)
    bare = environment("naive", FASTAPI, args.cache)
    want, figures = measure_bare(size, kind, seconds if "bare" in names else 0.1, bare, args.cache, arrays)
    if "bare" in names:
        yield {"server": "bare", "form": "", **figures}
    for form in forms:
        for name, command in args.attend.items():
            with serve_attend(args.port, size.shape[-1], size.num_heads, command) as server:
                url = server.url + PATHS[form]
                for row in rows_of(name, form, size, server, url, wire[form], seconds, want):
                    yield {"server": name, "form": form, **row}
    for name in names:
        if name == "bare":
            continue
        peer, executables = PEERS[name], environment(name, PEERS[name].packages, args.cache)
        for form in [form for form in forms if form in peer.paths]:
            env = {**layer_environment(size), "PORT": str(args.port), "FORM": form, "PATH": f"{executables}:{os.environ['PATH']}"}
            env |= {f"MLSERVER_{kind}_PORT": str(args.port + i) for i, kind in enumerate(("HTTP", "GRPC", "METRICS"))}
            with serve(peer.command.format(bin=executables, port=args.port), args.port, env, peer.folder) as server:
                url = server.url + peer.paths[form]
                for row in rows_of(name, form, size, server, url, wire[form], seconds, want):
                    yield {"server": name, "form": form, **row}


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each server, size, form and number of connections."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["size"], row["request"], row["server"], row["form"], row["connections"]), []).append(row)
    figures = ("rate", "p50_ms", "p99_ms")
    return [{**group[0], **{name: float(np.median([row[name] for row in group])) for name in figures}} for group in groups.values()]


if __name__ == "__main__":
    main()
