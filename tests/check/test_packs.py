"""`compare` of candidates that take packed sequences."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from attend.check import compare
from support.candidates import merge, scaled_dot_product, split


def attention_of(query, key, value):
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e9))
    return weights / weights.sum(-1, keepdims=True) @ value


def rows_of_sequence(start, end, keys):
    return slice(start, end), slice(start, end)


def packed_attention(sequences=itertools.pairwise, seen=rows_of_sequence, is_joined=False):
    """A function of packed sequences: `seen` has the rows of the keys and of the values of each; `is_joined`: it appends their outputs."""

    def attend(query, key, value, cu_seqlens):
        output, parts = np.zeros_like(query), []
        for start, end in sequences(list(cu_seqlens)):
            keys, values = seen(start, end, key.shape[-2])
            parts.append(attention_of(query[:, start:end], key[:, keys], value[:, values]))
            output[:, start:end] = parts[-1]
        return np.concatenate(parts, axis=-2) if is_joined else output

    return attend


def packed_or_alone(**wrong):
    """A function of packed sequences, or of one without cu_seqlens."""
    packed = packed_attention(**wrong)

    def attend(query, key, value, cu_seqlens=None):
        return attention_of(query, key, value) if cu_seqlens is None else packed(query, key, value, cu_seqlens)

    return attend


def compare_packed(candidate):
    return compare(candidate, batched=False, framework="numpy", longest=7)


@pytest.mark.parametrize("make", [packed_attention, packed_or_alone])
def test_packed_sequences_that_are_right_agree(make):
    assert compare_packed(make()).agrees and compare_packed(make(is_joined=True)).agrees


def without_last(boundaries):
    return itertools.pairwise(boundaries[:-1])


def without_first(boundaries):
    return itertools.pairwise(boundaries[1:])


@pytest.mark.parametrize(
    ("make", "wrong", "named"),
    [
        (packed_attention, {"seen": lambda s, e, n: [np.arange(s, e)[:-1]] * 2}, "the last key that each query may attend to is left out"),
        (packed_or_alone, {"sequences": without_last}, "the keys of the last of the packed sequences are left out"),
        (packed_or_alone, {"sequences": without_first}, "the keys of the first of the packed sequences are left out"),
        (packed_attention, {"seen": lambda s, e, n: [slice(0, e)] * 2}, "the keys of earlier sequences are seen and should not be"),
        (packed_attention, {"seen": lambda s, e, n: [slice(s, n)] * 2}, "the keys of later sequences are seen and should not be"),
    ],
)
def test_mistakes_in_the_loop_over_packed_sequences_are_named(make, wrong, named):
    first = compare_packed(make(**wrong)).first
    said, *_ = first.mistakes or first.weights
    assert said.startswith(named) and not first.explanation.equals


class PackedModule(nn.Module):
    """Packed sequences, one after the other."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, cu_seqlens=None):
        q, k, v = (split(layer(x)[None], self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        heads = torch.zeros_like(q)
        for start, end in itertools.pairwise([0, len(x)] if cu_seqlens is None else cu_seqlens.tolist()):
            heads[:, :, start:end], _ = scaled_dot_product(*(rows[:, :, start:end] for rows in (q, k, v)))
        return self.o_proj(merge(heads)[0])


def test_missing_rows_are_explained_by_no_mistake_that_returns_all():
    def forward(self, x, cu_seqlens=None):
        return PackedModule.forward(self, x, cu_seqlens)[: len(x) if cu_seqlens is None else 1]

    assert not compare(type("Short", (PackedModule,), {"forward": forward}), batched=False, longest=7).first.mistakes


def drops_empty_sequences(query, key, value, cu_seqlens_q, cu_seqlens_k):
    """Sequences that are empty are left out of each list on its own."""
    bounds = [[(a, b) for a, b in itertools.pairwise(x) if a < b] for x in (cu_seqlens_q, cu_seqlens_k)]
    parts = [attention_of(query[:, a:b], key[:, c:d], value[:, c:d]) for (a, b), (c, d) in zip(*bounds, strict=False)]
    return np.concatenate(parts, axis=-2)


def test_a_sequence_without_queries_has_keys_that_no_other_sees():
    comparison = compare_packed(drops_empty_sequences)
    wrong = [x.case for x in comparison.results if x.agrees is False]
    assert wrong == ["packed sequences, one without queries"], f"\n{comparison}"


def test_rows_of_packed_sequences_are_the_first_axis():
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k):  # [n, h, d]; the first row of each sequence is taken for one of the sequence before
        own, others = (np.searchsorted(x, np.arange(len(rows))) for x, rows in ((cu_seqlens_q, q), (cu_seqlens_k, k)))
        scores = np.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        weights = np.exp(np.where(own[:, None] == others, scores, -np.inf))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)

    report = compare(attend, framework="numpy", longest=7)
    assert not report.agrees and any("its axes are [b,n,h,d]" in found for found in report.found), report


def test_packed_sequences_are_looked_at_in_long_calls():
    """A later sequence whose keys after the first 64 are read from the wrong place."""

    def attend(query, key, value, cu_seqlens):
        output = np.zeros_like(query)
        for start, end in itertools.pairwise(list(cu_seqlens)):
            rows = np.r_[start : min(start + 64, end), 64 : 64 + max(0, end - start - 64)]
            output[:, start:end] = attention_of(query[:, start:end], key[:, rows], value[:, rows])
        return output

    comparison = compare(attend, framework="numpy", batched=False, longest=257)
    assert [x.case for x in comparison.results if x.agrees is False] == ["257 keys, packed"], f"\n{comparison}"
