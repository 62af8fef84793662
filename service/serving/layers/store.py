"""Layers as files of one folder, NAME.safetensors each: what GET /layers/{name}/weights gives, with the fingerprint beside the spec.

The file of an unloaded layer is called NAME.unloaded, so that one rename unloads a layer and another loads it. Where both are there, a
process died between writing the first and removing the second: the first counts.

A file is written under another name, flushed, and renamed, and the folder is flushed: whenever the process or the machine dies, there is
the old layer or the new one, never half of one. Room to announce the change is reserved before the rename: a full disk refuses all of it.
A name that is no layer's never becomes a path, and links are not followed, so that nothing outside the folder is read or written. Knows no
event loop; every call may block.
"""

import errno
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import TypeAlias

import structlog

from service.errors import InvalidRequest, ServiceFault, StorageFull, TooLarge
from service.serving.layers.coordination import Claim, Coordinator, cleared, create_locked
from service.serving.layers.files import read_stored, stored_pieces
from service.serving.layers.registry import HeldLayer
from service.spec import LayerSpec
from service.tensors import Array
from service.wire.problems import shown
from service.wire.schemas.attend import LAYER_NAME

log = structlog.get_logger("attend")
NAME = re.compile(LAYER_NAME)
SUFFIX, UNLOADED, PART = ".safetensors", ".unloaded", ".part"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
UNANNOUNCED = "the folder has changed, but it could not be made sure that all processes follow"
Stamp: TypeAlias = tuple[int, int, int]  # inode, time of the last change, size: another file, another stamp


class LayerStore:
    """The folder, and this process among those that share it."""

    def __init__(self, path: Path, largest: int) -> None:
        """`largest` is in bytes, of a file that is read."""
        self.path, self.largest, self.peers = path, largest, Coordinator(path)
        self._passed_over: frozenset[str] = frozenset()  # what was there at the last look, and cannot be a layer

    def open(self) -> None:
        """Makes the folder if it is not there, joins those who share it, and clears away what writers left that died. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.peers.join()
        for path in self.path.glob(f".*{PART}"):
            cleared(path)

    def close(self) -> None:
        self.peers.leave()

    def claim(self) -> Claim:
        """To be taken before looking, and released after writing, by whoever lets in only what there is room for."""
        return Claim(self.path)

    def look(self) -> tuple[int, dict[str, Stamp], dict[str, Stamp]]:
        """How many changes there have been, the layers that are there with at least those changes, and the unloaded ones.

        What is new and cannot be a layer gets a line in the log.
        """
        changes, others = self.peers.changes, {}
        found: dict[str, Stamp] = {}
        unloaded: dict[str, Stamp] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                kind = UNLOADED if entry.name.endswith(UNLOADED) else SUFFIX
                name = entry.name.removesuffix(kind)
                if name == entry.name or not NAME.fullmatch(name):
                    others[entry.name] = f"its name is not that of a layer with {SUFFIX} or {UNLOADED}"
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # removed or renamed since the folder was listed: not there
                        (found if kind == SUFFIX else unloaded)[name] = _stamp(entry.stat(follow_symlinks=False))
                else:
                    others[entry.name] = "it is a link, which is not followed" if entry.is_symlink() else "it is no file"
        others = {name: why for name, why in others.items() if not name.startswith(".")}  # ours, or hidden
        for name in sorted(others.keys() - self._passed_over):
            log.warning("layer file ignored", file=shown(name), reason=others[name])
        self._passed_over = frozenset(others)
        unloaded = {name: stamp for name, stamp in unloaded.items() if name not in found}
        return changes, dict(sorted(found.items())), dict(sorted(unloaded.items()))

    def read(self, name: str, kind: str = SUFFIX) -> tuple[LayerSpec, dict[str, Array], str]:
        """Spec, weights and the fingerprint they should have. Raises OSError, MalformedBody, InvalidRequest or TooLarge."""
        file = os.open(self._path(name, kind), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as reader:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise InvalidRequest.where("", "a file", "something else")
            if about.st_size > self.largest:
                raise TooLarge.where("", f"a file of at most {self.largest} bytes (max_layer_bytes)", str(about.st_size))
            return read_stored(reader.read(self.largest))

    def write(self, layer: HeldLayer) -> tuple[int, Stamp]:
        """The number of the change, and the stamp of the file. Raises StorageFull or ServiceFault, which say whether it is stored."""
        target, part = self._path(layer.name), self.path / f".{layer.name}.{token_hex(8)}{PART}"
        try:
            stamp = _write(part, target, layer, self.peers.reserve)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise fault(error) from error
        return self._announce(layer.name), stamp

    def remove(self, name: str) -> int:
        """The number of the change. Raises ServiceFault, which says whether the file is gone. On a full disk too: it makes room."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise fault(error) from error
        return self._announce(name)

    def _announce(self, name: str) -> int:
        """The number of a change of that layer that has been made, by which it is no longer an unloaded one.

        Raises StorageFull or ServiceFault.
        """
        try:
            self._path(name, UNLOADED).unlink(missing_ok=True)
            _flush(self.path)
            return self.peers.announce()
        except OSError as error:
            raise fault(error, UNANNOUNCED) from error

    def unload(self, name: str) -> tuple[int, Stamp]:
        """Keeps the layer's file as that of an unloaded one; the number of the change, and the file's stamp. Raises ServiceFault."""
        return self._rename(name, SUFFIX, UNLOADED)

    def load(self, name: str) -> tuple[int, Stamp]:
        """The reverse."""
        return self._rename(name, UNLOADED, SUFFIX)

    def _rename(self, name: str, before: str, after: str) -> tuple[int, Stamp]:
        target = self._path(name, after)
        try:
            self.peers.reserve()
            self._path(name, before).rename(target)
        except OSError as error:
            raise fault(error) from error
        try:
            _flush(self.path)
            return self.peers.announce(), _stamp(target.stat(follow_symlinks=False))
        except OSError as error:
            raise fault(error, UNANNOUNCED) from error

    def _path(self, name: str, kind: str = SUFFIX) -> Path:
        if not NAME.fullmatch(name):
            raise InvalidRequest.where("", f"a layer name matching {LAYER_NAME}", shown(name))
        return self.path / f"{name}{kind}"


def _write(part: Path, target: Path, layer: HeldLayer, reserve: Callable[[], None]) -> Stamp:
    """Write the file under the name of the part, and rename it. `reserve` is the last step that may find the disk full."""
    file = create_locked(part)  # so that a newcomer can tell it from what the dead have left
    try:
        for piece in stored_pieces(layer):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
        stamp = _stamp(os.fstat(file))
        reserve()
        part.rename(target)
    finally:
        os.close(file)
    return stamp


def _flush(folder: Path) -> None:
    """Until then a rename may be lost with the machine's power."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _stamp(about: os.stat_result) -> Stamp:
    return about.st_ino, about.st_mtime_ns, about.st_size


def fault(error: OSError, state: str = "the layers are as they were") -> Exception:
    """What a caller is told of it, with the state of the folder: StorageFull or ServiceFault."""
    if error.errno in FULL:
        return StorageFull(f"there is no room to store the layer (layers_dir); {state}")
    return ServiceFault(f"the folder of layers (layers_dir) cannot be written to; {state}")
