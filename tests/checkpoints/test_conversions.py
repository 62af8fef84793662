"""Conversion of packed and transposed matrices, kernels with an axis for heads, textbooks' matrices, and this service's own layout.

Layers that the frameworks themselves saved are in test_frameworks.py.
"""

import math

import numpy as np
import pytest
import torch

from attend.checkpoints import read_layer, read_model_layer
from attend.errors import InvalidRequest
from attend.spec import LayerSpec
from support.checkpoints import B, K, Q, assert_close, attend_heads, draw, output_of_layer, split_heads, with_prefix
from support.model_cases import MODELS, tensors_of


@pytest.mark.parametrize("widths", [{}, {"kdim": 11, "vdim": 13}], ids=["packed", "kdim and vdim"])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_mha_has_packed_biases_even_with_separate_matrices(widths, bias):
    """`in_proj_bias` is [q; k; v] in both cases; the real module gives the expected output."""
    mha = torch.nn.MultiheadAttention(15, 3, bias=bias, batch_first=True, dtype=torch.float64, **widths)
    for i, parameter in enumerate(mha.parameters()):
        parameter.data = torch.from_numpy(draw(i, *parameter.shape))
    inputs = draw(10, B, Q, 15), draw(11, B, K, widths.get("kdim", 15)), draw(12, B, K, widths.get("vdim", 15))
    with torch.no_grad():
        expected = mha(*map(torch.from_numpy, inputs))[0].numpy()
    checkpoint = {name: x.numpy() for name, x in mha.state_dict().items()}

    assert ("in_proj_weight" in checkpoint) == (not widths)
    assert_close(output_of_layer(checkpoint, inputs, spec={"num_heads": 3}), expected)


def test_the_layer_norm_of_berts_output_is_ignored():
    """`attention.output.LayerNorm` is below the layer's name, and no part of attention."""
    layer = {f"self.{name}.{kind}": draw(i, *shape) for i, (name, kind, shape) in enumerate(bert_parts())}
    checkpoint = {f"encoder.layer.3.attention.{name}": x for name, x in layer.items()}
    checkpoint |= with_prefix("encoder.layer.3.attention.output", dense__weight=draw(9, 15, 15), dense__bias=draw(8, 15))
    bare = read_layer(checkpoint, spec={"num_heads": 3})
    checkpoint |= with_prefix("encoder.layer.3.attention.output.LayerNorm", weight=draw(7, 15), bias=draw(6, 15))
    fields, weights = read_layer(checkpoint, spec={"num_heads": 3})
    assert (fields, set(weights)) == (bare[0], set(bare[1]))


def bert_parts():
    return [(name, kind, shape) for name in ("query", "key", "value") for kind, shape in (("weight", (15, 15)), ("bias", (15,)))]


def gpt2(**more):
    return (
        with_prefix(
            "h.0.attn", c_attn__weight=draw(1, 15, 45), c_attn__bias=draw(2, 45), c_proj__weight=draw(3, 15, 15), c_proj__bias=draw(4, 15)
        )
        | more
    )


def gpt2_expected(x, w):
    q, k, v = (split_heads(part, 3) for part in np.split(x @ w["h.0.attn.c_attn.weight"] + w["h.0.attn.c_attn.bias"], 3, axis=-1))
    return attend_heads(q, k, v).reshape(B, Q, 15) @ w["h.0.attn.c_proj.weight"] + w["h.0.attn.c_proj.bias"]


def test_gpt2_matrices_are_transposed():
    """Conv1D is x @ W + b: c_attn's columns are [q | k | v], and c_proj, which is square, is transposed too."""
    checkpoint, x = gpt2(), draw(5, B, Q, 15)
    assert_close(output_of_layer(checkpoint, [x], spec={"num_heads": 3}), gpt2_expected(x, checkpoint))


def test_gpt2_mask_buffers_are_ignored():
    """Old checkpoints hold the causal mask under `attn.bias`; a bias of another rank is not understood."""
    mask, x = np.tril(np.ones((1, 1, 9, 9), np.uint8)), draw(5, B, Q, 15)
    buffers = with_prefix("h.0.attn", bias=mask, masked_bias=np.array(-1e4, np.float32))
    assert_close(output_of_layer(gpt2(**buffers), [x], spec={"num_heads": 3}), gpt2_expected(x, gpt2()))
    with pytest.raises(InvalidRequest, match=r"at /weights/h\.0\.attn\.bias"):
        read_layer(gpt2(**with_prefix("h.0.attn", bias=draw(6, 15))), spec={"num_heads": 3})


def test_gpt2_cross_attention_has_a_separate_matrix_of_queries():
    """`q_attn` [in, in], and `c_attn` [in, 2*in] of keys and values."""
    w = with_prefix("h.0.crossattention", q_attn__weight=draw(1, 15, 15), q_attn__bias=draw(2, 15), c_attn__weight=draw(3, 15, 30))
    w |= with_prefix("h.0.crossattention", c_attn__bias=draw(4, 30), c_proj__weight=draw(5, 15, 15), c_proj__bias=draw(6, 15))
    x, y = draw(7, B, Q, 15), draw(8, B, K, 15)
    at = w.__getitem__
    q = split_heads(x @ at("h.0.crossattention.q_attn.weight") + at("h.0.crossattention.q_attn.bias"), 3)
    packed = y @ at("h.0.crossattention.c_attn.weight") + at("h.0.crossattention.c_attn.bias")
    k, v = (split_heads(part, 3) for part in np.split(packed, 2, axis=-1))
    expected = attend_heads(q, k, v).reshape(B, Q, 15) @ at("h.0.crossattention.c_proj.weight") + at("h.0.crossattention.c_proj.bias")
    assert_close(output_of_layer(w, [x, y], spec={"num_heads": 3}), expected)


def test_vit_may_have_a_bias_of_the_output_alone():
    """qkv_bias=False leaves the output's bias; both spellings are read alike."""
    matrices = dict(zip("qkvo", (draw(i, 15, 15) for i in range(4)), strict=True))
    old = {f"encoder.layer.0.attention.attention.{name}.weight": matrices[name[0]] for name in ("query", "key", "value")}
    old |= with_prefix("encoder.layer.0.attention.output.dense", weight=matrices["o"], bias=draw(5, 15))
    new = {f"layers.0.attention.{letter}_proj.weight": x for letter, x in matrices.items()} | {
        "layers.0.attention.o_proj.bias": draw(5, 15)
    }
    (fields, weights), (others, same) = (read_layer(x, spec={"num_heads": 3}) for x in (old, new))
    assert fields == others
    assert fields["bias"] == {"query": False, "key": False, "value": False, "output": True}
    assert all(np.array_equal(weights[name], same[name]) for name in weights)


def test_timm_stacks_rows_of_queries_keys_and_values():
    """rows [3, heads, dim]."""
    w = with_prefix(
        "blocks.0.attn", qkv__weight=draw(1, 45, 15), qkv__bias=draw(2, 45), proj__weight=draw(3, 15, 15), proj__bias=draw(4, 15)
    )
    x = draw(5, B, Q, 15)
    qkv = np.einsum("bni,chdi->cbhnd", x, w["blocks.0.attn.qkv.weight"].reshape(3, 3, 5, 15))
    q, k, v = qkv + w["blocks.0.attn.qkv.bias"].reshape(3, 1, 3, 1, 5)
    expected = attend_heads(q, k, v).reshape(B, Q, 15) @ w["blocks.0.attn.proj.weight"].T + w["blocks.0.attn.proj.bias"]
    assert_close(output_of_layer(w, [x], spec={"num_heads": 3}), expected)


def fused(**more):
    w = with_prefix("h.0.self_attention", query_key_value__weight=draw(1, 45, 15), query_key_value__bias=draw(2, 45))
    return w | with_prefix("h.0.self_attention", dense__weight=draw(3, 15, 15), dense__bias=draw(4, 15), **more)


def fused_expected(x, per_head, added=0.0):
    """Each head's rows picked one by one."""
    w, bias = fused()["h.0.self_attention.query_key_value.weight"], fused()["h.0.self_attention.query_key_value.bias"]

    def rows(head, which):
        start = 15 * head + 5 * which if per_head else 15 * which + 5 * head
        return x @ w[start : start + 5].T + bias[start : start + 5]

    q, k, v = (np.stack([rows(head, which) for head in range(3)], axis=1) for which in range(3))
    out = attend_heads(q, k, v, added=added).reshape(B, Q, 15)
    return out @ fused()["h.0.self_attention.dense.weight"].T + fused()["h.0.self_attention.dense.bias"]


def test_the_order_of_fused_rows_must_be_given():
    """Two packings have the same names and shapes: without a layout they are refused, with one they are read as it says."""
    x = draw(5, B, Q, 15)
    with pytest.raises(InvalidRequest, match=r"bloom .* fused .* neox .*at /layout"):
        read_layer(fused(), spec={"num_heads": 3})
    far = -np.abs(np.arange(Q) - np.arange(Q)[:, None])
    slopes = np.array([2**-4, 2**-8, 2**-2])[:, None, None]
    assert_close(output_of_layer(fused(), [x], layout="bloom", spec={"num_heads": 3}), fused_expected(x, True, slopes * far))
    assert_close(output_of_layer(fused(), [x], layout="neox", spec={"num_heads": 3, "rope": None}), fused_expected(x, True))
    assert_close(output_of_layer(fused(), [x], layout="fused", spec={"num_heads": 3}), fused_expected(x, False))


def test_neox_needs_the_number_of_rotated_dims():
    """rotary_pct is 0.25 in its models; a table of frequencies shows it."""
    with pytest.raises(InvalidRequest, match="at /spec/rope/dims"):
        read_layer(fused(), layout="neox", spec={"num_heads": 3, "rope": {"theta": 1e4}})
    with_frequencies = fused(rotary_emb__inv_freq=draw(1, 2), bias=np.ones((1, 1, 9, 9), bool), masked_bias=np.array(-1e9))
    assert read_layer(with_frequencies, layout="neox", spec={"num_heads": 3, "rope": {}})[0]["rope"] == {"interleaved": False, "dims": 4}


def test_fused_rows_of_grouped_attention_are_split_by_the_numbers_of_heads():
    """6 heads of 5, 2 for keys and values: rows 30, 10, 10."""
    w = {"qkv_proj.weight": draw(1, 50, 7), "o_proj.weight": draw(2, 11, 30)}
    fields, weights = read_layer(w, layout="fused", spec={"num_heads": 6, "num_kv_heads": 2})
    assert (fields["head_dim"], fields["output_dim"]) == (5, 11)
    cuts = np.split(w["qkv_proj.weight"], [30, 40])
    assert all(np.array_equal(weights[f"{name}.weight"], x) for name, x in zip(("query", "key", "value"), cuts, strict=True))


def test_rows_grouped_by_kv_head_are_not_split_as_fused_ones():
    """Falcon-40B has [kv heads, queries of each + 2, head_dim] under names and shapes of [q; k; v]; with one kv head both are the same."""
    w = {"self_attention.query_key_value.weight": draw(1, 50, 7), "self_attention.dense.weight": draw(2, 7, 30)}
    with pytest.raises(InvalidRequest, match=r"grouped by kv head \(Falcon-40B.*qkv_proj and o_proj.*got 2, at /spec/num_kv_heads"):
        read_layer(w, layout="fused", spec={"num_heads": 6, "num_kv_heads": 2})
    one = {**w, "self_attention.query_key_value.weight": draw(1, 40, 7)}
    assert read_layer(one, layout="fused", spec={"num_heads": 6, "num_kv_heads": 1})[0]["head_dim"] == 5


def test_layout_neox_reads_rows_grouped_by_kv_head():
    """Falcon-40B's layer has the same weights by its names as by its config."""
    model = MODELS["falcon_several"]
    tensors = tensors_of(model["cases"][0])
    fields, weights = read_layer(tensors, layout="neox", spec={"num_heads": 4, "num_kv_heads": 2, "rope": {"theta": 10000.0, "dims": 8}})
    by_config, same = read_model_layer(tensors, model["config"], 0)
    assert fields == {name: x for name, x in by_config.items() if name in fields}
    assert all(np.array_equal(weights[name], same[name]) for name in same)


def test_rows_of_kv_heads_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(
        InvalidRequest, match=r"for 3 heads and 2 of keys and values.*at /weights/h\.0\.self_attention\.query_key_value\.weight"
    ):
        read_layer(fused(), layout="neox", spec={"num_heads": 3, "num_kv_heads": 2, "rope": None})


def kernels(names, dims=(2, 3, 3, 7), widths=(5, 11, 13, 17), heads_first=False):
    """Three heads; query and key heads 2 wide, value heads 7; inputs 5, 11, 13 wide, output 17."""
    d, h, kv, dv = dims
    shapes = [(widths[0], h, d), (widths[1], kv, d), (widths[2], kv, dv)]
    order = (1, 0, 2) if heads_first else (0, 1, 2)
    w = {name[0]: draw(i, *shape).transpose(order) for i, (name, shape) in enumerate(zip(names, shapes, strict=False))}
    w |= {name[1]: draw(i + 5, *shape[1:]) for i, (name, shape) in enumerate(zip(names, shapes, strict=False))}
    return w | {names[3][0]: draw(8, h, dv, widths[3]), names[3][1]: draw(9, widths[3])}


def kernels_expected(inputs, group=1):
    w = kernels([("q", "qb"), ("k", "kb"), ("v", "vb"), ("o", "ob")])
    q, k, v = (np.einsum("bni,ihd->bhnd", x, w[n]) + w[f"{n}b"][:, None] for n, x in zip("qkv", inputs, strict=True))
    return np.einsum("bqhd,hdo->bqo", attend_heads(q, k, v), w["o"]) + w["ob"]


KERAS = [(f"mha/{name}/kernel", f"mha/{name}/bias") for name in ("query", "key", "value", "attention_output")]
KERAS_FILE = [(f"layers.mha.{name}_dense.vars.0", f"layers.mha.{name}_dense.vars.1") for name in ("query", "key", "value", "output")]
TENSORFLOW = [(f"{weight}:0", f"{bias}:0") for weight, bias in KERAS]
LENS = [(f"blocks.0.attn.W_{x}", f"blocks.0.attn.b_{x}") for x in "QKVO"]
LENS_GROUPED = [(f"blocks.0.attn.{m}W_{x}", f"blocks.0.attn.{m}b_{x}") for m, x in zip(("", "_", "_", ""), "QKVO", strict=True)]


@pytest.mark.parametrize("names", [KERAS, KERAS_FILE, TENSORFLOW, LENS, LENS_GROUPED], ids=["paths", "file", "tf", "lens", "grouped lens"])
def test_kernels_with_an_axis_for_heads_need_no_spec(names):
    """[in, heads, dim] of Keras, [heads, in, dim] of TransformerLens; output [heads, dim, out] in both. No spec is needed."""
    inputs = draw(20, B, Q, 5), draw(21, B, K, 11), draw(22, B, K, 13)
    checkpoint = kernels(names, heads_first=names in (LENS, LENS_GROUPED))
    assert_close(output_of_layer(checkpoint, inputs), kernels_expected(inputs))


def test_flax_with_normalize_qk_has_layer_norms():
    names = [(f"params/attn/{name}/kernel", f"params/attn/{name}/bias") for name in ("query", "key", "value", "out")]
    checkpoint = kernels(names) | {"params/attn/query_ln/scale": draw(1, 2), "params/attn/key_ln/scale": draw(2, 2)}
    fields, weights = read_layer(checkpoint)
    assert fields["qk_norm"] == {"kind": "layer", "eps": 1e-6}
    assert weights["query_norm.weight"] is checkpoint["params/attn/query_ln/scale"]


def test_keras_grouped_query_attention():
    """Four query heads over two of keys and values."""
    fields, _ = read_layer(kernels(KERAS, dims=(2, 4, 2, 7)))
    assert (fields["num_heads"], fields["num_kv_heads"], fields["head_dim"], fields["value_head_dim"]) == (4, 2, 2, 7)


def test_transformerlens_buffers_are_ignored_and_rotary_ones_require_rope():
    buffers = with_prefix("blocks.0.attn", mask=np.ones((9, 9), bool), IGNORE=np.array(-np.inf, np.float32))
    checkpoint = kernels(LENS, heads_first=True) | buffers
    assert read_layer(checkpoint)[0]["num_heads"] == 3
    rotary = checkpoint | with_prefix("blocks.0.attn", rotary_sin=draw(1, 9, 2), rotary_cos=draw(2, 9, 2))
    with pytest.raises(InvalidRequest, match="at /spec/rope"):
        read_layer(rotary)
    assert read_layer(rotary, spec={"rope": {"theta": 1e4}})[0]["rope"] == {"theta": 1e4}


def d2l_expected(w, inputs):
    q, k, v = (split_heads(x @ w[f"W_{letter}"], 3) for letter, x in zip("qkv", inputs, strict=True))
    return attend_heads(q, k, v).reshape(B, Q, 15) @ w["W_o"]


@pytest.mark.parametrize(
    ("spelling", "transposed"),
    [
        ("W_{}.weight", True),
        ("attention.W_{}.weight", True),
        ("params/attention/W_{}/kernel", False),
        ("W_{}/vars/0", False),
        ("W_{}", False),
    ],
)
def test_names_of_textbook_matrices_say_whether_they_are_transposed(spelling, transposed):
    """`.weight` is [out, in], a kernel or a bare matrix [in, out]; W_o is square, so only its numbers show it."""
    w = {"W_q": draw(1, 7, 15), "W_k": draw(2, 11, 15), "W_v": draw(3, 13, 15), "W_o": draw(4, 15, 15)}
    inputs = draw(5, B, Q, 7), draw(6, B, K, 11), draw(7, B, K, 13)
    checkpoint = {spelling.format(name[-1]): x.T if transposed else x for name, x in w.items()}
    assert_close(output_of_layer(checkpoint, inputs, spec={"num_heads": 3}), d2l_expected(w, inputs))


def test_layout_attend_returns_the_same_spec_and_weights():
    """Every part of a spec that has weights; the spec is the stored one."""
    fields = {
        "d_model": 7,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "key_dim": 5,
        "output_dim": 3,
        "sinks": True,
        "dtype": "float64",
    }
    fields |= {"bias": {"query": True, "key": False, "value": True, "output": False}, "qk_norm": {"kind": "layer"}, "window": {"left": 2}}
    fields |= {"relative_bias": {"buckets": 16, "max_distance": 40, "bidirectional": False}, "scale": 0.5, "softcap": 3.0}
    spec = LayerSpec.model_validate(fields)
    weights = {name: draw(i, *shape) for i, (name, shape) in enumerate(spec.weight_shapes().items())}
    for prefix, how in (("", {}), ("my/layer/", {"prefix": "my/layer"})):
        read, same = read_layer({f"{prefix}{name}": x for name, x in weights.items()}, spec=spec.model_dump(mode="json"), **how)
        assert LayerSpec.model_validate(read) == spec
        assert all(same[name] is x for name, x in weights.items())


def test_a_layer_without_projections_has_only_other_weights():
    given = {"d_model": 6, "num_heads": 3, "projections": False, "sinks": True}
    fields, weights = read_layer({"sinks": draw(1, 3)}, spec=given)
    assert fields == given | {"dtype": "float64"}
    assert set(weights) == {"sinks"}
    with pytest.raises(InvalidRequest, match=r"at /weights/query\.weight"):
        read_layer({"query.weight": draw(1, 3, 3)}, spec=given)


def test_given_fields_take_precedence_over_assumed_ones():
    """Fields that no tensor determines are kept, and replace the assumptions of the layout."""
    checkpoint = {"query_key_value.weight": draw(1, 45, 15), "dense.weight": draw(2, 15, 15)}
    checkpoint |= {"query_key_value.bias": draw(3, 45), "dense.bias": draw(4, 15)}
    spec = {"num_heads": 3, "scale": 5**-0.5 / 2, "window": {"left": 3}, "alibi": False}
    fields, _ = read_layer(checkpoint, layout="bloom", spec=spec)
    assert {name: fields[name] for name in spec} == spec
    assert math.isclose(LayerSpec.model_validate(fields).scale, 5**-0.5 / 2)
