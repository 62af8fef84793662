"""Attention of JAX's libraries."""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import pallas as pl


class Flax:
    """flax.linen's layer with its parameters as matrices [in, out]."""

    def __init__(self, d_model, num_heads, seed=0):
        self.num_heads, self.d_model = num_heads, d_model
        random = np.random.default_rng(seed)
        self.W_q, self.W_k, self.W_v, self.W_o = (random.normal(size=(d_model, d_model)) * d_model**-0.5 for _ in range(4))

    def __call__(self, query, key, value, attend_mask=None):
        h, d = self.num_heads, self.d_model // self.num_heads
        layer = linen.MultiHeadDotProductAttention(h, use_bias=False, deterministic=True)
        split = {n: {"kernel": jnp.asarray(w).reshape(-1, h, d)} for n, w in (("query", self.W_q), ("key", self.W_k), ("value", self.W_v))}
        parameters = {**split, "out": {"kernel": jnp.asarray(self.W_o).reshape(h, d, -1)}}
        return layer.apply({"params": parameters}, query, key, value, mask=attend_mask)


flax_nnx = nnx.dot_product_attention


class Equinox:
    """equinox's layer, which has no batch, with its weights as matrices [out, in]."""

    def __init__(self, d_model, num_heads):
        self.num_heads, self.d_model = num_heads, d_model
        layer = eqx.nn.MultiheadAttention(num_heads, d_model, key=jax.random.key(0))
        self.W_q, self.W_k = np.array(layer.query_proj.weight).T, np.array(layer.key_proj.weight).T
        self.W_v, self.W_o = np.array(layer.value_proj.weight).T, np.array(layer.output_proj.weight).T

    def __call__(self, query, key, value, attend_mask=None):
        layer = eqx.nn.MultiheadAttention(self.num_heads, self.d_model, key=jax.random.key(0))
        weights = [jnp.asarray(w.T) for w in (self.W_q, self.W_k, self.W_v, self.W_o)]
        names = ("query_proj", "key_proj", "value_proj", "output_proj")
        layer = eqx.tree_at(lambda one: [getattr(one, name).weight for name in names], layer, weights)
        return jax.vmap(lambda q, k, v: layer(q, k, v, mask=attend_mask))(*map(jnp.asarray, (query, key, value)))


def _kernel(q_ref, k_ref, v_ref, o_ref):
    s = q_ref[...] @ k_ref[...].T * q_ref.shape[-1] ** -0.5
    p = jnp.exp(s - s.max(axis=-1, keepdims=True))
    o_ref[...] = p @ v_ref[...] / p.sum(axis=-1, keepdims=True)


def pallas_attention(query, key, value):
    """A kernel in Pallas, interpreted: one program for each item and head."""

    def one(q, k, v):
        return pl.pallas_call(_kernel, out_shape=jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype), interpret=True)(q, k, v)

    return jax.vmap(jax.vmap(one))(query, key, value)
