"""Dive into Deep Learning's multi-head attention in MXNet, written from the book's definition. See d2l_cases.py.

Needs mxnet==1.9.1 with "numpy<1.24", so an old Python (3.8 or 3.9). The checkpoint has the names that `save_parameters` writes.
"""

import math
import tempfile
from pathlib import Path

import d2l_cases
import mxnet
from mxnet import np, npx
from mxnet.gluon import nn

npx.set_np()


class MultiHeadAttention(nn.Block):
    def __init__(self, num_hiddens, num_heads, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Dense(num_hiddens, use_bias=bias, flatten=False)
        self.W_k = nn.Dense(num_hiddens, use_bias=bias, flatten=False)
        self.W_v = nn.Dense(num_hiddens, use_bias=bias, flatten=False)
        self.W_o = nn.Dense(num_hiddens, use_bias=bias, flatten=False)

    def forward(self, queries, keys, values, valid_lens=None):
        q, k, v = (self.into_heads(x) for x in (self.W_q(queries), self.W_k(keys), self.W_v(values)))
        scores = npx.batch_dot(q, k, transpose_b=True) / math.sqrt(q.shape[-1])
        if valid_lens is not None:
            lens = valid_lens if valid_lens.ndim == 2 else valid_lens.repeat(queries.shape[1]).reshape(-1, queries.shape[1])
            lens = lens.repeat(self.num_heads, axis=0).reshape(-1)
            flat = npx.sequence_mask(scores.reshape(-1, keys.shape[1]), lens, True, value=-1e6, axis=1)
            scores = flat.reshape(scores.shape)
        self.attention_weights = npx.softmax(scores)
        return self.W_o(self.out_of_heads(npx.batch_dot(self.attention_weights, v)))

    def into_heads(self, x):
        """[b, n, heads * d] -> [b * heads, n, d]."""
        x = x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).transpose(0, 2, 1, 3)
        return x.reshape(-1, x.shape[2], x.shape[3])

    def out_of_heads(self, x):
        """[b * heads, n, d] -> [b, n, heads * d]."""
        x = x.reshape(-1, self.num_heads, x.shape[1], x.shape[2]).transpose(0, 2, 1, 3)
        return x.reshape(x.shape[0], x.shape[1], -1)


def saved(layer):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "layer.params")
        layer.save_parameters(path)
        return {name: array.asnumpy() for name, array in npx.load(path).items()}


def main():
    for bias in (False, True):
        layer = MultiHeadAttention(d2l_cases.NUM_HIDDENS, d2l_cases.NUM_HEADS, bias)
        layer.initialize()
        layer(*map(np.array, d2l_cases.inputs()))  # shapes are inferred
        drawn = d2l_cases.weights(bias)
        for name in d2l_cases.WIDTHS:
            getattr(layer, name).weight.set_data(np.array(drawn[name]))
            if bias:
                getattr(layer, name).bias.set_data(np.array(drawn[f"{name}.bias"]))

        def compute(*arrays, layer=layer):
            output = layer(*(None if x is None else np.array(x) for x in arrays))
            return output.asnumpy(), layer.attention_weights.asnumpy()

        d2l_cases.write_cases("mxnet", {"mxnet": mxnet.__version__}, saved(layer), bias, compute)


if __name__ == "__main__":
    main()
