"""Multi-head attention as tutorials write it in plain NumPy: square matrices applied as x @ W, float64, heads side by side. NumPy alone."""

import numpy as np
from casefile import case, draw, save


class MultiHeadAttention:
    """The class of a hundred blog posts. `W_q` and the others are [d_model, d_model]; heads are columns of what they give."""

    def __init__(self, d_model, num_heads, seed):
        stream = np.random.RandomState(seed)
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (stream.standard_normal((d_model, d_model)) * 0.5 for _ in range(4))

    def split(self, x):
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.num_heads, self.d_k).transpose(0, 2, 1, 3)

    def __call__(self, q, k, v, mask=None):
        q, k, v = self.split(q @ self.W_q), self.split(k @ self.W_k), self.split(v @ self.W_v)
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(self.d_k)
        if mask is not None:
            scores = np.where(mask, scores, -1e9)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        weights = scores / scores.sum(-1, keepdims=True)
        context = (weights @ v).transpose(0, 2, 1, 3)
        return context.reshape(*context.shape[:2], -1) @ self.W_o, weights


def main():
    layer = MultiHeadAttention(15, 3, seed=9)
    checkpoint = {name: getattr(layer, name) for name in ("W_q", "W_k", "W_v", "W_o")}
    query, key, value = (draw(seed, 2, n, 15).astype(np.float64) for seed, n in ((1, 4), (2, 7), (3, 7)))
    mask = np.array([[1, 1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    load, cases = {"spec": {"num_heads": 3}}, []
    for about, request, arguments in (
        ("self-attention, causal", {"query": query, "causal": True}, (query, query, query, np.tril(np.ones((4, 4), bool)))),
        ("with a mask", {"query": query, "key": key, "value": value, "attend_mask": mask.tolist()}, (query, key, value, mask.astype(bool))),
    ):
        output, weights = layer(*arguments)
        cases.append(case(about, load, request | {"fully_masked": "uniform"}, output, weights, tolerance=1e-12))
    save("numpy", "plain NumPy, float64", {"numpy": np.__version__}, checkpoint, cases)


if __name__ == "__main__":
    main()
