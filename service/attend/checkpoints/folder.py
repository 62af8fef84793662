"""A model's folder as `save_pretrained` writes it: config.json, and model.safetensors or shards with their index.

Tensors are read one by one, so one layer of a large model costs the memory of that layer.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from attend.checkpoints.config import MAX_SHOWN
from attend.checkpoints.detection import layers_in, listed
from attend.checkpoints.families import number_of_layers
from attend.checkpoints.families.row import MOST_LAYERS
from attend.checkpoints.layout import Fields
from attend.checkpoints.model import ModelLayer, describe, parse_config, parts_of, read_model_layer
from attend.errors import InvalidRequest
from attend.tensors import BY_SAFETENSORS, Array, shape_alone

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


class ModelFolder:
    """The config of a model and the names of its tensors. Raises InvalidRequest if a file is missing or unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_text = self._text(CONFIG)
        self.config = parse_config(self.config_text)
        self._files = self._files_by_name()

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def layer(self, number: int, part: str | None = None) -> tuple[ModelLayer, dict[str, Array]]:
        """One layer: its description, and all its tensors. Raises InvalidRequest."""
        layer = describe(self.config, number, part)
        return layer, self.read(layer.tensors(self._files))

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Tensors by name. Raises InvalidRequest."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._files[name], []).append(name)
        tensors: dict[str, Array] = {}
        for file, inside in by_file.items():
            with open_tensors(self.path / file) as opened:
                tensors |= {name: opened.get_tensor(name) for name in inside}
        return tensors

    def zeros(self, names: Iterable[str]) -> dict[str, Array]:
        """Zeros of the shapes and datatypes of these tensors, in the memory of one number each. Raises InvalidRequest."""
        tensors: dict[str, Array] = {}
        for name in names:
            with open_tensors(self.path / self._files[name]) as opened:
                header = opened.get_slice(name)
                shape, dtype = header.get_shape(), header.get_dtype()
            if dtype not in BY_SAFETENSORS:
                raise refusal(self.path / self._files[name], f"a datatype that NumPy has for {name}", dtype)
            tensors[name] = shape_alone(shape, BY_SAFETENSORS[dtype].numpy)
        return tensors

    def _files_by_name(self) -> dict[str, str]:
        """Name of a tensor -> the file that has it."""
        if not (self.path / INDEX).exists():
            with open_tensors(self.path / WEIGHTS) as opened:
                return dict.fromkeys(opened.keys(), WEIGHTS)
        try:
            files = json.loads(self._text(INDEX))["weight_map"]
        except (KeyError, TypeError, ValueError, RecursionError):
            files = None
        if not isinstance(files, dict) or not all(_is_file_name(file) for file in files.values()):
            raise refusal(self.path / INDEX, "weight_map, names of tensors to names of files")
        return files

    def _text(self, file: str) -> str:
        path = self.path / file
        try:
            if path.is_file():
                return path.read_text("utf-8")
        except (OSError, ValueError):
            pass
        raise refusal(path, "a text file")


def _is_file_name(name: object) -> bool:
    """Whether this is the printable name of a file in the same folder. Half of a surrogate pair is not printable."""
    return isinstance(name, str) and name.isprintable() and Path(name).name == name


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """An open safetensors file, from which tensors are read by name. Raises InvalidRequest if it is none, or has no such tensor."""
    if path.exists() and not path.is_file():  # to open a pipe would wait for its writer
        raise refusal(path, "a safetensors file", "something else than a file")
    try:
        with safe_open(path, "np") as opened:
            yield opened
    except SafetensorError as error:
        raise refusal(path, "a safetensors file", f"another file ({str(error).rpartition(': ')[2]})") from None
    except OSError as error:
        raise refusal(path, "a safetensors file", error.strerror or str(error)) from None
    except AttributeError as error:  # NumPy has no such datatype
        raise refusal(path, "a safetensors file with tensors of datatypes that NumPy has", str(error)) from None


def refusal(path: Path, expected: str, got: str = "none") -> InvalidRequest:
    return InvalidRequest.where(f"/{path.name}", f"{expected}, as save_pretrained writes it, in {path.parent}", got[:MAX_SHOWN])


def layers_of_file(path: Path) -> list[Fields]:
    """The layout and prefix of every layer in a safetensors file, or the spec of one that this service wrote. Raises InvalidRequest."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise OSError("not a file")
        with safe_open(path, "np") as opened:
            names, metadata = opened.keys(), opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        reason = str(error).rpartition(": ")[2]
        raise InvalidRequest.where("", "a safetensors file, or a model's folder with its config.json", f"{path} ({reason})") from None
    if "spec" in metadata:
        return [{"spec": json.loads(metadata["spec"])}]
    layers: list[Fields] = [{"layout": layout, "prefix": prefix} for layout, prefix in layers_in(names)]
    if not layers:
        raise InvalidRequest.where(f"/{path.name}", "tensors with the names of a known layout", listed(names))
    return layers


def described_layers(folder: ModelFolder) -> Iterator[Fields]:
    """Every layer of the model: part, number, name and fields of its spec; or why it is refused. No weights are read."""
    for part, (config, row) in parts_of(folder.config).items():
        if (layers := number_of_layers(row, config)) > MOST_LAYERS:
            raise InvalidRequest.where(f"/{CONFIG}", f"a model of at most {MOST_LAYERS} layers", str(layers)[:MAX_SHOWN])
        for number in range(layers):
            line: Fields = {"part": part, "layer": number}
            try:
                layer = describe(folder.config, number, part)
                spec, _ = read_model_layer(folder.zeros(layer.tensors(folder.names)), folder.config, number, part)
                yield line | {"name": layer.find(folder.names).prefix, "spec": spec}
            except InvalidRequest as refusal:
                yield line | {"refused": str(refusal)}
