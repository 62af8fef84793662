"""The C extension for short calls, if the package was installed with a C compiler and it passes its self-test on this processor."""

from typing import Any

import numpy as np

try:
    from service.attention.native import _short
except ImportError:
    _short = None  # type: ignore[assignment]

TORCH = "torch"  # what computes short calls without the extension


def works(module: Any) -> bool:
    """Whether every implementation in the extension computes a small call as NumPy does, with rows that are not whole vectors."""
    items, heads, queries, keys, width = 2, 2, 3, 5, 6
    rng = np.random.default_rng(0)
    matrices = tuple(rng.standard_normal((4, width, width)).astype(np.float32))
    biases = tuple(rng.standard_normal((4, width)).astype(np.float32))
    query, key, value = (rng.standard_normal((items, rows, width)).astype(np.float32) for rows in (queries, keys, keys))
    projected = (x @ matrix.T + bias for x, matrix, bias in zip((query, key, value), matrices, biases, strict=False))
    q, k, v = (x.reshape(items, -1, heads, width // heads).swapaxes(1, 2) for x in projected)
    exponentials = np.exp(0.5 * q @ k.swapaxes(2, 3))
    expected_weights = exponentials / exponentials.sum(-1, keepdims=True)
    merged = (expected_weights @ v).swapaxes(1, 2).reshape(items, queries, width)
    expected_output = merged @ matrices[3].T + biases[3]
    for variant in module.variants:
        output, weights = np.zeros_like(expected_output), np.zeros_like(expected_weights)
        layer = module.layer(width, heads, variant, matrices, biases)
        if not module.attend(layer, items, queries, keys, 0.5, query, key, value, output, weights):
            return False
        if not (np.allclose(output, expected_output, atol=1e-4) and np.allclose(weights, expected_weights, atol=1e-4)):
            return False
    return True


extension: Any = _short if _short is not None and works(_short) else None


def variant() -> str:
    """What computes short calls here: an instruction set that the extension uses, or TORCH."""
    return TORCH if extension is None else extension.variants[0]
