"""The reference against hand-computed numbers, invariants, and torch where torch defines a result."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional

from attend.attention.initialization import draw_weights
from attend.attention.reference.arithmetic import NumpyArithmetic
from attend.attention.reference.forward import attend
from attend.check.random_cases import random_case
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS

TINY = LayerSpec(d_model=1, num_heads=1, scale=1.0, dtype="float64")  # output = weighted mean of the values themselves
ONES = {f"{name}.weight": np.ones((1, 1)) for name in PROJECTIONS}
LAYER = LayerSpec(d_model=10, num_heads=2, key_dim=7, value_dim=3, init="torch_linear", dtype="float64")
WEIGHTS = draw_weights(LAYER)


def tiny(queries, keys=None, values=None, **request):
    """One head of width 1 without projections, from flat lists; no batch."""
    columns = {"query": queries, "key": keys, "value": values}
    return attend(TINY, ONES, **{name: np.reshape(x, (-1, 1)) for name, x in columns.items() if x is not None}, **request)


def visible_keys(q, k, **request):
    """The keys that each query may attend to, [q, k]: all scores are equal, so exactly these have weight."""
    return (tiny(np.zeros(q), np.zeros(k), **request).attention_weights[0] > 0).astype(int).tolist()


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape) for shape in shapes)


def inputs(seed=0, b=3, q=5, k=11):
    return dict(zip(("query", "key", "value"), draw(seed, (b, q, 10), (b, k, 7), (b, k, 3)), strict=True))


# --- hand-computed numbers --------------------------------------------------------------------------------------------------------------


def test_two_queries_and_two_keys_equal_hand_computed_numbers():
    """Q = [[1, 0], [0, 2]], K = [[2, 0], [0, 1]], V = [[1, 2], [3, 4]], d = 2, one head, no projection."""
    spec = LayerSpec(d_model=2, num_heads=1, dtype="float64")
    got = attend(
        spec, {f"{n}.weight": np.eye(2) for n in PROJECTIONS}, query=[[1, 0], [0, 2]], key=[[2, 0], [0, 1]], value=[[1, 2], [3, 4]]
    )
    root = math.sqrt(2)
    np.testing.assert_allclose(got.scores, [[[root, 0], [0, root]]], rtol=1e-15)
    p = math.exp(root) / (math.exp(root) + 1)
    np.testing.assert_allclose(got.attention_weights, [[[p, 1 - p], [1 - p, p]]], rtol=1e-15)
    np.testing.assert_allclose(got.output, [[p + 3 * (1 - p), 2 * p + 4 * (1 - p)], [1 - p + 3 * p, 2 * (1 - p) + 4 * p]], rtol=1e-15)
    np.testing.assert_allclose(got.log_sum_exp, [[math.log(math.exp(root) + 1)] * 2], rtol=1e-15)
    assert got.fully_masked_rows == 0


def test_heads_are_columns_and_projections_are_applied_as_x_w_transposed_plus_b():
    spec = LayerSpec(d_model=2, num_heads=2, dtype="float64")
    weights = {
        "query.weight": np.array([[1.0, 2.0], [0.0, 1.0]]),
        "query.bias": np.array([0.5, 0.0]),
        "key.weight": np.array([[0.0, 1.0], [1.0, 0.0]]),
        "value.weight": np.array([[1.0, 0.0], [0.0, 10.0]]),
        "output.weight": np.array([[1.0, 1.0], [0.0, 1.0]]),
        "output.bias": np.array([0.0, 100.0]),
    }
    got = attend(spec, weights, query=[[1, 2]])
    assert got.query_projection.tolist() == [[[5.5]], [[2.0]]]  # [h, q, d]
    assert got.key_projection.tolist() == [[[2.0]], [[1.0]]]
    assert got.value_projection.tolist() == [[[1.0]], [[20.0]]]
    assert got.scores.tolist() == [[[11.0]], [[2.0]]]
    assert got.concatenated.tolist() == [[1.0, 20.0]]
    assert got.output.tolist() == [[21.0, 120.0]]


def test_shapes_of_all_outputs():
    got = attend(LAYER, WEIGHTS, **inputs())
    shapes = {name: getattr(got, name).shape for name in got.__slots__}
    assert shapes == {
        "output": (3, 5, 10),
        "attention_weights": (3, 2, 5, 11),
        "scores": (3, 2, 5, 11),
        "normalised": (3, 1, 2, 5, 11),
        "indexer_mask": (3, 5, 11),
        "latent": (3, 11, 0),
        "rope_key": (3, 11, 0),
        "log_sum_exp": (3, 2, 5),
        "query_projection": (3, 2, 5, 5),
        "key_projection": (3, 2, 11, 5),
        "value_projection": (3, 2, 11, 5),
        "head_outputs": (3, 2, 5, 5),
        "concatenated": (3, 5, 10),
        "fully_masked": (3, 2, 5),
    }
    assert {getattr(got, name).dtype for name in shapes} == {np.dtype(np.float64), np.dtype(bool)}


def test_the_key_defaults_to_the_query_and_the_value_to_the_key():
    square = LayerSpec(d_model=10, num_heads=2, dtype="float64")
    weights = draw_weights(square)
    x, y = draw(1, (3, 5, 10), (3, 7, 10))
    assert np.array_equal(attend(square, weights, query=x).output, attend(square, weights, query=x, key=x, value=x).output)
    assert np.array_equal(attend(square, weights, query=x, key=y).output, attend(square, weights, query=x, key=y, value=y).output)
    with pytest.raises(ValueError, match="expected a key beside the value"):
        attend(square, weights, query=x, value=y)


def test_scores_are_scaled_then_capped_then_biased_then_masked():
    """Scores of query 1 and keys 1, 2, 3: 2·tanh(0.5·s/2) + bias, then -inf."""
    got = tiny([1], [1, 2, 3], scale=0.5, softcap=2.0, bias=[[10, 20, 30]], block_mask=[[0, 0, 1]])
    expected = [2 * math.tanh(0.25) + 10, 2 * math.tanh(0.5) + 20, -math.inf]
    np.testing.assert_allclose(got.scores[0, 0], expected, rtol=1e-15)


def test_scale_and_softcap_of_a_call_replace_those_of_the_layer():
    spec = LayerSpec(d_model=1, num_heads=1, scale=3.0, softcap=2.0, dtype="float64")
    score = {
        name: attend(spec, ONES, query=[[1.0]], **request).scores.item()
        for name, request in {"layer": {}, "scale": {"scale": 0.0}, "cap": {"softcap": 5.0}, "no cap": {"softcap": 0}}.items()
    }
    expected = {"layer": 2 * math.tanh(1.5), "scale": 0.0, "cap": 5 * math.tanh(0.6), "no cap": 3.0}
    assert score == pytest.approx(expected, rel=1e-15)


# --- masks ----------------------------------------------------------------------------------------------------------------------------


def test_masks_block_the_expected_keys():
    assert visible_keys(2, 3, query_offset=0, attend_mask=[[1, 0, 1], [0, 0, 1]]) == [[1, 0, 1], [0, 0, 1]]
    assert visible_keys(2, 3, query_offset=0, block_mask=[[1, 0, 1], [0, 0, 1]]) == [[0, 1, 0], [1, 1, 0]]
    assert visible_keys(2, 3, attend_mask=[[True], [False]]) == [[1, 1, 1], [0, 0, 0]]
    assert visible_keys(2, 3, block_mask=[[0, 1, 0]], attend_keys=[1, 1, 0]) == [[1, 0, 0], [1, 0, 0]]
    assert visible_keys(2, 3, block_keys=[1, 0, 0]) == [[0, 1, 1], [0, 1, 1]]
    assert visible_keys(2, 3, valid_lens=2) == [[1, 1, 0], [1, 1, 0]]
    assert visible_keys(2, 3, valid_lens=[0, 3]) == [[0, 0, 0], [1, 1, 1]]
    assert visible_keys(2, 3, bias=[[0, -np.inf, 0], [0, 0, -np.inf]]) == [[1, 0, 1], [1, 1, 0]]


def test_causal_and_window_block_the_expected_keys():
    assert visible_keys(3, 3, causal=True) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert visible_keys(2, 4, causal=True, query_offset=0) == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert visible_keys(2, 4, causal=True, query_offset="end") == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible_keys(2, 4, causal=True, query_offset=-1) == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert visible_keys(3, 4, window={"left": 1, "right": 0}, query_offset=0) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert visible_keys(3, 4, window={"left": 0, "right": None}, query_offset=1) == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]
    assert visible_keys(2, 4, window={"left": 1, "right": 1}, causal=True, query_offset=2) == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible_keys(2, 2, window={"left": None, "right": None}) == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [[1, 1, 1, 0], [1, 1, 1, 1]]),
        ({"valid_lens": 3}, [[1, 1, 0, 0], [1, 1, 1, 0]]),
        ({"valid_lens": [1, 3]}, [[1, 0, 0, 0], [1, 1, 1, 0]]),  # the maximum, 3, places both
        ({"attend_keys": [0, 1, 0, 0]}, [[0, 0, 0, 0], [0, 1, 0, 0]]),
        ({"block_keys": [1, 0, 0, 1]}, [[0, 1, 0, 0], [0, 1, 1, 0]]),
        ({"block_keys": [0, 0, 1, 1], "valid_lens": 3}, [[1, 0, 0, 0], [1, 1, 0, 0]]),
        ({"block_mask": [[0, 0, 0, 1]]}, [[1, 1, 1, 0], [1, 1, 1, 0]]),  # a mask over pairs does not say which keys are padding
        ({"valid_lens": 0}, [[0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_offset_end_aligns_the_last_query_with_the_last_real_key(fields, expected):
    assert visible_keys(2, 4, causal=True, query_offset="end", **fields) == expected


def test_offsets_and_lengths_apply_to_each_item():
    zeros = {"query": np.zeros((2, 2, 1)), "key": np.zeros((2, 4, 1))}

    def both(**request):
        return (attend(TINY, ONES, **zeros, causal=True, **request).attention_weights[:, 0] > 0).astype(int).tolist()

    assert both(query_offset=[0, 2]) == [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    assert both(query_offset="end", valid_lens=[2, 4]) == [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    assert both(query_offset="end", valid_lens=[[1, 2], [4, 0]]) == [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 0], [0, 0, 0, 0]]]


@pytest.mark.parametrize("request_", [{"causal": True}, {"window": {"left": 1, "right": None}}])
def test_an_offset_is_required_if_causal_and_lengths_differ(request_):
    with pytest.raises(ValueError, match="expected query_offset, since 2 queries and 3 keys"):
        visible_keys(2, 3, **request_)
    visible_keys(3, 3, **request_)


def test_masks_of_every_rank_are_broadcast():
    mask = np.random.default_rng(2).random((5, 11)) < 0.5
    expected = attend(LAYER, WEIGHTS, **inputs(), attend_mask=mask).output
    for same in (np.broadcast_to(mask, (3, 5, 11)), mask[None], mask[None, None], np.broadcast_to(mask, (3, 2, 5, 11))):
        assert np.array_equal(attend(LAYER, WEIGHTS, **inputs(), attend_mask=same).output, expected)
        assert np.array_equal(attend(LAYER, WEIGHTS, **inputs(), block_mask=~same).output, expected)
        assert np.array_equal(attend(LAYER, WEIGHTS, **inputs(), bias=np.where(same, 0.0, -np.inf)).output, expected)


def test_rank_three_is_per_item_in_a_batch_and_per_head_without_one():
    per_item = np.zeros((3, 1, 11), bool)
    per_item[1, :, 4] = True
    batched = attend(LAYER, WEIGHTS, **inputs(), block_mask=per_item)
    assert np.argwhere((batched.attention_weights == 0).all(axis=(1, 2))).tolist() == [[1, 4]]
    per_head = np.zeros((2, 1, 11), bool)
    per_head[1, :, 4] = True
    single = attend(LAYER, WEIGHTS, **{name: x[0] for name, x in inputs().items()}, block_mask=per_head)
    assert np.argwhere((single.attention_weights == 0).all(axis=1)).tolist() == [[1, 4]]


# --- rows without a key ---------------------------------------------------------------------------------------------------------------


def test_fully_masked_rows_are_zero_uniform_or_an_error():
    mask = np.array([[1, 1, 1], [0, 0, 0]])
    zero = tiny([1, 1], [1, 2, 3], attend_mask=mask)
    assert zero.fully_masked.tolist() == [[False, True]]
    assert zero.fully_masked_rows == 1
    assert zero.attention_weights[0, 1].tolist() == [0, 0, 0]
    assert zero.output[1].tolist() == [0]
    assert zero.log_sum_exp[0, 1] == -np.inf
    assert (zero.scores[0, 1] == -np.inf).all()

    uniform = tiny([1, 1], [1, 2, 3], attend_mask=mask, fully_masked="uniform")
    assert uniform.attention_weights[0, 1].tolist() == [1 / 3] * 3
    assert uniform.output[1] == pytest.approx(2)
    assert uniform.log_sum_exp[0, 1] == -np.inf
    assert np.array_equal(uniform.output[0], zero.output[0])
    assert uniform.fully_masked_rows == 1

    with pytest.raises(ValueError, match=r"got none at \[b, h, q\] = \[0, 0, 1\]"):
        tiny([1, 1], [1, 2, 3], attend_mask=mask, fully_masked="error")
    assert tiny([1], [1], fully_masked="error").fully_masked_rows == 0


def test_a_fully_masked_row_becomes_the_bias_of_the_output_projection():
    got = attend(LAYER, WEIGHTS, **inputs(), valid_lens=[0, 11, 4])
    np.testing.assert_array_equal(got.output[0], np.broadcast_to(WEIGHTS["output.bias"], (5, 10)))
    assert got.fully_masked_rows == 2 * 5


def test_a_bias_of_minus_infinity_masks_rows():
    assert tiny([1, 1], [1, 2], bias=[[0, 0], [-np.inf, -np.inf]]).fully_masked.tolist() == [[False, True]]


@pytest.mark.parametrize("queries", [0, 2])
@pytest.mark.parametrize("keys", [0, 3])
@pytest.mark.parametrize("fully_masked", ["zero", "uniform"])
def test_axes_of_length_zero_give_empty_outputs(queries, keys, fully_masked):
    got = tiny(np.ones(queries), np.ones(keys), causal=True, query_offset="end", valid_lens=keys, fully_masked=fully_masked)
    assert got.attention_weights.shape == (1, queries, keys)
    assert got.output.shape == (queries, 1)
    assert got.fully_masked_rows == (queries if not keys else 0)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("fields", [{"block_keys": [[0, 0, 1, 0]]}, {"valid_lens": [[2]]}, {"bias": [[0, 0, -np.inf, -np.inf]]}])
def test_values_of_blocked_keys_have_no_effect(poison, fields):
    square = LayerSpec(d_model=10, num_heads=2, dtype="float64")
    weights = draw_weights(square)
    query, key = draw(3, (1, 1, 10), (1, 4, 10))
    clean = attend(square, weights, query=query, key=key, **fields)
    key[0, 2] = poison
    spoilt = attend(square, weights, query=query, key=key, **fields)
    np.testing.assert_array_equal(spoilt.attention_weights, clean.attention_weights)
    np.testing.assert_allclose(spoilt.output, clean.output, rtol=1e-14)


# --- invariants -----------------------------------------------------------------------------------------------------------------------


def test_rows_sum_to_one_and_log_sum_exp_is_the_logarithm_of_their_denominator():
    got = attend(LAYER, WEIGHTS, **inputs(), valid_lens=[4, 1, 11])
    np.testing.assert_allclose(got.attention_weights.sum(axis=-1), 1, rtol=1e-14)
    np.testing.assert_allclose(np.exp(got.scores - got.log_sum_exp[..., None]), got.attention_weights, rtol=1e-13)


def test_the_first_row_of_causal_attention_is_the_first_value():
    got = attend(LAYER, WEIGHTS, **inputs(), causal=True, query_offset=0)
    np.testing.assert_array_equal(got.head_outputs[:, :, 0], got.value_projection[:, :, 0])


def test_the_order_of_keys_does_not_matter():
    order = np.random.default_rng(4).permutation(11)
    x = inputs()
    keys = np.random.default_rng(5).random((3, 11)) < 0.6
    got = attend(LAYER, WEIGHTS, **x, attend_keys=keys)
    moved = attend(LAYER, WEIGHTS, query=x["query"], key=x["key"][:, order], value=x["value"][:, order], attend_keys=keys[:, order])
    np.testing.assert_allclose(moved.output, got.output, rtol=1e-13)
    np.testing.assert_allclose(moved.attention_weights, got.attention_weights[..., order], rtol=1e-13)


def test_a_constant_added_to_a_row_of_scores_does_not_change_weights():
    bias, constants = draw(6, (3, 2, 5, 11), (3, 2, 5, 1))
    got, moved = (attend(LAYER, WEIGHTS, **inputs(), bias=b) for b in (bias, bias + 100 * constants))
    np.testing.assert_allclose(moved.attention_weights, got.attention_weights, rtol=1e-11)
    np.testing.assert_allclose(moved.log_sum_exp, got.log_sum_exp + 100 * constants[..., 0], rtol=1e-11)


def test_huge_scores_do_not_overflow():
    got = tiny([1e4], [1, 1, 0.5])
    assert got.attention_weights[0, 0].tolist() == [0.5, 0.5, 0]
    assert got.log_sum_exp.item() == pytest.approx(1e4 + math.log(2), rel=1e-15)
    assert NumpyArithmetic({}).softmax(np.array([[-1e4, -np.inf]]), None).tolist() == [[1, 0]]


@pytest.mark.parametrize("seed", range(40))
def test_an_item_alone_equals_the_item_in_a_batch(seed):
    case = random_case(
        np.random.default_rng(seed), features={"key", "value", "mask", "key_mask", "valid_lens", "bias", "causal"}, batched=True
    )
    weights = draw_weights(case.spec)
    whole = attend(case.spec, weights, **case.request)
    for i in range(len(case.request["query"])):
        item = {name: _item(name, x, i) for name, x in case.request.items()}
        alone = attend(case.spec, weights, **item)
        np.testing.assert_allclose(alone.output, whole.output[i], rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(alone.fully_masked, whole.fully_masked[i])


def _item(name, x, i):
    """A field of item i alone: masks of rank 2 and settings have no batch axis."""
    if not isinstance(x, np.ndarray) or (x.ndim == 2 and name in ("attend_mask", "block_mask", "bias")):
        return x
    return x[0 if len(x) == 1 else i]


# --- head_scale and dropout -----------------------------------------------------------------------------------------------------------


def test_head_scale_multiplies_heads_and_not_weights():
    plain = attend(LAYER, WEIGHTS, **inputs())
    got = attend(LAYER, WEIGHTS, **inputs(), head_scale=[2, 0])
    np.testing.assert_array_equal(got.attention_weights, plain.attention_weights)
    np.testing.assert_array_equal(got.concatenated[..., :5], 2 * plain.concatenated[..., :5])
    np.testing.assert_array_equal(got.concatenated[..., 5:], 0)
    np.testing.assert_allclose(got.output, got.concatenated @ WEIGHTS["output.weight"].T + WEIGHTS["output.bias"], rtol=1e-14)
    per_item = attend(LAYER, WEIGHTS, **inputs(), head_scale=[[2, 0], [1, 1], [0, 3]])
    np.testing.assert_array_equal(per_item.output[0], got.output[0])
    np.testing.assert_array_equal(per_item.output[1], plain.output[1])


def test_dropout_draws_from_its_seed_and_scales_the_kept_weights():
    plain = attend(LAYER, WEIGHTS, **inputs())
    got = attend(LAYER, WEIGHTS, **inputs(), dropout={"p": 0.25, "seed": 7})
    stream = np.random.RandomState(7).random_sample(3 * 2 * 5 * 11)  # row-major over [b, h, q, k]
    for place, (b, h, q, k) in enumerate(np.ndindex(3, 2, 5, 11)):
        weight = plain.attention_weights[b, h, q, k]
        assert got.attention_weights[b, h, q, k] == (pytest.approx(weight / 0.75, rel=1e-15) if stream[place] >= 0.25 else 0)
    np.testing.assert_array_equal(got.scores, plain.scores)
    np.testing.assert_array_equal(got.log_sum_exp, plain.log_sum_exp)
    np.testing.assert_allclose(got.head_outputs, got.attention_weights @ got.value_projection, rtol=1e-14)
    none = attend(LAYER, WEIGHTS, **inputs(), dropout={"p": 0.0, "seed": 7})
    np.testing.assert_array_equal(none.output, plain.output)


# --- torch as the oracle --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_torch_multihead_attention(seed):
    """nn.MultiheadAttention with the same weights, its masks inverted; a row without keys is NaN there, so those are left out."""
    features = {"key", "value", "mask", "key_mask", "valid_lens"}
    rng = np.random.default_rng(seed)
    case = random_case(rng, features=features, rate=0.5, init="torch_mha", dtype="float64", batched=True)
    spec, request = case.spec.model_copy(update={"scale": case.spec.head_dim**-0.5, "softcap": None}), case.request
    weights = draw_weights(spec)
    got = attend(spec, weights, **request)
    query = torch.tensor(request["query"])
    key = torch.tensor(request["key"]) if "key" in request else query
    value = torch.tensor(request["value"]) if "value" in request else key
    blocked = torch.tensor(np.isneginf(got.scores)).flatten(0, 1)  # [b*h, q, k]
    torchs = torch.nn.MultiheadAttention(
        spec.d_model, spec.num_heads, bias=spec.bias, kdim=spec.key_dim, vdim=spec.value_dim, batch_first=True, dtype=torch.float64
    )
    _load(torchs, spec, weights)
    output, attention_weights = torchs(query, key, value, attn_mask=blocked, average_attn_weights=False)
    rows = ~got.fully_masked
    np.testing.assert_allclose(got.attention_weights[rows], attention_weights.detach().numpy()[rows], atol=1e-12)
    rows = rows.all(axis=1)  # [b, q]
    np.testing.assert_allclose(got.output[rows], output.detach().numpy()[rows], atol=1e-10)


def _load(module, spec, weights):
    with torch.no_grad():
        three = [torch.tensor(weights[f"{name}.weight"]) for name in PROJECTIONS[:3]]
        if module.in_proj_weight is not None:
            module.in_proj_weight.copy_(torch.cat(three))
        else:
            for parameter, tensor in zip((module.q_proj_weight, module.k_proj_weight, module.v_proj_weight), three, strict=True):
                parameter.copy_(tensor)
        module.out_proj.weight.copy_(torch.tensor(weights["output.weight"]))
        if spec.bias:
            module.in_proj_bias.copy_(torch.cat([torch.tensor(weights[f"{name}.bias"]) for name in PROJECTIONS[:3]]))
            module.out_proj.bias.copy_(torch.tensor(weights["output.bias"]))


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_torch_scaled_dot_product_attention(seed):
    """scaled_dot_product_attention over the reference's own projections; a row without keys is 0 in both."""
    features = {"key", "value", "mask", "key_mask", "valid_lens", "bias", "scale"}
    case = random_case(np.random.default_rng(seed), features=features, rate=0.5, dtype="float64")
    spec = case.spec.model_copy(update={"softcap": None})
    got = attend(spec, draw_weights(spec), **case.request)
    q, k, v = (torch.tensor(x) for x in (got.query_projection, got.key_projection, got.value_projection))
    bias = torch.zeros(got.scores.shape, dtype=torch.float64)
    if "bias" in case.request:
        given = np.asarray(case.request["bias"])
        bias = bias + torch.tensor(given[:, None] if given.ndim == 3 and got.scores.ndim == 4 else given)
    bias = bias.masked_fill(torch.tensor(np.isneginf(got.scores)), -torch.inf)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=case.request.get("scale", spec.scale))
    np.testing.assert_allclose(got.head_outputs, expected.numpy(), atol=1e-11)


@pytest.mark.parametrize("seed", range(3))
def test_causal_with_offset_zero_is_is_causal_of_torch(seed):
    q, k, v = draw(seed, (3, 5, 10), (3, 11, 7), (3, 11, 3))
    got = attend(LAYER, WEIGHTS, query=q, key=k, value=v, causal=True, query_offset=0)
    projections = (torch.tensor(x) for x in (got.query_projection, got.key_projection, got.value_projection))
    expected = functional.scaled_dot_product_attention(*projections, is_causal=True)
    np.testing.assert_allclose(got.head_outputs, expected.numpy(), atol=1e-13)


def test_the_reference_does_not_import_torch():
    modules = "attend.attention.reference.forward, attend.check.random_cases"
    program = f"import sys; import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
