"""Attention computed from the tensors of a checkpoint layout, and the layer that was read from them, for tests of layouts.

Sizes are unequal primes wherever a layout allows it, so that a transposed matrix does not fit. Where it must be square,
the comparison of the numbers detects it.
"""

import numpy as np

from attend.checkpoints import read_layer
from attend.spec import LayerSpec
from support import plain_attention

B, Q, K = 2, 3, 5


def draw(seed, *shape):
    return np.random.RandomState(seed).standard_normal(shape)


def output_of_layer(checkpoint, inputs, request=None, **how):
    """Output of the layer that was read, after checking that its weights are those of its spec."""
    fields, weights = read_layer(checkpoint, **how)
    spec = LayerSpec.model_validate(fields)
    assert {name: w.shape for name, w in weights.items()} == spec.weight_shapes()
    return plain_attention.attend(spec, weights, **dict(zip(("query", "key", "value"), inputs, strict=False)), **(request or {}))[0]


def attend_heads(q, k, v, scale=None, added=0.0):
    """softmax(q kᵀ scale + added) v: [b, h, n, d] each -> [b, q, h, d]."""
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + added
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bhkd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def split_heads(x, heads):
    """[b, n, h*d] -> [b, h, n, d], head i the i-th stretch of columns."""
    return np.stack(np.split(x, heads, axis=-1), axis=1)


def with_prefix(prefix, **arrays):
    return {f"{prefix}.{name.replace('__', '.')}": x for name, x in arrays.items()}


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
