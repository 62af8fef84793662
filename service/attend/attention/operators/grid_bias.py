"""Scores by relative position in a grid of tokens, such as an image (Swin, BEiT, SAM)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import Extent, LeftOut
from attend.attention.operators.operator import Operator
from attend.attention.operators.step import Step, Steps, Value
from attend.spec_parts import Flag, Part, Side, field_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions


class GridBias(Part):
    """Scores by relative position in a grid of height x width tokens in row-major order, such as a window of an image.

    With dy and dx the row and column of the query less those of the key, and the projected query q, a head's score is increased by
    `grid_bias`[(dy + height - 1) (2 width - 1) + dx + width - 1, head] (table; Swin, Liu et al. 2021, equation 4), or by
    q · `grid_rows`[dy + height - 1] + q · `grid_columns`[dx + width - 1] (decomposed; MViTv2, Li et al. 2022, equation 4).
    """

    height: Side
    width: Side
    kind: Literal["table", "decomposed"] = Field(
        default="table", description="A bias for each head and relative position (Swin, BEiT), or a vector for each row and column (SAM)."
    )
    class_token: Flag = Field(
        default=False,
        description="Whether a class token precedes the grid; the table ends with its biases to keys, from queries and to itself (BEiT).",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.class_token and self.kind == "decomposed":
            raise field_error("/class_token", "false, since decomposed positions have no class token", "true")
        return self

    @property
    def num_vectors(self) -> int:
        """The vectors of rows and columns."""
        return 2 * (self.height + self.width - 1)

    @property
    def num_tokens(self) -> int:
        """The tokens of the grid, and the class token if there is one."""
        return self.height * self.width + self.class_token


class GridBiasOperator(Operator):
    name, field, positional = "grid_bias", "grid_bias", True
    left_out = LeftOut("the bias by positions in a grid", "softmax(S)", "softmax(S + B), B_ij by the places of i and j in the grid")
    per_head = True
    axes: ClassVar[Axes] = {"grid_bias": ("places", "heads"), **dict.fromkeys(("grid_rows", "grid_columns"), ("places", "n"))}

    @classmethod
    def check(cls, spec: Dimensions) -> None:
        if getattr(spec, cls.field).kind == "decomposed" and spec.num_softmaxes > 1:
            raise field_error("/grid_bias/kind", f"table, since each head has {spec.num_softmaxes} queries", "decomposed")

    @classmethod
    def is_relative(cls, spec: Dimensions) -> bool:
        return False

    @classmethod
    def extent(cls, spec: Dimensions) -> Extent:
        """A position for each token."""
        grid: GridBias = getattr(spec, cls.field)
        return Extent(grid.num_tokens, f"the {grid.num_tokens} tokens of the grid of {grid.height} x {grid.width}", negative=False)

    @classmethod
    def weights(cls, spec: Dimensions) -> Shapes:
        grid: GridBias = getattr(spec, cls.field)
        rows, columns = 2 * grid.height - 1, 2 * grid.width - 1
        if grid.kind == "table":
            return {"grid_bias": (rows * columns + 3 * grid.class_token, spec.num_heads)}
        return {"grid_rows": (rows, spec.head_dim), "grid_columns": (columns, spec.head_dim)}

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """More tokens than any call has."""
        height, width = draw.one_of((2, 11), (3, 5), (5, 3), (7, 2))
        kind = "table" if fields["num_softmaxes"] > 1 else draw.one_of("table", "decomposed")
        return {"height": height, "width": width, "kind": kind, "class_token": kind == "table" and draw.flag()}

    @classmethod
    def steps(cls, spec: Dimensions, features: Collection[str] = ()) -> Steps:
        """The bias of the table, or of the vectors of rows and columns."""
        grid: GridBias = getattr(spec, cls.field)
        compute: Callable[..., Any]
        reads: tuple[str, ...]
        products: tuple[str, ...] = ()
        if grid.kind == "decomposed":
            reads = ("query_projection", "positions", "keys", "grid_rows", "grid_columns")
            products = ("b,h,q,num_vectors,head_dim",)
            formula, compute = "grid_scores_ij = q_i · (grid_rows[row_i - row_j] + grid_columns[column_i - column_j])", _decomposed
        else:
            reads, compute = ("positions", "keys", "grid_bias"), _from_table
            token = ", whose last three rows are for a class token" if grid.class_token else ""
            formula = f"grid_scores_ij = grid_bias[place_i - place_j, h]{token}"
        writes = {"grid_scores": Value("b,h,q,k")}
        return {"bias": (Step("grid_bias", reads, writes, formula, partial(compute, grid=grid), products=products),)}


def _from_table(m: Arithmetic, positions: Any, keys: Any, table: Any, *, grid: GridBias) -> Any:
    """The entries of a table [relative positions, h] for queries at positions [b, q]: [b, h, q, k]."""
    down, across = grid_distances(m, grid, positions, keys)
    index = down * (2 * grid.width - 1) + across
    if grid.class_token:
        of_query, of_key = positions[:, :, None] == 0, keys == 0
        index = m.xp.where(of_query, len(table) - 3, index)
        index = m.xp.where(of_key, len(table) - 2 + m.integer(of_query), index)
    return m.wide(m.xp.moveaxis(table[index], -1, 1))


def _decomposed(m: Arithmetic, query: Any, positions: Any, keys: Any, rows: Any, columns: Any, *, grid: GridBias) -> Any:
    """q · rows[dy] + q · columns[dx] for query [b, h, q, d] (Li et al. 2022, equation 4): [b, h, q, k].

    Every query is multiplied by all vectors of an axis; then the product for each key is gathered.
    """
    total: Any = 0
    for vectors, distances in zip((rows, columns), grid_distances(m, grid, positions, keys), strict=True):
        products = m.wide(query) @ m.wide(vectors).T
        total = total + m.gather(products, distances[:, None])
    return total


def grid_distances(m: Arithmetic, grid: GridBias, positions: Any, keys: Any) -> tuple[Any, Any]:
    """Row and column of the query less those of the key, each from 0 for the smallest: [b, q], [k] -> [b, q, k]; any for a class token."""
    i, j = (x - int(grid.class_token) for x in (positions[:, :, None], keys))
    down = m.xp.floor_divide(i, grid.width) - m.xp.floor_divide(j, grid.width) + grid.height - 1
    across = i % grid.width - j % grid.width + grid.width - 1
    return m.xp.clip(down, 0, 2 * grid.height - 2), across
