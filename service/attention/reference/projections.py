"""From inputs to heads and back, in NumPy float64: projections, latent vectors, norms, and the split into heads."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from service.spec import LayerSpec
from service.spec_parts import QKNorm
from service.tensors import Array


class ProjectionSteps:
    """The spec and weights of a layer, and the steps of `Layer` that do not depend on positions. x: [b, n, in]; heads: [b, heads, n, d]."""

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Array]) -> None:
        self.spec = spec
        self.weights = {name: np.asarray(x, np.float64) for name, x in weights.items()}  # by canonical name

    def project_heads(self, name: str, x: Array) -> Array:
        """A query, key or value as heads, before RoPE: projected and normalised if the layer does that."""
        spec, heads = self.spec, self.spec.num_heads if name == "query" else self.spec.num_kv_heads
        width = spec.value_head_dim if name == "value" else spec.head_dim
        if spec.latent:
            split = self.latent_heads(name, x, heads)
        else:
            projected = self.project(x, name) if spec.projections else x.astype(np.float64)
            if projected.shape[-1] != heads * width:
                raise ValueError(f"expected a {name} of {heads} heads of {width} numbers, got {projected.shape[-1]} numbers")
            split = self.split_heads(projected, heads)
        norm = spec.qk_norm
        return self.norm(split, name, norm) if norm and (norm.values if name == "value" else not norm.after_rope) else split

    def latent_heads(self, name: str, x: Array, heads: int) -> Array:
        """Multi-head latent attention, DeepSeek-AI 2024 (arXiv 2405.04434), equations 9 to 17.

        c = norm(W^D x); a query or value is W^U c. A key is [k^R; k^C] with k^C = W^UK c and k^R = W^KR x, which is the same for all heads.
        """
        up = self.split_heads(self.project(self.compress(name, x), name), heads)
        return np.concatenate([self.share(self.project(x, "rope_key"), heads), up], axis=-1) if name == "key" else up

    def compress(self, name: str, x: Array) -> Array:
        """The latent vectors of a query, key or value: [b, n, in] -> [b, n, rank]; x itself if there are none."""
        if self.spec.latent is None or (name == "query" and self.spec.latent.query_rank is None):
            return x
        down = "query_down" if name == "query" else "key_value_down"
        return self.norm(self.project(x, down), down, QKNorm(eps=self.spec.latent.eps))

    def share(self, x: Array, heads: int) -> Array:
        """The part of latent keys that all heads share, for each of them: [b, n, r] -> [b, heads, n, r]."""
        return np.repeat(x[:, None], heads, axis=1)

    def project(self, x: ArrayLike, name: str) -> Array:
        """x Wᵀ + b, with W [out, in] as in `torch.nn.Linear`: [b, n, in] -> [b, n, out]; b is 0 without `name.bias`."""
        projected: Array = np.asarray(x, np.float64) @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)
        return projected

    def split_heads(self, x: Array, heads: int) -> Array:
        return split_heads(x, heads)

    def merge_heads(self, x: Array) -> Array:
        return merge_heads(x)

    def repeat_kv_heads(self, x: Array) -> Array:
        """Grouped-query attention (Ainslie et al. 2023): [b, kv heads, n, d] -> [b, h, n, d], each kv head h / kv heads times in a row."""
        return np.repeat(x, self.spec.num_heads // x.shape[1], axis=1)

    def norm(self, x: Array, name: str, norm: QKNorm) -> Array:
        """`normalise` with the weight and bias of `name`_norm, [d] or [heads, d]; 1 and 0 if the layer has none."""
        return normalise(x, norm, self.norm_weight(f"{name}_norm.weight", 1.0), self.norm_weight(f"{name}_norm.bias", 0.0))

    def norm_weight(self, name: str, otherwise: float) -> ArrayLike:
        return self.weights[name][..., None, :] if name in self.weights else otherwise

    def gate_logits(self, query: Array) -> Array:
        """X W_θ, Qiu et al. 2025 (arXiv 2505.06708), equation 5: [b, q, d_model] -> [b, h, q, dv], or [b, h, q, 1] for a headwise gate."""
        return self.split_heads(self.project(query, "gate"), self.spec.num_heads)


def split_heads(x: Array, heads: int) -> Array:
    """[b, n, h*d] -> [b, h, n, d]: head i is columns i*d to (i+1)*d of every row."""
    b, n, width = x.shape
    return x.reshape(b, n, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Array) -> Array:
    """[b, h, n, d] -> [b, n, h*d], the inverse of `split_heads`."""
    b, h, n, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, n, h * d)


def normalise(x: Array, norm: QKNorm, weight: ArrayLike = 1.0, bias: ArrayLike = 0.0) -> Array:
    """x / √(mean x² + eps) · w + b (RMS norm, Zhang and Sennrich 2019); the layer norm subtracts the mean of x first.

    The mean is over the last axis, or over all heads of a row: axes 1 and 3 of [b, heads, n, d].
    """
    axes = (-1,) if norm.over == "head" else (1, 3)
    if norm.kind == "layer":
        x = x - x.mean(axis=axes, keepdims=True)
    normed: Array = x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + norm.eps) * weight + bias
    return normed
