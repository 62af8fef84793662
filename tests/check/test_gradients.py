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
