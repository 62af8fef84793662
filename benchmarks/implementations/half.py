"""A causal module in bfloat16 that takes its softmax in float32."""

import torch
from torch import nn


class HalfAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_model // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (layer(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scores = q.float() @ k.float().transpose(-1, -2) * self.head_dim**-0.5
        rows = torch.arange(n, device=x.device)
        scores = torch.where(rows[None, :] <= rows[:, None], scores, -torch.inf)
        weights = scores.softmax(dim=-1)
        heads = weights.to(v.dtype) @ v
        return self.o_proj(heads.transpose(1, 2).reshape(b, n, -1)), weights
