"""Scores by relative position in a grid of tokens, such as an image (Swin, BEiT, SAM)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attend.attention.operators.declarations import Cost, Extent, LeftOut
from attend.attention.operators.lazy import torch
from attend.attention.operators.operator import Operator
from attend.attention.operators.stages import select_heads
from attend.spec_parts import Flag, Part, Side, field_error

if TYPE_CHECKING:
    from torch import Tensor

    from attend.attention.call import Call, CallOptions
    from attend.attention.operators.declarations import Axes, Shapes
    from attend.attention.operators.operator import Draw, Fields, Layer
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
    def num_tokens(self) -> int:
        """The tokens of the grid, and the class token if there is one."""
        return self.height * self.width + self.class_token


class GridBiasOperator(Operator):
    name, field, positional = "grid_bias", "grid_bias", True
    left_out = LeftOut("the bias by positions in a grid", "softmax(S)", "softmax(S + B), B_ij by the places of i and j in the grid")
    per_head = True
    axes: ClassVar[Axes] = dict.fromkeys(("grid_bias", "grid_rows", "grid_columns"), ("places", "n"))

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
    def formula(cls, spec: Dimensions) -> dict[str, str]:
        grid: GridBias = getattr(spec, cls.field)
        if grid.kind == "decomposed":
            return {"bias": "S_ij = S_ij + q_i · (grid_rows[row_i - row_j] + grid_columns[column_i - column_j])"}
        token = ", whose last three rows are for a class token" if grid.class_token else ""
        return {"bias": f"S_ij = S_ij + grid_bias[place_i - place_j, h]{token}"}

    @classmethod
    def cost(cls, spec: Dimensions, options: CallOptions, cached: int) -> Cost:
        """Decomposed: each query times the vectors of all rows and columns."""
        grid: GridBias = getattr(spec, cls.field)
        vectors = 2 * (grid.height + grid.width - 1) if grid.kind == "decomposed" else 0
        return Cost(multiplications=options.num_queries * spec.num_heads * spec.head_dim * vectors)

    @classmethod
    def random(cls, draw: Draw, fields: Fields) -> Any:
        """More tokens than any call has."""
        height, width = draw.one_of((2, 11), (3, 5), (5, 3), (7, 2))
        kind = "table" if fields["num_softmaxes"] > 1 else draw.one_of("table", "decomposed")
        return {"height": height, "width": width, "kind": kind, "class_token": kind == "table" and draw.flag()}

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.config: GridBias = getattr(layer.spec, self.field)
        self._weights = {name: x.to(layer.dtype) for name, x in layer.weights.items() if name.startswith("grid_")}

    def bias(self, query: Tensor, call: Call, rows: slice, keys: slice) -> Tensor:
        """The bias [b|1, h, rows, keys] of the table, or of the vectors of rows and columns."""
        positions = call.masks.positions[:, rows]
        if self.config.kind == "decomposed":
            vectors = self._weights["grid_rows"], self._weights["grid_columns"]
            return _decomposed(query.to(self.dtype), *vectors, self.config, positions, keys)
        table = self._weights["grid_bias"]
        return _table_bias(select_heads(table, call.options.heads, axis=1), self.config, positions, keys)


def _table_bias(table: Tensor, grid: GridBias, positions: Tensor, keys: slice) -> Tensor:
    """The bias of a table [relative positions, h] for queries at positions [b|1, rows]: [b|1, h, rows, keys]."""
    down, across = _distances(grid, positions, keys)
    index = down * (2 * grid.width - 1) + across
    if grid.class_token:
        is_query, is_key = positions[:, :, None] == 0, torch.arange(keys.start, keys.stop, device=positions.device) == 0
        index = torch.where(is_query, len(table) - 3, index)
        index = torch.where(is_key, len(table) - 2 + is_query.to(index.dtype), index)
    return table[index].movedim(-1, 1)


def _decomposed(query: Tensor, rows: Tensor, columns: Tensor, grid: GridBias, positions: Tensor, keys: slice) -> Tensor:
    """q · rows[dy] + q · columns[dx] for query [b, h, rows, d] at positions [b|1, rows]: [b, h, rows, keys] (Li et al. 2022, equation 4).

    Every query is multiplied by all vectors of an axis; then the product for each key is gathered.
    """
    products = [
        torch.gather(query @ vectors.T, -1, distances[:, None].expand(*query.shape[:3], -1))
        for vectors, distances in zip((rows, columns), _distances(grid, positions, keys), strict=True)
    ]
    return products[0] + products[1]


def _distances(grid: GridBias, positions: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """Row and column of the query less those of the key, each from 0 for the smallest, [b|1, rows, keys]; 0 for a class token's."""
    i, j = (x - int(grid.class_token) for x in (positions[:, :, None], torch.arange(keys.start, keys.stop, device=positions.device)))
    down = torch.div(i, grid.width, rounding_mode="floor") - torch.div(j, grid.width, rounding_mode="floor") + grid.height - 1
    across = i % grid.width - j % grid.width + grid.width - 1
    return (down.clamp(0, 2 * grid.height - 2), across) if grid.class_token else (down, across)
