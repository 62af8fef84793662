"""Candidates in half precision: none of twenty right ways of rounding is accused, and small mistakes are found."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attend.check import compare


def scores(q, k):
    return q @ k.mT * q.shape[-1] ** -0.5


def in_float32(q, k, v):
    return (scores(q.float(), k.float()).softmax(-1) @ v.float()).to(q.dtype)


def every_step(q, k, v):
    return scores(q, k).softmax(-1) @ v


def scaled_queries(q, k, v):
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v


def root_of_scale_on_both(q, k, v):
    root = q.shape[-1] ** -0.25
    return (q * root @ (k * root).mT).softmax(-1) @ v


def divided(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def softmax_in_float32(q, k, v):
    return scores(q, k).float().softmax(-1).to(q.dtype) @ v


def weights_in_float32(q, k, v):
    return (scores(q, k).float().softmax(-1) @ v.float()).to(q.dtype)


def scores_in_float32(q, k, v):
    return scores(q.float(), k.float()).softmax(-1).to(q.dtype) @ v


def divided_at_last(q, k, v):
    weights = (scores(q, k) - scores(q, k).amax(-1, keepdim=True)).exp()
    return weights @ v / weights.float().sum(-1, keepdim=True).to(q.dtype)


def divided_by_unrounded(q, k, v):
    exact = (scores(q.float(), k.float()) - scores(q.float(), k.float()).amax(-1, keepdim=True)).exp()
    return (exact.to(q.dtype).float() @ v.float() / exact.sum(-1, keepdim=True)).to(q.dtype)


def powers_of_two(q, k, v):
    exponents = scores(q.float(), k.float()) * math.log2(math.e)
    weights = torch.exp2(exponents - exponents.amax(-1, keepdim=True))
    return (weights.to(q.dtype).float() @ v.float() / weights.sum(-1, keepdim=True)).to(q.dtype)


def logarithms(q, k, v):
    return torch.log_softmax(scores(q, k), -1).exp() @ v


def summed_over_numbers(q, k, v):
    total = torch.zeros((), dtype=q.dtype)
    for i in range(q.shape[-1]):
        total = total + q[..., :, None, i] * k[..., None, :, i]
    return (total * q.shape[-1] ** -0.5).softmax(-1) @ v


def reversed_keys(q, k, v):
    return every_step(q, k.flip(2), v.flip(2))


def truncated_weights(q, k, v):
    weights = scores(q.float(), k.float()).softmax(-1)
    kept = {torch.bfloat16: -65536, torch.float16: -8192}[q.dtype]
    return ((weights.view(torch.int32) & kept).view(torch.float32) @ v.float()).to(q.dtype)


def tiled(keys, dtype=None):
    """An online softmax in tiles of so many keys, with its sums in this dtype."""

    def attend(q, k, v):
        sums = dtype or q.dtype
        largest, total, output = torch.full((*q.shape[:3], 1), -torch.inf), torch.zeros((), dtype=sums), torch.zeros((), dtype=sums)
        for start in range(0, k.shape[2], keys):
            tile = scores(q.float(), k[:, :, start : start + keys].float())
            new = torch.maximum(largest, tile.amax(-1, keepdim=True))
            factor, weights, largest = (largest - new).exp().to(sums), (tile - new).exp().to(q.dtype), new
            total = (total * factor + weights.to(sums).sum(-1, keepdim=True)).to(sums)
            output = (output * factor + (weights @ v[:, :, start : start + keys]).to(sums)).to(sums)
        return (output / total).to(q.dtype)

    return attend


def halves(q, k, v):
    """The keys in two halves, merged by their sums."""
    middle, results = (k.shape[2] + 1) // 2, []
    for part in (slice(0, middle), slice(middle, None)):
        s = scores(q.float(), k[:, :, part].float())
        results.append((s.logsumexp(-1, keepdim=True), (s.softmax(-1) @ v[:, :, part].float()).to(q.dtype).float()))
    (one, x), (two, y) = results
    both = torch.logaddexp(one, two)
    return ((one - both).exp() * x + (two - both).exp() * torch.nan_to_num(y)).to(q.dtype)


RIGHT = {
    "torch": scaled_dot_product_attention,
    "tiles of 16": tiled(16, torch.float32),
    "tiles of 3, sums rounded": tiled(16),
    "tiles of 64, sums rounded": tiled(64),
    **{
        function.__name__: function
        for function in (
            *(in_float32, every_step, scaled_queries, root_of_scale_on_both, divided, softmax_in_float32, weights_in_float32),
            *(scores_in_float32, divided_at_last, divided_by_unrounded, powers_of_two, logarithms, summed_over_numbers),
            *(reversed_keys, truncated_weights, halves),
        )
    },
}


def with_scores(change):
    return lambda q, k, v: change(scores(q.float(), k.float())).softmax(-1).to(q.dtype) @ v


def in_fp8(q, k, v):
    return scores(q.float(), k.float()).softmax(-1).to(torch.float8_e4m3fn).to(q.dtype) @ v


WRONG = {
    "scale + 2 %": with_scores(lambda s: s * 1.02),
    "scale - 2 %": with_scores(lambda s: s * 0.98),
    "softcap 30": with_scores(lambda s: 30 * torch.tanh(s / 30)),
    "softcap 10": with_scores(lambda s: 10 * torch.tanh(s / 10)),
    "weights in fp8": in_fp8,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", RIGHT)
def test_no_right_way_of_rounding_is_accused(name, dtype):
    comparison = compare(RIGHT[name], framework="torch", dtype=dtype, longest=65)
    assert comparison.agrees, f"\n{comparison}"


@pytest.mark.parametrize("name", WRONG)
def test_small_mistakes_are_found_in_bfloat16(name):
    comparison = compare(WRONG[name], framework="torch", dtype="bfloat16", longest=130)
    assert not comparison.agrees
    if name.startswith("scale"):
        factor = float(comparison.first.hint.partition("multiplied by about ")[2].partition(",")[0])
        assert abs(factor - (1.02 if "+" in name else 0.98)) < 0.005, comparison.first.hint


class Projected(nn.Module):
    """Its scores are multiplied by a factor besides their scale."""

    factor = 1.0

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(((scores(q, k) * self.factor).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("factor", [1.0, 1.04])
def test_a_layer_in_bfloat16(factor):
    comparison = compare(type("Other", (Projected,), {"factor": factor}), dtype="bfloat16", longest=65)
    assert comparison.agrees is (factor == 1), f"\n{comparison}"
