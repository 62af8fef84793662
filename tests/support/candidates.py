"""Attention as people write it, right and wrong, for tests of `attend check`."""

import math

import numpy as np
import torch
from torch import nn

from attend.spec import LayerSpec


def split(x, heads):
    b, n, width = x.shape
    return x.view(b, n, heads, width // heads).transpose(1, 2)


def merge(x):
    b, h, n, d = x.shape
    return x.transpose(1, 2).reshape(b, n, h * d)


def scaled_dot_product(q, k, v, mask=None):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v), weights


class FromScratch(nn.Module):
    """Four linear layers, mask 1 = attend."""

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        q, k, v = (split(layer(x), self.num_heads) for layer, x in ((self.W_q, query), (self.W_k, key), (self.W_v, value)))
        heads, weights = scaled_dot_product(q, k, v, mask)
        return self.W_o(merge(heads)), weights


class Annotated(nn.Module):
    """The Annotated Transformer: a list of four layers, and a mask without its head axis."""

    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        q, k, v = (split(layer(x), self.h) for layer, x in zip(self.linears, (query, key, value), strict=False))
        return self.linears[-1](merge(scaled_dot_product(q, k, v, mask)[0]))


GROUPED_ROTARY = LayerSpec(
    d_model=36, num_heads=6, num_kv_heads=3, rope={"theta": 10000.0, "interleaved": False}, qk_norm={"kind": "rms", "eps": 1e-6}
)


class GroupedRotary(nn.Module):
    """Grouped heads with a norm before RoPE by halves, causal; the wrong ones replace a method."""

    def __init__(self, d_model, num_heads, num_kv_heads):
        super().__init__()
        self.width = d_model // num_heads
        self.q_proj, self.o_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.k_proj, self.v_proj = (nn.Linear(d_model, num_kv_heads * self.width) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(self.width, eps=1e-6) for _ in range(2))

    def split(self, x):
        return x.unflatten(2, (-1, self.width)).transpose(1, 2)

    def rotate(self, x):
        angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, self.width, 2) / self.width)
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()), dim=-1)

    def keys(self, k):
        return self.rotate(self.k_norm(k))

    def values(self, k, v):
        return v

    def scale(self, scores):
        return scores / math.sqrt(self.width)

    def merge(self, heads):
        return heads.transpose(1, 2).flatten(2)

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotate(self.q_norm(q)), self.keys(k)
        k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, self.values(k, v)))
        scores = self.scale(q @ k.mT)
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
        return self.o_proj(self.merge(scores.softmax(-1) @ v))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class NumPyAttention:
    """x @ W, mask 1 = blocked."""

    def __init__(self, d_model, num_heads):
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = np.random.default_rng(5).standard_normal((4, d_model, d_model))
        self.b_o = np.full(d_model, 0.5)

    def apply(self, x, W):
        return x @ W

    def split(self, x):
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3)

    def forward(self, query, key, value, mask=None):
        q, k, v = (self.split(self.apply(x, W)) for x, W in ((query, self.W_q), (key, self.W_k), (value, self.W_v)))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = np.where(mask, -np.inf, scores)
        self.q = q  # an array of the last call, not a weight
        weights = softmax(scores)
        return self.apply((weights @ v).transpose(0, 2, 1, 3).reshape(query.shape), self.W_o) + self.b_o, weights


def numpy_function(Q, K, V, mask=None):
    scores = Q @ np.swapaxes(K, -1, -2) / np.sqrt(Q.shape[-1])
    return softmax(scores if mask is None else scores + mask) @ V


def function_of_matrices(x, W_q, W_k, W_v, W_o, num_heads, b_o=0, mask=None):
    def split(x):
        return x.reshape(*x.shape[:2], num_heads, -1).transpose(0, 2, 1, 3)

    q, k, v = (split(x @ W) for W in (W_q, W_k, W_v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = softmax(scores if mask is None else np.where(mask, scores, -1e9))
    return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ W_o + b_o, weights


def methods_only(q, k, v):
    return (q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


def positional(a, b, c):
    return methods_only(a, b, c)


GIVEN_WEIGHTS = {
    "query.weight": NumPyAttention(12, 3).W_q.T,
    "key.weight": NumPyAttention(12, 3).W_k.T,
    "value.weight": NumPyAttention(12, 3).W_v.T,
    "output.weight": NumPyAttention(12, 3).W_o.T,
    "output.bias": np.full(12, 0.5),
}


class Wrong(nn.Module):
    """A correct candidate; tests replace one of its steps."""

    def __init__(self, d_model=12, num_heads=3):
        super().__init__()
        self.num_heads, self.d_model = num_heads, d_model
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return split(x, self.num_heads)

    def merge(self, x):
        return merge(x)

    def scale(self, scores):
        return scores / math.sqrt(self.d_model // self.num_heads)

    def fill(self, scores, mask):
        return scores.masked_fill(~mask, -torch.inf)

    def softmax(self, scores):
        return scores.softmax(-1)

    def returned(self, output, weights):
        return output, weights

    def forward(self, query, key, value, mask=None):
        q, k, v = (self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        scores = self.scale(q @ k.transpose(-2, -1))
        if mask is not None:
            scores = self.fill(scores, mask)
        weights = self.softmax(scores)
        return self.returned(self.out_proj(self.merge(weights @ v)), weights)


def causal_scores(blocked):
    """Attention of heads with a causal mask of its own: `blocked` makes it from the number of rows."""

    def attend(query, key, value):
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        return torch.softmax(scores.masked_fill(blocked(query.shape[-2]), -1e9), dim=-1) @ value

    return attend
