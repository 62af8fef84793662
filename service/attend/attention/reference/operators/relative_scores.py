"""Scores by content and distance (Transformer-XL, DeBERTa)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from attend.attention.operators.relative_scores import RelativeScores
from attend.spec import LayerSpec

if TYPE_CHECKING:
    from attend.attention.reference.forward import Layer
    from attend.tensors import Array


def terms(layer: Layer, q: Array, k: Array, ahead: Array) -> Array:
    """What is added to q·k: q, k [b, h, n, d], ahead [b, 1, q, k] -> [b, h, q, k]."""
    return relative_terms(layer.spec, layer.weights, q, k, ahead)


def relative_terms(spec: LayerSpec, weights: Mapping[str, Array], q: Array, k: Array, ahead: Array) -> Array:
    """What `relative_scores` adds to q·k, before the scale: q, k [b, h, n, d], ahead [b, 1, q, k] -> [b, h, q, k].

    Transformer-XL: u·k_j + (q_i + v)·r_ij, terms b to d of Dai et al. 2019, section 3.3. Disentangled: q_i·r_ij + k_j·s_ij, the second and
    third terms of He et al. 2021, equation 4.
    """
    keys = position_vectors(spec, weights, "position_key", ahead)
    if spec.relative_scores and spec.relative_scores.kind == "transformer_xl":
        u, v = (weights[name][:, None] for name in ("content_bias", "position_bias"))
        terms: Array = (u * k).sum(axis=-1)[:, :, None] + np.einsum("bhid,bijhd->bhij", q + v, keys)
        return terms
    terms = np.einsum("bhid,bijhd->bhij", q, keys)
    if "position_query.weight" in weights:
        terms = terms + np.einsum("bhjd,bijhd->bhij", k, position_vectors(spec, weights, "position_query", ahead))
    return terms


def position_vectors(spec: LayerSpec, weights: Mapping[str, Array], name: str, ahead: Array) -> Array:
    """W R_D for the distance D of each pair, R_D its sinusoid, or 1 in its bucket and 0 elsewhere: [b, 1, q, k] -> [b, q, k, h, d]."""
    relative, distances = spec.relative_scores, -ahead[:, 0]
    assert relative is not None
    if relative.kind == "transformer_xl":
        embedded = sinusoids(distances, spec.d_model, relative)
    else:
        embedded = np.eye(2 * relative.columns)[distance_buckets(distances, relative)]
    vectors = embedded @ weights[f"{name}.weight"].T
    return vectors.reshape(*distances.shape, spec.num_heads, spec.head_dim)


def sinusoids(distances: Array, width: int, relative: RelativeScores) -> Array:
    """sin(D w_i) and cos(D w_i) with w_i = 10000^(-2i/width), Vaswani et al. 2017, section 3.5: [...] -> [..., width]."""
    if relative.max_distance is not None:
        distances = np.clip(distances, -relative.max_distance, relative.max_distance)
    angles = distances[..., None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    if relative.interleaved:
        return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*distances.shape, width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def distance_buckets(distances: Array, relative: RelativeScores) -> Array:
    """The column of each distance, δ(D) + n within 0 to 2n - 1: He et al. 2021 (v1: arXiv 2006.03654, equation 3); log buckets as in v2.

    With m = ⌊buckets/2⌋, δ(D) is D up to m, and sign(D) (m + ⌈(m - 1) ln(|D|/m) / ln((max_distance - 1)/m)⌉) beyond. The logarithm may be
    off by a rounding error, so that it is lowered by 1e-9 before it is rounded up.
    """
    n, buckets = relative.columns, distances
    if relative.buckets is not None and relative.max_distance is not None:
        middle, far = relative.buckets // 2, np.abs(distances)
        share = np.log(np.maximum(far, middle) / middle) / math.log((relative.max_distance - 1) / middle)
        wide = middle + np.ceil((middle - 1) * share - 1e-9).astype(np.int64)
        buckets = np.where(far <= middle, distances, np.sign(distances) * wide)
    columns: Array = np.clip(buckets + n, 0, 2 * n - 1)
    return columns
