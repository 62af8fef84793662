"""Metrics of values and outputs: what a weight is applied to matters as much as the weight (Kobayashi et al. 2020).

A head's value vector reaches the output as f(x_j) = v_j W_h^T, without the output's bias. Its norm comes from v W_h^T W_h v^T, so that
[h, k, output_dim] is never held.
"""

import torch
from torch import Tensor


def value_norms(value: Tensor, weight: Tensor | None, groups: int, real: Tensor) -> Tensor:
    """[b, h, k]: |f(x_j)| for each head, from values [b, kv heads, k, d] and the output projection [out, h * d]; NaN for padding.

    `groups` query heads share a head of values; `real` [b|1, k] tells keys from padding.
    """
    b, kv, k, d = value.shape
    exact = value.double()
    if weight is None:
        norms = exact.square().sum(-1).sqrt().repeat_interleave(groups, 1)
    else:
        of_heads = weight.double().view(len(weight), kv, groups, d)
        forms = torch.einsum("ogad,ogae->gade", of_heads, of_heads)  # W_h^T W_h, [kv, groups, d, d]
        norms = torch.stack([((exact @ forms[:, a]) * exact).sum(-1) for a in range(groups)], 2).flatten(1, 2).clamp(min=0).sqrt()
    return norms.view(b, kv * groups, k).masked_fill(~real[:, None], torch.nan)


def subspace_products(value: Tensor, real: Tensor) -> Tensor:
    """[b, kv heads, kv heads]: <V_i, V_j> over the real keys, each head's values as one long vector.

    Counting a head of values once for every query head that shares it would change no mean over pairs.
    """
    flat = value.double().masked_fill(~real[:, None, :, None], 0).flatten(2)
    return flat @ flat.transpose(1, 2)


def output_products(heads: Tensor, counts: Tensor) -> Tensor:
    """[b, h, h]: <O_i, O_j> of head outputs [b, h, q, d] over the rows that count [b, h, q]."""
    flat = heads.double().masked_fill(~counts[..., None], 0).flatten(2)
    return flat @ flat.transpose(1, 2)
