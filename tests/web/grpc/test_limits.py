"""Limits on the messages, time and calls of gRPC clients, also of those without a key."""

import asyncio
import json
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from attend.errors import DeadlinePassed, InvalidRequest, Overloaded
from attend.serving.byte_budget import ByteBudget, Lease
from attend.serving.streams import MessageReader, message_reader
from attend.web.grpc.calls import MAX_STREAMS
from attend.web.grpc.calls import address_of as address_of_peer
from attend.web.grpc.health import MAX_WATCHES
from attend.web.keys import make_key, write_keys
from support.grpc_calls import GOOD, INVALID, SERVICE, address_of, entry, request
from support.http2 import ACK, DATA, END_STREAM, HEADERS, MORE_HEADERS, PING, SETTINGS, frame, opening
from support.raw_http import held_bytes
from support.server import Server, fork_server, start_server
from support.waiting import until

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


class GuardedServer:
    """A gRPC server that requires a key, which `metadata` has, and allows one second for each message."""

    def __init__(self, folder: Path) -> None:
        secret, key = make_key("caller", ("infer", "admin"))
        write_keys(folder / "keys", [key])
        self.metadata = (("x-api-key", secret),)
        self.server = fork_server("--grpc-port", "0", "--keys-file", str(folder / "keys"), "--client-timeout", "1")
        self.address = address_of(self.server)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    server = GuardedServer(tmp_path_factory.mktemp("keys"))
    yield server
    server.server.stop()


def end_of_half_a_message(address: str, method: str, *metadata: tuple[str, str]) -> bytes:
    """Declares a message of a megabyte, sends the first kilobyte, and returns the block of headers that the server ends the call with."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rb") as incoming:
        connection.sendall(opening(address, method, *metadata) + frame(DATA, 0, 1, b"\0" + struct.pack(">I", 1 << 20) + bytes(1024)))
        while True:
            head = incoming.read(9)
            assert len(head) == 9, "the connection was closed"
            payload = incoming.read(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            if kind == HEADERS and flags & END_STREAM:
                return payload


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "RepositoryModelLoad", "ModelMetadata"])
def test_a_call_without_a_key_is_refused_before_its_message_is_read(guarded: GuardedServer, method: str) -> None:
    assert b"a key as" in end_of_half_a_message(guarded.address, f"/{SERVICE}/{method}")


@pytest.mark.parametrize(("method", "needs_key"), [("ServerLive", False), ("ServerMetadata", True)])
def test_a_request_without_fields_is_not_read(guarded: GuardedServer, method: str, needs_key: bool) -> None:
    metadata = guarded.metadata if needs_key else ()
    assert b"grpc-status\x010" in end_of_half_a_message(guarded.address, f"/{SERVICE}/{method}", *metadata)


@pytest.mark.parametrize("method", [f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelMetadata", "grpc.health.v1.Health/Check"])
def test_an_incomplete_message_ends_the_call_after_client_timeout(guarded: GuardedServer, method: str) -> None:
    assert b"client_timeout" in end_of_half_a_message(guarded.address, f"/{method}", *guarded.metadata)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_an_idle_reflection_stream_is_ended(guarded: GuardedServer, version: str) -> None:
    method = f"grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"

    assert b"client_timeout" in end_of_half_a_message(guarded.address, f"/{method}")


def test_an_idle_stream_of_requests_stays_open(guarded: GuardedServer) -> None:
    """It is silent for longer than the client timeout, which ends another call meanwhile."""
    good = request("default", entry("query", [1, 1, 64], fp32_contents=[0.5] * 64))
    with grpc.insecure_channel(guarded.address) as channel:
        coming: queue.Queue[Any] = queue.Queue()
        stream = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(coming.get, None), metadata=guarded.metadata)
        coming.put(good)
        assert not next(stream).error_message
        assert b"client_timeout" in end_of_half_a_message(guarded.address, f"/{SERVICE}/ModelInfer", *guarded.metadata)
        coming.put(good)
        assert not next(stream).error_message
        coming.put(None)
        assert list(stream) == [] and stream.code() is grpc.StatusCode.OK


def test_the_number_of_streams_of_one_caller_is_limited(guarded: GuardedServer) -> None:
    good = request("default", entry("query", [1, 1, 64], fp32_contents=[0.5] * 64))
    with grpc.insecure_channel(guarded.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        coming: list[queue.Queue[Any]] = [queue.Queue() for _ in range(MAX_STREAMS // 2 + 1)]
        for one in coming:
            one.put(good)
        streams = [stub.ModelStreamInfer(iter(one.get, None), metadata=guarded.metadata) for one in coming[:-1]]
        assert all(not next(stream).error_message for stream in streams)
        refused = stub.ModelStreamInfer(iter(coming[-1].get, None), metadata=guarded.metadata)
        with pytest.raises(grpc.RpcError) as caught:
            next(refused)
        assert caught.value.code() is EXHAUSTED
        assert dict(caught.value.trailing_metadata())["retry-after"] in ("1", "2")  # one second, and up to half of it more, drawn
        for one in coming:
            one.put(None)


def test_an_unread_reply_counts_against_the_budget(v2_server: Server) -> None:
    """The connection takes 64 KiB of half a megabyte. The rest is counted until the client disconnects."""
    body = request("tiny", entry("query", [1, 200, 6]), raw_input_contents=[bytes(200 * 6 * 4)]).SerializeToString()
    host, port = address_of(v2_server).rsplit(":", 1)

    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(opening(address_of(v2_server), f"/{SERVICE}/ModelInfer"))
        connection.sendall(frame(DATA, END_STREAM, 1, b"\0" + struct.pack(">I", len(body)) + body))
        until(lambda: held_bytes(v2_server) >= 3 * 200 * 200 * 4, "the reply is counted")
    until(lambda: held_bytes(v2_server) == 0, "the reply is no longer counted")


def test_messages_of_methods_without_tensors_are_limited_to_a_megabyte(guarded: GuardedServer) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        config = {"config": {"string_param": f"[{'[],' * 500_000}[]]"}}
        for call, message in (
            (stub.ModelReady, service_pb2.ModelReadyRequest(name="a" * (1 << 20))),
            (stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest(model_name="z", parameters=config)),
        ):
            with pytest.raises(grpc.RpcError, match="at most 1048576 bytes") as caught:
                call(message, metadata=guarded.metadata)
            assert caught.value.code() is INVALID
        tokens = {"tokens": {"string_param": json.dumps({"query": ["a" * (2 << 20)]})}}
        with pytest.raises(grpc.RpcError, match="besides the tensors"):
            stub.ModelInfer(request("default", GOOD, parameters=tokens), metadata=guarded.metadata)


def test_the_number_of_health_watches_is_limited(v2_server: Server) -> None:
    """One caller may have half of them. A slot is free again when its watch ends."""
    with grpc.insecure_channel(address_of(v2_server)) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        watches = [watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_WATCHES // 2)]
        assert all(next(one).status == health_pb2.HealthCheckResponse.SERVING for one in watches)
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(health_pb2.HealthCheckRequest()))
        assert caught.value.code() is EXHAUSTED
        for one in watches:
            one.cancel()


def test_the_message_limit_applies_after_decompression(v2_server: Server) -> None:
    with grpc.insecure_channel(address_of(v2_server)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(bytes(2 << 20), compression=grpc.Compression.Gzip)
        assert caught.value.code() is EXHAUSTED


def test_a_reply_larger_than_a_message_is_refused(v2_server: Server) -> None:
    query = request("tiny", entry("query", [1, 600, 6]), raw_input_contents=[bytes(600 * 6 * 4)])
    with grpc.insecure_channel(address_of(v2_server), [("grpc.max_receive_message_length", -1)]) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        with pytest.raises(grpc.RpcError, match="max_grpc_bytes") as caught:
            infer(query)
        assert caught.value.code() is INVALID
        query.outputs.add(name="output")
        assert len(infer(query).outputs) == 1


class Call:
    """A call whose message arrives when the test sets it."""

    def __init__(self) -> None:
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.reads = asyncio.Event()

    async def read(self) -> Any:
        self.reads.set()
        return await self.message


def test_a_message_being_read_counts_as_the_largest_message() -> None:
    async def check() -> None:
        budget, call = ByteBudget(1000), Call()
        reader = message_reader(budget, 100, 60)
        assert reader.count == 5
        with Lease(budget, "a") as lease:
            reading = asyncio.create_task(reader.read(call.read, lease))
            await call.reads.wait()
            assert budget.held == 100
            call.message.set_result(b"seven b")
            assert await reading == b"seven b"
            assert budget.held == 7
            with Lease(budget, "b") as second, Lease(budget, "c") as third, pytest.raises(Overloaded):
                second.add(500)
                third.add(500)
        none = Call()
        none.message.set_result(grpc.aio.EOF)
        with pytest.raises(InvalidRequest), Lease(budget, "a") as lease:
            await reader.read(none.read, lease)
        assert budget.held == 0

    asyncio.run(check())


def test_one_caller_reads_at_most_half_of_the_messages_at_once() -> None:
    """Of four slots one caller has two. Its further messages are read later, and none is lost."""

    async def check() -> None:
        budget, reader = ByteBudget(10**6), MessageReader(4, 100, 60)
        ours, theirs = [Call() for _ in range(3)], Call()

        async def read(call: Call, caller: str) -> bytes:
            with Lease(budget, caller) as lease:
                return await reader.read(call.read, lease)

        reading = [asyncio.create_task(read(call, "a")) for call in ours]
        other = asyncio.create_task(read(theirs, "b"))
        await asyncio.gather(*(call.reads.wait() for call in (*ours[:2], theirs)))
        assert not ours[2].reads.is_set()
        ours[0].message.set_result(b"0")
        await ours[2].reads.wait()
        for call, message in ((ours[1], b"1"), (ours[2], b"2"), (theirs, b"b")):
            call.message.set_result(message)
        assert [*await asyncio.gather(*reading), await other] == [b"0", b"1", b"2", b"b"]

    asyncio.run(check())


def test_waiting_for_a_slot_and_for_a_message_times_out() -> None:
    async def check() -> None:
        budget, reader, slow = ByteBudget(10**6), MessageReader(1, 100, 0.05), MessageReader(1, 100, 60)
        with Lease(budget, "a") as lease, pytest.raises(DeadlinePassed, match="client_timeout"):
            await reader.read(Call().read, lease)
        slow.seconds, call = 60, Call()
        with Lease(budget, "a") as lease, Lease(budget, "b") as other:
            reading = asyncio.create_task(slow.read(call.read, lease))
            await call.reads.wait()
            slow.seconds = 0.05
            with pytest.raises(Overloaded, match="at once"):
                await slow.read(Call().read, other)
            call.message.set_result(b"")
            await reading

    asyncio.run(check())


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:127.0.0.1:50123", "127.0.0.1"), ("ipv6:%5B::1%5D:50123", "::1"), ("ipv6:[fe80::1]:9", "fe80::1"), ("unix:", "")],
)
def test_the_address_of_a_caller_has_no_port(peer: str, address: str) -> None:
    assert address_of_peer(peer) == address


def test_a_process_ends_by_itself_when_headers_that_never_end_fill_its_memory() -> None:
    """The library keeps them, and no option bounds that. The log says why. The connections go on sending, and do not delay the end."""
    server = start_server("--grpc-port", "0", "--max-resident-bytes", str(400 << 20))
    host, port = address_of(server).rsplit(":", 1)

    def flood() -> None:
        while server.process.poll() is None:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(opening(address_of(server), f"/{SERVICE}/ModelInfer", flags=0))
                while server.process.poll() is None:
                    connection.sendall(MORE_HEADERS)

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert server.process.wait(300) == 0
    for thread in threads:
        thread.join()
    (event,) = [event for event in server.events if event["level"] == "error"]
    assert str(event["event"]).startswith("memory limit exceeded")
    assert event["max_resident_bytes"] == 400 << 20 < int(str(event["resident_bytes"]))
