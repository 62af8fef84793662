"""Calls of layers as requests: which rows see a key, against the weights that the service computes."""

from typing import Any

import numpy as np
import pytest

from attend.client import Client
from attend.client.model_calls import seen_rows
from attend.spec import LayerSpec

SPEC = LayerSpec(d_model=12, num_heads=3)
DRAWN = np.random.default_rng(5)
QUERY, KEY = DRAWN.standard_normal((2, 5, 12)), DRAWN.standard_normal((2, 7, 12))
BY_KEY = np.array([[0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1]], bool)
SPARSE = DRAWN.random((2, 3, 5, 7)) < 0.15
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "keys": {"attend_keys": BY_KEY, "causal": True, "query_offset": 0},
    "blocked keys": {"block_keys": ~BY_KEY, "causal": True, "query_offset": 0},
    "pairs": {"attend_mask": SPARSE[0, 0]},
    "items": {"attend_mask": SPARSE[:, 0], "causal": True, "query_offset": 0},
    "heads": {"attend_mask": SPARSE},
    "blocked": {"block_mask": ~SPARSE, "attend_keys": BY_KEY},
    "bias": {"bias": np.where(SPARSE, 0.5, -np.inf)},
}


@pytest.mark.parametrize("alone", [False, True], ids=["batch", "alone"])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_rows_that_see_no_key_are_those_with_zero_weights(client: Client, masks: dict[str, Any], alone: bool) -> None:
    request = {"query": QUERY, "key": KEY, **masks}
    if alone:
        request = {name: value[1] if isinstance(value, np.ndarray) and value.shape[0] == 2 else value for name, value in request.items()}
    client.put_layer("rows", SPEC.model_dump())
    weights = client.attend(**request, layer="rows").attention_weights
    client.delete_layer("rows")
    seen = seen_rows(request, SPEC)
    np.testing.assert_array_equal(np.broadcast_to(seen, weights.shape[:-1]), weights.sum(-1) > 0)
    assert seen.ndim == (2 if alone else 3) and (not masks or not seen.all())
