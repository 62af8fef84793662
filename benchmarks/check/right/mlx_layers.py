"""MLX's function and layer."""

import mlx.core as mx


def mlx_attention(query, key, value, mask=None):
    """mx.fast.scaled_dot_product_attention, which has no default scale; a boolean mask is true where a query may attend."""
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=query.shape[-1] ** -0.5, mask=mask)
