"""Forwarding to another worker, which is replaced by a scripted Unix socket. `cli/test_session_workers.py` has real workers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.waiting import PATIENCE

from service.errors import DeadlinePassed, SessionEnded, WrongWorker
from service.serving.admission import ServingLimits
from service.serving.requests import RawRequest
from service.serving.service import Service, open_service
from service.serving.sessions.placement import GRPC, HTTP
from service.web.forwarding import GRACE_SECONDS, Forwarder
from service.web.grpc.methods import GrpcForwarder, GrpcRecord
from service.web.records import record_of
from service.wire.limits import WireLimits
from service.wire.negotiation import CODECS, JSON

REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
Script = Callable[[asyncio.StreamWriter], Awaitable[None]]  # what a worker does after the head of a request


@pytest.fixture
def service() -> Iterator[Service]:
    service = open_service("cpu", WireLimits(), ServingLimits())
    yield service
    service.close()


@asynccontextmanager
async def worker(socket: Path, script: Script) -> AsyncIterator[asyncio.Event]:
    """A worker that runs the script for each request. The event is set once the other side has closed a connection."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            await script(writer)
        closed.set()
        writer.close()

    async with await asyncio.start_unix_server(serve, socket):
        yield closed


async def forward(forwarder: Forwarder, socket: Path, **headers: str) -> list[dict[str, Any]]:
    """The ASGI messages of the reply to a GET request."""
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "headers": pairs}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await forwarder.forward(wrong(socket), scope, record_of(scope), asyncio.Event().wait, send)  # type: ignore[arg-type]
    return sent


def wrong(socket: Path) -> WrongWorker:
    return WrongWorker(socket, SessionEnded("ended"))


async def answer(writer: asyncio.StreamWriter) -> None:
    writer.write(REPLY + b"done")


def test_a_reply_may_arrive_shortly_after_the_deadline(service: Service, tmp_path: Path) -> None:
    """The worker that has the session knows best whether it computed the call in time."""

    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await answer(writer)

    async def run() -> None:
        forwarder = Forwarder(service, 5.0)
        async with worker(tmp_path / "0.1.http", late):
            sent = await forward(forwarder, tmp_path / "0.1.http", x_request_timeout="0.05")
            assert sent[0]["status"] == 200 and b"".join(message["body"] for message in sent[1:]) == b"done"
            await forwarder.close()

    asyncio.run(run())


def test_the_wait_for_a_reply_ends_a_second_after_the_deadline(service: Service, tmp_path: Path) -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        pass

    async def run() -> None:
        forwarder, loop = Forwarder(service, 5.0), asyncio.get_running_loop()
        async with worker(tmp_path / "0.1.http", never):
            started = loop.time()
            with pytest.raises(DeadlinePassed):
                await forward(forwarder, tmp_path / "0.1.http", x_request_timeout="0.05")
            assert loop.time() - started > 0.9 * GRACE_SECONDS > 0.5
            await forwarder.close()

    asyncio.run(run())


def test_connections_to_a_worker_that_has_ended_are_closed_after_its_last_reply(service: Service, tmp_path: Path) -> None:
    """As soon as a request is forwarded to a new worker. The supervisor has removed the socket of the ended worker."""

    async def run() -> None:
        forwarder, received, finish = Forwarder(service, 5.0), asyncio.Event(), asyncio.Event()

        async def slowly(writer: asyncio.StreamWriter) -> None:
            writer.write(REPLY + b"do")
            received.set()
            await finish.wait()
            writer.write(b"ne")

        old, new, newest = (tmp_path / f"0.{start}.http" for start in (1, 2, 3))
        async with asyncio.timeout(PATIENCE), worker(old, slowly) as closed, worker(new, answer), worker(newest, answer):
            reply = asyncio.create_task(forward(forwarder, old))
            await received.wait()
            old.unlink()
            await forward(forwarder, new)
            finish.set()
            assert b"".join(message["body"] for message in (await reply)[1:]) == b"done"
            assert not closed.is_set()
            await forward(forwarder, newest)
            await closed.wait()
            assert (await forward(forwarder, new))[0]["status"] == 200
            await forwarder.close()

    asyncio.run(run())


def test_grpc_connections_to_a_worker_that_has_ended_are_closed(service: Service, tmp_path: Path) -> None:
    async def infer(request: bytes, context: Any) -> bytes:
        return request + b" answered"

    def connections(socket: Path) -> int:
        return Path("/proc/net/unix").read_text().count(f"{socket.with_suffix(GRPC)}\n") - 1  # without the listening socket

    async def run() -> None:
        old, new = (tmp_path / f"0.{start}{HTTP}" for start in (1, 2))
        forwarder, servers = GrpcForwarder(service), []
        for socket in (old, new):
            server = grpc.aio.server()
            handler = grpc.unary_unary_rpc_method_handler(infer)
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler}),)
            )
            server.add_insecure_port(f"unix:{socket.with_suffix(GRPC)}")
            await server.start()
            servers.append(server)
        new.touch()
        for socket in (old, new):
            error = wrong(socket)
            error.raw = RawRequest(b"a message", CODECS[JSON])
            record = GrpcRecord("request", metadata={}, seconds_left=None, trailing=[])
            assert (await forwarder.forward("ModelInfer", error, record, {}))[0] == b"a message answered"
            assert connections(socket) == 1
        async with asyncio.timeout(PATIENCE):
            while connections(old):
                await asyncio.sleep(0.01)
        assert connections(new) == 1
        await forwarder.close()
        for server in servers:
            await server.stop(None)

    asyncio.run(run())
