"""Changes of one step of a layer's program are named."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from attend.check import compare
from attend.check.algebra import changes_of
from attend.check.cases import Draw, draw_short_cases, lengths_for
from attend.check.computation import Computation
from attend.check.random_cases import Draw as DrawValues
from attend.check.random_cases import draw_weights
from attend.spec import LayerSpec


class Module(nn.Module):
    """Grouped heads with a norm before RoPE by halves, causal; the wrong ones replace a method."""

    def __init__(self, d_model, num_heads, num_kv_heads):
        super().__init__()
        self.width = d_model // num_heads
        self.q_proj, self.o_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.k_proj, self.v_proj = (nn.Linear(d_model, num_kv_heads * self.width) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(self.width, eps=1e-6) for _ in range(2))

    def split(self, x):
        return x.unflatten(2, (-1, self.width)).transpose(1, 2)

    def rotate(self, x):
        angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, self.width, 2) / self.width)
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()), dim=-1)

    def keys(self, k):
        return self.rotate(self.k_norm(k))

    def repeat(self, x, heads):
        return x.repeat_interleave(heads // x.shape[1], dim=1)

    def scale(self, scores):
        return scores / math.sqrt(self.width)

    def values(self, k, v):
        return v

    def merge(self, heads):
        return heads.transpose(1, 2).flatten(2)

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotate(self.q_norm(q)), self.keys(k)
        keys, values = self.repeat(k, q.shape[1]), self.values(k, v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = self.scale(q @ keys.mT)
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
        return self.o_proj(self.merge(scores.softmax(-1) @ values))


SPEC = LayerSpec(
    d_model=36, num_heads=6, num_kv_heads=3, rope={"theta": 10000.0, "interleaved": False}, qk_norm={"kind": "rms", "eps": 1e-6}
)
NAMES = {
    "the norm of the keys is applied after RoPE and not before": {"keys": lambda self, k: self.k_norm(self.rotate(k))},
    "RoPE of the keys is applied twice": {"keys": lambda self, k: self.rotate(self.rotate(self.k_norm(k)))},
    "the key as it is when scores are computed (after norms and RoPE) is used in place of the value": {"values": lambda self, k, v: k},
    "the heads of the values are in another order: they are in the reverse order": {"values": lambda self, k, v: v.flip(1)},
    "the scores have the opposite sign": {"scale": lambda self, scores: -scores / math.sqrt(self.width)},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_change_of_one_step_is_named(name):
    explanation = compare(type("Wrong", (Module,), NAMES[name]), spec=SPEC, causal=True).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((name,), ())


def test_the_changes_of_a_step_have_one_name_each_and_their_arithmetic_on_a_line_of_80_columns():
    rng = np.random.default_rng(0)
    weights = draw_weights(DrawValues(rng), SPEC, ["weights"])
    right = Computation(
        SPEC, weights, next(draw_short_cases(Draw(spec=SPEC, weights=weights, rng=rng, lengths=lengths_for(SPEC, batched=True))))
    )
    changes = list(changes_of(right))
    assert len({x.name for x in changes}) == len(changes)
    for x in changes:
        computed, expected = x.mistake.arithmetic(right)
        assert computed != expected, x.name
        assert max(len(f"  you compute: {computed}"), len(f"  expected:    {expected}")) <= 80, x.name
