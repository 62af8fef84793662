"""Layouts of layers whose results depend on positions: RoPE in its two spellings, norms before it, T5's shared tables."""

import ml_dtypes
import numpy as np
import pytest

from attend.checkpoints import read_layer
from attend.errors import InvalidRequest
from support.checkpoints import B, Q, assert_close, attend_heads, draw, output_of_layer, split_heads, with_prefix

HALVES = {"theta": 10000.0, "interleaved": False}


def llama(prefix="layers.0.self_attn", heads=4, kv_heads=2, dim=6, width=7, **more):
    rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    w = {f"{prefix}.{letter}_proj.weight": draw(i, n, width) for i, (letter, n) in enumerate(rows.items())}
    return w | {f"{prefix}.o_proj.weight": draw(9, width, heads * dim)} | with_prefix(prefix, **more)


def rotate_pairs(x, theta=10000.0):
    """RoPE in pairs, as Meta's code has it: view_as_complex, times cis."""
    pairs = np.ascontiguousarray(x).view(complex)
    frequencies = theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    return (pairs * np.exp(1j * np.outer(np.arange(x.shape[-2]), frequencies))).view(float)


def test_meta_llama_rotates_pairs_and_hugging_face_permuted_its_rows_for_halves():
    """Rows of q and k in Meta's files, `view(H, D/2, 2).transpose(1, 2)` of them in Hugging Face's: both are read to the same layer."""
    meta = {name.replace("_proj", "").replace("self_attn.", "attention.w"): x for name, x in llama().items()}
    x, spec = draw(5, B, Q, 7), {"num_heads": 4, "rope": {"theta": 10000.0}}
    halves = spec | {"rope": HALVES}
    q = rotate_pairs(split_heads(x @ meta["layers.0.attention.wq.weight"].T, 4))
    k = np.repeat(rotate_pairs(split_heads(x @ meta["layers.0.attention.wk.weight"].T, 2)), 2, axis=1)
    v = np.repeat(split_heads(x @ meta["layers.0.attention.wv.weight"].T, 2), 2, axis=1)
    expected = attend_heads(q, k, v).reshape(B, Q, 24) @ meta["layers.0.attention.wo.weight"].T
    permuted = llama()
    for letter, heads in (("q", 4), ("k", 2)):
        name = f"layers.0.self_attn.{letter}_proj.weight"
        permuted[name] = permuted[name].reshape(heads, 3, 2, 7).swapaxes(1, 2).reshape(-1, 7)
    assert_close(output_of_layer(meta, [x], spec=spec), expected)
    assert_close(output_of_layer(permuted, [x], spec=halves), expected)


def test_head_dim_times_heads_may_differ_from_d_model():
    """head_dim 6 x 4 heads over width 7; the key and value heads follow from the rows."""
    fields, _ = read_layer(llama(), spec={"num_heads": 4, "rope": None})
    assert {name: fields[name] for name in ("d_model", "head_dim", "num_kv_heads", "bias")} == {
        "d_model": 7,
        "head_dim": 6,
        "num_kv_heads": 2,
        "bias": False,
    }


def test_rope_is_never_assumed_from_names_alone():
    """Theta is in no tensor, nor are halves or pairs; null means none. Cohere, GLM-4, Llama 4 and Nemotron have the same names."""
    with pytest.raises(InvalidRequest, match=r"interleaved.*Cohere.*Nemotron.*null.*at /spec/rope"):
        read_layer(llama(), spec={"num_heads": 4})
    for layout in (None, "llama"):
        with pytest.raises(InvalidRequest, match=r"Cohere.*at /spec/rope/interleaved"):
            read_layer(llama(), layout=layout, spec={"num_heads": 4, "rope": {"theta": 1e4}})
        with pytest.raises(InvalidRequest, match="at /spec/rope/theta"):
            read_layer(llama(), layout=layout, spec={"num_heads": 4, "rope": {"interleaved": False}})
    pairs = {"theta": 1e4, "interleaved": True, "dims": 4}
    assert read_layer(llama(), spec={"num_heads": 4, "rope": pairs})[0]["rope"] == pairs
    assert read_layer(llama(), spec={"num_heads": 4, "rope": None})[0]["rope"] is None
    given = {"theta": 5e5, "interleaved": False, "scaling": {"type": "linear", "factor": 2.0}}
    assert read_layer(llama(), spec={"num_heads": 4, "rope": given})[0]["rope"] == given


def test_inv_freq_determines_the_number_of_rotated_dims():
    """`rotary_emb.inv_freq` [dims / 2]."""
    checkpoint = llama(rotary_emb__inv_freq=draw(1, 2))
    assert read_layer(checkpoint, spec={"num_heads": 4, "rope": HALVES})[0]["rope"]["dims"] == 4
    with pytest.raises(InvalidRequest, match="expected 4, as the tensors have it, got 6, at /spec/rope/dims"):
        read_layer(checkpoint, spec={"num_heads": 4, "rope": HALVES | {"dims": 6}})


def test_qwen2_has_biases_except_for_the_output():
    checkpoint = llama(q_proj__bias=draw(1, 24), k_proj__bias=draw(2, 12), v_proj__bias=draw(3, 12))
    fields, weights = read_layer(checkpoint, spec={"num_heads": 4, "rope": HALVES})
    assert fields["bias"] == {"query": True, "key": True, "value": True, "output": False}
    assert "output.bias" not in weights


def test_qwen3_norms_determine_the_number_of_heads_and_precede_rope():
    """Normed and then rotated; the other order gives other numbers."""
    checkpoint, x = llama(q_norm__weight=draw(20, 6), k_norm__weight=draw(21, 6)), draw(5, B, Q, 7)

    def rotated(name, heads):
        y = split_heads(x @ checkpoint[f"layers.0.self_attn.{name}_proj.weight"].T, heads)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * checkpoint[f"layers.0.self_attn.{name}_norm.weight"]
        angles = np.outer(np.arange(Q), 10000.0 ** (-np.arange(0, 6, 2) / 6))
        a, b, cos, sin = y[..., :3], y[..., 3:], np.cos(angles), np.sin(angles)
        return np.repeat(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1), 4 // heads, axis=1)

    v = np.repeat(split_heads(x @ checkpoint["layers.0.self_attn.v_proj.weight"].T, 2), 2, axis=1)
    expected = attend_heads(rotated("q", 4), rotated("k", 2), v).reshape(B, Q, 24) @ checkpoint["layers.0.self_attn.o_proj.weight"].T
    assert_close(output_of_layer(checkpoint, [x], spec={"rope": HALVES}), expected)


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["OLMo-2 7B", "OLMo-2 32B"])
@pytest.mark.parametrize("given", [{}, {"num_heads": 4}, {"head_dim": 6}], ids=str)
def test_a_norm_as_wide_as_all_heads_is_not_read_as_that_of_one_head(kv_heads, given):
    checkpoint = llama(kv_heads=kv_heads, q_norm__weight=draw(20, 24), k_norm__weight=draw(21, 6 * kv_heads))
    expected = r"one head\. One as wide as all heads \(OLMo-2.*needs num_heads 1.*at /weights/layers\.0\.self_attn\.q_norm\.weight"
    with pytest.raises(InvalidRequest, match=expected):
        read_layer(checkpoint, spec={"rope": HALVES, **given})


def test_a_layer_of_one_head_may_have_norms_if_the_spec_says_so():
    checkpoint = llama(heads=1, kv_heads=1, q_norm__weight=draw(20, 6), k_norm__weight=draw(21, 6))
    for given in ({"num_heads": 1}, {"head_dim": 6}):
        fields, _ = read_layer(checkpoint, spec={"rope": HALVES, **given})
        assert (fields["num_heads"], fields["head_dim"]) == (1, 6)


def test_gemma3_norms_are_stored_less_one_and_not_mistaken_for_those_of_qwen3():
    """Both have the same names. With Gemma's feed-forward norm, the layout has to be given. 1 is added in float32."""
    checkpoint = {name: x.astype(ml_dtypes.bfloat16) for name, x in llama(q_norm__weight=draw(1, 6), k_norm__weight=draw(2, 6)).items()}
    checkpoint["layers.0.pre_feedforward_layernorm.weight"] = draw(3, 7).astype(ml_dtypes.bfloat16)
    with pytest.raises(InvalidRequest, match=r"gemma3 .* llama .*at /layout"):
        read_layer(checkpoint, spec={"rope": {}})
    fields, weights = read_layer(checkpoint, layout="gemma3", spec={"rope": {}})
    assert fields["dtype"] == "bfloat16"
    stored = checkpoint["layers.0.self_attn.q_norm.weight"].astype(np.float32)
    assert np.array_equal(weights["query_norm.weight"], stored + 1)
    assert weights["query_norm.weight"].dtype == np.float32


def test_sinks_determine_the_number_of_heads():
    fields, weights = read_layer(llama(sinks=draw(1, 4)), spec={"rope": HALVES})
    assert (fields["sinks"], fields["num_heads"], weights["sinks"].shape) == (True, 4, (4,))


def t5():
    """Two stacks of two blocks, 3 heads of 5 over width 7; each stack's table is in its block 0, and differs."""
    w = {}
    layers = [("encoder", 0, "SelfAttention"), ("decoder", 0, "SelfAttention"), ("decoder", 1, "EncDecAttention")]
    for i, (stack, place, kind) in enumerate(layers):
        for block in (0, 1):
            prefix = f"{stack}.block.{block}.layer.{place}.{kind}"
            w |= with_prefix(prefix, **{f"{x}__weight": draw(40 * i + 9 * block + j, *s) for j, (x, s) in enumerate(t5_shapes().items())})
    for i, stack in enumerate(("encoder", "decoder")):
        w[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = draw(90 + i, 8, 3)
    return w


def t5_shapes():
    return {"q": (15, 7), "k": (15, 7), "v": (15, 7), "o": (7, 15)}


def test_t5_has_scale_1_and_uses_the_table_of_the_first_block():
    """Scale 1, and block 1 is read with block 0's table of its own stack, by T5's buckets."""
    w, x = t5(), draw(5, B, Q, 7)
    prefix = "encoder.block.1.layer.0.SelfAttention"
    q, k, v = (split_heads(x @ w[f"{prefix}.{letter}.weight"].T, 3) for letter in "qkv")
    far = np.array([[0, 5, 6], [1, 0, 5], [2, 1, 0]])  # j - i = 1, 2 have buckets 5, 6 of 8 (4 + |j - i|), -1, -2 have 1, 2
    added = w["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"][far].transpose(2, 0, 1)
    expected = attend_heads(q, k, v, scale=1.0, added=added).reshape(B, Q, 15) @ w[f"{prefix}.o.weight"].T
    assert_close(output_of_layer(w, [x], prefix=prefix), expected)


def test_t5_stacks_have_separate_tables_and_decoders_are_not_bidirectional():
    w = t5()
    read = {stack: read_layer(w, prefix=f"{stack}.block.1.layer.0") for stack in ("encoder", "decoder")}
    for stack, (fields, weights) in read.items():
        assert weights["relative_bias"] is w[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        assert fields["relative_bias"] == {"buckets": 8, "max_distance": 128, "bidirectional": stack == "encoder"}
        assert (fields["scale"], fields["num_heads"], fields["bias"]) == (1.0, 3, False)


def test_t5_cross_attention_has_no_table():
    """Even where an old checkpoint left one there, which T5 itself ignores."""
    w, prefix = t5(), "decoder.block.1.layer.1.EncDecAttention"
    w[f"{prefix}.relative_attention_bias.weight"] = draw(1, 8, 3)
    fields, weights = read_layer(w, prefix=prefix)
    assert "relative_bias" not in fields
    assert "relative_bias" not in weights
    assert (fields["scale"], fields["num_heads"]) == (1.0, 3)  # the head count from the decoder's table


def test_a_t5_layer_without_its_stack_needs_a_table_and_a_direction():
    w = {name.removeprefix("encoder.block.0.layer.0."): x for name, x in t5().items() if name.startswith("encoder.block.0")}
    with pytest.raises(InvalidRequest, match="at /spec/relative_bias/bidirectional"):
        read_layer(w)
    fields, _ = read_layer(w, spec={"relative_bias": {"bidirectional": True, "max_distance": 20}})
    assert fields["relative_bias"] == {"buckets": 8, "max_distance": 20, "bidirectional": True}
    w.pop("SelfAttention.relative_attention_bias.weight")
    with pytest.raises(InvalidRequest, match=r"at /weights/SelfAttention\.relative_attention_bias\.weight"):
        read_layer(w, spec={"num_heads": 3})
    assert read_layer(w, spec={"num_heads": 3, "relative_bias": None})[0]["relative_bias"] is None
