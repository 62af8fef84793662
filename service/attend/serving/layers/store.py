"""Stores layers in a folder as NAME.safetensors: the file of GET /layers/{name}/weights, plus the fingerprint in the metadata.

The file of an unloaded layer is NAME.unloaded, so a rename loads or unloads a layer. If both exist, a process died after writing the first
and before removing the second; the first is valid.

A file is written under a temporary name, flushed and renamed, then the folder is flushed, so after a crash there is the old layer or the
new one, never a part. Disk space to announce the change is reserved before the rename, so that a full disk changes nothing. Names are
checked before they become paths, and links are not followed, so nothing outside the folder is read or written. All methods may block.

Processes that share the folder are coordinated with files and kernel locks (flock). The length of the file CHANGES is the number of
changes: each appends a byte, which is atomic and needs no lock. Each process holds a lock on a file .peer-…, whose length is the number of
the last change that it applied; digits in it could be written in part. The kernel releases the lock when the process dies, so other
processes do not wait for it. To add a layer, a process locks CHANGES while it reads the folder and then writes to it.
"""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import structlog

from attend.errors import InvalidRequest, LayerConflict, ServiceFault, StorageFull, TooLarge
from attend.serving.layers.files import ParsedLayer, read_stored, stored_pieces
from attend.serving.layers.registry import LoadedLayer
from attend.wire.problems import describe_value
from attend.wire.schemas.schema import LAYER_NAME, require_layer_name

log = structlog.get_logger("attend")
NAME = re.compile(LAYER_NAME)
SUFFIX, UNLOADED, TEMPORARY = ".safetensors", ".unloaded", ".part"
CHANGES, LOCK_PREFIX = ".changes", ".peer-"
BLOCK_BYTES = 4096  # file systems allocate at least in multiples of this
DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
UNANNOUNCED = "the folder has changed, but the change could not be announced to the other processes"


class LayerFile(NamedTuple):
    """A file of a layer: SUFFIX or UNLOADED, and inode, modification time and size, which change with the file."""

    suffix: str
    stamp: tuple[int, int, int]


class LayerStore:
    """The folder of layers, which several processes may share."""

    def __init__(self, path: Path, largest: int) -> None:
        """`largest`: most bytes of a file that `read` accepts."""
        self.path, self.largest, self.coordinator = path, largest, Coordinator(path)
        self._ignored: frozenset[str] = frozenset()  # files of the last scan that cannot be layers

    def open(self) -> None:
        """Create the folder if needed, join its processes, and remove unfinished files of dead ones. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.coordinator.join()
        for path in self.path.glob(f".*{TEMPORARY}"):
            _remove_unlocked(path)
        _flush(self.path)  # what is loaded now must be there after a power loss too, although its writer may have died before it flushed

    def close(self) -> None:
        self.coordinator.leave()

    def scan(self) -> tuple[int, dict[str, LayerFile]]:
        """The number of changes, and the files by the name of their layer, which include at least those changes.

        Logs new files that cannot be layers.
        """
        changes, others = self.coordinator.changes, {}
        found: dict[str, LayerFile] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                suffix = UNLOADED if entry.name.endswith(UNLOADED) else SUFFIX
                name = entry.name.removesuffix(suffix)
                if name == entry.name or not NAME.fullmatch(name):
                    others[entry.name] = f"its name is not the name of a layer followed by {SUFFIX} or {UNLOADED}"
                elif not entry.is_file(follow_symlinks=False):
                    others[entry.name] = "it is a link, which is not followed" if entry.is_symlink() else "it is not a file"
                elif suffix == SUFFIX or name not in found:
                    with suppress(FileNotFoundError):  # removed or renamed since the folder was listed
                        found[name] = LayerFile(suffix, _stamp(entry.stat(follow_symlinks=False)))
        others = {name: why for name, why in others.items() if not name.startswith(".")}  # temporary or hidden
        for name in sorted(others.keys() - self._ignored):
            log.warning("layer file ignored", file=describe_value(name), reason=others[name])
        self._ignored = frozenset(others)
        return changes, dict(sorted(found.items()))

    def read(self, name: str, suffix: str = SUFFIX) -> tuple[ParsedLayer, str]:
        """The layer and the stated fingerprint of a file. Raises OSError, MalformedBody, InvalidRequest or TooLarge."""
        file = os.open(self._path(name, suffix), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as reader:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise InvalidRequest.where("", "a file", "something else")
            if about.st_size > self.largest:
                raise TooLarge.where("", f"a file of at most {self.largest} bytes (max_layer_bytes)", str(about.st_size))
            return read_stored(reader.read(self.largest))

    def write(self, layer: LoadedLayer) -> tuple[int, LayerFile]:
        """Store the layer. Returns the number of the change, and the file. Raises StorageFull, LayerConflict or ServiceFault."""
        target, temporary = self._path(layer.name), self.path / f".{layer.name}.{token_hex(8)}{TEMPORARY}"
        try:
            with storage_faults():
                stamp = _write(temporary, target, layer, self.coordinator.reserve)
        except (StorageFull, LayerConflict, ServiceFault):
            with suppress(OSError):  # then the next process that begins removes it
                temporary.unlink(missing_ok=True)
            raise
        return self._announce(layer.name), LayerFile(SUFFIX, stamp)

    def remove(self, name: str) -> int:
        """Remove the file; works on a full disk too. Returns the number of the change. Raises ServiceFault."""
        with storage_faults():
            self._path(name).unlink(missing_ok=True)
        return self._announce(name)

    def _announce(self, name: str) -> int:
        """Remove the file of the unloaded layer and announce the change. Returns its number. Raises StorageFull or ServiceFault."""
        with storage_faults(UNANNOUNCED):
            self._path(name, UNLOADED).unlink(missing_ok=True)
            _flush(self.path)
            return self.coordinator.announce()

    def unload(self, name: str) -> tuple[int, LayerFile]:
        """Rename the file to that of an unloaded layer. Returns the number of the change, and the file. Raises ServiceFault."""
        return self._rename(name, SUFFIX, UNLOADED)

    def load(self, name: str) -> tuple[int, LayerFile]:
        """The reverse of `unload`."""
        return self._rename(name, UNLOADED, SUFFIX)

    def _rename(self, name: str, before: str, after: str) -> tuple[int, LayerFile]:
        target = self._path(name, after)
        with storage_faults():
            self.coordinator.reserve()
            self._path(name, before).rename(target)
        with storage_faults(UNANNOUNCED):
            _flush(self.path)
            return self.coordinator.announce(), LayerFile(after, _stamp(target.stat(follow_symlinks=False)))

    def _path(self, name: str, suffix: str = SUFFIX) -> Path:
        require_layer_name(name)
        return self.path / f"{name}{suffix}"


def _write(temporary: Path, target: Path, layer: LoadedLayer, reserve: Callable[[], None]) -> tuple[int, int, int]:
    """Write the file as `temporary`, and rename it to `target`. `reserve` is the last step that a full disk can make fail."""
    file = _create_locked(temporary)  # locked, since unlocked ones are removed as left over from dead processes
    try:
        for piece in stored_pieces(layer):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
        stamp = _stamp(os.fstat(file))
        reserve()
        temporary.rename(target)
    finally:
        os.close(file)
    return stamp


def _flush(folder: Path) -> None:
    """Make renames in the folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _stamp(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_ino, about.st_mtime_ns, about.st_size


@contextmanager
def storage_faults(state: str = "the layers are as they were") -> Iterator[None]:
    """Raises StorageFull, LayerConflict or ServiceFault instead of OSError; `state` says what has changed."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError) as error:
        raise LayerConflict(f"the folder of layers (layers_dir) has a folder in place of the layer's file; {state}") from error
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:
            raise StorageFull(f"there is no room to store the layer (layers_dir); {state}") from error
        raise ServiceFault(f"the folder of layers (layers_dir) cannot be used; {state}") from error


class Coordinator:
    """The file of this process, and the number of changes. No method waits for another process's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / f"{LOCK_PREFIX}{token_hex(8)}"
        self._file: int | None = None

    def join(self) -> None:
        """Make other processes wait until this one has applied their changes. Must be called before the first scan of the folder."""
        self._file = _create_locked(self._path)

    def leave(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def reserve(self) -> None:
        """Allocate disk space for the announcement of a change. If this raises OSError, the change must not be made.

        Announces an empty change, so that the next byte does not start a new block.
        """
        if self.announce() % BLOCK_BYTES == 0:
            self.announce()

    def announce(self) -> int:
        """Append a byte to CHANGES after a change. Returns the number of the change, or a higher one."""
        file = os.open(self.folder / CHANGES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, b".")
            return os.fstat(file).st_size
        finally:
            os.close(file)

    @property
    def changes(self) -> int:
        """The number of changes. A later scan of the folder includes all of them."""
        try:
            return (self.folder / CHANGES).stat().st_size
        except FileNotFoundError:
            return 0

    def acknowledge(self, change: int) -> None:
        """Record that this process has applied all changes up to `change`. A full disk does not stop it from starting: then the others
        wait until a later call finds room."""
        if self._file is not None:
            try:
                os.ftruncate(self._file, change)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRORS:
                    raise

    def behind(self, change: int) -> int:
        """The number of other living processes that have not applied `change` yet. Removes the files of dead processes."""
        return sum(
            _applied(path) < change for path in self.folder.glob(f"{LOCK_PREFIX}*") if path != self._path and not _remove_unlocked(path)
        )


class Claim:
    """An exclusive lock for adding layers to the folder, between threads and processes. The kernel releases it when the process dies.

    It is acquired before the check that there is room for a layer, and released after the layer is written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CHANGES
        self._file: int | None = None

    def acquire(self) -> bool:
        """Try to acquire the lock without waiting; returns whether it succeeded. Raises OSError."""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _applied(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the process has ended meanwhile
        return 1 << 62


def _create_locked(path: Path) -> int:
    """Create, open and lock a file; its descriptor. Retries if another process removes the file before it is locked."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)


def _remove_unlocked(path: Path) -> bool:
    """Remove a file unless a living process has locked it. Returns whether the file no longer exists."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
