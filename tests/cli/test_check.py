"""`attend check`: correct servers and modules agree, and faults in wrong ones are detected and named."""

import io
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import get_args

import httpx
import numpy as np
import pytest
from rich.console import Console

from attend.attention.reference.call import ReferenceCall
from attend.attention.reference.forward import attend
from attend.check.convention import option_table
from attend.check.low_precision import HALF
from attend.check.random_cases import random_case
from attend.check.rounding import RoundedLayer
from attend.cli.server_check import OUTPUTS, compare_output, compare_reply, compared_outputs, draw_case, with_roundings
from attend.cli.terminal import progress_line
from attend.spec import DType, LayerSpec
from attend.tensors import datatype_of
from attend.wire.client_codec import decode_json_reply
from attend.wire.codec import Reply
from attend.wire.json.writer import encode
from attend.wire.schemas.attend import ReplyOptions
from support.cases import weights_of
from support.command import run_attend


def reply_of(content: bytes) -> Reply:
    """The reply that the service encoded as this JSON."""
    head, tensors = decode_json_reply(content)
    datatype = next(datatype_of(array).name for array in tensors.values() if array.dtype.kind not in "ib")
    return Reply(head.layer.model_dump(), head.fully_masked_rows, datatype, tensors)


WIDE = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}


def test_the_service_agrees_in_process_and_by_url(server, http):
    before = http.get("/layers").json()
    for where in ([], ["--url", server.url]):
        done = run_attend("check", "--cases", "40", "--seed", "4", *where, env=WIDE)
        shown = done.stdout.decode()
        assert done.returncode == 0, shown
        assert shown.endswith("40 cases agree with the reference\n")
        assert all(f"│ {output} " in shown for output in OUTPUTS)
    assert http.get("/layers").json() == before  # it cleans up


def test_the_check_of_a_server_prints_json(server):
    done = run_attend("check", "--cases", "3", "--seed", "3", "--url", server.url, "--json")
    printed = json.loads(done.stdout)
    assert done.returncode == 0 and set(printed) == {"agrees", "cases", "seed", "outputs"}
    assert (printed["agrees"], printed["cases"], printed["seed"]) == (True, 3, 3)
    assert {row["output"] for row in printed["outputs"]} == {
        name for number in range(3) for name in compared_outputs(draw_case(3, number).spec)
    }
    assert all(row["agrees"] and row["error"] <= row["allowed"] and 0 <= row["case"] < 3 for row in printed["outputs"])


@pytest.fixture
def relay(server) -> Iterator[Callable[[Callable[[Reply], Reply]], str]]:
    """A relay to the real server that passes each reply to POST /attend through a function."""
    running: list[ThreadingHTTPServer] = []

    def begin(change: Callable[[Reply], Reply]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                reply = httpx.request(self.command, server.url + self.path, content=body, timeout=60)
                content = reply.content
                if self.path == "/attend" and reply.status_code == 200:
                    content = b"".join(encode(change(reply_of(content)), ReplyOptions(form="base64"))[1])
                self.send_response(reply.status_code)
                for name, value in {**reply.headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815  # as http.server wants them

            def log_message(self, *_: object) -> None: ...

        running.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=running[-1].serve_forever, args=(0.01,)).start()
        return f"http://127.0.0.1:{running[-1].server_port}"

    yield begin
    for one in running:
        one.shutdown()
        one.server_close()


def test_replies_that_a_relay_does_not_change_agree(relay):
    """So the next test detects the change of the reply, not the relay."""
    assert run_attend("check", "--cases", "3", "--url", relay(lambda reply: reply)).returncode == 0


def off_by_a_little(reply: Reply) -> Reply:
    size = np.abs(reply.tensors["head_outputs"]).max()
    reply.tensors["head_outputs"] = reply.tensors["head_outputs"] + np.asarray(size * 1e-2).astype(reply.tensors["head_outputs"].dtype)
    return reply


def without_scores(reply: Reply) -> Reply:
    del reply.tensors["scores"]
    return reply


def one_row_more(reply: Reply) -> Reply:
    return Reply(reply.layer, reply.fully_masked_rows + 1, reply.datatype, reply.tensors)


@pytest.mark.parametrize(
    ("change", "named"),
    [(off_by_a_little, "head_outputs off by"), (without_scores, "scores missing"), (one_row_more, "fully_masked_rows ")],
)
def test_a_wrong_reply_is_detected(relay, change, named):
    url = relay(change)
    done = run_attend("check", "--cases", "2", "--seed", "14", "--url", url, env=WIDE)
    shown = done.stdout.decode()
    assert done.returncode == 1 and "WRONG" in shown
    assert f"wrong: {named}" in shown and "query [" in shown
    again = shown.splitlines()[-1].removeprefix("again: attend ").split()
    assert again[:3] == ["check", "--url", url]
    printed = json.loads(run_attend(*again, "--json").stdout)
    assert (
        not printed["agrees"]
        and printed["cases"] == 1
        and printed["wrong"].startswith(named)
        and printed["again"] == f"attend {' '.join(again)}"
    )
    [row] = [row for row in printed["outputs"] if not row["agrees"]]
    assert named.startswith(row["output"]) and (row["error"] is None) == bool(row["about"])
    assert run_attend(*again).returncode == 1


def test_other_weights_are_detected(relay, server, monkeypatch):
    """The relay makes every layer from another seed."""
    real = httpx.request

    def reseeding(method: str, url: str, content: bytes, timeout: float) -> httpx.Response:
        if method == "PUT":
            document = json.loads(content)
            document["spec"]["seed"] ^= 1
            content = json.dumps(document).encode()
        return real(method, url, content=content, timeout=timeout)

    monkeypatch.setattr(httpx, "request", reseeding)
    seeded = next(number for number in range(100) if draw_case(0, number).weights is None)
    done = run_attend("check", "--case", str(seeded), "--url", relay(lambda reply: reply), env=WIDE)
    assert done.returncode == 1 and b"wrong: weights differ from" in done.stdout


def has_numbers(case):
    """Whether every output of a case has a finite number."""
    outputs = attend(case.spec, weights_of(case), **case.request)
    return all(np.isfinite(getattr(outputs, name)).any() for name in compared_outputs(case.spec))


@pytest.mark.parametrize("dtype", get_args(DType))
def test_every_output_is_compared(dtype):
    """The reference agrees with itself; an error above the tolerance in any output, NaN, or another shape does not."""
    case = next(case for case in (draw_case(0, n) for n in range(100)) if case.spec.dtype == dtype and has_numbers(case))
    weights = weights_of(case)
    reference, rounded = attend(case.spec, weights, **case.request), with_roundings(case, weights)
    masked = reference.fully_masked_rows
    right = {name: getattr(reference, name) for name in compared_outputs(case.spec)}
    allowed = {found.output: found.tolerance for found in compare_reply(case, reference, right, masked, rounded)}
    assert all(found.agrees for found in compare_reply(case, reference, right, masked, rounded))
    for name, tensor in right.items():
        place = tuple(np.argwhere(np.isfinite(tensor))[-1])
        for wrong in (tensor[place] + 1.01 * allowed[name], np.nan, np.inf):
            changed = tensor.copy()
            changed[place] = wrong
            found = compare_reply(case, reference, {**right, name: changed}, masked, rounded)
            assert [f.output for f in found if not f.agrees] == [name]
        assert not compare_output(name, tensor, tensor[..., None], case.spec, 1.0).agrees


@pytest.mark.parametrize("dtype", HALF)
def test_a_half_precision_layer_with_fewer_digits_is_detected(dtype):
    """A layer that rounds as the dtype does agrees; one that keeps three bits less at each place does not, in most cases."""
    step = {"float16": 2.0**-8, "bfloat16": 2.0**-5}[dtype]  # of mantissas in [0.5, 1); bfloat16 has 2^-8

    class Coarse(RoundedLayer):
        def rounded(self, x):
            mantissa, exponent = np.frexp(x)
            return np.ldexp(np.round(mantissa / step) * step, exponent)

    detected = 0
    for number in range(60):
        case = random_case(np.random.default_rng(number), dtype=dtype)
        weights = weights_of(case)
        reference, rounded = attend(case.spec, weights, **case.request), with_roundings(case, weights)
        right, wrong = rounded, Coarse(case.spec, weights).attend(ReferenceCall.from_fields(**case.request))
        for outputs, agrees in ((right, True), (wrong, False)):
            reply = {name: getattr(outputs, name).reshape(getattr(reference, name).shape) for name in compared_outputs(case.spec)}
            found = compare_reply(case, reference, reply, reference.fully_masked_rows, rounded)
            assert all(each.agrees for each in found) or not agrees
            detected += not (agrees or all(each.agrees for each in found))
    assert detected > 30


def test_minus_infinity_agrees_only_with_itself():
    expected, spec = np.array([1.0, -np.inf]), LayerSpec(d_model=2, num_heads=1)
    assert compare_output("scores", expected, np.array([1.0, -np.inf], np.float32), spec, 1.0).agrees
    assert not compare_output("scores", expected, np.array([1.0, -1e9], np.float32), spec, 1.0).agrees


# --- people's own ---------------------------------------------------------------------------------------------------------------------

MODULE = """
    import math
    import numpy as np
    import torch

    class Right(torch.nn.MultiheadAttention):
        pass

    class Tempered(torch.nn.MultiheadAttention):
        def forward(
            self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True, is_causal=False,
            temperature=1.0,
        ):
            return super().forward(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)

    class Unscaled:
        def __init__(self, d_model, num_heads):
            r = np.random.RandomState(0)
            self.num_heads = num_heads
            self.w_q, self.w_k, self.w_v, self.w_o = (r.randn(d_model, d_model) for _ in range(4))

        def __call__(self, query):
            split = lambda x: x.reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2)
            q, k, v = (split(query @ w) for w in (self.w_q, self.w_k, self.w_v))
            scores = q @ k.swapaxes(-1, -2)
            e = np.exp(scores - scores.max(-1, keepdims=True))
            heads = e / e.sum(-1, keepdims=True) @ v
            return heads.swapaxes(1, 2).reshape(query.shape) @ self.w_o

    class Lettered(torch.nn.Module):
        def __init__(self, d_model, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.a, self.b, self.c = (torch.nn.Linear(d_model, d_model) for _ in range(3))

        def forward(self, x):
            q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (self.a(x), self.b(x), self.c(x)))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    class Raises(Unscaled):
        def __call__(self, query):
            raise KeyError("rope")

    class Broken(torch.nn.Module):
        def __init__(self, d_model, num_heads):
            raise OSError("no weights here")
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "theirs.py").write_text(textwrap.dedent(MODULE))
    return tmp_path


def check_module(package, *arguments: str):
    return run_attend("check", *arguments, cwd=package, env=WIDE)


def test_a_correct_module_agrees(package):
    done = check_module(package, "--module", "theirs:Right")
    looked = b"agrees with the reference in 79 calls, with up to 4,097 keys, in float32, and with key_padding_mask, need_weights, "
    assert done.returncode == 0 and looked in done.stdout, done.stdout
    twice = check_module(package, "--module", "theirs:Right", "--cases", "40", "--longest", "7")
    assert b"agrees with the reference in 54 calls, with up to 7 keys, in float32, and with " in twice.stdout, twice.stdout


def test_a_parameter_that_is_not_tried_is_named_and_makes_the_exit_code_3(package):
    given = ["--module", "theirs:Tempered", "--longest", "7"]
    done, allowed, printed = (check_module(package, *given, *more) for more in ([], ["--allow-skipped"], ["--json"]))
    assert (done.returncode, allowed.returncode, printed.returncode) == (3, 0, 3)
    assert b"agrees with the reference in 27 calls, with up to 7 keys" in done.stdout, done.stdout
    assert done.stdout.split()[-5:] == b"not tried: the parameter temperature".split()
    [report] = json.loads(printed.stdout)["modules"]
    assert report["parameters_not_tried"] == ["temperature"] and report["untried"] == [] and report["keys"] == 7


def test_the_first_disagreement_of_a_wrong_module_is_shown(package):
    done = check_module(package, "--module", "theirs:Right", "--module", "theirs:Unscaled", "--longest", "7")
    shown = done.stdout.decode()
    assert done.returncode == 1
    assert shown.index("theirs:Unscaled disagrees with the reference in ") < shown.index("hint: ") < shown.index("largest error")
    assert "first disagreement: no mask, output[0, 0, 0] (item 0, query 0, number 0): expected " in shown
    assert "hint: this is what comes out when the scores are not divided by sqrt(head_dim)" in shown
    assert shown.count(" agrees with the reference") == 1
    assert shown.count("largest error") == 1  # the cases of the one that is wrong
    assert b"largest error" in check_module(package, "--module", "theirs:Right", "--verbose", "--longest", "7").stdout


def test_cases_that_are_not_tried_are_in_one_sentence_and_each_in_the_table_if_verbose(package):
    given = ["--module", "theirs:Unscaled", "--longest", "7"]
    shown, verbose = (check_module(package, *given, *more).stdout.decode() for more in ([], ["--verbose"]))
    sentence = "no parameter takes: mask, causal mask, padded keys, packed sequences"
    assert sentence in shown and "not run" not in shown and "not tried" not in shown
    assert sentence in verbose and "not run: no parameter is known as" in verbose


def test_the_report_fits_80_columns_and_begins_with_the_verdict(package):
    done = run_attend("check", "--module", "theirs:Unscaled", "--longest", "7", cwd=package, env={**WIDE, "COLUMNS": "80"})
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith("theirs:Unscaled disagrees with the reference in ")
    assert lines[1].startswith("first wrong step: scaled_products: ") and lines[2].startswith("  line ")
    assert lines[3] == "hint: this is what comes out when the scores are not divided by sqrt(head_dim)"
    assert lines[4:6] == ["  you compute: softmax(Q Kᵀ) V", "  expected:    softmax(Q Kᵀ / √d) V"]
    assert all(len(line) <= 80 for line in lines)


def test_a_line_of_progress_appears_on_terminals_alone():
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal)
        with progress_line("checking theirs:Right", console, 0) as line:
            line.show("checking theirs:Right, 1 of 2")
            if terminal:
                line.timer.join()
        assert ("checking theirs:Right, 1 of 2" in console.file.getvalue()) is terminal


def test_python_runs_the_command(package):
    command = [sys.executable, "-m", "attend", "check", "--module", "theirs:Unscaled", "--longest", "7"]
    done = subprocess.run(command, cwd=package, env=WIDE, capture_output=True, check=False)
    assert done.returncode == 1 and b"not divided by sqrt(head_dim)" in done.stdout


def test_the_printed_command_repeats_the_whole_check(package):
    """With every convention, quoted for a shell, and the seed of the round that disagreed."""
    weights = 'weights={"query": "a", "key": "c", "value": "b"}'
    given = ["--module", "./theirs.py:Lettered", "--longest", "7", "--with", weights, "--with", "num_heads=2"]
    done = check_module(package, *given, "--seed", "4", "--cases", "20")
    again = done.stdout.decode().splitlines()[-1].removeprefix("again: ")
    assert done.returncode == 1 and shlex.split(again) == ["attend", "check", *given, "--seed", "4"]
    repeated = check_module(package, *shlex.split(again)[2:])
    assert repeated.stdout == done.stdout


def test_unknown_names_of_weights_are_found_and_can_be_mapped(package):
    found = check_module(package, "--module", "theirs.py:Lettered", "--longest", "7")
    assert found.returncode == 0 and "a is the weight of query; b is the weight of key; c is the weight of value" in found.stdout.decode()
    names = 'weights={"query": "a", "key": "b", "value": "c"}'
    assert check_module(package, "--module", "theirs.py:Lettered", "--longest", "7", "--with", names).returncode == 0


def test_the_help_has_every_convention_and_its_values(package):
    """The same as in docs/check.md."""
    shown = " ".join(check_module(package, "--help").stdout.decode().split())
    for name, values, meaning in option_table():
        assert f"{name}={' | '.join(values)}: {meaning}" in shown


def test_json_says_of_a_module_whose_cases_show_nothing_that_neither_is_known(package):
    done = check_module(package, "--module", "theirs:Right", "--with", "tolerance=9", "--longest", "7", "--json")
    printed = json.loads(done.stdout)
    assert done.returncode == 3 and printed["agrees"] is printed["modules"][0]["agrees"] is None
    assert {case["agrees"] for case in printed["modules"][0]["cases"]} == {None}


def test_the_check_of_a_module_prints_json(package):
    done = check_module(package, "--module", "theirs:Right", "--module", "theirs:Unscaled", "--module", "theirs:Raises", "--json")
    printed = json.loads(done.stdout)
    assert done.returncode == 1 and not printed["agrees"]
    right, unscaled, raises = printed["modules"]
    assert right["agrees"] and right["calls"] == 79 and all(case["agrees"] for case in right["cases"] if not case["skipped"])
    assert right["spec"]["num_heads"] == 3 and right["versions"]["numpy"] == np.__version__ and "torch" in right["versions"]
    assert not unscaled["agrees"] and "not divided by sqrt(head_dim)" in unscaled["first"] and unscaled["cases"][0]["agrees"] is False
    assert unscaled["mistakes"] == ["the scores are not divided by sqrt(head_dim)"]
    assert unscaled["arithmetic"] == [["softmax(Q Kᵀ) V", "softmax(Q Kᵀ / √d) V"]]
    assert unscaled["again"] == "attend check --module theirs:Unscaled --seed 0"
    assert "KeyError" in raises["cases"][0]["raised"] and raises["cases"][0]["error"] is None


def test_the_exception_of_a_module_is_shown(package):
    done = check_module(package, "--module", "theirs:Raises", "--seed", "5")
    shown = done.stdout.decode()
    assert done.returncode == 2 and "RAISED" in shown and "inf" not in shown
    assert "theirs:Raises raised in every call, so nothing was compared" in shown
    assert "expected a result, got KeyError: 'rope'; called with query" in shown
    assert "again: attend check --module theirs:Raises --seed 5" in shown


def test_the_options_reach_the_comparison(package):
    """With a wrong option, the same module leaves the reference at another step."""
    shown = check_module(package, "--module", "theirs:Unscaled", "--with", "orientation=out,in").stdout.decode()
    assert "first wrong step: project_query" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--module", "theirs:Nothing"], "has no attribute 'Nothing'"),
        (["--module", "not_theirs:X"], "cannot import not_theirs:X: No module named 'not_theirs'"),
        (["--module", "theirs"], "expected my_package.my_module:MyAttention or my_file.py:MyAttention, got 'theirs'"),
        (["--module", "./theirs:Right"], "or my_file.py:MyAttention, got './theirs:Right'"),
        (["--module", "./none.py:Right"], "there is no file none.py"),
        (["--module", "./theirs.py:Nothing"], "has no attribute 'Nothing'"),
        (["--module", "theirs:Right", "--with", "fused=k,q"], "expected fused to be q,k,v or per_head or q,v,k or "),
        (["--module", "theirs:Broken"], "OSError: no weights here; constructed with d_model=12"),
        (["--module", "theirs:Right", "--with", "colour=red"], "expected an option among like, mask_means, "),
        (["--module", "theirs:Right", "--with", "=red"], "expected NAME=VALUE, got '=red'"),
        (["--module", "theirs:Right", "--case", "3"], "leave --url, --case"),
        (["--module", "theirs:Right", "--with", "colour"], "expected NAME=VALUE, got 'colour'"),
        (["--module", "theirs:Right", "--url", "http://127.0.0.1:1"], "leave --url, --case"),
        (["--with", "mask_means=block"], "--with and --spec need a --module"),
        (["--cases", "0"], "--cases"),
    ],
)
def test_modules_that_cannot_be_checked_are_refused(package, arguments, message):
    """The remedy fits the mistake: no option repairs a wrong name."""
    done = check_module(package, *arguments)
    assert done.returncode == 2 and message in done.stderr.decode()
    assert not ("--with" in done.stderr.decode() and any(word in message for word in ("no attribute", "my_file.py", "no file", "import ")))
