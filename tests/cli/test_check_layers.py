"""`attend check --module … --spec …`: layers with RoPE, norms, gates, latent keys and windows; each usual mistake is named by its cause."""

import functools
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from support.command import run_attend

CANDIDATES = '''
import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

def rotate(x, dims=10, factor=4.0, interleaved=False):
    """RoPE of the first dims numbers, theta 500, linear scaling."""
    angles = torch.arange(x.shape[2])[:, None] * 500.0 ** (-torch.arange(0, dims, 2) / dims) / factor
    part = x[..., :dims]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((turned, x[..., dims:]), -1)

class Rotary(nn.Module):
    factor, one_plus, norm_first, interleaved, scale = 4.0, 1, True, False, None

    def __init__(self, d_model, num_heads, head_dim, num_kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(d_model, num_heads * head_dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(d_model, num_kv_heads * head_dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(num_heads * head_dim, d_model, bias=False)
        self.q_norm = nn.Parameter(torch.zeros(num_heads * head_dim))
        self.k_norm = nn.Parameter(torch.zeros(num_kv_heads * head_dim))

    def norm(self, x, w):
        mean = x.square().mean(3, keepdim=True)
        return x * (mean + 1e-6).rsqrt() * (w + self.one_plus).view(-1, 1, self.head_dim)

    def prepare(self, x, w):
        turn = lambda x: rotate(x, factor=self.factor, interleaved=self.interleaved)
        return turn(self.norm(x, w)) if self.norm_first else self.norm(turn(x), w)

    def repeat(self, x):
        return x.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def mask(self, n):
        return torch.ones(n, n, dtype=bool).tril()

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.prepare(q, self.q_norm), self.repeat(self.prepare(k, self.k_norm)), self.repeat(v)
        heads = scaled_dot_product_attention(q, k, v, self.mask(x.shape[1]), scale=self.scale)
        return self.o_proj(heads.transpose(1, 2).flatten(2))

class Unscaled(Rotary):
    factor = 1.0

class WithoutOne(Rotary):
    one_plus = 0

class NormLast(Rotary):
    norm_first = False

class Pairs(Rotary):
    interleaved = True

class Tiled(Rotary):
    def repeat(self, x):
        return x.repeat(1, self.heads // self.kv_heads, 1, 1)

class Windowed(Rotary):
    left = 4

    def mask(self, n):
        return super().mask(n).triu(-self.left)

class LongerWindow(Windowed):
    left = 5

class Packed(Rotary):
    """Several sequences in a row, distinguished by their numbers."""

    def apart(self, segment_ids):
        return segment_ids[:, :, None] == segment_ids[:, None, :]

    def forward(self, x, segment_ids=None):
        n, (b, *_) = x.shape[1], x.shape
        seen = torch.ones(b, n, n, dtype=bool) if segment_ids is None else self.apart(segment_ids)
        self.mask = lambda n: seen[:, None] & torch.ones(n, n, dtype=bool).tril()
        return super().forward(x)

class Leaking(Packed):
    def apart(self, segment_ids):
        return torch.ones(*segment_ids.shape, segment_ids.shape[1], dtype=bool)

class LeakingAndUnscaled(Leaking, Unscaled):
    pass

class FirstItem(Packed):
    def apart(self, segment_ids):
        return super().apart(segment_ids[:1].expand_as(segment_ids))

class Boundaries(Rotary):
    """As in encoders of images, whose rows have no batch."""

    def bounds(self, cu_seqlens):
        return cu_seqlens.tolist()

    def forward(self, x, cu_seqlens):
        bounds = self.bounds(cu_seqlens)
        number = torch.bucketize(torch.arange(len(x)), torch.tensor(bounds[1:]), right=True)
        self.mask = lambda n: number == number[:, None]
        return super().forward(x[None])[0]

class Masked(nn.Module):
    """T5's, with a mask and 32 buckets."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(32, num_heads)

    def distances(self, n):
        return torch.arange(n) - torch.arange(n)[:, None]

    def buckets(self, ahead):
        far = 8 + (torch.log(ahead.abs().clamp(min=8) / 8) / np.log(16) * 8).long()
        return 16 * (ahead > 0) + torch.where(ahead.abs() < 8, ahead.abs(), far.clamp(max=15))

    def block(self, bias, mask):
        return bias if mask is None else bias.masked_fill(~mask, -torch.inf)

    def forward(self, x, mask=None):
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        bias = self.relative_attention_bias(self.buckets(self.distances(x.shape[1]))).permute(2, 0, 1)[None]
        return self.o(scaled_dot_product_attention(q, k, v, self.block(bias, mask), scale=1.0).transpose(1, 2).flatten(2))

class BucketBefore(Masked):
    def buckets(self, ahead):
        return (super().buckets(ahead) - 1) % 32

class Gated:
    """NumPy, x @ W; the columns of W_q are a query and a gate for each head."""

    order = slice(None)

    def __init__(self, d_model, num_heads, head_dim):
        draw = np.random.default_rng(0).standard_normal
        self.num_heads, self.head_dim = num_heads, head_dim
        self.W_q = draw((d_model, num_heads * 2 * head_dim)) / 3
        self.W_k, self.W_v = draw((2, d_model, num_heads * head_dim)) / 3
        self.W_o = draw((num_heads * head_dim, d_model))

    def cut(self, both):
        return both.reshape(*both.shape[:2], self.num_heads, 2, self.head_dim).transpose(3, 0, 2, 1, 4)[self.order]

    def activate(self, gate):
        return 1 / (1 + np.exp(-gate))

    def __call__(self, x):
        q, gate = self.cut(x @ self.W_q)
        k, v = ((x @ W).reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2) for W in (self.W_k, self.W_v))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(self.head_dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads = weights / weights.sum(-1, keepdims=True) @ v * self.activate(gate)
        return heads.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ self.W_o

class Halved(Gated):
    def cut(self, both):
        return both.reshape(*both.shape[:2], 2, self.num_heads, self.head_dim).transpose(2, 0, 3, 1, 4)

class Latent(nn.Module):
    """DeepSeek's, with mscale 1.3."""

    factor = 1.3**2
    own_rotary_parts = False

    def __init__(self, d_model, num_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim):
        super().__init__()
        self.heads, self.rank, self.own, self.shared = num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim
        self.q_a_proj, self.q_a_layernorm = nn.Linear(d_model, q_lora_rank, bias=False), nn.RMSNorm(q_lora_rank, eps=1e-6)
        self.q_b_proj = nn.Linear(q_lora_rank, num_heads * (self.own + self.shared), bias=False)
        rotary = self.shared * (num_heads if self.own_rotary_parts else 1)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = nn.Linear(d_model, self.rank + rotary, bias=False), nn.RMSNorm(self.rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(self.rank, num_heads * (self.own + v_head_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, d_model, bias=False)

    def turn(self, x):
        return rotate(x, self.shared, interleaved=True)

    def forward(self, x):
        split = lambda y: y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, q_rotary = split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))).split((self.own, self.shared), -1)
        c, k_rotary = self.kv_a_proj_with_mqa(x).split((self.rank, self.shared), -1)
        kv = split(self.kv_b_proj(self.kv_a_layernorm(c)))
        q = torch.cat((q, self.turn(q_rotary)), -1)
        k = torch.cat((kv[..., : self.own], self.turn(k_rotary[:, None]).expand(-1, self.heads, -1, -1)), -1)
        heads = scaled_dot_product_attention(q, k, kv[..., self.own :], is_causal=True, scale=self.factor * q.shape[-1] ** -0.5)
        return self.o_proj(heads.transpose(1, 2).flatten(2))

class WithoutMscale(Latent):
    factor = 1

class OwnRotaryParts(Latent):
    own_rotary_parts = True

def sliding(query, key, value):
    """A function of heads, with RoPE on pairs, softcap and a window of 4."""
    n = query.shape[2]
    q, k = (rotate(x, factor=1.0, interleaved=True) for x in (query, key))
    scores = 2 * (q @ k.mT / 11**0.5 / 2).tanh()
    return scores.masked_fill(torch.ones(n, n, dtype=bool).triu(-3).tril().logical_not(), -torch.inf).softmax(-1) @ value
'''

ROPE = {"theta": 500, "dims": 10, "scaling": {"type": "linear", "factor": 4}}
NORM = {"weights": "own"}
ROTARY = {"d_model": 29, "num_heads": 3, "head_dim": 11, "bias": False, "rope": ROPE, "qk_norm": NORM}
GATED = {"d_model": 29, "num_heads": 3, "head_dim": 7, "bias": False, "output_gate": {}}
LATENT = {
    "d_model": 29, "num_heads": 3, "head_dim": 11, "value_head_dim": 5, "bias": False, "scale": 1.3**2 * 11**-0.5,
    "rope": {"theta": 500, "dims": 4, "interleaved": True, "scaling": {"type": "linear", "factor": 4}},
    "latent": {"query_rank": 17, "key_value_rank": 13, "rope_key_dim": 4},
}  # fmt: skip
SLIDING = {
    "d_model": 29, "num_heads": 3, "head_dim": 11, "projections": False, "softcap": 2, "window": {"left": 3, "right": 0},
    "rope": {"theta": 500, "dims": 10, "interleaved": True},
}  # fmt: skip
BIASED = {"d_model": 28, "num_heads": 4, "bias": False, "scale": 1.0, "relative_bias": {}}
MASK = ["mask_means=attend"]
CAUSAL = ["causal=true", "norm_weights=1 + w"]
PER_HEAD = ["fused=per_head"]
GROUPED = ROTARY | {"num_heads": 6, "num_kv_heads": 2}
PAIRED = ROTARY | {"rope": ROPE | {"interleaved": True}}
WINDOW = ROTARY | {"window": {"left": 4}}

RIGHT = [
    ("Rotary", ROTARY, CAUSAL),
    ("Pairs", PAIRED, CAUSAL),
    ("Packed", ROTARY, CAUSAL),
    ("Boundaries", ROTARY, ["batched=false", *CAUSAL[1:]]),
    ("Masked", BIASED, MASK),
    ("Gated", GATED, PER_HEAD),
    ("Latent", LATENT, CAUSAL[:1]),
    ("sliding", SLIDING, ["framework=torch"]),
]
WRONG = [
    ("Unscaled", ROTARY, CAUSAL, ["the scaling of RoPE's frequencies is ignored"]),
    ("WithoutOne", ROTARY, CAUSAL, ["1 + w is forgotten"]),
    ("NormLast", ROTARY, CAUSAL, ["the norm of queries and keys is applied after RoPE and not before"]),
    ("Tiled", GROUPED, CAUSAL, ["query head i uses head i mod num_kv_heads of the keys"]),
    ("LongerWindow", WINDOW, CAUSAL, ["the window has one key more"]),
    ("Halved", GATED, PER_HEAD, ["one matrix for query and gate is cut as [2, h, d] and not as [h, 2, d]"]),
    ("WithoutMscale", LATENT, CAUSAL[:1], ["the layer's own scale is ignored, and the scores are divided by sqrt(head_dim)"]),
    ("Leaking", ROTARY, CAUSAL, ["sequences leak across segments"]),
    ("FirstItem", ROTARY, CAUSAL, ["all items have the mask of the first"]),
    ("BucketBefore", BIASED, MASK, ["relative biases are off by one: each is that of the bucket before"]),
    ("sliding", SLIDING | {"softcap": None}, ["framework=torch"], []),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("candidates")
    (path / "mine.py").write_text(CANDIDATES)
    return path


def check(folder: Path, name: str, spec: object, options: list[str], *more: str):
    given = [word for option in options for word in ("--with", option)]
    text = spec if isinstance(spec, str) else json.dumps(spec)
    return run_attend("check", "--module", f"mine.py:{name}", "--spec", text, *given, *more, cwd=folder)


@functools.cache
def report(folder: Path, name: str, spec: str, options: tuple[str, ...]):
    """What --json prints of a wrong candidate, which is checked once for all tests."""
    done = check(folder, name, spec, list(options), "--json", "--longest", "7")
    assert done.returncode == 1, done.stdout.decode() + done.stderr.decode()
    return json.loads(done.stdout)["modules"][0]


@pytest.mark.parametrize(("name", "spec", "options"), RIGHT)
def test_correct_candidates_agree(folder, name, spec, options):
    done = check(folder, name, spec, options, "--allow-skipped", "--longest", "33")
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert b"agrees with the reference in " in done.stdout


@pytest.mark.parametrize(("name", "spec", "options", "hints"), WRONG)
def test_mistakes_are_named(folder, name, spec, options, hints):
    module = report(folder, name, json.dumps(spec), tuple(options))
    named = module["mistakes"]
    assert len(named) == len(hints), module["first"]
    for hint in hints:
        assert any(hint in one for one in named), module["first"]


@pytest.mark.parametrize(("name", "before"), [("Leaking", []), ("LeakingAndUnscaled", ["the scaling of RoPE's frequencies is ignored"])])
def test_sequences_that_leak_across_segments_are_named_where_they_are_packed(folder, name, before):
    """It takes segments and no other mask, so the leak shows in that case alone, beside what shows in all of them."""
    module = report(folder, name, json.dumps(ROTARY), tuple(CAUSAL))
    packed = next(case for case in module["cases"] if case["case"] == "packed sequences")
    hints = [line for line in module["first"].splitlines() if line.startswith("hint: ")]
    assert packed["agrees"] is False
    assert all(named in hint for named, hint in zip([*before, "sequences leak across segments"], hints, strict=True))


def test_a_spec_may_be_in_a_file_and_the_printed_command_names_it(folder):
    (folder / "spec.json").write_text(json.dumps(ROTARY))
    done = check(folder, "Unscaled", "spec.json", CAUSAL, "--seed", "3", "--longest", "7")
    again = shlex.split(done.stdout.decode().splitlines()[-1].removeprefix("again: attend "))
    assert again[:5] == ["check", "--module", "mine.py:Unscaled", "--spec", "spec.json"]
    assert run_attend(*again, cwd=folder).stdout == done.stdout


@pytest.mark.parametrize(
    ("name", "spec", "options", "expected"),
    [
        ("OwnRotaryParts", LATENT, CAUSAL[:1], "to have 13 + 4 rows, got 13 + 3 x 4: the rotary part of latent keys is shared"),
        ("Rotary", {**ROTARY, "qk_norm": None}, CAUSAL, "found query_norm.weight, key_norm.weight, which the layer"),
        ("Latent", LATENT | {"qk_norm": {}}, CAUSAL, "found no weight of query_norm, key_norm"),
        ("Rotary", {**ROTARY, "bias": True}, CAUSAL, "found no weight of query.bias"),
        ("Rotary", {**ROTARY, "qk_norm": {}}, CAUSAL, "expected query_norm.weight (11,), got (33,)"),
        ("Rotary", WINDOW | {"window": {"left": 4096}}, CAUSAL, "expected a window or chunk of at most 29 keys"),
        ("sliding", ROTARY, ["framework=torch"], "found no weights"),
        ("Rotary", {**ROTARY, "rope_theta": 500}, CAUSAL, '--spec: expected rope {"theta"}, got a field "rope_theta", at /rope_theta'),
        ("Rotary", '{"d_model": 29', CAUSAL, "expected a spec in JSON, a file with one, or a family"),
        ("Rotary", "no_such_file.json", CAUSAL, "expected a spec in JSON, a file with one, or a family"),
    ],
)  # fmt: skip
def test_unsuitable_specs_are_refused(folder, name, spec, options, expected):
    done = check(folder, name, spec, options)
    message = " ".join(re.sub("[│╭╮╰╯─]", " ", done.stderr.decode()).split())
    assert done.returncode == 2 and expected in message, message


def blocks_of_the_page():
    return re.findall(r"```\w*\n(.*?)```", (Path(__file__).parents[2] / "docs" / "check.md").read_text(), re.DOTALL)


def test_the_example_of_what_weights_show_is_as_it_prints(tmp_path):
    code, shown = blocks_of_the_page()[2:4]
    (tmp_path / "theirs.py").write_text(code)
    done = run_attend("check", "--module", "theirs.py:attention", cwd=tmp_path)
    assert done.returncode == 1 and " ".join(shown.partition(": expected")[0].split()) in " ".join(done.stdout.decode().split())
    (document,) = json.loads(run_attend("check", "--module", "theirs.py:attention", "--json", cwd=tmp_path).stdout)["modules"]
    assert document["weights"] == ["the scores of the keys from 64 on are multiplied by 1.5"]


def test_the_example_of_the_page_runs_and_is_in_the_help(tmp_path):
    code, command, shown = blocks_of_the_page()[4:7]
    (tmp_path / "rotary.py").write_text(code)
    words = shlex.split(command)
    done = run_attend(*words[1:], cwd=tmp_path)
    assert done.returncode == 1 and shown in done.stdout.decode()
    plain = [re.sub('"rope": {.*?}}}', '"rope": {}}', word) for word in words[1:]]
    assert run_attend(*plain, "--allow-skipped", cwd=tmp_path).returncode == 0
    described = " ".join(run_attend("check", "--help", env={**os.environ, "COLUMNS": "300", "NO_COLOR": "1"}).stdout.decode().split())
    assert " ".join(command.split()) in described.replace(" \\ ", " ")


def test_a_spec_needs_a_module():
    assert b"--spec" in run_attend("check", "--spec", "{}").stderr
