"""Embeddings and buckets of distances, copied from transformers 5.23."""

import torch


def xlnet_sinusoids(distances, d_model):
    """transformers' XLNetModel.positional_embedding, 5.23."""
    inverse = 1 / torch.pow(10000, torch.arange(0, d_model, 2.0, dtype=torch.float64) / d_model)
    sinusoid = torch.einsum("i,d->id", distances, inverse)
    return torch.cat([torch.sin(sinusoid), torch.cos(sinusoid)], dim=-1)


def deberta_bucket(relative_pos, bucket_size, max_position):
    """transformers' make_log_bucket_position of DeBERTa-v2, 5.23."""
    sign = torch.sign(relative_pos)
    mid = bucket_size // 2
    abs_pos = torch.where((relative_pos < mid) & (relative_pos > -mid), torch.tensor(mid - 1), torch.abs(relative_pos))
    log_pos = torch.ceil(torch.log(abs_pos / mid) / torch.log(torch.tensor((max_position - 1) / mid)) * (mid - 1)) + mid
    return torch.where(abs_pos <= mid, relative_pos.type_as(log_pos), log_pos * sign).long()
