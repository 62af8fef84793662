"""Layers in torch, as applications and courses have them."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class AutoIntAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.attention_dim = num_heads, embed_dim // num_heads
        self.W_q = nn.Linear(embed_dim, embed_dim)
        self.W_k = nn.Linear(embed_dim, embed_dim)
        self.W_v = nn.Linear(embed_dim, embed_dim)
        self.W_out = nn.Linear(embed_dim, embed_dim)

    def split(self, x):
        return x.view(x.shape[0], self.num_heads, -1, self.attention_dim)

    def forward(self, query, key, value):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / self.attention_dim**0.5
        out = torch.matmul(scores.softmax(dim=-1), v)
        return self.W_out(out.transpose(1, 2).reshape(query.shape[0], -1, self.num_heads * self.attention_dim))


class ScratchAttention(nn.Module):
    def __init__(self, hidden_dim, num_heads):
        super().__init__()
        self.num_heads, self.qkv_dim = num_heads, hidden_dim // num_heads
        self.qkv_proj = nn.Linear(hidden_dim, 3 * hidden_dim, bias=False)
        self.o_proj = nn.Linear(hidden_dim, hidden_dim, bias=False)

    def forward(self, x):
        batch_size, sequence_length, hidden_dim = x.size()
        qkv = self.qkv_proj(x).reshape(batch_size, sequence_length, 3, self.num_heads, self.qkv_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = F.softmax(q @ k.mT / math.sqrt(self.qkv_dim), dim=-1)
        values = attn @ v
        values = values.reshape(batch_size, sequence_length, hidden_dim)
        return self.o_proj(values)


class VitAttention(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads = heads
        self.scale = dim**-0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        attn = (torch.einsum("bhid,bhjd->bhij", q, k) * self.scale).softmax(dim=-1)
        return self.to_out(torch.einsum("bhij,bhjd->bhid", attn, v).transpose(1, 2).flatten(2))


class PerceiverAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qk_head_dim = d_model // num_heads
        self.q, self.k, self.v, self.projection = (nn.Linear(d_model, d_model) for _ in range(4))
        self.scale = self.qk_head_dim**-0.5

    def transform(self, x):
        return x.unflatten(2, (self.num_heads, self.qk_head_dim)).transpose(1, 2)

    def forward(self, inputs_q, inputs_kv, attention_mask=None):
        q, k, v = self.transform(self.q(inputs_q)), self.transform(self.k(inputs_kv)), self.transform(self.v(inputs_kv))
        attention = q @ k.transpose(-2, -1) / self.scale
        if attention_mask is not None:
            attention = attention.masked_fill(attention_mask == 0, torch.finfo(attention.dtype).min)
        return self.projection((attention.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class ClipAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, hidden_states):
        scale = 1.0 / math.sqrt(self.num_heads)
        q, k, v = (p(hidden_states).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        probabilities = torch.softmax(q * scale @ k.mT, dim=-1)
        return self.out_proj((probabilities @ v).transpose(1, 2).flatten(2))


class UNetAttention(nn.Module):
    """Self-attention of a diffusion model, with einsum over i (queries) and j (keys)."""

    def __init__(self, n_channels, n_heads):
        super().__init__()
        self.n_heads, self.d_k = n_heads, n_channels // n_heads
        self.projection = nn.Linear(n_channels, n_heads * self.d_k * 3)
        self.output = nn.Linear(n_heads * self.d_k, n_channels)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.n_heads, self.d_k)) for t in torch.chunk(self.projection(x), 3, dim=-1))
        attn = torch.einsum("bihd,bjhd->bijh", q, k) * self.d_k**-0.5
        attn = attn.softmax(dim=1)
        return self.output(torch.einsum("bijh,bjhd->bihd", attn, v).flatten(2))


class BarkAttention(nn.Module):
    def __init__(self, n_embd, n_head, dropout=0.1):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class EvaAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attn_mask=None):
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attn = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        if attn_mask is not None:
            attn = attn.masked_fill(~attn_mask, 0.0)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class PooledAttention(nn.Module):
    """A mask of ones and zeros: zeros are not looked at."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w, x in ((self.W_q, query), (self.W_k, key), (self.W_v, value))
        )
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            logits = logits * mask
        return self.W_o((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class LabelAttention(nn.Module):
    """padding_mask: true for tokens that are padding."""

    def __init__(self, embedding_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query_proj, self.key_proj, self.value_proj, self.out_proj = (nn.Linear(embedding_dim, embedding_dim) for _ in range(4))

    def forward(self, query, key, value, padding_mask=None):
        q, k, v = self.query_proj(query), self.key_proj(key), self.value_proj(value)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        attn_mask = None if padding_mask is None else padding_mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class DetrEncoderAttention(nn.Module):
    """key_padding_mask: true for padding; the inner layer gets one mask for each item and head."""

    def __init__(self, d_model, nhead):
        super().__init__()
        self.nhead = nhead
        self.self_attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)

    def forward(self, src, key_padding_mask=None):
        mask = None
        if key_padding_mask is not None:
            mask = key_padding_mask[:, None, :].expand(-1, src.shape[1], -1).repeat(self.nhead, 1, 1)
        return self.self_attn(src, src, src, attn_mask=mask, need_weights=False)[0]


class MoleculeAttention(nn.Module):
    """key_mask: ones for atoms, zeros for padding."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value, key_mask=None):
        if key_mask is not None:
            key = key * key_mask[..., None]
            value = value * key_mask[..., None]
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f, x in ((self.q, query), (self.k, key), (self.v, value)))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        weights = scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class MegatronAttention(nn.Module):
    """One matrix whose rows are [heads, (query, key, value), head_dim]."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states):
        q, k, v = self.query_key_value(hidden_states).chunk(3, dim=-1)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SegmentationAttention(nn.Module):
    """scores of all heads side by side: [batch, queries, heads, keys]."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_linear, self.k_linear, self.v_linear, self.o_linear = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, q, k, v):
        qh = self.q_linear(q).unflatten(-1, (self.num_heads, -1))
        kh = self.k_linear(k).unflatten(-1, (self.num_heads, -1))
        vh = self.v_linear(v).unflatten(-1, (self.num_heads, -1))
        weights = torch.einsum("bqnc,bknc->bqnk", qh * qh.shape[-1] ** -0.5, kh)
        weights = F.softmax(weights.flatten(2), dim=-1).view(weights.size())
        return self.o_linear(torch.einsum("bqnk,bknc->bqnc", weights, vh).flatten(2))


class AlibiAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def slopes(self):
        return torch.tensor([2 ** (-8 * (i + 1) / self.num_heads) for i in range(self.num_heads)])

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (p(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        distance = torch.arange(n) - torch.arange(n)[:, None]
        bias = self.slopes().view(-1, 1, 1) * distance
        bias = bias.masked_fill(distance > 0, float("-inf"))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class CappedAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, softcap=2.0):
        super().__init__()
        self.num_heads, self.softcap = num_heads, softcap
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))

    def forward(self, hidden_states):
        q, k, v = (p(hidden_states).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        A = q @ k.mT * q.shape[-1] ** -0.5
        A = self.softcap * torch.tanh(A)
        return self.o_proj((A.softmax(-1) @ v).transpose(1, 2).flatten(2))


class WindowAttention(nn.Module):
    """Causal, with a window of 4 keys including the query's own; the path without flash attention."""

    def __init__(self, hidden_size, num_heads, sliding_window=4):
        super().__init__()
        self.num_heads, self.sliding_window = num_heads, sliding_window
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))

    def forward(self, hidden_states):
        n = hidden_states.shape[1]
        q, k, v = (p(hidden_states).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(y.transpose(1, 2).flatten(2))
