"""Scores with terms of the content and the distance (Transformer-XL, DeBERTa).

    terms_ij = u·k_j + (q_i + v)·r_D          transformer_xl (Dai et al. 2019, arXiv 1901.02860, section 3.3)
    terms_ij = q_i·r_D + k_j·s_D              disentangled (He et al. 2021, arXiv 2006.03654, equation 4)

r_D and s_D are the position vectors of distance D = position_i - j. They are computed once for a call, for all distances from the last
position down: column c belongs to D = last - c. The columns of a row are consecutive. So a block of rows is multiplied by few columns,
and the product of each pair of query and key is gathered from its column.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import Variances, variance
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import SCORES, Step, Steps, Value
from attend.spec_parts import WHOLE, Flag, Part, Width, field_error

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions

MAX_PRODUCTS = 1 << 21  # most products of queries and position vectors at a time: twice the scores of a block


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

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """What is computed of all distances and of the keys, and the terms of each pair."""
        relative: RelativeScores = getattr(spec, cls.field)
        names = [f"position_{role}.weight" for role in ("key", "query")[: 1 + relative.position_to_content]]
        products = ("b,h,?2 * columns,k,head_dim",) * relative.position_to_content
        products = ("b,h,head_dim,q + k,query_dim", "b,h,k,head_dim") if relative.kind == "transformer_xl" else products
        vectors = Step(
            "distance_vectors",
            ("positions", "keys", "key_projection", *names, *(("content_bias",) if relative.kind == "transformer_xl" else ())),
            {
                "first_column": Value("b,q", "int64"),
                "distance_vectors": Value("b,h,head_dim,?q + k"),
                "key_terms": Value("b,h,?2 * columns,k" if relative.columns else "b,h,?1,k"),
                "column_buckets": Value("b,?q + k"),
            },
            "",
            partial(_vectors, spec=spec, relative=relative),
            products=products,
            scratch=("b,q + k,query_dim",) * (1 if relative.columns else 2),
        )
        reads: tuple[str, ...] = ("scores", "query_projection", "first_column", "distance_vectors", "key_terms", "column_buckets", "scale")
        if relative.kind == "transformer_xl":
            bound = f", at most {relative.max_distance}" if relative.max_distance else ""
            formula = f"S_ij = S_ij + scale · (u·k_j + (q_i + v)·W_R R_D), with the sinusoids R_D of D = i - j{bound}"
            reads = (*reads, "position_bias")
        else:
            distance = "bucket(i - j)" if relative.buckets else "i - j"
            formula = f"S_ij = S_ij + scale · (q_i·r_D{' + k_j·s_D' if relative.position_to_content else ''}), D = {distance}"
        add = Step(
            "add_terms",
            reads,
            SCORES,
            formula,
            _add_terms,
            products=("b,h,q,q + k,head_dim",),
            scratch=("b,h,q,q + k",),
        )
        return {"rescale": (vectors,), "terms": (add,)}


def _vectors(
    m: Arithmetic, positions: Any, keys: Any, key: Any, *weights: Any, spec: Dimensions, relative: RelativeScores
) -> tuple[Any, Any, Any, Any]:
    """What the terms of a call are gathered from: the first column of each row, the vectors, and terms of keys.

    Columns have falling distances. With the last query at position 5 and keys 0 to 2, the columns 0, 1, 2 have the distances 5, 4, 3 of
    that query to its keys; a query at position 4 finds its own in 1, 2, 3.
    """
    if 0 in (*positions.shape, len(keys)):  # there are no pairs
        return positions, m.wide(key[:, :0]), None, None
    last = m.xp.amax(positions, axis=1, keepdims=True)
    first = last - positions
    distances = last - m.counting(int(first.max()) + len(keys), positions)  # [b, columns]
    heads = [m.wide(weight).reshape(spec.num_heads, spec.head_dim, -1) for weight in weights]
    buckets = None
    if relative.kind == "transformer_xl":
        vectors = heads[0].reshape(-1, spec.d_model) @ _sinusoids(m, distances, spec.d_model, relative).mT
        vectors = vectors.reshape(len(distances), spec.num_heads, spec.head_dim, -1)
        terms = _products(m, heads[1], key)  # u·k_j, [b, h, 1, k]
    else:
        columns = distance_buckets(m, distances, relative)
        vectors, terms = m.xp.moveaxis(heads[0][..., columns], 2, 0), None
        if relative.position_to_content:
            least = int(columns.min())
            occurring = heads[1][..., least : int(columns.max()) + 1]
            buckets, terms = columns - least, _products(m, occurring, key)  # k_j·s for each bucket that occurs, [b, h, buckets, k]
    return first, vectors, terms, buckets


def _add_terms(
    m: Arithmetic, scores: Any, query: Any, first: Any, vectors: Any, terms: Any, buckets: Any, scale: float, bias: Any = None
) -> Any:
    """The scores [b, h, q, k] with the terms of their rows, whose products with the range of columns that they need are computed."""
    rows, num_keys = scores.shape[2:]
    if 0 in scores.shape:
        return scores
    begin, end = int(first.min()), int(first.max()) + num_keys
    if rows > 1 and scores.shape[0] * scores.shape[1] * rows * (end - begin) > MAX_PRODUCTS:
        halves = (slice(None, rows // 2), slice(rows // 2, None))
        with_terms = [_add_terms(m, scores[:, :, i], query[:, :, i], first[:, i], vectors, terms, buckets, scale, bias) for i in halves]
        return m.xp.concatenate(with_terms, axis=2)
    columns = (first - begin)[..., None] + m.counting(num_keys, first)  # [b, q, k]
    query = m.wide(query) if bias is None else m.wide(query) + m.wide(bias)[:, None]
    added = m.gather(query @ vectors[..., begin:end], columns[:, None])
    if buckets is not None:
        of_pairs = m.gather(buckets[:, None, begin:end], columns)  # [b, q, k]
        added = added + m.gather(m.xp.swapaxes(terms, 2, 3)[:, :, None], of_pairs[:, None, ..., None])[..., 0]
    elif terms is not None:
        added = added + terms
    return scores + scale * added


def _sinusoids(m: Arithmetic, distances: Any, width: int, relative: RelativeScores) -> Any:
    """sin(D w_i) and cos(D w_i) with w_i = 10000^(-2i/width) (Vaswani et al. 2017), from float64 angles: [...] -> [..., width]."""
    if (bound := relative.max_distance) is not None:
        distances = m.xp.clip(distances, -bound, bound)
    angles = m.exact(distances)[..., None] * m.constant([10000.0 ** (-2 * i / width) for i in range(width // 2)])
    waves = m.wide(m.xp.sin(angles)), m.wide(m.xp.cos(angles))
    if relative.interleaved:
        return m.xp.stack(waves, axis=-1).reshape(*distances.shape, width)
    return m.xp.concatenate(waves, axis=-1)


def distance_buckets(m: Arithmetic, distances: Any, relative: RelativeScores) -> Any:
    """The column of each distance in weights of 2n columns: δ(D) + n (He et al. 2021, equation 3), δ logarithmic if there are buckets.

    With m = ⌊buckets/2⌋, δ(D) is D up to m, and sign(D) (m + ⌈(m - 1) ln(|D|/m) / ln((max_distance - 1)/m)⌉) beyond. The logarithm is
    lowered by 1e-9 before it is rounded up, since it may exceed a whole number by a rounding error.
    """
    buckets = distances
    if relative.buckets is not None and relative.max_distance is not None:
        middle, far = relative.buckets // 2, abs(distances)
        share = m.xp.log(m.exact(m.xp.clip(far, middle, None)) / middle) / math.log((relative.max_distance - 1) / middle)
        wide = middle + m.integer(m.xp.ceil((middle - 1) * share - 1e-9))
        buckets = m.xp.where(far <= middle, distances, m.xp.sign(distances) * wide)
    return m.xp.clip(buckets + relative.columns, 0, 2 * relative.columns - 1)


def _products(m: Arithmetic, vectors: Any, key: Any) -> Any:
    """Vectors [h, d, n] of each head times keys [b, kv heads, k, d]: [b, h, n, k]. Heads that share keys are neighbours."""
    grouped = vectors.reshape(key.shape[1], -1, *vectors.shape[1:])
    products = m.xp.einsum("gudn,bgkd->bgunk", grouped, m.wide(key))
    return products.reshape(len(key), -1, *products.shape[3:])
