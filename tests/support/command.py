"""The command `attend` as a user runs it: a process of its own."""

import subprocess
import sys
from pathlib import Path


def run_attend(
    *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Runs it to its end. Standard error never holds a traceback or a warning."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-m", "service", *arguments],
        input=stdin,
        capture_output=True,
        env=env,
        cwd=cwd,
        timeout=300,
    )
    assert b"Traceback" not in done.stderr and b"Warning" not in done.stderr, done.stderr.decode()
    return done
