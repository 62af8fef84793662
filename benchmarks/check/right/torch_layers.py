"""torch's own, where more than a name is needed."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention


def flex_causal(query, key, value):
    """FlexAttention with a score_mod."""
    blocked = -float("inf")
    return flex_attention(query, key, value, score_mod=lambda score, b, h, i, j: torch.where(j <= i, score, blocked))


class FlexCapped(nn.Module):
    """FlexAttention with a soft cap, as in Gemma 2."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).contiguous() for p in (self.q_proj, self.k_proj, self.v_proj))
        y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: 2.0 * torch.tanh(score / 2.0))
        return self.o_proj(y.transpose(1, 2).flatten(2))


encoder_attention = nn.TransformerEncoderLayer(24, 3, dim_feedforward=8, batch_first=True).self_attn
decoder_cross_attention = nn.TransformerDecoderLayer(24, 3, dim_feedforward=8, batch_first=True).multihead_attn
