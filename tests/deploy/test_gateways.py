"""The sample configurations of gateways in front of real servers, with other ports and shorter times: kept-alive HTTP, gRPC, and sessions
of two replicas."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from tritonclient import http as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from attend.client import Client, Session
from attend.errors import AttendError, SessionEnded
from support.http2 import MORE_HEADERS, opening
from support.server import Server

SAMPLES = Path(__file__).parents[2] / "deploy" / "gateways"
IDLE = 1.0  # seconds after which a gateway closes an idle connection; the server does after 1.25 times as long
QUERY = {"query": [[0.5] * 64]}

ROW = np.random.default_rng(0).standard_normal((1, 64)).astype("f4")

pytestmark = pytest.mark.gateway


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def changed(text: str, changes: dict[str, str]) -> str:
    for before, after in changes.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


def nginx(folder: Path, ports: dict[str, str], sample: str = "nginx") -> list[str]:
    """The command that runs nginx with a sample."""
    temporary = "".join(f"\n  {kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;\n" if os.geteuid() == 0 else ""  # so that the workers may write into the test's folder
    changes = {"keepalive_timeout 60s": f"keepalive_timeout {IDLE * 1000:.0f}ms", "http {": f"http {{{temporary}\n  access_log off;"}
    (folder / "nginx.conf").write_text(user + changed((SAMPLES / f"{sample}.conf").read_text(), ports | changes))
    command = ["nginx", "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    return [*command, "-g", f"daemon off; pid {folder}/pid;"]


def haproxy(folder: Path, ports: dict[str, str], sample: str = "haproxy") -> list[str]:
    """The command that runs HAProxy with a sample."""
    changes = {"pool-purge-delay 5s": f"pool-purge-delay {IDLE * 1000:.0f}ms"}
    (folder / "haproxy.cfg").write_text(changed((SAMPLES / f"{sample}.cfg").read_text(), ports | changes))
    return ["haproxy", "-f", str(folder / "haproxy.cfg")]


def wait_for(process: subprocess.Popen[bytes], *ports: int) -> None:
    """Returns once the gateway accepts calls on all these ports."""
    for port in ports:
        while True:
            assert process.poll() is None, "the gateway has ended"
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                pass


class Gateway:
    """A running gateway and the server behind it."""

    def __init__(self, server: Server, command: Callable[[Path, dict[str, str]], list[str]], folder: Path) -> None:
        address = next(event["address"] for event in server.events if event["event"] == "listening for gRPC")
        http, grpc_port = (str(where).rpartition(":")[2] for where in (server.url, address))
        self.server, self.http, self.grpc = server, free_port(), free_port()
        ports = {"127.0.0.1:8000": f"127.0.0.1:{http}", "127.0.0.1:8001": f"127.0.0.1:{grpc_port}"}
        ports |= {"8080": str(self.http), "8081": str(self.grpc)}
        self.process = subprocess.Popen(command(folder, ports))


@pytest.fixture(params=[nginx, haproxy])
def gateway(request: pytest.FixtureRequest, start: Callable[..., Server], tmp_path: Path) -> Iterator[Gateway]:
    server = start("--keepalive-timeout", str(1.25 * IDLE), "--grpc-port", "0", "--trusted-proxies", "127.0.0.1", "--access-log")
    one = Gateway(server, request.param, tmp_path)
    try:
        wait_for(one.process, one.http, one.grpc)
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


def resident_bytes(process: int) -> int:
    """Resident memory of a process and its children."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in children)


def test_gateways_keep_headers_that_never_end_from_the_server(gateway: Gateway) -> None:
    """HAProxy closes the connection, nginx discards what follows. Neither keeps it, nor passes it on to the gRPC library, which would."""
    processes = (gateway.server.process.pid, gateway.process.pid)
    before = [resident_bytes(process) for process in processes]
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", gateway.grpc), timeout=60) as connection:
        connection.sendall(opening("localhost", "/inference.GRPCInferenceService/ModelInfer", flags=0))
        for _ in range(10_000):  # 100 MB, of which the library would make several times as much
            connection.sendall(MORE_HEADERS)
    assert all(resident_bytes(process) - size < 20_000_000 for process, size in zip(processes, before, strict=True))


class Replicas:
    """Two servers with sessions behind a gateway."""

    def __init__(self, start: Callable[..., Server], command: Callable[..., list[str]], folder: Path) -> None:
        flags = ("--session-memory", "1000000", "--trusted-proxies", "127.0.0.1")
        self.servers = {name: start(*flags, "--replica-name", name) for name in ("one", "two")}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        addresses = [server.url.removeprefix("http://") for server in self.servers.values()]
        ports = {"127.0.0.1:8000": addresses[0], "127.0.0.1:8010": addresses[1], "8080": str(self.port)}
        self.process = subprocess.Popen(command(folder, ports, f"{command.__name__}-sessions"))

    def begin(self, client: Client) -> dict[str, Session]:
        """A session of each replica, by its name."""
        found: dict[str, Session] = {}
        while found.keys() != {"one", "two"}:
            session = client.session()
            found[session.id.split(".")[1]] = session
        return found


@pytest.fixture(params=[nginx, haproxy])
def replicas(request: pytest.FixtureRequest, start: Callable[..., Server], tmp_path: Path) -> Iterator[Replicas]:
    two = Replicas(start, request.param, tmp_path)
    try:
        wait_for(two.process, two.port)
        yield two
    finally:
        two.process.terminate()
        two.process.wait(20)


def test_all_requests_of_a_session_reach_its_replica(replicas: Replicas) -> None:
    """Also requests that name it in their body. Another replica refuses them; if the replica has ended, the gateway replies so."""
    with Client(replicas.url, retries=0) as client, httpx.Client() as direct:
        sessions = replicas.begin(client)
        for _ in range(20):
            for session in sessions.values():
                session.attend(ROW, causal=True)
        for name, session in sessions.items():
            assert session.length == 20
            assert client.analysis(ROW, session=session.id, metrics=["entropy"]).metrics["entropy"].shape == (8,)
            assert client.plan(ROW, session=session.id).admitted
            assert client.figure(ROW, session=session.id).startswith(b"\x89PNG")
            fork = session.fork(7)
            assert fork.id.split(".")[1] == name and fork.attend(ROW).session_length == 8
            fork.delete()
            with pytest.raises(SessionEnded, match="it was deleted"):
                fork.info()
        wrong = direct.post(f"{replicas.servers['one'].url}/sessions/{sessions['two'].id}/attend", json={"query": ROW.tolist()})
        assert wrong.status_code == 421 and "replica two has this session, and this is one" in wrong.json()["detail"]

        replicas.servers["two"].stop()
        sessions["one"].attend(ROW)
        with pytest.raises(AttendError, match=r"HTTP 50[23]"):
            sessions["two"].attend(ROW)
        assert client.session().attend(ROW).session_length == 1


def test_a_sequence_of_triton_keeps_its_replica_by_a_header(replicas: Replicas) -> None:
    with contextlib.closing(triton.InferenceServerClient(replicas.url.removeprefix("http://"))) as client:
        query = triton.InferInput("query", [1, 1, 64], "FP32").set_data_from_numpy(ROW[None])
        weights = [triton.InferRequestedOutput("attention_weights")]
        for number in range(1, 9):
            headers = {"X-Attend-Session": f"sequence {number}"}
            for step in range(1, 4):
                place = {"sequence_id": number, "sequence_start": step == 1, "sequence_end": step == 3}
                reply = client.infer("default", [query], outputs=weights, headers=headers, **place)
                assert reply.as_numpy("attention_weights").shape == (1, 8, 1, step)
