"""Features of layers in the reference, against hand-computed numbers, torch and invariants."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from attend.attention.operators.qk_norm import QKNorm, normalise
from attend.attention.reference.arithmetic import NumpyArithmetic
from attend.attention.reference.forward import attend
from attend.check.random_cases import random_case
from attend.spec import LayerSpec
from support.cases import layer_without_projections, weights_of


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape) for shape in shapes)


def draw_all(seed, spec):
    """Random weights, norms and biases included."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in spec.weight_shapes().items()}


# --- output gates ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("granularity", "rows"), [("elementwise", 4), ("headwise", 2)])
@pytest.mark.parametrize(
    ("activation", "at_zero", "at_three"), [("sigmoid", 0.5, 1 / (1 + np.exp(-3))), ("softplus", np.log(2), np.log(1 + np.exp(3)))]
)
def test_a_gate_multiplies_head_outputs(granularity, rows, activation, at_zero, at_three):
    """Two heads of two numbers; the gate of the first head is at 0, that of the second at 3 times the query, 1."""
    gate = {"granularity": granularity, "activation": activation}
    spec = LayerSpec(d_model=1, num_heads=2, head_dim=2, bias=False, output_gate=gate, dtype="float64", output_dim=4)
    weights = {"query.weight": np.ones((4, 1)), "key.weight": np.ones((4, 1)), "value.weight": [[1.0], [2.0], [3.0], [4.0]]}
    weights |= {"output.weight": np.eye(4), "gate.weight": 3.0 * (np.arange(rows) >= rows // 2)[:, None]}
    got = attend(spec, weights, query=[[1.0]])
    expected = [at_zero, 2 * at_zero, 3 * at_three, 4 * at_three]
    np.testing.assert_allclose(got.output[0], expected, rtol=1e-15)
    np.testing.assert_array_equal(got.concatenated, got.output)
    np.testing.assert_allclose(got.head_outputs[:, 0].ravel(), expected, rtol=1e-15)


@pytest.mark.parametrize("fields", [{"projections": False}, {"init": "numpy_normal"}, {"init": "torch_mha"}], ids=str)
def test_a_gate_without_projections_is_refused(fields):
    with pytest.raises(ValidationError, match="null, since"):
        LayerSpec(d_model=4, num_heads=2, output_gate={}, **fields)


def test_large_gate_logits_do_not_overflow():
    spec = LayerSpec(d_model=1, num_heads=1, bias=False, output_gate={}, dtype="float64")
    weights = {f"{name}.weight": np.ones((1, 1)) for name in ("query", "key", "value", "output")}
    for logit, expected in ((1e4, 1.0), (-1e4, 0.0)):
        assert attend(spec, weights | {"gate.weight": np.full((1, 1), logit)}, query=[[1.0]]).output.item() == expected


# --- latents --------------------------------------------------------------------------------------------------------------------------


def test_latent_keys_have_a_part_shared_by_all_heads_and_a_part_of_each_head():
    """Two heads of two numbers: the first is the input's second number, the other is the latent's only number, its sign, times 2 and 3."""
    latent = {"key_value_rank": 1, "rope_key_dim": 1, "eps": 1e-12}
    spec = LayerSpec(d_model=2, num_heads=2, head_dim=2, value_head_dim=1, bias=False, latent=latent, dtype="float64")
    weights = {"query.weight": np.ones((4, 2)), "output.weight": np.ones((2, 2)), "rope_key.weight": np.array([[0.0, 1.0]])}
    weights |= {"key_value_down.weight": np.array([[1.0, 0.0]]), "key_value_down_norm.weight": np.array([1.0])}
    weights |= {"key.weight": np.array([[2.0], [3.0]]), "value.weight": np.array([[5.0], [7.0]])}
    got = attend(spec, weights, query=[[-4.0, 9.0]])
    np.testing.assert_allclose(got.key_projection, [[[9.0, -2.0]], [[9.0, -3.0]]], rtol=1e-12)
    np.testing.assert_allclose(got.value_projection, [[[-5.0]], [[-7.0]]], rtol=1e-12)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"projections": False}, "/latent"),
        ({"init": "torch_mha"}, "/latent"),
        ({"latent": {"key_value_rank": 3, "rope_key_dim": 2}}, "/latent/rope_key_dim"),
        ({"key_dim": 4, "value_dim": 5}, "/value_dim"),
    ],
    ids=str,
)
def test_invalid_latents_are_refused(fields, place):
    with pytest.raises(ValidationError) as caught:
        LayerSpec(**{"d_model": 4, "num_heads": 2, "latent": {"key_value_rank": 3, "rope_key_dim": 1}} | fields)
    assert caught.value.errors()[0]["ctx"]["at"] == place


def test_keys_and_values_of_a_latent_layer_have_one_width():
    for name in ("key_dim", "value_dim"):
        spec = LayerSpec(d_model=4, num_heads=2, latent={"key_value_rank": 3, "rope_key_dim": 1}, **{name: 5})
        assert (spec.d_model, spec.key_dim, spec.value_dim, spec.weight_shapes()["key_value_down.weight"]) == (4, 5, 5, (3, 5))


# --- differential attention -----------------------------------------------------------------------------------------------------------


def test_differential_weights_are_the_difference_of_two_softmaxes_and_outputs_are_normed():
    """One head: q1 and k1 are the first numbers. Scores are ln 3 and 0 in the first softmax, 0 in the second; lambda is 2 - 1 + 0.5."""
    spec = layer_without_projections(d_model=2, head_dim=2, value_head_dim=1, differential={"lambda_init": 0.5, "eps": 1e-12})
    weights = {"lambda_q1": [np.log(2)], "lambda_k1": [1.0], "lambda_q2": [0.0], "lambda_k2": [5.0], "head_norm.weight": [7.0]}
    got = attend(spec, weights, query=[[1.0, 0.0]], key=[[np.log(3), 1.0], [0.0, 2.0]], value=[[1.0], [2.0]])
    np.testing.assert_allclose(got.attention_weights, [[[0.75 - 1.5 * 0.5, 0.25 - 1.5 * 0.5]]], atol=1e-15)
    np.testing.assert_allclose(got.output, [[-1.0 * 7.0 * 0.5]], rtol=1e-10)  # the norm leaves a single number its sign


def test_both_halves_of_a_differential_head_are_rotated():
    """By the same angles: with q1 = q2, k1 = k2 and lambda 1, the weights are 0."""
    spec = layer_without_projections(d_model=8, head_dim=8, value_head_dim=3, differential={"lambda_init": 1.0}, rope={"theta": 10.0})
    query, key, value = draw(3, (5, 4), (5, 4), (5, 3))
    weights = dict.fromkeys(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"), np.zeros(4)) | {"head_norm.weight": np.ones(3)}
    got = attend(spec, weights, query=np.tile(query, 2), key=np.tile(key, 2), value=value)
    np.testing.assert_allclose(got.attention_weights, 0, atol=1e-15)
    assert spec.rope.dims == 4 and spec.scale == 1.0


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"head_dim": 3}, "/head_dim"),
        ({"rope": {"dims": 4}}, "/rope/dims"),
        ({"qk_norm": {}}, "/qk_norm"),
        ({"latent": {"key_value_rank": 3, "rope_key_dim": 1}}, "/latent"),
        ({"sinks": True}, "/sinks"),
        ({"relative_scores": {"kind": "transformer_xl"}}, "/relative_scores"),
    ],
    ids=str,
)
def test_invalid_differential_layers_are_refused(fields, place):
    with pytest.raises(ValidationError) as caught:
        LayerSpec(**{"d_model": 8, "num_heads": 2, "differential": {}} | fields)
    assert caught.value.errors()[0]["ctx"]["at"] == place


# --- sigmoid and scalable softmax -----------------------------------------------------------------------------------------------------


def test_sigmoid_weights_are_lowered_by_the_length_of_the_sequence():
    """Scores are 0, so each weight is 1 / (1 + n): for 4 keys, 3 of which are no padding, with and without causality."""
    got = attend(layer_without_projections(normalizer="sigmoid"), {}, query=np.zeros((4, 1)), valid_lens=3, causal=True)
    np.testing.assert_allclose(got.attention_weights[0], np.tril(np.full((4, 4), 0.25)) * [1, 1, 1, 0], rtol=1e-15)
    got = attend(layer_without_projections(normalizer="sigmoid"), {}, query=np.zeros((4, 1)), segments=np.array([0, 1, 1, -1]))
    np.testing.assert_allclose(got.attention_weights[0].sum(-1), [1 / 2, 2 / 3, 2 / 3, 0], rtol=1e-15)


def test_scalable_softmax_multiplies_scores_by_the_logarithm_of_the_number_of_keys():
    """Row i of causal attention has i + 1 keys; n^s is the weight's numerator for the score s."""
    got = attend(
        layer_without_projections(normalizer="scalable_softmax"),
        {},
        query=np.ones((3, 1)),
        key=[[0.0], [1.0], [2.0]],
        causal=True,
        query_offset=0,
    )
    np.testing.assert_allclose(got.attention_weights[0], [[1, 0, 0], [1 / 3, 2 / 3, 0], [1 / 13, 3 / 13, 9 / 13]], rtol=1e-14)


def test_invalid_normalizers_are_refused():
    for fields, place in (
        ({"normalizer": "sigmoid", "sinks": True}, "/sinks"),
        ({"normalizer": "sigmoid", "differential": {}}, "/normalizer"),
    ):
        with pytest.raises(ValidationError) as caught:
            LayerSpec(d_model=8, num_heads=2, **fields)
        assert caught.value.errors()[0]["ctx"]["at"] == place


# --- indexers -------------------------------------------------------------------------------------------------------------------------


def test_an_indexer_keeps_the_keys_of_the_largest_scores():
    """One index head, whose keys after the norm are (1, -1) or (-1, 1); of equal scores the lower key wins."""
    spec = LayerSpec(d_model=2, num_heads=1, bias=False, dtype="float64", indexer={"num_heads": 1, "head_dim": 2, "top_k": 2, "eps": 0})
    weights = {f"{name}.weight": np.eye(2) for name in ("query", "key", "value", "output", "index_query", "index_key")}
    weights |= {
        "index_head_weights.weight": np.array([[1.0, 0.0]]),
        "index_key_norm.weight": np.ones(2),
        "index_key_norm.bias": np.zeros(2),
    }
    keys = np.array([[0.0, 3.0], [1.0, 5.0], [4.0, 1.0], [0.0, 1.0]])
    got = attend(spec, weights, query=np.array([[2.0, 0.0], [2.0, 3.0]]), key=keys)
    np.testing.assert_array_equal(got.indexer_mask, [[1, 0, 1, 0], [1, 1, 0, 0]])
    np.testing.assert_array_equal(np.isneginf(got.scores[0]), got.indexer_mask == 0)
    blocked = attend(spec, weights, query=np.array([[2.0, 0.0]]), key=keys, block_keys=[0, 0, 1, 0])
    np.testing.assert_array_equal(blocked.indexer_mask, [[1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("fields", "place"),
    [({"projections": False}, "/indexer"), ({"init": "numpy_normal"}, "/indexer"), ({"rope": {"dims": 4}}, "/indexer/head_dim")],
    ids=str,
)
def test_invalid_indexers_are_refused(fields, place):
    with pytest.raises(ValidationError) as caught:
        LayerSpec(**{"d_model": 8, "num_heads": 2, "indexer": {"num_heads": 3, "head_dim": 2, "top_k": 5}} | fields)
    assert caught.value.errors()[0]["ctx"]["at"] == place


# --- heads and widths -----------------------------------------------------------------------------------------------------------------


def test_neighbouring_query_heads_share_a_head_of_keys_and_values():
    got = attend(layer_without_projections(num_heads=4, num_kv_heads=2), {}, query=[[1, 2, 3, 4]], key=[[10, 100]], value=[[5, 6]])
    assert got.scores.ravel().tolist() == [10, 20, 300, 400]
    assert got.output.tolist() == [[5, 5, 6, 6]]


def test_all_query_heads_may_share_one_key_head():
    got = attend(layer_without_projections(num_heads=3, num_kv_heads=1), {}, query=[[1, 2, 3]], key=[[10]], value=[[5]])
    assert got.scores.ravel().tolist() == [10, 20, 30]
    assert got.output.tolist() == [[5, 5, 5]]


def test_shapes_of_all_outputs():
    spec = LayerSpec(d_model=29, num_heads=6, num_kv_heads=2, head_dim=4, value_head_dim=3, key_dim=7, value_dim=11, output_dim=13)
    query, key, value = draw(0, (5, 8, 29), (5, 9, 7), (5, 9, 11))
    got = attend(spec, draw_all(1, spec), query=query, key=key, value=value)
    assert {name: getattr(got, name).shape for name in got.__slots__} == {
        "output": (5, 8, 13),
        "attention_weights": (5, 6, 8, 9),
        "scores": (5, 6, 8, 9),
        "log_sum_exp": (5, 6, 8),
        "query_projection": (5, 6, 8, 4),
        "key_projection": (5, 2, 9, 4),
        "value_projection": (5, 2, 9, 3),
        "head_outputs": (5, 6, 8, 3),
        "concatenated": (5, 8, 18),
        "normalised": (5, 1, 6, 8, 9),
        "indexer_mask": (5, 8, 9),
        "latent": (5, 9, 0),
        "rope_key": (5, 9, 0),
        "fully_masked": (5, 6, 8),
    }


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_a_grouped_layer_equals_one_with_repeated_keys_and_values(kv_heads):
    grouped = LayerSpec(d_model=12, num_heads=6, num_kv_heads=kv_heads, head_dim=4, value_head_dim=3, rope={}, alibi=True)
    plain = LayerSpec(d_model=12, num_heads=6, head_dim=4, value_head_dim=3, rope={}, alibi=True)
    weights = draw_all(2, grouped)
    repeated = dict(weights)
    for name, width in (("key", 4), ("value", 3)):
        for part in ("weight", "bias"):
            blocks = np.split(weights[f"{name}.{part}"], kv_heads)
            assert all(len(block) == width for block in blocks)
            repeated[f"{name}.{part}"] = np.concatenate([block for block in blocks for _ in range(6 // kv_heads)])
    (query,) = draw(3, (2, 5, 12))
    got, expected = attend(grouped, weights, query=query), attend(plain, repeated, query=query)
    np.testing.assert_allclose(got.output, expected.output, rtol=1e-12)
    np.testing.assert_allclose(got.attention_weights, expected.attention_weights, rtol=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_grouped_heads_agree_with_torch_scaled_dot_product_attention(seed):
    """scaled_dot_product_attention over the reference's own projections, which repeats heads itself."""
    features = {
        "key",
        "value",
        "mask",
        "causal",
        "num_kv_heads",
        "head_dim",
        "value_head_dim",
        "output_dim",
        "projections",
        "rope",
        "qk_norm",
    }
    case = random_case(np.random.default_rng(seed), features=features, rate=0.6, dtype="float64", init="torch_linear", batched=True)
    spec = case.spec.model_copy(update={"softcap": None})
    got = attend(spec, weights_of(case), **case.request)
    q, k, v = (torch.tensor(x) for x in (got.query_projection, got.key_projection, got.value_projection))
    allowed = torch.tensor(~np.isneginf(got.scores))
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=spec.scale, enable_gqa=True)
    np.testing.assert_allclose(got.head_outputs, expected.numpy(), atol=1e-11)


def test_without_projections_heads_attend_to_the_inputs():
    spec = LayerSpec(d_model=6, num_heads=2, num_kv_heads=1, value_head_dim=5, projections=False)
    assert spec.weight_shapes() == {}
    query, key, value = draw(4, (3, 7, 6), (3, 4, 3), (3, 4, 5))
    got = attend(spec, {}, query=query, key=key, value=value)
    np.testing.assert_array_equal(got.query_projection[:, 1], query[..., 3:])
    np.testing.assert_array_equal(got.key_projection[:, 0], key)
    np.testing.assert_array_equal(got.value_projection[:, 0], value)
    np.testing.assert_array_equal(got.output, got.concatenated)
    assert got.output.shape == (3, 7, 10)


def test_a_layer_without_projections_equals_identity_projections():
    fields = {"d_model": 6, "num_heads": 2, "sinks": True, "qk_norm": {}, "rope": {"dims": 2}, "alibi": True}
    without = LayerSpec(**fields, projections=False)
    weights = draw_all(5, without)
    identity = weights | {f"{name}.weight": np.eye(6) for name in ("query", "key", "value", "output")}
    (query,) = draw(6, (3, 5, 6))
    np.testing.assert_allclose(
        attend(without, weights, query=query).output, attend(LayerSpec(**fields, bias=False), identity, query=query).output, rtol=1e-14
    )


def test_projected_inputs_must_have_the_width_of_the_heads():
    spec = LayerSpec(d_model=6, num_heads=2, num_kv_heads=1, value_head_dim=5, projections=False)
    query, key = draw(7, (3, 7, 6), (3, 4, 3))
    with pytest.raises(ValueError, match="expected a key of 1 heads of 3 numbers, got 6 numbers"):
        attend(spec, {}, query=query)
    with pytest.raises(ValueError, match="expected a value of 1 heads of 5 numbers, got 3 numbers"):
        attend(spec, {}, query=query, key=key)


@pytest.mark.parametrize("biased", ["query", "key", "value", "output"])
def test_each_projection_has_its_own_bias(biased):
    fields = {"d_model": 6, "num_heads": 2}
    one = LayerSpec(**fields, bias={name: name == biased for name in ("query", "key", "value", "output")})
    weights = draw_all(8, one)
    zeros = {f"{name}.bias": np.zeros(6) for name in ("query", "key", "value", "output")}
    (query,) = draw(9, (3, 5, 6))
    got, expected = attend(one, weights, query=query), attend(LayerSpec(**fields), zeros | weights, query=query)
    np.testing.assert_allclose(got.output, expected.output, rtol=1e-14)
    without = attend(LayerSpec(**fields), weights | zeros, query=query)
    assert np.allclose(without.scores, got.scores) == (biased in ("value", "output"))
    assert np.allclose(without.output, got.output) == (biased == "key")  # which adds the same to a row's scores, so nothing


# --- norms of queries and keys --------------------------------------------------------------------------------------------------------


def normed(x, w, **norm):
    return normalise(NumpyArithmetic({"norm.weight": w}), x[None], norm=QKNorm(**norm), name="norm")[0]


def test_norms_equal_hand_computed_numbers():
    x = np.array([3.0, 4.0, 0.0, -5.0])  # mean 0.5, mean square 12.5, variance 12.25
    w = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(normed(x, w, kind="rms", eps=0.5), x / np.sqrt(13) * w, rtol=1e-15)
    np.testing.assert_allclose(normed(x, w, kind="layer", eps=0.5), (x - 0.5) / np.sqrt(12.75) * w, rtol=1e-15)


@pytest.mark.parametrize(("kind", "torchs"), [("rms", functional.rms_norm), ("layer", functional.layer_norm)])
def test_norms_agree_with_torch(kind, torchs):
    x, w = draw(10, (2, 3, 5, 7), (7,))
    for eps in (1e-6, 0.3):
        expected = torchs(torch.tensor(x), (7,), weight=torch.tensor(w), eps=eps)
        np.testing.assert_allclose(normed(x, w, kind=kind, eps=eps), expected.numpy(), rtol=1e-12, atol=1e-14)


def test_norms_are_per_head_and_do_not_apply_to_values():
    spec = layer_without_projections(num_heads=2, head_dim=2, qk_norm={"kind": "rms", "eps": 1e-12})
    weights = {"query_norm.weight": np.array([1.0, 10.0]), "key_norm.weight": np.array([2.0, 3.0])}
    got = attend(spec, weights, query=[[1, 1, 3, -3]], key=[[5, 5, 0, 7]], value=[[1, 2, 3, 4]])
    np.testing.assert_allclose(got.query_projection[:, 0], [[1, 10], [1, -10]], rtol=1e-9)
    np.testing.assert_allclose(got.key_projection[:, 0], [[2, 3], [0, 3 * np.sqrt(2)]], rtol=1e-9)
    assert got.value_projection[:, 0].tolist() == [[1, 2], [3, 4]]


def test_the_norm_comes_before_rope():
    """Weights (1, 0) leave (√2·3/5, 0) of (3, 4), and RoPE turns that by 1 radian. The other way round the second number would be 0."""
    spec = layer_without_projections(head_dim=2, qk_norm={"eps": 1e-12}, rope={})
    weights = {"query_norm.weight": np.array([1.0, 0.0]), "key_norm.weight": np.ones(2)}
    got = attend(spec, weights, query=[[3, 4]], key=[[1, 1], [1, 1]], query_offset=1)
    np.testing.assert_allclose(got.query_projection[0, 0], np.sqrt(2) * 0.6 * np.array([np.cos(1), np.sin(1)]), rtol=1e-9)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_with_a_norm_the_length_of_a_query_has_no_effect(kind):
    spec = LayerSpec(d_model=10, num_heads=2, qk_norm={"kind": kind, "eps": 1e-30}, bias=False, dtype="float64")
    weights = draw_all(11, spec)
    query, key = draw(12, (3, 5, 10), (3, 7, 10))
    got = attend(spec, weights, query=query, key=key)
    np.testing.assert_allclose(attend(spec, weights, query=1000 * query, key=key).output, got.output, rtol=1e-9)


# --- sinks ----------------------------------------------------------------------------------------------------------------------------


def test_a_sink_lowers_weights_as_computed_by_hand():
    """Scores log 1, log 2 and a sink of log 5: weights 1/8 and 2/8; the value of the sink is 0."""
    scores = np.log([1.0, 2.0])
    got = attend(layer_without_projections(sinks=True), {"sinks": np.log([5.0])}, query=[[1.0]], key=scores[:, None], value=[[8.0], [80.0]])
    np.testing.assert_allclose(got.attention_weights, [[[1 / 8, 2 / 8]]], rtol=1e-14)
    np.testing.assert_allclose(got.output, [[21.0]], rtol=1e-14)
    np.testing.assert_allclose(got.log_sum_exp, [[np.log(8)]], rtol=1e-14)
    np.testing.assert_allclose(got.scores, [[scores]], rtol=1e-14)


def attend_with_sinks(sinks, **request):
    """The result of a layer of two heads with these sinks, or none."""
    spec = LayerSpec(d_model=10, num_heads=2, sinks=sinks is not None, dtype="float64")
    weights = draw_all(13, LayerSpec(d_model=10, num_heads=2)) | ({} if sinks is None else {"sinks": np.asarray(sinks)})
    query, key = draw(14, (3, 5, 10), (3, 7, 10))
    return attend(spec, weights, query=query, key=key, **request)


def test_rows_sum_to_one_minus_the_sinks_share():
    got, plain = attend_with_sinks([0.3, 4.0]), attend_with_sinks(None)
    left = 1 - np.exp(np.array([0.3, 4.0])[:, None] - got.log_sum_exp)
    np.testing.assert_allclose(got.attention_weights.sum(axis=-1), left, rtol=1e-12)
    np.testing.assert_allclose(got.attention_weights / left[..., None], plain.attention_weights, rtol=1e-9)
    np.testing.assert_allclose(got.log_sum_exp, np.logaddexp(plain.log_sum_exp, np.array([0.3, 4.0])[:, None]), rtol=1e-12)
    np.testing.assert_array_equal(got.scores, plain.scores)


def test_a_sink_equals_a_key_with_value_zero():
    """In torch: a column is appended to the scores and dropped after the softmax."""
    got = attend_with_sinks([0.3, 4.0], valid_lens=[7, 2, 1])
    sink = np.broadcast_to(np.array([0.3, 4.0])[:, None, None], (3, 2, 5, 1))
    columns = torch.softmax(torch.tensor(np.concatenate([got.scores, sink], axis=-1)), dim=-1)
    np.testing.assert_allclose(got.attention_weights, columns[..., :-1].numpy(), rtol=1e-12)


def test_very_low_and_very_high_sinks_do_not_overflow():
    np.testing.assert_array_equal(attend_with_sinks([-1e4, -1e4]).attention_weights, attend_with_sinks(None).attention_weights)
    high = attend_with_sinks([1e4, -1e4])
    assert (high.attention_weights[:, 0] == 0).all()
    np.testing.assert_array_equal(high.log_sum_exp[:, 0], 1e4)
    assert not high.fully_masked.any()


def test_a_sink_does_not_unmask_a_row():
    lens = [7, 0, 3]
    got = attend_with_sinks([0.3, 4.0], valid_lens=lens)
    assert got.fully_masked.any(axis=(1, 2)).tolist() == [False, True, False]
    assert (got.attention_weights[1] == 0).all()
    assert (got.log_sum_exp[1] == -np.inf).all()
    uniform = attend_with_sinks([0.3, 4.0], valid_lens=lens, fully_masked="uniform")
    np.testing.assert_array_equal(uniform.attention_weights[1], 1 / 7)
    assert (uniform.log_sum_exp[1] == -np.inf).all()
    np.testing.assert_array_equal(uniform.attention_weights[0], got.attention_weights[0])


def test_dropout_is_applied_after_the_sink():
    got, plain = attend_with_sinks([0.3, 4.0], dropout={"p": 0.5, "seed": 3}), attend_with_sinks([0.3, 4.0])
    stream = np.random.RandomState(3).random_sample(plain.scores.shape)
    np.testing.assert_allclose(got.attention_weights, np.where(stream >= 0.5, 2 * plain.attention_weights, 0), rtol=1e-14)


@pytest.mark.parametrize("sinks", [None, [0.3, 4.0]])
def test_halves_of_the_keys_are_merged_by_their_log_sum_exp(sinks):
    """Both halves count the sink, so one is subtracted: Z = Z₁ + Z₂ - exp(sink), and the output is (Z₁ O₁ + Z₂ O₂) / Z."""
    first, second, whole = (attend_with_sinks(sinks, attend_keys=[[*keys]] * 3) for keys in ([1] * 4 + [0] * 3, [0] * 4 + [1] * 3, [1] * 7))
    parts = [np.exp(x.log_sum_exp)[..., None] for x in (first, second)]
    total = sum(parts) - (0 if sinks is None else np.exp(sinks)[:, None, None])
    np.testing.assert_allclose(np.log(total[..., 0]), whole.log_sum_exp, rtol=1e-12)
    merged = (parts[0] * first.head_outputs + parts[1] * second.head_outputs) / total
    np.testing.assert_allclose(merged, whole.head_outputs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("queries", [0, 2])
@pytest.mark.parametrize("keys", [0, 1])
@pytest.mark.parametrize("fully_masked", ["zero", "uniform"])
def test_axes_of_length_zero_give_empty_outputs(queries, keys, fully_masked):
    spec = LayerSpec(
        d_model=8,
        num_heads=4,
        num_kv_heads=2,
        rope={},
        alibi=True,
        sinks=True,
        qk_norm={},
        relative_bias={},
        window={"left": 3, "right": 3},
    )
    query, key = np.ones((3, queries, 8)), np.ones((3, keys, 8))
    got = attend(spec, draw_all(15, spec), query=query, key=key, query_offset="end", fully_masked=fully_masked)
    assert got.attention_weights.shape == (3, 4, queries, keys)
    assert got.key_projection.shape == (3, 2, keys, 2)
    assert got.output.shape == (3, queries, 8)
    assert got.fully_masked_rows == (0 if keys else 3 * 4 * queries)
    assert np.isfinite(got.output).all()
