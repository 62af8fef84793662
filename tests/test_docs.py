"""README and docs: the examples run unchanged, and the tables agree with the code."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from matplotlib.image import imread

from attend.settings import Settings
from attend.spec import Init
from attend.web.routes.attend import ATTEND_EXAMPLE
from attend.web.routes.layers import PUT_LAYER_EXAMPLE
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.figure import Figure
from support.command import run_attend
from support.server import Server

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
TESTED_ELSEWHERE = {"examples.md", "heads.md", "check.md"}  # test_examples.py, test_docs_heads.py and cli/test_check_layers.py test these


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def page(name: str) -> str:
    return (DOCS / name).read_text()


def test_the_curl_example_gives_the_reply_shown(server: Server) -> None:
    """Both commands, run by curl itself, and the JSON block that follows them, number for number."""
    commands = next(block for block in blocks("sh") if "curl" in block).replace("localhost:8000", server.url)
    replies = []
    for command in re.split(r"\n(?=curl)", commands):
        done = subprocess.run(["curl", "-sS", *shlex.split(command)[1:]], capture_output=True, text=True, check=True)
        replies.append(json.loads(done.stdout))

    assert replies[0]["name"] == "tiny"
    assert replies[1] == json.loads(blocks("json")[0])


def test_the_openapi_document_and_the_readme_have_the_same_examples() -> None:
    commands = next(block for block in blocks("sh") if "curl" in block)
    bodies = [json.loads(shlex.split(command)[-1]) for command in re.split(r"\n(?=curl)", commands)]

    assert bodies == [PUT_LAYER_EXAMPLE, ATTEND_EXAMPLE]


def test_the_v2_example_gives_the_weights_of_the_first_example(server: Server) -> None:
    """The curl block under /v2 requests one head of it."""
    commands = next(block for block in blocks("sh", page("protocol.md")) if "/v2/" in block).replace("localhost:8000", server.url)
    shown = json.loads(blocks("json")[0])
    for command in re.split(r"\n(?=curl)", commands):
        done = subprocess.run(["curl", "-sS", *shlex.split(command)[1:]], capture_output=True, text=True, check=True)

    [output] = json.loads(done.stdout)["outputs"]
    assert output["shape"] == [1, 1, 3, 3]
    assert output["data"] == [number for row in shown["attention_weights"][1] for number in row]


def python_examples() -> list[tuple[str, str]]:
    """Each block of Python, with the page that it is on."""
    pages = [ROOT / "README.md", *sorted(path for path in DOCS.glob("*.md") if path.name not in TESTED_ELSEWHERE)]
    return [(path.name, block) for path in pages for block in blocks("python", path.read_text())]


@pytest.mark.parametrize("block", [block for _, block in python_examples()], ids=[name for name, _ in python_examples()])
def test_a_python_example_runs(start_here: Callable[..., str], block: str) -> None:
    """In a new interpreter, as pasted, with a new server, since it may leave layers there."""
    url = start_here(session_memory=1 << 26)
    code = block.replace("http://127.0.0.1:8000", url).replace("127.0.0.1:8000", url.removeprefix("http://"))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(") and "False" not in done.stdout


def test_the_index_lists_every_page() -> None:
    """docs/README.md links to each page, and the README stays short."""
    assert sorted(re.findall(r"\]\((\w+\.md)\)", page("README.md"))) == sorted({path.name for path in DOCS.glob("*.md")} - {"README.md"})
    assert len(README.splitlines()) < 200


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_every_link_leads_to_a_file(path: Path) -> None:
    """Links between documents, and to pictures."""
    targets = [*re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()), *re.findall(r'src="([^"]+)"', path.read_text())]
    missing = [target for target in targets if not target.startswith("http") and not (path.parent / target).exists()]
    assert missing == []
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text()):
        titles = re.findall(r"^#+ (.*)", (path.parent / target if target else path).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


BELOW = "add|export|remove|list|inspect|describe"  # second words of commands
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
LINES = sorted({line for page in PAGES for line in re.findall(r"(?:^|`|&& )(attend \w[^`\n#]*)", page.read_text(), re.MULTILINE)})


@pytest.mark.parametrize("command", sorted({re.match(rf"attend \w+(?: (?:{BELOW})\b)?", line)[0] for line in LINES}))
def test_every_command_of_the_documentation_exists(command: str) -> None:
    """With every flag that the documentation shows after it, in a block or in the text."""
    names = command.split()[1:]
    done = run_attend(*names, "--help", env={**os.environ, "COLUMNS": "300", "NO_COLOR": "1"})

    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode()
    for line in LINES:
        if re.match(rf"{command}\b(?! (?:{BELOW})\b)", line):
            for flag in re.findall(r" (--?[a-z][\w-]*)", line):
                assert re.search(rf" {flag}\b", shown), f"{line}: {flag}"


def test_every_row_on_reliability_names_tests_that_exist() -> None:
    commands = re.findall(r"`pytest (tests/[^`]*?)(?: -k (\w+|\"[^\"`]*\"))?`", page("operations.md"))
    assert len(commands) > 12
    for files, words in commands:
        texts = [(ROOT / file).read_text() for file in files.split()]
        for word in words.strip('"').split(" or "):
            assert any(re.search(rf"def test_\w*{word}", text) for text in texts), (files, word)


def test_the_commands_that_use_a_request_file_work_as_pasted(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, in an empty folder."""
    commands = [line for block in blocks("sh", page("heads.md")) for line in block.splitlines() if "request.json" in line]
    assert [shlex.split(command)[1] for command in commands] == ["demo", "heads", "figure"]
    monkeypatch.setattr("attend.cli.demo.child_server", lambda: nullcontext(server.url))
    for command in commands:
        done = run_attend(*shlex.split(command, comments=True)[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    assert (tmp_path / "similarity.svg").read_bytes().startswith(b"<?xml")


def test_the_commands_of_a_session_work_as_pasted(server: Server, tmp_path: Path) -> None:
    """In one shell, each command succeeding."""
    (block,) = blocks("bash", page("sessions.md"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = "set -eo pipefail\n" + block.replace("curl -s", "curl -sS --fail-with-body").replace(
        "localhost:8000", server.url.removeprefix("http://")
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert '"length":1,' in done.stdout.splitlines()[-1]
    assert (tmp_path / "cache.safetensors").stat().st_size > 2 * 2 * 64 * 4


def test_the_steps_of_the_default_layer_are_those_shown(server: Server) -> None:
    shown = blocks("text", page("layers.md"))[0]
    done = run_attend("layers", "describe", "default", "--url", server.url)
    assert done.stdout.decode() == shown, done.stderr


@pytest.mark.parametrize("name", ["settings.md", "check.md"])
def test_pages_have_the_tables_of_their_fields(name: str) -> None:
    """Generated; `python docs/tables.py` writes the tables again."""
    head, rows = runpy.run_path(str(ROOT / "docs" / "tables.py"))["tables"]()[name]
    assert head + rows in page(name)


def test_a_server_starts_with_the_settings_file_of_the_page(tmp_path: Path, start: Callable[..., Server]) -> None:
    """The TOML block of docs/settings.md, its layer included."""
    block = blocks("toml", page("settings.md"))[0]
    (tmp_path / "attend.toml").write_text(block)
    assert set(tomllib.loads(block)) <= set(Settings.model_fields)

    running = start("--config", str(tmp_path / "attend.toml"))

    ready = next(event for event in running.events if event["event"] == "ready")
    assert ready["layers"] == ["default", "encoder"]


def test_every_field_of_a_request_is_documented() -> None:
    assert [name for name in AttendRequest.model_fields if f"`{name}`" not in page("requests.md")] == []


def test_every_init_is_described() -> None:
    """The table of inits lists exactly the values that a spec accepts, in the same order."""
    described = re.findall(
        r"`(\w+)`", "\n".join(line.split("|")[1] for line in page("layers.md").splitlines() if re.match(r"\| `\w+_\w+`.* \|", line))
    )
    inits = list(get_args(Init))

    assert [name for name in described if name in inits] == inits


def test_the_readme_has_no_placeholder() -> None:
    assert not re.search(r"^[A-Z]{6,}$|FINGERPRINT", README, re.MULTILINE)


def test_the_table_of_figure_fields_is_complete() -> None:
    """It lists every field of `figure`, and every value of the fields that have a list of values."""
    table = page("heads.md").partition("| field of `figure` |")[2].partition("\n\n")[0]
    fields = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")}

    assert fields == set(Figure.model_fields)
    for name in ("kind", "format", "pool", "scale", "colours", "theme"):
        for value in re.findall(r"'(\w+)'", str(Figure.model_fields[name].annotation)):
            assert f"`{value}`" in table, value


@pytest.mark.checkpoint
def test_the_script_draws_the_committed_pictures(tmp_path: Path) -> None:
    """Pixel for pixel; 2 % may differ, since versions of the font renderer draw letters differently."""
    runpy.run_path(str(ROOT / "docs" / "draw_pictures.py"))["draw_pictures"](tmp_path)

    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["heads.png", "similarity.png"]  # not page.png, whose text depends on the browser and its fonts
    for name in drawn:
        ours, committed = imread(tmp_path / name), imread(ROOT / "docs" / name)
        assert ours.shape == committed.shape
        assert (np.abs(ours - committed) > 0.02).any(-1).mean() < 0.02
