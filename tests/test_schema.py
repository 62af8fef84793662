"""schemathesis: replies to generated requests are as the OpenAPI document says, and requests that it calls valid are accepted."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from support.server import Server

EXAMPLES = os.environ.get("SCHEMA_EXAMPLES", "2")  # for each operation and phase
PHASES = os.environ.get("SCHEMA_PHASES", "examples,fuzzing")  # .ci/run has more examples, and the phases coverage and stateful as well
HERE = Path(__file__).parent

# positive_data_acceptance: statuses allowed for valid data. `support/schema_check.py` accepts 400, 404, 413 and 422 only for known reasons.
# 409: the configured layer cannot be replaced on a server that stores layers. 410, 412: a session has ended, or has another length.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 404, 409, 410, 412, 413, 422]

[checks.negative_data_rejection]
expected-statuses = ["4xx"]
"""


def test_replies_to_generated_requests_are_as_documented(start: Callable[..., Server], tmp_path: Path) -> None:
    """With every check of schemathesis, and `support/schema_check.py`."""
    server = start("--layers-dir", str(tmp_path / "layers"), "--session-memory", "100000000")  # keeps the layer `default`
    httpx.put(f"{server.url}/layers/tiny", json={"spec": {"d_model": 4, "num_heads": 2, "seed": 7}}).raise_for_status()
    config, report = tmp_path / "schemathesis.toml", tmp_path / "report"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", f"--config-file={config}", "run", f"{server.url}/openapi.json", "--checks=all"]
    command += [
        "--phases",
        PHASES,
        "--max-examples",
        EXAMPLES,
        "--seed",
        "7",
        "--no-color",
        "--request-timeout=120",
        "--suppress-health-check=all",
        "--report-junit-path",
        str(report),
    ]
    ours = {"SCHEMATHESIS_HOOKS": "support.schema_check", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **ours})
    assert done.returncode == 0, done.stdout
    assert "generated" in done.stdout
    assert not [line for line in server.log if "internal_error" in json.dumps(line)]
