"""`like` says that a function has the parameters, axes, masks and causal alignment of a known one."""

from functools import partial

import pytest
import torch

from attend.check import compare
from attend.check.convention import Like
from attend.check.signatures import FUNCTIONS


def attention(q, k, v, added=0.0, scale=None):
    """Of heads [b, h, n, d]; `added` to the scores."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + added
    return scores.softmax(-1).nan_to_num() @ v


def blocked(mask):
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


def ahead(queries, keys, offset=0):
    return torch.arange(keys) > torch.arange(queries)[:, None] + offset


def causal_or_not(q, k, causal, at_end):
    return blocked(ahead(q.shape[-2], k.shape[-2], k.shape[-2] - q.shape[-2] if at_end else 0) & causal)


def heads_third(function):
    """The function with inputs [b, n, h, d]."""
    return lambda q, k, v, *more: function(*(x.transpose(-3, -2) for x in (q, k, v)), *more).transpose(-3, -2)


def as_flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    return heads_third(lambda q, k, v: attention(q, k, v, causal_or_not(q, k, causal, True), softmax_scale))(q, k, v)


def as_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
    bounds = [list(zip(x[:-1].tolist(), x[1:].tolist(), strict=True)) for x in (cu_seqlens_q, cu_seqlens_k)]
    assert cu_seqlens_q.dtype is torch.int32 and (max_seqlen_q, max_seqlen_k) == tuple(max(b - a for a, b in x) for x in bounds)
    parts = [as_flash(q[a:b], k[c:d], v[c:d], 0.0, softmax_scale, causal) for (a, b), (c, d) in zip(*bounds, strict=True)]
    return torch.cat(parts)


def varlen_by_longest(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
    """Causality is aligned by the longest sequence, in all sequences."""
    outputs = []
    for i in range(len(cu_seqlens_q) - 1):
        query, key, value = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]], *(x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]] for x in (k, v))
        ahead = torch.arange(len(key)) - torch.arange(len(query))[:, None]
        bias = blocked(ahead > max_seqlen_k - max_seqlen_q) if causal else 0.0
        heads = (x.transpose(0, 1)[None] for x in (query, key, value))
        outputs.append(attention(*heads, bias, softmax_scale)[0].transpose(0, 1))
    return torch.cat(outputs)


def varlen_of_queries(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
    return as_varlen(q, k, v, cu_seqlens_q, cu_seqlens_q, max_seqlen_q, max_seqlen_q, softmax_scale, causal)


def as_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False):
    n, keys = q.shape[1], k_cache.shape[1]
    lengths = torch.full((len(q),), keys) if cache_seqlens is None else cache_seqlens
    ends = lengths[:, None] - n + torch.arange(n) if causal else lengths[:, None] - 1
    beyond = blocked(torch.arange(keys) > ends[:, :, None])[:, None]
    return heads_third(lambda q, k, v: attention(q, k, v, beyond, softmax_scale))(q, k_cache, v_cache)


def kvcache_at_last_row(q, k_cache, v_cache, cache_seqlens=None, causal=False):
    """The last query is at the last row of the cache, and not at the last key of its sequence."""
    beyond = blocked(ahead(q.shape[1], k_cache.shape[1], k_cache.shape[1] - q.shape[1]) & causal)
    if cache_seqlens is not None:
        beyond = beyond + blocked(torch.arange(k_cache.shape[1]) >= cache_seqlens[:, None])[:, None, None]
    return heads_third(lambda q, k, v: attention(q, k, v, beyond))(q, k_cache, v_cache)


def as_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    added = 0.0 if attn_mask is None else blocked(~attn_mask) if attn_mask.dtype is torch.bool else attn_mask
    return attention(query, key, value, added + causal_or_not(query, key, is_causal, False), scale)


def inverted_sdpa(query, key, value, attn_mask=None, is_causal=False):
    return as_sdpa(query, key, value, None if attn_mask is None else ~attn_mask, 0.0, is_causal)


def drops_numbers(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    return as_sdpa(query, key, value, attn_mask if attn_mask is None else attn_mask != 0, dropout_p, is_causal)


def as_flex(query, key, value, score_mod=None, block_mask=None, scale=None):
    assert block_mask is None, "no tensor"
    return attention(query, key, value, 0.0, scale)


def as_jax(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, key_value_seq_lengths=None):
    added = causal_or_not(*(x.transpose(1, 2) for x in (query, key)), is_causal, False)
    added = added if mask is None else added + blocked(~mask)
    if key_value_seq_lengths is not None:
        added = added + blocked(torch.arange(key.shape[1]) >= key_value_seq_lengths[:, None])[:, None, None]
    return heads_third(lambda q, k, v: attention(q, k, v, added, scale))(query, key, value)


def as_transformers(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    assert not module.training and module.num_key_value_groups == 1
    added = 0.0 if attention_mask is None else attention_mask
    return attention(query, key, value, added, scaling).transpose(1, 2).contiguous(), None


def as_xformers(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    assert attn_bias is None or attn_bias.shape[1] == query.shape[2]
    return heads_third(lambda q, k, v: attention(q, k, v, 0.0 if attn_bias is None else attn_bias, scale))(query, key, value)


def as_onnx(Q, K, V, attn_mask=None, scale=None, is_causal=0):
    return as_sdpa(Q, K, V, attn_mask, 0.0, bool(is_causal), scale)


def as_mlx(q, k, v, *, scale, mask=None):
    return as_sdpa(q, k, v, mask, 0.0, False, scale)


RIGHT: dict[Like, tuple] = {  # the function, what is tried, and what is not
    "flash_attn": (as_flash, ["softmax_scale", "causal"], ["dropout_p"]),
    "flash_attn_varlen": (
        as_varlen, ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"], []
    ),
    "flash_attn_with_kvcache": (as_kvcache, ["cache_seqlens", "softmax_scale", "causal"], ["k", "v", "block_table"]),
    "sdpa": (as_sdpa, ["attn_mask", "is_causal", "scale"], ["dropout_p"]),
    "flex_attention": (as_flex, ["scale"], ["score_mod", "block_mask"]),
    "jax": (as_jax, ["mask", "scale", "is_causal", "key_value_seq_lengths"], ["bias"]),
    "mlx": (as_mlx, ["scale", "mask"], []),
    "transformers": (as_transformers, ["attention_mask", "scaling"], ["dropout"]),
    "xformers": (as_xformers, ["attn_bias", "scale"], ["p", "op"]),
    "onnx": (as_onnx, ["attn_mask", "scale", "is_causal"], []),
}  # fmt: skip
WRONG: dict[str, tuple] = {
    "keys that are cut by the bounds of queries": (varlen_of_queries, "flash_attn_varlen", "cross-attention"),
    "causality that is aligned by the longest sequence": (
        varlen_by_longest, "flash_attn_varlen", "causal=True with packed sequences and other lengths of keys"
    ),
    "causality at the last row of a cache": (kvcache_at_last_row, "flash_attn_with_kvcache", "causal=True with cache_seqlens"),
    "an inverted mask": (inverted_sdpa, "sdpa", "mask"),
    "alignment at the last key": (
        lambda query, key, value, attn_mask=None, is_causal=False: attention(query, key, value, causal_or_not(query, key, is_causal, True)
            + (0.0 if attn_mask is None else blocked(~attn_mask))),
        "sdpa", "is_causal=True, 5 queries, 11 keys"
    ),
}  # fmt: skip


@pytest.mark.parametrize("like", FUNCTIONS)
def test_a_function_agrees_with_the_conventions_of_the_one_that_it_is_like(like):
    function, tried, untried = RIGHT[like]
    options = {"framework": "torch"} if like in ("jax", "mlx") else {}
    comparison = compare(function, like=like, longest=33, **options)
    assert comparison.agrees, f"\n{comparison}"
    assert comparison.tried == tuple(tried) and comparison.parameters == tuple(untried)
    assert not comparison.found


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_differs_from_the_one_that_it_is_like_disagrees(name):
    function, like, case = WRONG[name]
    assert compare(function, like=like, longest=7).first.case == case


def test_masks_of_numbers_are_added_by_a_function_that_has_the_names_of_torch_and_its_meaning_of_true():
    assert "mask of numbers" not in compare(as_sdpa, longest=7).untried
    comparison = compare(drops_numbers, longest=7)
    assert comparison.first.mistakes == ("the numbers of a mask of numbers are not added to the scores",), f"\n{comparison}"


def test_a_function_with_the_name_and_the_parameters_of_torch_is_like_it_but_for_its_axes():
    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, at_end=False):
        mask = causal_or_not(*(x.transpose(1, 2) for x in (query, key)), is_causal, at_end)
        return heads_third(lambda q, k, v: as_sdpa(q, k, v, mask if attn_mask is None else attn_mask))(query, key, value)

    comparison = compare(scaled_dot_product_attention, longest=7)
    assert comparison.agrees and comparison.conventions == (
        "found by calls: its axes are [b,n,h,d], not [b,h,n,d] as those of torch's scaled_dot_product_attention"
    ), f"\n{comparison}"
    wrong = partial(scaled_dot_product_attention, at_end=True)
    assert "that of torch's scaled_dot_product_attention is top-left" in compare(wrong, longest=7).first.hint


def test_a_flag_for_groups_of_heads_is_passed_with_groups():
    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False, repeats=None):
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and not enable_gqa:
            raise ValueError
        key, value = ((repeats or torch.Tensor.repeat_interleave)(x, groups, 1) for x in (key, value))
        return as_sdpa(query, key, value, attn_mask, dropout_p, is_causal)

    comparison = compare(scaled_dot_product_attention, longest=7)
    assert comparison.agrees and "enable_gqa" in comparison.tried and ", groups of heads, in " in comparison.conclusion, f"\n{comparison}"
    in_turn = partial(scaled_dot_product_attention, repeats=lambda x, groups, axis: x.repeat(1, groups, 1, 1))
    assert compare(in_turn, like="sdpa", longest=7).first.mistakes == ("query head i uses head i mod num_kv_heads of the keys and values",)


def test_a_function_is_like_the_one_whose_name_it_has():
    as_kvcache.__name__ = "flash_attn_with_kvcache"
    assert compare(as_kvcache, longest=7).parameters == ("k", "v", "block_table")
    with pytest.raises(ValueError, match=r"expected like to be flash_attn or .*, got 'flash' \(did you mean flash_attn\?\)"):
        compare(as_flash, like="flash")
