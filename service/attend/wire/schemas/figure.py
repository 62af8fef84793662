"""The body of POST /attend/figure: that of POST /attend, and the options of the picture."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from attend.spec_parts import WHOLE, Finite, field_error
from attend.wire.schemas.attend import SESSION_DESCRIPTION, AttendRequest
from attend.wire.schemas.schema import Index, Schema, StrictBool, unique

PositiveFinite = Annotated[Finite, Field(gt=0)]
OTHER_PICTURES = ("jpg", "jpeg", "gif", "webp", "bmp")


def _require_format(value: object) -> object:
    """Refuses formats of pixels that are not drawn, with the one that is."""
    if isinstance(value, str) and value.lower() in OTHER_PICTURES:
        raise field_error("", 'one of "html", "png", "svg"', f'"{value}" (did you mean png?)')
    return value


class Figure(Schema):
    """A picture of one batch item."""

    kind: Literal["heads", "head", "mean", "std", "similarity", "concatenation"] = Field(
        default="heads",
        examples=["mean"],
        description="`heads`: the weights of every head, in a grid; `head`: of one; `mean`, `std`: across heads; `similarity`: the "
        "metric `cosine_similarity`; `concatenation`: the heads' outputs side by side, and after the output projection.",
    )
    format: Annotated[Literal["png", "svg", "html"] | None, BeforeValidator(_require_format)] = Field(
        default=None, description="Format of the picture; by `Accept` if null."
    )
    theme: Literal["light", "dark"] = Field(default="light", description="Background of the picture.")
    colours: Literal["viridis", "cividis"] = Field(default="viridis", description="Colour map of the cells.")
    title: Annotated[str, Field(max_length=1000)] | None = Field(
        default=None, description='Title of the picture; a description if null, "" for none.'
    )
    heads: Annotated[list[Index], Field(min_length=1, max_length=256, json_schema_extra={"uniqueItems": True}), unique("head")] | None = (
        Field(default=None, description="Heads to draw, all if null. For the kind `head` exactly one, the first if null.")
    )
    item: Index = Field(default=0, description="Index of the batch item to draw.")
    pool: Literal["mean", "max"] | None = Field(default=None, description="How pairs that share a cell are pooled; the mean if null.")
    values: StrictBool | None = Field(default=None, description="Whether to write numbers in the cells; if null, where they fit.")
    scale: Literal["linear", "log"] = Field(default="linear", description="Colour scale. `log` needs values of one sign.")
    scale_per_head: StrictBool = Field(
        default=False,
        description="Whether each head of the kind `heads` has a scale of its own, up to its largest weight; without `maximum`.",
    )
    maximum: PositiveFinite | None = Field(default=None, description="Value of the last colour; the largest if null (1 for `similarity`).")
    width: Annotated[int, Field(ge=200, le=4096, strict=True), WHOLE] | None = Field(
        default=None, description="Width in CSS pixels; as needed if null."
    )
    dpi: Annotated[int, Field(ge=48, le=384, strict=True), WHOLE] = Field(
        default=144, description="Resolution of a PNG; 96: a CSS pixel is a pixel."
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "head" and self.heads is not None and len(self.heads) != 1:
            raise field_error("/heads", "one head for a picture of kind head", str(len(self.heads)))
        if self.kind == "concatenation" and self.scale == "log":
            raise field_error("/scale", "linear for numbers of either sign", '"log"')
        if self.scale_per_head and self.maximum is not None:
            raise field_error("/maximum", "null, since each head has a scale of its own", f"{self.maximum:g}")
        if self.kind == "concatenation" and self.heads is not None:
            raise field_error("/heads", "null, since the concatenation is of all heads", f"a list of {len(self.heads)}")
        return self


class FigureRequest(AttendRequest):
    """The body of POST /attend, and `figure`. `outputs`, `select` and `reply` have no effect here."""

    session: str | None = Field(default=None, description=SESSION_DESCRIPTION)
    figure: Figure = Field(default_factory=Figure)

    @model_validator(mode="after")
    def _check_item(self) -> Self:
        items = self.query.shape[0] if self.batched else 1
        if items and self.figure.item >= items:
            raise field_error("/figure/item", f"an item below {items}", str(self.figure.item))
        if 0 in self.query.shape or not self.num_keys:
            raise field_error("/query", "at least one query and one key to draw", "none")
        return self

    def item_tokens(self, side: Literal["query", "key"]) -> tuple[str, ...]:
        """The item's tokens of queries or keys, none if there are none. A key that is left out has the query's."""
        rows = self.tokens_of(side)
        return tuple(rows[self.figure.item] if rows and not isinstance(rows[0], str) else rows)  # type: ignore[arg-type]  # of one item

    def drawn_positions(self, side: Literal["query", "key"]) -> tuple[int, ...] | None:
        """The item's positions whose tokens are not omitted; None if all are drawn."""
        options, tokens = self.tokens, self.item_tokens(side)
        if options is None or not any(map(options.omits, tokens)):
            return None
        return tuple(i for i, token in enumerate(tokens) if not options.omits(token))
