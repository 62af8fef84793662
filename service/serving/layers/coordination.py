"""Coordinates the processes that share a folder of layers, with files and kernel locks (flock).

Each process holds a lock on a file .peer-…, in which it writes the number of the last change that it applied. The kernel releases the lock
when the process dies, so other processes do not wait for it. The length of the file CHANGES is the number of changes: each appends a byte,
which is atomic and needs no lock. To add a layer, a process locks CHANGES while it reads the folder and then writes to it.
"""

import fcntl
import os
from pathlib import Path
from secrets import token_hex

CHANGES = ".changes"
BLOCK_BYTES = 4096  # bytes; file systems allocate at least in multiples of this
LOCK_PREFIX = ".peer-"


class Coordinator:
    """The file of this process, and the number of changes. Methods block only briefly: none waits for another process's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / f"{LOCK_PREFIX}{token_hex(8)}"
        self._file: int | None = None

    def join(self) -> None:
        """Make other processes wait until this one has applied their changes. Must be called before the first scan of the folder."""
        self._file = create_locked(self._path)
        self.acknowledge(0)

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
        """Record that this process has applied all changes up to `change`."""
        if self._file is not None:
            os.pwrite(self._file, b"%020d" % change, 0)

    def behind(self, change: int) -> int:
        """The number of other living processes that have not applied `change` yet. Removes the files of dead processes."""
        return sum(
            _applied(path) < change for path in self.folder.glob(f"{LOCK_PREFIX}*") if path != self._path and not remove_unlocked(path)
        )


class Claim:
    """An exclusive lock for adding layers to the folder, between threads and processes. The kernel releases it when the process dies."""

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
        return int(path.read_bytes() or b"0")
    except FileNotFoundError:  # the process has ended meanwhile
        return 1 << 62


def create_locked(path: Path) -> int:
    """Create, open and lock a file; its descriptor. Retries if another process removes the file before it is locked."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)


def remove_unlocked(path: Path) -> bool:
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
