"""Sessions on the command line: `attend infer --session`, and settings that `attend serve` refuses."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from support.command import run_attend
from support.server import Server


def test_infer_appends_the_rows_of_a_file_to_a_session(server: Server, http: httpx.Client, tmp_path: Path) -> None:
    file, session = tmp_path / "step.json", http.post("/sessions", json={}).json()["id"]
    body: dict[str, Any] = {
        "query": np.random.default_rng(0).standard_normal((3, 64)).round(3).tolist(),
        "causal": True,
        "outputs": ["output"],
    }
    file.write_text(json.dumps(body))

    done = run_attend("infer", str(file), "--session", session, "--json", "--url", server.url)
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert reply["session"] == {"id": session, "length": 3}
    expected = http.post("/attend", json=body).json()["output"]
    np.testing.assert_allclose(reply["output"], expected, rtol=0, atol=1e-6)
    assert b"session of 6 rows; ms:" in run_attend("infer", str(file), "--session", session, "--url", server.url).stdout

    assert b"expected --url with --session" in run_attend("infer", str(file), "--session", "s.x").stderr
    refused = run_attend("infer", str(file), "--session", "s.x", "--url", server.url)
    assert refused.returncode != 0 and refused.stdout == b"" and b"expected the id of a session" in refused.stderr


def test_several_workers_with_sessions_are_refused_at_start() -> None:
    done = run_attend("serve", "--port", "0", "--workers", "2", "--session-memory", "1000000")
    assert done.returncode == 2 and done.stdout == b""
    assert b"sessions (session_memory) need one worker: run replicas, one worker each, behind a gateway or under Ray" in done.stderr
    assert len(done.stderr.splitlines()) == 1
