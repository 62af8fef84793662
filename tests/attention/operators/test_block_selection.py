"""Mixture of block attention: a second implementation (see `support/oracles.py`), and what is particular to it."""

import math
from typing import Any

import numpy as np

from attend.client import Client
from support.operator_cases import LAYER

RNG = np.random.default_rng(0)
PLAIN: dict[str, Any] = {"d_model": 15, "num_heads": 3, "dtype": "float64", "seed": 5}


def selected(spec, position, query, keys):
    """The keys of the query's own block, and of the best earlier ones."""
    size, own = spec.block_selection.block_size, math.floor(position / spec.block_selection.block_size)
    blocks: dict[int, list[int]] = {}
    for j in range(len(keys)):
        blocks.setdefault(j // size, []).append(j)
    products = [(-math.fsum(query * sum(keys[j] for j in block) / len(block)), c) for c, block in blocks.items() if c < own]
    best = [c for _, c in sorted(products)[: spec.block_selection.top_k - 1]]
    return {j for c in (own, *best) for j in blocks.get(c, [])}


def weights_of(client: Client, layer: dict[str, Any], x: Any) -> Any:
    client.put_layer(LAYER, {**PLAIN, **layer})
    return client.attend(x, layer=LAYER, causal=True, outputs=["attention_weights"]).attention_weights


def test_as_many_blocks_as_there_are_select_every_key(client: Client) -> None:
    x = RNG.standard_normal((2, 11, 15))
    np.testing.assert_allclose(
        weights_of(client, {"block_selection": {"block_size": 4, "top_k": 3}}, x), weights_of(client, {}, x), rtol=0, atol=1e-13
    )


def test_one_block_is_the_query_s_own(client: Client) -> None:
    """As Llama 4's chunks, which are blocks of positions."""
    x = RNG.standard_normal((2, 11, 15))
    np.testing.assert_allclose(
        weights_of(client, {"block_selection": {"block_size": 4, "top_k": 1}}, x),
        weights_of(client, {"chunk_size": 4}, x),
        rtol=0,
        atol=1e-13,
    )


def test_each_head_selects_blocks_of_its_own(client: Client) -> None:
    seen = np.asarray(weights_of(client, {"block_selection": {"block_size": 2, "top_k": 2}}, RNG.standard_normal((1, 12, 15)))) > 0
    assert (seen[0, :, 11].sum(-1) == 4).all()
    assert len({tuple(row) for row in seen[0, :, 11].tolist()}) > 1


def test_a_masked_key_that_overflows_adds_nothing_to_the_mean_of_its_block(client: Client) -> None:
    """No number of its projection is finite in float32, by the gain; that of zeros, which has no bias, adds 0."""
    x = RNG.standard_normal((1, 11, 15)).astype(np.float32)
    client.put_layer(LAYER, {**PLAIN, "dtype": "float32", "bias": False, "gain": 100.0, "block_selection": {"block_size": 4, "top_k": 2}})
    large, zero = x.copy(), x.copy()
    large[0, 1], zero[0, 1] = np.sign(x[0, 1]) * 3e38, 0
    fields: dict[str, Any] = {"layer": LAYER, "causal": True, "attend_keys": [[0 if j == 1 else 1 for j in range(11)]]}
    ours, expected = (client.attend(x, key, x, **fields).attention_weights for key in (large, zero))
    np.testing.assert_array_equal(ours, expected)
