"""Functions over packed sequences and pages of a cache."""

import torch


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
    """q: [total queries, heads, head_dim]; k, v: [total keys, heads, head_dim]."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        a, b = cu_seqlens_q[i], cu_seqlens_q[i + 1]
        c, d = cu_seqlens_q[i], cu_seqlens_q[i + 1]
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, d - c).triu(1 + (d - c) - (b - a)).bool(), float("-inf"))
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v[c:d])
    return out


def packed_attention(q, k, v, cu_seqlens, causal=True):
    """[total, heads, head_dim]; positions restart in each sequence, which is to be enough to keep sequences apart."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False):
    """q: [batch, queries, heads, head_dim]; caches: [pages, page_size, heads, head_dim]; the last query is at the last key."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    page = k_cache.shape[1]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        length = int(cache_seqlens[b])
        pages = [int(block_table[b, 0]) + t for t in range(-(-length // page))]
        pages = [p % len(k_cache) for p in pages]
        k, v = k_cache[pages].flatten(0, 1)[:length], v_cache[pages].flatten(0, 1)[:length]
        scores = torch.einsum("qhd,khd->hqk", q[b], k) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(q.shape[1], length).triu(1 + length - q.shape[1]).bool(), float("-inf"))
        out[b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out


def paged_decode(q, k_cache, v_cache, block_table, cache_seqlens):
    """q: [batch, 1, heads, head_dim]; rows beyond the length of a sequence are whatever the page holds."""
    k, v = k_cache[block_table].flatten(1, 2), v_cache[block_table].flatten(1, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    beyond = torch.arange(k.shape[1]) >= cache_seqlens[:, None]
    weights = scores.masked_fill(beyond[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)
