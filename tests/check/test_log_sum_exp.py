"""Log-sum-exps of the rows, which candidates return beside the output."""

import math

import pytest
import torch

from attend.check import compare


def kernel(sums, *, by_flag=False):
    """A function that returns what `sums` makes of the scores [b, h, q, k], always or if a flag asks for it."""

    def attend(q, k, v, mask=None):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1).nan_to_num() @ v, sums(scores)

    def with_flag(q, k, v, mask=None, return_lse=False):
        output, of_rows = attend(q, k, v, mask)
        return (output, of_rows) if return_lse else output

    return with_flag if by_flag else attend


RIGHT = {
    "natural": lambda scores: scores.logsumexp(-1),
    "of base 2": lambda scores: scores.logsumexp(-1) / math.log(2),
    "with queries first": lambda scores: scores.logsumexp(-1).mT,
    "with an axis of one number": lambda scores: scores.logsumexp(-1, keepdim=True),
    "0 of rows without a key": lambda scores: scores.logsumexp(-1).nan_to_num(neginf=0.0),
}
WRONG = {  # what the sums are -> the first case in which they are wrong
    "without the last tile": (lambda scores: scores[..., : max(scores.shape[-1] // 32 * 32, 31)].logsumexp(-1), "65 keys"),
    "of all keys": (lambda scores: scores.nan_to_num(neginf=0.0).logsumexp(-1), "mask"),
    "of exponentials that overflow": (lambda scores: scores.exp().sum(-1).log(), "large logits"),
}


@pytest.mark.parametrize("by_flag", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_right_sums_are_looked_at(name, by_flag):
    comparison = compare(kernel(RIGHT[name], by_flag=by_flag), longest=130)
    assert comparison.is_complete and "in float32, log-sum-exps too, and with" in comparison.conclusion, f"\n{comparison}"
    assert ("return_lse" in comparison.tried) is by_flag


@pytest.mark.parametrize("by_flag", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_sums_are_found(name, by_flag):
    sums, case = WRONG[name]
    first = compare(kernel(sums, by_flag=by_flag), longest=130).first
    assert (first.case, first.output) == (case, "log_sum_exp")
    assert first.hint == "the output is right, and its log-sum-exp is not"


def test_numbers_of_rows_of_another_meaning_are_not_tried():
    comparison = compare(kernel(lambda scores: scores.amax(-1)), longest=7)
    assert comparison.agrees and comparison.untried == ("log-sum-exps",)
    assert "the number that it returns for each row is not the log-sum-exp of the scores, with base e or 2" in comparison.conclusion


def test_a_flag_that_changes_the_output_or_nothing_is_not_tried():
    def attend(q, k, v, transposed=False, fast=True):
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return output.transpose(1, 2) if transposed else output

    comparison = compare(attend, framework="torch", longest=7)
    assert comparison.agrees and comparison.parameters == ("transposed", "fast"), f"\n{comparison}"
