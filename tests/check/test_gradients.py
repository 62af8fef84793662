"""Gradients of the inputs are compared with differences of the reference."""

import pytest
import torch
from torch import nn

from attend.check import compare
from attend.spec import LayerSpec


class Fused(torch.autograd.Function):
    """Attention with a backward pass of its own, which a subclass makes wrong."""

    without_row_sum = without_scale = False

    @classmethod
    def forward(cls, ctx, q, k, v):
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @classmethod
    def backward(cls, ctx, outside):
        q, k, v, weights = ctx.saved_tensors
        of_weights = outside @ v.mT
        row_sum = 0 if cls.without_row_sum else (of_weights * weights).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - row_sum)
        scale = q.shape[-1] ** -0.5
        return of_scores @ k * scale, of_scores.mT @ q * (1 if cls.without_scale else scale), weights.mT @ outside


@pytest.mark.parametrize(
    ("wrong", "gradient", "hint"),
    [
        ({}, None, ""),
        ({"without_row_sum": True}, "dQ", "the row sum is left out: dS = P dP, and not P (dP - Σ_j P dP)"),
        ({"without_scale": True}, "dK", "it is the right gradient times 2, as without the scale"),
    ],
)
def test_wrong_gradients_of_a_right_output_are_found(wrong, gradient, hint):
    function = type("Other", (Fused,), wrong)
    comparison = compare(lambda q, k, v: function.apply(q, k, v), framework="torch", longest=7)
    if gradient is None:
        assert comparison.agrees and "in float32, gradients too" in comparison.conclusion, comparison
    else:
        assert (comparison.first.output, comparison.first.hint) == (gradient, f"the output is right, and its gradient is not: {hint}")


class Grouped(torch.autograd.Function):
    """The gradients of keys and values of one query head of each group, and not of all."""

    @staticmethod
    def forward(ctx, q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return Fused.forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx, outside):
        dq, dk, dv = Fused.backward(ctx, outside)
        return dq, dk[:, 1::2], dv[:, 1::2]


def test_gradients_of_a_group_that_are_not_summed_are_named():
    spec = LayerSpec(d_model=20, num_heads=6, num_kv_heads=3, head_dim=5, projections=False)
    comparison = compare(lambda q, k, v: Grouped.apply(q, k, v), spec=spec, framework="torch", longest=7)
    assert comparison.first.output == "dK"
    assert "it is that of the last query head of each group, and not their sum" in comparison.first.hint


def test_gradients_of_the_inputs_of_modules():
    """With one input, and with three; with masks and causality."""
    assert " gradients too" in compare(nn.MultiheadAttention, longest=7, backward=True).conclusion

    class Detached(nn.Module):
        def __init__(self, d_model, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

        def forward(self, x):
            inputs = ((self.q_proj, x), (self.k_proj, x.detach()), (self.v_proj, x))
            q, k, v = (layer(y).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer, y in inputs)
            return self.o_proj(((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))

    assert compare(Detached, longest=7, backward=True).first.output == "dX"


def test_what_has_no_gradients_is_not_tried():
    comparison = compare(
        lambda q, k, v: torch.from_numpy(((q @ k.mT / 2).softmax(-1) @ v).numpy()), framework="torch", longest=7, backward=True
    )
    assert comparison.agrees and "gradients" in comparison.untried


class Causal(torch.autograd.Function):
    """Causality with the last query at the last key; `ends_backward(q, k)`: where it is in the backward pass. `tile`: rows that dQ has."""

    ends_backward = staticmethod(lambda q, k: k - q)
    tile = None

    @staticmethod
    def hidden(q, k, ahead):
        return torch.ones(q, k, dtype=torch.bool).triu(1 + ahead)

    @classmethod
    def forward(cls, ctx, q, k, v, causal=False):
        lengths = q.shape[-2], k.shape[-2]
        scores = q @ k.mT * q.shape[-1] ** -0.5
        ctx.save_for_backward(q, k, v, scores)
        ctx.causal = causal
        return scores.masked_fill(cls.hidden(*lengths, lengths[1] - lengths[0]) & causal, -torch.inf).softmax(-1).nan_to_num() @ v

    @classmethod
    def backward(cls, ctx, outside):
        q, k, v, scores = ctx.saved_tensors
        lengths = q.shape[-2], k.shape[-2]
        hidden = cls.hidden(*lengths, cls.ends_backward(*lengths)) & ctx.causal
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
        of_weights = outside @ v.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        seen = slice(0 if cls.tile is None else (lengths[1] - 1) // cls.tile * cls.tile, None)
        return of_scores[..., seen] @ k[..., seen, :], of_scores.mT @ q, weights.mT @ outside, None


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        ({}, None),
        ({"ends_backward": staticmethod(lambda q, k: 0)}, "causal=True, 5 queries, 11 keys"),
        ({"tile": 64}, "65 keys"),  # dQ has what the last tile of keys adds, alone
    ],
)
def test_backward_passes_are_called_with_more_keys_than_a_tile_has_and_than_there_are_queries(wrong, case):
    function = type("Other", (Causal,), wrong)
    comparison = compare(function, framework="torch", longest=257)  # an autograd.Function, with the parameters of its forward pass
    if case is None:
        assert comparison.agrees and "gradients too, and with causal;" in comparison.conclusion, f"\n{comparison}"
    else:
        assert (comparison.first.case, comparison.first.output) == (case, "dQ"), f"\n{comparison}"
        assert compare(function.apply, framework="torch", longest=7).agrees is (case == "65 keys")
