"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, equations 9 to 17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer
    from attend.tensors import Array


def project(layer: Layer, name: str, x: Array, heads: int) -> Array:
    """c = norm(W^D x); a query or value is W^U c. A key is [k^R; k^C] with k^C = W^UK c and k^R = W^KR x, the same for all heads."""
    up = layer.split_heads(layer.project(layer.compress(name, x), name), heads)
    return np.concatenate([layer.share(layer.project(x, "rope_key"), heads), up], axis=-1) if name == "key" else up
