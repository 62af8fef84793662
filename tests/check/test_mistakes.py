"""Wrong candidates: the mistake is found, and named."""

import math

import numpy as np
import pytest
import torch

from attend.check import compare
from attend.spec import LayerSpec
from support.candidates import NumPyAttention, Wrong, causal_scores, numpy_function


def without_maximum(self, scores):
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


def reshape_split(self, x):
    return x.reshape(x.shape[0], self.num_heads, x.shape[1], -1)


def reshape_merge(self, x):
    return x.reshape(x.shape[0], x.shape[2], -1)


def keep_scores(self, scores, mask):
    self.before = scores
    return scores.masked_fill(~mask, -torch.inf)


def weights_before(self, weights):
    before = self.__dict__.pop("before", None)
    return weights if before is None else before.softmax(-1)


WRONG = {
    "no scale": ({"scale": lambda self, s: s}, "no mask", "not divided by sqrt(head_dim)"),
    "scale by d_model": ({"scale": lambda self, s: s / math.sqrt(self.d_model)}, "no mask", "sqrt(d_model)"),
    "inverted mask": ({"fill": lambda self, s, m: s.masked_fill(m, -torch.inf)}, "mask", "mask is inverted"),
    "transposed mask": ({"fill": lambda self, s, m: s.masked_fill(~m.mT, -1e9) if m.shape[-2] == m.shape[-1] else
        s.masked_fill(~m, -1e9)}, "mask", "mask is transposed"),
    "filled with 1e-9": ({"fill": lambda self, s, m: s.masked_fill(~m, 1e-9)}, "mask", "set to about 0"),
    "reshape both": ({"split": reshape_split, "merge": reshape_merge}, "no mask", "both split and merged"),
    "softmax over heads": ({"softmax": lambda self, s: s.softmax(1)}, "no mask", "over the heads"),
    "no maximum": ({"softmax": without_maximum}, "large logits", "exp overflows"),
    "scores returned": ({"softmax": lambda self, s: s.softmax(-1), "returned": lambda self, o, w: (o, w.log())}, "no mask", None),
    "weights without the mask": ({"fill": keep_scores, "returned": lambda self, o, w: (o, weights_before(self, w))}, "mask",
        "the weights that are returned are those without the mask"),
    "other weights": ({"returned": lambda self, o, w: (o, w.square().sin())}, "no mask", "the weights returned beside it are not"),
    "keras order": ({"forward": lambda self, query, key, value: Wrong.forward(self, query, value, key)},
        "no mask", "key and value are exchanged"),
    "weights in one axis": ({"returned": lambda self, o, w: (o, w.flatten(0, 1))}, "no mask", "one axis"),
    "nothing known": ({"scale": lambda self, s: s.sin()}, "no mask", None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_candidates_are_named(name):
    replaced, case, hint = WRONG[name]
    options = {} if "forward" in replaced else {"mask_means": "attend"}
    comparison = compare(type("Wrong", (Wrong,), replaced), spec=LayerSpec(d_model=12, num_heads=3), causal=False, longest=7, **options)
    assert not comparison.agrees
    assert comparison.first.case == case, f"\n{comparison}"
    assert (hint or "no known mistake gives these numbers") in comparison.first.hint, f"\n{comparison}"
    assert comparison.first.output == "output" or comparison.first.step is None


@pytest.mark.parametrize(
    ("biases", "named"),
    [
        ((2, 1, 2, 3), "the bias of the value projection is added to the projected query"),
        ((0, 1, 2, 0), "the bias of the query projection is added to the projected heads"),
    ],
)
def test_a_bias_of_another_projection_is_named(biases, named):
    class OtherBiases(NumPyAttention):
        def __init__(self, d_model, num_heads):
            super().__init__(d_model, num_heads)
            self.b_q, self.b_k, self.b_v, self.b_o = np.random.default_rng(7).standard_normal((4, d_model))

        def forward(self, query, key, value):
            given = (self.b_q, self.b_k, self.b_v, self.b_o)
            q, k, v, o = (given[i] for i in biases)
            inputs = ((query, self.W_q, q), (key, self.W_k, k), (value, self.W_v, v))
            heads = numpy_function(*(self.split(x @ W + b) for x, W, b in inputs))
            return heads.transpose(0, 2, 1, 3).reshape(query.shape) @ self.W_o + o

    explanation = compare(OtherBiases, longest=7).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((named,), ())


def test_two_mistakes_that_show_in_different_cases_are_told_one_after_the_other():
    changed = {"scale": lambda self, s: s, "fill": lambda self, s, m: s.masked_fill(m, -torch.inf)}
    first, second = compare(type("Wrong", (Wrong,), changed), mask_means="attend", longest=7).disagreements
    assert (first.case, first.mistakes) == ("no mask", ("the scores are not divided by sqrt(head_dim)",))
    assert second.case == "mask" and len(second.mistakes) == 1 and "inverted" in second.mistakes[0]


@pytest.mark.parametrize(
    ("blocked", "named"),
    [
        (lambda n: torch.zeros(n, n, dtype=torch.bool), "causality is forgotten: queries attend to keys after their own"),
        (lambda n: torch.ones(n, n).triu(0) == 1, "its causal mask blocks each query's own key (off by one)"),
        (lambda n: torch.ones(n, n).triu(2) == 1, "its causal mask lets each query see the next key (off by one)"),
        (lambda n: torch.ones(n, n).tril(-1) == 1, "its causal mask is transposed: queries attend to their own key and later ones"),
    ],
)
def test_a_wrong_causal_mask_has_one_name(blocked, named):
    explanation = compare(causal_scores(blocked), framework="torch", causal=True, longest=7).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((named,), ())


def alibi_slopes(heads, first=1):
    return [2 ** (-8 * (first + i) / heads) for i in range(heads)]


@pytest.mark.parametrize(
    ("heads", "slopes", "is_scaled", "named"),
    [
        (3, [2**-4, 2**-8, 2**-2], False, ()),
        (4, alibi_slopes(4, first=0), False, ("ALiBi's slopes begin at 1",)),
        (3, alibi_slopes(3), False, ("ALiBi's slopes for a number of heads that is not a power of 2",)),
        (4, alibi_slopes(4), True, ("the biases of positions are added before the scores are scaled",)),
    ],
)
def test_wrong_slopes_and_places_of_alibi_are_named(heads, slopes, is_scaled, named):
    def attend(query, key, value):
        scale, distance = query.shape[-1] ** -0.5, torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
        bias = -torch.tensor(slopes, dtype=query.dtype)[:, None, None] * distance.abs()
        scores = query @ key.mT * scale + bias * (scale if is_scaled else 1)
        return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value

    spec = LayerSpec(d_model=5 * heads, num_heads=heads, projections=False, alibi=True)
    comparison = compare(attend, spec=spec, causal=True, framework="torch", longest=7)
    mistakes = () if comparison.agrees else comparison.first.mistakes
    assert len(mistakes) == len(named), f"\n{comparison}"
    assert all(words in " and ".join(mistakes) for words in named)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [(4, "slopes 2^(-8i/n), i from 1, of n heads (ALiBi)"), (6, "slopes 2^(-8i/4), i = 1 to 4; then 2^(-8i/8), i = 1, 3, … (ALiBi)")],
)
def test_the_expected_slopes_are_those_of_the_number_of_heads(heads, expected):
    """Press et al. 2022: for 6 heads 1/4, 1/16, 1/64, 1/256, 1/2, 1/8."""

    def attend(query, key, value):
        distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
        bias = -torch.tensor(alibi_slopes(heads, first=0), dtype=query.dtype)[:, None, None] * distance.abs()
        return (query @ key.mT * query.shape[-1] ** -0.5 + bias).masked_fill(distance < 0, -torch.inf).softmax(-1) @ value

    spec = LayerSpec(d_model=5 * heads, num_heads=heads, projections=False, alibi=True)
    explanation = compare(attend, spec=spec, causal=True, framework="torch", longest=7).first.explanation
    assert explanation.mistakes == ("ALiBi's slopes begin at 1, that of i = 0",)
    assert explanation.arithmetic == (("slopes 2^(-8i/n), i from 0, of n heads (ALiBi)", expected),)


@pytest.mark.parametrize(
    ("capped", "named"),
    [
        (lambda s: 2 * torch.tanh(s), "the scores are not divided by the softcap before tanh"),
        (lambda s: torch.tanh(s / 2), "tanh is not multiplied by the softcap"),
    ],
)
def test_wrong_soft_caps_are_named(capped, named):
    def attend(query, key, value):
        return capped(query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value

    spec = LayerSpec(d_model=15, num_heads=3, projections=False, softcap=2.0)
    assert compare(attend, spec=spec, framework="torch", longest=7).first.mistakes == (named,)


@pytest.mark.parametrize(
    ("at_end", "named"),
    [
        (False, "it is causal without being asked (see causal)"),
        (True, "it is causal without being asked, aligned at the last key (see causal and query_offset)"),
    ],
)
def test_a_causal_function_is_named_wherever_its_mask_is_aligned(at_end, named):
    def attend(query, key, value):
        queries, keys = query.shape[2], key.shape[2]
        blocked = torch.ones(queries, keys).triu(1 + at_end * (keys - queries)).bool()
        scores = query @ key.mT * query.shape[-1] ** -0.5
        return scores.masked_fill(blocked, -torch.inf).softmax(-1) @ value

    explanation = compare(attend, framework="torch", causal=False).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((named,), ())


@pytest.mark.parametrize(("offset", "named"), [("end", None), ("start", "its causal mask is aligned at the last key")])
def test_a_causal_mask_for_fewer_queries_than_keys_is_aligned_as_the_option_says(offset, named):
    def attend(query, key, value):
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        later = torch.ones_like(scores).triu(1 + key.shape[-2] - query.shape[-2]) == 1
        return torch.softmax(scores.masked_fill(later, -math.inf), dim=-1) @ value

    comparison = compare(attend, framework="torch", causal=True, query_offset=offset, longest=128)
    tried = [result.case for result in comparison.results if not result.skipped]
    assert tried[:3] == ["no mask", "cross-attention", "large logits"] and "113 keys, cross-attention" in tried
    assert comparison.agrees if named is None else comparison.first.mistakes[0].startswith(named)


def online_softmax(keys, rescales_sum, rescales_output):
    """Attention of heads in blocks of so many keys, with a running maximum."""

    def attend(query, key, value):
        largest, total, output = np.full((*query.shape[:3], 1), -np.inf), 0.0, 0.0
        for start in range(0, key.shape[2], keys):
            scores = query @ key[:, :, start : start + keys].swapaxes(-1, -2) / query.shape[-1] ** 0.5
            new = np.maximum(largest, scores.max(-1, keepdims=True))
            factor, weights = np.exp(largest - new), np.exp(scores - new)
            total = total * (factor if rescales_sum else 1) + weights.sum(-1, keepdims=True)
            output = output * (factor if rescales_output else 1) + weights @ value[:, :, start : start + keys]
            largest = new
        return output / total

    return attend


@pytest.mark.parametrize(
    ("rescales", "named"),
    [
        ((True, True), None),
        ((True, False), "the output is not rescaled when the maximum grows"),
        ((False, True), "the sum is not rescaled when the maximum grows"),
        ((False, False), "sum and output are not rescaled when the maximum grows"),
    ],
)
def test_a_running_maximum_that_rescales_too_little_is_named(rescales, named):
    comparison = compare(online_softmax(2, *rescales), framework="numpy", longest=65)
    assert comparison.agrees if named is None else comparison.first.mistakes == (f"in the online softmax with blocks of 2, {named}",)


def test_a_wrong_mask_that_leaves_rows_without_a_key_is_named_however_they_are_filled():
    """Softmax of such a row is NaN with -inf, uniform with -1e9, and 0 where NaN is replaced."""
    for fill, replaced in ((-math.inf, math.nan), (-1e9, math.nan), (-math.inf, 0.0)):

        def attend(query, key, value, mask=None, fill=fill, replaced=replaced):
            scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
            weights = (scores if mask is None else scores.masked_fill(mask, fill)).softmax(dim=-1).nan_to_num(replaced)
            return weights @ value

        explanation = compare(attend, framework="torch", mask_means="attend", longest=7).first.explanation
        assert "the mask is inverted" in explanation.mistakes[0] and not explanation.equals


def test_any_constant_factor_on_the_scores_is_found_where_weights_are_returned_too():
    def attend(query, key, value):
        weights = torch.softmax(query @ key.transpose(-1, -2) / 1.7, dim=-1)
        return weights @ value, weights

    assert compare(attend, framework="torch", longest=7).first.mistakes == ("the scores are divided by 1.7 and not by 2",)


@pytest.mark.parametrize(
    ("scale", "named"),
    [
        (lambda q, k: 2**0.5, "the scores are divided by 1.414 and not by 2"),
        (lambda q, k: q.shape[0] ** 0.5, "the scores are divided by sqrt(the batch size) and not by sqrt(head_dim)"),
        (lambda q, k: q.shape[2] ** 0.5, "the scores are divided by sqrt(the number of queries) and not by sqrt(head_dim)"),
    ],
)
def test_a_size_is_told_from_a_constant(scale, named):
    """Further cases have another batch size and another number of queries."""

    def attend(query, key, value):
        assert query.ndim == 4  # without a batch, the axis of the queries is that of the numbers
        return (query @ key.mT / scale(query, key)).softmax(-1) @ value

    first = compare(attend, framework="torch", longest=7).first
    assert (first.mistakes, first.explanation.equals) == ((named,), ())


def test_weights_far_below_those_of_blocked_keys_are_no_reason_to_exclude_a_mistake():
    """Without exp, a score of -1e30 gives a blocked key nearly all the weight, and leaves visible keys 1e-30."""

    def attend(query, key, value, attend_mask=None):
        scores = query @ key.swapaxes(-1, -2) / 2
        scores = scores if attend_mask is None else np.where(attend_mask, scores, -1e30)
        weights = scores / scores.sum(axis=-1, keepdims=True)
        return weights @ value, weights

    named = "there is no exp: the scores are divided by their sum"
    assert compare(attend, framework="numpy", longest=7).first.mistakes == (named,)


def test_a_factor_after_the_softmax_is_fitted():
    """As of dropout that is scaled in evaluation mode too."""

    def candidate(query, key, value):
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) / 0.9
        return weights @ value, weights

    assert compare(candidate, framework="torch").first.mistakes == ("the weights are multiplied by 1.111",)
