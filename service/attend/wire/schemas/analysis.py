"""The body and the reply of POST /attend/analysis, and the table of metrics with the shape of each. `heads/metrics/` has the formulas.

An undefined number (a share of no mass, an induction score without a repeated word, a query that is padding) is null in JSON, and NaN in
binary replies. Overflow is not undefined: `reply.nonfinite` decides whether it is an error, which is the default, or null.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from attend.spec import LayerSpec
from attend.spec_parts import WHOLE, field_error, whole
from attend.wire.problems import describe_value
from attend.wire.schemas.attend import SESSION_DESCRIPTION, AttendRequest
from attend.wire.schemas.schema import Index, LayerReference, Schema, unique
from attend.wire.schemas.tensors import ReplyTensor, Sequences, tensor_field

PER_HEAD = {"": "bh"}
# Each metric's parts, with the letters of their shapes: b items, h heads, q queries, k keys, n links
METRIC_SHAPES: dict[str, dict[str, str]] = {
    "entropy": PER_HEAD,
    "entropy_per_query": {"": "bhq"},
    "normalised_entropy": PER_HEAD,
    "confidence": PER_HEAD,
    "confidence_per_query": {"": "bhq"},
    "strongest_links": {"queries": "bhn", "keys": "bhn", "weights": "bhn"},
    "self_share": PER_HEAD,
    "local_share": PER_HEAD,
    "global_share": PER_HEAD,
    "mean_distance": PER_HEAD,
    "first_key_mass": PER_HEAD,
    "keys_for_mass": PER_HEAD,
    "previous_token_score": PER_HEAD,
    "duplicate_token_score": PER_HEAD,
    "induction_score": PER_HEAD,
    "cosine_similarity": {"": "bhh"},
    "jensen_shannon": {"": "bhh"},
    "position_disagreement": {"": "b"},
    "subspace_disagreement": {"": "b"},
    "output_disagreement": {"": "b"},
    "deviation_across_heads": {"": "bq"},
    "single_head": {"entropy": "b", "confidence": "b", "similarity": "bh", "relative_change": "b", "cosine": "b"},
    "value_norms": {"": "bhk"},
    "value_norm_weights": {"": "bhqk"},
    "contribution": PER_HEAD,
    "gradient_importance": PER_HEAD,
    "zero_ablation": {"relative_change": "bh", "cosine": "bh"},
    "mean_ablation": {"relative_change": "bh", "cosine": "bh"},
    "pruning_order": {"heads": "bh", "errors": "bh"},
}
METRICS = tuple(METRIC_SHAPES)
Metric: Any = Literal[METRICS]
Metrics = Annotated[list[Metric], Field(min_length=1, json_schema_extra={"uniqueItems": True}), unique("metric")]
INDEX_PARTS = {"queries", "keys", "heads"}  # parts that are indices; -1, in JSON null, where there is none
POSITIONAL_METRICS = ("self_share", "local_share", "global_share", "mean_distance", "previous_token_score", "induction_score")
TOKEN_METRICS = ("duplicate_token_score", "induction_score")
DEFAULT_METRICS: tuple[str, ...] = (
    "entropy",
    "normalised_entropy",
    "confidence",
    "strongest_links",
    "first_key_mass",
    "self_share",
    "local_share",
    "global_share",
    "mean_distance",
    "previous_token_score",
)
DEFAULT_OUTPUT_METRICS = ("output_disagreement", "contribution", "zero_ablation")  # of layers whose weights may be negative
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
            if name in TOKEN_METRICS and not self.has_tokens:
                raise field_error("/tokens", f"tokens of queries and keys, since {name} is among the metrics", "none")
        self._check_query_lens()
        return self

    def _check_query_lens(self) -> None:
        lens, b, q = self.analysis.query_lens, self.query.shape[0], self.query.shape[-2]
        if lens is None:
            return
        if isinstance(lens, list) != self.batched or (isinstance(lens, list) and len(lens) != b):
            raise field_error("/analysis/query_lens", f"{b} lengths" if self.batched else "a single number", "another number of them")
        for n in lens if isinstance(lens, list) else [lens]:
            if n > q:
                raise field_error("/analysis/query_lens", f"at most {q}, the number of queries", str(n))

    @property
    def has_tokens(self) -> bool:
        """Whether every query and every key has a token."""
        return self.tokens is not None and self.tokens.query is not None and (self.tokens.key is not None or self.key is None)

    def has_positions(self, positional: bool) -> bool:
        """Whether the position of queries among the keys is known: in self-attention, or from the request or the layer."""
        return self.key is None or self.query_offset is not None or self.causal or self.window is not None or positional

    def metrics_for(self, spec: LayerSpec) -> tuple[str, ...]:
        """The metrics to compute: those of the request, or the default ones that the layer has and for which it has what they need."""
        if self.metrics is not None:
            return tuple(self.metrics)
        if spec.signed_weights:
            return DEFAULT_OUTPUT_METRICS
        return tuple(name for name in DEFAULT_METRICS if name not in POSITIONAL_METRICS or self.has_positions(bool(spec.positional)))


class AnalysisReply(Schema):
    """The metrics under their names, without the axis b where the request has none.

    Rows without a key are not counted, nor is padding: positions closed by lengths and key masks, in self-attention also as queries. With
    attention sinks or sigmoid weights, weights are shares of their sum. Means over queries are over those for which the number is defined.

    Overflow is an error, unless `reply.nonfinite` allows it. Undefined numbers are null, never 0: a number about rows if no row is counted,
    about two heads if no row is counted for both, about keys (`value_norms`, `subspace_disagreement`) if all are padding. Numbers about the
    output (from `contribution` on) are of the rows that are counted for any head; a head without such rows adds 0 to them.

    | metric | shape | what it is |
    |---|---|---|
    | `entropy`, `entropy_per_query` | [b,h], [b,h,q] | -sum a ln a over the keys, in nats; mean over queries |
    | `normalised_entropy` | [b,h] | entropy over ln of the number of keys that the row may attend to |
    | `confidence`, `confidence_per_query` | [b,h], [b,h,q] | the largest weight of a row; mean over queries |
    | `strongest_links` | `queries`, `keys`, `weights` [b,h,n] | the largest weights; with tokens `query_words` and `key_words` too |
    | `self_share`, `local_share`, `global_share` | [b,h] | mass on the query's own position, up to `local_window` beside it, beyond |
    | `mean_distance` | [b,h] | mean distance from query to key, weighted by attention |
    | `first_key_mass` | [b,h] | mass on the first key that is not padding |
    | `keys_for_mass` | [b,h] | number of keys that have `mass` (0.9) of a row's weight |
    | `previous_token_score` | [b,h] | mass on the position before the query's |
    | `duplicate_token_score`, `induction_score` | [b,h] | mass on earlier positions of the same token; on the positions after those |
    | `cosine_similarity`, `jensen_shannon` | [b,h,h] | between the heads' weights; the divergence in nats, mean over queries |
    | `position_disagreement`, `subspace_disagreement`, `output_disagreement` | [b] | minus the mean similarity: higher is more diverse |
    | `deviation_across_heads` | [b,q] | standard deviation of a weight across heads, mean over keys |
    | `single_head` | `entropy`, `confidence`, `relative_change`, `cosine` [b], `similarity` [b,h] | one head over the layer's full width |
    | `value_norms`, `value_norm_weights` | [b,h,k], [b,h,q,k] | norm of each key's value after the output projection; times its weight |
    | `contribution`, `gradient_importance` | [b,h] | of each head to <direction, output> or half its squared norm; its size, normalised |
    | `zero_ablation`, `mean_ablation` | `relative_change`, `cosine` [b,h] | of the output without the head, or with its mean instead |
    | `pruning_order` | `heads`, `errors` [b,h] | the greedy order in which heads can go, and the relative error after each |
    """

    layer: LayerReference
    fully_masked_rows: int = Field(description="Number of rows (batch, head, query) without a key to attend to. No metric counts them.")
    metrics: dict[str, ReplyTensor | dict[str, ReplyTensor]]
