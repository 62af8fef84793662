"""`attend heads` as a user runs it: tables that fit 80 columns, JSON, and errors that say what to do."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.command import run_attend

TINY = ("--d-model", "4", "--num-heads", "2")
NARROW = {**os.environ, "COLUMNS": "80"}
BODY: dict[str, Any] = {
    "query": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]],
    "causal": True,
    "tokens": {"query": ["the", "cat", "saw", "the"]},
}


def test_the_tables_of_all_metrics_fit_eighty_columns(tmp_path: Path) -> None:
    """For a batch with tokens; each head has a row."""
    body = BODY | {"query": [BODY["query"]] * 2, "metrics": ["entropy"]}
    (tmp_path / "request.json").write_text(json.dumps(body))

    done = run_attend("heads", str(tmp_path / "request.json"), *TINY, "--metrics", "all", env=NARROW)

    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert max(map(len, text.splitlines())) <= 80
    for part in ("item 0", "item 1", "the(0)→the(0) 1.00", "normalised", "pruning order", "cosine similarity", "subspace disagreement"):
        assert part in text.replace("\N{NO-BREAK SPACE}", " ")


def test_json_is_the_reply_of_the_service(server: Any) -> None:
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
        (("nowhere.json",), 1, "cannot read nowhere.json"),
        (("-", "--metrics", "entropie"), 2, "no metric is called 'entropie' (did you mean entropy?)"),
        (("-", "--metrics", "entropy"), 1, "expected a JSON object"),
    ],
)
def test_an_unusable_file_or_metric_is_refused(arguments: tuple[str, ...], code: int, message: str) -> None:
    """One message on standard error, and nothing on the other."""
    done = run_attend("heads", *arguments, stdin=b"[1]")

    assert done.returncode == code and not done.stdout
    assert message in done.stderr.decode()


@pytest.mark.parametrize(
    ("command", "surplus", "path"), [("heads", "figure", "figure"), ("figure", "metrics", "analysis"), ("infer", "figure", "figure")]
)
def test_fields_of_another_command_are_refused_by_name(command: str, surplus: str, path: str, tmp_path: Path) -> None:
    """The message names the endpoint that has the field."""
    body = json.dumps(BODY | {surplus: {"figure": {"kind": "mean"}, "metrics": ["entropy"]}[surplus]}).encode()

    done = run_attend(command, "-", *TINY, *(["-o", str(tmp_path / "drawn.svg")] if command == "figure" else []), stdin=body)

    assert done.returncode == 1 and not done.stdout
    assert f"expected no field of that name, which belongs to POST /attend/{path}, got a" in done.stderr.decode()
    assert done.stderr.decode().strip().endswith(f"at /{surplus}")


def test_a_batch_item_of_special_tokens_alone_is_counted(tmp_path: Path) -> None:
    """Without special tokens it would have no query, which the service refuses."""
    for rows, left_out in (([["[CLS]", "a"], ["[CLS]", "[SEP]"]], False), ([["[CLS]", "a"], ["[CLS]", "b"]], True)):
        body = json.dumps({"query": [[[0.5, 0, 0, 1]] * 2] * 2, "tokens": {"query": rows}}).encode()
        done = run_attend("heads", "-", *TINY, stdin=body)
        assert done.returncode == 0, done.stderr
        assert ("special tokens are left out" in done.stdout.decode()) == left_out


def test_control_characters_in_words_are_escaped(tmp_path: Path) -> None:
    """They are printed as escape sequences."""
    file = tmp_path / "words.json"
    file.write_text(json.dumps({"query": [[0, 0]], "tokens": {"query": ["a\x1b[31mred"]}}))
    done = run_attend("heads", str(file), "--d-model", "2", "--num-heads", "1", "--metrics", "strongest_links")
    assert done.returncode == 0
    assert b"a\\x1b[31mred" in done.stdout and b"\x1b" not in done.stdout


def test_a_refusal_is_printed_with_its_pointer() -> None:
    """As every command prints it."""
    done = run_attend("heads", "-", *TINY, "--metrics", "induction_score", stdin=json.dumps({**BODY, "tokens": None}).encode())

    assert done.returncode == 1
    assert "since induction_score is among the metrics, got none, at /tokens" in done.stderr.decode()
