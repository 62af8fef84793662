"""Receives messages and answers them in order, within bounds on their number. Independent of gRPC.

For protocols that deliver only complete messages: how many bytes of a message have arrived is unknown until all have.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from attend.errors import DeadlinePassed, InvalidRequest, Overloaded, Problem
from attend.serving.byte_budget import ByteBudget, Lease
from attend.serving.service import ShutdownGate

T = TypeVar("T")
MAX_READING = 64  # most messages that are read at once
Receive = Callable[[], Awaitable[Any]]  # returns the next message; a value that is not bytes ends the stream
PreviousSent = Callable[[], Awaitable[None]]  # waits until the reply to the previous message has been sent


class MessageReader:
    """Reads at most `count` messages at once, at most half of them of one caller; further ones wait. A message may take `seconds`.

    Until a message is complete, it counts as `largest` bytes.
    """

    def __init__(self, count: int, largest: int, seconds: float) -> None:
        self.count, self.largest, self.seconds = count, largest, seconds
        self._all = asyncio.Semaphore(count)
        self._of_caller: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, receive: Receive, lease: Lease) -> bytes:
        """Return the next message; the lease then counts its bytes.

        Raises Overloaded if too many messages are being read or there is no room, DeadlinePassed if the message does not arrive in time,
        InvalidRequest if the stream ends without one.
        """
        of_caller = self._of_caller.setdefault(lease.caller, asyncio.Semaphore(max(1, self.count // 2)))
        reading = False
        try:
            async with asyncio.timeout(self.seconds) as limit, of_caller, self._all:
                reading = True
                limit.reschedule(asyncio.get_running_loop().time() + self.seconds)
                lease.add(self.largest)
                message = await receive()
        except TimeoutError:
            if not reading:
                expected = f"fewer than {self.count} messages to be read at once, within {self.seconds:g} seconds"
                raise Overloaded(1, problems=[Problem("", expected, str(self.count))]) from None
            raise DeadlinePassed(too_late(self.seconds)) from None
        lease.resize(0)
        if not isinstance(message, bytes):
            raise InvalidRequest.where("", f"a message, of at most {self.largest} bytes (max_grpc_bytes)", "none")
        lease.add(len(message))
        return message


def message_reader(budget: ByteBudget, largest: int, seconds: float) -> MessageReader:
    """A reader of as many messages as fit into half of the budget at `largest` bytes each, at most MAX_READING."""
    return MessageReader(max(1, min(MAX_READING, budget.capacity // 2 // largest)), largest, seconds)


async def with_time_limit(messages: AsyncIterator[Any], seconds: float) -> AsyncIterator[Any]:
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
    receive: Receive, answer: Callable[[bytes, PreviousSent], Coroutine[Any, Any, None]], gate: ShutdownGate, max_in_flight: int
) -> None:
    """Answer the messages of a stream until it ends or the gate closes. While `max_in_flight` are being answered, no more are read.

    `answer` awaits the given `previous_sent` before it sends its reply, so replies are sent in the order of the messages. An exception of
    `answer` ends the stream, in an ExceptionGroup.
    """
    in_flight: set[asyncio.Task[None]] = set()
    previous: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as tasks:
        async for message in gate.until_closed(_messages(receive, in_flight, max_in_flight)):
            previous = tasks.create_task(without_frames(answer(message, partial(_wait_for, previous))))
            in_flight.add(previous)
            previous.add_done_callback(in_flight.discard)


async def without_frames(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine. If it is cancelled, the error forgets the frames that it has passed.

    A cancelled task keeps its error, and with it these frames and their tensors. If one of them refers to the task, as that of a TaskGroup
    does, they are a cycle, which Python 3.11 does not even collect.
    """
    try:
        return await coroutine
    except asyncio.CancelledError as error:
        raise error.with_traceback(None) from None


async def _wait_for(task: "asyncio.Task[None] | None") -> None:
    """Wait until the task has ended, in whatever way."""
    if task is not None:
        await asyncio.wait((task,))


async def _messages(receive: Receive, in_flight: set[asyncio.Task[None]], max_in_flight: int) -> AsyncIterator[bytes]:
    """Yield the messages of a stream. The next one is read once fewer than `max_in_flight` are being answered."""
    while True:
        while len(in_flight) >= max_in_flight:
            await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
        if not isinstance(message := await receive(), bytes):
            return
        yield message


def too_late(seconds: float) -> str:
    """The error detail for a message that did not arrive in time."""
    return f"the message did not arrive within {seconds:g} seconds (client_timeout)"
