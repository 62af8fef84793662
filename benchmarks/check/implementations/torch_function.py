"""Scaled dot-product attention of heads that are already projected, with a mask that is added."""

import math

import torch


def attention(query, key, value, attn_bias=None):
    d = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d)
    if attn_bias is not None:
        scores = scores + attn_bias
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, value), weights
