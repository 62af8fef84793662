"""/metrics with several workers: any worker reports the sums over all living ones."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from support.processes import HalfSent, ask, attend, events, kill_one, only, several_workers, workers_of
from support.server import Server
from support.waiting import until

Start = Callable[..., Server]
DOCUMENT = {"layer": "more", "query": [[1.0, 2.0, 3.0, 4.0]]}
CALLS = 'attend_requests_total{endpoint="/attend",status="200"}'
REFUSED = 'attend_requests_total{endpoint="/attend",status="422"}'


def reported_metrics(url: str) -> Counter[str]:
    """Sample -> value, as reported by the worker that answers."""
    lines = [line for line in ask(url, path="/metrics").text.splitlines() if not line.startswith("#")]
    return Counter({name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)})  # type: ignore[misc]


@several_workers
def test_counters_of_all_workers_add_up(two_workers: Server) -> None:
    """Requests, refusals, bytes, phases, batches and calls to layers."""
    server = two_workers
    assert ask(server.url, "PUT", "/layers/more", json={"spec": {"d_model": 4, "num_heads": 2}}).status_code == 201
    before, sent, received = reported_metrics(server.url), 0, 0
    for count, worker in enumerate(workers_of(server.process.pid), 2):
        with only(worker, server.process.pid):
            for document in [DOCUMENT] * count + [{"layer": "more", "query": [[1.0]]}]:
                reply = ask(server.url, "POST", "/attend", json=document)
                sent, received = sent + len(reply.request.content), received + len(reply.content)
            # A worker counts a request after its reply, and must have written the count before it is stopped.
            until(lambda refused=count - 1: reported_metrics(server.url)[REFUSED] - before[REFUSED] == refused, "the last refusal counted")
    for worker in workers_of(server.process.pid):
        with only(worker, server.process.pid):
            grown = reported_metrics(server.url) - before
            assert grown[CALLS] == grown['attend_layer_calls_total{layer="more"}'] == grown["attend_batch_calls_sum"] == 5
            assert grown[REFUSED] == grown['attend_failures_total{reason="InvalidRequest"}'] == 2
            assert all(grown[f'attend_phase_seconds_count{{phase="{phase}"}}'] == 5 for phase in ("decode", "queue", "compute", "encode"))
            assert all(grown[f'attend_phase_seconds_bucket{{le="+Inf",phase="{phase}"}}'] == 5 for phase in ("decode", "encode"))
            assert grown['attend_layer_operations_total{layer="more"}'] % 5 == 0 < grown['attend_layer_operations_total{layer="more"}']
            assert grown["attend_received_bytes_total"] == sent
            assert grown["attend_sent_bytes_total"] >= received
    assert ask(server.url, "DELETE", "/layers/more").status_code == 204


@several_workers
def test_neither_broken_files_nor_a_full_folder_break_metrics_or_calls(start: Start, tmp_path: Path) -> None:
    """Each file has its bytes from the start, so that no count finds the disk full; a file that is not whole is left out."""
    (layers := tmp_path / "layers").mkdir()
    server = start("--workers", "2", "--layers-dir", str(layers), env={"TMPDIR": str(tmp_path)})
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    (folder,) = tmp_path.glob("attend-*")
    assert all(file.stat().st_size <= file.stat().st_blocks * 512 for file in folder.iterdir())
    for name in ("attend_phase_seconds@1-dead.histogram", "default@1-dead.calls", "counter_1.db", "gauge_livesum_1.db"):
        (folder / name).write_bytes(b"")
    (folder / "counter_2.db").write_bytes(b"\xff\0\0\0\0\0\0\0\x09")
    for worker in workers_of(server.process.pid):
        (folder / f"more@{worker}-full.calls").mkdir()  # a file that cannot be read
        with only(worker, server.process.pid):
            assert attend(server.url).status_code == 200
            until(lambda: reported_metrics(server.url)[CALLS] > 0, "counted")


@several_workers
def test_gauges_are_sums_over_all_workers(start: Start) -> None:
    """Waiting calls and bytes of bodies, also of a worker that is stopped while another one answers."""
    server = start("--workers", "2", "--batch-delay", "3")
    until(lambda: len(events(server, "ready")) == 2, "both ready")
    first, second = workers_of(server.process.pid)
    replies: list[httpx.Response] = []
    callers = [threading.Thread(target=lambda: replies.append(attend(server.url))) for _ in range(2)]
    halves = []
    for caller, worker, count in zip(callers, (first, second), (1, 2), strict=True):
        with only(worker, server.process.pid):
            halves.append(HalfSent(server.url))
            caller.start()
            until(lambda count=count: reported_metrics(server.url)["attend_queue_calls"] == count, "calls that wait")
            seen = reported_metrics(server.url)
            assert seen["attend_queue_operations"] > 0 < seen["attend_queue_bytes"]
            assert seen["attend_held_body_bytes"] >= count * len(halves[0].body)
    for caller in callers:
        caller.join()
    assert [half.finish()[0] for half in halves] == [200, 200] == [reply.status_code for reply in replies]
    idle = ("attend_queue_calls", "attend_queue_operations", "attend_queue_bytes", "attend_held_body_bytes")
    until(lambda: not any(reported_metrics(server.url)[name] for name in idle), "nothing waits")


@several_workers
def test_gauges_exclude_a_dead_worker(two_workers: Server) -> None:
    server, ready = two_workers, len(events(two_workers, "ready"))
    assert ask(server.url, "PUT", "/layers/more", json={"spec": {"d_model": 4, "num_heads": 2}}).status_code == 201
    for worker in workers_of(server.process.pid):
        with only(worker, server.process.pid):
            assert reported_metrics(server.url)["attend_layers"] == 2
    stays, _ = kill_one(server)
    until(lambda: len(events(server, "ready")) > ready, "ready again")
    assert ask(server.url, "DELETE", "/layers/more").status_code == 204
    assert reported_metrics(server.url)["attend_layers"] == 1
    with only(stays, server.process.pid):
        resident = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in workers_of(server.process.pid))
        assert reported_metrics(server.url)["attend_device_memory_bytes"] < 1.2 * resident * os.sysconf("SC_PAGE_SIZE")


@several_workers
def test_series_of_removed_layers_are_deleted(two_workers: Server) -> None:
    """Creating, calling and removing layers does not increase the number of series."""
    server, made = two_workers, {"json": {"spec": {"d_model": 4, "num_heads": 2}}}
    assert ask(server.url, "PUT", "/layers/second", **made).status_code == 201
    workers = workers_of(server.process.pid)
    ask(server.url, "POST", "/attend", json={**DOCUMENT, "layer": "default", "query": [[0.5] * 64]})
    series = []
    for name in ("a", "b", "c"):
        assert ask(server.url, "PUT", f"/layers/{name}", **made).status_code == 201
        refused = ask(server.url, "PUT", "/layers/surplus", **made)
        assert refused.status_code == 413 and "max_layers" in refused.json()["detail"]
        assert ask(server.url, "PUT", f"/layers/{name}", **made).status_code == 200, "replacing needs no room"
        for worker in workers:
            with only(worker, server.process.pid):
                assert ask(server.url, "POST", "/attend", json={**DOCUMENT, "layer": name}).status_code == 200
                assert f'attend_layer_calls_total{{layer="{name}"}}' in reported_metrics(server.url)
        assert ask(server.url, "DELETE", f"/layers/{name}").status_code == 204
        for worker in workers:
            with only(worker, server.process.pid):
                left = reported_metrics(server.url)
                assert not [sample for sample in left if f'"{name}"' in sample]
        series.append(len(left))
    assert series[1] == series[2]
    assert ask(server.url, "DELETE", "/layers/second").status_code == 204
