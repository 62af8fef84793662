"""Answers the messages of a stream concurrently, sends replies in order, and limits the time between messages. Independent of gRPC."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from service.errors import DeadlinePassed
from service.serving.admission import Receive, too_late
from service.serving.lifecycle import ShutdownGate

Turn = Callable[[], Awaitable[None]]


async def in_time(messages: AsyncIterator[Any], seconds: float) -> AsyncIterator[Any]:
    """Yield the same messages. Raises DeadlinePassed if the next one takes more than `seconds`."""
    while True:
        try:
            async with asyncio.timeout(seconds):
                message = await anext(messages)
        except TimeoutError:
            raise DeadlinePassed(too_late(seconds)) from None
        except StopAsyncIteration:
            return
        yield message


async def answer_stream(
    receive: Receive, answer: Callable[[bytes, Turn], Awaitable[None]], gate: ShutdownGate, most: int, seconds: float
) -> None:
    """Answer the messages of a stream until it ends or the gate closes. While `most` are being answered, no more are read.

    `answer` awaits the given turn before it sends its reply, so replies are sent in the order of the messages. Raises DeadlinePassed if no
    message arrives for `seconds` while none is being answered. An exception of `answer` ends the stream, in an ExceptionGroup.
    """
    in_flight: set[asyncio.Task[None]] = set()
    last: asyncio.Task[None] | None = None

    async def one(message: bytes, before: asyncio.Task[None] | None) -> None:
        async def turn() -> None:
            if before is not None:
                await asyncio.wait((before,))

        await answer(message, turn)

    async with asyncio.TaskGroup() as tasks:
        async for message in gate.until_closed(_messages(receive, in_flight, most, seconds)):
            last = tasks.create_task(one(message, last))
            in_flight.add(last)
            last.add_done_callback(in_flight.discard)


async def _messages(receive: Receive, in_flight: set[asyncio.Task[None]], most: int, seconds: float) -> AsyncIterator[bytes]:
    while True:
        while len(in_flight) >= most:
            await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
        reading = asyncio.ensure_future(receive())
        try:
            while not (await asyncio.wait((reading,), timeout=seconds))[0]:
                if not in_flight:
                    raise DeadlinePassed(too_late(seconds))
        finally:
            reading.cancel()
        if not isinstance(message := reading.result(), bytes):
            return
        yield message
