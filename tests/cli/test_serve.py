"""Where `attend serve` listens and which proxies it trusts: TLS, a Unix socket, a proxy, and flags that it refuses at the start."""

import json
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc

from attend.settings import Settings
from support.command import run_attend
from support.server import Server
from support.waiting import PATIENCE, until

SPEC = {"spec": {"d_model": 4, "num_heads": 2}}
QUERY = {"query": [[0.25] * 64] * 3}
INJECTED = {"ATTEND_PORT": "tcp://10.0.0.7:8000", "ATTEND_PORT_8000_TCP_ADDR": "10.0.0.7", "ATTEND_SERVICE_HOST": "10.0.0.7"}


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[trustme.CA, Path, Path]:
    """A CA, and the certificate chain and the key that it issued to this machine."""
    authority, chain, key = trustme.CA(), tmp_path / "chain.pem", tmp_path / "key.pem"
    leaf = authority.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(str(key))
    leaf.cert_chain_pems[0].write_to_path(str(chain))
    return authority, chain, key


def test_a_client_that_never_reads_is_disconnected_over_https_too(
    start: Callable[..., Server], certificate: tuple[trustme.CA, Path, Path]
) -> None:
    """While other clients connect and disconnect: a disconnect during the server's check must not stop the other checks."""
    authority, chain, key = certificate
    server = start("--tls-cert", str(chain), "--tls-key", str(key), "--client-timeout", "0.5")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    body = json.dumps({"query": [[0.5] * 64] * 400}).encode()
    request = b"POST /attend HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for cut_off in range(1, 4):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as plain:
            mute = context.wrap_socket(plain, server_hostname="127.0.0.1")
            mute.sendall(request)
            count = f'attend_failures_total{{reason="slow_reply"}} {cut_off}.0'
            until(lambda count=count: count in httpx.get(f"{server.url}/metrics", verify=context).text, count)
            mute.close()


def test_a_tls_handshake_that_stops_is_ended(start: Callable[..., Server], certificate: tuple[trustme.CA, Path, Path]) -> None:
    """After the client timeout. The test waits for less than the minute that asyncio would."""
    _, chain, key = certificate
    server = start("--tls-cert", str(chain), "--tls-key", str(key), "--client-timeout", "0.5")
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE / 2) as stopped:
        stopped.sendall(b"\x16\x03\x01\x40\x00")  # the first five bytes of a ClientHello
        with suppress(ConnectionResetError):
            assert stopped.recv(1) == b""


def test_a_ready_server_prints_the_addresses_of_its_pages(start: Callable[..., Server]) -> None:
    """With addresses that a browser opens, also where the server listens on all interfaces."""
    server = start("--host", "0.0.0.0", "--allowed-hosts", "*")
    [ready] = [event for event in server.events if event["event"] == "ready"]
    port = server.url.rpartition(":")[2]
    assert (ready["page"], ready["docs"]) == (f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{port}/docs")
    for address in (ready["page"], ready["docs"]):
        assert "<html" in httpx.get(address, headers={"Accept": "text/html"}).text


def test_flags_enable_https(start: Callable[..., Server], certificate: tuple[trustme.CA, Path, Path]) -> None:
    """With a certificate and its key the server speaks HTTPS; with only one of them, or unusable ones, it exits with a message."""
    authority, chain, key = certificate
    server = start("--tls-cert", str(chain), "--tls-key", str(key), "--grpc-port", "0")
    assert server.url.startswith("https://")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    answer = httpx.post(f"{server.url}/attend", json=QUERY, verify=context)
    assert answer.status_code == 200
    address = next(str(event["address"]) for event in server.events if event["event"] == "listening for gRPC")
    trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with grpc.secure_channel(address, trusted) as secure, grpc.insecure_channel(address) as plaintext:
        alive = service_pb2.ServerLiveRequest()
        assert service_pb2_grpc.GRPCInferenceServiceStub(secure).ServerLive(alive, timeout=60).live
        with pytest.raises(grpc.RpcError):
            service_pb2_grpc.GRPCInferenceServiceStub(plaintext).ServerLive(alive, timeout=60)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as plain:
        idle = context.wrap_socket(plain, server_hostname="127.0.0.1")  # a client that does not answer TLS's close_notify
        assert server.stop() == 0
        idle.close()
    for flags in (
        ["--tls-cert", str(chain)],
        ["--tls-cert", str(chain), "--tls-key", str(chain)],
    ):
        done = serve("--port", "0", *flags)
        assert done.returncode == 2
        assert done.stderr.startswith("attend serve: ")


def test_the_server_listens_on_a_unix_socket(start: Callable[..., Server], tmp_path: Path) -> None:
    """It serves like a port and replaces the socket of a killed server. The file is removed when the server stops."""
    path = tmp_path / "attend.sock"
    server = start("--uds", str(path))
    assert server.url == f"unix:{path}"
    server.process.kill()
    server.process.wait()
    assert path.exists()
    server = start("--uds", str(path))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://socket") as client:
        assert client.post("/attend", json=QUERY).status_code == 200
        refused = client.put("/layers/new", json=SPEC)  # every user of the machine can reach it
        assert refused.status_code == 403 and "--keys-file" in refused.json()["detail"]
        assert any(event["event"] == "no API keys configured" for event in server.events)
        second = serve("--uds", str(path))
        assert second.returncode == 1 and "in use" in second.stderr
        assert client.get("/health/live").status_code == 200
    assert server.stop() == 0
    assert not path.exists()


def test_a_key_permits_writing_layers_over_a_unix_socket(start: Callable[..., Server], tmp_path: Path) -> None:
    """The key needs the scope admin, as on a public address. A file that has replaced the socket meanwhile is not removed."""
    path, keyed = tmp_path / "attend.sock", tmp_path / "keys"
    secret = run_attend("keys", "add", "one", "--scope", "infer,admin", "--file", str(keyed)).stdout.decode().strip()
    server = start("--uds", str(path), "--keys-file", str(keyed))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://socket") as client:
        assert client.put("/layers/new", json=SPEC).status_code == 401
        assert client.put("/layers/new", json=SPEC, headers={"X-API-Key": secret}).status_code == 201
    path.unlink()
    path.write_text("mine")
    assert server.stop() == 0
    assert path.read_text() == "mine"


def serve(*flags: str) -> "subprocess.CompletedProcess[str]":
    """Runs `attend serve` with flags that it refuses."""
    done = run_attend("serve", *flags)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_a_unix_socket_replaces_no_other_file(tmp_path: Path) -> None:
    """A file, a folder, a link to either stays what it is; a path that no socket can have is refused as too long."""
    file, folder, link = tmp_path / "notes.txt", tmp_path / "folder", tmp_path / "link"
    file.write_text("precious")
    folder.mkdir()
    link.symlink_to(file)
    for path in (file, folder, link):
        done = serve("--uds", str(path))
        assert done.returncode == 1 and f"{path}: the file is not a socket" in done.stderr
    assert file.read_text() == "precious" and folder.is_dir() and link.is_symlink()
    done = serve("--uds", str(tmp_path / ("x" * 120)))
    assert done.returncode == 1 and "too long" in done.stderr and "None" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--trusted-proxies", "banana"), "--trusted-proxies: expected addresses or networks such as 10.0.0.0/8"),
        (("--trusted-proxies", "10.0.0.1/8"), "10.0.0.1/8"),
        (("--trusted-proxies", "*, 10.0.0.1"), "* alone"),
        (("--cors-origins", "notanorigin"), "--cors-origins: expected origins of web pages that may call, such as https://a.example"),
        (("--cors-origins", "https://a.example/"), "such as https://a.example"),
        (("--allowed-hosts", "http://x y"), "--allowed-hosts: expected names allowed in Host"),
        (("--allowed-hosts", "a.example:8000"), "without ports"),
        (("--grpc-port", "8765", "--port", "8765"), "port and grpc_port cannot both be 8765"),
        (("--dtype", "float"), "--dtype: input should be 'float64', 'float32', 'bfloat16' or 'float16' (did you mean float64?)"),
        (("--log-format", "jsn"), "(did you mean json?)"),
        (("--shards", "2"), "--shards has an effect only under Ray Serve: `ATTEND_SHARDS=… serve run attend.deploy.ray:app`"),
        (("--tls-cert", "nofile.pem", "--tls-key", "nokey.pem"), "cannot use --tls-cert nofile.pem: No such file or directory"),
    ],
)
def test_invalid_settings_are_refused_at_the_start(flags: tuple[str, ...], message: str) -> None:
    """With what is expected, and status 2."""
    done = serve(*flags)
    assert done.returncode == 2 and done.stderr.startswith("attend serve: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_valid_lists_are_accepted() -> None:
    """Networks, several values, spaces between them."""
    settings = Settings(
        trusted_proxies="10.0.0.0/8, ::1 ,192.0.2.7",
        cors_origins="https://a.example, http://localhost:3000,null",
        allowed_hosts="a.example , B.example,::1",
    )
    assert Settings(trusted_proxies="*", cors_origins="*", allowed_hosts="*").host == settings.host


def test_a_trusted_proxy_names_the_caller(start: Callable[..., Server]) -> None:
    """Under a prefix that the proxy removes, which pages and metrics use. Only this proxy's header with the caller's address is used.

    In Kubernetes, too: a Service of the name attend gives every pod ATTEND_PORT=tcp://…, which is no setting; the server says so.
    """
    server = start("--root-path", "/ml", "--trusted-proxies", "127.0.0.1", "--access-log", env=INJECTED)
    assert "ATTEND_PORT" in server.log[0]
    with httpx.Client(base_url=server.url, headers={"X-Forwarded-For": "192.0.2.7", "X-Request-Id": "proxied"}) as client:
        assert client.post("/attend", json=QUERY).status_code == 200
        assert '"/ml/openapi.json"' in client.get("/docs").text.replace("'", '"')
        assert 'attend_requests_total{endpoint="/attend",status="200"} 1' in client.get("/metrics").text
    server.stop()
    assert {event["client"] for event in server.events if event.get("request_id") == "proxied"} == {"192.0.2.7"}


def test_an_untrusted_proxy_is_itself_the_caller(http: httpx.Client, server: Server) -> None:
    """Anyone can write a header."""
    http.get("/layers", headers={"X-Forwarded-For": "192.0.2.7", "X-Request-Id": "untrusted"})
    assert server.access_line("untrusted")["client"] == "127.0.0.1"
