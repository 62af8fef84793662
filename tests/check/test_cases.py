"""Calls are long enough to show what a kernel does with tiles of keys."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from attend.check import compare


def tiled(keys, *, rescales=True, has_rest=True):
    """An online softmax in tiles of so many keys."""

    def attend(q, k, v):
        whole = max(k.shape[2] // keys * keys, min(k.shape[2], keys))
        count = k.shape[2] if has_rest else whole
        largest, total, output = torch.full((*q.shape[:3], 1), -torch.inf), 0, 0
        for start in range(0, count, keys):
            scores = q @ k[:, :, start : min(start + keys, count)].mT * q.shape[-1] ** -0.5
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            factor, weights, largest = (largest - new).exp(), (scores - new).exp(), new
            total = total * factor + weights.sum(-1, keepdim=True)
            output = output * (factor if rescales or start == 0 else 1) + weights @ v[:, :, start : min(start + keys, count)]
        return output / total

    return attend


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"keys": 64, "rescales": False}, "in the online softmax with blocks of 64, the output is not rescaled when the maximum grows"),
        ({"keys": 64, "has_rest": False}, "the keys after the last whole tile of 64 are left out"),
        ({"keys": 32, "has_rest": False}, "the keys after the last whole tile of 32 are left out"),
        ({"keys": 128, "has_rest": False}, "the keys after the last whole tile of 128 are left out"),
    ],
)
def test_mistakes_in_tiles_that_are_longer_than_short_calls_are_found_and_named(wrong, named):
    comparison = compare(tiled(**wrong), framework="torch")
    assert all(result.agrees is not False for result in comparison.results if " keys" not in result.case)
    first = comparison.first
    assert (first.mistakes or first.weights, first.explanation.equals) == ((named,), ()), f"\n{comparison}"


def test_lengths_that_a_candidate_refuses_are_not_tried():
    blocked = torch.ones(64, 64).triu(1).bool()

    def attend(q, k, v):
        n = q.shape[2]
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(blocked[:n, :n], -torch.inf).softmax(-1) @ v

    comparison = compare(attend, framework="torch", causal=True)
    assert comparison.agrees and comparison.keys == 64
    assert {"65 keys", "130 keys", "257 keys"} <= {*comparison.untried}
    assert "65 keys, 130 keys, 257 keys, 8 of the lengths (65 keys to 513 keys)" in comparison.conclusion
    assert "called with" not in comparison.conclusion


class CopiesOfOneLayer(nn.Module):
    """Keys are projected by the queries' layer. All layers are copies, so that the numbers of a new instance do not show it."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        layer = nn.Linear(d_model, d_model)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (deepcopy(layer) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.q_proj, self.v_proj))
        return self.o_proj(((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_copies_of_a_layer_are_told_apart():
    assert compare(CopiesOfOneLayer).first.mistakes == ("the projected query is used in place of the projected key",)
