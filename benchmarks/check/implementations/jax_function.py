"""Scaled dot-product attention in JAX of heads that are already projected, with a boolean mask: true where a query may attend."""

import jax
import jax.numpy as jnp


def attention(query, key, value, attend_mask=None):
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * query.shape[-1] ** -0.5
    if attend_mask is not None:
        scores = jnp.where(attend_mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, value), weights
