"""Rule 11: workers times threads never exceed the usable cores, and the number of threads is set before torch starts its pool."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.serving.threads import plan_threads, prepare_torch, usable_cores

Limit = Callable[[dict[str, str]], Path]


@pytest.fixture
def cgroup(tmp_path: Path) -> Limit:
    """A cgroup file system with these files in it."""

    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretends that this process is pinned to that many cores."""
    return lambda cores: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)


def version_1(quota: str, period: str = "100000") -> dict[str, str]:
    return {"cpu/cpu.cfs_quota_us": quota + "\n", "cpu/cpu.cfs_period_us": period + "\n"}


def version_2(quota: str, period: str = "100000") -> dict[str, str]:
    return {"cpu.max": f"{quota} {period}\n"}


# Usable cores


@pytest.mark.parametrize("write", [version_1, version_2])
@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [
        ("400000", "100000", 4),
        ("100000", "100000", 1),
        ("800000", "100000", 8),
        ("4000000", "100000", 8),
        ("200000", "50000", 4),
        ("350000", "100000", 3),
        ("199999", "100000", 1),
        ("50000", "100000", 1),
        ("1000", "100000", 1),
    ],
)
def test_rule_11_a_quota_bounds_the_cores(
    cgroup: Limit, affinity: Callable[[int], None], write: Callable[[str, str], dict[str, str]], quota: str, period: str, cores: int
) -> None:
    """On eight cores: the quota rounded down to whole cores, but at least one."""
    affinity(8)
    assert usable_cores(cgroup(write(quota, period))) == cores


@pytest.mark.parametrize("cores", [1, 3, 40])
@pytest.mark.parametrize(
    "files",
    [
        pytest.param({}, id="no cgroup"),
        pytest.param(version_2("max"), id="version 2, no limit"),
        pytest.param(version_1("-1"), id="version 1, no limit"),
        pytest.param({"cpu.max": ""}, id="empty"),
        pytest.param({"cpu.max": "max\n"}, id="half a line"),
        pytest.param({"cpu.max": "100000 0\n"}, id="a period of nothing"),
        pytest.param({"cpu.max": "many 100000\n"}, id="words"),
        pytest.param({"cpu/cpu.cfs_quota_us": "100000\n"}, id="version 1, no period"),
        pytest.param({"cpu/cpu.cfs_quota_us": "\n", "cpu/cpu.cfs_period_us": "\n"}, id="version 1, empty"),
    ],
)
def test_rule_11_without_a_quota_the_affinity_counts(
    cgroup: Limit, affinity: Callable[[int], None], files: dict[str, str], cores: int
) -> None:
    """No limit, or an unreadable one."""
    affinity(cores)
    assert usable_cores(cgroup(files)) == cores


def test_rule_11_the_lesser_of_quota_and_affinity_counts(cgroup: Limit, affinity: Callable[[int], None]) -> None:
    affinity(2)
    assert usable_cores(cgroup(version_2("600000"))) == 2


def test_rule_11_cgroup_version_2_takes_precedence(cgroup: Limit, affinity: Callable[[int], None]) -> None:
    """Where both are mounted."""
    affinity(8)
    assert usable_cores(cgroup({**version_1("700000"), **version_2("200000")})) == 2


def test_rule_11_without_affinity_the_number_of_processors_counts(cgroup: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS; one core where even that is unknown."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cores(cgroup({})) == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(cgroup({})) == 1


def test_rule_11_usable_cores_of_this_machine() -> None:
    """Not more than the kernel reports."""
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


# Planned threads


@pytest.mark.parametrize(
    ("workers", "threads", "cores", "planned"),
    [
        (1, None, 8, 8),
        (2, None, 8, 4),
        (3, None, 8, 2),
        (8, None, 8, 1),
        (1, 3, 8, 3),
        (2, 4, 8, 4),
        (8, 1, 8, 1),
        (1, 1, 1, 1),
        (1, None, 1, 1),
    ],
)
def test_rule_11_workers_get_equal_shares_of_the_cores(workers: int, threads: int | None, cores: int, planned: int) -> None:
    """One worker gets all cores. A requested number is used if it fits."""
    assert plan_threads(workers, threads, cores) == planned


@pytest.mark.parametrize(("workers", "threads", "cores"), [(9, None, 8), (2, None, 1), (2, 5, 8), (1, 9, 8), (9, 1, 8), (3, 3, 8)])
def test_rule_11_a_plan_beyond_the_cores_is_refused(workers: int, threads: int | None, cores: int) -> None:
    """Before anything starts, with the numbers."""
    with pytest.raises(ValueError, match=rf"{workers} workers .* the {cores} cores"):
        plan_threads(workers, threads, cores)


@given(st.integers(1, 64), st.none() | st.integers(1, 64), st.integers(1, 64))
def test_rule_11_no_plan_exceeds_the_cores(workers: int, threads: int | None, cores: int) -> None:
    try:
        planned = plan_threads(workers, threads, cores)
    except ValueError:
        assert workers * (threads or 1) > cores
        return
    assert 1 <= planned * workers <= cores
    assert planned == threads or (threads is None and (planned + 1) * workers > cores)


# torch's threads


def test_rule_11_threads_are_planned_before_torch_is_imported() -> None:
    """torch's pool takes the size that it finds when it starts."""
    script = """
import os, sys
import attend.cli
import attend.cli.serve as serve

def spied(*args, **knobs):
    print("torch" in sys.modules, "numpy" in sys.modules, os.environ.get("OMP_NUM_THREADS"))
    return real(*args, **knobs)

real, serve.plan_threads = serve.plan_threads, spied
sys.argv = ["attend", "serve", "--threads", "4096"]
attend.cli.main()
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split()[:1] == ["False"], done.stdout + done.stderr
    assert done.returncode == 2


def test_rule_11_torch_uses_the_planned_number_of_threads() -> None:
    """On any thread of the serving process, also where it is not torch's default."""
    script = """
import concurrent.futures, os, sys
import attend.cli
import attend.cli.serve as serve

def planned(*_):
    return 3

def stop(settings, threads, listening):
    import torch
    from attend.cli import server
    listening.close()
    server.application(settings, threads, {})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        print(threads, torch.get_num_threads(), pool.submit(torch.get_num_threads).result())
    raise SystemExit(0)

serve.plan_threads = planned
import attend.cli.processes
attend.cli.processes.serve_processes = stop
sys.argv = ["attend", "serve", "--port", "0"]
attend.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3", "3", "3"], done.stdout + done.stderr


# What torch's libraries read from the environment


@pytest.mark.parametrize(
    ("vendor", "chosen", "mode"),
    [("AuthenticAMD", None, "AUTO,STRICT"), ("GenuineIntel", None, None), ("AuthenticAMD", "COMPATIBLE", "COMPATIBLE"), (None, None, None)],
)
def test_products_do_not_depend_on_alignment_on_amd_unless_the_operator_chooses(
    tmp_path: Path, vendor: str | None, chosen: str | None, mode: str | None
) -> None:
    """`vendor`: that in /proc/cpuinfo; None if there is no such file."""
    if vendor is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    with mock.patch.dict(os.environ):
        os.environ.pop("MKL_CBWR", None)
        if chosen is not None:
            os.environ["MKL_CBWR"] = chosen
        prepare_torch(3, tmp_path / "cpuinfo")
        assert (os.environ["OMP_NUM_THREADS"], os.environ.get("MKL_CBWR")) == ("3", mode)
