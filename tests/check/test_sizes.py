"""Mistakes are named if they hold in other sizes too."""

import re

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attend.check import compare
from attend.check.cases import Lengths
from attend.check.mistakes import MISTAKES
from attend.check.sizes import other_lengths, other_specs
from attend.spec import LayerSpec


class Attention(nn.Module):
    """Plain attention; tests replace a step."""

    def __init__(self, d_model=12, num_heads=3):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def scale(self, scores, d):
        return scores / d**0.5

    def attend(self, x, key, value, blocked):
        inputs = ((self.q_proj, x), (self.k_proj, key), (self.v_proj, value))
        q, k, v = (layer(y).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer, y in inputs)
        scores = self.scale(q @ k.mT, q.shape[-1]).masked_fill(blocked, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(x, x, x, torch.zeros(1, dtype=torch.bool))


def test_a_name_that_holds_in_one_size_is_not_given():
    """sqrt(head_dim + 8) is sqrt(d_model) for 3 heads of 4 numbers."""
    wrong = type("Wrong", (Attention,), {"scale": lambda self, scores, d: scores / (d + 8) ** 0.5})
    assert compare(wrong, longest=7).first.mistakes == ()
    right_name = type("Wrong", (Attention,), {"scale": lambda self, scores, d: scores / (d * self.num_heads) ** 0.5})
    assert compare(right_name, longest=7).first.mistakes == ("the scores are divided by sqrt(d_model) and not by sqrt(head_dim)",)


def test_the_sizes_of_an_instance_are_said():
    wrong = type("Wrong", (Attention,), {"scale": lambda self, scores, d: scores})
    assert "(tried with" not in compare(wrong, longest=7).first.hint
    first = compare(wrong(20, 4), longest=7).first
    assert first.hint == "this is what comes out when the scores are not divided by sqrt(head_dim) (tried with 4 heads of 5 numbers alone)"


class ZeroesPadded(Attention):
    """Multiplies the inputs of padded keys by 0 and blocks nothing."""

    def forward(self, query, key, value, key_padding_mask=None):
        kept = key if key_padding_mask is None else key * key_padding_mask[..., None]
        return self.attend(query, kept, value, torch.zeros(1, dtype=torch.bool))


class AlwaysThreeHeads(nn.Module):
    """Multi-head attention whose `num_heads` is right for the sizes of most cases alone."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.qkv, self.out = num_heads, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.scale = 0.5 if num_heads == 3 else d_model**-0.5

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2))


class RotatesHalf(Attention):
    """RoPE on the first half of each head."""

    def rotate(self, x):
        dims = x.shape[-1] // 2
        angles = torch.outer(torch.arange(x.shape[2]), 1e4 ** -(torch.arange(0, dims, 2) / dims))
        first, second, rest = x.split([dims // 2, dims // 2, x.shape[-1] - dims], -1)
        rotated = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin(), rest
        return torch.cat(rotated, -1)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        heads = scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


def test_a_layer_that_other_sizes_leave_open_is_not_accused():
    comparison = compare(RotatesHalf, spec=LayerSpec(d_model=24, num_heads=3, rope={"dims": 4}), causal=True, longest=7)
    assert comparison.agrees, f"\n{comparison}"


def test_a_class_is_looked_at_in_another_size_too():
    first = compare(AlwaysThreeHeads, longest=7).first
    assert first.hint.startswith("with 3 heads of 4 numbers it agrees: this is what comes out when the scores are divided by sqrt(d_model)")
    assert re.fullmatch(r"no mask, [67] heads of \d+ numbers", first.case)


def test_a_mistake_that_alone_changes_nothing_is_not_named_beside_another(monkeypatch):
    """Without a mask, a bias of the keys changes no weight; scores of 0 for padded keys look as if it were left out."""
    first = compare(ZeroesPadded, padding_means="attend", longest=7).first
    assert first.mistakes == ("the inputs of padded keys are multiplied by 0, and padded keys are not blocked",)
    monkeypatch.delitem(MISTAKES, first.mistakes[0])
    assert compare(ZeroesPadded, padding_means="attend", longest=7).first.mistakes == ()


class CausalWithoutCache(Attention):
    """Has a causal mask only in calls without a cache."""

    def forward(self, x, cache=None):
        past = x if cache is None else torch.cat((cache, x), dim=1)
        blocked = torch.ones(x.shape[1], past.shape[1]).triu(1).bool() if cache is None else torch.zeros(1, dtype=torch.bool)
        return self.attend(x, past, past, blocked), past


@pytest.mark.parametrize(("heads", "width"), [(8, 8), (3, 4)])
def test_a_size_that_equals_a_length_is_not_named(heads, width):
    spec = LayerSpec(d_model=heads * width, num_heads=heads)
    assert compare(CausalWithoutCache, spec=spec, causal=True, longest=7).first.mistakes == (
        "in a call with a cache, queries see later rows of the call",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"d_model": 12, "num_heads": 3},
        {"d_model": 64, "num_heads": 8},
        {"d_model": 13, "num_heads": 6, "num_kv_heads": 2, "head_dim": 11, "bias": False, "rope": {"dims": 10}},
        {"d_model": 12, "num_heads": 4, "scale": 0.9, "rope": {"dims": 2}, "latent": {"key_value_rank": 5, "rope_key_dim": 2}},
    ],
)
def test_other_sizes_differ_from_each_other_and_from_those_before(fields):
    spec = LayerSpec(**fields)
    first = next(other_specs(spec, 0, keeps_heads=False))
    lengths = Lengths(batch=4, queries=11, keys=13)
    sizes = [first.num_kv_heads, first.head_dim, first.d_model, lengths.batch, lengths.queries, lengths.keys]
    assert len({*sizes}) == len(sizes)
    assert first.num_kv_heads != spec.num_kv_heads and first.head_dim != spec.head_dim and first.d_model != spec.d_model
    assert first.num_heads // first.num_kv_heads == spec.num_heads // spec.num_kv_heads
    assert (first.scale == spec.scale) == ("scale" in fields)
    assert first.rope == spec.rope and other_lengths(first, batched=True).batch == 4
