"""Raw HTTP over a socket, the refusals of connections, and the counters of a server."""

import json
import socket
from typing import Any

import httpx

from support.server import Server
from support.waiting import PATIENCE

BODY = json.dumps({"query": [[0.25] * 64] * 3}).encode()
HEAD = b"POST /attend HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE)


def read_to_end(connection: socket.socket) -> bytes:
    """The bytes until the server closes the connection."""
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def failures(server: Server, reason: str) -> float:
    """The counter of failures for this reason."""
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(f'attend_failures_total{{reason="{reason}"}}')]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


def requests(server: Server, endpoint: str, status: int) -> float:
    """The counter of requests to this endpoint with this status."""
    text, counter = httpx.get(f"{server.url}/metrics").text, f'attend_requests_total{{endpoint="{endpoint}",status="{status}"}} '
    return sum(float(line.removeprefix(counter)) for line in text.splitlines() if line.startswith(counter))


def held_bytes(server: Server) -> float:
    """The gauge of the bytes that count against the byte budget."""
    text, gauge = httpx.get(f"{server.url}/metrics").text, "attend_held_body_bytes "
    return next(float(line.removeprefix(gauge)) for line in text.splitlines() if line.startswith(gauge))


def refusal(answer: bytes) -> dict[str, Any]:
    """The problem document of a refusal that closes the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head
    assert b"connection: close" in head
    document: dict[str, Any] = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % document["status"])
    assert b"x-request-id: " + document["request_id"].encode() in head.split(b"\r\n")
    assert len(document["request_id"]) == 16
    (error,) = document["errors"]
    assert document["detail"] == f"expected {error['expected']}, got {error['got']}"
    return document
