"""Causal layers that decode with a cache of keys and values."""

import torch
import torch.nn.functional as F
from torch import nn


class TinyAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, cache=None):
        q, k, v = (p(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)


class RollingCache(nn.Module):
    """`window` is None for layers that attend to everything."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.max_cache_len = num_heads, 8
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, past_key_value=None):
        q, k, v = (p(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if past_key_value is not None:
            k = torch.cat((past_key_value[0], k), 2)[:, :, -self.max_cache_len :]
            v = torch.cat((past_key_value[1], v), 2)[:, :, -self.max_cache_len :]
        n, m = q.shape[2], k.shape[2]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(n, m).triu(1 + m - n).bool(), float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), (k, v)


class ThinkerAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, rope_theta=10000.0):
        super().__init__()
        self.num_heads, self.head_dim, self.rope_theta = num_heads, hidden_size // num_heads, rope_theta
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))

    def rotate(self, x, positions):
        angles = torch.outer(positions, self.rope_theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim))
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def forward(self, hidden_states, past_key_value=None):
        q, k, v = (p(hidden_states).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        offset = 0 if past_key_value is None else past_key_value[0].shape[2]
        positions = torch.arange(q.shape[2])
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + offset)
        weights = (q @ k.mT * self.head_dim**-0.5).masked_fill(later, float("-inf")).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), (k, v)
