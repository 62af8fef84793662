"""What the distribution is called. `attend` on PyPI belongs to another project, so nothing here may install that."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OTHER = "attend"
INSTALLS_THE_OTHER = re.compile(
    r"""
      (?:\b(?:pip3?|pipx|uv|poetry)\s(?:install|add|wheel|download|run)|\buvx)\b[^\n&|;`]*[ '"]NAME(?![\w./-])
    | (?<![\w./-])NAME\[[a-z]  # with extras
    | (?<![\w./-])NAME\s?[=<>~!]=\s?\d  # a line of requirements
    """.replace("NAME", OTHER),
    re.VERBOSE,
)
FOLDERS = [".ci", "benchmarks", "deploy", "docs", "openapi", "service", "tests"]


def texts() -> Iterator[tuple[Path, str]]:
    """Each file that people or programs read, with its text; not the recorded cases of frameworks."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "golden" not in path.parts]
    for path in sorted([*ROOT.glob("*"), *found]):
        if path.is_file() and "node_modules" not in path.parts:
            try:
                yield path.relative_to(ROOT), path.read_text()
            except UnicodeDecodeError:  # pictures, tensors, extensions
                continue


def test_no_text_would_install_the_other_project() -> None:
    read = list(texts())
    assert {Path(".ci/run"), Path("README.md"), Path("Dockerfile"), Path("pyproject.toml")} <= {path for path, _ in read}
    assert [f"{path}: {match.group()}" for path, text in read for match in INSTALLS_THE_OTHER.finditer(text)] == []


@pytest.mark.parametrize(
    "line",
    [
        f"pip install {OTHER}",
        f"`pip install {OTHER}`",
        f"pip install -U '{OTHER}[serve]'",
        f"pip install torch {OTHER} && {OTHER} demo",
        f"uv add {OTHER}",
        f'ray = ["{OTHER}[serve]"]',
        f"{OTHER}==0.1.0",
        f"{OTHER} >= 0.1",
    ],
)
def test_such_a_text_would_be_found(line: str) -> None:
    assert INSTALLS_THE_OTHER.search(line)


def test_the_extras_that_texts_name_exist() -> None:
    pattern = re.compile(rf"""(?:{PROJECT["name"]}|['"]\.)\[([a-z,]+)\]""")
    named = {extra for _, text in texts() for extras in pattern.findall(text) for extra in extras.split(",")}
    assert {"serve", "test", "grpc", "otel", "ray"} <= named <= PROJECT["optional-dependencies"].keys()
