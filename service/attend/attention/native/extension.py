"""The C extension for short calls and decoding steps, if the package was installed with a C compiler and it passes its self-test here."""

from typing import Any

import numpy as np

try:
    from attend.attention.native import _short
except ImportError:
    _short = None  # type: ignore[assignment]

TORCH = "torch"  # what computes them without the extension


def passes_self_test(module: Any) -> bool:
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
        if not module.attend(layer, items, queries, keys, 0.5, *(x.ctypes.data for x in (query, key, value)), output, weights):
            return False
        if not (np.allclose(output, expected_output, atol=1e-4) and np.allclose(weights, expected_weights, atol=1e-4)):
            return False
    try:
        return all(_decodes(module, variant) for variant in module.variants)
    except (AttributeError, TypeError):  # a build of older sources
        return False


def _decodes(module: Any, variant: str) -> bool:
    """Whether the implementation attends to two pages as NumPy does, with rows that are not whole vectors."""
    kv_heads, group, width = 2, 3, 16
    rng = np.random.default_rng(0)
    query = rng.standard_normal((kv_heads, group, width)).astype(np.float32)
    pages = [tuple(rng.standard_normal((2, kv_heads, rows, width)).astype(np.float32)) for rows in (7, 5)]
    key, value = (np.concatenate((first[:, 2:], second[:, :3]), 1) for first, second in zip(*pages, strict=True))
    bias = rng.standard_normal((kv_heads, group, 8)).astype(np.float32)
    exponentials = np.exp(0.5 * query @ key.swapaxes(1, 2) + bias)
    totals = exponentials.sum(-1, keepdims=True)
    output, log_sum_exp = np.zeros_like(query), np.zeros((kv_heads, group), np.float32)
    parts = tuple((*page, *rows) for page, rows in zip(pages, ((2, 7), (0, 3)), strict=True))
    is_finite = module.attend_cache(variant, 1, kv_heads, group, width, 0.5, query, parts, bias, output, log_sum_exp)
    return (
        is_finite
        and np.allclose(output, exponentials @ value / totals, atol=1e-4)
        and np.allclose(log_sum_exp, np.log(totals[..., 0]), atol=1e-4)
    )


extension: Any = _short if _short is not None and passes_self_test(_short) else None


def variant() -> str:
    """What computes short calls and decoding steps here: an instruction set that the extension uses, or TORCH."""
    return TORCH if extension is None else extension.variants[0]
