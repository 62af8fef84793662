"""A file system with one folder: what the store of layers uses of `os`, `fcntl` and paths.

It knows what the kernel has and what the disk has. If the process is killed, everything that it wrote stays. If the machine loses its
power, the folder has the names of some moment since it was last flushed, and each file the bytes of its last flush, or some of the later
ones, or zeros in their place.
"""

import errno
import fcntl
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

from attend.serving.layers.store import TEMPORARY
from simulation.world import Failure, World

DELAYS = (0.0, 0.0, 1e-4, 1e-2, 0.5)  # seconds of a call
FULL_SECONDS = (0.01, 1.0, 10.0)  # in which others fill the disk
TICK_NS = 4_000_000  # between two times of modification


class Died(BaseException):
    """The process dies in a call of the operating system, or is dead."""


@dataclass(eq=False)
class File:
    """A file, with or without a name."""

    number: int
    modified: int  # nanoseconds
    data: bytearray = field(default_factory=bytearray)
    on_disk: bytes = b""  # when it was last flushed
    lock: int | None = None  # the descriptor that has it

    def size_in(self, block: int) -> int:
        return -(-len(self.data) // block) * block


class SimulatedFiles:
    """The folder, its faults, and the calls to it. `faults`: of the run; its `files` is the probability that a call fails, or finds the
    disk full for some time."""

    def __init__(self, world: World, block: int, faults: Any) -> None:
        self.world, self.block, self.faults = world, block, faults
        self.draw = world.random("files")
        self.path = SimulatedPath(self, "")
        self.names: dict[str, File] = {}
        self.dies_in: int | None = None  # changes after which the process dies
        self.die: Callable[[], None] = lambda: None
        self.dead = False
        self.may_block_loop = False
        self._full_until = 0.0
        self._since_flush: list[dict[str, File]] = [{}]  # the names at the last flush of the folder, and after each change since
        self._open: dict[int, File | None] = {}  # by descriptor; None is the folder
        self._opened_by: dict[int, str] = {}  # the name of the process of each descriptor
        self._last_descriptor = 10

    def restart(self, lost_power: bool) -> None:
        """A new process may begin: nothing is open or locked. What is not flushed may be gone if the machine lost its power."""
        self._open.clear()
        self.dead, self.dies_in = False, None
        if lost_power:
            self.names = dict(self.draw.choice(self._since_flush))
            for name, file in self.names.items():
                file.data = self._after_loss(file)
                file.on_disk = bytes(file.data)
                self.world.note("after the loss of power", name, "has", len(file.data), "bytes")
            self._since_flush = [dict(self.names)]
        for file in self.names.values():
            file.lock = None

    def free_space(self) -> None:
        """Others fill the disk no more."""
        self._full_until = 0.0

    def close_all(self, process: str) -> None:
        """Close what the process of that name has open, since it has died."""
        for descriptor in self.opened_by(process):
            self._forget(descriptor)

    def opened_by(self, process: str) -> list[int]:
        """The descriptors that the process of that name has open."""
        return [descriptor for descriptor in self._open if self._opened_by[descriptor] == process]

    def unfinished(self) -> frozenset[str]:
        """The names of layers' files that are not complete."""
        return frozenset(name for name in self.names if name.endswith(TEMPORARY))

    def _after_loss(self, file: File) -> bytearray:
        whole = bytes(file.data)
        part = whole[: self.draw.randint(0, len(whole))]
        return bytearray(self.draw.choice((file.on_disk, part, part.ljust(len(whole), b"\0"), whole)) if whole != file.on_disk else whole)

    @contextmanager
    def call(self, name: str, fails: bool = True, changes: bool = False) -> Iterator[None]:
        """A call of the operating system: it takes time, may fail, and the process may die before or after it if it changes something."""
        if self.dead:
            raise Died
        if not self.world.in_thread and not self.may_block_loop:
            self.world.fail(Failure("rule 12: nothing long runs on the event loop", f"{name} on the event loop"))
        self.world.spend(self.draw.choice(DELAYS))
        dies = changes and self.dies_in == 0
        self.dies_in = self.dies_in if self.dies_in is None or not changes else self.dies_in - 1
        if dies and self.draw.random() < 0.5:
            self._die(name, "before")
        if fails and self.faults.begun and self.draw.random() < self.faults.files:
            self.faults.occurred = True
            if self.draw.random() < 0.5:
                self._full_until = self.world.clock() + self.draw.choice(FULL_SECONDS)
                self.world.note("the disk is full")
            else:
                self.world.note(name, "fails")
                raise OSError(errno.EIO, "Input/output error")
        yield
        if dies:
            self._die(name, "after")

    def _die(self, name: str, when: str) -> None:
        self.world.note("the process dies", when, name)
        self.die()
        raise Died

    # What `os` has

    def namespace(self) -> SimpleNamespace:
        """In place of the module `os`."""
        constants = {name: getattr(os, name) for name in dir(os) if name.startswith("O_")}
        calls = ("open", "fdopen", "fstat", "write", "ftruncate", "fsync", "close", "scandir")
        return SimpleNamespace(**constants, stat_result=os.stat_result, **{name: getattr(self, name) for name in calls})

    def open(self, path: "SimulatedPath", flags: int, mode: int = 0o777) -> int:
        with self.call(f"open {path.name}"):
            if not flags & os.O_DIRECTORY and path.name not in self.names:
                if not flags & os.O_CREAT:
                    raise FileNotFoundError(errno.ENOENT, "No such file or directory")
                self.names[path.name] = self._new_file()
                self._changed()
            self._last_descriptor += 1
            self._open[self._last_descriptor] = None if flags & os.O_DIRECTORY else self.names[path.name]
            self._opened_by[self._last_descriptor] = self.world.running
            return self._last_descriptor

    def _new_file(self) -> File:
        """A file with the least free number: file systems use that of a removed file again at once."""
        taken = {file.number for file in (*self.names.values(), *self._open.values()) if file is not None}
        return File(next(number for number in range(1, len(taken) + 2) if number not in taken), self._time())

    def _time(self) -> int:
        return int(self.world.clock() * 1e9) // TICK_NS * TICK_NS

    def _changed(self) -> None:
        self._since_flush.append(dict(self.names))

    def _file(self, descriptor: int) -> File:
        file = self._open[descriptor]
        assert file is not None, "the folder is no file"
        return file

    @contextmanager
    def fdopen(self, descriptor: int, mode: str) -> Iterator[Any]:
        """The file of a descriptor, to read it whole."""

        def read(most: int) -> bytes:
            with self.call("read"):
                return bytes(self._file(descriptor).data[:most])

        try:
            yield SimpleNamespace(read=read)
        finally:
            self.close(descriptor)

    def fstat(self, descriptor: int) -> SimpleNamespace:
        with self.call("fstat", fails=False):
            return self._about(self._file(descriptor))

    def _about(self, file: File) -> SimpleNamespace:
        links = sum(one is file for one in self.names.values())
        return SimpleNamespace(
            st_ino=file.number, st_mtime_ns=file.modified, st_size=len(file.data), st_nlink=links, st_mode=stat.S_IFREG | 0o644
        )

    def write(self, descriptor: int, data: Any) -> int:
        """Write at the end, perhaps a part only: each file is written from its beginning, or appended to."""
        file, given = self._file(descriptor), bytes(data)
        with self.call(f"write of {len(given)} bytes", changes=True):
            most = min(self._room(file), len(given))
            if not most and given:
                raise self._no_space()
            whole = self.draw.random() < 0.7 or len(given) == 1
            size = min(int(most), len(given) if whole else self.draw.randint(1, max(1, len(given))))
            file.data += given[:size]
            file.modified = self._time()
            return size

    def ftruncate(self, descriptor: int, size: int) -> None:
        """Set the length. The file system has no holes: zeros that are added need room."""
        file = self._file(descriptor)
        with self.call(f"change of a length to {size}", changes=True):
            if size - len(file.data) > self._room(file):
                raise self._no_space()
            file.data = file.data[:size].ljust(size, b"\0")
            file.modified = self._time()

    def _room(self, file: File) -> float:
        """How many bytes can be appended to the file now."""
        return file.size_in(self.block) - len(file.data) if self.world.clock() < self._full_until else math.inf

    def _no_space(self) -> OSError:
        self.world.note("no space")
        return OSError(errno.ENOSPC, "No space left on device")

    def fsync(self, descriptor: int) -> None:
        with self.call("flush of the folder" if self._open[descriptor] is None else "flush", changes=True):
            file = self._open[descriptor]
            if file is None:
                self._since_flush = [dict(self.names)]
            else:
                file.on_disk = bytes(file.data)

    def close(self, descriptor: int) -> None:
        with self.call("close", fails=False):
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        file = self._open.pop(descriptor)
        if file is not None and file.lock == descriptor:
            file.lock = None

    @contextmanager
    def scandir(self, path: "SimulatedPath") -> Iterator[list["SimulatedPath"]]:
        with self.call("list"):
            found = [path / name for name in self.names]
        self.draw.shuffle(found)
        yield found

    # What `fcntl` has

    def flock(self, descriptor: int, operation: int) -> None:
        with self.call("lock", fails=False):
            file = self._file(descriptor)
            if file.lock not in (None, descriptor):
                if not operation & fcntl.LOCK_NB:
                    raise Failure("files", "a thread waits for a lock")
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            file.lock = descriptor

    # What paths have

    def unlink(self, name: str, missing_ok: bool) -> None:
        with self.call(f"remove {name}", changes=True):
            if self.names.pop(name, None) is not None:
                self._changed()
            elif not missing_ok:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    def rename(self, before: str, after: str) -> None:
        with self.call(f"rename {before} to {after}", changes=True):
            if before not in self.names:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            self.names[after] = self.names.pop(before)
            self._changed()

    def stat(self, name: str) -> SimpleNamespace:
        with self.call("stat"):
            if name not in self.names:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            return self._about(self.names[name])

    def read(self, name: str) -> bytes:
        with self.call("read"):
            if name not in self.names:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            return bytes(self.names[name].data)

    def glob(self, pattern: str) -> list[str]:
        with self.call("list", fails=False):  # pathlib ignores most errors of it
            return [name for name in self.names if fnmatch(name, pattern)]


@dataclass(frozen=True)
class SimulatedPath:
    """The folder, if `name` is empty, or a name in it; in place of pathlib.Path and of os.DirEntry."""

    files: SimulatedFiles
    name: str

    def __truediv__(self, name: str) -> "SimulatedPath":
        return SimulatedPath(self.files, name)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        pass  # it exists

    def glob(self, pattern: str) -> list["SimulatedPath"]:
        return [self / name for name in self.files.glob(pattern)]

    def unlink(self, missing_ok: bool = False) -> None:
        self.files.unlink(self.name, missing_ok)

    def rename(self, target: "SimulatedPath") -> None:
        self.files.rename(self.name, target.name)

    def stat(self, *, follow_symlinks: bool = True) -> SimpleNamespace:
        return self.files.stat(self.name)

    def read_bytes(self) -> bytes:
        return self.files.read(self.name)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False
