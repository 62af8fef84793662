"""The C extension for short calls and decoding steps, if the package was installed with a C compiler and it passes its self-test here."""

from typing import Any

import numpy as np

try:
    from attend.attention.native import _short
except ImportError:
    _short = None  # type: ignore[assignment]  # in place of a module

TORCH = "torch"  # what computes them without the extension


def passes_self_test(module: Any) -> bool:
    """Whether every implementation in the extension computes small calls as NumPy does, with rows that are not whole vectors."""
    try:
        return all(_computes(module, variant) and _decodes(module, variant) for variant in module.variants)
    except (AttributeError, TypeError):  # a build of older sources
        return False


def _computes(module: Any, variant: str) -> bool:
    """Whether the implementation computes a call without masks, and one with every kind of mask."""
    items, heads, queries, keys, width = 2, 2, 3, 5, 6
    rng = np.random.default_rng(0)
    matrices = tuple(rng.standard_normal((4, width, width)).astype(np.float32))
    biases = tuple(rng.standard_normal((4, width)).astype(np.float32))
    query, key, value = (rng.standard_normal((items, rows, width)).astype(np.float32) for rows in (queries, keys, keys))
    projected = (x @ matrix.T + bias for x, matrix, bias in zip((query, key, value), matrices, biases, strict=False))
    q, k, v = (x.reshape(items, -1, heads, width // heads).swapaxes(1, 2) for x in projected)
    layer, addresses = module.layer(width, heads, variant, matrices, biases), [x.ctypes.data for x in (query, key, value)]
    for masks, addends, scale in ((), np.float32(0), 1), _masks(rng):
        exponentials = np.exp(0.5 * q @ k.swapaxes(2, 3) + addends)
        expected_weights = exponentials / np.maximum(exponentials.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
        merged = (scale * (expected_weights @ v)).swapaxes(1, 2).reshape(items, queries, width)
        expected_output = merged @ matrices[3].T + biases[3]
        output, weights = np.zeros_like(expected_output, np.float32), np.zeros_like(expected_weights, np.float32)
        if not module.attend(layer, items, queries, keys, 0.5, *addresses, output, weights, *masks):
            return False
        if not (np.allclose(output, expected_output, atol=1e-4) and np.allclose(weights, expected_weights, atol=1e-4)):
            return False
        if masks and (masks[0][0] != ~(exponentials > 0).any(-1)).any():
            return False
    return True


def _masks(rng: Any) -> tuple[tuple[Any], Any, Any]:
    """Masks of every kind for calls of [2, 2, 3, 5], the same as numbers that are added to the scores, and factors of the heads."""
    positions, lengths = np.array([[2, 3, 4]]), np.array([[3, 4, 4], [5, 5, 0]])
    attend_mask, attend_keys = rng.random((2, 2, 3, 5)) < 0.8, np.array([[True, True, False, True, True]])
    of_queries, of_keys = np.array([[1, 1, 2], [2, 2, 2]]), np.array([[1, 1, 1, 2, 2], [1, 2, 2, 2, 2]])
    bias, head_scale = rng.standard_normal((1, 2, 1, 5)).astype(np.float32), np.array([0.5, 2], np.float32).reshape(1, 2, 1, 1)
    bias[0, 1, 0, 4] = -np.inf
    j, p = np.arange(5), positions[..., None]
    visible = (p - 3 <= j) & (j <= p) & (j // 4 == p // 4) & (j < lengths[..., None]) & attend_keys[:, None]
    visible = (visible & (of_queries[..., None] == of_keys[:, None]))[:, None] & attend_mask
    tensors = positions, lengths, attend_mask, attend_keys, of_queries, of_keys, bias, head_scale
    return ((np.zeros((2, 2, 3), np.bool_), 3, 0, 4, *tensors),), np.where(visible, bias, np.float32(-np.inf)), head_scale


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
