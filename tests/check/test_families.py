"""A spec may be the name of a family of models, as the project's table of families has it."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from attend.check import assert_agrees, compare
from support.command import run_attend

LLAMA = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Llama(nn.Module):
    is_causal = True

    def __init__(self, d_model, num_heads, num_kv_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_model // num_heads
        self.q_proj, self.o_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(d_model, num_kv_heads * self.head_dim, bias=False) for _ in range(2))

    def rotated(self, x):
        angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)

    def forward(self, x):
        q, k, v = (p(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=self.is_causal, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))
"""
namespace: dict[str, type[nn.Module]] = {}
exec(LLAMA, namespace)
Llama = namespace["Llama"]


def flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, repeated="repeat_interleave"):
    """FlashAttention's function, its keys repeated for grouped heads."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) if repeated == "repeat_interleave" else x.repeat(1, group, 1, 1) for x in (k, v))
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    left, right = window_size
    hidden = ((ahead > 0) & causal) | ((ahead < -left) & (left >= 0)) | ((ahead > right) & (right >= 0))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
    return (weights.to(v.dtype) @ v).transpose(1, 2)


def test_a_class_agrees_with_its_family_and_has_to_be_causal_like_it():
    assert compare(Llama, spec="llama", longest=65).agrees
    wrong = compare(type("NotCausal", (Llama,), {"is_causal": False}), spec="llama", longest=65)
    assert "causality is forgotten" in wrong.first.hint


def test_a_function_is_compared_with_the_heads_of_a_family_in_half_precision_with_gradients():
    assert_agrees(flash, like="flash_attn", spec="llama", dtype="bfloat16", backward=True, longest=65, allow_skipped=True)
    comparison = compare(flash, like="flash_attn", spec="gemma2:sliding_attention", longest=65)
    assert comparison.agrees and comparison.spec.softcap == 50 and comparison.spec.window.left == 4
    wrong = compare(
        lambda q, k, v, causal=False: flash(q, k, v, causal=causal, repeated="repeat"), like="flash_attn", spec="llama", longest=7
    )
    assert "query head i uses head i mod num_kv_heads of the keys" in wrong.first.hint


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lama", "expected a family of `attend families`, such as llama, got 'lama'"),
        ("gemma2:linear", "expected a layer of gemma2 among sliding_attention, decoder, full_attention, got 'linear'"),
        ("bloom", "expected a family whose heads such a function computes, got bloom, which has alibi"),
    ],
)
def test_a_family_that_does_not_fit_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        compare(flash, like="flash_attn", spec=spec)


def test_the_workflow_of_the_page_runs(monkeypatch):
    section = (Path(__file__).parents[2] / "docs" / "check.md").read_text().partition("## In a kernel repository")[2].partition("\n## ")[0]
    test, workflow = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    monkeypatch.setitem(sys.modules, "my_kernels", SimpleNamespace(flash_attn_func=flash))
    names: dict[str, Any] = {}
    exec(test, names)
    names["test_attention"]("gemma2:full_attention", "bfloat16")
    steps = yaml.safe_load(workflow)["jobs"]["attention"]["steps"]
    assert steps[-1] == {"run": "pytest tests/test_attention.py"} and "attend-service @ git+" in steps[-2]["run"]


def test_the_command_takes_the_name_of_a_family(tmp_path):
    (tmp_path / "mine.py").write_text(LLAMA)
    done = run_attend("check", "--module", "mine.py:Llama", "--spec", "llama", "--longest", "65", "--allow-skipped", cwd=tmp_path)
    assert done.returncode == 0 and b"agrees with the reference" in done.stdout
