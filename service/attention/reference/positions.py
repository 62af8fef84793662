"""RoPE, factors on queries by position, ALiBi, T5's relative bias, scores by content and distance, and relative positions in a grid, in
NumPy float64.

`ahead` is the position of key j less that of query i.
"""

import math
from collections.abc import Mapping

import numpy as np

from service.spec import LayerSpec
from service.spec_parts import GridBias, QueryScale, RelativeBias, RelativeScores, Rope
from service.tensors import Array


def rotate(x: Array, positions: Array, rope: Rope) -> Array:
    """RoPE, Su et al. 2021, equation 34: x [b, h, n, d] at positions [b, n] or [b, n, axes], whose b may be 1.

    The first `dims` numbers of a head are dims/2 points of the plane, and point i is rotated by the angle position · frequency_i. Its two
    coordinates are neighbours (interleaved: GPT-J) or dims/2 apart (GPT-NeoX, Llama). The rest of the head is unchanged. Points are also
    lengthened by `attention_factor` (yarn, Peng et al. 2023, section 3.4). Where positions have several axes (m-RoPE, Wang et al. 2024,
    section 2.1), `axes` has that of point i.
    """
    dims = rope.dims or x.shape[-1]
    if rope.interleaved:
        first, second = slice(0, dims, 2), slice(1, dims, 2)
    else:
        first, second = slice(0, dims // 2), slice(dims // 2, dims)
    of_points = positions[..., None] if positions.ndim == 2 else np.stack([positions[..., axis] for axis in rope.axes or ()], axis=-1)
    angles = of_points[:, None] * frequencies(rope, dims)  # [b, 1, n, dims/2]
    cos, sin = rope.attention_factor * np.cos(angles), rope.attention_factor * np.sin(angles)
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., first] * sin + x[..., second] * cos
    return rotated


def frequencies(rope: Rope, dims: int) -> Array:
    """theta^(-2i/dims) for i < dims/2, in radians per position, scaled for long contexts: [dims/2].

    "linear" divides every frequency by `factor`. "llama3" does so for frequencies of less than low_freq_factor turns within the training
    context, keeps those of more than high_freq_factor turns, and interpolates in between. `rope.frequencies` replaces all of this.
    """
    if rope.frequencies is not None:
        return np.array(rope.frequencies, np.float64)
    plain: Array = rope.theta ** (-np.arange(0, dims, 2) / dims)
    scaling = rope.scaling
    if scaling is None:
        return plain
    if scaling.type == "linear":
        return plain / scaling.factor
    turns = scaling.original_max_position * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    mixed: Array = kept * plain + (1 - kept) * plain / scaling.factor
    return mixed


def query_factors(positions: Array, scale: QueryScale) -> Array:
    """1 + factor · ln(1 + ⌊(p + shift)/length⌋), Nakanishi 2025 as Llama 4 has it; p is at least 0: [b, q] -> [b, 1, q, 1]."""
    factors: Array = 1 + scale.factor * np.log(1 + (np.maximum(positions, 0) + scale.shift) // scale.length)
    return factors[:, None, :, None]


def position_bias(spec: LayerSpec, weights: Mapping[str, Array], ahead: Array) -> Array:
    """The sum of ALiBi and relative bias: [b, 1, q, k] -> [b, h, q, k]."""
    bias = np.zeros((1, spec.num_heads, 1, 1))
    if spec.alibi:
        bias = bias + alibi(ahead, spec.num_heads)
    if spec.relative_bias:
        bias = bias + relative_bias(ahead, weights["relative_bias"], spec.relative_bias)
    return bias


def alibi(ahead: Array, heads: int) -> Array:
    """-slope_h · |distance|, Press et al. 2022: [b, 1, q, k] -> [b, h, q, k]."""
    return -alibi_slopes(heads)[:, None, None] * np.abs(ahead)


def alibi_slopes(heads: int) -> Array:
    """2^(-8/n), 2^(-16/n), …, 2^-8 for n heads, n a power of two: [h].

    For other n: the slopes of the power of two below n, then every other slope of twice that power, from the first on.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * (heads - power), 2)]
    return np.array(slopes)


def relative_bias(ahead: Array, table: Array, settings: RelativeBias) -> Array:
    """The entry of the table [buckets, h] for each distance's bucket, Raffel et al. 2020: [b, 1, q, k] -> [b, h, q, k]."""
    found: Array = table[relative_buckets(ahead[:, 0], settings)]  # [b, q, k, h]
    return found.transpose(0, 3, 1, 2)


def relative_buckets(ahead: Array, settings: RelativeBias) -> Array:
    """The bucket of each distance: half of the buckets are single distances, the others ranges that grow up to max_distance.

    If bidirectional, keys ahead of the query use the second half of the table; otherwise they count as distance 0. The logarithm is in
    float32 as in T5, since rounding decides on the edge of a bucket.
    """
    buckets, start = settings.buckets, np.zeros(ahead.shape, np.int64)
    if settings.bidirectional:
        buckets //= 2
        start[ahead > 0] = buckets
        distance = np.abs(ahead)
    else:
        distance = np.maximum(-ahead, 0)
    exact = buckets // 2
    share = np.log(np.maximum(distance, exact).astype(np.float32) / np.float32(exact)) / np.float32(math.log(settings.max_distance / exact))
    wide = exact + (share * np.float32(buckets - exact)).astype(np.int64)
    return start + np.where(distance < exact, distance, np.minimum(wide, buckets - 1))


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


def grid_bias(grid: GridBias, weights: Mapping[str, Array], queries: Array, indices: Array, num_keys: int) -> Array:
    """What relative positions in a grid add to the scores of queries [b, h, q, d] at indices [b, q]: [b, h, q, k].

    A table has a number for each relative position and head (Liu et al. 2021, equation 4, with the index of their code, which is also
    BEiT's). Decomposed, it is q_i · (R^row_ij + R^column_ij) (Li et al. 2022, equation 4, with a sum for the product of axes).
    """
    if grid.kind == "decomposed":
        decomposed: Array = np.einsum("bhid,bijd->bhij", queries, grid_vectors(grid, weights, indices, num_keys))
        return decomposed
    down, across = grid_distances(grid, indices, num_keys)
    cells = weights["grid_bias"]
    by_place = cells[: (2 * grid.height - 1) * (2 * grid.width - 1)].reshape(2 * grid.height - 1, 2 * grid.width - 1, -1)
    found: Array = by_place[down, across]  # [b, q, k, h]; for a class token any, replaced here
    if grid.class_token:
        of_query, of_key = indices[:, :, None, None] == 0, (np.arange(num_keys) == 0)[None, None, :, None]
        found = np.where(of_query & of_key, cells[-1], np.where(of_key, cells[-2], np.where(of_query, cells[-3], found)))
    return found.transpose(0, 3, 1, 2)


def grid_vectors(grid: GridBias, weights: Mapping[str, Array], indices: Array, num_keys: int) -> Array:
    """R^row + R^column of each query and key: [b, q, k, d]."""
    down, across = grid_distances(grid, indices, num_keys)
    vectors: Array = weights["grid_rows"][down] + weights["grid_columns"][across]
    return vectors


def grid_distances(grid: GridBias, indices: Array, num_keys: int) -> tuple[Array, Array]:
    """Row and column of the query less those of the key, each from 0 for the smallest: [b, q] -> [b, q, k] twice."""
    cells = np.array([[0, 0]] * grid.class_token + [[y, x] for y in range(grid.height) for x in range(grid.width)])  # [tokens, 2]
    distances = cells[indices][:, :, None] - cells[:num_keys]  # [b, q, k, 2]
    return distances[..., 0] + grid.height - 1, distances[..., 1] + grid.width - 1
