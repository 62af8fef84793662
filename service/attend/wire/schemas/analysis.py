"""The body and the reply of POST /attend/analysis, and the table of metrics. `heads/metrics/` has the formulas.

An undefined number (a share of no mass, an induction score without a repeated word, a query that is padding) is null in JSON, and NaN in
binary replies. Overflow is not undefined: `reply.nonfinite` decides whether it is an error, which is the default, or null.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from attend.spec import LayerSpec
from attend.spec_parts import WHOLE, field_error, whole
from attend.wire.problems import describe_value
from attend.wire.schemas.attend import SESSION_DESCRIPTION, AttendRequest
from attend.wire.schemas.schema import Index, LayerReference, Schema, unique
from attend.wire.schemas.tensors import ReplyTensor, Sequences, tensor_field

PER_HEAD = {"": "bh"}
RELATIVE_CHANGE = {"relative_change": "bh", "cosine": "bh"}


class MetricRow(NamedTuple):
    """A metric: what it is, the shapes of its parts (b items, h heads, q queries, k keys, n links), what it is of, and what it needs.

    Costs are in operations for each attention weight, beside those of the forward pass.
    """

    text: str
    shapes: Mapping[str, str] = PER_HEAD
    # weights and value norms are not defined where weights may be negative; values are read of all keys, whether a query sees them or not
    of: Literal["weights", "value norms", "values", "outputs"] = "weights"
    is_default: bool = False  # of layers whose weights are not negative; metrics of outputs, of the other layers
    needs_positions: bool = False  # of the queries among the keys
    needs_tokens: bool = False
    needs_equal_heads: bool = False  # which one head may replace
    cost: int = 12
    cost_per_head: int = 0  # in addition, for each other head
    forward_passes: int = 0  # in addition

    @property
    def holds_weights(self) -> bool:
        """Whether it is a number for each weight."""
        return any(axes.endswith("qk") for axes in self.shapes.values())


METRICS: dict[str, MetricRow] = {
    "entropy": MetricRow("-sum a ln a over the keys, in nats; mean over queries", is_default=True),
    "entropy_per_query": MetricRow("the entropy of each row", {"": "bhq"}),
    "normalised_entropy": MetricRow("entropy over ln of the number of keys that the row may attend to", is_default=True),
    "confidence": MetricRow("the largest weight of a row; mean over queries", is_default=True),
    "confidence_per_query": MetricRow("the largest weight of each row", {"": "bhq"}),
    "strongest_links": MetricRow(
        "the largest weights, of rows that see several keys; with tokens `query_words` and `key_words` too",
        {"queries": "bhn", "keys": "bhn", "weights": "bhn"},
        is_default=True,
    ),
    "first_key_mass": MetricRow("mass on the first key that is not padding", is_default=True),
    "self_share": MetricRow("mass on the query's own position", is_default=True, needs_positions=True),
    "local_share": MetricRow("mass on other positions up to `local_window` away", is_default=True, needs_positions=True),
    "global_share": MetricRow("mass on positions beyond `local_window`", is_default=True, needs_positions=True),
    "mean_distance": MetricRow("mean distance from query to key, weighted by attention", is_default=True, needs_positions=True),
    "keys_for_mass": MetricRow("number of keys that have `mass` (0.9) of a row's weight", cost=92),  # sorts each row
    "previous_token_score": MetricRow("mass on the position before the query's", is_default=True, needs_positions=True),
    "duplicate_token_score": MetricRow(
        "mass on earlier positions of the same token", is_default=True, needs_positions=True, needs_tokens=True
    ),
    "induction_score": MetricRow(
        "mass on the positions after earlier ones of the same token", is_default=True, needs_positions=True, needs_tokens=True
    ),
    "cosine_similarity": MetricRow("between the heads' shares of weights, each as one vector", {"": "bhh"}),
    "jensen_shannon": MetricRow("divergence between the heads' weights in nats, mean over queries", {"": "bhh"}, cost_per_head=25),
    "position_disagreement": MetricRow("minus the mean similarity of the heads' weights: higher is more diverse", {"": "b"}),
    "subspace_disagreement": MetricRow("the same of their values", {"": "b"}, of="values"),
    "output_disagreement": MetricRow("the same of their outputs", {"": "b"}, of="outputs", is_default=True),
    "deviation_across_heads": MetricRow("standard deviation of a weight across heads, mean over keys", {"": "bq"}),
    "single_head": MetricRow(
        "one head over the layer's full width",
        {"entropy": "b", "confidence": "b", "similarity": "bh", "relative_change": "b", "cosine": "b"},
        needs_equal_heads=True,
        forward_passes=2,
    ),
    "value_norms": MetricRow("norm of each key's value after the output projection", {"": "bhk"}, of="value norms"),
    "value_norm_weights": MetricRow("the norm times the key's weight", {"": "bhqk"}, of="value norms"),
    "contribution": MetricRow("of each head to <direction, output> or half its squared norm", of="outputs", is_default=True),
    "gradient_importance": MetricRow("the size of the contribution, normalised", of="outputs"),
    "zero_ablation": MetricRow("of the output without the head", RELATIVE_CHANGE, of="outputs", is_default=True),
    "mean_ablation": MetricRow("of the output with the head's mean in its place", RELATIVE_CHANGE, of="outputs"),
    "pruning_order": MetricRow(
        "the greedy order in which heads can go, and the relative error after each", {"heads": "bh", "errors": "bh"}, of="outputs"
    ),
}
Metric: Any = Literal[tuple(METRICS)]
Metrics = Annotated[list[Metric], Field(min_length=1, json_schema_extra={"uniqueItems": True}), unique("metric")]
INDEX_PARTS = {"queries", "keys", "heads"}  # parts that are indices; -1, in JSON null, where there is none
REFUSED_FIELDS = {  # fields of /attend
    "dropout": "no dropout, since metrics are of the weights before it",
    "output_gradient": "`direction` in its place",
}


def _valid_query_lens(value: Any) -> Any:
    value = [whole(number) for number in value] if isinstance(value, list) else whole(value)
    for number in value if isinstance(value, list) else [value]:
        if type(number) is not int or number < 0:
            raise field_error("", "a number of queries, or a list of them", describe_value(number))
    return value


class AnalysisOptions(Schema):
    """Options of the metrics."""

    local_window: Annotated[int, Field(ge=1, le=2**31 - 1, strict=True), WHOLE] = Field(
        default=2, description="Largest distance of a local key."
    )
    top_links: Annotated[int, Field(ge=1, le=1000, strict=True), WHOLE] = Field(
        default=5, examples=[5], description="Number of strongest links of each head."
    )
    mass: Annotated[float, Field(gt=0, le=1)] = Field(default=0.9, description="Share of a row's weight, for keys_for_mass.")
    query_lens: Annotated[Index | list[Index], BeforeValidator(_valid_query_lens)] | None = Field(
        default=None, description="[b]. Only the first n queries count. If null, in self-attention those that are real keys, otherwise all."
    )


def _without_refused_fields(schema: dict[str, Any]) -> None:
    """Removes the fields that are refused from the JSON schema."""
    for name in REFUSED_FIELDS:
        del schema["properties"][name]


class AnalysisRequest(AttendRequest):
    """The body of POST /attend, and the metrics to compute. `outputs` and `select` have no effect here."""

    model_config = ConfigDict(json_schema_extra=_without_refused_fields)
    session: str | None = Field(default=None, description=SESSION_DESCRIPTION)
    metrics: Metrics | None = Field(
        default=None,
        description="Metrics to compute; if null, the cheap ones that the layer has and for which the request has what they need.",
    )
    analysis: AnalysisOptions = Field(default_factory=AnalysisOptions)
    direction: Sequences | None = tensor_field(
        "direction", "contribution and gradient_importance are of <direction, output>, else |output|²/2."
    )

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        for name, expected in REFUSED_FIELDS.items():
            if getattr(self, name) is not None:
                raise field_error(f"/{name}", expected, name)
        for name in self.metrics or ():
            if METRICS[name].needs_tokens and not self.has_tokens:
                raise field_error("/tokens", f"tokens of queries and keys, since {name} is among the metrics", "none")
        self._check_query_lens()
        return self

    def _check_query_lens(self) -> None:
        lens, b, q = self.analysis.query_lens, self.query.shape[0], self.query.shape[-2]
        if lens is None:
            return
        if isinstance(lens, list) != self.batched or (isinstance(lens, list) and len(lens) != b):
            raise field_error("/analysis/query_lens", f"{b} lengths" if self.batched else "a single number", describe_value(lens))
        for n in lens if isinstance(lens, list) else [lens]:
            if n > q:
                raise field_error("/analysis/query_lens", f"at most {q}, the number of queries", str(n))

    @property
    def has_tokens(self) -> bool:
        """Whether every query and every key has a token."""
        return self.tokens is not None and self.tokens.query is not None and (self.tokens.key is not None or self.in_self_attention)

    def has_positions(self, positional: bool) -> bool:
        """Whether the position of queries among the keys is known: in self-attention, or from the request or the layer."""
        return self.in_self_attention or self.query_offset is not None or self.causal or self.window is not None or positional

    def metrics_for(self, spec: LayerSpec) -> tuple[str, ...]:
        """The metrics to compute: those of the request, or the default ones that the layer has and for which it has what they need."""
        if self.metrics is not None:
            return tuple(self.metrics)
        is_signed = self.has_signed_weights(spec)
        defaults = {name: row for name, row in METRICS.items() if row.is_default and (row.of == "outputs") == is_signed}
        has_positions = self.has_positions(bool(spec.positional))
        defined = {name: row for name, row in defaults.items() if has_positions or not row.needs_positions}
        return tuple(name for name, row in defined.items() if self.has_tokens or not row.needs_tokens)


def _table_of_metrics() -> str:
    """The metrics as a table of Markdown, indented as docstrings are."""

    def shapes(row: MetricRow) -> str:
        parts: dict[str, list[str]] = {}
        for part, axes in row.shapes.items():
            parts.setdefault(axes, []).append(f"`{part}`" * bool(part))
        return ", ".join(f"{', '.join(names)} [{','.join(axes)}]".strip() for axes, names in parts.items())

    rows = [f"| `{name}` | {shapes(row)} | {row.text} |" for name, row in METRICS.items()]
    return "\n    ".join(["| metric | shape | what it is |", "|---|---|---|", *rows])


class AnalysisReply(Schema):
    __doc__ = f"""The metrics under their names, without the axis b where the request has none.

    Rows without a key are not counted, nor is padding: positions closed by lengths and key masks, in self-attention also as queries. With
    attention sinks or sigmoid weights, weights are shares of their sum. Means over queries are over those for which the number is defined.

    Overflow is an error, unless `reply.nonfinite` allows it. Undefined numbers are null, never 0: a number about rows if no row is counted,
    about two heads if no row is counted for both, about keys (`value_norms`, `subspace_disagreement`) if all are padding. Numbers about the
    output are of the rows that are counted for any head; a head without such rows adds 0 to them.

    {_table_of_metrics()}
    """

    layer: LayerReference
    fully_masked_rows: int = Field(description="Number of rows (batch, head, query) without a key to attend to. No metric counts them.")
    metrics: dict[str, ReplyTensor | dict[str, ReplyTensor]]
