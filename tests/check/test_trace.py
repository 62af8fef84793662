"""The report's first wrong step: the step of the reference whose numbers a candidate never has, and the line where it makes others."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from attend.check import compare
from attend.spec import LayerSpec


def unscaled(query, key, value):
    scores = torch.matmul(query, key.transpose(-2, -1))
    return torch.softmax(scores, dim=-1) @ value


def scaled_twice(query, key, value):
    scores = query @ key.mT
    scores = scores / math.sqrt(query.shape[-1])
    weights = torch.softmax(scores / math.sqrt(query.shape[-1]), dim=-1)
    return weights @ value


def over_queries(query, key, value):
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    exponentials = np.exp(scores - scores.max(axis=-2, keepdims=True))
    return exponentials / exponentials.sum(axis=-2, keepdims=True) @ value


def ignoring(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    weights = scores.softmax(-1)
    return weights @ value


def fused(query, key, value):
    doubled = query * 2
    return functional.scaled_dot_product_attention(doubled, key, value)


def negated(query, key, value):
    heads = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1) @ value
    return -heads


def loops(query, key, value):
    output = np.zeros((*query.shape[:3], value.shape[3]))
    for b, h in np.ndindex(query.shape[:2]):
        for i in range(query.shape[2]):
            scores = key[b, h] @ query[b, h, i] / np.sqrt(query.shape[3])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            output[b, h, i] = weights @ key[b, h]
    return output


class Module(nn.Module):
    """RoPE by halves, causal, one head of keys for two of queries."""

    def __init__(self, d_model, num_heads, num_kv_heads):
        super().__init__()
        self.width = d_model // num_heads
        self.q_proj, self.o_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.k_proj, self.v_proj = (nn.Linear(d_model, num_kv_heads * self.width) for _ in range(2))

    def split(self, x):
        return x.unflatten(2, (-1, self.width)).transpose(1, 2)

    def rotate(self, x):
        angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, self.width, 2) / self.width)
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()), dim=-1)

    def rotate_key(self, x):
        return self.rotate(x)

    def merge(self, heads):
        return heads.transpose(1, 2).flatten(2)

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotate(q), self.rotate_key(k)
        k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], dim=1) for rows in (k, v))
        scores = q @ k.mT / math.sqrt(self.width)
        scores = scores + torch.full(scores.shape[2:], -torch.inf).triu(1)
        return self.o_proj(self.merge(scores.softmax(-1) @ v))


class SplitByReshape(Module):
    def split(self, x):
        return x.reshape(len(x), -1, x.shape[1], self.width)


class MergedByReshape(Module):
    def merge(self, heads):
        return heads.reshape(len(heads), heads.shape[2], -1)


class WithKeysOfOtherPositions(Module):
    def rotate_key(self, x):
        return self.rotate(functional.pad(x, (0, 0, 1, 0)))[:, :, 1:]


GROUPED = LayerSpec(d_model=36, num_heads=6, num_kv_heads=3, rope={"theta": 10000.0, "interleaved": False})
OTHER_ORDER = "its numbers are in another order"
WRONG = {  # candidate -> the steps, what it has, its line, and how it is called
    unscaled: ("scaled_products", "scaled_products", "its numbers occur times 2", "scores = torch.matmul(query", {}),
    scaled_twice: ("softmax", "softmax", "", "weights = torch.softmax(scores / math.sqrt", {}),
    over_queries: ("softmax", "softmax", "", "exponentials = np.exp(scores - scores.max(axis=-2", {}),
    ignoring: ("mask", "mask", "", "weights = scores.softmax(-1)", {"mask_means": "attend"}),
    fused: ("scaled_products", "weighted_values", "", "doubled = query * 2", {}),
    negated: ("output", "output", "are changed afterwards", "return -heads", {}),
    loops: ("weighted_values", "weighted_values", "", "output[b, h, i] = weights @ key[b, h]", {}),
    SplitByReshape: ("project_query", "project_query", OTHER_ORDER, "return x.reshape(len(x), -1", {"causal": True, "spec": GROUPED}),
    MergedByReshape: ("merge", "merge", OTHER_ORDER, "return heads.reshape(len(heads)", {"causal": True, "spec": GROUPED}),
    WithKeysOfOtherPositions: ("rotate_key", "rotate_key", "", "", {"causal": True, "spec": GROUPED}),
}


@pytest.mark.parametrize("candidate", WRONG, ids=lambda candidate: candidate.__name__)
def test_the_first_wrong_step_is_told_with_its_line(candidate):
    name, last, found, text, options = WRONG[candidate]
    comparison = compare(candidate, longest=7, **({"framework": "numpy" if candidate in (over_queries, loops) else "torch"} | options))
    step = comparison.first.step
    assert step is not None and (step.names[0], step.names[-1]) == (name, last), f"\n{comparison}"
    assert found in step.found and text in step.line.text, f"\n{comparison}"
    assert f"line {step.line.number} of test_trace.py" in str(comparison)


def test_what_has_no_source_or_makes_no_arrays_has_no_first_wrong_step():
    builtin = torch.nn.functional.scaled_dot_product_attention
    comparison = compare(functools.partial(builtin, scale=3.0), longest=7, arguments={"query": "query", "key": "key", "value": "value"})
    assert not comparison.agrees and comparison.first.step is None


def test_the_right_one_agrees():
    assert compare(Module, causal=True, spec=GROUPED, longest=7).agrees
