"""Numbers that several processes count, each in a file of its own in a folder that they share, so that any can tell the sum. Files alone.

A file is a list of records of one size, each written at once, at its place: whoever reads finds the last state of every record, and need
not ask anybody. What a process has counted stays when it dies; the folder goes with the server.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

NAME = 64  # bytes of a layer's name, at most
PREFIX = "counters-"


class SharedCounters:
    """One process's file, and the sight of all. A record has a layer's name, a key, and `width` numbers. Blocking, but never for long."""

    def __init__(self, folder: Path, width: int, prefix: str = PREFIX) -> None:
        """Counters of one `prefix` are read together, and have one width."""
        self.folder, self._prefix, self._record = folder, prefix, struct.Struct(f"<{NAME}s{1 + width}q")
        path = folder / f"{prefix}{os.getpid()}-{token_hex(4)}"  # numbers of processes come again
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._places: dict[tuple[str, int], int] = {}
        self._free: list[int] = []  # places of records that were forgotten
        self._end = 0

    def write(self, layer: str, key: int, numbers: tuple[int, ...]) -> None:
        """The record is these numbers from now on; nothing happens once it is closed, as late calls may still come to their end."""
        if self._file is None:
            return
        if (place := self._places.get((layer, key))) is None:
            place = self._places[layer, key] = self._free.pop() if self._free else self._end
            self._end = max(self._end, place + self._record.size)
        os.pwrite(self._file, self._record.pack(layer.encode(), key, *numbers), place)

    def read(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Layer, key and numbers of every record of all processes."""
        for path in self.folder.glob(f"{self._prefix}*"):
            for _, layer, key, numbers in self._records(path):
                yield layer, key, numbers

    def forget(self, layer: str) -> None:
        """Removes the layer's records: this process's, and those of the dead. The living forget for themselves."""
        if self._file is None:
            return
        for name, key in [known for known in self._places if known[0] == layer]:
            place = self._places.pop((name, key))
            os.pwrite(self._file, bytes(self._record.size), place)
            self._free.append(place)
        for path in self.folder.glob(f"{self._prefix}*"):
            if not _lives(int(path.name.split("-")[1])):
                with path.open("r+b") as file:
                    for place, name, _, _ in self._records(path):
                        if name == layer:
                            os.pwrite(file.fileno(), bytes(self._record.size), place)

    def close(self) -> None:
        """The numbers stay."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _records(self, path: Path) -> Iterator[tuple[int, str, int, tuple[int, ...]]]:
        """Place, layer, key and numbers of the records in one file; a record of zeros is none."""
        text, size = path.read_bytes(), self._record.size
        for place in range(0, len(text) - size + 1, size):
            name, key, *numbers = self._record.unpack_from(text, place)
            if layer := name.rstrip(b"\0").decode():
                yield place, layer, key, tuple(numbers)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
