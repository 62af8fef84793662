"""Keras' MultiHeadAttention and GroupQueryAttention: variables under their paths, and as `save_weights` writes them.

Needs tensorflow-cpu, keras, h5py.
Masks of Keras say what may be attended; a row without any key attends to all of them alike or to none, by the path taken, so there is none.
"""

import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np
import tensorflow as tf
from casefile import case, draw, draw_all, save

VERSIONS = {"keras": keras.__version__, "tensorflow": tf.__version__}
MASK = np.array([[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0, 0]], bool)


def fill(layer):
    """Weights from NumPy's stream, by their paths below the layer."""
    drawn = draw_all(12, {variable.path.partition("/")[2]: tuple(variable.shape) for variable in layer.weights})
    for variable in layer.weights:
        variable.assign(drawn[variable.path.partition("/")[2]])


def by_path(layer):
    return {variable.path: variable.numpy() for variable in layer.weights}


def saved(layer):
    """The datasets of a weights file, groups joined by `/`."""
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


def call(about, layer, query, value=None, key=None, mask=None, causal=False):
    value = query if value is None else value
    output, weights = layer(
        query, value, key, attention_mask=None if mask is None else mask[None], use_causal_mask=causal, return_attention_scores=True
    )
    request = {"query": query, "causal": causal or None, "attend_mask": None if mask is None else mask.astype(int).tolist()}
    if value is not query:
        request.update(key=value if key is None else key, value=value)
    return case(about, {}, request, output.numpy(), weights.numpy())


def multi_head():
    query, value, key = draw(1, 2, 3, 5), draw(2, 2, 7, 11), draw(3, 2, 7, 13)
    layer = keras.layers.MultiHeadAttention(num_heads=3, key_dim=2, value_dim=7, output_shape=17)
    layer(query, value, key)
    fill(layer)
    cases = [call("widths all different", layer, query, value, key), call("with a mask", layer, query, value, key, MASK)]
    save("keras", "MultiHeadAttention, under its variables' paths", VERSIONS, by_path(layer), cases)
    save("keras_file", "the same, as its weights file has it", VERSIONS, saved(layer), cases)

    layer = keras.layers.MultiHeadAttention(num_heads=2, key_dim=3, use_bias=False, dropout=0.1, seed=5)
    layer(query, query)
    fill(layer)
    arrays = by_path(layer) | {x.path: x.numpy().astype(np.int64) for x in layer.non_trainable_variables}  # the state of its dropout
    save("keras_no_bias", "MultiHeadAttention without biases, with dropout", VERSIONS, arrays, [call("causal", layer, query, causal=True)])


def grouped():
    query = draw(4, 2, 5, 10)
    layer = keras.layers.GroupQueryAttention(head_dim=3, num_query_heads=4, num_key_value_heads=2)
    layer(query, query)
    fill(layer)
    cases = [call("grouped keys and values, causal", layer, query, causal=True)]
    save("keras_grouped", "GroupQueryAttention", VERSIONS, by_path(layer), cases)


if __name__ == "__main__":
    multi_head()
    grouped()
