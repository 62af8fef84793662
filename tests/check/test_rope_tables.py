"""A candidate that takes the cosines and sines of RoPE's angles as arguments gets them in the axes that it takes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attend.check import compare
from attend.spec import LayerSpec


def rotate_halves(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_pairs(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Causal(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def attend(self, x, rotate, rotate_key=None, past=None):
        q, k, v = (layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        q, k = rotate(q), (rotate_key or rotate)(k)
        if past is not None:
            k, v = (torch.cat((before, new), dim=2) for before, new in zip(past, (k, v), strict=True))
        mask = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
        return self.wo(scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)), (k, v)


class Halves(Causal):
    """One number for each number of a head, without batch and heads."""

    def forward(self, x, cos, sin):
        return self.attend(x, lambda t: rotate_halves(t, cos, sin))[0]


class Llama(Causal):
    """As in transformers: a pair, per item, to which the axis of heads is added."""

    def forward(self, hidden_states, position_embeddings):
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        return self.attend(hidden_states, lambda t: rotate_halves(t, cos, sin))[0]


class Pairs(Causal):
    """One number for each pair, with an axis of items and one of heads."""

    def forward(self, x, cos, sin):
        assert cos.shape[:2] == (1, 1)
        return self.attend(x, lambda t: rotate_pairs(t, cos, sin))[0]


class ComplexPairs(Causal):
    """As in Llama's own code: complex numbers, by which pairs are multiplied."""

    def forward(self, x, freqs_cis):
        def rotate(t):
            return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * freqs_cis).flatten(-2)

        return self.attend(x, rotate)[0]


class Cached(Causal):
    """Gets the numbers of its new rows alone."""

    def forward(self, x, cos, sin, past_key_value=None):
        return self.attend(x, lambda t: rotate_halves(t, cos, sin), past=past_key_value)


class OnlyQueries(Causal):
    def forward(self, x, cos, sin):
        return self.attend(x, lambda t: rotate_pairs(t, cos, sin), lambda t: t)[0]


def of_heads(q, k, v, cos, sin):
    return scaled_dot_product_attention(rotate_halves(q, cos, sin), rotate_halves(k, cos, sin), v)


RIGHT = {
    "halves": (Halves, "cosines and sines [n,d]; it has RoPE on halves"),
    "a pair of them": (Llama, "cosines and sines [b,n,d]; it has RoPE on halves"),
    "pairs": (Pairs, "cosines and sines [1,1,n,d/2]; it has RoPE on pairs"),
    "complex numbers": (ComplexPairs, "cosines and sines [n,d/2]; it has RoPE on pairs"),
    "a cache": (Cached, "cosines and sines [n,d]; it has RoPE on halves"),
    "a function of heads": (of_heads, "cosines and sines [n,d]; it has RoPE on halves"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_they_are_passed_in_the_axes_that_are_found_by_calls(name):
    candidate, found = RIGHT[name]
    comparison = compare(candidate, longest=33)
    assert comparison.is_complete, f"\n{comparison}"
    assert found in comparison.conventions


def test_heads_of_every_width_get_as_many_of_them():
    assert "heads of 192/128" not in str(comparison := compare(of_heads, longest=7)) and comparison.widths[-1] == 256, f"\n{comparison}"


def test_a_mistake_beside_them_is_named():
    comparison = compare(OnlyQueries, longest=7)
    assert "RoPE of the keys is left out" in comparison.first.hint, f"\n{comparison}"
    assert comparison.first.step.names == ("rotate_key",)


def test_of_a_given_layer_without_rope_the_angles_are_0():
    assert compare(Halves, spec=LayerSpec(d_model=12, num_heads=3), longest=7).is_complete


def test_their_frequencies_are_those_of_a_given_layer():
    spec = LayerSpec(d_model=30, num_heads=3, rope={"theta": 7.0, "dims": 10, "scaling": {"type": "linear", "factor": 3}})
    assert compare(Llama, spec=spec, rope_tables="b,n,d", longest=7).is_complete


class Optional(Llama):
    """As in transformers: None by default, and not to be left out."""

    def forward(self, hidden_states, position_embeddings=None):
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos, sin))


def test_optional_ones_are_passed_if_it_raises_without_them():
    report = compare(Optional, longest=7)
    assert report.is_complete and "position_embeddings" in report.tried, report
