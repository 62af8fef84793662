"""The processes that share a folder of layers: who they are, and how far each has followed. Files and the kernel's locks, nothing else.

Each process holds a lock on a file of its own for as long as it lives, and writes into it the last change it has followed; the kernel lets
go of the lock when the process dies, however it dies, so that nobody waits for the dead. Changes are counted by the length of one more
file, to which each change appends a byte: appending is atomic, so that counting needs no lock. Who must be alone while it looks and then
writes has a claim, which is a lock on that file.
"""

import fcntl
import os
from pathlib import Path
from secrets import token_hex

CHANGES = ".changes"
BLOCK = 4096  # bytes: file systems give room to a file in multiples of this
PEER = ".peer-"


class Coordinator:
    """This process among those that share the folder. Blocking, but never for long: no call waits for a lock that a peer holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / f"{PEER}{token_hex(8)}"
        self._file: int | None = None

    def join(self) -> None:
        """From now on others wait for this process to follow. To be called before it looks at the folder for the first time."""
        self._file = create_locked(self._path)
        self.acknowledge(0)

    def leave(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def reserve(self) -> None:
        """Makes sure that a change can be announced once it has been made. Raises OSError where there is no room; then nothing may change.

        Counts as a change of nothing: so the file has the block that the next byte goes into.
        """
        if self.announce() % BLOCK == 0:
            self.announce()

    def announce(self) -> int:
        """Counts a change that has been made; its number, or a later one's."""
        file = os.open(self.folder / CHANGES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, b".")
            return os.fstat(file).st_size
        finally:
            os.close(file)

    @property
    def changes(self) -> int:
        """How many there have been. What is seen in the folder afterwards has all of them."""
        try:
            return (self.folder / CHANGES).stat().st_size
        except FileNotFoundError:
            return 0

    def acknowledge(self, change: int) -> None:
        """Tells the others that this process has followed up to that change."""
        if self._file is not None:
            os.pwrite(self._file, b"%020d" % change, 0)

    def behind(self, change: int) -> int:
        """How many of the other living processes have not followed it yet. The files of the dead are cleared away."""
        return sum(_followed(path) < change for path in self.folder.glob(f"{PEER}*") if path != self._path and not cleared(path))


class Claim:
    """The right to add to the folder, which one at a time has: among threads as among processes. The kernel takes it from the dead."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CHANGES
        self._file: int | None = None

    def taken(self) -> bool:
        """Takes it if nobody has it, without waiting. Raises OSError."""
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


def _followed(path: Path) -> int:
    try:
        return int(path.read_bytes() or b"0")
    except FileNotFoundError:  # it has left since
        return 1 << 62


def create_locked(path: Path) -> int:
    """A new file, open and locked. Whoever clears away what nobody locks may be faster than the lock; then it is made again."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)


def cleared(path: Path) -> bool:
    """Removes a file that no living process holds locked; false where one does."""
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
