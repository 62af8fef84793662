"""The predicted operations of a call: those of products, which torch counts, and a few for each other number."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attend.attention.cache import KeyValueCache, PagePool
from attend.attention.cost import cost_of_steps
from attend.attention.decoding import CachedForwardPass, forward_cached
from attend.attention.initialization import draw_weights
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.attention.operators import OPERATORS
from attend.attention.operators.operator import Operator
from attend.spec import LayerSpec
from support.calls import call_of

WIDE = {"d_model": 58, "num_heads": 2, "head_dim": 34, "value_head_dim": 29, "dtype": "float64"}  # products take most operations
QUERIES, KEYS = 43, 61
LATENT = {"latent": {"query_rank": 37, "key_value_rank": 41, "rope_key_dim": 6}, "rope": {"dims": 6}}
LAYERS: dict[str, dict[str, Any]] = {
    "window": {"window": {"left": 17, "right": 0}},
    "chunks": {"chunk_size": 19},
    "output_gate": {"output_gate": {}},
    "latent": LATENT,
    "qk_norm": {"qk_norm": {}},
    "rope": {"rope": {}},
    "query_scale": {"query_scale": {"factor": 0.1, "length": 3}},
    "softcap": {"softcap": 5.0},
    "talking_heads": {"talking_heads": True},
    "alibi": {"alibi": True},
    "t5_bias": {"relative_bias": {}},
    "relative_scores": {"relative_scores": {"kind": "transformer_xl"}},
    "grid_bias": {"grid_bias": {"height": 7, "width": 11, "kind": "decomposed"}},
    "indexer": {"indexer": {"num_heads": 5, "head_dim": 31, "top_k": 7}} | LATENT,
    "block_selection": {"block_selection": {"block_size": 3, "top_k": 5}},
    "forget_gate": {"forget_gate": True},
    "sinks": {"sinks": True},
    "differential": {"differential": {}},
    "scalable_softmax": {"normalizer": "scalable_softmax"},
    "sigmoid": {"normalizer": "sigmoid"},
}


def layer_of(fields: dict[str, Any]) -> MultiHeadAttention:
    spec = LayerSpec.model_validate(WIDE | fields)
    return MultiHeadAttention(spec, {name: torch.from_numpy(array) for name, array in draw_weights(spec).items()}, torch.device("cpu"))


def inputs(layer: MultiHeadAttention, *rows: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(1, n, layer.spec.d_model, generator=rng, dtype=layer.dtype) for n in rows]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_the_operations_are_those_of_products_and_few_others(operator: type[Operator]) -> None:
    """A product in float64 counts twice, whatever the layer's datatype: the indexer's."""
    layer = layer_of(LAYERS[operator.name])
    assert operator in layer.spec.operators
    query, key = inputs(layer, QUERIES, KEYS)
    masks = Masks(torch.arange(KEYS - QUERIES, KEYS)[None], KEYS, left=17 if operator.name == "window" else None)
    options = {"softcap": layer.spec.softcap, "reproducible": True}  # no kernels, whose products are not counted
    call = call_of(query, key, key, masks, layer.spec.scale, frozenset({"output"}), **options)

    with FlopCounterMode(display=False) as counted:
        layer.forward(call)

    products = counted.get_total_flops() * (1.4 if operator.name == "indexer" else 1)
    assert products < cost_of_steps(layer.spec, call.options)[0] < 1.15 * products


@pytest.mark.parametrize("fields", [{}, LATENT, {"forget_gate": True}], ids=["plain", "latent", "forget_gate"])
def test_a_step_of_a_session_projects_its_own_rows(fields: dict[str, Any]) -> None:
    """Of latent attention it also expands the vectors of all rows."""
    layer = layer_of(fields)
    cache, counts = KeyValueCache(layer.spec, PagePool(torch.device("cpu")), "owner"), [KEYS, 3]
    for rows in counts:
        start, (query,) = cache.length, inputs(layer, rows)
        cache.reserve(start + rows)
        masks = Masks(torch.arange(start, start + rows)[None], start + rows)
        call = call_of(query, query, query, masks, layer.spec.scale, frozenset({"output"}), reproducible=True)
        call = call.with_options(num_keys=start + rows)
        with FlopCounterMode(display=False) as counted:
            forward_cached(layer, [(CachedForwardPass(cache, start), call)])
        products = counted.get_total_flops()
        assert products < cost_of_steps(layer.spec, call.options, start)[0] < 1.2 * products
