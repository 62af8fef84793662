"""Messages of a protocol that hands them over whole: who may send one, how long it may take, and requests that come in streams.

Nobody can see how far such a message has come, so each that is on its way counts as the largest allowed. Knows no gRPC.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from service.errors import DeadlinePassed, InvalidRequest, Overloaded, Problem
from service.serving.admission import ByteBudget, Lease
from service.serving.lifecycle import ShutdownGate

MOST_READERS = 64
Receive = Callable[[], Awaitable[Any]]  # the next message, or anything but bytes where there are no more
Turn = Callable[[], Awaitable[None]]


class Cap:
    """At most `count` at once, and half of them for one caller."""

    def __init__(self, count: int, what: str) -> None:
        self.count, self.what = count, what
        self._total, self._taken = 0, Counter[str]()

    @contextmanager
    def place(self, caller: str) -> Iterator[None]:
        """A place until the block ends. Raises Overloaded where there is none."""
        if self._total >= self.count or self._taken[caller] >= max(1, self.count // 2):
            raise Overloaded(1, problems=[Problem("", f"at most {self.count} {self.what} at once, half of them of one caller", "one more")])
        self._total += 1
        self._taken[caller] += 1
        try:
            yield
        finally:
            self._total -= 1
            self._taken[caller] -= 1
            if not self._taken[caller]:
                del self._taken[caller]


class Readers:
    """At most `count` messages on their way at once, and half of them of one caller; the others wait. Each takes at most `seconds`."""

    def __init__(self, count: int, largest: int, seconds: float) -> None:
        self.count, self.largest, self.seconds = count, largest, seconds
        self._all = asyncio.Semaphore(count)
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, receive: Receive, lease: Lease) -> bytes:
        """The message that `receive` returns, whose bytes the lease holds then.

        Raises Overloaded where there is no room for it, DeadlinePassed where it does not come, InvalidRequest where there is none.
        """
        own = self._own.setdefault(lease.caller, asyncio.Semaphore(max(1, self.count // 2)))
        turn = False
        try:
            async with asyncio.timeout(self.seconds) as limit, own, self._all:
                turn = True
                limit.reschedule(asyncio.get_running_loop().time() + self.seconds)
                lease.add(self.largest)
                message = await receive()
        except TimeoutError:
            if not turn:
                waited = Problem("", f"a turn among the {self.count} messages that are read at once", f"none in {self.seconds:g} seconds")
                raise Overloaded(1, problems=[waited]) from None
            raise DeadlinePassed(late(self.seconds)) from None
        lease.release()
        if not isinstance(message, bytes):
            raise InvalidRequest.where("", f"a message, of at most {self.largest} bytes (max_grpc_bytes)", "none")
        lease.add(len(message))
        return message


def readers_within(budget: ByteBudget, largest: int, seconds: float) -> Readers:
    """As many as half of the budget has room for, since what they may bring is taken from it."""
    return Readers(max(1, min(MOST_READERS, budget.capacity // 2 // largest)), largest, seconds)


async def in_time(messages: AsyncIterator[Any], seconds: float) -> AsyncIterator[Any]:
    """The same messages. Raises DeadlinePassed where one does not come within `seconds`."""
    while True:
        try:
            async with asyncio.timeout(seconds):
                message = await anext(messages)
        except TimeoutError:
            raise DeadlinePassed(late(seconds)) from None
        except StopAsyncIteration:
            return
        yield message


async def answer_stream(
    receive: Receive, answer: Callable[[bytes, Turn], Awaitable[None]], door: ShutdownGate, most: int, seconds: float
) -> None:
    """Answers a stream's messages until there are no more, or the door closes: at most `most` at once, and no more are read before.

    `answer` awaits its turn before it sends a reply; turns come in the order of the messages. Raises DeadlinePassed where no message comes
    for `seconds` and none is being answered. What `answer` raises ends the stream, in an ExceptionGroup.
    """
    in_flight: set[asyncio.Task[None]] = set()
    last: asyncio.Task[None] | None = None

    async def one(message: bytes, before: asyncio.Task[None] | None) -> None:
        async def turn() -> None:
            if before is not None:
                await asyncio.wait((before,))

        await answer(message, turn)

    async with asyncio.TaskGroup() as tasks:
        async for message in door.until_closed(_messages(receive, in_flight, most, seconds)):
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
                    raise DeadlinePassed(late(seconds))
        finally:
            reading.cancel()
        if not isinstance(message := reading.result(), bytes):
            return
        yield message


def late(seconds: float) -> str:
    """Why a call ends whose message does not come."""
    return f"the message was not there {seconds:g} seconds (client_timeout) after it could come"
