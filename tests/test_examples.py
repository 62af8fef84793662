"""docs/examples.md: every block runs unchanged against a server, in each language that is installed; all print the same numbers."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "examples.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
TOOLS = {"sh": "bash", "python": sys.executable, "js": "node", "go": "go"}
ENDINGS = {"sh": "sh", "python": "py", "js": "mjs", "go": "go"}
HERE = [(language, code) for language, code in BLOCKS if shutil.which(TOOLS[language])]


def run(language, code, folder):
    path = folder / f"example.{ENDINGS[language]}"
    path.write_text(code)
    command = [TOOLS[language], *(["run"] if language == "go" else []), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("language", "code"), HERE, ids=[f"{language}{i}" for i, (language, _) in enumerate(HERE)])
def test_an_example_runs_and_prints_the_expected_numbers(server, tmp_path, language, code):
    done = run(language, code.replace("http://127.0.0.1:8000", server.url), tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, third = (float(number) for number in re.findall(r"[\d.]+", done.stdout)[2:5])
    assert json.loads("[" + ", ".join(re.findall(r"\d+", done.stdout)[:2]) + "]") == [3, 64]
    assert abs(first + second - 1) < 1e-3 and third == 0


def test_every_language_is_shown():
    assert [language for language, _ in BLOCKS] == ["sh", "python", "js", "go"]


def test_the_shell_and_python_examples_were_run():
    assert {"sh", "python"} <= {language for language, _ in HERE}
