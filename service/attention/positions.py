"""What depends on the positions of queries and keys: RoPE, factors on queries, biases added to scores, and terms added to q·k.

The position of query i is i + offset, that of key j is j; a call may have other positions for RoPE.

Terms depend on content and distance. Transformer-XL's relative positions and DeBERTa's disentangled attention have them:

    terms_ij = u·k_j + (q_i + v)·r_D          transformer_xl (Dai et al. 2019, arXiv 1901.02860, section 3.3)
    terms_ij = q_i·r_D + k_j·s_D              disentangled (He et al. 2021, arXiv 2006.03654, equation 4)

r_D and s_D are the position vectors of distance D = position_i - j. They are computed once per call, for all distances from the last
position down: column c belongs to D = last - c. The columns of a row are consecutive. So a block of rows is multiplied by few columns,
and the product of each pair of query and key is gathered from its column.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from service.attention.call import select_heads
from service.attention.masks import Masks
from service.attention.numerics import at_least_float32
from service.spec import LayerSpec
from service.spec_parts import GridBias, QueryScale, RelativeBias, RelativeScores, Rope

HEAD_WEIGHTS = ("position_key.weight", "position_query.weight", "content_bias", "position_bias")
MAX_PRODUCTS = 1 << 21  # most products of queries and position vectors at a time: twice the scores of a block


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotate pairs of the first `dims` numbers of x [b, heads, n, head_dim] by positions (Su et al. 2021, equation 34).

    Positions are [b|1, n], or [b|1, n, axes]: then each pair is rotated by the position on its axis (Wang et al. 2024, section 2.1).

    Half-split pairs are (i, i + dims/2), as in GPT-NeoX and Llama; interleaved ones (2i, 2i + 1), as in GPT-J. Angles are computed in
    float64: the rounding of a float32 angle grows with the position (4e-5 of a pair's length at position 6,000). Cosines, sines and the
    products with x are then float32, or float64 if x is.
    """
    dims = rope.dims or x.shape[-1]
    dtype = at_least_float32(x.dtype)
    of_pairs = positions[..., None] if positions.ndim == 2 else positions[..., list(rope.axes or ())]
    angles = of_pairs.to(torch.float64)[:, None] * _frequencies(rope, dims).to(x.device)  # [b|1, 1, n, dims/2]
    rotated, rest = x[..., :dims].to(dtype), x[..., dims:]
    cos, sin = ((rope.attention_factor * wave).to(dtype) for wave in (angles.cos(), angles.sin()))
    if rope.interleaved:
        even, odd = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def rotate_halves(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotate each half of the heads of x [b, heads, n, head_dim] by itself, as differential attention does."""
    return torch.cat([rotate(half, positions, rope) for half in x.chunk(2, -1)], -1)


def _frequencies(rope: Rope, dims: int) -> Tensor:
    """theta^(-2i/dims) for each pair, scaled as `rope.scaling` says, or `rope.frequencies`: float64 [dims/2]."""
    if rope.frequencies is not None:
        return torch.tensor(rope.frequencies, dtype=torch.float64)
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    frequencies = 1.0 / torch.tensor(rope.theta, dtype=torch.float64) ** exponents
    if (scaling := rope.scaling) is not None:
        slowed = frequencies / scaling.factor
        if scaling.type == "linear":
            frequencies = slowed
        else:  # Llama 3: divides low frequencies by `factor`, keeps high ones, interpolates between
            waves = 2 * math.pi / frequencies
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            share = ((scaling.original_max_position / waves - low) / (high - low)).clamp(0, 1)
            frequencies = slowed * (1 - share) + frequencies * share
    return frequencies


def scale_queries(query: Tensor, positions: Tensor, scale: QueryScale) -> Tensor:
    """Multiply query [b, h, q, head_dim] at positions [b|1, q] by factors that grow with the position; before 0 they are those of 0."""
    lengths = torch.div(positions.clamp(min=0) + scale.shift, scale.length, rounding_mode="floor")
    factors = 1 + scale.factor * lengths.to(torch.float64).log1p()
    return (query * factors[:, None, :, None].to(at_least_float32(query.dtype))).to(query.dtype)


def alibi_slopes(heads: int) -> list[float]:
    """m_h of Press et al. 2022: 2^(-8h/n) for a power of two; else those of the power below n, then every other one of twice that power."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]


def alibi(slopes: Tensor, positions: Tensor, keys: slice) -> Tensor:
    """-slope · |position - j| for slopes [h] and positions [b|1, rows]: [b|1, h, rows, keys]."""
    j = torch.arange(keys.start, keys.stop, device=positions.device)
    distance = (positions[:, None, :, None] - j).abs().to(slopes.dtype)
    return -slopes[:, None, None] * distance


def relative_bias(table: Tensor, spec: RelativeBias, positions: Tensor, keys: slice) -> Tensor:
    """T5's bias for a table [buckets, h] and positions [b|1, rows]: [b|1, h, rows, keys]."""
    j = torch.arange(keys.start, keys.stop, device=positions.device)
    buckets = _buckets(j - positions[:, :, None], spec)  # [b|1, rows, keys]
    return table[buckets].movedim(-1, 1)


def _buckets(distance: Tensor, spec: RelativeBias) -> Tensor:
    """T5's bucket of key minus query position (Raffel et al. 2020): exact for short distances, logarithmic up to max_distance."""
    buckets = spec.buckets
    offset = torch.zeros_like(distance)
    if spec.bidirectional:
        buckets //= 2
        offset = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # float32, as in T5: at the edges of buckets, another precision would choose the neighbouring bucket
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


def grid_bias(table: Tensor, grid: GridBias, positions: Tensor, keys: slice) -> Tensor:
    """The bias of a table [relative positions, h] for queries at positions [b|1, rows]: [b|1, h, rows, keys]."""
    down, across = _grid_distances(grid, positions, keys)
    index = down * (2 * grid.width - 1) + across
    if grid.class_token:
        of_query, of_key = positions[:, :, None] == 0, torch.arange(keys.start, keys.stop, device=positions.device) == 0
        index = torch.where(of_query, len(table) - 3, index)
        index = torch.where(of_key, len(table) - 2 + of_query.to(index.dtype), index)
    return table[index].movedim(-1, 1)


def decomposed_bias(query: Tensor, rows: Tensor, columns: Tensor, grid: GridBias, positions: Tensor, keys: slice) -> Tensor:
    """q · rows[dy] + q · columns[dx] for query [b, h, rows, d] at positions [b|1, rows]: [b, h, rows, keys] (Li et al. 2022, equation 4).

    Every query is multiplied by all vectors of an axis; then the product for each key is gathered.
    """
    of_axes = [
        torch.gather(query @ vectors.T, -1, distances[:, None].expand(*query.shape[:3], -1))
        for vectors, distances in zip((rows, columns), _grid_distances(grid, positions, keys), strict=True)
    ]
    return of_axes[0] + of_axes[1]


def _grid_distances(grid: GridBias, positions: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """Row and column of the query less those of the key, each from 0 for the smallest, [b|1, rows, keys]; 0 for a class token's."""
    i, j = (x - int(grid.class_token) for x in (positions[:, :, None], torch.arange(keys.start, keys.stop, device=positions.device)))
    down = torch.div(i, grid.width, rounding_mode="floor") - torch.div(j, grid.width, rounding_mode="floor") + grid.height - 1
    across = i % grid.width - j % grid.width + grid.width - 1
    return (down.clamp(0, 2 * grid.height - 2), across) if grid.class_token else (down, across)


class RelativeTerms:
    """The relative terms of one layer, computed in `dtype`. Immutable."""

    def __init__(self, spec: LayerSpec, relative: RelativeScores, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.relative, self.dtype, self.width = relative, dtype, spec.d_model
        heads = {name: tensor.to(dtype).view(spec.num_heads, spec.head_dim, -1) for name, tensor in weights.items() if name in HEAD_WEIGHTS}
        self.key, self.query = heads["position_key.weight"], heads.get("position_query.weight")  # [h, d, n]
        self.content_bias, self.position_bias = heads.get("content_bias"), heads.get("position_bias")  # [h, d, 1]

    def of_call(self, masks: Masks, key: Tensor, heads: Sequence[int] | None) -> "CallTerms | None":
        """The terms of a call with keys [b, kv heads, k, d], for the selected heads (None: all); None if there are no pairs."""
        return CallTerms(self, masks, key.to(self.dtype), heads) if masks.positions.numel() and masks.num_keys else None

    def vectors(self, weight: Tensor, distances: Tensor) -> Tensor:
        """W R_D for a weight [h, d, n] and distances [b|1, columns], with the sinusoid or the unit vector R_D: [b|1, h, d, columns]."""
        if self.relative.kind == "disentangled":
            return weight[..., distance_buckets(distances, self.relative)].movedim(2, 0)
        vectors = weight.flatten(0, 1) @ self._sinusoids(distances).transpose(1, 2)
        return vectors.view(*vectors.shape[:1], *weight.shape[:2], -1)

    def _sinusoids(self, distances: Tensor) -> Tensor:
        """sin(D w_i) and cos(D w_i) with w_i = 10000^(-2i/d_model) (Vaswani et al. 2017), from float64 angles: [...] -> [..., d_model]."""
        if (bound := self.relative.max_distance) is not None:
            distances = distances.clamp(-bound, bound)
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=distances.device) / self.width
        angles = distances.to(torch.float64)[..., None] * 10000.0**-exponents
        waves = angles.sin().to(self.dtype), angles.cos().to(self.dtype)
        return torch.stack(waves, -1).flatten(-2) if self.relative.interleaved else torch.cat(waves, -1)


class CallTerms:
    """The relative terms of one call, for any of its query rows.

    Vectors of distances, and products with them, stand in columns of falling distance. With the last query at position 5 and keys
    0 to 2, the columns 0, 1, 2 have the distances 5, 4, 3 of that query to its keys; a query at position 4 finds its own in 1, 2, 3.
    """

    def __init__(self, layer: RelativeTerms, masks: Masks, key: Tensor, heads: Sequence[int] | None) -> None:
        self.num_keys, last = masks.num_keys, masks.positions.amax(1, keepdim=True)
        self.first = last - masks.positions  # [b|1, q]: column of each row's first key
        self.lowest, self.highest = self.first.amin(0).tolist(), self.first.amax(0).tolist()  # of each row, over the items
        distances = last - torch.arange(max(self.highest) + self.num_keys, device=last.device)
        self.vectors = layer.vectors(select_heads(layer.key, heads), distances)
        self.position_bias: Tensor | None = None  # [h, 1, d]
        self.of_keys: Tensor | None = None  # u·k_j, [b, h, 1, k]
        self.of_buckets: Tensor | None = None  # k_j·s for each bucket that occurs, [b, h, buckets, k]
        if layer.content_bias is not None and layer.position_bias is not None:
            self.position_bias = select_heads(layer.position_bias, heads).transpose(1, 2)
            self.of_keys = _products(select_heads(layer.content_bias, heads), key)
        if layer.query is not None:
            buckets = distance_buckets(distances, layer.relative)
            least = int(buckets.amin())
            self.buckets = buckets - least  # [b|1, columns]
            self.of_buckets = _products(select_heads(layer.query, heads)[..., least : int(buckets.amax()) + 1], key)

    def of_rows(self, query: Tensor, rows: slice) -> Tensor:
        """The terms [b, h, rows, k] of these rows, whose queries are [b, h, rows, d]."""
        most = MAX_PRODUCTS // max(1, query.shape[0] * query.shape[1])
        parts = [self._block(query[:, :, part.start - rows.start : part.stop - rows.start], part) for part in self._split(rows, most)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _split(self, rows: slice, most: int) -> Iterator[slice]:
        """Consecutive rows that have at most `most` products with the columns that any of them needs; at least one row."""
        start, low, high = rows.start, self.lowest[rows.start], self.highest[rows.start]
        for i in range(rows.start + 1, rows.stop):
            low, high = min(low, self.lowest[i]), max(high, self.highest[i])
            if (i + 1 - start) * (high - low + self.num_keys) > most:
                yield slice(start, i)
                start, low, high = i, self.lowest[i], self.highest[i]
        yield slice(start, rows.stop)

    def _block(self, query: Tensor, rows: slice) -> Tensor:
        """The terms [b, h, rows, k] of few rows: gathered from the products with a range of columns."""
        begin, end = min(self.lowest[rows]), max(self.highest[rows]) + self.num_keys
        columns = (self.first[:, rows] - begin)[..., None] + torch.arange(self.num_keys, device=query.device)  # [b|1, rows, k]
        shape = (*query.shape[:3], self.num_keys)
        query = query.to(self.vectors.dtype)
        query = query if self.position_bias is None else query + self.position_bias
        products = torch.einsum("bhid,bhdc->bhic", query, self.vectors[..., begin:end])
        terms = products.gather(3, columns[:, None].expand(shape))
        if self.of_keys is not None:
            terms = terms + self.of_keys
        if self.of_buckets is not None:
            buckets = self.buckets[:, None, begin:end].expand(-1, columns.shape[1], -1).gather(2, columns)
            terms = terms + self.of_buckets.gather(2, buckets[:, None].expand(shape))
        return terms


def distance_buckets(distances: Tensor, relative: RelativeScores) -> Tensor:
    """The column of each distance in weights of 2n columns: δ(D) + n (He et al. 2021, equation 3), δ logarithmic if there are buckets.

    The logarithm is lowered by 1e-9 before it is rounded up, since it may exceed a whole number by a rounding error.
    """
    buckets = distances
    if relative.buckets is not None and relative.max_distance is not None:
        middle, far = relative.buckets // 2, distances.abs()
        share = (far.clamp(min=middle).double() / middle).log() / math.log((relative.max_distance - 1) / middle)
        wide = middle + ((middle - 1) * share - 1e-9).ceil().long()
        buckets = torch.where(far <= middle, distances, distances.sign() * wide)
    return (buckets + relative.columns).clamp(0, 2 * relative.columns - 1)


def _products(vectors: Tensor, key: Tensor) -> Tensor:
    """Vectors [h, d, n] of each head times keys [b, kv heads, k, d]: [b, h, n, k]. Heads that share keys are neighbours."""
    grouped = vectors.reshape(key.shape[1], -1, *vectors.shape[1:])
    return torch.einsum("gudn,bgkd->bgunk", grouped, key).flatten(1, 2)
