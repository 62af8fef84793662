"""The layer that every contender serves: torch's multi-head attention, seed 42."""

import os

import torch

D_MODEL, NUM_HEADS = int(os.environ["D_MODEL"]), int(os.environ["NUM_HEADS"])
torch.set_num_threads(1)
torch.manual_seed(42)
LAYER = torch.nn.MultiheadAttention(D_MODEL, NUM_HEADS, batch_first=True).eval()


@torch.inference_mode()
def attend(query, key, value, blocked=None):
    """[batch, n, d_model] three times -> output [batch, n, d_model], weights [batch, heads, n, n]; `blocked`: [n, n]."""
    output, weights = LAYER(query, key, value, attn_mask=blocked, average_attn_weights=False)
    return output.contiguous(), weights.contiguous()
