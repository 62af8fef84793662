"""Attention written with einops, and as a lucidrains library has it."""

import torch
from einops import rearrange
from torch import nn


class EinopsAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        q, k, v = (
            rearrange(f(t), "b n (h d) -> b h n d", h=self.heads) for f, t in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            sim = sim.masked_fill(~rearrange(mask, "b j -> b 1 1 j"), -torch.finfo(sim.dtype).max)
        return self.to_out(rearrange(torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v), "b h n d -> b n (h d)"))


def __getattr__(name):
    if name == "x_transformers_layer":
        from x_transformers.x_transformers import Attention

        return Attention(24, dim_head=8, heads=3).eval()
    raise AttributeError(name)
