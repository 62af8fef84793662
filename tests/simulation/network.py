"""Connections between clients and the process: bytes that arrive in pieces, late, or never.

`Transport` is the server's end, with the behaviour of asyncio's transport of a TCP socket; `Peer` is the client's end.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulation.world import World

DELAYS = (0.0, 0.0, 5e-5, 2e-4, 1e-3, 2e-2)  # seconds that bytes travel
HIGH_WATER = 64 * 1024  # asyncio's default
PIECES = 0.5  # probability that bytes that are sent at once arrive in pieces


@dataclass
class Received:
    """Whether the server's protocol has received the bytes of a connection up to `stop`."""

    stop: int
    at: float | None = None


class Peer:
    """The client's end of a connection."""

    def __init__(self, world: World, address: str, kernel: int, name: str) -> None:
        """`kernel`: bytes that the operating systems buffer in each direction."""
        self.world, self.address = world, address
        self.draw = world.random(f"network {name}")
        self.transport = Transport(world, self, kernel)
        self.process: Any = None  # that has accepted the connection, and the number of its life
        self.life = 0
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.on_end: Callable[[], None] = lambda: None
        self.reading = True
        self.ended = False  # the server's end has closed, and the client knows
        self.left = False  # this end has closed
        self.delivered = 0  # bytes that the server's protocol has received
        self._awaited: list[Received] = []

    def send(self, data: bytes) -> None:
        """Send bytes, in drawn pieces."""
        start = 0
        while start < len(data):
            size = len(data) - start if self.draw.random() >= PIECES else self.draw.randint(1, len(data) - start)
            self.transport.arrive(data[start : start + size], self.draw.choice(DELAYS))
            start += size

    def watch(self, stop: int) -> Received:
        """Note when the server has received the bytes up to `stop`."""
        self._awaited.append(Received(stop))
        return self._awaited[-1]

    def deliver(self, size: int) -> None:
        """The server's protocol has received so many more bytes."""
        self.delivered += size
        while self._awaited and self.delivered >= self._awaited[0].stop:
            self._awaited.pop(0).at = self.world.now

    def finish(self) -> None:
        """Close the sending half."""
        self.transport.arrive(b"", self.draw.choice(DELAYS))

    def close(self) -> None:
        """Hang up: bytes that arrive from now on are answered by a reset."""
        self.left = True
        self.finish()

    def reset(self) -> None:
        """Hang up at once: bytes under way are lost."""
        self.left = True
        self.transport.lose(ConnectionResetError("Connection reset by peer"))

    def pause(self) -> None:
        self.reading = False

    def resume(self) -> None:
        self.reading = True
        self.transport.flow()


class Transport:
    """The server's end of a connection, with what asyncio's transports do as far as uvicorn and the service use it."""

    def __init__(self, world: World, peer: Peer, kernel: int) -> None:
        self.world, self.peer, self.kernel = world, peer, kernel
        self.loop: Any = None
        self.protocol: Any = None
        self._incoming: list[bytes] = []  # that have arrived and are not read yet; b"" is the end
        self._travelling: deque[bytes] = deque()  # that have not arrived
        self._arriving = 0.0  # time at which the last piece arrives
        self._reading = self._delivering = True
        self._buffer = bytearray()  # that the operating system has not taken
        self._sent = bytearray()  # that it has taken, and the client has not received
        self._high, self._low = HIGH_WATER, HIGH_WATER // 4
        self._paused = self._closing = self.lost = self._eof = self._eof_sent = self._flowing = False

    def connect(self, loop: Any, make: Callable[[], Any]) -> None:
        """Accept the connection: make its protocol. Bytes may have arrived before."""
        self.loop, self.protocol = loop, make()
        self.loop.call_soon(self.protocol.connection_made, self)
        self.loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._delivering = False
        self._deliver()

    # From the client

    def arrive(self, data: bytes, delay: float) -> None:
        """Bytes arrive after those that were sent before."""
        self._arriving = max(self._arriving, self.world.now + delay)
        self._travelling.append(data)

        def arrived() -> None:
            self._incoming.append(self._travelling.popleft())
            self._deliver()

        self.world.at(self._arriving - self.world.now, arrived)

    def _deliver(self) -> None:
        if self._incoming and self._reading and not (self._delivering or self.lost or self._closing):
            self._delivering = True
            self.loop.call_soon(self._received)

    def _received(self) -> None:
        self._delivering = False
        if not (self._incoming and self._reading) or self.lost or self._closing:
            return
        data = self._incoming.pop(0)
        if data:
            self.peer.deliver(len(data))
            self.protocol.data_received(data)
        elif not self.protocol.eof_received():
            self.close()
        self._deliver()

    def lose(self, error: Exception | None) -> None:
        """The connection breaks."""
        self.world.at(self.peer.draw.choice(DELAYS), lambda: self._force_close(error))

    # To the client

    def write(self, data: Any) -> None:
        if self.lost or not data:
            return
        assert not self._eof, "write after write_eof"
        self._buffer += data
        self._take()
        if not self._paused and len(self._buffer) > self._high:
            self._paused = True
            self.protocol.pause_writing()

    def _take(self) -> None:
        """The operating system takes as many bytes as it has room for."""
        if self.peer.left and self._buffer:
            self._force_close(BrokenPipeError("Broken pipe"))
            return
        size = min(len(self._buffer), self.kernel - len(self._sent))
        self._sent += self._buffer[:size]
        del self._buffer[:size]
        self.flow()

    def flow(self) -> None:
        """Bytes travel to the client, unless it does not read."""
        if not self._flowing and self.peer.reading and (self._sent or (self._eof and not self._eof_sent)):
            self._flowing = True
            self.world.at(self.peer.draw.choice(DELAYS), self._arrive_at_peer)

    def _arrive_at_peer(self) -> None:
        self._flowing = False
        peer = self.peer
        if peer.left or not peer.reading:
            return
        size = len(self._sent) if peer.draw.random() >= PIECES else peer.draw.randint(0, len(self._sent))
        data = bytes(self._sent[:size])
        del self._sent[:size]
        if data:
            peer.on_data(data)
        if not self.lost:
            self.loop.call_soon(self._writable)
        if self._eof and not self._sent and not self._buffer and not self._eof_sent:
            self._eof_sent = peer.ended = True
            peer.on_end()
        self.flow()

    def _writable(self) -> None:
        if self.lost:
            return
        self._take()
        if self._paused and len(self._buffer) <= self._low:
            self._paused = False
            self.protocol.resume_writing()
        if self._closing and not self._buffer:
            self._lose(None)

    # What protocols call

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": (self.peer.address, 40000), "sockname": ("127.0.0.1", 8000)}.get(name, default)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if not self._buffer:
            self.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._force_close(None)

    def _force_close(self, error: Exception | None) -> None:
        if self.loop is None or self.loop.is_closed():  # nobody has accepted the connection, or who did was killed
            self.die()
        elif not self.lost:
            self._buffer.clear()
            self._closing = True
            self.loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        """The connection is closed: the client reads what the operating system has, and then the end."""
        if self.lost:
            return
        self.lost = self._eof = True
        if self.protocol is not None:
            self.protocol.connection_lost(error)
        self.flow()

    def die(self) -> None:
        """The process was killed: the client reads what the operating system has, and then the end."""
        self._buffer.clear()
        self.lost = self._closing = self._eof = True
        self.flow()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._eof = True
        self.flow()

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low
        if not self._paused and len(self._buffer) > self._high:
            self._paused = True
            self.protocol.pause_writing()

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._deliver()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol
