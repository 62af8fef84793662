"""Dropout that calls ask for."""

import pytest
import torch
from torch.nn import functional

from attend.check import compare


def before_softmax(scores, p):
    return scores.masked_fill(torch.rand_like(scores) < p, -1e30).softmax(-1)


def unscaled(scores, p):
    return scores.softmax(-1) * (torch.rand_like(scores) >= p)


def taken_for_what_is_kept(scores, p):
    return functional.dropout(scores.softmax(-1), 1 - p)


def always_half(scores, p):
    return scores.softmax(-1) * (torch.rand_like(scores) < 0.5) / (1 - p)


def kernel(weights=None, *, of_output=False):
    """A function whose dropout makes these weights of scores and p, or acts on the output."""

    def attend(q, k, v, dropout_p=0.0, training=False):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        drops = training and dropout_p > 0
        output = (weights(scores, dropout_p) if drops and weights else scores.softmax(-1)) @ v
        return functional.dropout(output, dropout_p) if drops and of_output else output

    return attend


WRONG = {
    before_softmax: "what is kept of a row sums to 1, as if dropout came before the softmax",
    unscaled: "weights that are kept are not divided by 1 - p",
    taken_for_what_is_kept: "p is taken for the probability that a weight is kept",
    always_half: "of the weights are left out",
}


@pytest.mark.parametrize("weights", WRONG)
def test_dropout_that_is_wrong_is_named(weights):
    first = compare(kernel(weights), longest=7).first
    assert (first.case, first.output) == ("dropout_p=0.3", "dropout")
    assert first.hint.startswith("the output is right, and its dropout is not: ") and first.hint.endswith(WRONG[weights])


def test_rows_that_dropout_makes_nan_are_wrong():
    def weights(scores, p):
        dropped = functional.dropout(scores.softmax(-1), p)
        return dropped.masked_fill((dropped != 0).all(-1, keepdim=True), torch.nan)

    first = compare(kernel(weights), longest=7).first
    assert (first.case, first.output) == ("dropout_p=0.3", "dropout")


def test_dropout_of_the_output_is_named():
    hint = compare(kernel(of_output=True), longest=7).first.hint
    assert hint == "the output is right, and its dropout is not: numbers of the output are left out, and not weights"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_dropout_is_tried_and_changes_no_random_number_of_torch(dtype):
    state = torch.random.get_rng_state()
    comparison = compare(kernel(lambda scores, p: functional.dropout(scores.softmax(-1), p)), longest=7, dtype=dtype, framework="torch")
    assert comparison.agrees and comparison.tried == ("dropout_p", "training") and comparison.parameters == (), f"\n{comparison}"
    assert bool((torch.random.get_rng_state() == state).all())


def test_dropout_that_changes_nothing_is_not_tried():
    comparison = compare(kernel(), framework="torch", longest=7)
    assert comparison.agrees and comparison.parameters == ("dropout_p", "training"), f"\n{comparison}"
