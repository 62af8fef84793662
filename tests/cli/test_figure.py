"""`attend figure`: the same bytes in this process and from a server; the file's name selects the format; flags override the file."""

import json
import os

import httpx
import pytest
from support.command import run_attend

from service.wire.schemas.figure import Figure

BODY = {"query": [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]], "causal": True, "tokens": {"query": ["a", "b", "c"]}}
LAYER = ("--d-model", "4", "--num-heads", "2", "--seed", "5")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**BODY, "figure": {"kind": "mean", "title": "From the file"}}))
    return str(path)


def test_a_server_and_this_process_give_the_same(start_here, file, tmp_path):
    here, there = tmp_path / "here.png", tmp_path / "there.png"

    done = run_attend("figure", file, "-o", str(here), *LAYER)
    assert run_attend("figure", file, "-o", str(there), "--url", start_here(d_model=4, num_heads=2, seed=5)).returncode == 0

    assert done.returncode == 0
    assert done.stdout.decode() == f"{here}: {here.stat().st_size} bytes\n"
    assert here.read_bytes().startswith(b"\x89PNG")
    assert here.read_bytes() == there.read_bytes()


def test_flags_override_the_file(server, tmp_path):
    out = tmp_path / "heads.svg"
    flags = ("--kind", "heads", "--theme", "dark", "--head", "1", "--head", "0", "--title", "From the flags", "--width", "700")
    body = json.dumps({**BODY, "figure": {"kind": "mean", "title": "From the file", "dpi": 300}, "query": [[0.5] * 64] * 3}).encode()

    done = run_attend("figure", "-", "-o", str(out), *flags, "--url", server.url, stdin=body)

    assert done.returncode == 0, done.stderr
    drawn = out.read_text()
    assert "From the flags" in drawn and "From the file" not in drawn
    assert 'width="700"' in drawn and "#15181d" in drawn
    assert drawn.index("head 1") < drawn.index("head 0")


def test_each_field_of_a_figure_has_a_flag_that_reaches_it(server, tmp_path):
    """A request with all flags gives the same figure as the same fields in the body."""
    out = tmp_path / "head.png"
    flags = {
        "kind": "head",
        "theme": "dark",
        "colours": "cividis",
        "title": "T",
        "item": 1,
        "pool": "max",
        "maximum": 0.5,
        "width": 600,
        "dpi": 96,
    }
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    body = {"query": [[[0.5] * 64] * 3] * 2}
    fields = {**flags, "heads": [2], "values": True, "scale": "log", "format": "png"}
    assert {*fields} == {*Figure.model_fields}

    drawn = run_attend("figure", "-", "-o", str(out), *given, "--head", "2", "--values", "--log", stdin=json.dumps(body).encode())

    assert drawn.returncode == 0, drawn.stderr
    assert out.read_bytes() == httpx.post(f"{server.url}/attend/figure", json={**body, "figure": fields}).content


def test_without_output_the_figure_is_written_beside_the_request(file):
    done = run_attend("figure", file, *LAYER)
    assert done.returncode == 0 and done.stdout.decode().startswith(file.replace(".json", ".svg"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{file}", "-o", "{folder}/heads.gif"], 2, "expected a name that ends in .png, .svg, .html, .htm"),
        (["{file}", "-o", "{folder}/heads.svg", "--url", "{server}", "--kind", "pie"], 1, 'got "pie", at /figure/kind'),
        (["{file}", "-o", "{folder}/no/heads.svg", *LAYER], 1, "cannot write"),
        (["{file}.not", "-o", "{folder}/heads.svg"], 1, "cannot read"),
    ],
)
def test_invalid_arguments_are_refused(server, file, tmp_path, arguments, code, message):
    given = [argument.format(file=file, folder=tmp_path, server=server.url) for argument in arguments]
    done = run_attend("figure", *given, env={**os.environ, "COLUMNS": "200"})

    assert done.returncode == code and done.stdout == b""
    assert message in done.stderr.decode()
    assert not (tmp_path / "heads.svg").exists()


@pytest.mark.parametrize("stdin", [b"", b'{"query": [[1]], "figure": 3}'])
def test_an_invalid_body_is_refused(server, tmp_path, stdin):
    done = run_attend("figure", "-", "-o", str(tmp_path / "heads.svg"), "--url", server.url, stdin=stdin)

    assert done.returncode == 1
    assert done.stderr.startswith(b"attend figure: expected ")
