"""Invalid HTTP, slow clients, disconnects, long replies and a thousand connections, on a real server with real sockets.

No test sleeps: the server ends connections, and the test reads until then. The tests set the timer's clock.
"""

import asyncio
import json
import resource
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
import trustme
import uvicorn
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.server import ServerState

from attend.client.connection import LIMITS
from attend.settings import Settings
from attend.web.connections import CONNECTION_KEY, OPTIONS_KEY, SEND_BYTES, TURN_BYTES, Connection, ConnectionOptions
from attend.web.slow_peers import SlowPeerTimer
from support.raw_http import BODY, HEAD, connect, failures, held_bytes, read_to_end, refusal, requests
from support.server import Server
from support.waiting import PATIENCE, until

MANY = 1000


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"POST /attend HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"0" * 4300 + b"2\r\n\r\n{}",
    ],
    ids=["no request", "TLS", "no header", "no version", "no target", "length of 4301 digits"],
)
def test_malformed_http_gets_a_problem_document(short_timeout_server: Server, sent: bytes) -> None:
    before, refused = failures(short_timeout_server, "malformed_http"), requests(short_timeout_server, "other", 400)
    with connect(short_timeout_server) as connection:
        connection.sendall(sent)
        document = refusal(read_to_end(connection))
    assert document["status"] == 400
    assert "HTTP/1.1" in document["detail"]
    assert failures(short_timeout_server, "malformed_http") == before + 1 and requests(short_timeout_server, "other", 400) == refused + 1
    assert short_timeout_server.access_line(document["request_id"])["reason"] == "malformed_http"


@pytest.mark.parametrize("version", ["0.9", "2.0", "3.7"])
@pytest.mark.parametrize("before", [b"", HEAD % len(BODY) + BODY], ids=["first", "behind another"])
def test_unsupported_http_versions_are_refused(short_timeout_server: Server, version: str, before: bytes) -> None:
    """In HTTP/1.1."""
    counts = failures(short_timeout_server, "unsupported_version")
    with connect(short_timeout_server) as connection:
        connection.sendall(before + f"GET /health/live HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
        _, start, rest = read_to_end(connection).rpartition(b"HTTP/1.1 505")
    document = refusal(start + rest)
    assert document["status"] == 505
    assert f"HTTP/{version}" in document["detail"]
    assert failures(short_timeout_server, "unsupported_version") == counts + 1


def test_a_later_minor_version_is_read_as_http_1_1(start: Callable[..., Server]) -> None:
    """With the rules of HTTP/1.1: the connection stays open, and each request needs a Host."""
    server = start("--allowed-hosts", "localhost")
    with connect(server) as connection:
        connection.sendall(b"GET /health/live HTTP/1.2\r\nHost: localhost\r\n\r\nGET /health/live HTTP/1.2\r\nConnection: close\r\n\r\n")
        first, _, second = read_to_end(connection).rpartition(b"HTTP/1.1 ")
    assert first.startswith(b"HTTP/1.1 200 ") and second.startswith(b"400 ")


@pytest.mark.parametrize(
    "part",
    [b"1;" + b"x" * 4096 + b"\r\n \r\n", b"1;" + b"x" * 4_000_000, b"0\r\n" + b"X: y\r\n" * 1_000_000],
    ids=["many extensions", "one without an end", "trailers"],
)
def test_chunk_headers_are_bounded_by_the_size_of_the_body(server: Server, part: bytes) -> None:
    before, refused = failures(server, "long_chunk_headers"), requests(server, "/attend", 400)
    with connect(server) as connection, suppress(ConnectionError):
        connection.sendall(b"POST /attend HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(1000):
            connection.sendall(part)
        assert refusal(read_to_end(connection))["status"] == 400
    assert failures(server, "long_chunk_headers") == before + 1
    until(lambda: requests(server, "/attend", 400) > refused, "the refusal is counted")


def test_chunks_of_one_byte_are_allowed(server: Server) -> None:
    """They are smaller than their headers."""
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 50_000) + b"0\r\nX-Trailer: y\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(b"POST /attend HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_a_refused_client_that_sends_chunks_receives_the_refusal(server: Server) -> None:
    """The server reads the rest of the body before it closes the connection."""
    chunks = b"".join(b"10000\r\n" + bytes(1 << 16) + b"\r\n" for _ in range(256)) + b"0\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert read_to_end(connection).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD.replace(b"localhost", b"example.com"), b"403"),
        (HEAD.replace(b"/attend", b"/nowhere"), b"404"),
        (HEAD[:-2] + b"Content-Type: text/plain\r\n\r\n", b"415"),
    ],
    ids=["a Host that is not served", "no endpoint", "another media type"],
)
def test_a_refusal_does_not_wait_for_the_body(server: Server, short_timeout_server: Server, head: bytes, status: bytes) -> None:
    """The rest of the body is read behind it, and then the next request. If the client stops in the body, nothing more is sent to it."""
    with connect(server) as connection:
        connection.sendall(head % len(BODY) + BODY[:10])
        answer, size = b"", None
        while size is None or len(answer) < size:
            answer += connection.recv(1 << 16)
            if size is None and b"\r\n\r\n" in answer:
                size = answer.index(b"\r\n\r\n") + 4 + int(answer.partition(b"content-length: ")[2].split()[0])
        assert answer.startswith(b"HTTP/1.1 %b " % status)
        connection.sendall(BODY[10:] + b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")
    slow = failures(short_timeout_server, "slow_body")
    with connect(short_timeout_server) as connection:
        connection.sendall(head % len(BODY) + BODY[:10])
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 %b " % status) and answer.count(b"HTTP/1.1 ") == 1
    assert failures(short_timeout_server, "slow_body") == slow


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "rest",
    [b"garbage\r\n\r\n", b"POST /attend HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n"],
    ids=["no request", "a broken body"],
)
def test_requests_before_a_malformed_one_are_answered(short_timeout_server: Server, rest: bytes, count: int) -> None:
    """In one packet: every complete request gets its reply, then the malformed one a refusal, then the connection ends."""
    with connect(short_timeout_server) as connection:
        connection.sendall((HEAD % len(BODY) + BODY) * count + rest)
        left = read_to_end(connection)
    for _ in range(count):
        head, _, left = left.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        length = int(head.partition(b"content-length: ")[2].split()[0])
        assert np.shape(json.loads(left[:length])["output"]) == (3, 64)
        left = left[length:]
    assert refusal(left)["status"] == 400


@pytest.mark.parametrize("end", [b"", b"\r\nX: "], ids=["one header", "many headers"])
def test_endless_headers_are_refused(server: Server, end: bytes) -> None:
    """The refusal arrives although the client is still sending."""
    before, refused = failures(server, "long_headers"), requests(server, "other", 431)
    with connect(server) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX: ")
        for _ in range(4000):  # 16 MB, which are read and dropped: closing at once would reset the connection before the refusal is read
            connection.sendall(b"a" * 4096 + end)
        assert refusal(read_to_end(connection))["status"] == 431
    assert failures(server, "long_headers") == before + 1 and requests(server, "other", 431) == refused + 1
    with httpx.Client(base_url=server.url) as one:  # long headers, and long bodies after short ones, are allowed
        assert one.get("/health/live", headers={"X": "a" * 20_000}).status_code == 200
        for size in (1 << 10, 1 << 17, 1 << 20, 3 << 20):
            assert one.post("/attend", content=b" " * size + BODY).status_code == 200


@pytest.mark.parametrize(
    "upgrade",
    [b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk", b"connection: upgrade\r\nUPGRADE: websocket"],
    ids=["HTTP/2", "WebSocket"],
)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [1, 1 << 16], ids=["byte by byte", "whole"])
def test_the_header_upgrade_is_ignored(server: Server, upgrade: bytes, chunked: bool, size: int) -> None:
    """The body is read as a body, in whatever pieces it arrives; later requests on the connection are answered."""
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(BODY)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    sent = b"POST /attend HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n" + framing + b"\r\n\r\n" + body
    last = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close, upgrade\r\nUpgrade: h2c\r\n\r\n"
    with connect(server) as connection:
        for start in range(0, len(sent + last), size):
            connection.sendall((sent + last)[start : start + size])
        head, _, left = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    length = int(head.partition(b"content-length: ")[2].split()[0])
    assert np.shape(json.loads(left[:length])["output"]) == (3, 64)
    assert left[length:].startswith(b"HTTP/1.1 200 ") and left.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", "CONNECT"),
        (b"ATTEND /attend HTTP/1.1\r\nHost: localhost\r\n\r\n", "ATTEND"),
        (b"POST /attend HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "gzip, chunked"),
        (b"POST /attend HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", "gzip, chunked"),
    ],
    ids=["CONNECT", "an unknown method", "a list of codings", "two headers"],
)
def test_unsupported_methods_and_transfer_codings_are_501(server: Server, sent: bytes, got: str) -> None:
    """The bytes after such a head are not read as a request."""
    before = failures(server, "unsupported_message")
    with connect(server) as connection:
        connection.sendall(sent + b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        document = refusal(read_to_end(connection))
    assert (document["status"], document["errors"][0]["got"]) == (501, got)
    assert failures(server, "unsupported_message") == before + 1


@pytest.mark.parametrize("part", ["target", "one header", "many headers"])
@pytest.mark.parametrize("excess", [0, 1])
def test_a_head_of_more_than_64_kib_is_refused(server: Server, part: str, excess: int) -> None:
    """Exactly, also if it is sent at once."""
    start, end = b"GET /health/live", b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    room = 64 * 1024 - len(start + end) + len(b"\r\n") + excess  # the empty line is not counted
    if part == "target":
        sent = start + b"?" + b"a" * (room - 1) + end
    else:
        lines, left = divmod(room, 1000) if part == "many headers" else (0, room)
        sent = start + end[:-2] + (b"X: " + b"a" * 995 + b"\r\n") * lines + b"Y: " + b"a" * (left - 5) + b"\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(sent)
        answer = read_to_end(connection)
    if excess:
        assert refusal(answer)["status"] == 431
    else:
        assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("sent", "due"),
    [(b"POST /att", "headers"), (HEAD % len(BODY), "body"), (HEAD % len(BODY) + BODY[:-1], "body"), (b"\r\n", "headers")],
    ids=["half a line", "no body", "half a body", "an empty line"],
)
def test_a_client_that_stops_sending_gets_408(short_timeout_server: Server, sent: bytes, due: str) -> None:
    """With the setting; the metric is labelled with what was missing."""
    endpoint = "/attend" if due == "body" else "other"
    before, refused, nothing = (
        failures(short_timeout_server, f"slow_{due}"),
        requests(short_timeout_server, endpoint, 408),
        requests(short_timeout_server, endpoint, 0),
    )
    with connect(short_timeout_server) as connection:
        connection.sendall(sent)
        document = refusal(read_to_end(connection))
    assert document["status"] == 408
    assert "client_timeout" in document["detail"]
    assert due in document["detail"]
    assert failures(short_timeout_server, f"slow_{due}") == before + 1
    until(lambda: requests(short_timeout_server, endpoint, 408) > refused, "the refusal is counted")
    assert requests(short_timeout_server, endpoint, 408) == refused + 1 and requests(short_timeout_server, endpoint, 0) == nothing


def test_a_connection_without_a_request_is_closed_without_a_reply(short_timeout_server: Server) -> None:
    with connect(short_timeout_server) as connection:
        assert read_to_end(connection) == b""


def test_a_client_that_sends_single_bytes_gets_408(short_timeout_server: Server) -> None:
    """Each byte is progress, but too little."""
    connection = connect(short_timeout_server)
    connection.settimeout(0.05)
    answer, drops, end = b"", iter(HEAD % 10**6 + b" " * 10**6), time.monotonic() + PATIENCE
    while not answer:
        assert time.monotonic() < end, "the connection was not closed"
        connection.send(bytes([next(drops)]))
        try:
            answer = connection.recv(1 << 16)
        except TimeoutError:
            continue
    connection.close()
    assert refusal(answer)["status"] == 408


def test_a_client_that_does_not_read_its_reply_is_disconnected(short_timeout_server: Server) -> None:
    """A reply of megabytes does not stay in memory."""
    before = failures(short_timeout_server, "slow_reply")
    body = json.dumps({"query": [[0.5] * 64] * 400}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", int(short_timeout_server.url.rpartition(":")[2])))
        connection.sendall(HEAD % len(body) + body)
        until(lambda: failures(short_timeout_server, "slow_reply") > before, "it is counted")
        with suppress(ConnectionError):
            head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
            assert len(body) < int(head.partition(b"content-length: ")[2].split()[0])


def test_a_client_that_disconnects_during_its_body_is_counted(short_timeout_server: Server) -> None:
    """No reply is sent and no memory is kept."""
    before = failures(short_timeout_server, "CallerGone")
    with connect(short_timeout_server) as connection:
        connection.sendall(HEAD % len(BODY) + BODY[:-1])
    until(lambda: failures(short_timeout_server, "CallerGone") > before, "it is counted")
    assert "attend_held_body_bytes 0.0" in httpx.get(f"{short_timeout_server.url}/metrics").text


def test_a_deadline_that_passes_while_the_body_arrives_is_504(server: Server) -> None:
    """The client may send another request on the same connection."""
    with connect(server) as connection:
        connection.sendall((HEAD % len(BODY)).replace(b"Host", b"X-Request-Timeout: 0.05\r\nHost") + BODY[:-1])
        received = connection.recv(1 << 16)
        while not received.endswith(b"}"):  # the head may come by itself
            received += connection.recv(1 << 16)
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 504 ")
        assert "body" in json.loads(body)["detail"]
        connection.sendall(BODY[-1:] + (HEAD % len(BODY)).replace(b"Host", b"Connection: close\r\nHost") + BODY)
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "request_line",
    [
        "POST /attend",
        "POST /attend/analysis",
        "POST /attend/plan",
        "POST /attend/figure",
        "POST /words",
        "PUT /layers/gone",
        "POST /v2/models/default/infer",
        "POST /v2/repository/index",
        "POST /v2/repository/models/gone/load",
    ],
)
def test_a_disconnect_during_the_body_is_not_an_error_of_the_server(server: Server, request_line: str) -> None:
    """With and without FastAPI's routing: counted as CallerGone, without a status."""
    endpoint = request_line.partition(" ")[2].replace("gone", "{name}").replace("default", "{name}")
    before, gone = requests(server, endpoint, 0), failures(server, "CallerGone")
    with connect(server) as connection:
        connection.sendall(f"{request_line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{".encode())
    until(lambda: failures(server, "CallerGone") > gone, "it is counted")
    assert (requests(server, endpoint, 0), requests(server, endpoint, 500)) == (before + 1, 0)


def test_the_gauge_counts_a_reply_until_it_is_read(server: Server) -> None:
    body = json.dumps({"query": [[0.5] * 64] * 400}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        connection.sendall((HEAD % len(body)).replace(b"Host", b"Connection: close\r\nHost") + body)
        head, _, first = connection.recv(1 << 12).partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert held_bytes(server) == size
        assert len(first) + len(read_to_end(connection)) == size
    until(lambda: held_bytes(server) == 0, "the reply is no longer counted")


def test_a_thousand_connections_at_once(server: Server) -> None:
    """All are open before the first request is sent, and all get the same reply."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * MANY)), hard))
    port = int(server.url.rpartition(":")[2])

    async def post_with(everyone: asyncio.Barrier) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await everyone.wait()
        writer.write((HEAD % len(BODY)).replace(b"Host", b"Connection: close\r\nHost") + BODY)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        return answer.partition(b"\r\n\r\n")[2]

    async def test() -> list[bytes]:
        everyone = asyncio.Barrier(MANY)
        return await asyncio.gather(*(post_with(everyone) for _ in range(MANY)))

    outputs = np.array([json.loads(answer)["output"] for answer in asyncio.run(test())])
    assert outputs.shape == (MANY, 3, 64)
    np.testing.assert_allclose(outputs, outputs[:1].repeat(MANY, 0), rtol=0, atol=1e-6 * np.abs(outputs).max())


class Transport:
    """Records what a connection does to its socket."""

    def __init__(self) -> None:
        self.unsent, self.closed, self.written = 0, False, b""

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    resume_reading = pause_reading


class Loop:
    """An event loop with a clock that the test sets, and the last scheduled call."""

    def __init__(self) -> None:
        self.now, self.due = 0.0, lambda: None

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Any, *arguments: Any) -> None:
        callback(*arguments)

    def call_later(self, _: float, callback: Any, *arguments: Any) -> None:
        self.due = lambda: callback(*arguments)

    def pass_time(self, seconds: float) -> None:
        """Advances the clock, and calls what is scheduled."""
        self.now += seconds
        self.due()

    def create_task(self, coroutine: Any) -> Any:
        coroutine.close()
        return self.create_future()

    def create_future(self) -> Any:
        return asyncio.get_running_loop().create_future()


def connection_without_socket(timeout: float = 10.0) -> tuple[Connection, Transport, Loop]:
    """A connection, its transport, and its event loop, whose clock is at 0."""
    loop, transport = Loop(), Transport()
    options = ConnectionOptions(SlowPeerTimer(timeout))
    return add_connection(options, ServerState(), loop, transport), transport, loop


def add_connection(options: ConnectionOptions, state: ServerState, loop: Loop, transport: Transport) -> Connection:
    """Another connection of the same server."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    connection = Connection(uvicorn.Config(app, lifespan="off", log_config=None), state, {OPTIONS_KEY: options}, loop)
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection


def test_a_slow_but_steady_body_is_accepted() -> None:
    """For any total time, as long as enough bytes arrive per interval."""

    async def test() -> None:
        connection, transport, loop = connection_without_socket()
        connection.data_received(HEAD % 10**9)
        for _ in range(100):
            connection.data_received(b" " * int(connection.timer.min_bytes))
            connection.flow.resume_reading()  # as the application does that takes what comes
            for _ in range(9):
                loop.pass_time(1.0)
        assert not transport.closed
        for _ in range(12):
            loop.pass_time(1.0)
        assert transport.closed

    asyncio.run(test())


def test_a_client_that_reads_slowly_but_steadily_is_not_disconnected() -> None:
    """Progress is what leaves the write buffer."""

    async def test() -> None:
        connection, transport, loop = connection_without_socket()
        least = int(connection.timer.min_bytes)
        transport.unsent = 100 * least
        while transport.unsent > least:
            for _ in range(9):
                loop.pass_time(1.0)
            transport.unsent -= least
        assert not transport.closed
        for _ in range(12):
            loop.pass_time(1.0)
        assert transport.closed
        assert transport.written == b""  # a reply was being sent

    asyncio.run(test())


def test_a_client_that_reads_the_replies_to_many_requests_is_not_disconnected() -> None:
    """Although some of their bytes are in the write buffer at every check."""

    async def test() -> None:
        connection, transport, loop = connection_without_socket()
        connection.data_received((HEAD % 2 + b"{}") * 10)
        check, transport.unsent = loop.due, 1000
        for _ in range(10):
            connection.on_response_complete()
            for _ in range(9):
                loop.due = check
                loop.pass_time(1.0)
                check = loop.due
        assert not transport.closed
        for _ in range(12):
            loop.pass_time(1.0)
        assert transport.closed

    asyncio.run(test())


def test_an_exception_in_one_check_does_not_stop_the_others() -> None:
    async def test() -> None:
        connection, transport, loop = connection_without_socket()
        faulty = add_connection(ConnectionOptions(connection.timer), connection.server_state, loop, Transport())
        faulty.check_progress = None  # type: ignore[assignment,method-assign]
        connection.data_received(b"POST /att")
        for _ in range(12):
            loop.pass_time(1.0)
        assert transport.closed

    asyncio.run(test())


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_the_transport_buffers_one_piece_of_a_long_reply(tls: bool) -> None:
    """However slowly it is read. All of it arrives."""
    authority, size = trustme.CA(), 40 << 20
    server_context, client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server_context)
    authority.configure_trust(client_context)
    most, left, is_sent = [0], [-1], asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        connection = scope["state"][CONNECTION_KEY]

        async def piece(message: Any) -> None:
            await send(message)
            most.append(connection.transport.get_write_buffer_size())

        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await connection.send(piece, {"type": "http.response.body", "body": bytes(size)})
        await connection.wait_until_sent()
        left.append(connection.transport.get_write_buffer_size())
        is_sent.set()

    def get_index(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as plain:
            connection = client_context.wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = read_to_end(connection)
            connection.close()
        return answer

    async def test() -> None:
        loop, config = asyncio.get_running_loop(), uvicorn.Config(app, lifespan="off", log_config=None)
        make = lambda: Connection(config, ServerState(), {}, loop)  # noqa: E731  # as a server creates connections
        async with await loop.create_server(make, "127.0.0.1", 0, ssl=server_context if tls else None) as listening:
            answer = await asyncio.to_thread(get_index, listening.sockets[0].getsockname()[1])
            await asyncio.wait_for(is_sent.wait(), PATIENCE)  # with TLS, the client may have closed first
        assert len(answer.partition(b"\r\n\r\n")[2]) == size
        assert max(most) < 4 * SEND_BYTES
        assert left[-1] == 0

    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(test())


def test_time_in_which_the_server_did_not_run_is_not_counted() -> None:
    """A stopped process, or a blocked event loop."""

    async def test() -> None:
        connection, transport, loop = connection_without_socket()
        connection.data_received(b"POST /att")
        for _ in range(4):
            loop.pass_time(3600.0)
        assert not transport.closed
        for _ in range(12):
            loop.pass_time(1.0)
        assert transport.closed

    asyncio.run(test())


def test_a_client_is_not_slow_while_reading_is_paused() -> None:
    async def test() -> None:
        connection, transport, loop = connection_without_socket()
        connection.data_received(HEAD % 10**6)
        connection.flow.read_paused = True
        for _ in range(100):
            loop.pass_time(1.0)
        assert not transport.closed

    asyncio.run(test())


def test_a_request_is_answered_although_the_next_one_of_its_connection_is_slow() -> None:
    """However long it is computed. The refusal of the slow one follows."""

    async def test() -> None:
        connection, transport, loop = connection_without_socket()
        connection.data_received(HEAD % 2 + b"{}")
        first = connection.cycle
        connection.data_received(HEAD % 10**6)
        connection.flow.resume_reading()  # as after the reply to an earlier request
        for _ in range(100):
            loop.pass_time(1.0)
        assert not transport.closed
        assert transport.written == b""

        first.response_started = first.response_complete = True
        connection.on_response_complete()
        assert transport.closed
        assert transport.written.startswith(b"HTTP/1.1 408 ")

    asyncio.run(test())


def test_a_request_that_is_answered_before_its_body_gets_no_408_too() -> None:
    """The client would take it for the reply to its next request."""

    async def test() -> None:
        connection, transport, loop = connection_without_socket()
        connection.data_received(HEAD % 100 + b"{")
        check = loop.due
        connection.cycle.response_started = connection.cycle.response_complete = True
        connection.on_response_complete()
        connection.data_received(b" ")  # so the connection is no longer idle
        loop.due = check
        for _ in range(12):
            loop.pass_time(1.0)
        assert transport.closed
        assert transport.written == b""

    asyncio.run(test())


def test_trailers_do_not_change_the_headers() -> None:
    async def test() -> None:
        connection, _, _ = connection_without_socket()
        connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Api-Key: b\r\n\r\n")
        assert connection.scope["headers"] == [(b"host", b"a"), (b"transfer-encoding", b"chunked")]

    asyncio.run(test())


def test_an_idle_connection_is_closed_after_the_keep_alive_timeout(start: Callable[..., Server]) -> None:
    """Not while its request is being answered. The client closes idle connections earlier than the server."""
    server = start("--keepalive-timeout", "0.2")
    with connect(server) as connection:
        connection.sendall(HEAD % len(BODY) + BODY)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" not in answer
    assert LIMITS.keepalive_expiry is not None
    assert LIMITS.keepalive_expiry < Settings().keepalive_timeout


def test_the_event_loop_runs_other_tasks_between_pieces_of_a_reply() -> None:
    """Even if the peer reads so fast that sending never waits."""
    order: list[str] = []

    async def send(message: Any) -> None:
        order.append("piece")

    async def others() -> None:
        while True:
            order.append("turn")
            await asyncio.sleep(0)

    async def reply() -> None:
        connection, _, _ = connection_without_socket()
        task = asyncio.create_task(others())
        await connection.send(send, {"type": "http.response.body", "body": bytes(3 * TURN_BYTES)})
        task.cancel()

    asyncio.run(reply())
    pieces_of_a_turn = ["piece"] * (TURN_BYTES // SEND_BYTES)
    assert order == [*pieces_of_a_turn, "turn"] * 3
