"""Invalid HTTP, long heads, chunk headers and the header Upgrade, on a real server with real sockets."""

import json
from contextlib import suppress

import httpx
import numpy as np
import pytest
from support.raw_http import BODY, HEAD, connect, failures, read_to_end, refusal, requests
from support.server import Server
from support.waiting import until


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
    ],
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


@pytest.mark.parametrize("version", ["0.9", "2.0"])
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
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 50_000) + b"0\r\nX-Trailer: y\r\n\r\n"
    with connect(server) as connection:  # chunks of one byte, which are smaller than their headers, are allowed
        connection.sendall(b"POST /attend HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_a_refused_client_that_sends_chunks_receives_the_refusal(server: Server) -> None:
    """The server reads the rest of the body before it closes the connection."""
    chunks = b"".join(b"10000\r\n" + bytes(1 << 16) + b"\r\n" for _ in range(256)) + b"0\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert read_to_end(connection).startswith(b"HTTP/1.1 404 ")


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
    """The refusal arrives although the client goes on sending."""
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
        (b"POST /attend HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "gzip, chunked"),
        (b"POST /attend HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", "gzip, chunked"),
    ],
    ids=["CONNECT", "a list of codings", "two headers"],
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
