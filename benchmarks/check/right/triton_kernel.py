"""A kernel in Triton with an online softmax over blocks of keys, under Triton's interpreter."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(Q, K, V, Out, n, m, scale, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    inside = columns < D
    q = tl.load(Q + (head * n + row) * D + columns, mask=inside, other=0.0)
    best = -float("inf")
    total = 0.0
    acc = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(0, m, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        at = (head * m + keys[:, None]) * D + columns[None, :]
        here = (keys[:, None] < m) & inside[None, :]
        k = tl.load(K + at, mask=here, other=0.0)
        s = tl.where(keys < m, tl.sum(q[None, :] * k, 1) * scale, -float("inf"))
        new = tl.maximum(best, tl.max(s, 0))
        p = tl.exp(s - new)
        alpha = tl.exp(best - new)
        v = tl.load(V + at, mask=here, other=0.0)
        total = total * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * v, 0)
        best = new
    tl.store(Out + (head * n + row) * D + columns, acc / total, mask=inside)


def triton_attention(q, k, v):
    """q, k, v: [batch, heads, length, head_dim]."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    b, h, n, d = q.shape
    out = torch.empty_like(q)
    _forward[(n, b * h)](q, k, v, out, n, k.shape[2], d**-0.5, D=d, WIDTH=triton.next_power_of_2(d), BLOCK=64)
    return out
