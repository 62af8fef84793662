"""Programs run with torch against the float64 reference, without a server: values that are not finite, biases, and the cost of dropout."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attend.attention import dropout
from attend.attention import rows as row_blocks
from attend.attention.call import Call
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.attention.reference import forward
from attend.spec import LayerSpec
from support import calls

CPU = torch.device("cpu")
HEADS, Q, K, D = 3, 5, 7, 2
RNG = np.random.default_rng(7)


def bare_layer(dtype: str = "float32", **fields: Any) -> MultiHeadAttention:
    """A layer without projections: inputs are the queries, keys and values of the heads."""
    spec = LayerSpec(d_model=HEADS * D, num_heads=HEADS, projections=False, scale=1.0, dtype=dtype, **fields)
    weights = {name: torch.tensor(RNG.standard_normal(shape)).to(getattr(torch, dtype)) for name, shape in spec.weight_shapes().items()}
    return MultiHeadAttention(spec, weights, CPU)


def call_of(layer: MultiHeadAttention, *outputs: str, q: int = Q, k: int = K, **fields: Any) -> Call:
    query, key, value = (torch.tensor(RNG.standard_normal((2, n, HEADS * D))).to(layer.dtype) for n in (q, k, k))
    return calls.call_of(query, key, value, Masks(torch.arange(q)[None], k), 1.0, frozenset(outputs), **fields)


def reference_of(layer: MultiHeadAttention, call: Call, **fields: Any) -> forward.Outputs:
    inputs = {name: getattr(call, name).double().numpy() for name in ("query", "key", "value")}
    return forward.attend(layer.spec, {name: x.double().numpy() for name, x in layer.weights.items()}, **inputs, **fields)


@pytest.mark.parametrize("outputs", [("output",), ("output", "attention_weights")])
@pytest.mark.parametrize("worst", [np.inf, -np.inf, np.nan])
def test_a_weight_of_0_excludes_values_that_are_not_finite_without_a_mask(worst: float, outputs: tuple[str, ...]) -> None:
    """The score is so low that its weight is 0 in float64, too."""
    layer = bare_layer()
    call = call_of(layer, *outputs)
    call.query[..., 0::D] = 1
    call.key[:, 3, 0::D] = -5000
    call.value[:, 3] = worst

    got = layer.forward(call).tensors

    wanted = reference_of(layer, call)
    assert np.isfinite(wanted.output).all()
    np.testing.assert_allclose(got["output"].numpy(), wanted.output, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_biases_are_not_rounded_to_half_precision(dtype: str) -> None:
    """ALiBi of distant keys and a bias that cancels it: each is exact in the dtype, and their sum of 0.5 to 2 is not near it.

    Without rounding of the sum, a score has the error of the products, which are exact here, so each weight is one of float32, and
    an output, a mean of values of at most max|v|, is rounded once or twice to the dtype: 2 units of max|v|.
    """
    layer = bare_layer(dtype, alibi=True)
    q = k = 257
    call = call_of(layer, "output", q=q, k=k)
    call = replace(call, query=torch.zeros_like(call.query))
    bias = torch.linspace(-40, 40, k, dtype=torch.float64).to(layer.dtype).expand(1, 1, q, k)
    call = replace(call, masks=call.masks._replace(bias=bias, positions=torch.arange(q)[None]))

    alone = layer.forward(call).tensors["output"]
    beside_weights = layer.forward(call.with_options(outputs=frozenset({"output", "attention_weights"}))).tensors["output"]

    wanted = reference_of(layer, call, bias=bias[0, 0].double().numpy(), query_offset=0).output
    bound = 2 * torch.finfo(layer.dtype).eps * np.abs(call.value.double().numpy()).max()
    for got in (alone, beside_weights):
        assert np.abs(got.double().numpy() - wanted).max() <= bound


def test_each_random_number_of_dropout_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to find where rows begin in the stream, and once for its block, however few rows that has."""
    monkeypatch.setattr(row_blocks, "MAX_BLOCK_SCORES", 1)  # blocks of one row
    monkeypatch.setattr(dropout, "SAVED_ROWS", 4)
    layer, drawn = bare_layer(), []
    call = call_of(layer, "output", "attention_weights", q=13, dropout=(0.25, 9))
    wanted = reference_of(layer, call, dropout={"p": 0.25, "seed": 9}).attention_weights

    class Counted(np.random.RandomState):
        def random_sample(self, size: Any = None) -> Any:
            drawn.append(math.prod(size))
            return super().random_sample(size)

    monkeypatch.setattr(np.random, "RandomState", Counted)

    got = layer.forward(call).tensors

    np.testing.assert_allclose(got["attention_weights"].numpy(), wanted, rtol=0, atol=1e-5)
    assert sum(drawn) == 2 * wanted.size


@pytest.mark.parametrize("queries", [(11, 2, 3), (5,), (0, 12, 6, 7)])
def test_dropout_of_selected_queries_is_that_of_all(monkeypatch: pytest.MonkeyPatch, queries: tuple[int, ...]) -> None:
    monkeypatch.setattr(dropout, "SAVED_ROWS", 4)
    layer = bare_layer()
    call = call_of(layer, "attention_weights", q=13, dropout=(0.25, 9))
    whole = reference_of(layer, call, dropout={"p": 0.25, "seed": 9}).attention_weights

    selected = layer.forward(call.with_options(queries=queries, heads=(2, 0))).tensors["attention_weights"]

    np.testing.assert_allclose(selected.numpy(), whole[:, [2, 0]][:, :, list(queries)], rtol=0, atol=1e-5)
