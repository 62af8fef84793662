"""The script of CI names files that exist: a moved file would otherwise be noticed only after a quarter of an hour."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"\b(?:benchmarks|deploy|docs|openapi|service|tests)/[\w./{},-]+")
MADE_BY_A_STEP = {"docs/examples/typescript/attend.js"}


def test_each_file_that_ci_names_exists() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    patterns = {match.group().rstrip(".,") for match in NAMED.finditer(text) if text[match.end() : match.end() + 1] != "$"}
    echo = subprocess.run(["bash", "-c", f"echo {' '.join(sorted(patterns))}"], capture_output=True, text=True, check=True)
    named = set(echo.stdout.split()) - MADE_BY_A_STEP
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
