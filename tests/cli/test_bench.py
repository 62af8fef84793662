"""`attend bench` against real servers, briefly: what is printed, what is counted, what it says of servers that do not answer well."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
from command import run_attend

from service.cli.load import MEDIA, PHASES, Case, Load
from service.cli.measurements import BODY_SIZES, KB, case_of, measure_floor
from service.cli.stage import Stage, find_stage, pinned
from service.client import Unreachable
from service.wire.documents import AttendRequest
from service.wire.forms import FORMS
from service.wire.limits import WireLimits

FIGURES = {"requests", "bad", "seconds", "rate", "p50_ms", "p99_ms", "failure", *(f"{phase}_ms" for phase in PHASES)}
SMALL = Case("small", (1, 16, 64), 8)


def bench(*arguments: str, code: int = 0) -> dict[str, Any]:
    """What `attend bench --json` prints."""
    done = run_attend("bench", "--json", *arguments)
    assert done.returncode == code, done.stderr.decode()
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def check_figures(row: dict[str, Any]) -> None:
    """A row of good replies: complete, ordered, and adding up."""
    assert row.keys() >= FIGURES
    assert row["bad"] == 0 and row["failure"] == ""
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert row["rate"] * row["seconds"] == pytest.approx(row["requests"])
    assert 0 < sum(row[f"{phase}_ms"] for phase in PHASES) < row["seconds"] * 1e3


def test_throughput_of_a_server_of_its_own():
    document = bench("--sizes", "small", "--connections", "1,3", "--seconds", "0.2")
    rows, about = document["throughput"], document["about"]
    assert [(row["size"], row["form"], row["connections"]) for row in rows] == [("small", form, n) for form in MEDIA for n in (1, 3)]
    for row in rows:
        check_figures(row)
        assert row["requests"] >= row["connections"] and row["seconds"] >= 0.2
        assert row["of_floor"] == pytest.approx(row["rate"] / row["floor"])
    assert rows[0]["floor"] == rows[1]["floor"] != rows[2]["floor"]
    assert {"attend", "torch", "numpy", "python", "processor", "cores", "device"} <= about.keys() and about["url"] is None
    assert not set(about["server_cores"]) & set(about["load_cores"])
    if about["cores"] > 1:
        assert (len(about["server_cores"]), about["threads"]) == (1, 1) and about["load_cores"]


def test_throughput_of_a_running_server(server, http):
    """One size has its layer there; for the other one is made, and removed."""
    before = http.get("/layers").json()
    document = bench("--sizes", "small,mid", "--forms", "safetensors", "--connections", "2", "--seconds", "0.2", "--url", server.url)
    assert [row["size"] for row in document["throughput"]] == ["small", "mid"]
    for row in document["throughput"]:
        check_figures(row)
    assert document["about"]["url"] == server.url and document["about"]["threads"] == http.get("/").json()["threads"]
    assert http.get("/layers").json() == before


def test_tables(server):
    arguments = ["bench", "--sizes", "small", "--forms", "base64", "--connections", "2", "--seconds", "0.05", "--url", server.url]
    about, *lines = run_attend(*arguments).stdout.decode().splitlines()
    assert about.startswith("attend 0") and f"; server at {server.url}; cpu, threads: " in about
    headings = [" ".join(lines[i].split()) for i in (1, 2)]
    assert headings[1].startswith("size form connections req/s ms ms ms ms ms ms floor/s floor bad")
    assert any(line.split()[:3] == ["small", "base64", "2"] and len(line.split()) == 13 for line in lines)

    _, _, titles, dashes, row = run_attend(*arguments, "--markdown").stdout.decode().splitlines()
    assert titles.startswith("| size | form | connections | req/s | p50 ms | p99 ms | decode ms |")
    assert row.startswith("| small | base64 | 2 | ") and row.endswith(" | 0 |")
    assert titles.count("|") == dashes.count("|") == row.count("|") == 14


def test_replies_that_are_refusals_are_bad(server):
    """Bodies larger than this server takes: all of them, and some of its answers come before it was asked to the end."""
    arguments = ["--sizes", "mid", "--forms", "base64,safetensors", "--connections", "3", "--seconds", "0.2", "--url", server.url]
    refused, taken = bench(*arguments, code=1)["throughput"]
    check_figures(taken)
    assert refused["requests"] == refused["bad"] >= 3 and refused["rate"] == 0
    assert refused["p50_ms"] is refused["p99_ms"] is refused["decode_ms"] is None
    assert refused["failure"].startswith("HTTP/1.1 413 ") and "max_body_bytes" in refused["failure"]

    done = run_attend("bench", *arguments, "--markdown")
    assert done.returncode == 1
    assert "requests were not answered as they should be" in done.stderr.decode() and "HTTP/1.1 413 " in done.stderr.decode()
    assert done.stdout.decode().splitlines()[-2].endswith("** |")


def test_a_layer_that_takes_no_such_call(start):
    """A server that refuses the work, not the bytes."""
    url = start("--max-scores", "100").url
    [row] = bench("--sizes", "small", "--forms", "json", "--connections", "1", "--seconds", "0.1", "--url", url, code=1)["throughput"]
    assert row["requests"] == row["bad"] > 0 and "max_scores" in row["failure"]


def test_growth_of_a_running_server(server):
    rows = bench("--growth", "--largest", "1", "--seconds", "0.05", "--url", server.url)["growth"]
    assert [(row["form"], row["size"]) for row in rows] == [(form, size) for form in ("json", "safetensors") for size in BODY_SIZES[:4]]
    for row in rows:
        check_figures(row)
        assert row["requests"] >= 3
        assert row["ns_per_byte"] == pytest.approx(row["p50_ms"] * 1e6 / row["bytes"])
        assert row["peak_bytes"] is row["peak_to_body"] is row["idle_bytes"] is None  # not ours to look at
        megabyte = next(other for other in rows if other["form"] == row["form"] and other["size"] == 1_000_000)
        assert row["to_1mb"] == pytest.approx(row["ns_per_byte"] / megabyte["ns_per_byte"])

    arguments = ["--growth", "--largest", "0.001", "--forms", "json", "--seconds", "0.05", "--url", server.url, "--markdown"]
    [*_, row] = run_attend("bench", *arguments).stdout.decode().splitlines()
    assert row.startswith("| json | 0.") and " | 1x1x64 | " in row and row.endswith(" | - | - | 0 |")


def test_growth_of_servers_of_its_own():
    [row] = bench("--growth", "--largest", "0.001", "--forms", "base64", "--seconds", "0.05")["growth"]
    check_figures(row)
    assert row["form"] == "base64" and row["to_1mb"] is None
    assert row["idle_bytes"] > 50_000_000  # torch and all
    assert 0 <= row["peak_bytes"] < row["idle_bytes"] and row["peak_to_body"] == pytest.approx(row["peak_bytes"] / row["bytes"])


def test_health_under_load():
    document = bench("--health", "--seconds", "0.2")
    [row] = document["health"]
    assert row["bad"] == row["load_bad"] == 0 and row["requests"] > 0 and row["load_requests"] >= row["load_connections"] == 4
    assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert row["load_bytes"] == pytest.approx(8e6, rel=0.05)
    assert set(document) == {"about", "health"}


def test_what_the_client_adds_to_httpx(server):
    document = bench("--client", "--sizes", "small,mid", "--seconds", "0.2", "--url", server.url)
    assert set(document) == {"about", "client"} and [row["size"] for row in document["client"]] == ["small", "mid"]
    for row in document["client"]:
        assert row["requests"] >= 6 and row["bad"] == 0 and min(row["httpx_ms"], row["client_ms"]) > 0
        assert row["added_ms"] == pytest.approx(row["client_ms"] - row["httpx_ms"], abs=1e-9)
        assert row["to_httpx"] == pytest.approx(row["client_ms"] / row["httpx_ms"])
    own = run_attend("bench", "--client", "--sizes", "small", "--seconds", "0.05", "--markdown").stdout.decode().splitlines()
    assert own[-3] == "| size | requests | httpx ms | client ms | added ms | of httpx |" and own[-1].startswith("| small | ")


def test_a_refusal_ends_the_comparison(start):
    done = run_attend("bench", "--client", "--sizes", "small", "--seconds", "0.1", "--url", start("--max-scores", "100").url)
    assert done.returncode == 1 and b"max_scores" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "small,huge"], "expected some of small, mid, large, got 'huge'"),
        (["--sizes", ","], "expected some of small, mid, large, got ''"),
        (["--forms", "xml"], "expected some of json, safetensors, base64, got 'xml'"),
        (["--connections", "0"], "expected some of numbers from 1 to 1024, got '0'"),
        (["--connections", "1.5"], "got '1.5'"),
        (["--seconds", "0"], "--seconds"),
        (["--url", "127.0.0.1:8000"], "expected http://"),
        (["--url", "https://127.0.0.1:8000"], "expected http://"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments, said):
    done = run_attend("bench", *arguments, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 2 and said in done.stderr.decode()


def test_where_no_server_of_ours_is(server):
    done = run_attend("bench", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1 and done.stderr.startswith(b"attend bench: no answer from http://127.0.0.1:1")
    done = run_attend("bench", "--url", f"{server.url}/layers/default?x=")
    assert done.returncode == 1 and b"expected the index of a server" in done.stderr


# --- its parts ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", MEDIA)
def test_every_form_holds_the_same_numbers(form):
    bodies = SMALL.bodies(form, "default")
    assert bodies == SMALL.bodies(form, "default") and len(set(bodies)) == len(bodies) == 8
    rng = np.random.default_rng(0)
    for body in bodies:
        fields = FORMS[MEDIA[form]].parse(body, AttendRequest.tensors, WireLimits())
        assert fields["layer"] == "default"
        for name in ("query", "key", "value"):
            np.testing.assert_array_equal(fields[name].astype(np.float32), rng.standard_normal((1, 16, 64), np.float32))


@pytest.mark.parametrize("form", MEDIA)
@pytest.mark.parametrize("size", BODY_SIZES[:-1])
def test_bodies_have_about_the_size_that_is_asked_for(form, size):
    case = case_of(size, form)
    assert 0.5 < len(case.bodies(form, "default")[0]) / size < 1.5
    assert case.shape[-1] == (64 if size == KB else 512) and (case.shape[0] == 1 or case.shape[1] == 128)


def test_the_floor_goes_the_whole_way(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for form in MEDIA:
        assert measure_floor(SMALL, form, 0.01, "cpu") > 0


def test_there_is_no_floor_of_another_machine():
    with Stage("http://somewhere.example", 1).bench() as process:
        assert process is None


def test_a_place_on_the_cores_is_given_back():
    before = os.sched_getaffinity(0)
    with pinned(frozenset([min(before)])):
        assert os.sched_getaffinity(0) == {min(before)}
        assert find_stage(None) == Stage(None, 1)  # one core has room for no two
    assert os.sched_getaffinity(0) == before


@pytest.fixture
def scripted() -> Iterator[Callable[[bytes], str]]:
    """Servers that read one request of 3 bytes, answer what they are told, and hang up; again and again."""
    listening: list[socket.socket] = []
    threads: list[Thread] = []

    def answer(door: socket.socket, reply: bytes) -> None:
        while True:
            try:
                connection, _ = door.accept()
            except OSError:
                return
            with connection:
                request = b""
                while not request.endswith(b"\r\n\r\nabc"):
                    request += connection.recv(4096) or b"\r\n\r\nabc"
                connection.sendall(reply)

    def begin(reply: bytes) -> str:
        listening.append(socket.create_server(("127.0.0.1", 0)))
        threads.append(Thread(target=answer, args=(listening[-1], reply)))
        threads[-1].start()
        return f"http://127.0.0.1:{listening[-1].getsockname()[1]}"

    yield begin
    for door, thread in zip(listening, threads, strict=True):
        door.shutdown(socket.SHUT_RDWR)
        door.close()
        thread.join()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nServer-Timing: decode;dur=2, queue;dur=0.5\r\nConnection: close\r\n\r\n{}"


def test_a_connection_that_is_closed_is_opened_again(scripted):
    replies = Load(scripted(OK), [b"abc"], "json", 2).run(0, least=6)
    figures = replies.figures()
    assert (figures["requests"], figures["bad"]) == (6, 0)
    assert (figures["decode_ms"], figures["queue_ms"], figures["compute_ms"]) == (2, 0.5, None)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (OK.replace(b"200 OK", b"500 Oh no"), "HTTP/1.1 500 Oh no: {}"),
        (OK[:-1], "closed before the reply was whole"),
        (OK[:30], "closed before the reply was whole"),
        (b"", "closed before the reply was whole"),
        (OK + b"more", "more came than Content-Length said"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "expected a reply with Content-Length"),
        (b"something else altogether\r\n\r\n", "expected a reply with Content-Length"),
    ],
)
def test_what_is_no_good_reply_is_bad(scripted, reply, said):
    replies = Load(scripted(reply), [b"abc"], "json", 1).run(0, least=2)
    assert (replies.bad, replies.latencies) == (2, []) and said in replies.failure


def test_nobody_listens():
    with pytest.raises(Unreachable, match=r"no answer from 127\.0\.0\.1:1: "):
        Load("http://127.0.0.1:1", [b"abc"], "json", 1).run(0)


def test_a_server_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr("service.cli.load.STALLED", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as door:
        replies = Load(f"http://127.0.0.1:{door.getsockname()[1]}", [b"abc"], "json", 3).run(0, least=3)
    assert (replies.bad, replies.latencies, replies.failure) == (3, [], "no answer in 0.05 seconds")
