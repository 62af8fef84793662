"""POST /attend/analysis: what it asks of a request and its layer, its cost, and its reply."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from attend.attention.call import Call, Result
from attend.errors import InvalidRequest, SessionConflict
from attend.heads.metrics.compute import OVERFLOWED, MetricsOperation
from attend.heads.metrics.rows import MetricsOptions
from attend.serving.admission import Admission
from attend.serving.casting import at_cache_line, cast, numpy_of
from attend.serving.cost import Cost, predict, reply_sizes
from attend.serving.layer_checks import refuse_packed, require_masks_of_all_heads
from attend.serving.layers.registry import LoadedLayer
from attend.serving.prepared import Prepared
from attend.serving.request_type import RequestType
from attend.serving.sessions.session import Session
from attend.spec import LayerSpec
from attend.tensors import BY_TORCH, DATATYPES, Array
from attend.wire.codec import Decoded, Reply
from attend.wire.json.writer import bytes_of_word
from attend.wire.schemas.analysis import INDEX_PARTS, METRICS, AnalysisRequest
from attend.wire.schemas.attend import AttendRequest

SIDES: tuple[Literal["query"], Literal["key"]] = ("query", "key")
BLOCK_WEIGHTS = 1 << 20  # weights computed at once; the metrics need about a dozen times their memory


class AnalysisRequestType(RequestType[AnalysisRequest]):
    """Metrics of heads."""

    is_kept = in_shards = False

    def prepare_for_session(self, session: Session, decoded: Decoded, admission: Admission) -> Prepared:
        """As `RequestType.prepare_for_session`. Raises SessionConflict also for metrics of values that are freed."""
        prepared = super().prepare_for_session(session, decoded, admission)
        for name in prepared.fields.metrics_for(session.layer.spec) if session.cache.first else ():
            if METRICS[name].of in ("values", "value norms"):
                expected = "metrics of visible keys alone, since the values of the first rows are freed"
                raise SessionConflict.where("/metrics", expected, name)
        return prepared

    def check(self, request: AnalysisRequest, spec: LayerSpec) -> None:
        """Raises InvalidRequest also if a requested metric is not defined for the request."""
        super().check(request, spec)
        refuse_packed(request)
        layer = f'for layer "{request.layer}"'
        if not request.query.size or not request.num_keys:
            raise InvalidRequest.where("/query", "at least one query and one key to measure", "none")
        metrics = {name: METRICS[name] for name in request.metrics_for(spec)}
        for name, metric in metrics.items():
            if metric.needs_positions and not request.has_positions(bool(spec.positional)):
                expected = f'an offset (0, "end", …), since {name} needs the positions of the queries among the keys'
                raise InvalidRequest.where("/query_offset", expected, "nothing")
        for i, (name, metric) in enumerate(metrics.items()):
            if spec.signed_weights and metric.of in ("weights", "value norms"):
                reason = f"whose weights may be negative ({spec.signed_weights})"
                raise InvalidRequest.where(f"/metrics/{i}", f"metrics of the heads' outputs, such as contribution, {layer}, {reason}", name)
            if metric.of in ("weights", "value norms") and request.has_signed_weights(spec):
                raise InvalidRequest.where("/pattern", f"no negative weights, with {name} among the metrics", "some")
            for operator in spec.operators:
                if metric.of == "value norms" and operator.writes(spec, "head_outputs"):
                    expected = f"a metric other than {name} {layer}, whose {operator.field} scales values by another factor for each query"
                    raise InvalidRequest.where(f"/metrics/{i}", expected, name)
                if metric.needs_equal_heads and operator.per_head:
                    expected = f"a metric other than {name} {layer}, since one head has no {operator.field} of many"
                    raise InvalidRequest.where(f"/metrics/{i}", expected, name)
            if metric.needs_equal_heads:
                require_masks_of_all_heads(request, f"since {name} is among the metrics")

    def predict(self, request: AnalysisRequest, spec: LayerSpec) -> Cost:
        """The cost of a request that fits the layer. Few metrics hold a tensor [q, k]."""
        forward = predict(request.model_copy(update={"outputs": ["output"], "select": None}), spec)
        b = request.query.shape[0] if request.batched else 1
        q, k, h = request.query.shape[-2], request.num_keys, spec.num_heads
        metrics = {name: METRICS[name] for name in request.metrics_for(spec)}
        rows = metrics.values()
        lengths = {"b": b, "h": h, "q": q, "k": k, "n": min(request.analysis.top_links, q * k)}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, row in metrics.items():
            for part, axes in row.shapes.items():
                shape = tuple(lengths[axis] for axis in axes)
                shapes[f"metrics.{name}{'.' if part else ''}{part}"] = shape if request.batched else shape[1:]
        weights = b * h * q * k
        of_outputs = any(row.of == "outputs" for row in rows)
        passes = 1 + sum(row.forward_passes for row in rows) + of_outputs
        elements = weights * sum(row.cost + row.cost_per_head * h for row in rows)
        width = spec.concatenated_dim
        products = 4 * b * q * width**2 + 2 * spec.output_dim * width**2 if of_outputs else 0
        scores = weights * sum(row.holds_weights for row in rows)
        block = max(min(weights, BLOCK_WEIGHTS), b * h * k)
        memory = 8 * (sum(map(math.prod, shapes.values())) + b * h * q * len(metrics)) + 100 * block + 3 * 4 * scores
        memory += 8 * (2 * b * q * width + (b + 2) * width**2) * of_outputs + 16 * b * (q + k) * width
        operations = passes * forward.operations + elements + products
        datatypes = {name: self.datatype_of(name, request, spec) for name in shapes}
        reply, tensors = reply_sizes(request.reply.form, request.reply.decimals, shapes, datatypes)
        words = math.prod(lengths[axis] for axis in "bhn") * _longest_words(request) if "strongest_links" in metrics else 0
        memory += forward.memory_bytes
        return Cost(shapes, operations, scores, memory, reply + words, forward.items, forward.pairs, tensors, words)

    def operation(self, request: AnalysisRequest, layer: LoadedLayer, call: Call) -> MetricsOperation:
        """The operation that computes the request's metrics.

        Raises InvalidRequest if a number of the direction is not finite in the layer's dtype.
        """
        spec = layer.spec
        options, metrics = request.analysis, request.metrics_for(spec)
        query_ids = key_ids = None
        if any(METRICS[name].needs_tokens for name in metrics) and request.tokens is not None:
            query_ids, key_ids = _token_ids(request.tokens.query, request.tokens.key)
            key_ids = torch.where(call.masks.real_keys(call.query.shape[0]), key_ids, -1)  # a padding token equals no token
        direction = None
        if request.direction is not None:
            direction = cast("direction", request.direction, spec.dtype)
            direction = at_cache_line(direction if request.batched else direction[None])
        return MetricsOperation(
            MetricsOptions(
                metrics,
                local_window=options.local_window,
                top_links=options.top_links,
                mass=options.mass,
                queries=counted_queries(request, call, options.query_lens),
                query_tokens=query_ids,
                key_tokens=key_ids,
                direction=direction,
                link_keys=_kept(request, "key"),
            )
        )

    def describe(self, request: AnalysisRequest, spec: LayerSpec) -> dict[str, Any]:
        return {"outputs": request.metrics_for(spec)}

    def datatype_of(self, name: str, request: AnalysisRequest, spec: LayerSpec) -> str:
        """The V2 datatype of a metric in the reply: INT64 for indices, else that of the request, by default at least FP32."""
        if name.rpartition(".")[2] in INDEX_PARTS:
            return "INT64"
        return request.reply.datatype or BY_TORCH["float64" if spec.dtype == "float64" else "float32"].name

    def build_reply(self, prepared: Prepared, result: Result) -> Reply:
        """The metrics under the names and in the order of the request, without the batch axis if the request has none.

        Raises InvalidRequest for infinite metrics and for overflow in their inputs, unless the request allows non-finite numbers.
        """
        request, spec = prepared.fields, prepared.layer.spec
        tensors = {name: tensor for name, tensor in result.tensors.items() if name != OVERFLOWED}
        arrays = {name: numpy_of(tensor if request.batched else tensor[0]) for name, tensor in tensors.items()}
        metrics: dict[str, Any] = {}
        for name in request.metrics_for(spec):
            parts = {part: arrays[f"{name}.{part}" if part else name] for part in METRICS[name].shapes}
            metrics[name] = parts.get("", parts)
            if name == "strongest_links" and request.tokens is not None:
                metrics[name] = parts | _link_words(request, parts)
        datatype = self.datatype_of("", request, spec)
        if request.reply.nonfinite == "error":
            _refuse_overflow(arrays, bool(result.tensors[OVERFLOWED]), datatype)
        layer = {"name": prepared.layer.name, "fingerprint": prepared.layer.fingerprint}
        return Reply(layer, result.fully_masked_rows, datatype, {}, metrics=metrics)


ANALYSIS = AnalysisRequestType(AnalysisRequest)  # POST /attend/analysis


def counted_queries(request: AttendRequest, call: Call, lens: int | list[int] | None = None) -> torch.Tensor | None:
    """bool [b|1, q]: the queries that are neither padding nor omitted; None: all. `lens`, [b] or for all: how many are no padding."""
    real, kept = _real_queries(request, call, lens), _kept(request, "query")
    return real if kept is None else kept if real is None else real & kept


def _kept(request: AttendRequest, side: Literal["query", "key"]) -> torch.Tensor | None:
    """bool [b|1, n]: the queries or keys whose tokens are not omitted; None: all."""
    tokens, words = request.tokens, request.tokens_of(side)
    if tokens is None or not tokens.omit or not words:
        return None
    rows: list[Any] = [words] if isinstance(words[0], str) else words
    return torch.tensor([[not tokens.omits(word) for word in row] for row in rows])


def _real_queries(request: AttendRequest, call: Call, lens: int | list[int] | None) -> torch.Tensor | None:
    """bool [b|1, q]: the queries that are not padding; None: all. In self-attention, padding keys are padding queries too."""
    if lens is not None:
        return torch.arange(call.query.shape[1]) < torch.tensor(lens if isinstance(lens, list) else [lens])[:, None]
    if not request.in_self_attention or all(x is None for x in (call.masks.attend_keys, call.masks.key_segments, call.masks.lengths)):
        return None
    return call.masks.real_keys(call.query.shape[0])


def _token_ids(query: Any, key: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of queries and keys as integers [b|1, n]; equal tokens have equal ids."""
    ids: dict[str, int] = {}

    def ids_of(tokens: Any) -> torch.Tensor:
        rows = [tokens] if not tokens or isinstance(tokens[0], str) else tokens
        return torch.tensor([[ids.setdefault(token, len(ids)) for token in row] for row in rows])

    return ids_of(query), ids_of(query if key is None else key)


def _refuse_overflow(arrays: dict[str, Array], overflowed: bool, datatype: str) -> None:
    """Raises InvalidRequest if a metric is infinite in the reply's datatype, or if the numbers it is computed from overflowed."""
    for name, array in arrays.items():
        with np.errstate(over="ignore"):
            infinite = np.isinf(array.astype(DATATYPES[datatype].numpy)) if array.dtype.kind == "f" else np.zeros(1, np.bool_)
        if infinite.any():
            index = [int(i) for i in np.unravel_index(int(np.argmax(infinite)), array.shape)]
            at = "/reply/datatype" if np.isfinite(array[tuple(index)]) else ""
            expected = f"finite numbers in {name} as {datatype}, unless reply.nonfinite allows others"
            raise InvalidRequest.where(at, expected, f"{array[tuple(index)]} at {index}")
    if overflowed:
        expected = "finite scores, values and outputs to measure, unless reply.nonfinite allows others"
        raise InvalidRequest.where("", expected, "some that overflow")


def _longest_words(request: AnalysisRequest) -> int:
    """The most bytes of a query word and a key word together in the reply."""
    longest = 0
    for side in SIDES:
        words = request.tokens_of(side)
        rows: list[Any] = [words] if not words or isinstance(words[0], str) else words
        longest += max((bytes_of_word(word) for row in rows for word in row), default=0)
    return longest


def _link_words(request: AnalysisRequest, parts: dict[str, Array]) -> dict[str, Any]:
    """The query and key words of the strongest links; None for missing links."""
    named = (("query_words", request.tokens_of("query"), parts["queries"]), ("key_words", request.tokens_of("key"), parts["keys"]))
    return {part: _words_at(words, indices, request.batched) for part, words, indices in named if words}


def _words_at(words: Sequence[Any], indices: Array, batched: bool) -> Any:
    """The words at `indices` [b, h, n] as nested lists; without b if not `batched`."""
    if not batched:
        row = words if isinstance(words[0], str) else words[0]
        return [[None if i < 0 else row[i] for i in head_indices] for head_indices in indices]
    rows = [words] * len(indices) if isinstance(words[0], str) else words
    return [_words_at(row, item_indices, False) for row, item_indices in zip(rows, indices, strict=True)]
