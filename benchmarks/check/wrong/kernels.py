"""Functions with the signatures of well-known kernels, in plain torch."""

import math

import torch
import torch.nn.functional as F


def _heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """[batch, length, heads, head_dim]; causal: the last query is at the last key."""
    q, k, v = _heads_first(q, k, v)
    scores = q @ k.mT * (softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5)
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    L, S = query.size(-2), key.size(-2)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    bias = torch.zeros(L, S, dtype=query.dtype)
    if is_causal:
        bias = bias.masked_fill(torch.ones(L, S, dtype=torch.bool).tril(S - L).logical_not(), -math.inf)
    if attn_mask is not None:
        bias = bias + (
            attn_mask
            if attn_mask.dtype != torch.bool
            else torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
        )
    return torch.softmax(query @ key.transpose(-2, -1) * scale + bias, dim=-1) @ value


def mha_fwd(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """Flash attention's arguments, [batch, length, heads, head_dim]."""
    q, k, v = _heads_first(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.mT * scale
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])[None, :]
    left, right = window_size
    visible = (j <= i) if causal else torch.ones_like(i * j, dtype=torch.bool)
    visible = visible & ((left < 0) | (i - j <= left)) & ((right < 0) | (j - i <= right))
    return (scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num() @ v).transpose(1, 2)


def capped_attention(query, key, value, attn_mask=None, scale=None, softcap=0.0):
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -1e4)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.softmax(-1) @ value


def windowed_attention(q, k, v, causal=False, window_size=(-1, -1)):
    """[batch, length, heads, head_dim]; keys from i - window_size[0] to i + window_size[1], inclusive."""
    q, k, v = _heads_first(q, k, v)
    distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    blocked = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window_size[0] >= 0:
        blocked = blocked | (distance >= window_size[0])
    if window_size[1] >= 0:
        blocked = blocked | (-distance > window_size[1])
    return (torch.softmax((q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(blocked, -math.inf), -1).nan_to_num() @ v).transpose(1, 2)


def mla_scaled_attention(query, key, value, is_causal=False, softmax_scale=None):
    scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(query.shape[-1])
    if is_causal:
        n, m = scores.shape[-2:]
        scores = scores + torch.full((n, m), -math.inf).triu(1)
    return torch.matmul(F.softmax(scores, dim=-1), value)


def default_scale_attention(query, key, value, attn_mask=None, scale=0.0):
    """scale: 0 stands for 1/sqrt(head_dim)."""
    scores = query @ key.mT * scale
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    return scores.softmax(-1) @ value


def grouped_query_attention(query, key, value):
    groups = query.shape[1] // key.shape[1]
    key = key.repeat(1, groups, 1, 1)
    value = value.repeat(1, groups, 1, 1)
    return F.scaled_dot_product_attention(query, key, value)


def kv_head_attention(query, key, value):
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    out = torch.empty_like(query)
    for head in range(num_heads):
        kv_head = head // num_heads
        out[:, head] = F.softmax(query[:, head] @ key[:, kv_head].mT / query.shape[-1] ** 0.5, -1) @ value[:, kv_head]
    return out


def sink_attention(query, key, value, sinks):
    """sinks: [heads], logits that take part in the softmax and have no value."""
    scale = query.shape[-1] ** -0.5
    logits = torch.cat([query @ key.mT, sinks.view(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], 1)], dim=-1) * scale
    return logits.softmax(-1)[..., :-1] @ value


def absorbed_attention(q, k, v):
    """A decoding kernel with the cache's rows as keys and values."""
    return q / q.shape[-1] ** 0.5


def half_the_keys(q, k, v):
    tokens = k.shape[2] if k.shape[2] < 4 else k.shape[2] // 2
    return F.scaled_dot_product_attention(q, k[:, :, :tokens], v[:, :, :tokens])


def fp8_attention(q, k, v):
    """Products of weights and values in float8, as on GPUs that have it."""
    p = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1)
    p = p.to(torch.float8_e4m3fn).float()
    return (p @ v.float()).to(q.dtype)


def exp2_attention(q, k, v):
    """Softmax by powers of 2, over blocks of keys."""
    qk_scale = q.shape[-1] ** -0.5
    m = torch.full((*q.shape[:3], 1), -math.inf)
    total, acc = torch.zeros_like(m), torch.zeros(*q.shape[:3], v.shape[-1])
    for start in range(0, k.shape[2], 64):
        qk_scale *= 1.44269504
        qk = q @ k[:, :, start : start + 64].mT * qk_scale
        m_new = torch.maximum(m, qk.amax(-1, keepdim=True))
        p, alpha = torch.exp2(qk - m_new), torch.exp2(m - m_new)
        total = total * alpha + p.sum(-1, keepdim=True)
        acc, m = acc * alpha + p @ v[:, :, start : start + 64], m_new
    return acc / total
