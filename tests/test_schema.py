"""schemathesis against the OpenAPI document: what a generated caller sends, good or bad, is answered as the document says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from live import Server

EXAMPLES = os.environ.get("SCHEMA_EXAMPLES", "5")  # for each operation and phase
PHASES = os.environ.get("SCHEMA_PHASES", "examples,fuzzing,stateful")  # CI runs coverage as well, which takes a minute and a half

# A schema cannot say that the shapes of tensors must agree, nor that a layer must exist: what it lets through may be refused for that.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 403, 404, 406, 409, 413, 415, 422, 429, 504]

[[operations]]
include-path-regex = "^/v2/"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 403, 404, 406, 409, 413, 415, 429, 503, 504]
"""


def test_generated_requests_are_answered_as_documented(start: Callable[..., Server], tmp_path: Path) -> None:
    """With every check that there is."""
    server = start()
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
        "--suppress-health-check=all",
        "--report-junit-path",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "generated" in done.stdout
    assert not [line for line in server.log if "unforeseen" in json.dumps(line)]
