"""Each parameter of a candidate gets a value that changes the result, or the report says that it was not tried."""

import math
from functools import partial
from itertools import permutations

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


def ignoring(name, where):
    """A function for heads in groups that ignores a parameter in some calls alone."""

    def attend(q, k, v, attn_mask=None, key_padding_mask=None, is_causal=False, scale=None, softcap=0.0, window_size=(-1, -1)):
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        given = {**masks, "is_causal": is_causal, "scale": scale, "softcap": softcap, "window_size": window_size}
        if is_wrong := where(q, k):
            given |= dict.fromkeys(masks.keys() & {name})
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return attention([name] if is_wrong else [])(q, k, v, **given)

    return attend


@pytest.mark.parametrize("name", ["scale", "softcap", "attn_mask", "key_padding_mask"])
def test_what_is_ignored_with_one_query_alone_is_found(name):
    comparison = compare(ignoring(name, lambda q, k: q.shape[2] == 1), longest=7, **OPTIONS)
    wrong = [x.case for x in comparison.results if x.agrees is False]
    assert wrong and all("1 query" in case for case in wrong), f"\n{comparison}"


@pytest.mark.parametrize("name", ["scale", "softcap", "is_causal", "window_size"])
def test_what_is_ignored_with_groups_of_heads_alone_is_found(name):
    comparison = compare(ignoring(name, lambda q, k: q.shape[1] > k.shape[1]), longest=7, **OPTIONS)
    wrong = [x.case for x in comparison.results if x.agrees is False]
    assert wrong and all(case.startswith(f"6 heads, 3 of keys, {name}") for case in wrong), f"\n{comparison}"


def test_values_of_parameters_with_groups_of_heads_leave_causality_as_it_is():
    causal = ignoring("", lambda q, k: False)
    comparison = compare(lambda q, k, v, scale=None: causal(q, k, v, scale=scale, is_causal=True), framework="torch", longest=7)
    assert comparison.agrees, f"\n{comparison}"
    assert "6 heads, 3 of keys, scale=0.3" in {x.case for x in comparison.results if x.agrees}


def in_groups(q, k, v, attn_mask=None, order="b (h g)"):
    """A mask of each head is split into groups of heads as queries are, or the other way round."""
    (b, h, n, _), kv_heads = q.shape, k.shape[1]
    scores = q.reshape(b, kv_heads, h // kv_heads, n, -1) @ k[:, :, None].mT / q.shape[-1] ** 0.5
    if attn_mask is not None:
        mask = attn_mask.expand(b, h, n, -1)
        split = mask.unflatten(1, (kv_heads, -1)) if order == "b (h g)" else mask.unflatten(1, (-1, kv_heads)).swapaxes(1, 2)
        scores = scores.masked_fill(~split, -math.inf)
    return (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)


def test_masks_of_each_head_are_looked_at_in_groups():
    assert compare(in_groups, framework="torch", mask_means="attend", longest=7).agrees
    comparison = compare(partial(in_groups, order="b (g h)"), framework="torch", mask_means="attend", longest=7)
    assert [x.case for x in comparison.results if x.agrees is False] == ["6 heads, 3 of keys, masks of each head"], f"\n{comparison}"


def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size, of_longest=False, alone=True):
    """[n, h, d]; the last query of each sequence is at its last key, or with `of_longest` where that of the longest would be; a window is
    ignored where a sequence has one query, unless `alone`."""
    output = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=q.dtype)
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1]), slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        queries, count = len(q[rows]), len(k[keys])
        offset = max_seqlen_k - max_seqlen_q if of_longest else count - queries
        ahead = torch.arange(count) - torch.arange(queries)[:, None] - offset
        left, right = (math.inf if side < 0 or (queries == 1 and not alone) else side for side in window_size)
        blocked = (ahead < -left) | (ahead > (0 if causal else right))
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) / q.shape[-1] ** 0.5
        output[rows] = torch.einsum("hqk,khd->qhd", scores.masked_fill(blocked, -math.inf).softmax(-1).nan_to_num(), v[keys])
    return output


def wrong_in_packed(**options):
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, window_size=(-1, -1)):
        return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size, **options)

    return compare(attend, framework="torch", longest=7)


def test_what_depends_on_the_alignment_is_looked_at_once_calls_have_found_it():
    assert wrong_in_packed().agrees
    of_longest, without_window = wrong_in_packed(of_longest=True), wrong_in_packed(alone=False)
    wrong = [x.case for x in of_longest.results if x.agrees is False]
    assert wrong == ["causal=True with packed sequences and other lengths of keys"], f"\n{of_longest}"
    wrong = [x.case for x in without_window.results if x.agrees is False]
    assert wrong and all("window_size=(2, 1), 1 query, 11 keys" in case for case in wrong), f"\n{without_window}"


SET = {"is_causal": True, "scale": 0.3, "softcap": 2.5, "window_size": (2, 1)}


@pytest.mark.parametrize(("ignored", "beside"), [*permutations(SET, 2)])
def test_a_parameter_that_is_ignored_beside_another_is_found(ignored, beside):
    def attend(q, k, v, is_causal=False, scale=None, softcap=0.0, window_size=(-1, -1)):
        values = {"is_causal": is_causal, "scale": scale, "softcap": softcap, "window_size": window_size}
        is_beside = values[beside] not in (None, False, 0.0, (-1, -1))
        return attention([ignored] if is_beside else [])(q, k, v, **values)

    comparison = compare(attend, framework="torch", longest=7)
    wrong = [x.case for x in comparison.results if x.agrees is False]
    assert len(wrong) == 4 and all(ignored in case and beside in case for case in wrong), (
        f"\n{comparison}"
    )  # with none or both of the others


def test_a_parameter_that_is_ignored_beside_two_others_is_found():
    def attend(q, k, v, is_causal=False, softcap=0.0, window_size=(-1, -1)):
        ignored = ["softcap"] if is_causal and window_size != (-1, -1) else []
        return attention(ignored)(q, k, v, is_causal=is_causal, softcap=softcap, window_size=window_size)

    comparison = compare(attend, framework="torch", longest=7)
    assert [x.case for x in comparison.results if x.agrees is False] == ["is_causal=True with softcap=2.5 and window_size=(2, 1)"]


def test_a_parameter_that_is_ignored_in_long_calls_is_found():
    def attend(q, k, v, is_causal=False, window_size=(-1, -1)):
        return attention(["window_size"] if k.shape[2] > 64 else [])(q, k, v, is_causal=is_causal, window_size=window_size)

    comparison = compare(attend, framework="torch", longest=257)
    wrong = [x.case for x in comparison.results if x.agrees is False]
    assert wrong == ["193 keys, window_size=(2, 1)", "193 keys, is_causal=True with window_size=(2, 1)"], f"\n{comparison}"


def test_a_window_with_an_end_on_one_side_is_tried():
    def attend(q, k, v, window_size=(-1, -1)):
        left, right = window_size
        if min(left, right) < 0 <= max(left, right):  # -1 is taken for a number of keys
            window_size = (max(left, 0), max(right, 0))
        return attention()(q, k, v, window_size=window_size)

    comparison = compare(attend, framework="torch", longest=7)
    assert [x.case for x in comparison.results if x.agrees is False] == ["window_size=(2, -1)", "window_size=(-1, 1)"], f"\n{comparison}"


def test_a_number_that_is_too_small_to_block_large_logits_is_found():
    def attend(q, k, v, attn_mask=None):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return (scores if attn_mask is None else scores - 100.0 * ~attn_mask).softmax(-1) @ v

    comparison = compare(attend, framework="torch", longest=7)
    assert [x.case for x in comparison.results if x.agrees is False] == ["large logits with a mask"], f"\n{comparison}"


def test_masks_of_which_the_first_head_alone_counts_are_found():
    def attend(q, k, v, attn_mask=None, seen=slice(0, 1)):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask if attn_mask is None or attn_mask.ndim < 4 else attn_mask[:, seen]
        )

    comparison = compare(attend, framework="torch", longest=7)
    wrong = [x.case for x in comparison.results if x.agrees is False]
    assert wrong == ["masks of each head"] and comparison.first.hint == "all other kinds of calls agree", f"\n{comparison}"
    assert compare(partial(attend, seen=slice(None)), framework="torch", longest=7).agrees
    with_axes = compare(
        lambda q, k, v, mask=None: attend(q, k, v, mask if mask is None else mask[None, None]), framework="torch", longest=7
    )
    assert with_axes.is_complete, f"\n{with_axes}"  # which makes more axes of those of each head


def test_strides_that_are_taken_for_those_of_another_input_are_found():
    def attend(q, k, v, reads=lambda v, k: torch.as_strided(v, v.shape, k.stride(), v.storage_offset())):
        return functional.scaled_dot_product_attention(q, k, reads(v, k))

    comparison = compare(attend, framework="torch", longest=7)
    assert [x.case for x in comparison.results if x.agrees is False] == ["inputs that are views"], f"\n{comparison}"
    refuses = compare(lambda q, k, v: attend(q, k, v.view(-1).view_as(v), reads=lambda v, k: v), framework="torch", longest=7)
    assert refuses.is_complete, f"\n{refuses}"


def test_values_that_are_refused_together_are_not_tried_together():
    def attend(q, k, v, is_causal=False, softcap=0.0):
        if is_causal and softcap:
            raise NotImplementedError
        return attention()(q, k, v, is_causal=is_causal, softcap=softcap)

    comparison = compare(attend, framework="torch", longest=7)
    assert comparison.agrees and not comparison.is_complete, f"\n{comparison}"
    assert "is_causal=True with softcap=2.5, since it raised NotImplementedError" in comparison.conclusion
    assert comparison.tried == ("is_causal", "softcap") and comparison.parameters == ()


def windowed(query, key, value, causal, window_size, first):
    """[b, n, h, d]; causality is aligned at the last key, the window as if the first query was at the key `first`."""
    offset = key.shape[1] - query.shape[1]
    ahead = torch.arange(key.shape[1]) - torch.arange(query.shape[1])[:, None]
    left, right = (math.inf if side < 0 else side for side in window_size)
    blocked = (ahead < first - left) | (ahead > first + right)
    blocked |= (ahead > offset) if causal else False
    return functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)), ~blocked).transpose(1, 2)


def window_at_first_key(q, k, v, causal=False, window_size=(-1, -1)):
    return windowed(q, k, v, causal, window_size, 0)


def causal_window_at_first_key(q, k, v, causal=False, window_size=(-1, -1)):
    return windowed(q, k, v, causal, window_size, 0 if causal else k.shape[1] - q.shape[1])


@pytest.mark.parametrize("function", [window_at_first_key, causal_window_at_first_key])
def test_a_window_at_the_wrong_keys_is_found_where_there_are_more_keys_than_queries(function):
    comparison = compare(function, like="flash_attn", framework="torch", longest=7)
    wrong = [x.case for x in comparison.results if x.agrees is False]
    both = [f"{words}window_size=(2, 1), {n}, 11 keys" for words in ("", "causal=True with ") for n in ("5 queries", "1 query")]
    assert wrong == (both if function is window_at_first_key else both[2:]), f"\n{comparison}"


def test_a_function_that_heeds_all_parameters_agrees():
    comparison = compare(attention(), longest=65, **OPTIONS)
    assert comparison.agrees and comparison.parameters == (), f"\n{comparison}"
    assert comparison.untried == ("mask of numbers",)  # attn_mask, as in torch, but of booleans alone
    assert not comparison.is_complete and "which this one need not be" in comparison.conclusion


def test_a_mask_of_numbers_that_is_ignored_in_attn_mask_is_untried():
    """The name is that of torch, whose masks may be numbers; a mask of another name need not be."""

    def attend(q, k, v, attn_mask=None, adds=False):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        return (scores + attn_mask if adds and attn_mask is not None and attn_mask.dtype != torch.bool else scores).softmax(-1) @ v

    ignores = compare(lambda q, k, v, attn_mask=None: attend(q, k, v, attn_mask), framework="torch", longest=7)
    assert ignores.agrees and ignores.untried == ("mask of numbers",), f"\n{ignores}"
    adds = compare(lambda q, k, v, attn_mask=None: attend(q, k, v, attn_mask, adds=True), framework="torch", longest=7)
    assert adds.is_complete and "mask of numbers" in {x.case for x in adds.results if x.agrees}, f"\n{adds}"
    other_name = compare(lambda q, k, v, mask=None: attend(q, k, v, mask), framework="torch", longest=7)
    assert other_name.is_complete, f"\n{other_name}"


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


def test_all_parameters_of_torch_are_tried():
    assert compare(nn.MultiheadAttention, longest=7).is_complete
    assert compare(functional.scaled_dot_product_attention, longest=7).is_complete


def test_a_cache_that_is_not_passed_is_not_tried():
    def attend(q, k, v, use_cache=False):
        return attention()(q, k, v, is_causal=True)

    assert compare(attend, framework="torch", causal=True, longest=7).parameters == ("use_cache",)


def test_a_softcap_that_calls_have_by_default_is_found():
    def attend(q, k, v, softcap=5.0):
        return attention()(q, k, v, softcap=softcap)

    comparison = compare(attend, framework="torch", longest=7)
    assert comparison.is_complete and comparison.tried == ("softcap",), f"\n{comparison}"
    assert not compare(lambda q, k, v, softcap=5.0: attend(q, k, v), framework="torch", longest=7).agrees


def test_inputs_are_contiguous_but_where_they_are_views():
    def attend(q, k, v):
        q, k, v = (x.view(-1, *x.shape[2:]) for x in (q, k, v))
        return attention()(q[None], k[None], v[None])[0].view(-1, 3, *q.shape[1:])

    assert compare(attend, framework="torch", longest=7).agrees


def within(distance, left, right):
    """Attention in a window of keys before and after each query's own, and causal if a flag asks for it."""

    def attend(q, k, v, is_causal=False, window=None):
        ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        hidden = (ahead > 0) & is_causal
        if window is not None:
            hidden |= (ahead < -left(window)) | (ahead > right(window))
        return functional.scaled_dot_product_attention(q, k, v, ~hidden.expand(1, 1, -1, -1))

    attend.__name__ = distance
    return attend


@pytest.mark.parametrize(
    ("distance", "left", "right"),
    [
        ("before the own key, with it", lambda n: n - 1, lambda n: math.inf),
        ("around the own key", lambda n: n // 2, lambda n: n // 2),
        ("on each side, with the own key", lambda n: n - 1, lambda n: n - 1),
    ],
)
def test_the_size_of_a_window_is_tried_with_each_meaning(distance, left, right):
    comparison = compare(within(distance, left, right), longest=7)
    assert comparison.tried == ("is_causal", "window") and comparison.is_complete, f"\n{comparison}"


def test_the_size_of_a_window_of_another_meaning_or_beside_a_flag_that_ends_it_is_not_tried():
    assert compare(within("one more", lambda n: n, lambda n: math.inf), longest=7).parameters == ("window",)

    def attend(q, k, v, is_causal=False, window=None):
        return within("", lambda n: n - 1, lambda n: math.inf)(q, k, v, is_causal, None if is_causal else window)

    assert compare(attend, longest=7).parameters == ("window",)


def test_masks_are_passed_where_weights_are_not_returned():
    """A fast path without weights forgets the mask, as `need_weights=False` has one in torch."""

    def attend(q, k, v, attn_mask=None, need_weights=True):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if attn_mask is not None and need_weights:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        weights = scores.softmax(-1)
        return (weights @ v, weights) if need_weights else weights @ v

    comparison = compare(attend, longest=7)
    assert [x.case for x in comparison.results if x.agrees is False] == [
        "weights not returned with a mask",
        "weights not returned with padded keys",
    ], f"\n{comparison}"
