"""`attend layers list`, `add`, `export` and `remove`: the same on a server and on the folder that keeps its layers."""

import json
import os
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.command import run_attend, spawn_attend
from support.server import Server

from service.cli.clients import in_process
from service.client import Client
from service.errors import InvalidRequest
from service.settings import Settings

HEADS = '{"num_heads": 2}'
PATHS = {"query": "self.query", "key": "self.key", "value": "self.value", "output": "output.dense"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two layers in BERT's names, which tell neither which one is meant nor how many heads it has."""
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


def test_in_out_and_away(server: Server, http: httpx.Client, checkpoint: Path, tmp_path: Path) -> None:
    """One layer of a checkpoint goes in, comes out as a file that holds its very numbers, and goes."""
    file, place = tmp_path / "one.safetensors", ["--url", server.url]
    added = run_attend("layers", "add", "one", str(checkpoint), "--prefix", "encoder.layer.1", "--spec", HEADS, *place, "--json")
    assert added.returncode == 0, added.stderr
    document = json.loads(added.stdout)
    assert document.pop("assumed")["rope"] is None
    assert document == http.get("/layers/one").json() and document["spec"]["num_heads"] == 2

    listed = run_attend("layers", "list", *place, "--json")
    assert listed.stdout == run_attend("layers", *place, "--json").stdout and document in json.loads(listed.stdout)["layers"]

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
def test_commands_find_the_layers_that_are_kept(command: str, setting: str, tmp_path: Path) -> None:
    """As a server with the same settings would: those of the folder, and those of the configuration."""
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


def test_the_folder_needs_no_server(checkpoint: Path, tmp_path: Path) -> None:
    """What `add` puts there is what `layers` finds there."""
    place = ["--layers-dir", str(tmp_path / "kept")]
    added = run_attend("layers", "add", "one", str(checkpoint), "--prefix", "encoder.layer.1", "--spec", HEADS, *place, "--json")
    assert added.returncode == 0, added.stderr
    document = json.loads(added.stdout)
    assert document.pop("assumed")["scale"] == document["spec"]["scale"]
    assert document in json.loads(run_attend("layers", *place, "--json").stdout)["layers"]
    assert json.loads(run_attend("layers", "remove", "one", *place, "--json").stdout) == {"removed": "one"}
    assert not (tmp_path / "kept" / "one.safetensors").exists()


def test_what_cannot_be_is_said(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    """The message names what there is to choose from, the flag, or the file."""
    several = run_attend("layers", "add", "one", str(checkpoint), "--spec", HEADS, "--url", server.url)
    assert several.returncode == 1 and b"encoder.layer.0.attention, encoder.layer.1.attention" in several.stderr
    for arguments, words in (
        (("add", "one", str(checkpoint)), b"--layers-dir"),
        (("add", "one", str(checkpoint), "--url", "http://x", "--layers-dir", "y"), b"--layers-dir"),
        (("add", "one", str(tmp_path / "none"), "--url", "http://x"), b"does not exist"),
        (("add", "one", str(checkpoint), "--spec", "{", "--url", "http://x"), b"expected JSON in --spec"),
        (("add", "one", str(checkpoint), "--spec", "2", "--url", "http://x"), b"JSON object"),
        (("remove", "one", "--layers-dir", str(checkpoint)), b"cannot use the folder"),
    ):
        done = run_attend("layers", *arguments, env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"})
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_flags_before_the_command_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Which were passed over: `add` knows nothing of what `layers` was told. What the environment says is meant for no command alone."""
    kept, wide = ["--layers-dir", str(tmp_path / "kept")], {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    add = ["add", "one", str(checkpoint), "--prefix", "encoder.layer.1", "--spec", HEADS]
    for flags, named in (
        (["--seed", "3"], "got --seed before it"),
        (kept, "got --layers-dir before it"),
        (["--json", "--url", "http://x", "--bias"], "got --url, --json, --bias before it"),
    ):
        done = run_attend("layers", *flags, *add, *kept, env=wide)
        assert done.returncode == 2 and not done.stdout and named in done.stderr.decode(), done.stderr
        assert not (tmp_path / "kept").exists()
    done = run_attend("layers", *add, *kept, env={**wide, "ATTEND_CA": str(checkpoint), "ATTEND_SEED": "3"})
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    """Is told what it is taken for."""
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04" + b"\0" * 60)
    done = run_attend("layers", "add", "one", str(tmp_path / "model.pt"), "--layers-dir", str(tmp_path / "kept"))
    assert done.returncode == 1 and b"expected safetensors" in done.stderr and b"torch.save" in done.stderr


def test_json_is_said_to_be_json(tmp_path: Path) -> None:
    """Whatever bytes its text begins with."""
    for document in ({"spec": {"d_model": 4, "num_heads": 2}}, {"layer": "x", "query": [[1]]}):
        (tmp_path / "layer.json").write_text(json.dumps(document, separators=(",", ":")))
        done = run_attend("layers", "add", "one", str(tmp_path / "layer.json"), "--layers-dir", str(tmp_path / "kept"))
        assert done.returncode == 1 and b"expected safetensors, got JSON" in done.stderr


def test_names_stay_whole_in_the_table(tmp_path: Path) -> None:
    """Usual ones in 80 columns."""
    names, narrow = ["minilm-layer-11", "encoder.layer.11.attention.with-a-name-that-is-much-too-long"], {**os.environ, "COLUMNS": "80"}
    for count in (1, 2):
        layers = "".join(f'[layers."{name}"]\nd_model = 4\nnum_heads = 2\ndtype = "bfloat16"\n' for name in names[:count])
        (tmp_path / "attend.toml").write_text(layers)
        shown = run_attend("layers", "--config", str(tmp_path / "attend.toml"), env=narrow).stdout.decode()
        assert all(name in shown for name in names[:count]) and "seed 0" in shown
        assert count == 2 or max(map(len, shown.splitlines())) <= 80


def test_a_layer_beside_the_request_is_found(tmp_path: Path) -> None:
    """As `attend demo` leaves it; a configured layer of that name, and --layers-dir, go before it."""
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
    other = json.loads(
        run_attend("infer", str(tmp_path / "request.json"), "--layers", json.dumps({"mine": {**spec, "seed": 6}}), "--json").stdout
    )
    assert other["layer"]["fingerprint"] != fingerprint


def test_a_damaged_file_can_be_removed(checkpoint: Path, tmp_path: Path) -> None:
    """It holds no layer, and stands in the way of nothing but a clean log."""
    (tmp_path / "torn.safetensors").write_bytes(checkpoint.read_bytes()[:100])
    done = run_attend("layers", "remove", "torn", "--layers-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "torn.safetensors").exists()


def test_a_server_without_its_folder_says_so(checkpoint: Path) -> None:
    """Before it listens; where a file stands in the way, for one."""
    done = spawn_attend("serve", "--port", "0", "--layers-dir", str(checkpoint))
    assert done.returncode == 2 and b"attend serve: cannot use" in done.stderr


def test_the_client_has_the_same(server: Server, checkpoint: Path) -> None:
    """By path or as bytes; weights come back as arrays in the layer's dtype."""
    with Client(server.url) as client:
        spec = {"num_heads": 2, "dtype": "bfloat16"}
        made = client.put_layer_file("client", checkpoint, layout="bert", prefix="encoder.layer.0", spec=spec)
        weights = client.layer_weights("client")
        assert {array.dtype.name for array in weights.values()} == {"bfloat16"} and weights["query.weight"].shape == (6, 6)
        assert client.put_layer_file("client", client.layer_file("client")).fingerprint == made.fingerprint
        with pytest.raises(InvalidRequest) as refused:
            client.put_layer_file("client", checkpoint, spec=spec)
        assert refused.value.problems[0].at == "/prefix"
        client.delete_layer("client")
