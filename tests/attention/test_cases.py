"""Random cases fit their layer, follow from their seed, and between them say everything that a request may say."""

import json

import numpy as np
import pytest

from service.attention.cases import FEATURES, random_case
from service.attention.initialise import draw_weights
from service.attention.reference import attend
from service.spec import LayerSpec


def cases(n=400, **knobs):
    return [random_case(np.random.default_rng(seed), **knobs) for seed in range(n)]


def equal(a, b):
    return a.spec == b.spec and a.body() == b.body()


def test_a_case_follows_from_its_seed():
    assert all(equal(a, b) for a, b in zip(cases(30), cases(30), strict=True))
    assert not equal(*cases(2))


def test_every_case_is_one_that_the_reference_answers():
    for case in cases():
        got = attend(case.spec, draw_weights(case.spec), **case.request)
        assert np.isfinite(got.output).all()
        assert np.isfinite(got.attention_weights).all()
        assert np.isfinite(got.log_sum_exp[~got.fully_masked]).all()


def test_a_body_is_json_and_means_the_same():
    for case in cases(100):
        weights = draw_weights(case.spec)
        body = json.loads(json.dumps(case.body(), allow_nan=False))
        assert body.keys() == case.request.keys()
        np.testing.assert_array_equal(attend(case.spec, weights, **body).output, attend(case.spec, weights, **case.request).output)


def test_specs_are_told_apart_from_their_defaults():
    specs = [case.spec for case in cases()]
    assert {spec.init for spec in specs} == {"xavier_uniform", "numpy_normal", "numpy_uniform", "torch_linear", "torch_mha"}
    assert {spec.dtype for spec in specs} == {"float64", "float32"}
    assert {spec.bias for spec in specs} == {True, False}
    assert any(spec.softcap for spec in specs)
    assert any(spec.scale != spec.head_dim**-0.5 for spec in specs)
    assert any(spec.key_dim != spec.value_dim for spec in specs)
    for spec in specs:
        assert LayerSpec.model_validate(spec.model_dump()) == spec


def test_all_sizes_differ():
    for case in cases(batched=True, features=("key", "value"), rate=1.0):
        (b, q, _), (_, k, _) = case.request["query"].shape, case.request["key"].shape
        assert len({b, q, k, case.spec.num_heads, case.spec.head_dim}) == 5


def test_masks_come_in_every_form():
    ranks, broadcast, kinds, lens, batches = set(), set(), set(), set(), set()
    for case in cases():
        batched = case.request["query"].ndim == 3
        batches.add(batched)
        for name in ("attend_mask", "block_mask", "bias"):
            if name in case.request:
                ranks.add((name, batched, case.request[name].ndim))
                broadcast |= {(name, axis) for axis, n in enumerate(case.request[name].shape[::-1]) if n == 1}
                kinds.add((name, case.request[name].dtype.kind))
        if "valid_lens" in case.request:
            lens.add((batched, np.ndim(case.request["valid_lens"])))
    masks = ("attend_mask", "block_mask", "bias")
    assert ranks == {(name, batched, rank) for name in masks for batched in (True, False) for rank in (2, 3, 4) if batched or rank < 4}
    assert broadcast == {(name, axis) for name in masks for axis in range(4)}
    assert {kind for name, kind in kinds if name != "bias"} == {"b", "i"}
    assert lens == {(True, 1), (True, 2), (False, 0), (False, 1)}
    assert batches == {True, False}


def test_values_reach_their_edges():
    requests = [case.request for case in cases()]
    fields = {name for request in requests for name in request}
    masks = {"attend_mask", "block_mask", "attend_keys", "block_keys"}
    assert fields == {"query", *FEATURES} - {"mask", "key_mask"} | masks
    assert any(np.any(np.equal(request.get("valid_lens", 1), 0)) for request in requests)
    assert any(np.isneginf(request["bias"]).any() for request in requests if "bias" in request)
    assert {None, 0} <= {side for request in requests for side in request.get("window", {}).values()}
    offsets = [request["query_offset"] for request in requests if "query_offset" in request]
    assert {type(offset) for offset in offsets} == {int, str, np.ndarray}
    assert any(isinstance(offset, int) and offset < 0 for offset in offsets)
    assert {request["fully_masked"] for request in requests if "fully_masked" in request} == {"zero", "uniform"}
    assert {np.ndim(request["head_scale"]) for request in requests if "head_scale" in request} == {1, 2}
    assert {request["dropout"]["p"] for request in requests if "dropout" in request} == {0.0, 0.1, 0.5}
    assert 0.0 in {request.get("softcap") for request in requests}
    for request in requests:
        assert not {"attend_mask", "block_mask"} <= request.keys()
        assert not {"attend_keys", "block_keys"} <= request.keys()
        assert "key" in request or "value" not in request


def test_an_offset_is_there_where_it_must_be():
    checked = 0
    for case in cases(features=("key", "causal", "window")):
        if ("causal" in case.request or "window" in case.request) and "key" in case.request:
            assert "query_offset" in case.request
            checked += 1
        else:
            assert "query_offset" not in case.request
    assert checked > 50


def test_tensors_are_values_of_the_layers_dtype():
    for dtype, digits in (("float32", np.float32), ("bfloat16", np.float32), ("float16", np.float16), ("float64", np.float64)):
        case = random_case(np.random.default_rng(1), dtype=dtype)
        x = case.request["query"]
        assert np.array_equal(x.astype(digits), x)
    coarse = random_case(np.random.default_rng(1), dtype="bfloat16").request["query"].astype(np.float32)
    assert not (coarse.view(np.uint32) & 0xFFFF).any()


def test_knobs():
    assert all(case.request.keys() == {"query"} for case in cases(30, features=()))
    assert all(case.spec.init == "numpy_normal" and not case.spec.bias for case in cases(30, init="numpy_normal"))
    assert all(case.request["query"].ndim == 2 for case in cases(30, batched=False))
    assert all("bias" in case.request for case in cases(30, features=("bias",), rate=1.0))
    with pytest.raises(ValueError, match=r"expected features among key, value, .*, got masks"):
        random_case(np.random.default_rng(0), features=("masks",))
