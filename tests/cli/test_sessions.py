"""`attend sessions` and `attend infer --session` with a real server."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.command import Done, run_attend
from support.server import Server

from service.client import Client

RNG = np.random.default_rng(0)


def ok(*arguments: str) -> str:
    done = run_attend(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def failed(*arguments: str) -> Done:
    done = run_attend(*arguments)
    assert done.returncode != 0 and done.stdout == b""
    return done


@pytest.fixture
def step(tmp_path: Path) -> str:
    file = tmp_path / "step.json"
    body: dict[str, Any] = {"query": RNG.standard_normal((3, 64)).round(3).tolist(), "causal": True, "outputs": ["output"]}
    file.write_text(json.dumps(body))
    return str(file)


def test_the_commands_start_use_export_and_delete_a_session(server: Server, http: httpx.Client, step: str, tmp_path: Path) -> None:
    place, file = ("--url", server.url), str(tmp_path / "cache.safetensors")
    id = ok("sessions", "start", "--capacity", "7", "--idle-seconds", "90", *place).strip()
    described = http.get(f"/sessions/{id}").json()
    assert (described["layer"]["name"], described["capacity"], described["idle_seconds"]) == ("default", 7, 90)

    reply = json.loads(ok("infer", step, "--session", id, "--json", *place))
    assert reply["session"] == {"id": id, "length": 3}
    expected = http.post("/attend", content=Path(step).read_bytes()).json()["output"]
    np.testing.assert_allclose(reply["output"], expected, rtol=0, atol=1e-6)
    assert "session of 6 rows; ms:" in ok("infer", step, "--session", id, *place)

    fork = ok("sessions", "fork", id, "--length", "2", *place).strip()
    assert http.get(f"/sessions/{fork}").json()["length"] == 2
    assert json.loads(ok("sessions", "truncate", id, "4", "--json", *place)) | {"expires_at": ""} == http.get(f"/sessions/{id}").json() | {
        "expires_at": ""
    }

    assert json.loads(ok("sessions", "export", id, "-o", file, "--json", *place)) == {
        "session": id,
        "file": file,
        "bytes": Path(file).stat().st_size,
    }
    assert f"{fork}  layer default, 4 of 7 rows, " in ok("sessions", "import", fork, file, *place)
    with Client(server.url) as client:
        assert client.session(id=fork).export() == Path(file).read_bytes()

    listed = json.loads(ok("sessions", "list", "--json", *place))["sessions"]
    assert {id, fork} <= {found["id"] for found in listed}
    assert ok("sessions", "list", *place).count(fork) == 1
    for one in (id, fork):
        assert ok("sessions", "delete", one, *place) == f"deleted {one}\n"
    assert b"attend sessions truncate: the session has ended: it was deleted" in failed("sessions", "truncate", id, "1", *place).stderr


def test_invalid_uses_of_a_session_are_refused(server: Server, step: str) -> None:
    assert b"expected --url with --session" in failed("infer", step, "--session", "s.x").stderr
    assert b"expected the id of a session" in failed("infer", step, "--session", "s.x", "--url", server.url).stderr
    assert b'got "missing", at /layer' in failed("sessions", "start", "missing", "--url", server.url).stderr
