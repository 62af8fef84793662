"""Causal attention that decodes with a cache of keys and values, returned by each call."""

import torch
from torch import nn
from torch.nn import functional


class CachedAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_model // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, past=None):
        b, n, _ = x.shape
        q, k, v = (layer(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        total = k.shape[2]
        rows = torch.arange(total - n, total, device=x.device)
        columns = torch.arange(total, device=x.device)
        visible = columns[None, :] <= rows[:, None]
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5
        weights = functional.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        heads = weights @ v
        return self.o_proj(heads.transpose(1, 2).reshape(b, n, -1)), (k, v)
