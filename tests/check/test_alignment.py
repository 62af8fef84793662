"""Causal calls with more or fewer keys than queries: the report says which alignment a candidate has."""

import pytest
import torch

from attend.check import compare


def flash(end, name):
    """A function with flash_attn's parameters. `end(q, k)`: the key, less its own number, at which query i is."""

    def attend(q, k, v, softmax_scale=None, causal=False):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - end(q.shape[2], k.shape[2])
        scores = (q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)).masked_fill((ahead > 0) & causal, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    attend.__name__ = name
    return attend


def checked(end, name="attend"):
    return compare(flash(end, name), framework="torch", layout="b,n,h,d", longest=7)


@pytest.mark.parametrize(("end", "words"), [(lambda q, k: 0, "top-left"), (lambda q, k: k - q, "bottom-right")])
def test_the_alignment_is_told(end, words):
    comparison = checked(end)
    assert comparison.agrees
    assert comparison.causality.startswith(f"with q != k, causal is {words} (")
    assert ("that of flash_attn, whose parameters it has, is bottom-right" in comparison.conclusion) is (words == "top-left")


def test_a_flash_attn_function_that_is_aligned_top_left_disagrees():
    comparison = checked(lambda q, k: 0, "flash_attn_func")
    assert comparison.first.case == "causal=True, 5 queries, 11 keys"
    assert "causality is top-left (" in comparison.first.hint
    assert checked(lambda q, k: k - q, "flash_attn_func").agrees


def test_a_causal_flag_that_is_right_for_as_many_queries_as_keys_alone_disagrees():
    comparison = checked(lambda q, k: 1 if q != k else 0)
    assert comparison.first.case == "causal=True, 5 queries, 11 keys" and "neither" in comparison.first.hint


def test_keys_that_are_skipped_where_a_tile_ends_disagree():
    """The keys before the queries are forgotten if there are more of them than a tile has."""
    comparison = compare(flash(lambda q, k: k - q if k < 128 else 0, "attend"), framework="torch", layout="b,n,h,d", longest=257)
    assert comparison.first.case == "causal=True, 65 queries, 193 keys", f"\n{comparison}"
    assert "with fewer rows, causality is bottom-right" in comparison.first.hint
