"""The oracle of converted layers: attention in NumPy float64 for every feature that a checkpoint can have, as its models define it.

It shares only the spec's fields with the service, and nothing with the frameworks whose outputs it reproduces.
"""

import math

import numpy as np


def attend(
    spec, weights, *, query, key=None, value=None, attend_keys=None, attend_mask=None, valid_lens=None, causal=False, fully_masked="zero"
):
    """(output [b, q, out], attention_weights [b, h, q, k]) of a LayerSpec with canonical weights; queries have the positions 0, 1, 2, …"""
    key = query if key is None else key
    value = key if value is None else value
    w = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    q = split(project(query, w, "query"), spec.num_heads)
    k = split(project(key, w, "key"), spec.num_kv_heads)
    v = split(project(value, w, "value"), spec.num_kv_heads)
    if spec.qk_norm:
        q, k = (norm(x, w[f"{name}_norm.weight"], spec.qk_norm) for x, name in ((q, "query"), (k, "key")))
    if spec.rope:
        q, k = rotate(q, spec.rope), rotate(k, spec.rope)
    group = spec.num_heads // spec.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = spec.scale * np.einsum("bhqd,bhkd->bhqk", q, k)
    if spec.softcap:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    ahead = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]  # [q, k]
    if spec.alibi:
        scores = scores - slopes(spec.num_heads)[:, None, None] * np.abs(ahead)
    if spec.relative_bias:
        scores = scores + w["relative_bias"][buckets(ahead, spec.relative_bias)].transpose(2, 0, 1)
    open_ = opened(scores.shape, ahead, spec, attend_keys, attend_mask, valid_lens, causal)
    attention_weights = softmax(np.where(open_, scores, -np.inf), w.get("sinks"))
    if fully_masked == "uniform":
        attention_weights[~open_.any(-1)] = 1 / k.shape[2]
    heads = np.einsum("bhqk,bhkd->bqhd", attention_weights, v)
    return project(heads.reshape(*heads.shape[:2], -1), w, "output"), attention_weights


def project(x, w, name):
    return np.asarray(x, np.float64) @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def split(x, heads):
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def norm(x, weight, kind):
    centred = x - x.mean(-1, keepdims=True) if kind.kind == "layer" else x
    return weight * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + kind.eps)


def rotate(x, rope):
    """Each pair (a, b) of the first dims as a complex number, rotated by position x frequency."""
    dims = rope.dims or x.shape[-1]
    frequencies = scaled(rope.theta ** (-np.arange(0, dims, 2) / dims), rope.scaling)
    first = np.arange(0, dims, 2) if rope.interleaved else np.arange(dims // 2)
    second = first + 1 if rope.interleaved else first + dims // 2
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * np.arange(x.shape[2])[:, None] * frequencies)
    result = x.copy()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def scaled(frequencies, scaling):
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    waves = scaling.original_max_position * frequencies / (2 * math.pi)  # rotations of each pair within the original context
    kept = np.clip((waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def slopes(heads):
    """Press et al.: powers of 2^(-8/n) for n a power of two, and every other one of 2n's for the heads beyond."""
    power = 2 ** math.floor(math.log2(heads))
    own = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    beyond = [2 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return np.array(own + beyond)


def buckets(ahead, bias):
    """T5: exact for short distances, logarithmic up to max_distance; in two halves if it is bidirectional."""
    count = bias.buckets // 2 if bias.bidirectional else bias.buckets
    offset = np.where(ahead > 0, count, 0) if bias.bidirectional else 0
    distance = np.abs(ahead) if bias.bidirectional else np.maximum(-ahead, 0)
    exact = count // 2
    large = exact + np.log(np.maximum(distance, 1) / exact) / math.log(bias.max_distance / exact) * (count - exact)
    return offset + np.where(distance < exact, distance, np.minimum(large.astype(int), count - 1))


def opened(shape, ahead, spec, attend_keys, attend_mask, valid_lens, causal):
    """Which keys each query may see, [b, h, q, k]."""
    result = np.ones(shape, bool)
    if attend_keys is not None:
        result &= np.asarray(attend_keys, bool)[:, None, None, :]
    if attend_mask is not None:
        mask = np.asarray(attend_mask, bool)
        result &= mask[:, None] if mask.ndim == 3 else mask
    if valid_lens is not None:
        lens = np.asarray(valid_lens)
        result &= np.arange(shape[3]) < (lens[:, None] if lens.ndim == 1 else lens)[:, None, :, None]
    if causal:
        result &= ahead <= 0
    if spec.window and spec.window.left is not None:
        result &= ahead >= -spec.window.left
    if spec.window and spec.window.right is not None:
        result &= ahead <= spec.window.right
    return result


def softmax(scores, sinks=None):
    """Softmax over the keys; a sink is one more logit per head, whose weight is dropped."""
    extra = np.full((*scores.shape[:3], 1), -np.inf) if sinks is None else np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    every = np.concatenate([scores, extra], axis=-1)
    highest = every.max(-1, keepdims=True)
    exponentials = np.exp(every - np.where(np.isneginf(highest), 0, highest))
    total = exponentials.sum(-1, keepdims=True)
    return (exponentials / np.where(total == 0, 1, total))[..., :-1]
