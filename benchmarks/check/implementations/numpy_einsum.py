"""Multi-head attention by einsum, with a head axis in the weights."""

import numpy as np


class EinsumAttention:
    def __init__(self, d_model, num_heads, seed=1):
        rng = np.random.default_rng(seed)
        head_dim = d_model // num_heads
        self.num_heads = num_heads
        self.scale = head_dim**-0.5
        self.w_q, self.w_k, self.w_v = (rng.normal(size=(num_heads, d_model, head_dim)) * d_model**-0.5 for _ in range(3))
        self.w_o = rng.normal(size=(num_heads, head_dim, d_model)) * d_model**-0.5

    def softmax(self, x):
        x = x - np.max(x, axis=-1, keepdims=True)
        e = np.exp(x)
        return e / np.sum(e, axis=-1, keepdims=True)

    def __call__(self, query, key, value, attend_mask=None):
        q = np.einsum("bnd,hde->bhne", query, self.w_q)
        k = np.einsum("bnd,hde->bhne", key, self.w_k)
        v = np.einsum("bnd,hde->bhne", value, self.w_v)
        scores = np.einsum("bhqe,bhke->bhqk", q, k) * self.scale
        if attend_mask is not None:
            scores = np.where(attend_mask, scores, -1e30)
        weights = self.softmax(scores)
        heads = np.einsum("bhqk,bhke->bhqe", weights, v)
        return np.einsum("bhqe,hed->bqd", heads, self.w_o), weights
