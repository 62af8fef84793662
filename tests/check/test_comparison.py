"""The report of `compare`."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn import functional

from attend.check import assert_agrees, compare, tolerance
from attend.check.report import Comparison
from attend.spec import LayerSpec
from support.candidates import Annotated, Wrong, causal_scores, numpy_function

PLAIN = LayerSpec(d_model=12, num_heads=3)  # else what no mistake explains is compared with layers that have positions, too


def test_comparisons_in_threads_do_not_affect_each_other():
    def unscaled(Q, K, V, mask=None):
        return numpy_function(Q * np.sqrt(Q.shape[-1]), K, V, mask)

    def without_key_mask(Q, K, V, mask=None):
        return numpy_function(Q, K, V)

    candidates = [numpy_function, unscaled, without_key_mask] * 2
    with ThreadPoolExecutor(4) as threads:
        comparisons = list(threads.map(lambda candidate: compare(candidate, framework="numpy", mask_means="add", longest=7), candidates))
    hints = ["" if comparison.agrees else comparison.first.hint for comparison in comparisons]
    assert all(text in hint for hint, text in zip(hints, ["", "not divided by sqrt(head_dim)", "the mask is ignored"] * 2, strict=True))
    assert hints[::3] == [""] * 2


def test_the_report_shows_a_mistake_and_a_later_exception():
    def forward(self, query, key, value, mask=None):
        return Wrong.forward(self, query, key, value, None if mask is None else mask.view(7, 7))

    changed = {"scale": lambda self, s: s, "forward": forward}
    report = str(compare(type("Wrong", (Wrong,), changed), mask_means="attend", mask_shape="q,k", longest=7))
    assert "first disagreement: no mask, output" in report
    assert "also disagreement: mask, output: expected a result, got RuntimeError" in report


def test_weights_averaged_over_heads_are_told_by_their_shape():
    averaged = type("Averaged", (Wrong,), {"returned": lambda self, output, weights: (output, weights.mean(1))})
    summed = type("Summed", (Wrong,), {"returned": lambda self, output, weights: (output, weights.sum(1))})
    assert_agrees(averaged, longest=7)
    assert compare(summed, spec=PLAIN, mask_means="attend", longest=7).first.output == "attention_weights"


def test_cases_without_a_known_parameter_are_reported_as_not_tried():
    comparison = compare(causal_scores(lambda n: torch.ones(n, n).triu(1) == 1), framework="torch", causal=True, longest=65)
    assert comparison.agrees
    assert comparison.untried == ("mask", "cross-attention", "cross-attention with a mask", "padded keys", "packed sequences")
    not_tried = (
        "not tried: cross-attention, cross-attention with a mask, since query_offset is not given; "
        "no parameter takes: mask, padded keys, packed sequences"
    )
    looked = "with up to 65 keys, heads of 4 to 256 numbers, in float32"
    assert comparison.conclusion == f"agrees with the reference in all 7 cases that were tried, {looked}; {not_tried}"
    wrong = compare(causal_scores(lambda n: torch.ones(n, n).triu(2) == 1), framework="torch", causal=True, longest=7)
    assert not_tried in str(wrong).replace("\n", " ")


def test_the_only_case_that_was_tried_is_one():
    results = compare(causal_scores(lambda n: torch.ones(n, n).triu(1) == 1), framework="torch", causal=True, longest=7).results
    one = Comparison(tuple(result for result in results if result.untried or result.case == "no mask"), (), keys=5)
    only = "agrees with the reference in the only case that was tried, with up to 5 keys"
    assert one.conclusion.startswith(f"{only}; not tried: cross-attention, ")
    none = Comparison(tuple(result for result in results if result.untried), ())
    assert none.is_undecided and not one.is_undecided
    assert none.conclusion.startswith("neither agrees nor disagrees with the reference; not tried: cross-attention")


def test_the_assertion_warns_of_cases_that_are_not_tried():
    candidate, options = causal_scores(lambda n: torch.ones(n, n).triu(1) == 1), {"framework": "torch", "causal": True, "longest": 7}
    with pytest.warns(UserWarning, match="cases that were tried, with up to 5 keys, .* in float32; not tried: cross-attention"):
        assert_agrees(candidate, **options)
    assert_agrees(candidate, **options, allow_skipped=True)


def test_inputs_that_are_passed_apart_are_told_apart():
    """Also by a causal candidate whose queries and keys are always equally many."""
    right = causal_scores(lambda n: torch.ones(n, n).triu(1) == 1)
    assert not compare(lambda query, key, value: right(query, key, key), framework="torch", causal=True, longest=7).agrees


def test_numbers_that_are_all_nan_have_a_hint_of_their_own():
    def attend(query, key, value):
        return (query @ key.mT).masked_fill(torch.ones(query.shape[2], key.shape[2]) == 1, -math.inf).softmax(-1) @ value

    first = compare(attend, framework="torch", longest=7).first
    assert not first.mistakes and first.hint.startswith("no number is finite: ")


def test_the_report_names_the_case_the_index_and_the_numbers():
    comparison = compare(type("Wrong", (Wrong,), {"scale": lambda self, s: s}), mask_means="attend")
    lines = str(comparison).splitlines()
    assert lines[0] == "disagrees with the reference in 17 of 19 cases"
    assert lines[1].startswith("first wrong step: scaled_products: ") and lines[2].endswith("scores = self.scale(q @ k.transpose(-2, -1))")
    lines = [lines[0], *lines[3:]]
    assert lines[1] == "hint: this is what comes out when the scores are not divided by sqrt(head_dim)"
    assert lines[2:4] == ["  you compute: softmax(Q Kᵀ) V", "  expected:    softmax(Q Kᵀ / √d) V"]
    first = comparison.first
    place = "no mask, output[0, 0, 0] (item 0, query 0, number 0)"
    assert " ".join(lines[4:6]) == f"first disagreement: {place}: expected {first.expected}, got {first.got}"
    assert [line[:28].strip() for line in lines[6:]] == [result.case for result in comparison.results]
    assert "DISAGREES" in lines[6] and all(len(line) <= 80 for line in lines)
    assert float(first.expected) != float(first.got)
    with pytest.raises(AssertionError, match="first disagreement: no mask, output"):
        assert_agrees(type("Wrong", (Wrong,), {"scale": lambda self, s: s}), mask_means="attend", longest=7)
    right = compare(Wrong, mask_means="attend", longest=7)
    assert right.conclusion == "agrees with the reference, with up to 7 keys, in float32, and with mask"
    html = comparison._repr_html_()  # what a notebook shows
    assert html.startswith("<pre>disagrees with the reference in 17 of 19 cases\n") and html.count("<") == 2


def test_the_arithmetic_has_the_scale_of_the_layer_and_the_mask_of_the_case():
    spec = LayerSpec(d_model=12, num_heads=3, projections=False, scale=0.9)

    def unscaled(query, key, value, attend_mask=None):
        scores = query @ key.transpose(-1, -2)
        return (scores if attend_mask is None else scores.masked_fill(~attend_mask, -torch.inf)).softmax(-1) @ value

    def unmasked(query, key, value, attend_mask=None):
        return (0.9 * query @ key.transpose(-1, -2)).softmax(-1) @ value

    first = compare(unscaled, spec=spec, framework="torch", longest=7).first
    assert first.explanation.arithmetic == (("softmax(Q Kᵀ) V", "softmax(Q Kᵀ · 0.9) V"),)
    assert compare(unmasked, spec=spec, framework="torch", longest=7).first.explanation.arithmetic[0][0] == "softmax(S) V"


def test_the_index_of_one_wrong_number_is_reported():
    def forward(self, query, key, value):
        output, weights = Wrong.forward(self, query, key, value)
        weights[1, 2, 3, 4] += 0.25
        return output, weights

    first = compare(type("Nudged", (Wrong,), {"forward": forward}), spec=PLAIN, longest=7).first
    assert (first.case, first.output, first.index, first.mistakes) == ("no mask", "attention_weights", (1, 2, 3, 4), ())
    assert float(first.got) == pytest.approx(float(first.expected) + 0.25)


def test_results_that_change_from_call_to_call_are_not_explained_but_said_to_change():
    dropped = type("Dropped", (Wrong,), {"softmax": lambda self, s: functional.dropout(s.softmax(-1), 0.1)})
    first = compare(dropped, mask_means="attend", longest=7).first
    assert first.hint.startswith("a second call with the same inputs returns other numbers: dropout is active") and not first.mistakes


def test_nan_is_a_disagreement():
    nan = type("NaN", (Wrong,), {"scale": lambda self, s: s * torch.nan})
    assert compare(nan, mask_means="attend", longest=7).results[0].error == np.inf


def test_an_exception_is_reported_with_the_arguments_of_the_call():
    comparison = compare(Annotated, mask_means="attend", mask_shape="q,k", longest=7)  # which takes its mask as [b, q, k]
    assert comparison.first.case == "mask"
    assert (
        "called with query [2, 5, 12] float32, key [2, 5, 12] float32, value [2, 5, 12] float32, mask [5, 5] bool" in comparison.first.got
    )
    assert "mask_shape" in comparison.first.hint


def test_the_tolerance_is_an_option():
    rough = type("Rough", (Wrong,), {"scale": lambda self, s: Wrong.scale(self, s).half().float()})
    assert not compare(rough, mask_means="attend", longest=7).agrees
    assert_agrees(rough, mask_means="attend", tolerance=1e-3, longest=7)


def test_tolerances_grow_with_scores_and_outputs():
    unit = {"float32": 2.0**-23, "float64": 2.0**-52}
    scores, output = np.array([-20.0, 3.0, -np.inf]), np.array([4.0, -np.inf])
    assert tolerance(output, "float32", scores) == 16 * unit["float32"] * 20 * 4
    assert tolerance(output, "float32", scores, logarithmic=True) == 80 * unit["float32"] * 20
    assert tolerance(output, "float64", scores, norm=True) == 80 * unit["float64"] * 20 * 4
    assert tolerance(output, "float64", 20.0, relative=1e-3) == pytest.approx(1e-3 * 20 * 4)
    assert tolerance(output, "float32", 0.1) == 16 * unit["float32"] * 4


def test_a_second_output_of_a_number_for_each_row_is_not_taken_for_weights():
    def with_sums(q, k, v, sm_scale):
        scores = q @ k.mT * sm_scale
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    comparison = compare(with_sums, framework="torch", longest=33)
    assert comparison.is_complete and comparison.tried == ("sm_scale",), f"\n{comparison}"
