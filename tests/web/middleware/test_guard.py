"""Who gets past the door: keys and scopes on a real server, other people's web pages, CORS, TLS, a Unix socket, a prefix and a proxy."""

import json
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
import typer
from support.app import answers
from support.command import run_attend
from support.server import Server, fork_server
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner, Result

from service.cli import keys
from service.settings import Settings
from service.web.keys import BadKeys, Keyring, digest, make_key, read_keys, write_keys
from service.web.middleware.guard import hostname, scopes_for

SCOPES = ("infer", "admin", "metrics")
INJECTED = {"ATTEND_PORT": "tcp://10.0.0.7:8000", "ATTEND_PORT_8000_TCP_ADDR": "10.0.0.7", "ATTEND_SERVICE_HOST": "10.0.0.7"}
ZEROS = "0" * 64
SPEC = {"spec": {"d_model": 4, "num_heads": 2}}
QUERY = {"query": [[0.25] * 64] * 3}
ASKS: list[tuple[str, str, set[str]]] = [  # method, path, and the scopes that open it
    ("POST", "/attend", {"infer"}),
    ("POST", "/attend/plan", {"infer"}),
    ("POST", "/v2/repository/index", set(SCOPES)),
    ("PUT", "/layers/new", {"admin"}),
    ("DELETE", "/layers/nobody", {"admin"}),
    ("GET", "/metrics", {"metrics"}),
    ("GET", "/", set(SCOPES)),
    ("GET", "/layers", set(SCOPES)),
    ("GET", "/layers/default", set(SCOPES)),
    ("GET", "/openapi.json", set(SCOPES)),
    ("GET", "/docs", set(SCOPES)),
    ("HEAD", "/layers", set(SCOPES)),
    ("GET", "/no/such/page", set(SCOPES)),
    ("POST", "/no/such/page", {"admin"}),
    ("OPTIONS", "/attend", {"admin"}),
]


def attend_keys(*arguments: str, file: Path) -> Result:
    """The command, in this process: it loads neither torch nor a server."""
    app = typer.Typer()
    app.add_typer(keys.group, name="keys")
    return CliRunner().invoke(app, ["keys", *arguments, "--file", str(file)])


class Guarded:
    """A server with a key of each scope, made by the command."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.txt"
        self.keys = {scope: attend_keys("add", f"only-{scope}", "--scope", scope, file=self.file).stdout.strip() for scope in SCOPES}
        self.server = fork_server("--keys-file", str(self.file), "--grpc-port", "0", "--log-format", "json")

    def ask(self, method: str, path: str, key: str = "", **headers: str) -> httpx.Response:
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        body = {"json": QUERY} if path.startswith("/attend") else {"json": SPEC} if method == "PUT" else {}
        return httpx.request(method, self.server.url + path, headers=headers, timeout=60, **body)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    one = Guarded(tmp_path_factory.mktemp("keys"))
    yield one
    one.server.stop()


@pytest.mark.parametrize(("method", "path", "scopes"), ASKS, ids=[f"{method} {path}" for method, path, _ in ASKS])
def test_each_route_wants_a_key_of_its_scope(guarded: Guarded, method: str, path: str, scopes: set[str]) -> None:
    """401 without a key and with an unknown one, and how to ask; 403 with the wrong scope; else what the route says."""
    for key in ("", "attend-unknown"):
        refused = guarded.ask(method, path, key)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == 'Bearer realm="attend"'
    for scope in SCOPES:
        answer = guarded.ask(method, path, guarded.keys[scope])
        assert (answer.status_code not in (401, 403)) == (scope in scopes), (scope, answer.text)
        if scope not in scopes:
            assert answer.status_code == 403


def test_the_page_is_an_empty_shell_for_anyone(guarded: Guarded) -> None:
    """A browser gets it without a key, which it could not bring; the index, which names the layers, is closed."""
    page = guarded.ask("GET", "/", Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert guarded.ask("GET", "/").status_code == 401


@pytest.mark.parametrize(
    ("method", "request_", "scopes"),
    [
        ("ModelInfer", service_pb2.ModelInferRequest(model_name="default"), {"infer"}),
        ("ModelMetadata", service_pb2.ModelMetadataRequest(name="default"), {"infer", "admin", "metrics"}),
        ("RepositoryIndex", service_pb2.RepositoryIndexRequest(), {"infer", "admin", "metrics"}),
        ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="default"), {"admin"}),
        ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="nothing"), {"admin"}),
        ("ServerLive", service_pb2.ServerLiveRequest(), None),
    ],
)
def test_grpc_wants_the_same_keys(guarded: Guarded, method: str, request_: Any, scopes: set[str] | None) -> None:
    """In the metadata, under either name; the scopes are those of the routes."""
    address = next(str(event["address"]) for event in guarded.server.events if event["event"] == "listening for gRPC")

    def code(*metadata: tuple[str, str]) -> grpc.StatusCode:
        try:
            getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)(request_, metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    with grpc.insecure_channel(address) as channel:
        assert (code() == grpc.StatusCode.UNAUTHENTICATED) == (scopes is not None)
        assert (code(("x-api-key", "attend-unknown")) == grpc.StatusCode.UNAUTHENTICATED) == (scopes is not None)
        for scope, key in guarded.keys.items():
            for metadata in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
                refused = code(metadata) in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
                assert refused == (scopes is not None and scope not in scopes), scope


def test_every_documented_route_is_closed(guarded: Guarded) -> None:
    """Whatever route is added later: none but health answers without a key."""
    document = guarded.ask("GET", "/openapi.json", guarded.keys["infer"]).json()
    for path, operations in document["paths"].items():
        for method in operations:
            status = guarded.ask(method.upper(), path.replace("{name}", "default")).status_code
            assert (status == 401) == ("/health/" not in path), (method, path, status)


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/health/startup"])
def test_health_wants_no_key(guarded: Guarded, path: str) -> None:
    """Whoever asks for health has no key to show."""
    assert guarded.ask("GET", path).status_code == 200


def test_a_key_comes_in_either_header(guarded: Guarded) -> None:
    """As a Bearer token, in whatever case the word is, or as X-API-Key."""
    key = guarded.keys["infer"]
    for headers in ({"X-API-Key": key}, {"Authorization": f"bearer {key}"}):
        assert guarded.ask("POST", "/attend", **headers).status_code == 200
    for headers in (
        {"Authorization": f"Basic {key}"},
        {"Authorization": key},
        {"X-API-Key": key[:-1]},
        {"X-API-Key": "ключ".encode("latin-1", "replace").decode()},
    ):
        assert guarded.ask("POST", "/attend", **headers).status_code == 401


def test_keys_come_and_go_while_the_server_runs(guarded: Guarded) -> None:
    """A new one opens the door at the next request, a removed one no longer does; a broken file leaves things as they were."""
    key = attend_keys("add", "passing", "--scope", "infer", "--scope", "admin", file=guarded.file).stdout.strip()
    assert guarded.ask("POST", "/attend", key).status_code == 200
    assert guarded.ask("DELETE", "/layers/nobody", key).status_code == 404
    assert "passing  admin,infer" in attend_keys("list", file=guarded.file).stdout

    good = guarded.file.read_text()
    guarded.file.write_text(good + "half a li")
    assert guarded.ask("POST", "/attend", key).status_code == 200
    guarded.file.write_text(good)

    assert attend_keys("remove", "passing", file=guarded.file).exit_code == 0
    assert guarded.ask("POST", "/attend", key).status_code == 401
    assert guarded.ask("POST", "/attend", guarded.keys["infer"]).status_code == 200


def test_nothing_secret_is_kept_or_logged(guarded: Guarded) -> None:
    """The file holds digests and is its owner's alone; the log names keys and shows none."""
    for scope in SCOPES:
        guarded.ask("GET", "/layers", guarded.keys[scope], **{"X-Request-Id": f"by-{scope}"})
        assert guarded.keys[scope] not in guarded.file.read_text()
        assert guarded.server.access_line(f"by-{scope}")["key"] == f"only-{scope}"
    assert guarded.file.stat().st_mode & 0o77 == 0
    assert not any(key in "".join(guarded.server.log) for key in guarded.keys.values())


def test_the_command_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    """A scope that does not exist, a name taken, nobody to remove, no file to list: in one line, with nothing written."""
    file = tmp_path / "keys.txt"
    assert "infer, admin, metrics" in attend_keys("add", "one", "--scope", "everything", file=file).stderr
    assert not file.exists()
    assert attend_keys("add", "one", "--scope", "infer", file=file).exit_code == 0
    assert "already" in attend_keys("add", "one", "--scope", "admin", file=file).stderr
    assert "nobody" in attend_keys("remove", "nobody", file=file).stderr
    assert attend_keys("list", file=tmp_path / "none").exit_code == 1
    assert len(read_keys(file)) == 1


@pytest.mark.parametrize(
    "line", ["one infer", "one infer abc", f"one all {'0' * 64}", f"../one infer {'0' * 64}", f"one infer {'0' * 64} more"]
)
def test_a_file_that_is_none_is_refused_at_the_start(tmp_path: Path, line: str) -> None:
    """By file and line, without what stands there."""
    file = tmp_path / "keys.txt"
    file.write_text(f"# comment\n\n{line}\n")
    with pytest.raises(BadKeys, match=r"line 3: expected"):
        Keyring(file)


def test_a_missing_file_is_refused_and_a_vanished_one_is_not(tmp_path: Path) -> None:
    """A server does not start open by mistake, nor does it close because a mount was away for a moment."""
    file = tmp_path / "keys.txt"
    with pytest.raises(BadKeys):
        Keyring(file)
    done = serve("--port", "0", "--keys-file", str(file))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    secret, key = make_key("one", ["infer"])
    write_keys(file, [key])
    ring = Keyring(file)
    file.unlink()
    assert ring.find(secret) == key
    assert ring.find("") is None
    assert digest(secret) == key.digest != secret


def test_layers_are_written_on_a_public_address_with_a_key_alone(tmp_path: Path) -> None:
    """Without keys writing is off there; with them it is the admin's."""
    put = {"method": "PUT", "url": "/layers/new", "json": SPEC}
    public = {"host": "0.0.0.0", "access_log": False}
    secret, key = make_key("one", ["admin"])
    write_keys(tmp_path / "keys", [key])
    (refused,) = answers(Settings(**public), put)
    assert refused.status_code == 403
    assert "--keys-file" in refused.json()["detail"]
    guarded = Settings(**public, keys_file=tmp_path / "keys")
    assert [a.status_code for a in answers(guarded, put, {**put, "headers": {"X-API-Key": secret}})] == [401, 201]


PAGE = "http://evil.example"
FOREIGN: list[tuple[str, dict[str, str], int]] = [
    ("POST", {"Host": "evil.example"}, 403),
    ("GET", {"Host": "evil.example:8000"}, 403),
    ("POST", {"Host": "localhost.evil.example"}, 403),
    ("POST", {"Host": "127.0.0.1.evil.example"}, 403),
    ("POST", {"Origin": PAGE}, 403),
    ("PUT", {"Origin": PAGE}, 403),
    ("POST", {"Origin": "null"}, 403),
    ("GET", {"Origin": PAGE}, 200),  # it cannot read the answer
    ("POST", {"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
    ("POST", {"Host": "[::1]:80"}, 200),
    ("POST", {"Host": "LOCALHOST"}, 200),
    ("POST", {"Host": "127.0.0.1:8000"}, 200),
]


@pytest.mark.parametrize(("method", "headers", "status"), FOREIGN, ids=[f"{m} {h}" for m, h, _ in FOREIGN])
def test_a_web_page_of_somebody_else_gets_nowhere(http: httpx.Client, method: str, headers: dict[str, str], status: int) -> None:
    """On loopback without keys: neither by a name that was made to point here, nor by posting across origins."""
    path = {"POST": "/attend", "GET": "/layers", "PUT": "/layers/stolen"}[method]
    answer = http.request(method, path, headers=headers, json=None if method == "GET" else QUERY)
    assert answer.status_code == status
    if status == 403:
        assert re.search(r"--(allowed-hosts|cors-origins)", answer.json()["detail"])


def test_names_and_origins_can_be_allowed() -> None:
    """A proxy's name in Host; a page elsewhere, which then gets CORS headers, its preflight included."""
    settings = Settings(allowed_hosts="attend.example, b.example", cors_origins=f"{PAGE}, http://b.example", access_log=False)
    post = {"method": "POST", "url": "/attend", "json": QUERY}
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    plain, theirs, other, before, host = answers(
        settings,
        post,
        {**post, "headers": {"Origin": PAGE}},
        {**post, "headers": {"Origin": "http://third.example"}},
        {"method": "OPTIONS", "url": "/attend", "headers": {"Origin": PAGE, **preflight}},
        {**post, "headers": {"Host": "third.example"}},
    )
    assert [a.status_code for a in (plain, theirs, other, before, host)] == [200, 200, 403, 200, 403]
    assert theirs.headers["access-control-allow-origin"] == before.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-origin" not in other.headers
    assert "x-request-id" in theirs.headers["access-control-expose-headers"].lower()


def test_everyone_can_be_allowed(tmp_path: Path) -> None:
    """Any name and any page, where that is said; and with keys any name, since no page has one."""
    post = {"method": "POST", "url": "/attend", "json": QUERY, "headers": {"Origin": PAGE, "Host": "any.example"}}
    (answer,) = answers(Settings(allowed_hosts="*", access_log=False), post)
    assert answer.status_code == 200
    (answer,) = answers(Settings(allowed_hosts="any.example", cors_origins="*", access_log=False), post)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    secret, key = make_key("one", ["infer"])
    write_keys(tmp_path / "keys", [key])
    post["headers"]["X-API-Key"] = secret
    (answer,) = answers(Settings(keys_file=tmp_path / "keys", access_log=False), post)
    assert answer.status_code == 200


def test_cors_is_off_unless_listed(http: httpx.Client) -> None:
    """No header, and no answer to a preflight."""
    assert not [name for name in http.get("/layers", headers={"Origin": PAGE}).headers if name.startswith("access-control")]
    assert http.options("/attend", headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"}).status_code == 403


@pytest.mark.parametrize("path", ["/", "/layers", "/health/live", "/docs", "/metrics", "/no/such/page"])
def test_nothing_is_taken_for_what_it_does_not_say_it_is(http: httpx.Client, path: str) -> None:
    """Every reply forbids sniffing, once; the page of /docs may be framed by nobody."""
    answer = http.get(path)
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
    if path == "/docs":
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("header", "name"),
    [("a.example", "a.example"), ("A.Example:80", "a.example"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("127.0.0.1:1", "127.0.0.1")],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    """Without its port."""
    assert hostname(header) == name


def test_what_no_rule_names_is_the_admins() -> None:
    """A route that somebody adds is closed before anybody thinks of it."""
    assert scopes_for("POST", "/v2/repository/models/tiny/load") == {"admin"}
    assert scopes_for("POST", "/v2/models/tiny/infer") == {"infer"}
    assert scopes_for("PATCH", "/layers/tiny") == {"admin"}
    assert scopes_for("GET", "/v2/health/ready") == frozenset()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[trustme.CA, Path, Path]:
    """An authority, and the chain and the key that it gave this machine."""
    authority, chain, key = trustme.CA(), tmp_path / "chain.pem", tmp_path / "key.pem"
    leaf = authority.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(str(key))
    leaf.cert_chain_pems[0].write_to_path(str(chain))
    return authority, chain, key


def test_over_https_too_who_never_reads_is_cut_off(start: Callable[..., Server], certificate: tuple[trustme.CA, Path, Path]) -> None:
    """Again and again, while others come and go: one that goes just when the server looks must not end the watch over the rest."""
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
            wanted, end = f'attend_failures_total{{reason="slow_reply"}} {cut_off}.0', time.monotonic() + 60
            while wanted not in httpx.get(f"{server.url}/metrics", verify=context).text:
                assert time.monotonic() < end, "\n".join(server.log)
            mute.close()


def test_https_by_flags(start: Callable[..., Server], certificate: tuple[trustme.CA, Path, Path]) -> None:
    """With a certificate and its key the server speaks HTTPS; with half of them, or others, it says so and stops."""
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
        idle = context.wrap_socket(plain, server_hostname="127.0.0.1")  # one that does not answer a farewell
        assert server.stop() == 0
        idle.close()
    for flags in (
        ["--tls-cert", str(chain)],
        ["--tls-cert", str(chain), "--tls-key", str(chain)],
    ):
        done = serve("--port", "0", *flags)
        assert done.returncode == 2
        assert done.stderr.startswith("attend serve: ")


def test_a_unix_socket(start: Callable[..., Server], tmp_path: Path) -> None:
    """Served like a port, also over one that a killed server left behind; gone when the server is."""
    path = tmp_path / "attend.sock"
    server = start("--uds", str(path))
    assert server.url == f"unix:{path}"
    server.process.kill()
    server.process.wait()
    assert path.exists()
    server = start("--uds", str(path))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://whoever") as client:
        assert client.post("/attend", json=QUERY).status_code == 200
        refused = client.put("/layers/new", json=SPEC)  # every user of the machine can reach it
        assert refused.status_code == 403 and "--keys-file" in refused.json()["detail"]
        assert any(event["event"] == "open to everyone" for event in server.events)
        second = serve("--uds", str(path))
        assert second.returncode == 1 and "in use" in second.stderr
        assert client.get("/health/live").status_code == 200
    assert server.stop() == 0
    assert not path.exists()


def test_layers_are_written_over_a_unix_socket_with_a_key(start: Callable[..., Server], tmp_path: Path) -> None:
    """It is the admin's, as on a public address. What has taken the socket's place meanwhile is left alone."""
    path, keyed = tmp_path / "attend.sock", tmp_path / "keys"
    secret = attend_keys("add", "one", "--scope", "infer,admin", file=keyed).stdout.strip()
    server = start("--uds", str(path), "--keys-file", str(keyed))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://whoever") as client:
        assert client.put("/layers/new", json=SPEC).status_code == 401
        assert client.put("/layers/new", json=SPEC, headers={"X-API-Key": secret}).status_code == 201
    path.unlink()
    path.write_text("mine")
    assert server.stop() == 0
    assert path.read_text() == "mine"


def serve(*flags: str) -> "subprocess.CompletedProcess[str]":
    """The command where it is to refuse."""
    done = run_attend("serve", *flags)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_a_unix_socket_replaces_nothing_else(tmp_path: Path) -> None:
    """A file, a folder, a link to either stays what it is; a path that no socket can have is said to be too long."""
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
    ("flags", "told"),
    [
        (("--trusted-proxies", "banana"), "--trusted-proxies: expected addresses or networks such as 10.0.0.0/8"),
        (("--trusted-proxies", "10.0.0.1/8"), "10.0.0.1/8"),
        (("--trusted-proxies", "*, 10.0.0.1"), "* alone"),
        (("--cors-origins", "notanorigin"), "--cors-origins: expected origins of web pages that may call, such as https://a.example"),
        (("--cors-origins", "https://a.example/"), "such as https://a.example"),
        (("--allowed-hosts", "http://x y"), "--allowed-hosts: expected names allowed in Host"),
        (("--allowed-hosts", "a.example:8000"), "without ports"),
        (("--grpc-port", "8765", "--port", "8765"), "port and grpc_port cannot both be 8765"),
        (("--tls-cert", "nofile.pem", "--tls-key", "nokey.pem"), "cannot use --tls-cert nofile.pem: No such file or directory"),
    ],
)
def test_what_can_never_work_is_refused_at_the_start(flags: tuple[str, ...], told: str) -> None:
    """With what is expected, and status 2."""
    done = serve(*flags)
    assert done.returncode == 2 and done.stderr.startswith("attend serve: ") and done.stderr.count("\n") == 1
    assert told in done.stderr


def test_lists_that_can_work_are_taken() -> None:
    """Networks, several of a kind, spaces between them."""
    settings = Settings(
        trusted_proxies="10.0.0.0/8, ::1 ,192.0.2.7",
        cors_origins="https://a.example, http://localhost:3000,null",
        allowed_hosts="a.example , B.example,::1",
    )
    assert Settings(trusted_proxies="*", cors_origins="*", allowed_hosts="*").host == settings.host


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("hosts", [[], ["localhost"], ["localhost", "localhost"], ["evil.example", "localhost"]])
def test_a_request_has_one_host(server: Server, guarded: Guarded, hosts: list[str], version: str) -> None:
    """Two may be read one way here and the other in a proxy; none is for HTTP/1.0 alone."""
    for where in (server, guarded.server):
        with socket.create_connection(("127.0.0.1", int(where.url.rpartition(":")[2])), timeout=60) as connection:
            lines = [f"GET /health/live HTTP/{version}", *(f"Host: {host}" for host in hosts), "Connection: close"]
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            with connection.makefile("rb") as reader:
                answer = reader.read()
        good = len(hosts) == 1 or (not hosts and version == "1.0")
        assert answer.split()[1] == (b"200" if good else b"400"), answer
        assert good or b"one Host header" in answer


def test_keys_of_nobody_are_told(start: Callable[..., Server], tmp_path: Path) -> None:
    """A file without any key lets nobody in: allowed, since a running server follows it, and said."""
    (tmp_path / "keys").write_text("")
    server = start("--keys-file", str(tmp_path / "keys"))
    assert [event["level"] for event in server.events if event["event"] == "open to nobody"] == ["warning"]
    assert not any(event["event"] == "open to everyone" for event in server.events)


def test_behind_a_proxy(start: Callable[..., Server]) -> None:
    """Under a prefix that the proxy takes away, which pages and metrics know; whom it says the caller is, is believed of it alone.

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


def test_a_proxy_that_nobody_trusts_is_the_caller(http: httpx.Client, server: Server) -> None:
    """Anyone can write a header."""
    http.get("/layers", headers={"X-Forwarded-For": "192.0.2.7", "X-Request-Id": "untrusted"})
    assert server.access_line("untrusted")["client"] == "127.0.0.1"
