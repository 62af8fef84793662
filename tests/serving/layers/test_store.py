"""Layers stored in a folder: restarts, crashes while writing, full disks, and several processes that share the folder."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from attend.errors import OutOfMemory
from attend.serving.layers import loader
from attend.serving.layers.registry import LayerRegistry, LoadedLayer
from attend.serving.layers.store import Claim, Coordinator, LayerStore
from attend.settings import Settings
from support.app import serve_here
from support.processes import several_workers
from support.server import Server
from support.waiting import PATIENCE

Start = Callable[..., Server]
TINY = {"spec": {"d_model": 4, "num_heads": 2, "seed": 1}}
STORED = Path(__file__).parents[2] / "golden" / "stored"  # made by golden/generate_stored_layers.py
ROUNDING = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}  # of an answer, relative to its largest number
OTHER = {"spec": {"d_model": 4, "num_heads": 2, "seed": 2}}


def serve_layers(folder: Path | None, **settings: Any) -> AbstractContextManager[str]:
    """The URL of a server in this process that stores its layers in the folder, for tests that do not kill servers."""
    return serve_here(Settings(layers_dir=folder, access_log=False, **settings))


def ask(server: Server | str, method: str, path: str, **knobs: Any) -> httpx.Response:
    """Send one request on a new connection, which any worker may accept."""
    with httpx.Client(base_url=server if isinstance(server, str) else server.url, timeout=60, headers={"Connection": "close"}) as client:
        return client.request(method, path, **knobs)


def put(server: Server | str, name: str, document: dict[str, Any], status: int) -> Any:
    answer = ask(server, "PUT", f"/layers/{name}", json=document)
    assert answer.status_code == status, answer.text
    return answer.json()


def stored(server: Server | str, name: str) -> Any:
    """The document of a layer, as PUT replies with it: without its steps."""
    document = ask(server, "GET", f"/layers/{name}").json()
    assert document.pop("steps")
    return document


def names(server: Server | str) -> list[str]:
    return [layer["name"] for layer in ask(server, "GET", "/layers").json()["layers"]]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith((".changes", ".peer-")))


def test_the_origin_of_weights_is_kept(tmp_path: Path) -> None:
    """From file to file, through a restart, and while the layer is unloaded, with a folder and without; it is cut to 200 characters."""
    tensors = {f"{name}.weight": np.eye(4, dtype=np.float32) for name in ("query", "key", "value", "output")}
    spec = json.dumps({"d_model": 4, "num_heads": 2, "bias": False})
    for origin, folder in (("layer 3 of a small model", tmp_path / "layers"), ("x" * 300, None)):
        save_file(tensors, tmp_path / "layer.safetensors", metadata={"spec": spec, "origin": origin})
        body, media = (tmp_path / "layer.safetensors").read_bytes(), {"Content-Type": "application/vnd.safetensors"}
        with serve_layers(folder) as first:
            made = ask(first, "PUT", "/layers/mine", content=body, headers=media).json()
            assert made["origin"] == origin[:200] and "origin" not in put(first, "drawn", TINY, 201)
            exported = ask(first, "GET", "/layers/mine/weights").content
            assert ask(first, "PUT", "/layers/copy", content=exported, headers=media).json()["origin"] == origin[:200]
            ask(first, "POST", "/v2/repository/models/mine/unload")
            assert stored(first, "mine") == {**made, "state": "unloaded"}
            ask(first, "POST", "/v2/repository/models/mine/load")
            assert stored(first, "mine") == made
        if folder is not None:
            with serve_layers(folder) as second:
                assert stored(second, "mine") == made


def test_a_stored_layer_is_loaded_after_a_restart_and_a_removed_one_is_not(start: Start, tmp_path: Path) -> None:
    """Same document, seed and fingerprint. Every user can read the file, and another server accepts it."""
    folder = tmp_path / "new" / "layers"
    with serve_layers(folder) as first:
        kept, gone = put(first, "kept", TINY, 201), put(first, "gone", OTHER, 201)
        put(first, "kept", OTHER, 200)
        kept = put(first, "kept", {"spec": {**TINY["spec"], "dtype": "bfloat16"}}, 200)
        assert ask(first, "DELETE", "/layers/gone").status_code == 204
        assert ask(first, "DELETE", "/layers/gone").status_code == 404

    assert files(folder) == ["kept.safetensors"]
    second = start("--layers-dir", str(folder))
    assert names(second) == ["default", "kept"]
    assert stored(second, "kept") == kept != gone


def contains(now: Any, then: Any) -> bool:
    """Whether a document has all the values that it had; objects may have new fields too."""
    if isinstance(now, dict) and isinstance(then, dict):
        return now.keys() >= then.keys() and all(contains(now[name], value) for name, value in then.items())
    return bool(now == then)


def test_layers_stored_by_the_first_release_give_the_same_fingerprints_and_outputs(tmp_path: Path) -> None:
    """Layers of every kind, seeded and uploaded. Outputs are equal within the precision of their datatype."""
    shutil.copytree(STORED / "layers", tmp_path, dirs_exist_ok=True)
    then = json.loads((STORED / "answers.json").read_text())
    assert {f"{one['layer']['name']}.safetensors" for one in then} == {path.name for path in (STORED / "layers").iterdir()}
    with serve_layers(tmp_path) as server:
        for one in then:
            layer = one["layer"]
            now = ask(server, "GET", f"/layers/{layer['name']}").json()
            assert now["fingerprint"] == layer["fingerprint"]
            assert contains(now["spec"], layer["spec"]), now["spec"]
            reply = ask(server, "POST", "/attend", json=one["request"]).json()
            assert reply["layer"] == {"name": layer["name"], "fingerprint": layer["fingerprint"]}
            for name, expected in one["reply"].items():
                atol = ROUNDING[layer["spec"]["dtype"]] * np.abs(expected).max()
                np.testing.assert_allclose(reply[name], expected, rtol=0, atol=atol, err_msg=layer["name"])


def test_an_unloaded_layer_stays_unloaded_after_a_restart_and_can_be_loaded(tmp_path: Path) -> None:
    """Its file is renamed, which another server on the same folder sees too. DELETE removes the file."""
    with serve_layers(tmp_path) as first, serve_layers(tmp_path) as second:
        made = put(first, "mine", TINY, 201)
        for name in ("replaced", "removed"):
            put(first, name, TINY, 201)
        for name in ("mine", "replaced", "removed"):
            assert ask(first, "POST", f"/v2/repository/models/{name}/unload").status_code == 200
        assert files(tmp_path) == ["mine.unloaded", "removed.unloaded", "replaced.unloaded"]
        assert stored(second, "mine") == {**made, "state": "unloaded"}
        assert put(second, "replaced", OTHER, 200) == stored(first, "replaced")
        assert ask(second, "DELETE", "/layers/removed").status_code == 204
        assert [ask(server, "GET", "/layers/removed").status_code for server in (first, second)] == [404, 404]

    assert files(tmp_path) == ["mine.unloaded", "replaced.safetensors"]
    with serve_layers(tmp_path) as third:
        assert stored(third, "mine") == {**made, "state": "unloaded"}
        assert ask(third, "POST", "/attend", json={"layer": "mine", "query": [[1, 2, 3, 4]]}).status_code == 409
        assert ask(third, "POST", "/v2/repository/models/mine/load").status_code == 200
        assert stored(third, "mine") == made
        assert ask(third, "POST", "/attend", json={"layer": "mine", "query": [[1, 2, 3, 4]]}).status_code == 200
        assert files(tmp_path) == ["mine.safetensors", "replaced.safetensors"]


def test_a_loaded_layers_file_takes_precedence_over_an_unloaded_ones(start: Start, tmp_path: Path) -> None:
    """A process that dies between writing the one and removing the other leaves both. Files that are not layers do not prevent loading."""
    with serve_layers(tmp_path) as first:
        made = put(first, "mine", TINY, 201)
    (tmp_path / "mine.unloaded").write_bytes(b"an old one")
    (tmp_path / "odd.unloaded").write_bytes(b"none")

    second = start("--layers-dir", str(tmp_path))

    assert stored(second, "mine") == made
    assert [event["layer"] for event in second.events if event["event"] == "layer file refused"] == ["odd"]
    for name in ("mine", "odd"):
        assert ask(second, "DELETE", f"/layers/{name}").status_code == 204
    assert files(tmp_path) == []


def test_a_configured_layer_cannot_be_changed_and_its_stored_file_is_ignored(start: Start, tmp_path: Path) -> None:
    """A change would be undone by the next restart."""
    with serve_layers(tmp_path) as first:
        put(first, "mine", TINY, 201)
        assert ask(first, "PUT", "/layers/default", json=TINY).status_code == 409
    second = start("--layers-dir", str(tmp_path), env={"ATTEND_LAYERS": json.dumps({"mine": OTHER["spec"]})})
    assert stored(second, "mine")["spec"]["seed"] == 2
    assert ask(second, "DELETE", "/layers/mine").status_code == 409
    assert files(tmp_path) == ["mine.safetensors"]
    assert any(event["event"] == "layer file ignored" and event["layer"] == "mine" for event in second.events)


def test_files_that_are_not_valid_layers_are_logged_and_skipped(start: Start, tmp_path: Path) -> None:
    """Truncated, foreign, changed, linked and misnamed files, and folders: one log line for each; the other layers are loaded."""
    with serve_layers(tmp_path) as first:
        put(first, "good", TINY, 201)
    good = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(good[: len(good) // 2])
    (tmp_path / "flipped.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (tmp_path / "text.safetensors").write_text("not at all")
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "foreign.safetensors")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "out").write_bytes(good)
    (tmp_path / "linked.safetensors").symlink_to(tmp_path / "elsewhere" / "out")
    (tmp_path / "bad name.safetensors").write_bytes(good)
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / ".good.0123.part").write_bytes(good[:9])  # the partial file of a writer that died
    (tmp_path / ".peer-0123").touch()

    second = start("--layers-dir", str(tmp_path))
    assert names(second) == ["default", "good"]
    refused = {event["layer"] for event in second.events if event["event"] == "layer file refused"}
    assert refused == {"torn", "flipped", "text", "foreign"}
    ignored = sorted((event["file"], event["reason"]) for event in second.events if event["event"] == "layer file ignored")
    link, misnamed, other = (
        "it is a link, which is not followed",
        "its name is not the name of a layer followed by .safetensors or .unloaded",
        "it is not a file",
    )
    assert ignored == [
        ('"bad name.safetensors"', misnamed),
        ('"elsewhere"', misnamed),
        ('"linked.safetensors"', link),
        ('"pipe.safetensors"', other),
    ]
    assert not (tmp_path / ".good.0123.part").exists()
    put(second, "next", OTHER, 201)  # the reply does not wait for the dead process
    assert not (tmp_path / ".peer-0123").exists()


def fail_reads(monkeypatch: pytest.MonkeyPatch, folder: Path, times: int, error: Exception) -> list[str]:
    """Let the first reads of files in the folder fail; returns the list of all names that are read."""
    real, read = LayerStore.read, []

    def failing(self: LayerStore, name: str, suffix: str) -> Any:
        if self.path == folder:
            read.append(name)
            if len(read) <= times:
                raise error
        return real(self, name, suffix)

    monkeypatch.setattr(LayerStore, "read", failing)
    monkeypatch.setattr(loader, "RETRY_INTERVAL", 0.01)
    return read


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError(), OutOfMemory("no memory for now")])
def test_a_change_is_acknowledged_once_a_process_that_could_not_load_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The second server would otherwise answer for ever that the layer does not exist."""
    with serve_layers(tmp_path) as first, serve_layers(tmp_path) as second:
        read = fail_reads(monkeypatch, tmp_path, 3, error)
        made = put(first, "mine", TINY, 201)
        assert read == ["mine"] * 4
        assert stored(second, "mine") == made


def test_a_process_is_not_ready_before_it_has_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_layers(tmp_path) as first:
        put(first, "mine", TINY, 201)
    read = fail_reads(monkeypatch, tmp_path, 2, OSError(errno.EIO, "Input/output error"))
    with serve_layers(tmp_path) as second:
        assert names(second) == ["default", "mine"]
    assert read == ["mine"] * 3


def test_a_file_that_cannot_be_read_for_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not keep other changes from being acknowledged; a new file of that name is read again."""
    with serve_layers(tmp_path) as first:
        put(first, "mine", TINY, 201)
        monkeypatch.setattr(loader, "CHANGE_TIMEOUT", 0.0)
        read = fail_reads(monkeypatch, tmp_path, 1, OSError(errno.EIO, "Input/output error"))
        with serve_layers(tmp_path) as second:
            monkeypatch.setattr(loader, "CHANGE_TIMEOUT", 30.0)
            assert names(second) == ["default"]
            put(first, "next", OTHER, 201)
            assert names(second) == ["default", "next"] and read == ["mine", "next"]
            put(first, "mine", OTHER, 200)
            assert names(second) == ["default", "mine", "next"]


def test_layer_names_that_look_like_paths_write_nothing(tmp_path: Path) -> None:
    """They are refused before they become paths. Nothing is written in the folder or beside it."""
    folder = tmp_path / "layers"
    with serve_layers(folder) as server:
        for name, status in (("..%2Fout", 404), ("%2Fetc%2Fx", 404), ("%2e%2e", 422), (".hidden", 422), ("a%00b", 422), ("x" * 65, 422)):
            assert ask(server, "PUT", f"/layers/{name}", json=TINY).status_code == status, name
            assert ask(server, "DELETE", f"/layers/{name}").status_code == 404, name
        assert files(folder) == [] and files(tmp_path) == ["layers"]


WRITER = """
import os, signal, stat, sys
from pathlib import Path
import torch
from attend.serving.layers import store
from attend.serving.layers.registry import LayerRegistry
from attend.limits import ServingLimits
from attend.spec import LayerSpec

kept = store.LayerStore(Path(sys.argv[1]), 1 << 20)
registry = LayerRegistry(torch.device("cpu"), ServingLimits())
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
for name in ("write", "rename", "flush"):
    for seed, victim in ((1, "nobody"), (2, name)):
        layer = registry.make(name, LayerSpec(d_model=4, num_heads=2, seed=seed))
        writer = os.fork()
        if writer == 0:
            kept.open()
            if victim == "write":
                whole = os.write
                os.write = lambda file, piece: (whole(file, bytes(piece)[: len(piece) // 2]), die())
            elif victim == "rename":
                Path.rename = die
            elif victim == "flush":
                flush = os.fsync
                os.fsync = lambda file: die() if stat.S_ISDIR(os.fstat(file).st_mode) else flush(file)
            kept.write(layer)
            os._exit(0)
        print(name, victim, os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]), any(sorted(Path(sys.argv[1]).glob(".*.part"))))
"""


def test_a_file_removed_during_a_scan_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LayerStore(tmp_path, 1 << 20)
    for name in ("gone", "here"):
        (tmp_path / f"{name}.safetensors").touch()
    real = os.scandir

    @contextmanager
    def listed(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        with real(path) as entries:
            found = list(entries)
        (tmp_path / "gone.safetensors").unlink()
        yield found

    monkeypatch.setattr(os, "scandir", listed)
    _, layers = folder.scan()
    assert list(layers) == ["here"]


def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new_layer(start: Start, tmp_path: Path) -> None:
    """SIGKILL in the middle of writing, before the rename, and after it."""
    done = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], capture_output=True, text=True, check=True)
    killed = -signal.SIGKILL
    assert [line.split() for line in done.stdout.splitlines()] == [  # name, step of the kill, exit code, whether a partial file is left
        ["write", "nobody", "0", "False"],
        ["write", "write", f"{killed}", "True"],
        ["rename", "nobody", "0", "False"],
        ["rename", "rename", f"{killed}", "True"],
        ["flush", "nobody", "0", "False"],
        ["flush", "flush", f"{killed}", "False"],
    ]

    server = start("--layers-dir", str(tmp_path))
    present = {layer["name"]: layer["spec"]["seed"] for layer in ask(server, "GET", "/layers").json()["layers"]}
    assert present == {"default": 0, "write": 1, "rename": 1, "flush": 2}
    assert not [event for event in server.events if event["event"] == "layer file refused"]
    assert files(tmp_path) == ["flush.safetensors", "rename.safetensors", "write.safetensors"]


def test_on_a_full_disk_put_is_507_and_the_old_layer_remains(start: Start, tmp_path: Path) -> None:
    """The old layer is served and stored, no part of the new one is left, and a later layer that fits is stored."""
    server = start("--layers-dir", str(tmp_path))
    old = put(server, "mine", TINY, 201)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
    refused = put(server, "mine", {"spec": {"d_model": 128, "num_heads": 2}}, 507)
    assert "room" in refused["detail"] and str(tmp_path) not in json.dumps(refused)
    assert stored(server, "mine") == old
    assert files(tmp_path) == ["mine.safetensors"]
    put(server, "mine", OTHER, 200)


@pytest.mark.parametrize("left", [0, 1], ids=["no room at all", "room for one byte"])
def test_a_disk_too_full_to_announce_the_change_changes_nothing(start: Start, tmp_path: Path, left: int) -> None:
    """The file of the layer would fit, but the record of the change does not: 507 says that the layers are as they were. A layer can still
    be removed."""
    server = start("--layers-dir", str(tmp_path))
    old = put(server, "mine", TINY, 201)
    with (tmp_path / ".changes").open("ab") as changes:
        changes.write(b"." * (16384 - left - changes.tell()))
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
    for name in ("mine", "new"):
        assert "as they were" in put(server, name, OTHER, 507)["detail"]
    assert files(tmp_path) == ["mine.safetensors"]
    put(server, "more", {"spec": {"d_model": 128, "num_heads": 2}}, 507)  # by now it would have read the folder again
    assert stored(server, "mine") == old and names(server) == ["default", "mine"]
    removed = ask(server, "DELETE", "/layers/mine")
    assert removed.status_code == 507 and "as they were" not in removed.json()["detail"] and "has changed" in removed.json()["detail"]
    assert files(tmp_path) == []


def test_a_process_starts_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot record which changes it has applied: others wait for it until the disk has room."""
    store, other = LayerStore(tmp_path, 1 << 20), LayerStore(tmp_path, 1 << 20)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", full)
        store.open()
        store.coordinator.acknowledge(1)
    other.open()
    assert other.coordinator.behind(1) == 1
    store.coordinator.acknowledge(1)
    assert other.coordinator.behind(1) == 0
    store.close()
    other.close()


@several_workers
def test_all_workers_have_a_change_when_its_reply_arrives(two_workers: Server) -> None:
    """Two workers on one port, checked many times, and with two changes of the same name at once."""
    server = two_workers
    for document, status in ((TINY, 201), (OTHER, 200), (TINY, 200)):
        made = put(server, "mine", document, status)
        assert all(stored(server, "mine") == made for _ in range(12))
    writers = [threading.Thread(target=put, args=(server, "mine", document, 200)) for document in (TINY, OTHER) * 3]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    put(server, "last", TINY, 201)  # changes are applied in order, so all earlier ones have been applied too
    assert len({stored(server, "mine")["fingerprint"] for _ in range(12)}) == 1
    for name in ("mine", "last"):
        assert ask(server, "DELETE", f"/layers/{name}").status_code == 204
    assert {ask(server, "GET", "/layers/mine").status_code for _ in range(12)} == {404}


@several_workers
def test_the_limit_on_parameters_holds_over_concurrent_puts_of_several_workers(start: Start, tmp_path: Path) -> None:
    """Twelve callers, two workers, room for four layers: four are accepted, the others refused, and all workers have the same layers, also
    after a restart. A layer that becomes smaller makes room for another, whatever their order in the folder."""
    small = ("--workers", "2", "--layers-dir", str(tmp_path), "--max-total-parameters", "20000", "--d-model", "8", "--num-heads", "2")
    large = {"spec": {"d_model": 32, "num_heads": 2}}  # 4,224 parameters, beside 288
    server = start(*small)

    def one(name: str) -> httpx.Response:
        return ask(server, "PUT", f"/layers/{name}", json=large)

    with ThreadPoolExecutor(12) as callers:
        answers = list(callers.map(one, (f"layer{i}" for i in range(12))))
    assert sorted(answer.status_code for answer in answers) == [201] * 4 + [413] * 8
    assert all("max_total_parameters" in answer.json()["detail"] for answer in answers if answer.status_code == 413)
    present = {"default", *(answer.json()["name"] for answer in answers if answer.status_code == 201)}
    assert all(set(names(server)) == present for _ in range(16))

    kept = max(present - {"default"})
    put(server, kept, TINY, 200)
    put(server, "a", large, 201)  # which comes before it when a folder is read
    assert all(set(names(server)) == present | {"a"} for _ in range(16))
    assert server.stop() == 0
    assert set(names(start(*small))) == present | {"a"}


def test_a_put_that_cannot_lock_the_folder_is_504_at_its_deadline(tmp_path: Path) -> None:
    """Another process holds the lock. Nothing is changed, and the same request succeeds afterwards."""
    with serve_layers(tmp_path) as server:
        put(server, "mine", TINY, 201)
        claim = Claim(tmp_path)
        assert claim.acquire() and not Claim(tmp_path).acquire()
        late = ask(server, "PUT", "/layers/mine", json=OTHER, headers={"X-Request-Timeout": "0.3"})
        assert late.status_code == 504 and "nothing has changed" in late.json()["detail"]
        assert stored(server, "mine")["spec"]["seed"] == 1
        claim.release()
        put(server, "mine", OTHER, 200)


@pytest.mark.parametrize("kept", [True, False], ids=["in a folder", "in memory"])
def test_a_layer_whose_file_would_exceed_the_limit_is_refused(tmp_path: Path, kept: bool) -> None:
    """413 names the setting, and the old layer remains. Any accepted layer can be exported and put back."""
    with serve_layers(tmp_path if kept else None, max_layer_bytes=20480) as server:
        old = put(server, "mine", TINY, 201)
        for name in ("mine", "new"):
            refused = put(server, name, {"spec": {"d_model": 64, "num_heads": 8}}, 413)
            assert "max_layer_bytes" in refused["detail"]
        assert stored(server, "mine") == old and names(server) == ["default", "mine"]
        assert files(tmp_path) == (["mine.safetensors"] if kept else [])
        put(server, "large", {"spec": {"d_model": 34, "num_heads": 2}}, 201)
        file = ask(server, "GET", "/layers/large/weights").content
        assert 19000 < len(file) <= 20480
        again = ask(server, "PUT", "/layers/large", content=file, headers={"Content-Type": "application/vnd.safetensors"})
        assert again.status_code == 200, again.text


def test_a_layer_whose_file_would_be_too_large_is_refused_before_its_weights_are_drawn(start: Start) -> None:
    """268 million parameters are within the limit on parameters, but their file of 1 GiB and a header exceeds --max-layer-bytes."""
    server = start()
    refused = put(server, "large", {"spec": {"d_model": 8192, "num_heads": 8, "bias": False}}, 413)
    assert "max_layer_bytes" in refused["detail"]
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    assert peak < 1 << 30


def test_servers_that_share_a_folder_apply_each_others_changes(start: Start, tmp_path: Path) -> None:
    """When one has replied, the other has the layer too. A stopped server delays the reply until the caller's deadline; a dead one does
    not."""
    first, second = start("--layers-dir", str(tmp_path)), start("--layers-dir", str(tmp_path))
    for document, status in ((TINY, 201), (OTHER, 200)):
        made = put(first, "mine", document, status)
        assert stored(second, "mine") == made
    assert ask(second, "DELETE", "/layers/mine").status_code == 204
    assert ask(first, "GET", "/layers/mine").status_code == 404

    os.kill(second.process.pid, signal.SIGSTOP)
    try:
        late = ask(first, "PUT", "/layers/mine", json=TINY, headers={"X-Request-Timeout": "0.3"})
        assert late.status_code == 504 and "is stored, but 1 of" in late.json()["detail"]
        assert ask(first, "GET", "/layers/mine").status_code == 200
        for change in ("unload", "load"):  # the model repository of the Open Inference Protocol
            late = ask(first, "POST", f"/v2/repository/models/mine/{change}", headers={"X-Request-Timeout": "0.3"})
            assert late.status_code == 504 and "is stored, but 1 of" in late.json()["error"], late.text
    finally:
        os.kill(second.process.pid, signal.SIGKILL)
        second.process.wait(20)
    put(first, "mine", OTHER, 200)


def test_a_change_that_is_stored_says_so_when_the_other_processes_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Coordinator, change: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with serve_layers(tmp_path) as server:
        monkeypatch.setattr(Coordinator, "behind", unreadable)
        answer = put(server, "mine", TINY, 500)
        assert "the change is stored, but it cannot be seen whether the other processes have applied it" in answer["detail"]
        assert names(server) == ["default", "mine"]
        assert files(tmp_path) == ["mine.safetensors"]


def test_a_file_that_can_neither_be_written_nor_removed_says_that_nothing_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays until the next process begins."""
    unlink = Path.unlink

    def fails(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".part":
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, missing_ok)

    with serve_layers(tmp_path) as server:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", fails)
            patched.setattr(Coordinator, "reserve", lambda self: fails(Path(".part")))
            assert "the layers are as they were" in put(server, "mine", TINY, 500)["detail"]
        assert names(server) == ["default"]
        assert len(files(tmp_path)) == 1
    with serve_layers(tmp_path) as server:
        assert files(tmp_path) == []


def test_a_layer_is_removed_while_another_process_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That process applies the removal at once, and its own callers can remove layers too. Its layer is added afterwards."""
    entered, gate, make = threading.Event(), threading.Event(), LayerRegistry.make

    def make_slowly(registry: LayerRegistry, name: str, *args: Any) -> LoadedLayer:
        if name == "slow":
            entered.set()
            assert gate.wait(PATIENCE)
        return make(registry, name, *args)

    with serve_layers(tmp_path) as first, serve_layers(tmp_path) as second, ThreadPoolExecutor(1) as caller:
        for name in ("mine", "other"):
            put(first, name, TINY, 201)
        monkeypatch.setattr(LayerRegistry, "make", make_slowly)
        slow = caller.submit(put, first, "slow", TINY, 201)
        try:
            assert entered.wait(PATIENCE)
            assert ask(second, "DELETE", "/layers/mine").status_code == 204
            assert ask(first, "DELETE", "/layers/other").status_code == 204
            assert names(first) == names(second) == ["default"]
            assert not slow.done()
        finally:
            gate.set()
        slow.result(PATIENCE)
        assert names(first) == names(second) == ["default", "slow"]


def test_a_folder_in_place_of_a_layers_file_is_409(tmp_path: Path) -> None:
    """It is neither replaced nor removed, and nothing else changes."""
    with serve_layers(tmp_path) as server:
        put(server, "mine", TINY, 201)
        (tmp_path / "mine.safetensors").unlink()
        (tmp_path / "mine.safetensors").mkdir()
        (tmp_path / "mine.safetensors" / "inside").touch()
        refused = ask(server, "PUT", "/layers/mine", json=OTHER)
        assert refused.status_code == 409
        assert "has a folder in place of the layer's file; the layers are as they were" in refused.json()["detail"]
        assert files(tmp_path) == ["mine.safetensors"]
        assert [path.name for path in (tmp_path / "mine.safetensors").iterdir()] == ["inside"]
        put(server, "other", OTHER, 201)


def test_a_reply_names_the_fingerprint_of_the_weights_it_was_computed_with(tmp_path: Path) -> None:
    """A layer is replaced repeatedly under load: each reply is the result of the layer whose fingerprint it has, and no call fails."""
    with serve_layers(tmp_path) as server:
        body = {"layer": "mine", "query": [[0.5, -1.0, 2.0, 0.25]] * 3, "reproducible": True}
        right = {}
        for document, status in ((TINY, 201), (OTHER, 200)):
            fingerprint = put(server, "mine", document, status)["fingerprint"]
            answer = ask(server, "POST", "/attend", json=body)
            assert answer.status_code == 200, answer.text
            right[fingerprint] = answer.json()["output"]
        assert len(right) == 2
        wrong: list[Any] = []
        over = threading.Event()

        def load() -> None:
            with httpx.Client(base_url=server, timeout=60) as client:
                while not over.is_set():
                    answer = client.post("/attend", json=body)
                    if answer.status_code != 200 or answer.json()["output"] != right[answer.json()["layer"]["fingerprint"]]:
                        wrong.append(answer.text)

        callers = [threading.Thread(target=load) for _ in range(3)]
        for caller in callers:
            caller.start()
        for document in (TINY, OTHER) * 6:
            put(server, "mine", document, 200)
        over.set()
        for caller in callers:
            caller.join()
        assert not wrong
