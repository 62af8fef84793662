"""API keys on a real server: scopes, changes of the file while it runs, and secrecy."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import typer
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner, Result

from attend.cli import keys
from attend.settings import Settings
from attend.web.keys import BadKeys, Keyring, digest, make_key, read_keys, write_keys
from support.app import answers
from support.command import run_attend
from support.server import Server, fork_server

SCOPES = ("infer", "admin", "metrics")
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
    ("POST", "/no/such/page", set(SCOPES)),  # 404
    ("OPTIONS", "/attend", set(SCOPES)),  # 405
    ("GET", "/docs/swagger-ui.css", set(SCOPES)),
    ("POST", "/v2/models/default/infer", {"infer"}),
    ("POST", "/v2/models/default/infer/", {"infer"}),
    ("POST", "/v2/models/default/versions/1/infer/", {"infer"}),
    ("GET", "/v2/models/default/versions/1/config/", set(SCOPES)),
    ("POST", "/v2/repository/models/nobody/unload/", {"admin"}),
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

    def call(self, method: str, path: str, key: str = "", **headers: str) -> httpx.Response:
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        body = {"json": QUERY} if path.startswith("/attend") else {"json": SPEC} if method == "PUT" else {}
        return httpx.request(method, self.server.url + path, headers=headers, timeout=60, **body)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    one = Guarded(tmp_path_factory.mktemp("keys"))
    yield one
    one.server.stop()


@pytest.mark.parametrize(("method", "path", "scopes"), ASKS, ids=[f"{method} {path}" for method, path, _ in ASKS])
def test_each_route_requires_a_key_with_its_scope(guarded: Guarded, method: str, path: str, scopes: set[str]) -> None:
    """401 without a key or with an unknown one, 403 with another scope, otherwise the route's own status."""
    for key in ("", "attend-unknown"):
        refused = guarded.call(method, path, key)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == 'Bearer realm="attend"'
    for scope in SCOPES:
        answer = guarded.call(method, path, guarded.keys[scope])
        assert (answer.status_code not in (401, 403)) == (scope in scopes), (scope, answer.text)
        if scope not in scopes:
            assert answer.status_code == 403


def test_the_page_needs_no_key_but_the_index_does(guarded: Guarded) -> None:
    """A browser cannot send a key when it opens the page, which contains no data. The index names the layers."""
    page = guarded.call("GET", "/", Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert guarded.call("GET", "/").status_code == 401


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
def test_grpc_requires_the_same_keys(guarded: Guarded, method: str, request_: Any, scopes: set[str] | None) -> None:
    """In the metadata, under either name, with the scopes of the routes."""
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


def test_every_documented_route_but_health_requires_a_key(guarded: Guarded) -> None:
    """Also routes added later."""
    document = guarded.call("GET", "/openapi.json", guarded.keys["infer"]).json()
    for path, operations in document["paths"].items():
        for method in operations:
            status = guarded.call(method.upper(), path.replace("{name}", "default")).status_code
            assert (status == 401) == ("/health/" not in path), (method, path, status)


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/health/startup", "/v2/health/live", "/v2/health/ready/"])
def test_health_requires_no_key(guarded: Guarded, path: str) -> None:
    assert guarded.call("GET", path).status_code == 200


def test_a_key_may_be_a_bearer_token_or_x_api_key(guarded: Guarded) -> None:
    key = guarded.keys["infer"]
    for headers in ({"X-API-Key": key}, {"Authorization": f"bearer {key}"}):
        assert guarded.call("POST", "/attend", **headers).status_code == 200
    for headers in (
        {"Authorization": f"Basic {key}"},
        {"Authorization": key},
        {"X-API-Key": key[:-1]},
        {"X-API-Key": "ключ".encode("latin-1", "replace").decode()},
    ):
        assert guarded.call("POST", "/attend", **headers).status_code == 401


def test_changes_of_the_keys_file_apply_to_the_next_request(guarded: Guarded) -> None:
    """Added and removed keys. A broken file leaves the keys as they were."""
    key = attend_keys("add", "passing", "--scope", "infer", "--scope", "admin", file=guarded.file).stdout.strip()
    assert guarded.call("POST", "/attend", key).status_code == 200
    assert guarded.call("DELETE", "/layers/nobody", key).status_code == 404
    assert "passing  admin,infer" in attend_keys("list", file=guarded.file).stdout

    good = guarded.file.read_text()
    guarded.file.write_text(good + "half a li")
    assert guarded.call("POST", "/attend", key).status_code == 200
    guarded.file.write_text(good)

    assert attend_keys("remove", "passing", file=guarded.file).exit_code == 0
    assert guarded.call("POST", "/attend", key).status_code == 401
    assert guarded.call("POST", "/attend", guarded.keys["infer"]).status_code == 200


def test_keys_are_neither_stored_nor_logged(guarded: Guarded) -> None:
    """The file has digests and only its owner may read it; the log has names."""
    for scope in SCOPES:
        guarded.call("GET", "/layers", guarded.keys[scope], **{"X-Request-Id": f"by-{scope}"})
        assert guarded.keys[scope] not in guarded.file.read_text()
        assert guarded.server.access_line(f"by-{scope}")["key"] == f"only-{scope}"
    assert guarded.file.stat().st_mode & 0o77 == 0
    assert not any(key in "".join(guarded.server.log) for key in guarded.keys.values())


def test_attend_keys_refuses_invalid_arguments(tmp_path: Path) -> None:
    """An unknown scope, an existing name, an unknown name, a missing file: one line, and nothing is written."""
    file = tmp_path / "keys.txt"
    assert "infer, admin, metrics" in attend_keys("add", "one", "--scope", "everything", file=file).stderr
    assert not file.exists()
    assert attend_keys("add", "one", "--scope", "infer", file=file).exit_code == 0
    assert "already" in attend_keys("add", "one", "--scope", "admin", file=file).stderr
    assert "nobody" in attend_keys("remove", "nobody", file=file).stderr
    assert attend_keys("list", file=tmp_path / "none").exit_code == 2
    assert len(read_keys(file)) == 1


@pytest.mark.parametrize(
    "line", ["one infer", "one infer abc", f"one all {'0' * 64}", f"../one infer {'0' * 64}", f"one infer {'0' * 64} more"]
)
def test_a_malformed_keys_file_stops_the_start(tmp_path: Path, line: str) -> None:
    """The message names file and line, not the content."""
    file = tmp_path / "keys.txt"
    file.write_text(f"# comment\n\n{line}\n")
    with pytest.raises(BadKeys, match=r"line 3: expected"):
        Keyring(file)


def test_a_missing_keys_file_stops_the_start_but_not_a_running_server(tmp_path: Path) -> None:
    """A file that disappears while the server runs leaves the keys valid."""
    file = tmp_path / "keys.txt"
    with pytest.raises(BadKeys):
        Keyring(file)
    done = run_attend("serve", "--port", "0", "--keys-file", str(file))
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    secret, key = make_key("one", ["infer"])
    write_keys(file, [key])
    ring = Keyring(file)
    file.unlink()
    assert ring.find(secret) == key
    assert ring.find("") is None
    assert digest(secret) == key.digest != secret


def test_on_a_public_address_layers_can_be_changed_only_with_an_admin_key(tmp_path: Path) -> None:
    put = {"method": "PUT", "url": "/layers/new", "json": SPEC}
    public = {"host": "0.0.0.0", "access_log": False}
    secret, key = make_key("one", ["admin"])
    write_keys(tmp_path / "keys", [key])
    (refused,) = answers(Settings(**public), put)
    assert refused.status_code == 403
    assert "--keys-file" in refused.json()["detail"]
    guarded = Settings(**public, keys_file=tmp_path / "keys")
    assert [a.status_code for a in answers(guarded, put, {**put, "headers": {"X-API-Key": secret}})] == [401, 201]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("hosts", [[], ["localhost"], ["localhost", "localhost"], ["evil.example", "localhost"]])
def test_several_host_headers_are_refused(server: Server, guarded: Guarded, hosts: list[str], version: str) -> None:
    """A proxy may have used another one. HTTP/1.0 needs none."""
    for where in (server, guarded.server):
        with socket.create_connection(("127.0.0.1", int(where.url.rpartition(":")[2])), timeout=60) as connection:
            lines = [f"GET /health/live HTTP/{version}", *(f"Host: {host}" for host in hosts), "Connection: close"]
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            with connection.makefile("rb") as reader:
                answer = reader.read()
        good = len(hosts) == 1 or (not hosts and version == "1.0")
        assert answer.split()[1] == (b"200" if good else b"400"), answer
        assert good or b"one Host header" in answer


def test_a_file_without_keys_is_allowed_and_logged(start: Callable[..., Server], tmp_path: Path) -> None:
    """All requests are refused until keys are added."""
    (tmp_path / "keys").write_text("")
    server = start("--keys-file", str(tmp_path / "keys"))
    assert [event["level"] for event in server.events if event["event"] == "the keys file is empty"] == ["warning"]
    assert not any(event["event"] == "no API keys configured" for event in server.events)
