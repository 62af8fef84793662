"""The report's first wrong step: the step of the reference whose numbers a candidate never has, and the line where it makes others."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from attend.check import compare
from support.candidates import GROUPED_ROTARY, GroupedRotary


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


class SplitByReshape(GroupedRotary):
    def split(self, x):
        return x.reshape(len(x), -1, x.shape[1], self.width)


class MergedByReshape(GroupedRotary):
    def merge(self, heads):
        return heads.reshape(len(heads), heads.shape[2], -1)


class WithKeysOfOtherPositions(GroupedRotary):
    def keys(self, k):
        return self.rotate(functional.pad(self.k_norm(k), (0, 0, 1, 0)))[:, :, 1:]


GROUPED = {"causal": True, "spec": GROUPED_ROTARY}
OTHER_ORDER = "its numbers are in another order"
WRONG = {  # candidate -> the steps, what it has, its line, and how it is called
    unscaled: ("scaled_products", "scaled_products", "its numbers occur times 2", "scores = torch.matmul(query", {}),
    scaled_twice: ("softmax", "softmax", "", "weights = torch.softmax(scores / math.sqrt", {}),
    over_queries: ("softmax", "softmax", "", "exponentials = np.exp(scores - scores.max(axis=-2", {}),
    ignoring: ("mask", "mask", "", "weights = scores.softmax(-1)", {"mask_means": "attend"}),
    fused: ("scaled_products", "weighted_values", "", "doubled = query * 2", {}),
    negated: ("output", "output", "are changed afterwards", "return -heads", {}),
    loops: ("weighted_values", "weighted_values", "", "output[b, h, i] = weights @ key[b, h]", {}),
    SplitByReshape: ("project_query", "project_query", OTHER_ORDER, "return x.reshape(len(x), -1", GROUPED),
    MergedByReshape: ("merge", "merge", OTHER_ORDER, "return heads.reshape(len(heads)", GROUPED),
    WithKeysOfOtherPositions: ("rotate_key", "rotate_key", "", "", GROUPED),
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
    assert compare(GroupedRotary, **GROUPED, longest=7).agrees
