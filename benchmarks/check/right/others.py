"""Attention of other libraries, each imported where it is called."""

import sys
from unittest.mock import MagicMock

import numpy as np


def tinygrad_attention(query, key, value):
    """On tinygrad's device CPU, which needs clang."""
    from tinygrad import Tensor

    q, k, v = (Tensor(np.asarray(x, np.float32)) for x in (query, key, value))
    return q.scaled_dot_product_attention(k, v).numpy()


def _onnx_model(num_heads):
    from onnx import TensorProto, helper

    def named(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, num_heads, None, None])

    node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"])
    graph = helper.make_graph([node], "attention", [named("Q"), named("K"), named("V")], [named("Y")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def onnxruntime_attention(query, key, value):
    """ONNX's operator Attention (opset 23) in ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(_onnx_model(query.shape[1]).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {name: np.asarray(x, np.float32) for name, x in (("Q", query), ("K", key), ("V", value))})[0]


def onnx_reference_attention(query, key, value):
    """The same operator in ONNX's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    feeds = {name: np.asarray(x, np.float32) for name, x in (("Q", query), ("K", key), ("V", value))}
    return ReferenceEvaluator(_onnx_model(query.shape[1])).run(None, feeds)[0]


def keras_attention(query, key, value, bias=None, mask=None, scale=None, is_causal=False):
    """keras.ops.dot_product_attention: [batch, length, heads, head_dim]."""
    from keras import ops

    return ops.dot_product_attention(query, key, value, bias=bias, mask=mask, scale=scale, is_causal=is_causal)


class KerasLayer:
    """keras.layers.MultiHeadAttention with its kernels as matrices [in, out]."""

    def __init__(self, d_model, num_heads, seed=0):
        self.num_heads, self.d_model = num_heads, d_model
        random = np.random.default_rng(seed)
        self.W_q, self.W_k, self.W_v, self.W_o = (random.normal(size=(d_model, d_model)) * d_model**-0.5 for _ in range(4))

    def __call__(self, query, value, key=None, attention_mask=None, use_causal_mask=False):
        import keras

        h, d = self.num_heads, self.d_model // self.num_heads
        layer = keras.layers.MultiHeadAttention(h, d, use_bias=False, dtype="float64")
        layer.build(query.shape, value.shape, (value if key is None else key).shape)
        layer.set_weights([w.reshape(-1, h, d) for w in (self.W_q, self.W_k, self.W_v)] + [self.W_o.reshape(h, d, -1)])
        out = layer(query, value, key, attention_mask=attention_mask, use_causal_mask=use_causal_mask)
        return out.detach().numpy()


def _timm():
    """timm imports torchvision, which its attention does not use."""
    for name in (
        "",
        ".models",
        ".models.feature_extraction",
        ".ops",
        ".ops.misc",
        ".transforms",
        ".transforms.functional",
        ".datasets",
        ".utils",
    ):
        sys.modules.setdefault(f"torchvision{name}", MagicMock())
    from timm.layers import attention

    return attention


def timm_attention():
    return _timm().Attention(24, num_heads=3, qkv_bias=True).eval()


def timm_rope_attention():
    return _timm().AttentionRope(24, num_heads=3, qkv_bias=True).eval()


def __getattr__(name):
    """Instances that are made when they are asked for."""
    if name == "timm_layer":
        return timm_attention()
    raise AttributeError(name)
