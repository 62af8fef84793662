"""Each parameter of a candidate gets a value that changes the result, or the report says that it was not tried."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from attend.check import assert_agrees, compare


def attention(ignored=(), excludes=False):
    """A function in which some parameters have no effect. `excludes`: a mask and is_causal together have the mask's effect alone."""

    def attend(q, k, v, attn_mask=None, key_padding_mask=None, is_causal=False, scale=None, softcap=0.0, window_size=(-1, -1)):
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None or "scale" in ignored else scale)
        if softcap and "softcap" not in ignored:
            scores = softcap * torch.tanh(scores / softcap)
        ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        blocked = torch.zeros(ahead.shape, dtype=torch.bool)
        if is_causal and "is_causal" not in ignored and not (excludes and attn_mask is not None):
            blocked = blocked | (ahead > 0)
        if "window_size" not in ignored:
            left, right = (math.inf if side < 0 else side for side in window_size)
            blocked = blocked | (ahead < -left) | (ahead > right)
        if key_padding_mask is not None and not ("key_padding_mask" in ignored and attn_mask is not None):
            blocked = blocked | key_padding_mask[:, None, None]
        if attn_mask is not None:
            blocked = blocked | attn_mask.bool()
        return scores.masked_fill(blocked, -torch.inf).softmax(-1) @ v

    return attend


OPTIONS = {"framework": "torch", "mask_means": "block", "padding_means": "block"}


@pytest.mark.parametrize(
    ("ignored", "named"),
    [
        ("scale", "the layer's own scale is ignored"),
        ("softcap", "the softcap is left out"),
        ("is_causal", "causality is forgotten"),
        ("window_size", "the window is left out"),
        ("key_padding_mask", "the padding mask is ignored where there is a mask, too"),
    ],
)
def test_a_parameter_that_is_ignored_is_found_and_named(ignored, named):
    comparison = compare(attention([ignored]), longest=7, **OPTIONS)
    assert comparison.first.case.startswith(ignored) or ignored in comparison.first.case
    assert len(comparison.first.mistakes) == 1 and named in comparison.first.hint, f"\n{comparison}"


def test_a_function_that_heeds_all_parameters_agrees():
    comparison = compare(attention(), longest=65, **OPTIONS)
    assert comparison.agrees and comparison.parameters == (), f"\n{comparison}"
    assert comparison.untried == ("mask of numbers",)  # attn_mask, as in torch, but of booleans alone
    assert not comparison.is_complete and "which this one need not be" in comparison.conclusion


def test_a_wrong_scale_is_named_though_another_parameter_is_ignored():
    wrong = attention(["softcap"])
    comparison = compare(lambda q, k, v, softcap=0.0: wrong(q / 2, k, v, softcap=softcap), framework="torch", longest=7)
    assert comparison.first.mistakes == ("the scores are multiplied by 0.5, besides their scale",)
    assert next(result for result in comparison.results if result.case == "softcap=2.5").agrees is False


def test_a_causal_flag_beside_a_mask_is_no_disagreement():
    """Some libraries exclude the two, or ignore one."""
    comparison = compare(attention(excludes=True), longest=7, **OPTIONS)
    assert comparison.agrees
    assert {"is_causal=True with a mask", "mask of numbers"} <= {*comparison.untried}


def test_a_value_that_is_refused_is_not_tried():
    def attend(q, k, v, is_causal=False):
        if is_causal:
            raise NotImplementedError
        return attention()(q, k, v)

    comparison = compare(attend, framework="torch", longest=7)
    assert comparison.agrees and comparison.parameters == ("is_causal",)
    with pytest.warns(UserWarning, match="the parameter is_causal"):
        assert_agrees(attend, framework="torch", longest=7)


def test_parameters_of_unknown_meaning_are_not_tried():
    def attend(q, k, v, attn_mask=None, is_causal=False, temperature=1.0, *, scale=True, window_size=None):
        return attention()(q, k, v, attn_mask, is_causal=is_causal)

    comparison = compare(attend, framework="torch", mask_means="block", longest=7)
    assert comparison.agrees and comparison.parameters == ("temperature", "scale", "window_size")
    assert comparison.conclusion.splitlines()[0].endswith("the parameters temperature, scale, window_size")


def test_a_flag_is_not_passed_beside_a_mask_unless_a_case_is_about_it():
    def attend(q, k, v, attn_mask=None, is_causal=None):
        if attn_mask is not None and is_causal is not None:
            raise ValueError
        return attention()(q, k, v, attn_mask, is_causal=is_causal or False)

    comparison = compare(attend, framework="torch", mask_means="block", longest=7)
    assert comparison.agrees and comparison.parameters == ()


def test_masks_of_numbers_are_added():
    def attend(q, k, v, mask=None):
        return attention()(q, k, v, None if mask is None else mask == -torch.inf)

    first = compare(attend, framework="torch", mask_means="add", longest=7).first
    assert first.case == "mask of numbers"
    assert first.mistakes == ("the numbers of a mask of numbers are not added to the scores",)


def test_all_parameters_of_torch_are_tried_but_those_without_a_fixed_result():
    assert compare(nn.MultiheadAttention, longest=7).is_complete
    assert compare(functional.scaled_dot_product_attention, longest=7).parameters == ("dropout_p", "enable_gqa")


def test_a_cache_that_is_not_passed_is_not_tried():
    def attend(q, k, v, use_cache=False):
        return attention()(q, k, v, is_causal=True)

    assert compare(attend, framework="torch", causal=True, longest=7).parameters == ("use_cache",)
