"""Causal layers with rotary positions, as ports of language models have them."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Qwen2Attention(nn.Module):
    """The tables of cosines and sines are made in the dtype of the weights' activations."""

    dtype = torch.bfloat16

    def __init__(self, hidden_size, num_heads, num_kv_heads, rope_theta=10000.0):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.rope_theta = num_heads, num_kv_heads, hidden_size // num_heads, rope_theta
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def tables(self, n):
        inv_freq = 1.0 / self.rope_theta ** (torch.arange(0, self.head_dim, 2) / self.head_dim)
        t = torch.arange(n).to(self.dtype).float()
        freqs = torch.outer(t, inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()

    def forward(self, hidden_states):
        b, n, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, n, self.num_heads, -1).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, n, self.num_kv_heads, -1).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, n, self.num_kv_heads, -1).transpose(1, 2)
        cos, sin = self.tables(n)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Llama31Attention(nn.Module):
    """Llama 3.1's frequencies: low ones are divided by a factor."""

    def __init__(self, hidden_size, num_heads, rope_theta=10000.0, factor=8.0, low=1.0, high=4.0, original_max_position=16):
        super().__init__()
        self.num_heads, self.head_dim, self.rope_theta = num_heads, hidden_size // num_heads, rope_theta
        self.factor, self.low, self.high, self.original_max_position = factor, low, high, original_max_position
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))

    def scaled(self, inv_freq):
        wavelength = 2 * math.pi / inv_freq
        smooth = (self.original_max_position / wavelength - self.low) / (self.high - self.low)
        mixed = (1 - smooth) * inv_freq / self.factor + smooth * inv_freq
        mixed = torch.where(wavelength < self.original_max_position / self.high, inv_freq, mixed)
        return torch.where(wavelength > self.original_max_position / self.low, inv_freq / self.factor, mixed)

    def forward(self, x):
        q, k, v = (p(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        inv_freq = self.rope_theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(x.shape[1]), inv_freq)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class YarnAttention(nn.Module):
    """`attention_factor` of the configuration multiplies cosines and sines."""

    def __init__(self, hidden_size, num_heads, rope_theta=10000.0, factor=4.0, attention_factor=1.5):
        super().__init__()
        self.num_heads, self.head_dim, self.factor = num_heads, hidden_size // num_heads, factor
        self.attention_factor = attention_factor
        self.inv_freq = rope_theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mscale = 0.1 * math.log(self.factor) + 1.0
        angles = torch.outer(torch.arange(x.shape[1]), self.inv_freq).repeat(1, 2)
        cos, sin = angles.cos() * mscale, angles.sin() * mscale
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FusedRopeStore(nn.Module):
    """Rotated keys are written to the cache, and to the tensor that this call goes on with."""

    def __init__(self, hidden_size, num_heads, rope_theta=10000.0):
        super().__init__()
        self.num_heads = num_heads
        self.inv_freq = rope_theta ** (-torch.arange(0, hidden_size // num_heads, 2) / (hidden_size // num_heads))
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def rotate(self, t):
        angles = torch.outer(torch.arange(t.shape[2]), self.inv_freq).repeat(1, 2)
        return t * angles.cos() + rotate_half(t) * angles.sin()

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv_proj(x).chunk(3, dim=-1))
        q, k_cache = self.rotate(q), self.rotate(k)
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ConvertedAttention(nn.Module):
    """A checkpoint whose projections are ordered for rotated halves."""

    def __init__(self, hidden_size, num_heads, rope_theta=10000.0):
        super().__init__()
        self.num_heads, self.head_dim, self.rope_theta = num_heads, hidden_size // num_heads, rope_theta
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))

    def rotary(self, x):
        freqs = torch.outer(torch.arange(x.shape[2]), self.rope_theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim))
        first, second = x[..., ::2], x[..., 1::2]
        turned = (first * freqs.cos() - second * freqs.sin(), first * freqs.sin() + second * freqs.cos())
        return torch.stack(turned, dim=-1).flatten(-2)

    def forward(self, x):
        q, k, v = (p(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Qwen3Attention(nn.Module):
    """Norms of queries and keys for each head, then rotation."""

    def __init__(self, hidden_size, num_heads, num_kv_heads, head_dim, rope_theta=10000.0):
        super().__init__()
        self.head_dim = head_dim
        self.inv_freq = rope_theta ** (-torch.arange(0, head_dim, 2) / head_dim)
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(head_dim), RMSNorm(head_dim)

    def rope(self, x):
        angles = torch.outer(torch.arange(x.shape[2]), self.inv_freq).repeat(1, 2)
        return x * angles.cos() + rotate_half(x) * angles.sin()

    def forward(self, x):
        q, k, v = (p(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(self.rope(q)), self.k_norm(self.rope(k))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


class HeadsLast(nn.Module):
    """Queries and keys are rotated as [batch, length, heads, head_dim]."""

    def __init__(self, dim, n_heads, theta=10000.0):
        super().__init__()
        self.n_heads = n_heads
        self.freqs = theta ** (-torch.arange(0, dim // n_heads, 2) / (dim // n_heads))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def apply_rotary_emb(self, x):
        angles = torch.outer(torch.arange(x.shape[2]), self.freqs).repeat(1, 2)
        return x * angles.cos() + rotate_half(x) * angles.sin()

    def forward(self, x):
        q, k, v = (w(x).unflatten(2, (self.n_heads, -1)) for w in (self.wq, self.wk, self.wv))
        q, k = self.apply_rotary_emb(q), self.apply_rotary_emb(k)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))
