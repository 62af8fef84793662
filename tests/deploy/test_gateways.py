"""The sample configurations of gateways in front of a real server, with other ports and shorter times: kept-alive HTTP, and gRPC."""

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from support.server import Server
from tritonclient.grpc import service_pb2, service_pb2_grpc

SAMPLES = Path(__file__).parents[2] / "deploy" / "gateways"
IDLE = 1.0  # seconds after which a gateway lets go of an idle connection, and 1.25 times which the server does
QUERY = {"query": [[0.5] * 64]}

pytestmark = pytest.mark.gateway


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def changed(text: str, changes: dict[str, str]) -> str:
    for before, after in changes.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


def nginx(folder: Path, ports: dict[str, str]) -> list[str]:
    """The command that runs nginx with the sample."""
    temporary = "".join(f"\n  {kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;\n" if os.geteuid() == 0 else ""  # who may write into the folder of the test
    changes = {"keepalive_timeout 60s": f"keepalive_timeout {IDLE * 1000:.0f}ms", "http {": f"http {{{temporary}\n  access_log off;"}
    (folder / "nginx.conf").write_text(user + changed((SAMPLES / "nginx.conf").read_text(), ports | changes))
    command = ["nginx", "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    return [*command, "-g", f"daemon off; pid {folder}/pid;"]


def haproxy(folder: Path, ports: dict[str, str]) -> list[str]:
    """The command that runs HAProxy with the sample."""
    changes = {"pool-purge-delay 5s": f"pool-purge-delay {IDLE * 1000:.0f}ms"}
    (folder / "haproxy.cfg").write_text(changed((SAMPLES / "haproxy.cfg").read_text(), ports | changes))
    return ["haproxy", "-f", str(folder / "haproxy.cfg")]


class Gateway:
    """A running gateway and the server behind it."""

    def __init__(self, server: Server, command: Callable[[Path, dict[str, str]], list[str]], folder: Path) -> None:
        address = next(event["address"] for event in server.events if event["event"] == "listening for gRPC")
        http, grpc_port = (str(where).rpartition(":")[2] for where in (server.url, address))
        self.server, self.http, self.grpc = server, free_port(), free_port()
        ports = {"127.0.0.1:8000": f"127.0.0.1:{http}", "127.0.0.1:8001": f"127.0.0.1:{grpc_port}"}
        ports |= {"8080": str(self.http), "8081": str(self.grpc)}
        self.process = subprocess.Popen(command(folder, ports))

    def wait(self) -> None:
        """Returns once it accepts calls."""
        for port in (self.http, self.grpc):
            while True:
                assert self.process.poll() is None, "the gateway has ended"
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    pass


@pytest.fixture(params=[nginx, haproxy])
def gateway(request: pytest.FixtureRequest, start: Callable[..., Server], tmp_path: Path) -> Iterator[Gateway]:
    server = start("--keepalive-timeout", str(1.25 * IDLE), "--grpc-port", "0", "--trusted-proxies", "127.0.0.1", "--access-log")
    one = Gateway(server, request.param, tmp_path)
    try:
        one.wait()
        yield one
    finally:
        one.process.terminate()
        one.process.wait(20)


async def post(port: int, waves: list[float], callers: int) -> list[int]:
    """The statuses of posts that all callers send at once, each on its own connection, and again after each of these pauses."""
    body = json.dumps(QUERY).encode()
    request = b"POST /attend HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(callers)]

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        return int(head.split()[1])

    statuses = []
    for pause in waves:
        statuses += await asyncio.gather(*(one(*stream) for stream in streams))
        await asyncio.sleep(pause)
    for _, writer in streams:
        writer.close()
    return statuses


def test_no_post_is_lost_when_idle_connections_are_closed(gateway: Gateway) -> None:
    """Pauses about as long as gateway and server keep an idle connection."""
    pauses = [edge * IDLE + shift for edge in (1.0, 1.25) for shift in (-0.02, -0.005, 0.0, 0.005)]
    assert set(asyncio.run(post(gateway.http, [*pauses, 0.0], 40))) == {200}


def test_gateways_pass_large_bodies_refusals_addresses_and_grpc(gateway: Gateway) -> None:
    """Bodies of any size that the service accepts, unchanged refusals, the caller's address, and gRPC."""
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.http}", timeout=60, transport=elsewhere) as client:
        large = json.dumps({"query": [[[0.25] * 64]] * 20_000, "outputs": ["log_sum_exp"]}).encode()  # 8 MB
        assert client.post("/attend", content=large, headers={"X-Request-Id": "large"}).status_code == 200
        assert client.post("/attend", json={}).headers["content-type"] == "application/problem+json"
        assert client.get("/health/ready", headers={"Accept-Encoding": "gzip"}).status_code == 200
    assert gateway.server.access_line("large")["client"] == "127.0.0.2"
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=60).live
        contents = service_pb2.InferTensorContents(fp32_contents=[0.5] * 64)
        query = service_pb2.ModelInferRequest.InferInputTensor(name="query", datatype="FP32", shape=[1, 1, 64], contents=contents)
        reply = stub.ModelInfer(service_pb2.ModelInferRequest(model_name="default", inputs=[query]), timeout=60)
        assert [tuple(output.shape) for output in reply.outputs] == [(1, 1, 64), (1, 8, 1, 1)]
