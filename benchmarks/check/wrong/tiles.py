"""Functions that take the keys tile by tile, or split among workers, and put the partial results together."""

import numpy as np
import torch

TILE = 64


def tiled_attention(q, k, v):
    """q, k, v: [batch, heads, length, head_dim]."""
    scale = 1.0 / np.sqrt(q.shape[-1])
    n = k.shape[2]
    m = np.full((*q.shape[:3], 1), -np.inf)
    total = np.zeros_like(m)
    acc = np.zeros((*q.shape[:3], v.shape[-1]))
    num_tiles = max(1, n // TILE)
    for t in range(num_tiles):
        kt, vt = k[:, :, t * TILE : (t + 1) * TILE], v[:, :, t * TILE : (t + 1) * TILE]
        s = q @ kt.swapaxes(-1, -2) * scale
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        p = np.exp(s - m_new)
        total = total * np.exp(m - m_new) + p.sum(axis=-1, keepdims=True)
        acc = acc * np.exp(m - m_new) + p @ vt
        m = m_new
    return acc / total


def online_attention(query, key, value):
    m_i = torch.full(query.shape[:-1], float("-inf"))
    l_i = torch.zeros(query.shape[:-1])
    acc = torch.zeros_like(query)
    for start in range(0, key.shape[-2], 32):
        block_k = key[..., start : start + 32, :]
        block_v = value[..., start : start + 32, :]
        qk = torch.einsum("bhqd,bhkd->bhqk", query, block_k) * query.shape[-1] ** -0.5
        m_ij = torch.maximum(m_i, qk.amax(-1))
        p = torch.exp(qk - m_ij[..., None])
        alpha = torch.exp(m_i - m_ij)
        l_i = l_i * alpha + p.sum(-1)
        acc += p @ block_v
        m_i = m_ij
    return acc / l_i[..., None]


def prefill(query, key, value):
    """Keys and values are padded to whole blocks."""
    block = 16
    missing = -key.shape[-2] % block
    keys = torch.nn.functional.pad(key, (0, 0, 0, missing))
    values = torch.nn.functional.pad(value, (0, 0, 0, missing))
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    valid = torch.arange(keys.shape[-2]) < keys.shape[-2]
    scores = scores.masked_fill(~valid, float("-inf"))
    return scores.softmax(-1) @ values


def partial_attention(q, k, v):
    """The output over these keys, and the logarithm (base 2) of the sum of exponentials, as kernels return it."""
    s = q @ k.mT * q.shape[-1] ** -0.5 * 1.4426950408889634
    lse = torch.logsumexp(s * 0.6931471805599453, -1, keepdim=True) / 0.6931471805599453
    return torch.exp2(s - lse) @ v, lse


def merge_states(parts):
    outputs, lses = zip(*parts, strict=True)
    stacked = torch.stack(lses)
    w = torch.exp(stacked - stacked.amax(0))
    return (w * torch.stack(outputs)).sum(0) / w.sum(0)


def chunked_prefix_attention(q, k, v):
    prefix = k.shape[2] // 2
    if prefix == 0:
        return partial_attention(q, k, v)[0]
    return merge_states(
        [partial_attention(q, k[:, :, :prefix], v[:, :, :prefix]), partial_attention(q, k[:, :, prefix:], v[:, :, prefix:])]
    )


def split_kv_attention(q, k, v, splits=3):
    """Each split of the keys gives its own output; `combine` weights them."""
    scale = q.shape[-1] ** -0.5
    outputs, statistics = [], []
    for keys, values in zip(np.array_split(k, splits, axis=2), np.array_split(v, splits, axis=2), strict=True):
        if keys.shape[2] == 0:
            continue
        s = q @ np.swapaxes(keys, 2, 3) * scale
        row_max = s.max(axis=3, keepdims=True)
        e = np.exp(s - row_max)
        total = e.sum(axis=3, keepdims=True)
        outputs.append(e / total @ values)
        statistics.append(row_max * scale + np.log(total))
    lse = np.stack(statistics)
    share = np.exp(lse - lse.max(axis=0))
    return (share / share.sum(axis=0) * np.stack(outputs)).sum(axis=0)


def first_64_attention(q, k, v):
    """A kernel that was written for one width of heads."""
    D_HEAD = 64
    scores = q[..., :D_HEAD] @ k[..., :D_HEAD].transpose(-2, -1) * q.shape[-1] ** -0.5
    return scores.softmax(dim=-1) @ v
