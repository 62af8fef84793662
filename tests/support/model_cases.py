"""The cases of `golden/models`: layers of tiny models of transformers, with their configs. See `golden/generate_models.py`."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save, save_file

from attend.tensors import Array
from support.framework_cases import SAFETENSORS, array

FOLDER = Path(__file__).parent.parent / "golden" / "models"
FILES = sorted(FOLDER.glob("*.json"))
MODELS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in FILES}
CASES = [(name, index) for name, model in MODELS.items() for index in range(len(model["cases"]))]
TOLERANCE = 3e-5  # of the largest value


def tensors_of(case: Mapping[str, Any]) -> dict[str, Array]:
    """The layer's tensors by name, which are drawn by name as `golden/tiny_models.py` does."""
    return {name: drawn(name, shape) for name, shape in case["shapes"].items()}


def drawn(name: str, shape: list[int]) -> Array:
    return (np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape) * 0.35).astype(np.float32)


def put(http: httpx.Client, model: str, index: int, tensors: Mapping[str, Array] | None = None, **config: Any) -> httpx.Response:
    """PUT of the layer of a case, with other tensors or with changed fields of the config."""
    case, fields = MODELS[model]["cases"][index], MODELS[model]["config"] | config
    metadata = {"config": json.dumps(fields), "layer": str(case["layer"]), "part": case["part"]}
    return http.put("/layers/model", content=save(dict(tensors or tensors_of(case)), metadata), headers=SAFETENSORS)


def difference(http: httpx.Client, model: str, index: int) -> float:
    """Largest difference between the server's and transformers' output for a case, relative to the largest value."""
    case = MODELS[model]["cases"][index]
    reply = http.post("/attend", json={**case["request"], "layer": "model", "outputs": ["output"], "reply": {"form": "base64"}})
    assert reply.status_code == 200, reply.text
    expected = array(case["output"])
    return float(np.abs(array(reply.json()["output"]) - expected).max() / np.abs(expected).max())


def write_folder(folder: Path, model: str, index: int, sharded: bool = False) -> int:
    """A model's folder with the tensors of one layer; `sharded`: each in a file of its own. Returns the layer's number."""
    case, tensors = MODELS[model]["cases"][index], tensors_of(MODELS[model]["cases"][index])
    (folder / "config.json").write_text(json.dumps(MODELS[model]["config"]))
    if sharded:
        files = {name: f"model-{i:05d}-of-{len(tensors):05d}.safetensors" for i, name in enumerate(tensors)}
        for name, file in files.items():
            save_file({name: tensors[name]}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    else:
        save_file(tensors, folder / "model.safetensors")
    number: int = case["layer"]
    return number
