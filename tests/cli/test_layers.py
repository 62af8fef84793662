"""`attend layers list`, `add`, `inspect`, `export` and `remove`, on a server and on the folder that stores its layers."""

import json
import os
import re
import shlex
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attend.checkpoints.families import FAMILIES
from attend.cli.clients import in_process
from attend.client import Client
from attend.errors import InvalidRequest
from attend.settings import Settings
from support.command import run_attend, spawn_attend
from support.server import Server

HEADS = '{"num_heads": 2}'
PATHS = {"query": "self.query", "key": "self.key", "value": "self.value", "output": "output.dense"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two layers with BERT's names, which determine neither the layer nor its number of heads."""
    rng = np.random.default_rng(8)
    stem = "encoder.layer.{}.attention.{}"
    tensors = {
        f"{stem.format(i, path)}.{kind}": rng.standard_normal((6,) if kind == "bias" else (6, 6)).astype(np.float32)
        for i in range(2)
        for path in PATHS.values()
        for kind in ("weight", "bias")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_layer_is_added_exported_and_removed(server: Server, http: httpx.Client, checkpoint: Path, tmp_path: Path) -> None:
    """One layer of a checkpoint; the exported file has exactly its numbers."""
    file, place = tmp_path / "one.safetensors", ["--url", server.url]
    added = run_attend("layers", "add", "one", str(checkpoint), "--prefix", "encoder.layer.1", "--spec", HEADS, *place, "--json")
    assert added.returncode == 0, added.stderr
    document = json.loads(added.stdout)
    assert document.pop("assumed")["rope"] is None
    assert http.get("/layers/one").json().items() >= document.items() and document["spec"]["num_heads"] == 2

    listed = run_attend("layers", "list", *place, "--json")
    assert document in json.loads(listed.stdout)["layers"]

    exported = run_attend("layers", "export", "one", "-o", str(file), *place, "--json")
    assert json.loads(exported.stdout) == {"layer": "one", "file": str(file), "bytes": file.stat().st_size}
    weights, given = load_file(file), load_file(checkpoint)
    for ours, theirs in PATHS.items():
        np.testing.assert_array_equal(weights[f"{ours}.weight"], given[f"encoder.layer.1.attention.{theirs}.weight"])

    again = run_attend("layers", "add", "one", str(file), *place)
    assert again.returncode == 0 and document["fingerprint"][:8] in again.stdout.decode()
    assert run_attend("layers", "remove", "one", *place).stdout == b"removed one\n"
    gone = run_attend("layers", "export", "one", "-o", str(file), *place)
    assert gone.returncode == 1 and b'"one"' in gone.stderr


@pytest.mark.parametrize(("command", "setting"), [("infer", "flag"), ("heads", "variable"), ("figure", "file"), ("figure", "variable")])
def test_commands_find_the_layers_of_the_folder(command: str, setting: str, tmp_path: Path) -> None:
    """Like a server with the same settings: the layers of the folder and of the configuration."""
    kept, request, config = tmp_path / "kept", tmp_path / "request.json", tmp_path / "attend.toml"
    save_file(
        {"query.weight": np.eye(4, dtype=np.float32)} | {f"{x}.weight": np.eye(4, dtype=np.float32) for x in ("key", "value", "output")},
        tmp_path / "model.safetensors",
    )
    added = run_attend("layers", "add", "mine", str(tmp_path / "model.safetensors"), "--spec", HEADS, "--layers-dir", str(kept))
    assert added.returncode == 0, added.stderr
    more = json.dumps({"more": {"d_model": 4, "num_heads": 2}})
    config.write_text(f"layers_dir = {json.dumps(str(kept))}\n[layers.more]\nd_model = 4\nnum_heads = 2\n")
    flags = {"flag": ["--layers-dir", str(kept), "--layers", more], "variable": [], "file": ["--config", str(config)]}[setting]
    env = {**os.environ, **({"ATTEND_LAYERS_DIR": str(kept), "ATTEND_LAYERS": more} if setting == "variable" else {})}
    flags += ["-o", str(tmp_path / "drawn.svg")] if command == "figure" else ["--json"]
    for name in ("mine", "more"):
        request.write_text(json.dumps({"layer": name, "query": [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]}))
        done = run_attend(command, str(request), *flags, env=env)
        assert done.returncode == 0, done.stderr
        if command != "figure":
            assert json.loads(done.stdout)["layer"]["name"] == name


def test_layers_are_added_to_a_folder_without_a_server(checkpoint: Path, tmp_path: Path) -> None:
    """`layers` lists the layer that `add` wrote there."""
    place = ["--layers-dir", str(tmp_path / "kept")]
    added = run_attend("layers", "add", "one", str(checkpoint), "--prefix", "encoder.layer.1", "--spec", HEADS, *place, "--json")
    assert added.returncode == 0, added.stderr
    document = json.loads(added.stdout)
    assert document.pop("assumed")["scale"] == document["spec"]["scale"]
    assert document in json.loads(run_attend("layers", "list", *place, "--json").stdout)["layers"]
    assert json.loads(run_attend("layers", "remove", "one", *place, "--json").stdout) == {"removed": "one"}
    assert not (tmp_path / "kept" / "one.safetensors").exists()


def test_the_help_lists_every_part_that_a_model_may_have() -> None:
    done = run_attend("layers", "add", "--help", env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"})
    words = re.findall("[a-z]+", done.stdout.decode().partition("--part")[2].partition("--layout")[0])
    assert {part for family in FAMILIES.values() for part in family} <= {*words}


def test_invalid_arguments_are_refused(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    """The message names the choices, the flag, or the file."""
    several = run_attend("layers", "add", "one", str(checkpoint), "--spec", HEADS, "--url", server.url)
    assert several.returncode == 1 and b"encoder.layer.0.attention, encoder.layer.1.attention" in several.stderr
    for arguments, words in (
        (("add", "one", str(checkpoint)), b"--layers-dir"),
        (("add", "one", str(checkpoint), "--url", "http://x", "--layers-dir", "y"), b"--layers-dir"),
        (("add", "one", str(tmp_path / "none"), "--url", "http://x"), b"does not exist"),
        (("add", "one", str(checkpoint.parent), "--url", "http://x"), b"expected --layer with a model's folder; `attend layers inspect"),
        (
            ("add", "one", str(checkpoint.parent), "--layer", "0", "--prefix", "a", "--url", "http://x"),
            b"expected --layout and --prefix with",
        ),
        (("add", "one", str(checkpoint), "--layer", "0", "--url", "http://x"), b"--prefix selects one of its layers"),
        (("add", "one", str(checkpoint), "--spec", "{", "--url", "http://x"), b"expected JSON in --spec"),
        (("add", "one", str(checkpoint), "--spec", "2", "--url", "http://x"), b"JSON object"),
        (("remove", "one", "--layers-dir", str(checkpoint)), b"cannot use the folder"),
    ):
        done = run_attend("layers", *arguments, env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"})
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_file_that_is_no_checkpoint_is_refused_by_its_kind(tmp_path: Path) -> None:
    """The message says what kind of file it seems to be."""
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04" + b"\0" * 60)
    done = run_attend("layers", "add", "one", str(tmp_path / "model.pt"), "--layers-dir", str(tmp_path / "kept"))
    assert done.returncode == 1 and b"expected safetensors" in done.stderr and b"torch.save" in done.stderr


def test_a_json_file_is_refused_as_json(tmp_path: Path) -> None:
    """For any first bytes of its text."""
    for document in ({"spec": {"d_model": 4, "num_heads": 2}}, {"layer": "x", "query": [[1]]}):
        (tmp_path / "layer.json").write_text(json.dumps(document, separators=(",", ":")))
        done = run_attend("layers", "add", "one", str(tmp_path / "layer.json"), "--layers-dir", str(tmp_path / "kept"))
        assert done.returncode == 1 and b"expected safetensors, got JSON" in done.stderr


def test_a_name_that_no_layer_can_have_is_refused_as_a_name(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    """On a server and in a folder, with a slash too, which no route would match."""
    for name in ("my layer", "bert/0"):
        for place in (["--url", server.url], ["--layers-dir", str(tmp_path / "kept")]):
            done = run_attend("layers", "add", name, str(checkpoint), "--prefix", "encoder.layer.1", "--spec", HEADS, *place)
            assert done.returncode == 1 and not done.stdout
            assert (
                f'expected a layer name of at most 64 letters, digits, dots, underscores and hyphens, a letter or digit first, got "{name}"'
                in (done.stderr.decode())
            )


def test_the_layers_of_a_file_are_inspected(checkpoint: Path, tmp_path: Path) -> None:
    """With the prefixes that `add` takes; of a file of this service, with its spec; a file without layers is refused."""
    lines = run_attend("layers", "inspect", str(checkpoint), "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [{"layout": "bert", "prefix": f"encoder.layer.{i}.attention"} for i in range(2)]
    with in_process(Settings()) as client:
        (tmp_path / "own.safetensors").write_bytes(client.layer_file("default"))
        spec = client.layer("default").spec.model_dump(mode="json")
    own = ("layers", "inspect", str(tmp_path / "own.safetensors"))
    assert json.loads(run_attend(*own, "--json").stdout) == {"spec": spec}
    title, line = (line.split() for line in run_attend(*own).stdout.decode().splitlines() if line.strip(" ─"))
    assert title.pop() == "operators"  # there are none
    assert dict(zip(title, line, strict=True)) == {"d_model": "64", "head_dim": "8", "dtype": "float32", "heads": "8"}
    shown = run_attend("layers", "inspect", str(checkpoint)).stdout.decode().split()
    assert {"layout", "prefix", "bert", "encoder.layer.0.attention", "encoder.layer.1.attention"} <= set(shown)
    save_file({"x": np.ones(3)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("{}")
    for name, message in (
        ("other", "expected tensors with the names of a known layout, got x"),
        ("text", "expected a safetensors file, or a model's folder with its config.json, got "),
    ):
        file = str(tmp_path / f"{name}.safetensors")
        done = run_attend("layers", "inspect", file)
        assert "deserializing" not in done.stderr.decode() and "save_pretrained" not in done.stderr.decode()
        assert done.returncode == 1 and message in done.stderr.decode()
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in run_attend("layers", "inspect", str(tmp_path / "pipe")).stderr.decode()


def test_the_table_does_not_cut_names(tmp_path: Path) -> None:
    """Usual names fit 80 columns."""
    names, narrow = ["minilm-layer-11", "encoder.layer.11.attention.with-a-name-that-is-much-too-long"], {**os.environ, "COLUMNS": "80"}
    for count in (1, 2):
        layers = "".join(f'[layers."{name}"]\nd_model = 4\nnum_heads = 2\ndtype = "bfloat16"\n' for name in names[:count])
        (tmp_path / "attend.toml").write_text(layers)
        shown = run_attend("layers", "list", "--config", str(tmp_path / "attend.toml"), env=narrow).stdout.decode()
        assert all(name in shown for name in names[:count]) and "seed 0" in shown
        assert count == 2 or max(map(len, shown.splitlines())) <= 80


def test_a_layer_file_beside_the_request_is_used(server: Server, tmp_path: Path) -> None:
    """As `attend demo` writes it. A configured layer of that name and --layers-dir take precedence."""
    spec, body = {"d_model": 4, "num_heads": 2, "seed": 5}, {"layer": "mine", "query": [[1, 0, 0, 0]], "outputs": ["output"]}
    (tmp_path / "request.json").write_text(json.dumps(body))
    exported = ["export", "mine", "-o", str(tmp_path / "mine.safetensors"), "--layers-dir", str(tmp_path / "kept")]
    with in_process(Settings(layers_dir=tmp_path / "kept")) as client:
        fingerprint = client.put_layer("mine", spec).fingerprint
    assert run_attend("layers", *exported).returncode == 0
    found = json.loads(run_attend("infer", str(tmp_path / "request.json"), "--json").stdout)
    assert found["layer"] == {"name": "mine", "fingerprint": fingerprint}
    missing = run_attend("infer", str(tmp_path / "request.json"), "--layers-dir", str(tmp_path / "empty"))
    assert missing.returncode == 1 and b"a loaded layer (default)" in missing.stderr
    for command in ("infer", "heads", "figure"):  # a server is not changed, but the command that adds the layer is shown
        away = run_attend(command, str(tmp_path / "request.json"), "--url", server.url)
        [add] = [line.partition(": attend ")[2] for line in away.stderr.decode().splitlines() if "attend layers add" in line]
        assert away.returncode == 1 and shlex.split(add) == [
            *("layers", "add", "mine", str(tmp_path / "mine.safetensors")),
            *("--url", server.url),
        ]
    other = json.loads(
        run_attend("infer", str(tmp_path / "request.json"), "--layers", json.dumps({"mine": {**spec, "seed": 6}}), "--json").stdout
    )
    assert other["layer"]["fingerprint"] != fingerprint


def test_a_damaged_file_can_be_removed(checkpoint: Path, tmp_path: Path) -> None:
    """It has no layer that could be loaded, but its name is free again."""
    (tmp_path / "torn.safetensors").write_bytes(checkpoint.read_bytes()[:100])
    done = run_attend("layers", "remove", "torn", "--layers-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "torn.safetensors").exists()


def test_a_server_that_cannot_use_its_folder_exits(checkpoint: Path) -> None:
    """Before it listens, for example if the path is a file."""
    done = spawn_attend("serve", "--port", "0", "--layers-dir", str(checkpoint))
    assert done.returncode == 2 and b"attend serve: cannot use" in done.stderr


def test_the_client_adds_and_exports_layers_too(server: Server, checkpoint: Path) -> None:
    """By path or as bytes; weights come back as arrays in the layer's dtype."""
    with Client(server.url) as client:
        spec = {"num_heads": 2, "dtype": "bfloat16"}
        made = client.put_layer_file("client", checkpoint, layout="bert", prefix="encoder.layer.0", spec=spec)
        weights = client.layer_weights("client")
        assert {array.dtype.name for array in weights.values()} == {"bfloat16"} and weights["query.weight"].shape == (6, 6)
        assert client.put_layer_file("client", client.layer_file("client")).fingerprint == made.fingerprint
        with pytest.raises(InvalidRequest) as refused:
            client.put_layer_file("client", checkpoint, spec=spec)
        assert "as the query parameter prefix" in refused.value.problems[0].expected
        client.delete_layer("client")
