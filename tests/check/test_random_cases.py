"""Random cases: each fits its layer and depends only on its seed, and together they cover every field of specs and requests."""

import json
from functools import cache

import numpy as np
import pytest

from attend.attention.operators import OPERATORS
from attend.attention.reference.forward import attend
from attend.check.random_cases import BY_FIELD, FEATURE_OF, LAYER_FEATURES, REQUEST_FEATURES, drop_conflicts, excluded_by, random_case
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS, Biases
from support.cases import weights_of
from support.layers import json_body


def drawn(n=400, **options):
    return [random_case(np.random.default_rng(seed), **options) for seed in range(n)]


cases = cache(drawn)  # several tests count what is in the same ones


def equal(a, b):
    def listed(case):
        return case.weights and {name: x.tolist() for name, x in case.weights.items()}

    return a.spec == b.spec and json_body(a.request) == json_body(b.request) and listed(a) == listed(b)


def test_equal_seeds_draw_equal_cases():
    assert all(equal(a, b) for a, b in zip(drawn(30), drawn(30), strict=True))
    assert not equal(*drawn(2))


def test_the_reference_computes_every_case():
    for case in cases():
        got = attend(case.spec, weights_of(case), **case.request)
        assert np.isfinite(got.output).all()
        assert np.isfinite(got.attention_weights).all()
        empty = np.concatenate([got.fully_masked] * case.spec.num_softmaxes, axis=-2)  # [..., softmaxes * h, q]
        assert np.isfinite(got.log_sum_exp[~empty]).all()


def test_a_case_written_as_json_gives_the_same_output():
    for case in cases(100):
        weights = weights_of(case)
        body = json.loads(json.dumps(json_body(case.request), allow_nan=False))
        assert body.keys() == case.request.keys()
        np.testing.assert_array_equal(attend(case.spec, weights, **body).output, attend(case.spec, weights, **case.request).output)


def test_specs_have_values_other_than_defaults():
    specs = [case.spec for case in cases()]
    assert {spec.init for spec in specs} == {"xavier_uniform", "numpy_normal", "numpy_uniform", "torch_linear", "torch_mha"}
    assert {spec.dtype for spec in specs} == {"float64", "float32"}
    assert {True, False} < {spec.bias for spec in specs}
    assert any(spec.softcap for spec in specs)
    assert any(spec.scale != spec.head_dim**-0.5 for spec in specs)
    assert any(spec.key_dim != spec.value_dim for spec in specs)
    for spec in specs:
        assert LayerSpec.model_validate(spec.model_dump()) == spec


def test_every_feature_of_layers_is_drawn():
    specs = [case.spec for case in cases()]
    grouped = [spec for spec in specs if spec.num_kv_heads != spec.num_heads]
    assert {spec.num_kv_heads for spec in grouped} == {1, 2, 3}
    assert any(spec.num_heads * spec.head_dim != spec.d_model for spec in specs)
    assert any(spec.value_head_dim != spec.head_dim for spec in specs)
    assert any(spec.output_dim != spec.d_model and spec.projections for spec in specs)
    assert any(isinstance(spec.bias, Biases) for spec in specs)
    unprojected = [case.spec for case in cases(rate=0.6) if not case.spec.projections]
    assert any(spec.num_kv_heads != spec.num_heads and spec.value_head_dim != spec.head_dim for spec in unprojected)
    assert {None, 0} <= {spec.window.left for spec in specs if spec.window}
    ropes = [spec.rope for spec in specs if spec.rope]
    assert {rope.interleaved for rope in ropes} == {True, False}
    assert {rope.scaling and rope.scaling.type for rope in ropes} == {None, "linear", "llama3"}
    assert {spec.rope.dims == spec.head_dim for spec in specs if spec.rope} == {True, False}
    assert any(spec.rope.dims > 2 for spec in specs if spec.rope and spec.rope.dims == spec.head_dim)
    assert {spec.num_heads & (spec.num_heads - 1) == 0 for spec in specs if spec.alibi} == {True, False}
    assert {spec.relative_bias.bidirectional for spec in specs if spec.relative_bias} == {True, False}
    assert {spec.qk_norm.kind for spec in specs if spec.qk_norm} == {"rms", "layer"}
    assert any(spec.sinks for spec in specs)
    assert {(spec.latent.query_rank, spec.latent.bias) for spec in specs if spec.latent} == {
        (n, bias) for n in (None, 11) for bias in (0, 1)
    }
    assert any(spec.chunk_size and spec.query_scale for spec in specs)
    assert {spec.differential.norm_weights for spec in specs if spec.differential and spec.rope} == {True, False}
    assert any(spec.indexer and spec.latent and spec.rope for spec in specs)
    assert {spec.normalizer for spec in specs} == {"softmax", "scalable_softmax", "sigmoid"}
    assert {(spec.grid_bias.kind, spec.grid_bias.class_token) for spec in specs if spec.grid_bias} == {
        ("table", False),
        ("table", True),
        ("decomposed", False),
    }
    assert {spec.rope.num_axes for spec in specs if spec.rope} == {1, 2, 3}
    drawn = [case.spec.relative_scores for case in cases(100, features=("relative_scores", "head_dim"), rate=0.8, init="xavier_uniform")]
    relative = [scores for scores in drawn if scores]
    sinusoidal = [scores for scores in relative if scores.kind == "transformer_xl"]
    assert {scores.interleaved for scores in sinusoidal} == {scores.max_distance is None for scores in sinusoidal} == {True, False}
    assert {(scores.buckets is None, scores.position_to_content) for scores in relative if scores.kind == "disentangled"} == {
        (exact, both) for exact in (True, False) for both in (True, False)
    }
    gates = [spec.output_gate for spec in specs if spec.output_gate]
    assert {gate.granularity for gate in gates} == {"elementwise", "headwise"}
    assert {gate.activation for gate in gates} == {"sigmoid", "softplus"}
    assert {gate.bias for gate in gates} == {True, False}
    crowded = [case.spec for case in cases(rate=0.6)]
    assert any(spec.rope and spec.alibi and spec.relative_bias and spec.qk_norm and spec.sinks for spec in crowded)
    assert {spec.matmul_precision for spec in specs} == {"highest"}


def test_incompatible_features_are_dropped():
    for operator in OPERATORS:
        feature = FEATURE_OF[operator.field]
        dropped = {*operator.undefined_options, *(operator.conflicts if operator.survives_conflicts else ())}
        assert drop_conflicts({feature, *dropped}, "xavier_uniform") == {feature}
        for other in excluded_by(operator):
            remains = any(other not in excluded_by(each) for each in BY_FIELD[operator.field])  # with another operator of the field
            assert drop_conflicts({feature, other}, "xavier_uniform") == {other} | ({feature} if remains else set())
        is_dropped = drop_conflicts({feature, "projections"}, "xavier_uniform") == {"projections"}
        assert is_dropped == operator.needs_projections
    everything = {*REQUEST_FEATURES, "num_kv_heads", "head_dim", "value_head_dim", "output_dim", "biases", "projections", "weights", "axes"}
    everything |= {"layer_window", "rope", "alibi", "relative_bias", "qk_norm", "sinks", "output_gate", "latent", "normalizer"}
    widths = {"num_kv_heads", "head_dim", "value_head_dim", "output_dim"}
    assert drop_conflicts(everything - {"projections"}, "xavier_uniform") == everything - {"projections"}
    assert drop_conflicts(everything, "torch_linear") == everything - {"output_dim", "biases", "output_gate", "latent"}
    assert drop_conflicts(everything, "numpy_normal") == everything - {"output_dim", "biases", "output_gate", "latent"}
    assert (
        drop_conflicts(everything - {"projections"}, "numpy_normal")
        == everything - {"projections", "biases", "output_gate", "latent"} - widths
    )
    assert drop_conflicts(everything, "torch_mha") == everything - {"biases", "output_gate", "latent"} - widths
    assert drop_conflicts({"value"}, "torch_mha") == set()
    assert drop_conflicts({"relative_scores", "indexer"}, "torch_mha") == set()
    assert drop_conflicts({"relative_scores", "rope"}, "torch_linear") == {"rope"}
    assert drop_conflicts({"relative_scores", "query_scale"}, "torch_linear") == {"query_scale"}
    assert drop_conflicts({"relative_scores", "alibi"}, "torch_linear") == {"relative_scores", "alibi"}
    assert drop_conflicts({"projections", "num_kv_heads", "value_head_dim"}, "torch_linear") == {"projections"}
    assert drop_conflicts({"projections", "num_kv_heads", "value_head_dim", "key"}, "torch_linear") == {
        "projections",
        "num_kv_heads",
        "key",
    }


def test_weights_that_a_seed_does_not_draw_are_given():
    seeded = 0
    for case in cases():
        shapes = case.spec.weight_shapes()
        if case.weights is None:
            assert not {name.partition(".")[0] for name in shapes} - set(PROJECTIONS)
            seeded += 1
            continue
        assert {name: x.shape for name, x in case.weights.items()} == shapes
        assert {x.dtype for x in case.weights.values()} <= {np.dtype(case.spec.dtype)}
        for name, x in case.weights.items():
            assert np.all(x != (1 if "norm" in name else 0))
    assert 0 < seeded < 200


def test_all_sizes_differ():
    for case in cases(batched=True, features=("key", "value"), rate=1.0):
        (b, q, _), (_, k, _) = case.request["query"].shape, case.request["key"].shape
        assert len({b, q, k, case.spec.num_heads, case.spec.head_dim}) == 5
    for case in cases(batched=True, features=("key", "value", "num_kv_heads", "value_head_dim", "rope"), rate=1.0, init="xavier_uniform"):
        (b, q, _), (_, k, _) = case.request["query"].shape, case.request["key"].shape
        spec = case.spec
        sizes = [b, k, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_head_dim]
        assert len({*sizes, q}) == 7 or (q == 1 and len(set(sizes)) == 6)


def test_masks_have_every_rank_dtype_and_broadcast_axis():
    ranks, broadcast, kinds, lens, batches = set(), set(), set(), set(), set()
    for case in cases(800):
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


def test_request_fields_take_extreme_values():
    requests = [case.request for case in cases()]
    fields = {name for request in requests for name in request}
    masks = {"attend_mask", "block_mask", "attend_keys", "block_keys", "query_segments", "key_segments"}
    assert fields == {"query", "key_positions", *REQUEST_FEATURES} - {"mask", "key_mask", "segments"} | masks
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


def test_the_offset_is_drawn_where_it_is_required():
    checked = {"causal": 0, "window": 0, "layer": 0}
    for case in cases(features=("key", "causal", "window", "layer_window", "rope", "alibi", "relative_bias"), rate=0.3):
        reasons = {"causal", "window"} & case.request.keys() | ({"layer"} if case.spec.positional else set())
        if reasons and "key" in case.request:
            assert "query_offset" in case.request
            for reason in reasons:
                checked[reason] += 1
        else:
            assert "query_offset" not in case.request
    assert min(checked.values()) > 10


def test_tensors_are_rounded_to_the_dtype_of_the_layer():
    for dtype, digits in (("float32", np.float32), ("bfloat16", np.float32), ("float16", np.float16), ("float64", np.float64)):
        case = random_case(np.random.default_rng(1), dtype=dtype)
        x = case.request["query"]
        assert np.array_equal(x.astype(digits), x)
        weights = random_case(np.random.default_rng(1), dtype=dtype, features=("weights",), rate=1.0).weights
        assert all(np.array_equal(x.astype(digits), x) for x in weights.values())
    coarse = random_case(np.random.default_rng(1), dtype="bfloat16").request["query"].astype(np.float32)
    assert not (coarse.view(np.uint32) & 0xFFFF).any()


def test_the_arguments_restrict_what_is_drawn():
    assert all(case.request.keys() == {"query"} for case in cases(30, features=()))
    assert all(case.spec.init == "numpy_normal" and not case.spec.bias for case in cases(30, init="numpy_normal"))
    assert all(case.request["query"].ndim == 2 for case in cases(30, batched=False))
    assert all("bias" in case.request for case in cases(30, features=("bias",), rate=1.0))
    plain = {"num_kv_heads", "head_dim", "window", "rope", "alibi", "relative_bias", "qk_norm", "sinks", "projections"}
    for case in cases(30, features=REQUEST_FEATURES):
        default = LayerSpec(d_model=case.spec.d_model, num_heads=case.spec.num_heads)
        assert case.spec.model_dump(include=plain) == default.model_dump(include=plain)
        assert case.weights is None
    one = {name: cases(1, features=(name,), rate=1.0, init="xavier_uniform")[0] for name in LAYER_FEATURES}
    assert one["sinks"].spec.sinks and one["alibi"].spec.alibi and one["rope"].spec.rope and not one["projections"].spec.projections
    assert one["weights"].weights is not None
    with pytest.raises(ValueError, match=r"expected features among key, value, .*, got masks"):
        random_case(np.random.default_rng(0), features=("masks",))
