"""Statistics with several workers: each counts its calls, and every worker reports the sum."""

import json
from typing import Any

import httpx
import numpy as np
from starlette.testclient import TestClient

from attend.settings import Settings
from attend.web.app import create_app
from support.processes import ask, events, kill_one, only, several_workers, workers_of
from support.server import Server
from support.v2 import in_json, read, refused
from support.waiting import until

QUERY = np.ones((2, 3, 4), np.float32)
SPEC = {"parameters": {"config": json.dumps({"d_model": 4, "num_heads": 2})}}


def infer(url: str, **parameters: Any) -> httpx.Response:
    return ask(url, "POST", "/v2/models/made/infer", json={"inputs": in_json(query=QUERY), "parameters": parameters})


def statistics(url: str, path: str = "/v2/models/made/stats") -> list[dict[str, Any]]:
    answer = ask(url, path=path)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["model_stats"])


def totals(url: str) -> tuple[int, int, int, int]:
    """Items, executions, answers, failures."""
    [found] = statistics(url)
    assert found in statistics(url, "/v2/models/stats")
    outcomes = found["inference_stats"]
    assert sum(batch["compute_infer"]["count"] for batch in found["batch_stats"]) == found["execution_count"]
    return found["inference_count"], found["execution_count"], outcomes["success"]["count"], outcomes["fail"]["count"]


@several_workers
def test_any_worker_reports_the_sum_including_ended_workers(two_workers: Server) -> None:
    server = two_workers
    assert "statistics" in ask(server.url, path="/v2").json()["extensions"]
    assert ask(server.url, "POST", "/v2/repository/models/made/load", json=SPEC).status_code == 200
    assert totals(server.url) == (0, 0, 0, 0)
    for turn, worker in enumerate(workers_of(server.process.pid)):
        with only(worker, server.process.pid):
            for _ in range(2 + turn):
                read(infer(server.url))
            refused(infer(server.url, temperature=1))  # none of the model's
            assert totals(server.url)[2] == (2, 5)[turn]
    for worker in workers_of(server.process.pid):
        with only(worker, server.process.pid):
            assert totals(server.url) == (10, 5, 5, 0)
            [found] = statistics(server.url)
            assert found["memory_usage"][0]["byte_size"] == 2 * 4 * (4 * 4 * 4 + 4 * 4)  # each has the model

    ready = len(events(server, "ready"))
    stays, replacement = kill_one(server)
    until(lambda: len(events(server, "ready")) > ready, "ready again")
    for worker in (stays, replacement):
        with only(worker, server.process.pid):
            assert totals(server.url) == (10, 5, 5, 0)
    assert ask(server.url, "DELETE", "/layers/made").status_code == 204


@several_workers
def test_statistics_restart_after_a_model_is_unloaded(two_workers: Server) -> None:
    """Also if a worker with counts has ended, and if the worker that unloads has no counts."""
    server = two_workers
    assert ask(server.url, "POST", "/v2/repository/models/made/load", json=SPEC).status_code == 200
    for worker in workers_of(server.process.pid):
        with only(worker, server.process.pid):
            read(infer(server.url))
    ready = len(events(server, "ready"))
    kill_one(server)
    until(lambda: len(events(server, "ready")) > ready, "ready again")
    assert totals(server.url) == (4, 2, 2, 0)

    assert ask(server.url, "POST", "/v2/repository/models/made/unload").status_code == 200
    assert ask(server.url, "POST", "/v2/repository/models/made/load", json=SPEC).status_code == 200

    assert totals(server.url) == (0, 0, 0, 0)
    read(infer(server.url))
    assert totals(server.url) == (2, 1, 1, 0)
    assert ask(server.url, "DELETE", "/layers/made").status_code == 204


@several_workers
def test_all_workers_list_the_same_models(two_workers: Server) -> None:
    """Loaded by one, READY on all; unloaded, UNAVAILABLE; removed, absent."""
    server = two_workers
    repository, ready, unloaded = "/v2/repository/models/made", ("made", "READY"), ("made", "UNAVAILABLE")
    for method, path, body, shown in (
        ("POST", f"{repository}/load", SPEC, {ready}),
        ("POST", f"{repository}/unload", {}, {unloaded}),
        ("POST", f"{repository}/load", {}, {ready}),
        ("POST", f"{repository}/unload", {}, {unloaded}),
        ("DELETE", "/layers/made", None, set()),
    ):
        assert ask(server.url, method, path, json=body).is_success
        for worker in workers_of(server.process.pid):
            with only(worker, server.process.pid):
                index = ask(server.url, "POST", "/v2/repository/index").json()
                assert {(entry["name"], entry["state"]) for entry in index} == {("default", "READY"), *shown}


def test_workers_without_a_shared_folder_have_no_statistics() -> None:
    """Under another process manager there is no folder: statistics are refused instead of wrong."""
    with TestClient(create_app(Settings(workers=2)), base_url="http://127.0.0.1") as several:
        until(lambda: several.get("/health/ready").status_code == 200, "ready")
        assert "statistics" not in several.get("/v2").json()["extensions"]
        for path in ("/v2/models/stats", "/v2/models/default/stats"):
            assert "shared folder" in refused(several.get(path), 409)
