"""Multi-head attention in loops, as in a first exercise."""

import math

import numpy as np


class MultiHeadAttention:
    def __init__(self, d_model, num_heads, seed=0):
        rng = np.random.default_rng(seed)
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (rng.normal(size=(d_model, d_model)) / math.sqrt(d_model) for _ in range(4))
        self.b_q, self.b_k, self.b_v, self.b_o = (rng.normal(size=d_model) / 3 for _ in range(4))

    def __call__(self, query, key, value, attend_mask=None):
        q = query @ self.W_q + self.b_q
        k = key @ self.W_k + self.b_k
        v = value @ self.W_v + self.b_v
        batch, num_queries, d_model = q.shape
        num_keys = k.shape[1]
        d = d_model // self.num_heads
        weights = np.zeros((batch, self.num_heads, num_queries, num_keys))
        heads = np.zeros((batch, num_queries, d_model))
        for b in range(batch):
            for h in range(self.num_heads):
                columns = slice(h * d, (h + 1) * d)
                for i in range(num_queries):
                    scores = np.zeros(num_keys)
                    for j in range(num_keys):
                        scores[j] = np.sum(q[b, i, columns] * k[b, j, columns]) / math.sqrt(d)
                        if attend_mask is not None and not attend_mask[i, j]:
                            scores[j] = -np.inf
                    scores = np.exp(scores - scores.max())
                    weights[b, h, i] = scores / scores.sum()
                    for j in range(num_keys):
                        heads[b, i, columns] += weights[b, h, i, j] * v[b, j, columns]
        return heads @ self.W_o + self.b_o, weights
