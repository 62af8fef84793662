"""The command as a whole, and its smaller parts: help, version, layers, the OpenAPI document."""

import json
import os
import re
import subprocess
import sys
import textwrap

import httpx
import numpy as np
import pytest
import trustme

from attend import __version__
from attend.attention.native import extension
from attend.settings import Settings
from attend.wire.native import numbers
from support.command import run_attend, spawn_attend
from support.server import fork_server, start_server

COMMANDS = ["serve", "demo", "infer", "heads", "figure", "capture", "layers", "families", "keys", "config", "check", "openapi", "version"]
BELOW = [
    *(f"layers {name}" for name in ("list", "add", "inspect", "describe", "export", "remove")),
    *("keys add", "keys list", "keys remove"),
]
WIDE = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}


@pytest.mark.parametrize("command", [*COMMANDS, *BELOW])
def test_the_help_of_each_command_has_an_example(command):
    done = run_attend(*command.split(), "--help", env=WIDE)
    assert done.returncode == 0
    assert f"attend {command}" in done.stdout.decode().partition("Example")[2]


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_text_of_the_help_fills_its_lines(width):
    """Also in terminals of another width than the source."""
    shown = spawn_attend("heads", "--help", env={**WIDE, "COLUMNS": width}).stdout.decode()  # in this process the width is fixed
    lines = shown.partition("  Without --metrics")[2].partition("\n\n")[0].splitlines()
    longest = int(width) - 20
    assert len(lines) > 2 and all(len(line) > longest for line in lines[1:-1])


def test_the_help_has_the_flag_and_the_description_of_each_setting():
    """Whole flags, also in 80 columns; brackets are not interpreted as markup. White space is not compared."""
    shown = "".join(run_attend("serve", "--help", env={**WIDE, "COLUMNS": "80"}).stdout.decode().split())
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert "".join(str(field.description).split()) in shown
    assert "(default)" not in shown


def test_the_help_lists_every_command():
    shown = run_attend("--help", env=WIDE).stdout.decode()
    assert set(re.findall(r"^  (\w+)  ", shown.partition("Commands:")[2], re.MULTILINE)) == set(COMMANDS)
    assert "Exit codes: 0 success; 1 " in shown and "attend demo" in shown.partition("Examples")[2]
    for group in ("layers", "keys"):
        listed = re.findall(r"^  (\w+)  ", run_attend(group, "--help", env=WIDE).stdout.decode().partition("Commands:")[2], re.MULTILINE)
        assert [f"{group} {name}" for name in listed] == [command for command in BELOW if command.startswith(group)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_flags(shell):
    """What the script that `--show-completion` prints asks the command, at `attend lay` and at `attend heads --metr`."""
    env = {**WIDE, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    assert "_ATTEND_COMPLETE" in run_attend("--show-completion", shell, env=env).stdout.decode()
    for line, offered in (("attend lay", "layers"), ("attend heads --metr", "--metrics")):
        request = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_TYPER_COMPLETE_ARGS": line}
        request |= {"_ATTEND_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        assert offered in run_attend(env={**WIDE, **request}).stdout.decode()


def test_the_version_is_printed_as_text_and_json():
    assert run_attend("version").stdout.decode() == run_attend("--version").stdout.decode() == f"{__version__}\n"
    assert json.loads(run_attend("version", "--json").stdout) == {"version": __version__}


def test_keys_print_json(tmp_path):
    file = ["--file", str(tmp_path / "keys.txt"), "--json"]
    made = json.loads(run_attend("keys", "add", "one", "--scope", "metrics", "--scope", "infer", *file).stdout)
    assert made["name"] == "one" and made["scopes"] == ["infer", "metrics"] and len(made["key"]) > 20
    assert json.loads(run_attend("keys", "list", *file).stdout) == {"keys": [{"name": "one", "scopes": ["infer", "metrics"]}]}
    assert json.loads(run_attend("keys", "remove", "one", *file).stdout) == {"removed": "one"}
    assert json.loads(run_attend("keys", "list", *file).stdout) == {"keys": []}


def test_a_command_for_a_server_imports_no_torch():
    """The import of torch takes seconds."""
    code = """
        import sys
        from attend.cli import main
        sys.argv = ["attend", "layers", "list", "--url", "http://127.0.0.1:1"]
        try:
            main()
        except SystemExit as end:
            print(end.code, [name for name in ("torch", "fastapi", "uvicorn", "matplotlib") if name in sys.modules])
    """
    lines = "\n".join(line.removeprefix("        ") for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout == "1 []\n" and "Start a server" in done.stderr


@pytest.mark.parametrize(
    ("flags", "missing", "extra"),
    [
        (("--grpc-port", "0"), "grpc", "grpc"),
        (("--grpc-port", "0"), "grpc_health", "grpc"),
        (("--grpc-port", "0"), "grpc_reflection", "grpc"),
        (("--telemetry",), "opentelemetry", "otel"),
    ],
)
def test_a_flag_without_its_packages_names_the_extra_to_install(flags, missing, extra):
    """Before anything is opened or loaded."""
    code = f"""
        import runpy, sys

        class Without:  # an environment in which the package has not been installed
            def __init__(self, finder):
                self.finder = finder
            def find_spec(self, name, *rest):
                return None if name.partition(".")[0] == "{missing}" else self.finder.find_spec(name, *rest)

        sys.meta_path[:] = map(Without, sys.meta_path)
        sys.argv = ["attend", "serve", "--port", "0", *{flags!r}]
        try:
            runpy.run_module("attend", run_name="__main__")
        finally:
            assert "torch" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"attend serve: {flags[0]} needs more packages: pip install 'attend-service[serve,{extra}]'\n"


def test_layers_with_a_url_lists_the_layers_of_the_server(server, http):
    assert json.loads(run_attend("layers", "list", "--url", server.url, "--json").stdout) == http.get("/layers").json()
    shown = run_attend("layers", "list", "--url", server.url, env={**WIDE, "COLUMNS": "80"}).stdout.decode()
    fingerprint = http.get("/layers/default").json()["fingerprint"]
    assert any(row.split() == f"default 64 8 float32 seed 0 16,640 {fingerprint[:8]}".split() for row in shown.splitlines())


def test_layers_without_a_url_lists_the_configured_layers(server, http, tmp_path):
    listed = json.loads(run_attend("layers", "list", "--json").stdout)["layers"]
    assert listed == [layer for layer in http.get("/layers").json()["layers"] if layer["name"] == "default"]
    config = tmp_path / "attend.toml"
    config.write_text("d_model = 6\nnum_heads = 3\n[layers.more]\nd_model = 4\nnum_heads = 2\nseed = 7\n")
    listed = json.loads(run_attend("layers", "list", "--json", "--config", str(config), "--num-heads", "2").stdout)["layers"]
    assert [(layer["name"], layer["spec"]["d_model"], layer["spec"]["num_heads"], layer["spec"]["seed"]) for layer in listed] == [
        ("default", 6, 2, 0),
        ("more", 4, 2, 7),
    ]


def test_an_absent_device_is_refused():
    done = run_attend("layers", "list", "--device", "cuda:99")
    assert done.returncode == 2 and done.stderr.startswith(b"attend layers list: cannot compute on cuda:99: ")


def test_openapi_prints_the_document_of_the_server(http, tmp_path):
    served = http.get("/openapi.json").json()
    assert json.loads(run_attend("openapi").stdout) == served
    path = tmp_path / "openapi.json"
    done = run_attend("openapi", "-o", str(path))
    assert (done.returncode, done.stdout) == (0, b"")
    assert json.loads(path.read_text()) == served and path.read_text().endswith("}\n")


def test_openapi_reports_a_file_that_cannot_be_written(tmp_path):
    done = run_attend("openapi", "-o", str(tmp_path / "no" / "openapi.json"))
    assert done.returncode == 1 and b"cannot write" in done.stderr


def test_config_shows_the_value_and_the_source_of_each_setting(tmp_path):
    """A flag overrides the environment, which overrides the file."""
    config = tmp_path / "attend.toml"
    config.write_text("port = 1\nseed = 1\nhost = '::1'\n[layers.more]\nd_model = 4\nnum_heads = 2\n")
    env = {**WIDE, "ATTEND_PORT": "2", "ATTEND_SEED": "2", "ATTEND_MAX_DEPTH": "32"}
    arguments = ["config", "--config", str(config), "--port", "3"]
    printed = json.loads(run_attend(*arguments, "--json", env=env).stdout)
    assert list(printed) == list(Settings.model_fields)
    assert printed["port"] == {"value": 3, "source": "--port"}
    assert printed["seed"] == {"value": 2, "source": "ATTEND_SEED"}
    assert printed["max_depth"] == {"value": 32, "source": "ATTEND_MAX_DEPTH"}
    assert printed["host"] == {"value": "::1", "source": str(config)}
    assert printed["layers"]["source"] == str(config) and printed["layers"]["value"]["more"]["num_heads"] == 2
    assert printed["workers"] == {"value": 1, "source": "default"}
    shown = run_attend(*arguments, env=env).stdout.decode()
    assert all(f"│ {name} " in shown for name in printed) and "│ ATTEND_SEED" in shown
    assert f"numbers in JSON: {numbers.variant()} " in shown
    assert f"short calls: {extension.variant()} " in shown


def test_a_setting_without_its_counterpart_is_refused():
    done = run_attend("config", "--tls-cert", "chain.pem", env=WIDE)
    assert (done.returncode, done.stderr) == (2, b"attend config: tls_cert and tls_key go together\n")


def test_a_scope_that_does_not_exist_is_refused(tmp_path):
    done = run_attend("keys", "add", "one", "--scope", "infr", "--file", str(tmp_path / "keys.txt"))
    assert done.returncode == 2 and b"got infr (did you mean infer?)" in done.stderr and not list(tmp_path.iterdir())


def test_keys_of_a_missing_file_are_refused(tmp_path):
    done = run_attend("keys", "list", "--file", str(tmp_path / "none"))
    assert done.returncode == 2 and b"cannot read the keys file" in done.stderr and b"`attend keys add` makes it" in done.stderr


def test_a_grpc_message_of_more_bytes_than_grpc_counts_is_refused_before_the_server_listens():
    done = run_attend("serve", "--port", "0", "--grpc-port", "0", "--max-grpc-bytes", str(2**31), "--max-body-bytes", str(2**32), env=WIDE)
    assert done.returncode == 2 and b"less than or equal to 2147483647" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("setting", ["flag", "variable"])
@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("{", "expected JSON"),
        ("[1]", "dictionary"),
        ('{"a": {"d_model": 8, "num_heads": 2}, "a": {"d_model": 4, "num_heads": 2}}', 'got "a" twice'),
        ('{"a": {"d_model": 8, "num_heads": 2, "d_model": 4}}', 'got "d_model" twice'),
        ('{"bad name": {"d_model": 8, "num_heads": 2}}', "bad name"),
        ('{"a": {"d_model": 8, "num_heads": 2, "nonsense": 3}}', "layers.a.nonsense"),
        ('{"a": {"d_model": 8, "num_heads": 3}}', "layers.a"),
        ('{"a": {"d_model": 8, "num_heads": 2, "init": null}}', '"a"'),
        ('{"a": {"d_model": 100000, "num_heads": 2}}', "max_layer_parameters"),
        ('{"a": {"d_model": 8000, "num_heads": 2}, "b": {"d_model": 8000, "num_heads": 2}}', "max_total_parameters"),
    ],
)
def test_invalid_configured_layers_are_refused_before_the_server_listens(setting, layers, expected):
    """The message names the layer and the fault."""
    flags = ["serve", "--port", "0", "--max-total-parameters", "400000000"]
    env = {name: value for name, value in WIDE.items() if name != "ATTEND_LAYERS"}
    done = (
        run_attend(*flags, "--layers", layers, env=env) if setting == "flag" else run_attend(*flags, env={**env, "ATTEND_LAYERS": layers})
    )
    message = done.stderr.decode()
    assert done.returncode == 2 and message.startswith("attend serve: ") and expected in message and "Traceback" not in message


def test_layers_are_configured_as_json(start):
    """As a flag and as a variable."""
    text = json.dumps({"more": {"d_model": 4, "num_heads": 2}})
    assert json.loads(run_attend("config", "--json", "--layers", text).stdout)["layers"]["value"]["more"]["d_model"] == 4
    server = start("--layers", text)
    assert httpx.get(f"{server.url}/layers/more").json()["spec"]["num_heads"] == 2


def test_a_server_without_the_compiled_extension_logs_so_once(tmp_path):
    """The log says what that costs; everything works."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['attend.wire.native._numbers'] = None")
    server = start_server(env={"PYTHONPATH": str(tmp_path)})
    index = httpx.get(f"{server.url}/", headers={"accept": "application/json"}).json()
    (warning,) = [event for event in server.events if "extension" in str(event["event"])]
    assert index["json_numbers"] == "python"
    assert warning["level"] == "warning" and "3 to 20 times as long" in warning["event"]
    query = [[[0.5] * 64] * 3]
    assert np.shape(httpx.post(f"{server.url}/attend", json={"query": query}).json()["output"]) == (1, 3, 64)
    assert server.stop() == 0


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cpu:1", "mps"])
def test_a_server_without_its_device_exits_before_it_listens(device):
    done = run_attend("serve", "--port", "0", "--device", device)
    assert done.returncode == 2 and b"listening" not in done.stderr
    assert done.stderr.startswith(b"attend serve: ") and device.encode() in done.stderr and done.stderr.count(b"\n") == 1


def test_config_reports_invalid_settings():
    done = run_attend("config", env={**WIDE, "ATTEND_PORT": "many"})
    assert done.returncode == 2 and done.stderr.startswith(b"attend config: ATTEND_PORT: ")


# --- servers that want a key, or show a certificate ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server_with_keys(tmp_path_factory):
    """A server with keys and TLS, the file of its authority's certificate, a key, and a key that may only infer."""
    folder, authority = tmp_path_factory.mktemp("keys"), trustme.CA()
    certificate, ca, chain, key, keys = authority.issue_cert("127.0.0.1"), *(folder / name for name in ("ca", "chain", "key", "keys"))
    authority.cert_pem.write_to_path(ca)
    certificate.cert_chain_pems[0].write_to_path(chain)
    certificate.private_key_pem.write_to_path(key)
    secret = run_attend("keys", "add", "tests", "--scope", "admin", "--scope", "infer", "--file", str(keys)).stdout.decode().strip()
    infer_only = run_attend("keys", "add", "caller", "--scope", "infer", "--file", str(keys)).stdout.decode().strip()
    server = fork_server("--tls-cert", str(chain), "--tls-key", str(key), "--keys-file", str(keys))
    yield server.url, str(ca), secret, infer_only
    server.stop()


def test_a_certificate_is_verified_with_the_given_ca(server_with_keys, tmp_path):
    url, ca, secret, _ = server_with_keys
    keyed = {**WIDE, "ATTEND_API_KEY": secret}
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"query": [[0.5] * 64, [1.0] * 64]}))
    for command in (
        ["layers", "list"],
        ["infer", str(request)],
        ["heads", str(request)],
        ["figure", str(request), "-o", str(tmp_path / "x.svg")],
    ):
        for arguments, env in ((["--ca", ca], keyed), ([], {**keyed, "ATTEND_CA": ca})):
            done = run_attend(*command, "--url", url, *arguments, env=env)
            assert done.returncode == 0, done.stderr.decode()
    done = run_attend("check", "--cases", "2", "--url", url, "--ca", ca, env=keyed)
    assert done.returncode == 0, done.stderr.decode()
    doubted = run_attend("layers", "list", "--url", url, env=keyed)
    assert doubted.returncode == 1 and b"is not trusted" in doubted.stderr and b"--ca" in doubted.stderr
    assert b"Start a server" not in doubted.stderr
    nothing = run_attend("layers", "list", "--url", url, "--ca", str(request), env=keyed)
    assert nothing.returncode == 2 and b"expected a file or folder of certificates" in b" ".join(nothing.stderr.split())


def test_a_key_without_the_scope_is_refused_by_the_scopes_name(server_with_keys):
    url, ca, _, infer_only = server_with_keys
    done = run_attend("layers", "remove", "default", "--url", url, "--ca", ca, env={**WIDE, "ATTEND_API_KEY": infer_only})
    assert done.returncode == 1 and b"a key with the scope admin" in done.stderr and b"Use a key with the named scope" in done.stderr


def test_environment_variables_of_clients_are_not_settings(server_with_keys):
    """With an exported key, commands in this process and `attend serve` work."""
    env = {**WIDE, "ATTEND_API_KEY": "x", "ATTEND_CA": "/nowhere"}
    for command in (["layers", "list", "--json"], ["config", "--json"]):
        done = run_attend(*command, env=env)
        assert done.returncode == 0 and json.loads(done.stdout)
