"""A model's folder from a stranger: files that are none, names that are none, and more layers than a model has."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from attend.checkpoints.folder import INDEX, WEIGHTS, ModelFolder, described_layers
from attend.errors import InvalidRequest

NAMES = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
CONFIG = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 11}


def model_folder(path: Path, file: str | None = None, **fields: Any) -> Path:
    """A folder with one layer of Llama. `file`: what its index names as the file of every tensor."""
    save_file({name: np.zeros((8, 8), np.float32) for name in NAMES}, path / WEIGHTS)
    (path / "config.json").write_text(json.dumps(CONFIG | fields))
    if file is not None:
        (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, file)}))
    return path


def test_a_layer_of_the_folder_is_read(tmp_path: Path) -> None:
    """Also where a link leads to its file, as in the cache of Hugging Face."""
    (tmp_path / "link").symlink_to(WEIGHTS)
    for file in (None, WEIGHTS, "link"):
        description, tensors = ModelFolder(model_folder(tmp_path, file)).layer(0)
        assert sorted(tensors) == sorted(NAMES)
        assert description.fields["num_heads"] == 2


@pytest.mark.parametrize("name", ["\ud800", "../x", "/etc/passwd", "a\nb"])
def test_an_index_names_files_of_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="names of tensors to names of files"):
        ModelFolder(model_folder(tmp_path, name))


def test_a_pipe_is_refused_and_not_opened(tmp_path: Path) -> None:
    """Opening it would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="something else than a file"):
        ModelFolder(model_folder(tmp_path, "pipe")).layer(0)
    (tmp_path / INDEX).unlink()
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InvalidRequest, match="a text file"):
        ModelFolder(tmp_path)


def test_more_layers_than_any_model_has_are_refused(tmp_path: Path) -> None:
    assert len(list(described_layers(ModelFolder(model_folder(tmp_path, num_hidden_layers=3))))) == 3
    with pytest.raises(InvalidRequest, match="at most 4096 layers"):
        list(described_layers(ModelFolder(model_folder(tmp_path, num_hidden_layers=2**31 - 1))))
