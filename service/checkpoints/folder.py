"""A model's folder as `save_pretrained` writes it: config.json, and model.safetensors or shards with their index.

Tensors are read one by one through a memory map, so one layer of a large model costs the memory of that layer.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from service.checkpoints.detection import layers_in
from service.checkpoints.families import number_of_layers
from service.checkpoints.layout import Fields
from service.checkpoints.model import ModelLayer, describe, parse_config, parts_of
from service.checkpoints.refusals import listed
from service.errors import InvalidRequest
from service.tensors import BY_SAFETENSORS, Array

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
        headers: dict[str, tuple[int, Mapping[str, Any]]] = {}
        tensors: dict[str, Array] = {}
        for name in names:
            file = self._files[name]
            if file not in headers:
                headers[file] = self._header(file)
            start, header = headers[file]
            tensors[name] = self._tensor(file, start, name, header.get(name))
        return tensors

    def _tensor(self, file: str, start: int, name: str, entry: Any) -> Array:
        try:
            datatype, shape, (begin, end) = BY_SAFETENSORS[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
                raise ValueError("negative or no integers")
            data = np.memmap(self.path / file, np.uint8, "r", start + begin, (end - begin,))
            return np.asarray(data).view(datatype.numpy).reshape(shape)
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            raise self._refusal(file, f"the tensor {name} with a known datatype, and shape and data_offsets of integers from 0") from None

    def _files_by_name(self) -> dict[str, str]:
        """Name of a tensor -> the file that has it."""
        if (self.path / INDEX).exists():
            try:
                files = json.loads(self._text(INDEX))["weight_map"]
            except (KeyError, TypeError, ValueError, RecursionError):
                files = None
            if not isinstance(files, dict) or not all(isinstance(file, str) and Path(file).name == file for file in files.values()):
                raise self._refusal(INDEX, "weight_map, names of tensors to names of files")
            return files
        return {name: WEIGHTS for name in self._header(WEIGHTS)[1] if name != "__metadata__"}

    def _header(self, file: str) -> tuple[int, Mapping[str, Any]]:
        if (found := read_header(self.path / file)) is None:
            raise self._refusal(file, "a safetensors file")
        return found

    def _text(self, file: str) -> str:
        try:
            return (self.path / file).read_text("utf-8")
        except (OSError, ValueError):
            raise self._refusal(file, "a text file") from None

    def _refusal(self, file: str, expected: str) -> InvalidRequest:
        return InvalidRequest.where(f"/{file}", f"{expected}, as save_pretrained writes it, in {self.path}", "none")


def read_header(path: Path) -> tuple[int, Mapping[str, Any]] | None:
    """Where the tensors of a safetensors file begin, and its header; None if it is no such file."""
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(size, 1 << 28)))
    except (OSError, ValueError, RecursionError):
        return None
    return (8 + size, header) if isinstance(header, dict) else None


def layers_of_file(path: Path) -> list[Fields]:
    """The layout and prefix of every layer in a safetensors file, or the spec of one that this service wrote. Raises InvalidRequest."""
    if (found := read_header(path)) is None:
        raise InvalidRequest.where(f"/{path.name}", "a safetensors file, or a model's folder with its config.json", "something else")
    header = dict(found[1])
    metadata = header.pop("__metadata__", None) or {}
    if "spec" in metadata:
        return [{"spec": json.loads(metadata["spec"])}]
    layers: list[Fields] = [{"layout": layout, "prefix": prefix} for layout, prefix in layers_in(header)]
    if not layers:
        raise InvalidRequest.where(f"/{path.name}", "tensors with the names of a known layout", listed(header))
    return layers


def described_layers(folder: ModelFolder) -> Iterator[Fields]:
    """Every layer of the model: part, number, name and fields of its spec; or why it is refused."""
    for part, (config, attention) in parts_of(folder.config).items():
        for number in range(number_of_layers(attention, config)):
            line: Fields = {"part": part, "layer": number}
            try:
                layer = describe(folder.config, number, part)
                yield line | {"name": layer.find(folder.names).prefix, "spec": layer.fields}
            except InvalidRequest as refusal:
                yield line | {"refused": str(refusal)}
