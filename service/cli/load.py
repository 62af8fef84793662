"""The load that `attend bench` puts on a server: bodies in each form, and requests over plain sockets that are kept open.

A client library costs more than a small request does, and would be measured along with it. So requests are made beforehand, as bytes;
one thread waits for all connections at once, so that they never wait for each other or for the GIL; and of a reply no more is read
than framing needs. Knows HTTP/1.1 as far as a reply with Content-Length.
"""

import binascii
import re
import selectors
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson

from service.client import Unreachable
from service.spec import LayerSpec
from service.tensors import Array, datatype_of, raw
from service.wire.negotiation import JSON, SAFETENSORS
from service.wire.safetensors_form import write_tensors

MEDIA = {"json": JSON, "safetensors": SAFETENSORS, "base64": JSON}  # form -> media type, of body and reply
BODIES, ROOM = 8, 128 * 1024 * 1024  # different bodies sent in turn: so many, or as many as this room holds
STALLED = 120.0  # seconds without a byte from any connection
CHUNK = 1024 * 1024
SHOWN = 300  # bytes of a refusal that are kept
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
PHASE = re.compile(rb"\b(decode|queue|compute|encode);dur=([0-9.]+)")
PHASES = ("decode", "queue", "compute", "encode")


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked: tensors of one shape for one layer. `fields` are the request's others."""

    name: str
    shape: tuple[int, int, int]
    heads: int
    connections: tuple[int, ...] = (1,)
    tensors: tuple[str, ...] = ("query", "key", "value")
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(d_model=self.shape[-1], num_heads=self.heads)

    def bodies(self, form: str, layer: str) -> list[bytes]:
        """Different bodies of one form, always the same ones."""
        rng, bodies = np.random.default_rng(0), list[bytes]()
        while len(bodies) < 2 or (len(bodies) < BODIES and sum(map(len, bodies)) + len(bodies[0]) <= ROOM):
            arrays = {name: rng.standard_normal(self.shape, np.float32) for name in self.tensors}
            bodies.append(encode(form, arrays, {"layer": layer, **self.fields}))
        return bodies


def encode(form: str, arrays: Mapping[str, Array], fields: Mapping[str, Any]) -> bytes:
    """One body. Numbers in JSON stand in the shortest way that gives the same float32 again."""
    if form == "safetensors":
        return b"".join(write_tensors(arrays, {"request": orjson.dumps(fields).decode()}))
    if form == "base64":
        return orjson.dumps({**fields, "reply": {"form": "base64"}, **{name: _base64(array) for name, array in arrays.items()}})
    return orjson.dumps({**fields, **arrays}, option=orjson.OPT_SERIALIZE_NUMPY)


def _base64(array: Array) -> dict[str, Any]:
    text = binascii.b2a_base64(raw(array), newline=False).decode()
    return {"shape": array.shape, "datatype": datatype_of(array).name, "base64": text}


@dataclass(slots=True)
class Replies:
    """What came back: of good replies the seconds each took and its head, of bad ones their number and what the first one said."""

    latencies: list[float] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    bad: int = 0
    failure: str = ""
    seconds: float = 0.0

    def add(self, head: bytes, latency: float, text: bytes) -> None:
        """A reply that came whole, its head up to the last line and the beginning of its body."""
        if head[9:12] == b"200":
            self.latencies.append(latency)
            self.heads.append(head)
        else:
            self.failed(" ".join((head.partition(b"\r\n")[0] + b": " + text).decode("utf-8", "replace").split()))

    def failed(self, why: str, count: int = 1) -> None:
        self.bad, self.failure = self.bad + count, self.failure or why

    def figures(self) -> dict[str, Any]:
        """Everything there is to say in numbers; None where no reply was good."""
        good = len(self.latencies)
        shown: dict[str, Any] = {"requests": good + self.bad, "bad": self.bad, "seconds": self.seconds}
        shown["rate"] = good / self.seconds if self.seconds else 0.0
        quantiles = np.percentile(self.latencies, (50, 99)) * 1e3 if good else (None, None)
        shown |= {name: None if q is None else float(q) for name, q in zip(("p50_ms", "p99_ms"), quantiles, strict=True)}
        spent: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for head in self.heads:
            for phase, duration in PHASE.findall(head):
                spent[phase.decode()].append(float(duration))
        shown |= {f"{phase}_ms": float(np.mean(times)) if times else None for phase, times in spent.items()}
        return {**shown, "failure": self.failure}


class Load:
    """Requests to POST /attend, the bodies in turn, each connection sending its next one when it has its reply."""

    def __init__(self, url: str, bodies: Sequence[bytes], form: str, connections: int, key: str | None = None) -> None:
        parts = urlsplit(url)
        self.address, self.connections = (parts.hostname or "", parts.port or 80), connections
        head = f"POST {parts.path.rstrip('/')}/attend HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        head += f"Content-Type: {MEDIA[form]}\r\nAccept: {MEDIA[form]}\r\n"
        head += f"Authorization: Bearer {key.strip()}\r\n" if key else ""
        self._turn = cycle([f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies])
        self._buffer = bytearray(CHUNK)
        self._replies, self._sent, self._least, self._until = Replies(), 0, 0, 0.0

    def run(self, seconds: float, least: int = 1) -> Replies:
        """Keeps sending for so long, and until `least` were sent; waits for every reply. Raises Unreachable if nothing listens."""
        try:
            lanes = [_Lane(self.address) for _ in range(self.connections)]
        except OSError as error:
            raise Unreachable(f"no answer from {self.address[0]}:{self.address[1]}: {error.strerror or error}") from None
        self._replies, self._sent, self._least = Replies(), 0, least
        began = perf_counter()
        self._until = began + seconds
        with selectors.DefaultSelector() as selector:
            for lane in lanes:
                selector.register(lane.socket, READ, lane)
                self._send(lane, selector)
            while waiting := len(selector.get_map()):
                ready = selector.select(STALLED)
                for key, events in ready:
                    self._move(key.data, events, selector)
                if not ready:
                    self._replies.failed(f"no answer in {STALLED:g} seconds", waiting)
                    break
        self._replies.seconds = perf_counter() - began
        for lane in lanes:
            lane.socket.close()
        return self._replies

    def _move(self, lane: "_Lane", events: int, selector: selectors.BaseSelector) -> None:
        """Reads first, since a server may refuse a body before it has read it."""
        try:
            if not (events & READ and lane.receive(self._buffer)):
                lane.watch(selector)
                return
            self._replies.add(lane.head, perf_counter() - lane.started, lane.text)
        except OSError as error:
            self._replies.failed(error.strerror or str(error))
            lane.broken = True
        self._send(lane, selector)

    def _send(self, lane: "_Lane", selector: selectors.BaseSelector) -> None:
        """The next request, on a new connection where the old one is of no more use; or the end of the lane."""
        over = perf_counter() >= self._until and self._sent >= self._least
        if over or lane.broken:
            selector.unregister(lane.socket)
            lane.socket.close()
        if over:
            return
        self._sent += 1
        try:
            if lane.broken:
                lane.open(self.address)
                selector.register(lane.socket, READ, lane)
            lane.begin(next(self._turn), perf_counter())
            lane.watch(selector)
        except OSError as error:
            self._replies.failed(error.strerror or str(error))
            if lane.socket.fileno() >= 0:
                selector.unregister(lane.socket)
                lane.socket.close()


class _Lane:
    """One connection, and where its request and its reply stand."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.open(address)

    def open(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, STALLED)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.events, self.broken = READ, False

    def begin(self, request: bytes, now: float) -> None:
        self.rest, self.started = memoryview(request), now
        self.head, self.text, self.missing = b"", b"", -1

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Sends what there is room for, and waits for more room only where something is left."""
        try:
            while self.rest:
                self.rest = self.rest[self.socket.send(self.rest) :]
        except BlockingIOError:
            pass
        except OSError:  # it listens no more; what it has said before that is read next, or nothing
            self.rest, self.broken = self.rest[:0], True
        events = READ | WRITE if self.rest else READ
        if events != self.events:
            selector.modify(self.socket, events, self)
            self.events = events

    def receive(self, buffer: bytearray) -> bool:
        """Reads what has come; true when the reply is whole. Raises OSError where it never will be."""
        try:
            count = self.socket.recv_into(buffer)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionError("the connection was closed before the reply was whole")
        piece = memoryview(buffer)[:count]
        if self.missing < 0:
            self.head += piece
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return False
            length = LENGTH.search(self.head, 0, end + 2)
            if length is None:
                raise ConnectionError("expected a reply with Content-Length")
            self.missing, count = int(length[1]), len(self.head) - end - 4
            self.head, piece = self.head[: end + 2], memoryview(self.head)[end + 4 :]
            self.broken = self.head.startswith(b"HTTP/1.0") or b"\r\nconnection: close" in self.head.lower()
        if len(self.text) < SHOWN:
            self.text += piece[: SHOWN - len(self.text)]
        self.missing -= count
        if self.missing < 0:
            raise ConnectionError("more came than Content-Length said")
        self.broken |= bool(self.rest)  # answered before it was asked to the end: the rest will not be read
        return not self.missing
