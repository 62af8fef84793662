"""Steps in half precision are told from rounding, and which steps a candidate in half precision rounds."""

import pytest
import torch

from attend.check import compare


@pytest.mark.parametrize(
    ("attend", "named"),
    [
        (lambda q, k, v, s: s.half().float().softmax(-1) @ v, "the scores are rounded to float16 before the softmax"),
        (
            lambda q, k, v, s: ((q.bfloat16().float() @ k.bfloat16().float().mT).bfloat16().float() / 5**0.5).softmax(-1) @ v,
            "queries and keys are multiplied in bfloat16",
        ),
        (
            lambda q, k, v, s: (s.softmax(-1).half().float() @ v.half().float()).half().float(),
            "weights and values are multiplied in float16",
        ),
    ],
)
def test_steps_in_half_precision_are_told_from_rounding(attend, named):
    """Each is named by its own numbers, and no other is: a tolerance that is wider only where a rounding is undecided.

    Sums are in float32 and then rounded, since each processor's kernels round sums of few digits in their own way.
    """

    def candidate(query, key, value):
        return attend(query, key, value, query @ key.mT / query.shape[-1] ** 0.5)

    explanation = compare(candidate, framework="torch", d_model=15, longest=7).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((named,), ())


@pytest.mark.parametrize(
    ("dtype", "attend", "rounding"),
    [
        (
            "float16",
            lambda q, k, v, scale: (q.float() @ k.float().mT * scale).softmax(-1).to(v.dtype) @ v,
            "scores are computed in float32; weights are rounded to {} before they are multiplied by the values",
        ),
        (
            "bfloat16",
            lambda q, k, v, scale: (q.float() @ k.float().mT * scale).to(v.dtype).softmax(-1) @ v,
            "scores are rounded to {} after the scale; weights are rounded to {} before they are multiplied by the values",
        ),
        (
            "float16",
            lambda q, k, v, scale: (q @ k.mT * scale).softmax(-1) @ v,
            "scores are rounded to {} before and after the scale; weights are rounded to {} before they are multiplied by the values",
        ),
        (
            "bfloat16",
            lambda q, k, v, scale: (q * scale @ k.mT).softmax(-1) @ v,
            "scores and queries times the scale are rounded to {}; weights are rounded to {} before they are multiplied by the values",
        ),
        (
            "float16",
            lambda q, k, v, scale: ((q.float() @ k.float().mT * scale).softmax(-1) @ v.float()).to(v.dtype),
            "scores are computed in float32; weights are computed in float32, and so is their product with the values",
        ),
        ("bfloat16", lambda q, k, v, scale: (sum(q[..., :, None, i] * k[..., None, :, i] for i in range(5)) * scale).softmax(-1) @ v, None),
    ],
)
def test_steps_that_a_candidate_in_half_precision_rounds_are_told(dtype, attend, rounding):
    """Each agrees, since its errors are no larger than those of correct implementations that round elsewhere."""
    comparison = compare(
        lambda query, key, value: attend(query, key, value, 5**-0.5), framework="torch", dtype=dtype, d_model=15, longest=7
    )
    assert comparison.agrees
    assert comparison.rounding == (rounding or "").replace("{}", dtype)
    assert ("\nrounding: scores" in str(comparison)) is (rounding is not None)


def test_a_scale_that_is_a_power_of_2_does_not_show_where_scores_are_rounded():
    comparison = compare(lambda query, key, value: (query @ key.mT / 2).softmax(-1) @ value, framework="torch", dtype="bfloat16", longest=7)
    assert comparison.rounding.startswith("scores are rounded to bfloat16; weights are rounded")


def test_roundings_of_float32_are_not_told():
    assert not compare(lambda query, key, value: (query @ key.mT / 2).softmax(-1) @ value, framework="torch", longest=7).rounding


def test_a_factor_in_half_precision_is_told_from_others_within_the_tolerance():
    """0.758 and sqrt(1/2) give numbers that differ by less than the largest rounding error, but not on average."""

    def attend(query, key, value):
        return (query.float() @ key.float().mT * 0.758).softmax(-1).bfloat16() @ value

    first = compare(attend, framework="torch", dtype="bfloat16", longest=7).first
    assert first.mistakes[0].startswith("the scores are divided by about 1.31")
    assert "this is what comes out, as far as bfloat16 shows, when" in first.hint and not first.explanation.equals


def test_a_blocking_number_that_float16_cannot_hold_has_a_hint():
    def attend(query, key, value, attend_mask=None):
        scores = query @ key.mT / 2
        return (scores if attend_mask is None else scores.masked_fill(~attend_mask, -1e9)).softmax(-1) @ value

    first = compare(attend, framework="torch", mask_shape="q,k", dtype="float16", longest=7).first
    assert "larger than float16 can hold" in first.hint and "RuntimeError" in first.got
    assert compare(attend, framework="torch", mask_shape="q,k", dtype="bfloat16", longest=7).agrees


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_case_that_rounding_may_change_as_much_shows_nothing(factor):
    """Large logits in float16, whether the candidate is right or wrong."""

    def candidate(q, k, v):
        q, k, v = (torch.from_numpy(x).half() for x in (q, k, v))
        return (factor * (q @ k.mT).float() / q.shape[-1] ** 0.5).softmax(-1).half() @ v

    comparison = compare(candidate, longest=7)
    found = {result.case: result for result in comparison.results}
    assert found["large logits"].agrees is None and "shows nothing" in str(found["large logits"])
    assert found["no mask"].agrees is (factor == 1.0)
    if factor == 1.0:
        assert "agrees with the reference in all 5 cases that show anything, with up to 7 keys, " in comparison.conclusion
        assert "nothing is shown by large logits" in comparison.conclusion
    else:
        assert comparison.verdict == "disagrees with the reference in 3 of 3 cases"
