"""Readiness over HTTP, V2 and gRPC (the device computes, there is a model, the server is not draining), and how the gRPC server stops."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from starlette.testclient import TestClient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from attend.serving.requests import Request
from attend.settings import Settings
from attend.web.app import create_app
from attend.web.grpc.descriptors import HEALTH_LIST
from support.command import run_attend
from support.grpc_calls import SERVICE, address_of, entry, request
from support.processes import LONG, HalfSent, ask, events, only, several_workers, workers_of
from support.server import Server
from support.waiting import PATIENCE, until

STATE = health_pb2.HealthCheckResponse
GOOD = request("default", entry("query", [1, 1, 64], fp32_contents=[0.5] * 64))
SPEC = {"parameters": {"config": '{"d_model": 4, "num_heads": 2}'}}


def watched(channel: grpc.Channel, name: str = "") -> Iterator[int]:
    """Yields the states that a watcher receives."""
    stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE)
    return (message.status for message in stream)


def checked(channel: grpc.Channel, name: str = "") -> int:
    return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name)).status)


def listed(channel: grpc.Channel) -> dict[str, int]:
    """The states of all services. The library of the health service lacks `List`; its reply is one field of the server's descriptors."""
    reply = HEALTH_LIST.FromString(channel.unary_unary("/grpc.health.v1.Health/List")(b""))
    return {name: state.status for name, state in reply.statuses.items()}


def readiness(channel: grpc.Channel) -> tuple[bool, bool]:
    """Of the server and of its model."""
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    server, model = stub.ServerReady(service_pb2.ServerReadyRequest()), stub.ModelReady(service_pb2.ModelReadyRequest(name="default"))
    return server.ready, model.ready


def code_of_a_call(channel: grpc.Channel) -> grpc.StatusCode:
    try:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(GOOD, timeout=PATIENCE)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def answers_new_connection(address: str) -> bool:
    """Whether a call on a new connection is answered soon."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(GOOD, timeout=1)
        except grpc.RpcError:
            return False
    return True


def test_watchers_are_notified_of_the_drain_and_their_streams_end_with_it(start: Callable[..., Server]) -> None:
    """Every watcher, also if another one of the same name has disconnected. Calls are accepted during the drain."""
    server = start("--grpc-port", "0", "--drain-seconds", LONG, "--shutdown-seconds", LONG)
    with grpc.insecure_channel(address_of(server)) as channel, grpc.insecure_channel(address_of(server)) as other:
        gone, *watchers = watched(other), watched(channel), watched(channel), watched(channel, SERVICE)
        unknown = watched(channel, "none")
        assert [next(states) for states in (gone, *watchers)] == [STATE.SERVING] * 4
        assert next(unknown) == STATE.SERVICE_UNKNOWN
        other.close()
        assert (checked(channel), checked(channel, SERVICE), readiness(channel)) == (STATE.SERVING, STATE.SERVING, (True, True))
        assert listed(channel) == {"": STATE.SERVING, SERVICE: STATE.SERVING}
        with pytest.raises(grpc.RpcError, match="none") as caught:
            checked(channel, "none")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

        server.process.send_signal(signal.SIGTERM)
        assert [next(states) for states in watchers] == [STATE.NOT_SERVING] * 3
        assert (checked(channel), checked(channel, SERVICE), readiness(channel)) == (STATE.NOT_SERVING, STATE.NOT_SERVING, (False, False))
        assert code_of_a_call(channel) is grpc.StatusCode.OK
        assert [ask(server.url, path=f"/v2/{path}").status_code for path in ("health/live", "health/ready", "models/default/ready")] == [
            200,
            503,
            503,
        ]

        server.process.send_signal(signal.SIGTERM)  # a second SIGTERM skips the rest of the drain
        for states in (*watchers, unknown):
            assert list(states) == []
        assert server.process.wait(PATIENCE) == 0
    assert "Traceback" not in "".join(server.log)


def reflecting(channel: grpc.Channel, version: str) -> Any:
    """The method of a version of the reflection service; both have the same messages."""
    request, reply = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    return channel.stream_stream(path, request.SerializeToString, reply.FromString)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_every_service_it_lists(v2_server: Server, version: str) -> None:
    """A tool such as grpcurl asks for the list, and then for the file that has each service and the files which that imports."""
    with grpc.insecure_channel(address_of(v2_server)) as channel:
        (listing,) = reflecting(channel, version)(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = sorted(service.name for service in listing.list_services_response.service)
        questions = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in names]
        replies = list(reflecting(channel, version)(iter(questions)))
    pool = descriptor_pool.DescriptorPool()
    for reply in replies:
        for file in reply.file_descriptor_response.file_descriptor_proto:
            pool.AddSerializedFile(file)
    methods = {name: sorted(pool.FindServiceByName(name).methods_by_name) for name in names}
    assert methods.pop(SERVICE)[:3] == ["ModelConfig", "ModelInfer", "ModelMetadata"]
    assert methods == {
        "grpc.health.v1.Health": ["Check", "List", "Watch"],
        "grpc.reflection.v1.ServerReflection": ["ServerReflectionInfo"],
        "grpc.reflection.v1alpha.ServerReflection": ["ServerReflectionInfo"],
    }
    assert pool.FindMessageTypeByName("grpc.reflection.v1.ServerReflectionResponse").fields_by_name["error_response"].number == 7


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_open_reflection_streams_do_not_delay_the_exit(start: Callable[..., Server], version: str) -> None:
    """One stream is open without a request; another has ended before."""
    server = start("--grpc-port", "0", "--drain-seconds", "0", "--shutdown-seconds", LONG)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(address_of(server)) as channel:
        reflect, staying = reflecting(channel, version), threading.Event()

        def questions() -> Iterator[Any]:
            yield from (listing, listing)
            staying.wait(PATIENCE)

        ended = list(reflect(iter([listing])))
        open_stream = reflect(questions(), timeout=PATIENCE)
        answers = [next(open_stream), next(open_stream), *ended]
        for answer in answers:
            assert len(answer.list_services_response.service) == 4
        server.process.send_signal(signal.SIGTERM)
        assert list(open_stream) == []
        assert server.process.wait(PATIENCE) == 0
        staying.set()
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_without_a_drain_watchers_are_notified_of_the_shutdown_at_once(start: Callable[..., Server], number: signal.Signals) -> None:
    server = start("--grpc-port", "0", "--drain-seconds", "0", "--shutdown-seconds", LONG)
    with grpc.insecure_channel(address_of(server)) as channel:
        states = watched(channel)
        assert next(states) == STATE.SERVING
        server.process.send_signal(number)
        assert list(states) == [STATE.NOT_SERVING]
        server.process.wait(PATIENCE)


def test_grpc_stops_accepting_calls_together_with_http(start: Callable[..., Server]) -> None:
    """While HTTP still answers a request, a new call is UNAVAILABLE, on a new and on an existing connection.

    The server's timeouts are long: gRPC's client may wait 20 seconds for a connection.
    """
    server = start("--grpc-port", "0", "--drain-seconds", "0", "--client-timeout", LONG, "--shutdown-seconds", LONG)
    half_sent = HalfSent(server.url)
    with grpc.insecure_channel(address_of(server)) as kept:
        assert code_of_a_call(kept) is grpc.StatusCode.OK
        server.process.send_signal(signal.SIGTERM)
        until(lambda: code_of_a_call(kept) is grpc.StatusCode.UNAVAILABLE, "the port is closed")
        with grpc.insecure_channel(address_of(server)) as new:
            assert code_of_a_call(new) is grpc.StatusCode.UNAVAILABLE
        assert server.process.poll() is None
    assert half_sent.finish()[0] == 200
    assert server.process.wait(PATIENCE) == 0


def test_a_server_is_ready_once_it_has_a_model(start: Callable[..., Server]) -> None:
    """Without a model it is live and not ready."""
    server = start("--grpc-port", "0")
    with grpc.insecure_channel(address_of(server)) as channel, httpx.Client(base_url=server.url) as http:
        states = watched(channel)
        assert next(states) == STATE.SERVING
        assert http.post("/v2/repository/models/default/unload").status_code == 200
        assert next(states) == STATE.NOT_SERVING
        assert readiness(channel) == (False, False)
        assert http.post("/v2/repository/models/default/load", json=SPEC).status_code == 200
        assert next(states) == STATE.SERVING
        assert readiness(channel) == (True, True)


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError(), "RESOURCE_EXHAUSTED"), (OSError(12, "Cannot allocate memory"), "RESOURCE_EXHAUSTED"), (KeyError(), "INTERNAL")],
)
def test_out_of_memory_is_told_from_faults(error: Exception, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over HTTP, and the next call is answered."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = create_app(Settings(grpc_port=port, access_log=False))

    def fail(*args: Any, **keywords: Any) -> Any:
        raise error

    with TestClient(app, base_url="http://127.0.0.1"), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        until(lambda: app.state.service.started, "started")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with monkeypatch.context() as patch, pytest.raises(grpc.RpcError) as refused:
            patch.setattr(Request, "take_body", fail)
            stub.ModelInfer(GOOD, timeout=PATIENCE)
        assert refused.value.code().name == code
        assert ("memory" in refused.value.details()) == (code == "RESOURCE_EXHAUSTED")
        assert stub.ModelInfer(GOOD, timeout=PATIENCE).model_name == "default"


def test_a_hung_device_is_not_ready_over_any_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """All report what /health/ready reports. The server is live."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = create_app(Settings(grpc_port=port))
    service = app.state.service

    async def silent(layer: Any) -> bool:
        return False

    with TestClient(app, base_url="http://127.0.0.1") as client, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        until(lambda: service.started, "started")
        paths = ("/health/ready", "/v2/health/ready", "/v2/models/default/ready", "/v2/health/live")
        assert [client.get(path).status_code for path in paths] == [200, 200, 200, 200]
        assert readiness(channel) == (True, True) and checked(channel) == STATE.SERVING

        monkeypatch.setattr(service.probe, "responds", silent)

        assert [client.get(path).status_code for path in paths] == [503, 503, 503, 200]
        assert client.get("/v2/health/ready").json() == {"live": True, "ready": False, "error": "not ready"}
        assert client.get("/v2/models/default/ready").json() == {"name": "default", "ready": False}
        assert readiness(channel) == (False, False) and checked(channel) == STATE.NOT_SERVING


def test_a_grpc_port_in_use_is_refused(start: Callable[..., Server]) -> None:
    """The kernel would let two gRPC servers share it, and half of all calls would reach the other."""
    taken = address_of(start("--grpc-port", "0")).rpartition(":")[2]
    with socket.create_server(("127.0.0.1", 0)) as other_server:
        for port in (taken, str(other_server.getsockname()[1])):
            done = run_attend("serve", "--port", "0", "--grpc-port", port)
            assert done.returncode == 1
            message = done.stderr.decode()
            assert message.startswith(f"attend serve: cannot listen on 127.0.0.1:{port}, for gRPC: Address already in use")
            assert message.count("\n") == 1


@several_workers
def test_workers_share_one_grpc_port(two_workers: Server) -> None:
    """Also if the port is chosen by the system. Calls reach all workers, and their statistics are summed."""
    server = two_workers
    until(lambda: len(events(server, "listening for gRPC")) >= 2, "both listen")
    [address] = {str(event["address"]) for event in events(server, "listening for gRPC")}

    for worker in workers_of(server.process.pid):
        with only(worker, server.process.pid):
            until(lambda: answers_new_connection(address), "an answer")  # the kernel gives connections to the stopped worker, too

    with grpc.insecure_channel(address) as channel:
        reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStatistics(service_pb2.ModelStatisticsRequest(name="default"))
    assert reply.model_stats[0].inference_stats.success.count >= 2
