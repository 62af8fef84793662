"""Counts in files that processes share: whole files, broken files, and no room for a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attend.serving.metrics import PlainHistogram
from attend.serving.shared_counts import are_shared, new_counts, read_counts
from attend.serving.statistics import LayerStatistics
from support.layer_statistics import count, started

SHAPE = (3, 5)


def no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_has_all_its_bytes_when_it_is_made(tmp_path: Path) -> None:
    """A write to a mapped page without a block of the disk would end the process if the disk is full."""
    counts = new_counts(tmp_path / "counts", (64, 512))
    about = (tmp_path / "counts").stat()
    assert about.st_size == 64 * 512 * 8 <= about.st_blocks * 512
    counts[63, 511] = 7
    assert are_shared(counts) and read_counts(tmp_path / "counts", (64, 512))[63, 511] == 7


@pytest.mark.parametrize("content", [None, b"", b"\0" * 8, b"\0" * 119, b"\1" * 128], ids=["missing", "empty", "begun", "cut", "longer"])
def test_a_file_that_is_not_whole_counts_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "counts").write_bytes(content)
    np.testing.assert_array_equal(read_counts(tmp_path / "counts", SHAPE), np.zeros(SHAPE))


def test_without_room_for_a_file_a_process_counts_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own sums include what it counts there, beside the files of the others."""
    other = started(tmp_path, 1.0)
    count(other)
    monkeypatch.setattr(Path, "write_bytes", no_room)
    full, alone = started(tmp_path, 1.0), started(None, 1.0)
    for statistics in (full, alone, alone):
        count(statistics)
    assert full.all() == alone.all() != other.all()
    assert list(tmp_path.glob("*")) == list(tmp_path.glob("*@*.calls")) != []
    histogram = PlainHistogram("seconds", "", (1.0,), tmp_path)
    histogram.observe(2.0)
    (family,) = histogram.collect()
    assert [sample.value for sample in family.samples if sample.name == "seconds_count"] == [1]


def test_broken_files_of_calls_change_no_sum(tmp_path: Path) -> None:
    statistics = started(tmp_path, 1.0)
    count(statistics)
    before = statistics.all()
    (tmp_path / "a@1-dead.calls").write_bytes(b"")
    assert statistics.all() == before
    assert LayerStatistics(tmp_path).all() == before
