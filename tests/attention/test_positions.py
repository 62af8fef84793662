"""Layers with `relative_scores` over HTTP against the float64 reference: every mask, selection, gradient, length and distance."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.gradients import gradients

from service.attention import positions
from service.attention.compare.random_cases import FEATURES, Case, random_case
from service.attention.initialization import in_dtype
from service.attention.masks import Masks
from service.attention.positions import RelativeTerms
from service.attention.reference.forward import Outputs, attend
from service.client import Client
from service.spec import LayerSpec

SEEDS = st.integers(0, 2**32 - 1)
OUTPUTS = ["output", "attention_weights", "scores", "log_sum_exp", "head_outputs"]
FITTING = sorted(set(FEATURES) - {"rope", "query_scale", "differential", "normalizer"})
XL: dict[str, Any] = {"kind": "transformer_xl"}
BUCKETS: dict[str, Any] = {"kind": "disentangled", "max_distance": 90, "buckets": 8, "position_to_content": True}


def make(client: Client, case: Case) -> Outputs:
    """Puts the layer "relative", and computes the reference."""
    assert case.weights is not None
    client.put_layer("relative", case.spec, case.weights)
    return attend(case.spec, in_dtype(case.spec, case.weights), **case.request)


def agree(case: Case, name: str, ours: Any, exact: Any, tolerance: float | None = None) -> None:
    there = np.isfinite(exact)
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(exact), err_msg=name)
    tolerance = tolerance or {"float64": 1e-10, "float32": 1e-4}[case.spec.dtype]
    largest = max(1.0, np.abs(exact[there]).max(initial=0.0))
    np.testing.assert_allclose(ours[there], exact[there], rtol=0, atol=tolerance * largest, err_msg=f"{name} of {case.spec!r}")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@given(seed=SEEDS)
def test_random_calls_agree_with_the_reference(client: Client, dtype: str, seed: int) -> None:
    case = random_case(np.random.default_rng(seed), features=FITTING, rate=0.5, dtype=dtype, init="xavier_uniform")
    assume(case.spec.relative_scores)
    exact = make(client, case)
    for outputs in (OUTPUTS, ["output"]):
        result = client.attend(**case.request, layer="relative", outputs=outputs)
        for name in outputs:
            agree(case, name, result[name], getattr(exact, name))


@given(seed=SEEDS, data=st.data())
def test_selected_weights_agree_with_the_reference(client: Client, seed: int, data: st.DataObject) -> None:
    case = random_case(np.random.default_rng(seed), features=FITTING, rate=0.5, dtype="float64", init="xavier_uniform")
    assume(case.spec.relative_scores)
    exact = make(client, case).attention_weights
    select = {
        name: data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
        for name, n in zip(("heads", "queries"), exact.shape[-3:-1], strict=True)
        if data.draw(st.booleans())
    }
    ours = client.attend(**case.request, layer="relative", outputs=["attention_weights"], select=select or None).attention_weights
    heads, queries = (select.get(name, slice(None)) for name in ("heads", "queries"))
    agree(case, "attention_weights", ours, exact[..., heads, :, :][..., queries, :])


@given(seed=SEEDS)
def test_gradients_agree_with_hand_derived_formulas(client: Client, seed: int) -> None:
    case = random_case(np.random.default_rng(seed), features=FITTING, rate=0.5, dtype="float64", init="xavier_uniform")
    assume(case.spec.relative_scores)
    direction = np.random.default_rng(seed).standard_normal(make(client, case).output.shape)
    assert case.weights is not None
    exact = gradients(case.spec, case.weights, direction, **case.request)
    result = client.attend(**case.request, layer="relative", outputs=list(exact), output_gradient=direction)
    for name, gradient in exact.items():
        agree(case, name, result[name], gradient)


def drawn(relative: dict[str, Any], queries: int, keys: int, offset: Any = "end", **fields: Any) -> Case:
    """A case of two items, with unequal numbers of heads and sizes."""
    rng = np.random.default_rng(queries)
    spec = LayerSpec.model_validate({"d_model": 14, "num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "relative_scores": relative} | fields)
    weights = {name: rng.standard_normal(shape) * 0.4 for name, shape in spec.weight_shapes().items()}
    request = {"query": rng.standard_normal((2, queries, 14)), "key": rng.standard_normal((2, keys, 14)), "query_offset": offset}
    return Case(spec, {"causal": queries > 1, **request}, weights)


@pytest.mark.parametrize("relative", [XL, BUCKETS], ids=lambda relative: relative["kind"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1033), (331, 337), (1031, 3)])
def test_long_calls_agree_with_the_reference(client: Client, relative: dict[str, Any], queries: int, keys: int) -> None:
    case = drawn(relative, queries, keys, dtype="float64")
    exact = make(client, case)
    result = client.attend(**case.request, layer="relative", outputs=["output", "log_sum_exp"])
    for name in ("output", "log_sum_exp"):
        agree(case, name, result[name], getattr(exact, name))


@pytest.mark.parametrize("relative", [XL, XL | {"interleaved": True}, BUCKETS], ids=str)
@pytest.mark.parametrize("offset", [[0, 10_000_000], [1 - 2**31, 2**31 - 1], [5, -7]], ids=str)
def test_scores_are_exact_at_distant_positions(client: Client, relative: dict[str, Any], offset: list[int]) -> None:
    """In float32, with another offset for each item."""
    case = drawn(relative, 7, 11, offset, dtype="float32")
    case.request["causal"] = False
    exact = make(client, case)
    agree(case, "scores", client.attend(**case.request, layer="relative", outputs=["scores"]).scores, exact.scores, 3e-6)


@pytest.mark.parametrize("relative", [XL, BUCKETS], ids=lambda relative: relative["kind"])
@pytest.mark.parametrize("rows", [range(23), [22, 0, 17, 1, 2, 3, 21]], ids=["all", "some in any order"])
def test_blocks_of_rows_are_bounded_and_do_not_change_the_scores(
    relative: dict[str, Any], rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block's products are as many as its rows times the distances among them; one row at a time if even that is too many."""
    case = drawn(relative, 23, 3, dtype="float64")
    weights = {name: torch.from_numpy(array) for name, array in (case.weights or {}).items()}
    rng = np.random.default_rng(1)
    query, key = (torch.from_numpy(rng.standard_normal((2, heads, n, 5))) for heads, n in ((6, len(rows)), (2, 3)))
    masks = Masks(positions=torch.tensor([list(rows)]), num_keys=3)
    assert case.spec.relative_scores
    terms = RelativeTerms(case.spec, case.spec.relative_scores, weights, torch.float64).of_call(masks, key, None)
    assert terms
    everything = slice(0, len(rows))
    whole = terms.of_rows(query, everything)
    for most in (12 * 40, 12 * 8, 1):
        monkeypatch.setattr(positions, "MAX_PRODUCTS", most)
        parts = list(terms._split(everything, most // 12))
        spans = [max(terms.highest[part]) - min(terms.lowest[part]) + 3 for part in parts]
        assert len(parts) > 1
        assert all(part.stop - part.start == 1 or (part.stop - part.start) * n <= most // 12 for part, n in zip(parts, spans, strict=True))
        torch.testing.assert_close(terms.of_rows(query, everything), whole, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(terms.of_rows(query[:, :, 4:6], slice(4, 6)), whole[:, :, 4:6], rtol=1e-13, atol=1e-13)
