"""The indexer: keys whose index scores differ by less than float32 tells."""

import numpy as np
import pytest

from attend.attention.initialization import draw_weights
from attend.attention.reference.forward import attend
from attend.client import Client
from attend.spec import LayerSpec
from support.operator_cases import LAYER

SPEC = LayerSpec(d_model=15, num_heads=3, dtype="float64", seed=5, indexer={"num_heads": 8, "head_dim": 131, "top_k": 11})


@pytest.mark.parametrize("copies", [1, 13], ids=["few close keys", "keys that are all close"])
def test_keys_that_float32_does_not_tell_apart_are_selected_by_float64(client: Client, copies: int) -> None:
    """Copies of a key differ by 1e-9: a selection in float32 takes others of them."""
    rng = np.random.default_rng(3)
    keys = np.repeat(rng.standard_normal((2, 29, 15)), 1 + copies, axis=1)[:, :377]
    keys += 1e-9 * rng.standard_normal(keys.shape)
    query = rng.standard_normal((2, 7, 15))
    request = {"query": query, "key": keys, "causal": True, "query_offset": keys.shape[1] - 7}
    client.put_layer(LAYER, SPEC)
    selected = client.attend(**request, layer=LAYER, outputs=["indexer_mask"]).indexer_mask
    expected = attend(SPEC, draw_weights(SPEC), **request).indexer_mask
    np.testing.assert_array_equal(selected, expected)
    assert (selected.sum(-1) == 11).all()


def test_the_mask_of_an_indexer_is_without_the_selection_of_blocks(client: Client) -> None:
    """Blocks are selected among the keys that it leaves, in a later step."""
    spec = LayerSpec(
        d_model=15,
        num_heads=3,
        dtype="float64",
        seed=5,
        indexer={"num_heads": 2, "head_dim": 7, "top_k": 3},
        block_selection={"block_size": 2, "top_k": 1},
    )
    request = {"query": np.random.default_rng(3).standard_normal((7, 15)), "outputs": ["attention_weights", "indexer_mask"]}
    client.put_layer(LAYER, spec)
    got = client.attend(**request, layer=LAYER)
    np.testing.assert_array_equal(got.indexer_mask, attend(spec, draw_weights(spec), query=request["query"]).indexer_mask)
    assert (got.indexer_mask.sum(-1) == 3).all() and ((got.attention_weights > 0).sum(-1) <= 2).all()
