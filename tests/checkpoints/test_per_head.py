"""Traps of layouts with an axis for heads, of textbooks' matrices, and our own layout."""

import math

import numpy as np
import pytest
from support.checkpoints import B, K, Q, close, converted, cut, draw, heads_out, named

from service.checkpoints import read_layer
from service.errors import InvalidRequest
from service.spec import LayerSpec


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
    return np.einsum("bqhd,hdo->bqo", heads_out(q, k, v), w["o"]) + w["ob"]


KERAS = [(f"mha/{name}/kernel", f"mha/{name}/bias") for name in ("query", "key", "value", "attention_output")]
KERAS_FILE = [(f"layers.mha.{name}_dense.vars.0", f"layers.mha.{name}_dense.vars.1") for name in ("query", "key", "value", "output")]
TENSORFLOW = [(f"{weight}:0", f"{bias}:0") for weight, bias in KERAS]
LENS = [(f"blocks.0.attn.W_{x}", f"blocks.0.attn.b_{x}") for x in "QKVO"]
LENS_GROUPED = [(f"blocks.0.attn.{m}W_{x}", f"blocks.0.attn.{m}b_{x}") for m, x in zip(("", "_", "_", ""), "QKVO", strict=True)]


@pytest.mark.parametrize("names", [KERAS, KERAS_FILE, TENSORFLOW, LENS, LENS_GROUPED], ids=["paths", "file", "tf", "lens", "grouped lens"])
def test_kernels_with_an_axis_for_heads_tell_everything(names):
    """[in, heads, dim] of Keras, [heads, in, dim] of TransformerLens; output [heads, dim, out] in both. No spec is needed."""
    inputs = draw(20, B, Q, 5), draw(21, B, K, 11), draw(22, B, K, 13)
    checkpoint = kernels(names, heads_first=names in (LENS, LENS_GROUPED))
    close(converted(checkpoint, inputs), kernels_expected(inputs))


def test_flax_with_normalize_qk_has_layer_norms():
    names = [(f"params/attn/{name}/kernel", f"params/attn/{name}/bias") for name in ("query", "key", "value", "out")]
    checkpoint = kernels(names) | {"params/attn/query_ln/scale": draw(1, 2), "params/attn/key_ln/scale": draw(2, 2)}
    fields, weights = read_layer(checkpoint)
    assert fields["qk_norm"] == {"kind": "layer", "eps": 1e-6}
    assert weights["query_norm.weight"] is checkpoint["params/attn/query_ln/scale"]


def test_keras_grouped_heads_are_kept():
    """Four query heads over two of keys and values."""
    fields, _ = read_layer(kernels(KERAS, dims=(2, 4, 2, 7)))
    assert (fields["num_heads"], fields["num_kv_heads"], fields["head_dim"], fields["value_head_dim"]) == (4, 2, 2, 7)


def test_transformerlens_buffers_are_passed_over_and_rotary_ones_ask_for_rope():
    buffers = named("blocks.0.attn", mask=np.ones((9, 9), bool), IGNORE=np.array(-np.inf, np.float32))
    checkpoint = kernels(LENS, heads_first=True) | buffers
    assert read_layer(checkpoint)[0]["num_heads"] == 3
    rotary = checkpoint | named("blocks.0.attn", rotary_sin=draw(1, 9, 2), rotary_cos=draw(2, 9, 2))
    with pytest.raises(InvalidRequest, match="at /spec/rope"):
        read_layer(rotary)
    assert read_layer(rotary, spec={"rope": {"theta": 1e4}})[0]["rope"] == {"theta": 1e4}


def d2l_expected(w, inputs):
    q, k, v = (cut(x @ w[f"W_{letter}"], 3) for letter, x in zip("qkv", inputs, strict=True))
    return heads_out(q, k, v).reshape(B, Q, 15) @ w["W_o"]


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
def test_textbook_matrices_are_turned_by_their_names(spelling, transposed):
    """`.weight` is [out, in], a kernel or a bare matrix [in, out]; W_o is square, so only its numbers tell."""
    w = {"W_q": draw(1, 7, 15), "W_k": draw(2, 11, 15), "W_v": draw(3, 13, 15), "W_o": draw(4, 15, 15)}
    inputs = draw(5, B, Q, 7), draw(6, B, K, 11), draw(7, B, K, 13)
    checkpoint = {spelling.format(name[-1]): x.T if transposed else x for name, x in w.items()}
    close(converted(checkpoint, inputs, spec={"num_heads": 3}), d2l_expected(w, inputs))


def test_our_own_layout_comes_back_as_it_was():
    """Every part of a spec that has weights; the spec is the one that stands beside the weights."""
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


def test_our_own_layer_without_projections_has_almost_nothing_to_read():
    given = {"d_model": 6, "num_heads": 3, "projections": False, "sinks": True}
    fields, weights = read_layer({"sinks": draw(1, 3)}, spec=given)
    assert fields == given | {"dtype": "float64"}
    assert set(weights) == {"sinks"}
    with pytest.raises(InvalidRequest, match=r"at /weights/query\.weight"):
        read_layer({"query.weight": draw(1, 3, 3)}, spec=given)


def test_scale_and_the_like_are_the_callers():
    """What no tensor tells passes through, and beats what a layout assumes."""
    checkpoint = {"query_key_value.weight": draw(1, 45, 15), "dense.weight": draw(2, 15, 15)}
    checkpoint |= {"query_key_value.bias": draw(3, 45), "dense.bias": draw(4, 15)}
    spec = {"num_heads": 3, "scale": 5**-0.5 / 2, "window": {"left": 3}, "alibi": False}
    fields, _ = read_layer(checkpoint, layout="bloom", spec=spec)
    assert {name: fields[name] for name in spec} == spec
    assert math.isclose(LayerSpec.model_validate(fields).scale, 5**-0.5 / 2)
