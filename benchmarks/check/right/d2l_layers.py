"""Multi-head attention as in Dive into Deep Learning: one batch of heads, valid lengths, a class for the scaled products."""

import math

import torch
from torch import nn


def masked_softmax(X, valid_lens):
    if valid_lens is None:
        return nn.functional.softmax(X, dim=-1)
    shape = X.shape
    valid_lens = torch.repeat_interleave(valid_lens, shape[1]) if valid_lens.dim() == 1 else valid_lens.reshape(-1)
    X = X.reshape(-1, shape[-1])
    beyond = torch.arange(shape[-1])[None, :] >= valid_lens[:, None]
    return nn.functional.softmax(X.masked_fill(beyond, -1e6).reshape(shape), dim=-1)


class MultiHeadAttention(nn.Module):
    def __init__(self, num_hiddens, num_heads, dropout, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(num_hiddens, num_hiddens, bias=bias) for _ in range(4))

    def transpose_qkv(self, X):
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        return X.reshape(-1, X.shape[2], X.shape[3])

    def forward(self, queries, keys, values, valid_lens=None):
        queries, keys, values = (
            self.transpose_qkv(self.W_q(queries)),
            self.transpose_qkv(self.W_k(keys)),
            self.transpose_qkv(self.W_v(values)),
        )
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        output = torch.bmm(self.dropout(masked_softmax(scores, valid_lens)), values)
        output = output.reshape(-1, self.num_heads, output.shape[1], output.shape[2]).permute(0, 2, 1, 3)
        return self.W_o(output.reshape(output.shape[0], output.shape[1], -1))
