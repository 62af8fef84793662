"""Layers that the page adds from files, in a real browser."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.browser import Visit
from support.page import Visitor

from service.client import Client

pytestmark = pytest.mark.browser


def bert(folder: Path) -> Path:
    """A folder with a tiny BERT of two layers, as `save_pretrained` writes it."""
    rng = np.random.default_rng(7)
    tensors = {}
    for layer in range(2):
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            tensors[f"encoder.layer.{layer}.attention.{name}.weight"] = rng.standard_normal((8, 8)).astype(np.float32)
            tensors[f"encoder.layer.{layer}.attention.{name}.bias"] = rng.standard_normal(8).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "bert",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "position_embedding_type": "absolute",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("way", ["chosen", "dropped"])
def test_the_layers_of_a_models_folder_are_added(visit: Visitor, http: httpx.Client, tmp_path: Path, way: str) -> None:
    """All of them, as the service reads them from the folder itself; then they are shown as one model."""
    folder = bert(tmp_path / f"bert {way}")
    page = visit()
    if way == "chosen":
        page.page.set_input_files("#folder", folder)
    else:
        drop(page, folder)
    page.page.locator("#upload-parts").wait_for()
    assert page.page.input_value("#upload-name") == f"bert-{way}"
    asked = page.asking(lambda: page.page.click("#upload-parts .main"))
    assert asked["layer"] == f"bert-{way}-0" and page.page.inner_text("#upload-status") == f"Added bert-{way}-0 to bert-{way}-1"
    assert page.page.locator("#model li").all_text_contents() == [f"bert-{way}-0", f"bert-{way}-1"]
    with Client(str(http.base_url)) as client:
        for number in range(2):
            assert client.put_layer_from("other", folder, layer=number).fingerprint == client.layer(f"bert-{way}-{number}").fingerprint
            client.delete_layer(f"bert-{way}-{number}")
        client.delete_layer("other")


def drop(page: Visit, path: Path) -> None:
    """Drops a file or folder on the page, as a file manager does."""
    session = page.page.context.new_cdp_session(page.page)
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 200, "y": 200, "data": data})


def test_a_layer_file_is_added_or_refused(visit: Visitor, http: httpx.Client, tmp_path: Path) -> None:
    """What is missing is given in the form; what is no safetensors file is refused by name."""
    file = bert(tmp_path / "bert") / "model.safetensors"
    page = visit()
    drop(page, file)
    page.page.locator("#upload-parts").wait_for()
    page.page.fill("#upload-name", "dropped")
    page.refusal(lambda: page.page.click("#upload-parts .main"), "**/layers/dropped")
    page.page.locator("#upload-error", has_text="Expected").wait_for()
    page.page.fill("#upload-prefix", "encoder.layer.1")
    page.page.fill("#upload-spec", '{"num_heads": 2}')
    assert page.asking(lambda: page.page.click("#upload-parts .main"))["layer"] == "dropped"
    assert page.page.locator("#upload-error").inner_text() == ""
    http.delete("/layers/dropped")

    (tmp_path / "bert" / "notes.txt").write_text("no tensors")
    page.page.set_input_files("#file", tmp_path / "bert" / "notes.txt")
    page.page.locator("#upload-error", has_text="got notes.txt").wait_for()
