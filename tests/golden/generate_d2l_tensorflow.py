"""Dive into Deep Learning's multi-head attention in TensorFlow, written from the book's definition. Needs tensorflow-cpu, keras, h5py.

The checkpoint is what `save_weights` writes, its groups joined by `/`; Keras' own variable paths do not say which matrix is which.
"""

import tempfile
from pathlib import Path

import d2l_cases
import h5py
import keras
import tensorflow as tf


class MultiHeadAttention(keras.layers.Layer):
    def __init__(self, num_hiddens, num_heads, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = keras.layers.Dense(num_hiddens, use_bias=bias)
        self.W_k = keras.layers.Dense(num_hiddens, use_bias=bias)
        self.W_v = keras.layers.Dense(num_hiddens, use_bias=bias)
        self.W_o = keras.layers.Dense(num_hiddens, use_bias=bias)

    def call(self, queries, keys, values, valid_lens=None):
        q, k, v = (self.into_heads(x) for x in (self.W_q(queries), self.W_k(keys), self.W_v(values)))
        scores = tf.matmul(q, k, transpose_b=True) / tf.sqrt(tf.cast(q.shape[-1], q.dtype))
        if valid_lens is not None:
            lens = valid_lens if len(valid_lens.shape) == 2 else tf.repeat(valid_lens[:, None], queries.shape[1], axis=1)
            lens = tf.repeat(lens, self.num_heads, axis=0)[:, :, None]
            scores = tf.where(tf.range(keys.shape[1], dtype=lens.dtype) < lens, scores, -1e6)
        weights = tf.nn.softmax(scores, axis=-1)
        return self.W_o(self.out_of_heads(tf.matmul(weights, v))), weights

    def into_heads(self, x):
        """[b, n, heads * d] -> [b * heads, n, d]."""
        x = tf.transpose(tf.reshape(x, (x.shape[0], x.shape[1], self.num_heads, -1)), (0, 2, 1, 3))
        return tf.reshape(x, (-1, x.shape[2], x.shape[3]))

    def out_of_heads(self, x):
        """[b * heads, n, d] -> [b, n, heads * d]."""
        x = tf.transpose(tf.reshape(x, (-1, self.num_heads, x.shape[1], x.shape[2])), (0, 2, 1, 3))
        return tf.reshape(x, (x.shape[0], x.shape[1], -1))


def saved(layer):
    """The weights file of a model that holds the layer, as flat names."""
    arrays = {}
    model = keras.Model()
    model.attention = layer
    model.built = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.weights.h5"
        model.save_weights(path)
        with h5py.File(path) as file:
            file.visititems(lambda name, item: arrays.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
    return arrays


def main():
    versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
    for bias in (False, True):
        layer = MultiHeadAttention(d2l_cases.NUM_HIDDENS, d2l_cases.NUM_HEADS, bias)
        layer(*map(tf.constant, d2l_cases.inputs()))  # makes the variables
        drawn = d2l_cases.weights(bias)
        for name in d2l_cases.WIDTHS:
            getattr(layer, name).set_weights([drawn[name].T] + ([drawn[f"{name}.bias"]] if bias else []))

        def compute(*arrays, layer=layer):
            output, weights = layer(*(None if x is None else tf.constant(x) for x in arrays))
            return output.numpy(), weights.numpy()

        d2l_cases.write_cases("tensorflow", versions, saved(layer), bias, compute)


if __name__ == "__main__":
    main()
