"""Pipelined requests and small chunks, over real sockets: what is parsed and waits is bounded, and other tasks run meanwhile."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.server import ServerState

from attend.web.connections import OPTIONS_KEY, Connection, ConnectionOptions
from attend.web.reading import CALLBACKS_OF_A_TURN, PIECE_BYTES, ReadingControl, Turns
from support.waiting import PATIENCE

GET = b"GET / HTTP/1.1\r\nX: %s\r\n\r\n" % (b"a" * 170)
REPLY = b"b" * 10_007
KERNEL_BYTES = 1 << 16  # of the operating system's buffers of a connection: fewer requests fill them
HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
LOOPS = pytest.mark.parametrize("factory", [asyncio.SelectorEventLoop, auto_loop_factory()], ids=["asyncio", "uvloop"])


class Counted(Connection):
    """Counts the parser's callbacks of all connections."""

    callbacks = 0

    def on_message_begin(self) -> None:
        Counted.callbacks += 1
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        Counted.callbacks += 1
        super().on_body(body)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[int, list[Connection]]]:
    """The port of a server of `app` in this event loop, and its connections."""
    loop, config, made = asyncio.get_running_loop(), uvicorn.Config(app, lifespan="off", log_config=None), list[Connection]()
    options = {OPTIONS_KEY: ConnectionOptions()}

    def make() -> Connection:
        made.append(Counted(config, ServerState(), options, loop))
        return made[-1]

    listening = socket.socket()
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        listening.setsockopt(socket.SOL_SOCKET, buffer, KERNEL_BYTES)
    listening.bind(("127.0.0.1", 0))
    async with await loop.create_server(make, sock=listening), asyncio.timeout(PATIENCE):
        yield listening.getsockname()[1], made


async def reply_to(scope: Any, receive: Any, send: Any) -> None:
    """An application that replies to a request once it has its body, and says how long that is."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    headers = [(b"content-length", b"%d" % len(REPLY)), (b"x-size", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": REPLY})


@LOOPS
def test_requests_that_wait_for_a_reply_that_nobody_reads_are_bounded(factory: Any) -> None:
    """The peer cannot send more of them. Once it reads, every request is answered."""

    async def test() -> None:
        async with serving(reply_to) as (port, made):
            loop = asyncio.get_running_loop()
            with socket.socket() as peer:
                for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    peer.setsockopt(socket.SOL_SOCKET, buffer, KERNEL_BYTES)
                peer.setblocking(False)
                await loop.sock_connect(peer, ("127.0.0.1", port))
                sent, blocked = 0, False
                while not (blocked and made and made[0].flow.held and made[0].flow.write_paused):
                    try:
                        sent, blocked = sent + peer.send((GET * 1000)[sent % len(GET) :]), False
                    except BlockingIOError:
                        blocked = True
                    await asyncio.sleep(0)
                    for connection in made:
                        assert len(connection.pipeline) <= PIECE_BYTES // len(GET) + 1
                rest = GET[sent % len(GET) :] if sent % len(GET) else b""
                _, all_read = await asyncio.gather(loop.sock_sendall(peer, rest), read_replies(peer, -(-sent // len(GET))))
                assert all_read

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(test())


async def read_replies(peer: socket.socket, count: int) -> bool:
    """Whether a peer can read so many replies."""
    loop, left = asyncio.get_running_loop(), b""
    while count and (data := await loop.sock_recv(peer, 1 << 16)):
        *whole, left = (left + data).split(REPLY)
        count -= len(whole)
    return count == 0


@LOOPS
def test_other_tasks_run_between_the_parts_of_what_one_read_returns(factory: Any) -> None:
    """Here chunks of one byte, of several connections. All of their bytes arrive."""
    size, peers = 100_003, 3
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            before = Counted.callbacks
            await asyncio.sleep(0)
            most = max(most, Counted.callbacks - before)

    async def post(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"1\r\na\r\n" * size + b"0\r\n\r\n")
        reply = await reader.readuntil(REPLY)
        writer.close()
        return reply

    async def test() -> None:
        async with serving(reply_to) as (port, _):
            watching = asyncio.create_task(watch())
            replies = await asyncio.gather(*(post(port) for _ in range(peers)))
            watching.cancel()
        assert all(b"x-size: %d\r\n" % size in reply for reply in replies)
        of_a_turn = CALLBACKS_OF_A_TURN + PIECE_BYTES // len(b"1\r\na\r\n")
        assert CALLBACKS_OF_A_TURN <= most <= (peers + 1) * of_a_turn  # each has read, and one has its turn

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(test())


def test_one_connection_has_its_turn_in_each_iteration_of_the_event_loop() -> None:
    """However many wait, in their order, and each once; one that fails does not stop the others."""
    turns, had = Turns(), list[str]()

    async def test() -> None:
        loop = asyncio.get_running_loop()

        def second() -> None:
            had.append("second")
            raise ZeroDivisionError

        def first() -> None:
            had.append("first")
            if len(had) == 1:
                turns.wait(loop, first)

        loop.set_exception_handler(lambda loop, context: None)
        for parse in (first, second, first):
            turns.wait(loop, parse)
        for count in range(1, 4):
            await asyncio.sleep(0)
            assert len(had) == count
        await asyncio.sleep(0)

    asyncio.run(test())
    assert had == ["first", "second", "first"]


class Reading:
    """A transport that knows whether it reads."""

    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


@pytest.mark.parametrize("released_first", [False, True])
def test_bytes_are_read_while_neither_uvicorn_nor_the_parser_waits(released_first: bool) -> None:
    async def test() -> None:
        flow = ReadingControl(transport := Reading())
        flow.pause_reading()
        flow.hold()
        assert not transport.reading
        first, second = (flow.release, flow.resume_reading) if released_first else (flow.resume_reading, flow.release)
        first()
        assert not transport.reading
        second()
        assert transport.reading
        flow.hold()
        flow.pause_reading()
        flow.release()
        assert not transport.reading
        flow.resume_reading()
        assert transport.reading

    asyncio.run(test())
