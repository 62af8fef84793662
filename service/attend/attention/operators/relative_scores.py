"""Scores with terms of the content and the distance (Transformer-XL, DeBERTa).

    terms_ij = u·k_j + (q_i + v)·r_D          transformer_xl (Dai et al. 2019, arXiv 1901.02860, section 3.3)
    terms_ij = q_i·r_D + k_j·s_D              disentangled (He et al. 2021, arXiv 2006.03654, equation 4)

r_D and s_D are the position vectors of distance D = position_i - j. They are computed once per call, for all distances from the last
position down: column c belongs to D = last - c. The columns of a row are consecutive. So a block of rows is multiplied by few columns,
and the product of each pair of query and key is gathered from its column.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import Cost, Variances, variance
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.attention.operators.stages import select_heads
from attend.spec_parts import WHOLE, Flag, Part, Width, field_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from attend.attention.call import Call, CallOptions
    from attend.attention.masks import Masks
    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields, Layer
    from attend.spec_parts import WHOLE, Dimensions

HEAD_WEIGHTS = ("position_key.weight", "position_query.weight", "content_bias", "position_bias")
MAX_PRODUCTS = 1 << 21  # most products of queries and position vectors at a time: twice the scores of a block
MAX_BLOCK_ROWS = 1 << 11  # most rows of a block, roughly


class RelativeScores(Part):
    """Scores that have terms of the content and the distance D, the position of query i less that of key j, beside query·key.

    transformer_xl (Dai et al. 2019, arXiv 1901.02860, section 3.3): (q_i + u)·k_j + (q_i + v)·W_R R_D with sinusoids R_D [d_model]. W_R is
    `position_key.weight` [num_heads*head_dim, d_model]; u and v are `content_bias` and `position_bias`, [num_heads, head_dim].

    disentangled (He et al. 2021, arXiv 2006.03654, equation 4): q_i·k_j + q_i·r_D + k_j·s_D with the columns r_D and s_D of the weights
    `position_key.weight` and `position_query.weight` [num_heads*head_dim, 2n] for this distance, n for each direction.
    """

    kind: Literal["transformer_xl", "disentangled"]
    max_distance: Width | None = Field(
        default=None, description="Keys further away than this count as this far; null: no bound (transformer_xl alone)."
    )
    interleaved: Flag = Field(
        default=False, description="transformer_xl: whether sines and cosines alternate (Conformers), or all sines come first (XLNet)."
    )
    buckets: Annotated[int, Field(ge=4, le=65536, strict=True), WHOLE] | None = Field(
        default=None, description="disentangled: columns for each direction, logarithmic from the middle on; null: one for each distance."
    )
    position_to_content: Flag = Field(default=False, description="disentangled: whether there is the term k_j·s_D.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "transformer_xl":
            for name in ("buckets", "position_to_content"):
                if (value := getattr(self, name)) not in (None, False):
                    raise field_error(f"/{name}", "none, since kind is transformer_xl", json.dumps(value))
        elif self.interleaved:
            raise field_error("/interleaved", "false, since kind is disentangled", "true")
        elif self.max_distance is None:
            raise field_error("/max_distance", "a number, since kind is disentangled", "null")
        elif self.buckets is not None and self.max_distance <= (least := self.buckets // 2 + 1):
            raise field_error("/max_distance", f"more than {least}, so that the logarithm grows", str(self.max_distance))
        return self

    @property
    def columns(self) -> int:
        """disentangled: the number of columns for each direction, n; transformer_xl: 0."""
        return (self.buckets or self.max_distance or 0) if self.kind == "disentangled" else 0


class RelativeScoresOperator(Operator):
    name, field, positional, needs_projections = "relative_scores", "relative_scores", True, True
    matrices = ("position_key", "position_query")
    even_widths = ("d_model",)  # for sines and cosines
    conflicts: ClassVar[dict[str, str]] = dict.fromkeys(("rope", "query_scale"), "relative_scores has the positions of this layer")
    per_head = True
    axes: ClassVar[Axes] = {
        **dict.fromkeys(("position_key.weight", "position_query.weight"), ("out", "in")),
        **dict.fromkeys(("content_bias", "position_bias"), ("heads", "n")),
    }
    identifying_weight = "position_key.weight"

    @classmethod
    def check(cls, spec: Dimensions) -> None:
        if getattr(spec, cls.field).kind == "transformer_xl" and spec.d_model % 2:
            raise field_error("/d_model", "an even number, for the sines and cosines of relative_scores", str(spec.d_model))

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        relative: RelativeScores = getattr(spec, cls.field)
        shapes: Shapes = {"position_key.weight": (spec.num_heads * spec.head_dim, 2 * relative.columns or spec.d_model)}
        if relative.kind == "transformer_xl":
            return shapes | dict.fromkeys(("content_bias", "position_bias"), (spec.num_heads, spec.head_dim))
        return shapes | ({"position_query.weight": shapes["position_key.weight"]} if relative.position_to_content else {})

    @classmethod
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        relative: RelativeScores = getattr(spec, cls.field)
        if relative.kind == "transformer_xl":
            bound = f", at most {relative.max_distance}" if relative.max_distance else ""
            return {"terms": f"T_ij = u·k_j + (q_i + v)·W_R R_D, with the sinusoids R_D of D = i - j{bound}"}
        distance = "bucket(i - j)" if relative.buckets else "i - j"
        return {"terms": f"T_ij = q_i·r_D{' + k_j·s_D' if relative.position_to_content else ''}, D = {distance}"}

    @classmethod
    def cost(cls, spec: Dimensions, options: CallOptions, cached: int) -> Cost:
        """There is a position vector for each of q + k distances. A block of rows is multiplied by those of its keys and rows. Keys are
        multiplied by the vectors of the buckets that these distances have.
        """
        relative, queries, keys = getattr(spec, cls.field), options.num_queries, options.num_keys
        width, distances = spec.num_heads * spec.head_dim, queries + keys
        block_products = queries * (keys + min(queries, MAX_BLOCK_ROWS))
        buckets = min(2 * relative.columns, distances) if relative.position_to_content else 0
        embedded = 0 if relative.columns else distances * spec.d_model
        elements = distances * width + 4 * embedded + spec.num_heads * buckets * keys + min(2 * spec.num_heads * block_products, 1 << 22)
        return Cost(multiplications=width * (embedded + block_products + buckets * keys), wide_elements=elements)

    @classmethod
    def variances(cls, spec: Dimensions, weights: Mapping[str, Tensor], before: Variances) -> Variances:
        """The terms' are added. An embedded distance, a unit vector or sines and cosines, has a mean square of 1/2n or 1/2."""
        relative: RelativeScores = getattr(spec, cls.field)
        share, (query, key) = 1 / (2 * relative.columns or 2), before
        key += share * variance(weights, "position_key")
        query += share * variance(weights, "position_query") if relative.position_to_content else 0
        query += sum(float(weights[name].double().square().mean()) for name in ("content_bias", "position_bias") if name in weights)
        return Variances(query, key)

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """Transformer-XL's if d_model is even, or else DeBERTa's. Bounds and buckets are so few that distances exceed them."""
        bound, has_bound, flag = draw.integer(1, 8), draw.flag(), draw.flag()
        if fields["d_model"] % 2 == 0 and draw.flag(0.7):
            return {"kind": "transformer_xl", "max_distance": bound if has_bound else None, "interleaved": flag}
        relative = {"kind": "disentangled", "max_distance": bound, "position_to_content": flag}
        if has_bound:
            buckets = draw.integer(4, 10)
            relative |= {"buckets": buckets, "max_distance": buckets // 2 + 1 + bound}
        return relative

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        spec, dtype = layer.spec, layer.dtype
        self.relative: RelativeScores = getattr(spec, self.field)
        shape = spec.num_heads, spec.head_dim, -1
        heads = {name: tensor.to(dtype).view(shape) for name, tensor in layer.weights.items() if name in HEAD_WEIGHTS}
        self.key, self.query = heads["position_key.weight"], heads.get("position_query.weight")  # [h, d, n]
        self.content_bias, self.position_bias = heads.get("content_bias"), heads.get("position_bias")  # [h, d, 1]

    def terms(self, call: Call, key: Tensor) -> CallTerms | None:
        """None if there are no pairs."""
        if not (call.masks.positions.numel() and call.masks.num_keys):
            return None
        return CallTerms(self, call.masks, key.to(self.dtype), call.options.heads)

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
        exponents = torch.arange(0, self.spec.d_model, 2, dtype=torch.float64, device=distances.device) / self.spec.d_model
        angles = distances.to(torch.float64)[..., None] * 10000.0**-exponents
        waves = angles.sin().to(self.dtype), angles.cos().to(self.dtype)
        return torch.stack(waves, -1).flatten(-2) if self.relative.interleaved else torch.cat(waves, -1)


class CallTerms:
    """The relative terms of one call, for any of its query rows.

    Vectors of distances, and products with them, stand in columns of falling distance. With the last query at position 5 and keys
    0 to 2, the columns 0, 1, 2 have the distances 5, 4, 3 of that query to its keys; a query at position 4 finds its own in 1, 2, 3.
    """

    def __init__(self, layer: RelativeScoresOperator, masks: Masks, key: Tensor, heads: Sequence[int] | None) -> None:
        self.num_keys, last = masks.num_keys, masks.positions.amax(1, keepdim=True)
        self.first = last - masks.positions  # [b|1, q]: column of each row's first key
        self.lowest, self.highest = self.first.amin(0).tolist(), self.first.amax(0).tolist()  # of each row, over the items
        distances = last - torch.arange(max(self.highest) + self.num_keys, device=last.device)
        self.vectors = layer.vectors(select_heads(layer.key, heads), distances)
        self.position_bias: Tensor | None = None  # [h, 1, d]
        self.key_terms: Tensor | None = None  # u·k_j, [b, h, 1, k]
        self.bucket_terms: Tensor | None = None  # k_j·s for each bucket that occurs, [b, h, buckets, k]
        if layer.content_bias is not None and layer.position_bias is not None:
            self.position_bias = select_heads(layer.position_bias, heads).transpose(1, 2)
            self.key_terms = _products(select_heads(layer.content_bias, heads), key)
        if layer.query is not None:
            buckets = distance_buckets(distances, layer.relative)
            least = int(buckets.amin())
            self.buckets = buckets - least  # [b|1, columns]
            self.bucket_terms = _products(select_heads(layer.query, heads)[..., least : int(buckets.amax()) + 1], key)

    def terms_of_rows(self, query: Tensor, rows: slice) -> Tensor:
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
        if self.key_terms is not None:
            terms = terms + self.key_terms
        if self.bucket_terms is not None:
            buckets = self.buckets[:, None, begin:end].expand(-1, columns.shape[1], -1).gather(2, columns)
            terms = terms + self.bucket_terms.gather(2, buckets[:, None].expand(shape))
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
