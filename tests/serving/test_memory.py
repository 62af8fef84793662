"""The memory of a process, the limit derived from the container's, and the watch that compares them."""

import asyncio
import os
from pathlib import Path

import pytest

from attend.serving.memory import SHARE, MemoryWatch, default_limit, resident_bytes


def test_the_limit_is_a_share_of_the_container_divided_among_processes(tmp_path: Path) -> None:
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert default_limit(1, tmp_path) == int(SHARE * everything)
    (tmp_path / "memory.max").write_text("max\n")
    assert default_limit(1, tmp_path) == int(SHARE * everything)
    (tmp_path / "memory.max").write_text(f"{1 << 28}\n")
    assert default_limit(3, tmp_path) == int(SHARE * (1 << 28)) // 3


@pytest.mark.parametrize(("statm", "pages"), [("1000 700 200 1 0 300 0\n", 500), (None, 0)])
def test_pages_of_files_do_not_count(tmp_path: Path, statm: str | None, pages: int) -> None:
    if statm is not None:
        (tmp_path / "statm").write_text(statm)
    assert resident_bytes(tmp_path / "statm") == pages * os.sysconf("SC_PAGE_SIZE")


def test_the_watch_reports_once_that_the_limit_is_exceeded() -> None:
    async def check() -> None:
        samples, reported = iter([90, 100, 101]), asyncio.get_running_loop().create_future()
        watch = MemoryWatch(100, reported.set_result, lambda: next(samples))
        assert await asyncio.wait_for(reported, 60) == 101
        watch.close()

    asyncio.run(check())
