"""Self-attention over packed sequences: a row may hold several, told apart by their numbers."""

from torch import nn


class PackedAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x, segment_ids=None):
        b, n, d_model = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, d_model // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if segment_ids is not None:
            same = segment_ids[:, :, None] == segment_ids[:, None, :]
            scores = scores.masked_fill(~same[:, None], float("-inf"))
        weights = scores.softmax(dim=-1)
        heads = (weights @ v).transpose(1, 2).reshape(b, n, d_model)
        return self.out_proj(heads), weights
