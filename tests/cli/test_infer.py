"""`attend infer`: the same reply in this process and from a server, and its refusals."""

import json
import os

import numpy as np
import pytest
from support.command import run_attend

BODY = {"query": [[1, 0, 0, 0], [0, 1, 0, 0]], "causal": True, "outputs": ["output", "attention_weights", "scores"]}
LAYER = ("--d-model", "4", "--num-heads", "2", "--seed", "5")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps(BODY))
    return str(path)


@pytest.fixture(scope="module")
def here() -> bytes:
    """What is printed for the body on standard input, in process."""
    done = run_attend("infer", "-", "--json", *LAYER, stdin=json.dumps(BODY).encode())
    assert done.returncode == 0
    return done.stdout


def test_a_server_and_this_process_give_the_same(start_here, file, here):
    there = run_attend("infer", file, "--json", "--url", start_here(d_model=4, num_heads=2, seed=5))
    assert there.returncode == 0 and json.loads(here) == json.loads(there.stdout)
    assert list(json.loads(here)) == ["layer", "fully_masked_rows", *BODY["outputs"]]


def test_flags_and_environment_variables_configure_the_same(file, here):
    env = {**os.environ, "ATTEND_D_MODEL": "4", "ATTEND_NUM_HEADS": "2", "ATTEND_SEED": "5"}
    assert run_attend("infer", file, "--json", env=env).stdout == here


def test_settings_about_callers_do_not_apply_in_this_process(file, here):
    """Keys, addresses, hosts and deadlines are for requests over a network."""
    env = {"ATTEND_KEYS_FILE": "/nowhere", "ATTEND_HOST": "0.0.0.0", "ATTEND_ALLOWED_HOSTS": "a.example", "ATTEND_WORKERS": "2"}
    env |= {"ATTEND_REQUEST_TIMEOUT": "0.000001", "ATTEND_COMPRESS_REPLIES": "true", "ATTEND_MAX_BODY_BYTES": "1024"}
    done = run_attend("infer", file, "--json", *LAYER, env={**os.environ, **env})
    assert done.returncode == 0 and done.stdout == here, done.stderr


def test_shapes_and_numbers_are_printed(file, here):
    done = run_attend("infer", file, *LAYER)
    shown, reply = done.stdout.decode(), json.loads(here)
    assert done.returncode == 0
    assert shown.startswith(f"layer default, fingerprint {reply['layer']['fingerprint'][:12]}; ms: decode ")
    assert "\noutput [2, 4]\n" in shown and "\nattention_weights [2, 2, 2]\n" in shown and "-inf" in shown
    output = shown.partition("output [2, 4]\n")[2].partition("attention_weights")[0].replace("[", "").replace("]", "")
    np.testing.assert_allclose(np.array(output.split(), float), np.ravel(reply["output"]), atol=5e-5)


def test_the_largest_weights_and_fully_masked_rows_are_printed(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"query": BODY["query"], "block_keys": [1, 1], "select": {"top_k": 1}}))
    shown = run_attend("infer", str(path), *LAYER).stdout.decode()
    assert "attention_weights.keys [2, 2, 1]" in shown and "attention_weights.values [2, 2, 1]" in shown
    assert ", 4 fully masked rows;" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{file}"], 1, 'expected 64 values per query for layer "default", got 4, at /query'),
        (["{file}.not", *LAYER], 1, "cannot read"),
        (["{file}", "--url", "http://127.0.0.1:1"], 1, "Start a server with `attend serve`"),
        (["{file}", "--url", "{server}"], 1, "got 4, at /query"),
        (["{file}", "--url", "{server}", "--seed", "1"], 2, "--seed cannot be combined with --url"),
        (["{file}", "--d-model", "6"], 2, "expected a divisor of d_model 6, or a head_dim, got 8"),
        (["{file}", "--config", "{file}"], 2, "is not TOML"),
        (["{file}", "--threads", "9999"], 2, "9999 threads"),
        (["{file}", "--d-model", "many"], 2, "'--d-model'"),
        ([], 2, "FILE"),
    ],
)
def test_invalid_arguments_are_refused_with_what_to_do(server, file, arguments, code, message):
    done = run_attend(
        "infer", *(argument.format(file=file, server=server.url) for argument in arguments), env={**os.environ, "COLUMNS": "200"}
    )
    assert done.returncode == code and done.stdout == b""
    assert message in done.stderr.decode()


@pytest.mark.parametrize("stdin", [b"", b"[1", b"[]", b'{"query": [[NaN]]}'])
def test_an_invalid_body_is_refused(server, stdin):
    done = run_attend("infer", "-", "--url", server.url, stdin=stdin)
    assert done.returncode == 1 and done.stdout == b""
    assert done.stderr.startswith(b"attend infer: expected ")


def test_an_unknown_setting_is_refused(file):
    done = run_attend("infer", file, env={**os.environ, "ATTEND_SPEED": "9"})
    assert done.returncode == 2 and b"ATTEND_SPEED is not a setting" in done.stderr
