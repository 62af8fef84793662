"""`attend infer`, `attend heads` and `attend figure`: the same reply in this process and from a server, what is printed, and refusals."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from attend.wire.schemas.figure import Figure
from support.command import run_attend

LAYER = ("--d-model", "4", "--num-heads", "2", "--seed", "5")
NARROW = {**os.environ, "COLUMNS": "80"}
INFER_REQUEST = {"query": [[1, 0, 0, 0], [0, 1, 0, 0]], "causal": True, "outputs": ["output", "attention_weights", "scores"]}
HEADS_REQUEST: dict[str, Any] = {
    "query": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]],
    "causal": True,
    "tokens": {"query": ["the", "cat", "saw", "the"]},
}
FIGURE_REQUEST = {"query": [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]], "causal": True, "tokens": {"query": ["a", "b", "c"]}}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps(INFER_REQUEST))
    return str(path)


@pytest.fixture(scope="module")
def here() -> bytes:
    """What is printed for the body on standard input, in process."""
    done = run_attend("infer", "-", "--json", *LAYER, stdin=json.dumps(INFER_REQUEST).encode())
    assert done.returncode == 0
    return done.stdout


def test_infer_gives_the_same_on_a_server_and_in_this_process(start_here, file, here):
    there = run_attend("infer", file, "--json", "--url", start_here(d_model=4, num_heads=2, seed=5))
    assert there.returncode == 0 and json.loads(here) == json.loads(there.stdout)
    assert list(json.loads(here)) == ["layer", "fully_masked_rows", *INFER_REQUEST["outputs"]]


def test_flags_and_environment_variables_configure_the_same(file, here):
    env = {**os.environ, "ATTEND_D_MODEL": "4", "ATTEND_NUM_HEADS": "2", "ATTEND_SEED": "5"}
    assert run_attend("infer", file, "--json", env=env).stdout == here


def test_settings_about_callers_do_not_apply_in_this_process(file, here):
    """Keys, addresses, hosts and deadlines apply to requests over a network."""
    env = {"ATTEND_KEYS_FILE": "/nowhere", "ATTEND_HOST": "0.0.0.0", "ATTEND_ALLOWED_HOSTS": "a.example", "ATTEND_WORKERS": "2"}
    env |= {"ATTEND_REQUEST_TIMEOUT": "0.000001", "ATTEND_COMPRESS_REPLIES": "true", "ATTEND_MAX_BODY_BYTES": "1024"}
    done = run_attend("infer", file, "--json", *LAYER, env={**os.environ, **env})
    assert done.returncode == 0 and done.stdout == here, done.stderr


def test_shapes_and_numbers_are_printed(file, here):
    done = run_attend("infer", file, *LAYER)
    shown, reply = done.stdout.decode(), json.loads(here)
    assert done.returncode == 0
    assert shown.startswith(f"layer default, fingerprint {reply['layer']['fingerprint'][:12]}; ms: decode ")
    assert "\noutput [2, 4]\n" in shown and "\nattention_weights [2, 2, 2]\n" in shown and "-inf" in shown
    output = shown.partition("output [2, 4]\n")[2].partition("attention_weights")[0].replace("[", "").replace("]", "")
    np.testing.assert_allclose(np.array(output.split(), float), np.ravel(reply["output"]), atol=5e-5)


def test_the_largest_weights_and_fully_masked_rows_are_printed(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"query": INFER_REQUEST["query"], "block_keys": [1, 1], "select": {"top_k": 1}}))
    shown = run_attend("infer", str(path), *LAYER).stdout.decode()
    assert "attention_weights.keys [2, 2, 1]" in shown and "attention_weights.values [2, 2, 1]" in shown
    assert ", 4 fully masked rows;" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{file}"], 1, 'expected 64 values per query for layer "default", got 4, at /query'),
        (["{file}.not", *LAYER], 2, "cannot read"),
        (["{file}", "--url", "http://127.0.0.1:1"], 1, "Start a server with `attend serve`"),
        (["{file}", "--url", "{server}"], 1, "got 4, at /query"),
        (["{file}", "--url", "{server}", "--seed", "1"], 2, "--seed cannot be combined with --url"),
        (["{file}", "--d-model", "6"], 2, "expected a divisor of d_model 6, or a head_dim, got 8"),
        (["{file}", "--config", "{file}"], 2, "is not TOML"),
        (["{file}", "--threads", "9999"], 2, "9999 threads"),
        (["{file}", "--d-model", "many"], 2, "'--d-model'"),
        ([], 2, "FILE"),
    ],
)
def test_infer_refuses_invalid_arguments_with_what_to_do(server, file, arguments, code, message):
    done = run_attend(
        "infer", *(argument.format(file=file, server=server.url) for argument in arguments), env={**os.environ, "COLUMNS": "200"}
    )
    assert done.returncode == code and done.stdout == b""
    assert message in done.stderr.decode()


@pytest.mark.parametrize("stdin", [b"", b"[1", b"[]", b'{"query": [[NaN]]}'])
def test_infer_refuses_an_invalid_body(server, stdin):
    done = run_attend("infer", "-", "--url", server.url, stdin=stdin)
    assert done.returncode == 1 and done.stdout == b""
    assert done.stderr.startswith(b"attend infer: expected ")


def test_an_unknown_setting_is_refused(file):
    done = run_attend("infer", file, env={**os.environ, "ATTEND_SPEED": "9"})
    assert done.returncode == 2 and b"ATTEND_SPEED is not a setting" in done.stderr


def test_the_tables_of_all_metrics_fit_eighty_columns(tmp_path: Path) -> None:
    """For a batch with tokens; each head has a row."""
    body = HEADS_REQUEST | {"query": [HEADS_REQUEST["query"]] * 2, "metrics": ["entropy"]}
    (tmp_path / "request.json").write_text(json.dumps(body))

    done = run_attend("heads", str(tmp_path / "request.json"), *LAYER, "--metrics", "all", env=NARROW)

    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert max(map(len, text.splitlines())) <= 80
    for part in ("item 0", "item 1", "cat(1)→cat(1) 0.", "normalised", "pruning order", "cosine similarity", "subspace disagreement"):
        assert part in text.replace("\N{NO-BREAK SPACE}", " ")


def test_the_json_of_heads_is_the_reply_of_the_service(server: Any) -> None:
    """From a server and in this process, which have the same default layer."""
    body = json.dumps({"query": [[0.5] * 64] * 3, "reply": {"decimals": 4}}).encode()
    here, there = (run_attend("heads", "-", "--json", *flags, stdin=body) for flags in ((), ("--url", server.url)))

    reply = json.loads(here.stdout)
    assert reply == json.loads(there.stdout)
    assert list(reply) == ["layer", "fully_masked_rows", "metrics"]
    assert reply["metrics"]["entropy"] == [1.0986] * 8


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere.json",), 2, "cannot read nowhere.json"),
        (("-", "--metrics", "entropie"), 2, "no metric is called 'entropie' (did you mean entropy?)"),
        (("-", "--metrics", "entropy"), 1, "expected a JSON object"),
    ],
)
def test_heads_refuses_an_unusable_file_or_metric(arguments: tuple[str, ...], code: int, message: str) -> None:
    """One message on standard error, and nothing on the other."""
    done = run_attend("heads", *arguments, stdin=b"[1]")

    assert done.returncode == code and not done.stdout
    assert message in done.stderr.decode()


@pytest.mark.parametrize(
    ("command", "surplus", "path"), [("heads", "figure", "figure"), ("figure", "metrics", "analysis"), ("infer", "figure", "figure")]
)
def test_fields_of_another_command_are_refused_by_name(command: str, surplus: str, path: str, tmp_path: Path) -> None:
    """The message names the endpoint that has the field."""
    body = json.dumps(HEADS_REQUEST | {surplus: {"figure": {"kind": "mean"}, "metrics": ["entropy"]}[surplus]}).encode()

    done = run_attend(command, "-", *LAYER, *(["-o", str(tmp_path / "drawn.svg")] if command == "figure" else []), stdin=body)

    assert done.returncode == 1 and not done.stdout
    assert f"expected no field of that name, which belongs to POST /attend/{path}, got a" in done.stderr.decode()
    assert done.stderr.decode().strip().endswith(f"at /{surplus}")


def test_a_batch_item_of_special_tokens_alone_is_counted(tmp_path: Path) -> None:
    """Without special tokens it would have no query, which the service refuses."""
    for rows, left_out in (([["[CLS]", "a"], ["[CLS]", "[SEP]"]], False), ([["[CLS]", "a"], ["[CLS]", "b"]], True)):
        body = json.dumps({"query": [[[0.5, 0, 0, 1]] * 2] * 2, "tokens": {"query": rows}}).encode()
        done = run_attend("heads", "-", *LAYER, stdin=body)
        assert done.returncode == 0, done.stderr
        assert ("special tokens are left out" in done.stdout.decode()) == left_out


def test_control_characters_in_words_are_escaped(tmp_path: Path) -> None:
    """They are printed as escape sequences."""
    file = tmp_path / "words.json"
    file.write_text(json.dumps({"query": [[0, 0]] * 2, "tokens": {"query": ["a\x1b[31mred", "b"]}}))
    done = run_attend("heads", str(file), "--d-model", "2", "--num-heads", "1", "--metrics", "strongest_links")
    assert done.returncode == 0
    assert b"a\\x1b[31mred" in done.stdout and b"\x1b" not in done.stdout


def test_a_refusal_is_printed_with_its_pointer() -> None:
    """As every command prints it."""
    done = run_attend("heads", "-", *LAYER, "--metrics", "induction_score", stdin=json.dumps({**HEADS_REQUEST, "tokens": None}).encode())

    assert done.returncode == 1
    assert "since induction_score is among the metrics, got none, at /tokens" in done.stderr.decode()


@pytest.fixture
def figure_file(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**FIGURE_REQUEST, "figure": {"kind": "mean", "title": "From the file"}}))
    return str(path)


def test_figure_gives_the_same_on_a_server_and_in_this_process(start_here, figure_file, tmp_path):
    here, there = tmp_path / "here.png", tmp_path / "there.png"

    done = run_attend("figure", figure_file, "-o", str(here), *LAYER)
    assert run_attend("figure", figure_file, "-o", str(there), "--url", start_here(d_model=4, num_heads=2, seed=5)).returncode == 0

    assert done.returncode == 0
    assert done.stdout.decode() == f"{here}: {here.stat().st_size} bytes\n"
    assert here.read_bytes().startswith(b"\x89PNG")
    assert here.read_bytes() == there.read_bytes()


def test_flags_of_figure_override_the_file(server, tmp_path):
    out = tmp_path / "heads.svg"
    flags = ("--kind", "heads", "--theme", "dark", "--head", "1", "--head", "0", "--title", "From the flags", "--width", "700")
    body = json.dumps(
        {**FIGURE_REQUEST, "figure": {"kind": "mean", "title": "From the file", "dpi": 300}, "query": [[0.5] * 64] * 3}
    ).encode()

    done = run_attend("figure", "-", "-o", str(out), *flags, "--url", server.url, stdin=body)

    assert done.returncode == 0, done.stderr
    drawn = out.read_text()
    assert "From the flags" in drawn and "From the file" not in drawn
    assert 'width="700"' in drawn and "#15181d" in drawn
    assert drawn.index("head 1") < drawn.index("head 0")


def test_each_field_of_a_figure_has_a_flag_that_reaches_it(server, tmp_path):
    """A request with all flags gives the same figure as the same fields in the body. A scale for each head has no maximum beside it."""
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
    assert {*fields, "scale_per_head"} == {*Figure.model_fields}

    drawn = run_attend("figure", "-", "-o", str(out), *given, "--head", "2", "--values", "--log", stdin=json.dumps(body).encode())

    assert drawn.returncode == 0, drawn.stderr
    assert out.read_bytes() == httpx.post(f"{server.url}/attend/figure", json={**body, "figure": fields}, timeout=60).content
    drawn = run_attend("figure", "-", "-o", str(out), "--dpi", "96", "--scale-per-head", stdin=json.dumps(body).encode())
    fields = {"dpi": 96, "scale_per_head": True, "format": "png"}
    assert out.read_bytes() == httpx.post(f"{server.url}/attend/figure", json={**body, "figure": fields}, timeout=60).content, drawn.stderr


def test_without_output_the_figure_is_written_beside_the_request(figure_file):
    done = run_attend("figure", figure_file, *LAYER)
    assert done.returncode == 0 and done.stdout.decode().startswith(figure_file.replace(".json", ".svg"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{file}", "-o", "{folder}/heads.gif"], 2, "expected a name that ends in .png, .svg, .html, .htm"),
        (["{file}", "-o", "{folder}/heads.svg", "--url", "{server}", "--kind", "pie"], 1, 'got "pie", at /figure/kind'),
        (["{file}", "-o", "{folder}/no/heads.svg", *LAYER], 1, "cannot write"),
        (["{file}.not", "-o", "{folder}/heads.svg"], 2, "cannot read"),
    ],
)
def test_figure_refuses_invalid_arguments(server, figure_file, tmp_path, arguments, code, message):
    given = [argument.format(file=figure_file, folder=tmp_path, server=server.url) for argument in arguments]
    done = run_attend("figure", *given, env={**os.environ, "COLUMNS": "200"})

    assert done.returncode == code and done.stdout == b""
    assert message in done.stderr.decode()
    assert not (tmp_path / "heads.svg").exists()


@pytest.mark.parametrize("stdin", [b"", b'{"query": [[1]], "figure": 3}'])
def test_figure_refuses_an_invalid_body(server, tmp_path, stdin):
    done = run_attend("figure", "-", "-o", str(tmp_path / "heads.svg"), "--url", server.url, stdin=stdin)

    assert done.returncode == 1
    assert done.stderr.startswith(b"attend figure: expected ")
