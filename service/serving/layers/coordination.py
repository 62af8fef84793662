"""Coordination of the processes that share a folder of layers, by files and the kernel's locks (flock).

Each process keeps a file of its own locked, and writes into it the number of the last change that it has applied. The kernel releases the
lock when the process dies, so that no other waits for it. The length of the file CHANGES counts the changes: each appends a byte, which is
atomic and needs no lock. A lock on that file excludes other processes from reading the folder and then writing to it.
"""

import fcntl
import os
from pathlib import Path
from secrets import token_hex

CHANGES = ".changes"
BLOCK = 4096  # bytes: file systems give room to a file in multiples of this
PEER = ".peer-"


class Coordinator:
    """This process among those that share the folder. Its methods block, but not for long: none waits for the lock of another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / f"{PEER}{token_hex(8)}"
        self._file: int | None = None

    def join(self) -> None:
        """Makes the others wait for this process to apply changes. To be called before it reads the folder for the first time."""
        self._file = create_locked(self._path)
        self.acknowledge(0)

    def leave(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def reserve(self) -> None:
        """Makes room for the announcement of a change. Raises OSError where there is none; then the change must not be made.

        Announces an empty change, so that the file has the block of the next byte.
        """
        if self.announce() % BLOCK == 0:
            self.announce()

    def announce(self) -> int:
        """Counts a change that has been made. Returns its number, or that of a later one."""
        file = os.open(self.folder / CHANGES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, b".")
            return os.fstat(file).st_size
        finally:
            os.close(file)

    @property
    def changes(self) -> int:
        """The number of changes. The folder, read after this, contains all of them."""
        try:
            return (self.folder / CHANGES).stat().st_size
        except FileNotFoundError:
            return 0

    def acknowledge(self, change: int) -> None:
        """Records that this process has applied the changes up to that one."""
        if self._file is not None:
            os.pwrite(self._file, b"%020d" % change, 0)

    def behind(self, change: int) -> int:
        """The number of other living processes that have not applied it yet. Files of dead processes are removed."""
        return sum(_applied(path) < change for path in self.folder.glob(f"{PEER}*") if path != self._path and not remove_unlocked(path))


class Claim:
    """The exclusive right to add to the folder, among threads as among processes. The kernel releases it when a process dies."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CHANGES
        self._file: int | None = None

    def acquire(self) -> bool:
        """Whether it could be acquired without waiting. Raises OSError."""
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
    except FileNotFoundError:  # it has ended since
        return 1 << 62


def create_locked(path: Path) -> int:
    """A new file, open and locked. If another process removes it between the two, it is created again."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)


def remove_unlocked(path: Path) -> bool:
    """Removes a file unless a living process has it locked. Returns whether it is gone."""
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
