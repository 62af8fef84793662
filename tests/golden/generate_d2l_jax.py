"""Dive into Deep Learning's multi-head attention in JAX with Flax, written from the book's definition. Needs jax and flax."""

import d2l_cases
import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict


class MultiHeadAttention(nn.Module):
    num_hiddens: int
    num_heads: int
    bias: bool = False

    def setup(self):
        self.W_q = nn.Dense(self.num_hiddens, use_bias=self.bias)
        self.W_k = nn.Dense(self.num_hiddens, use_bias=self.bias)
        self.W_v = nn.Dense(self.num_hiddens, use_bias=self.bias)
        self.W_o = nn.Dense(self.num_hiddens, use_bias=self.bias)

    def __call__(self, queries, keys, values, valid_lens=None):
        q, k, v = (self.into_heads(x) for x in (self.W_q(queries), self.W_k(keys), self.W_v(values)))
        scores = q @ k.swapaxes(1, 2) / jnp.sqrt(q.shape[-1])
        if valid_lens is not None:
            lens = valid_lens if valid_lens.ndim == 2 else jnp.repeat(valid_lens[:, None], queries.shape[1], axis=1)
            lens = jnp.repeat(lens, self.num_heads, axis=0)[:, :, None]
            scores = jnp.where(jnp.arange(keys.shape[1]) < lens, scores, -1e6)
        weights = nn.softmax(scores, axis=-1)
        return self.W_o(self.out_of_heads(weights @ v)), weights

    def into_heads(self, x):
        """[b, n, heads * d] -> [b * heads, n, d]."""
        x = x.reshape(*x.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3)
        return x.reshape(-1, *x.shape[2:])

    def out_of_heads(self, x):
        """[b * heads, n, d] -> [b, n, heads * d]."""
        x = x.reshape(-1, self.num_heads, *x.shape[1:]).transpose(0, 2, 1, 3)
        return x.reshape(*x.shape[:2], -1)


def main():
    jax.config.update("jax_default_matmul_precision", "highest")
    versions = {"jax": jax.__version__, "flax": flax.__version__}
    for bias in (False, True):
        layer = MultiHeadAttention(d2l_cases.NUM_HIDDENS, d2l_cases.NUM_HEADS, bias)
        variables = layer.init(jax.random.PRNGKey(0), *d2l_cases.inputs())
        drawn = d2l_cases.weights(bias)
        for name, module in variables["params"].items():
            module["kernel"] = jnp.asarray(drawn[name].T)
            if bias:
                module["bias"] = jnp.asarray(drawn[f"{name}.bias"])

        def compute(*arrays, layer=layer, variables=variables):
            return layer.apply(variables, *arrays)

        checkpoint = {name: np.asarray(x) for name, x in flatten_dict(variables, sep="/").items()}
        d2l_cases.write_cases("jax", versions, checkpoint, bias, compute)


if __name__ == "__main__":
    main()
