"""Predicts the cost of a call from its shapes: floating-point operations, memory, bytes of the reply.

The same prediction decides admission and answers POST /attend/plan. The values of tensors are not read.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from service.attention.operations import BY_SEQUENCE
from service.errors import Problem, TooLarge
from service.spec import LayerSpec
from service.spec_parts import Indexer
from service.tensors import BY_TORCH, DATATYPES
from service.wire.limits import MIB
from service.wire.schemas.attend import AttendRequest

TEXT_BYTES = {1: 6, 2: 9, 4: 12, 8: 20}  # size of the datatype -> average bytes of a number in JSON; measured on normal variates
OWN_DATATYPES = {"attention_weights.keys": "INT64", "indexer_mask": "BOOL"}  # outputs that are no numbers of the layer
MAX_REPLY_MESSAGE = "a reply of at most {} predicted bytes (max_reply_bytes); ask for fewer outputs, or in binary"
MAX_BLOCK_ROWS = 1 << 11  # most rows of a block of `attention/relative_scores.py`, roughly
OPERATIONS_PER_SEQUENCE = 1 << 16  # that take as long as the overhead of a sequence among several in one query
ADDED = ("operations", "scores", "memory_bytes", "reply_bytes", "pairs", "tensor_bytes", "items")  # of Cost: sums over sequences
MAX_BATCH = 2**31 - 1  # the largest value that `largest_batch` returns


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Bounds on layers and calls, each named like its setting."""

    max_layer_parameters: int = 1 << 28
    max_total_parameters: int = 1 << 30
    max_layers: int = 1000
    max_layer_width: int = 1 << 16  # of the rows of any input, projection or output of a layer
    max_scores: int = 1 << 28  # batch * heads * queries * keys that [q, k] outputs may hold
    max_memory_bytes: int = 4096 * MIB
    max_operations: int = 10**13
    max_batch_items: int = 65536
    max_pairs: int = 1 << 36  # heads * queries * keys of one item
    max_reply_bytes: int = 2048 * MIB


@dataclass(frozen=True, slots=True)
class Cost:
    """The predicted cost of one call. `outputs` maps output names to shapes, without b if the request has no batch axis."""

    outputs: dict[str, tuple[int, ...]]
    operations: int
    scores: int  # elements of [q, k] that the outputs hold
    memory_bytes: int
    reply_bytes: int
    items: int = 1
    pairs: int = 0  # heads * queries * keys of one batch item
    tensor_bytes: int = 0  # of the outputs as binary numbers in the reply's datatype


class CostInputs(NamedTuple):
    """The properties of a request that its cost depends on. `heads` and `queries`: numbers of selected ones; None without a selection."""

    batch: int | None  # None: no batch axis
    num_queries: int
    num_keys: int
    outputs: tuple[str, ...]
    heads: int | None
    queries: int | None
    average: bool
    top_k: int | None
    dropout: bool
    gradients: bool
    form: str
    datatype: str | None
    decimals: int | None
    cached: int = 0  # keys that need not be projected


def predict(request: AttendRequest, spec: LayerSpec) -> Cost:
    """The cost of a request whose shapes fit the layer."""
    key = request.query if request.key is None else request.key
    if request.query_lengths is None:
        return _predict(_inputs(request, spec, request.query.shape[-2], key.shape[-2]), spec)
    queries = request.query_lengths.tolist()
    keys = queries if request.key_lengths is None else request.key_lengths.tolist()
    pairs = list(zip(queries, keys, strict=True))
    costs = {(q, k): _predict(_inputs(request, spec, q, k), spec) for q, k in set(pairs)}
    return _sum_of_sequences([costs[pair] for pair in pairs])


def predict_step(request: AttendRequest, spec: LayerSpec, cached: int, num_keys: int) -> Cost:
    """The cost of a call to a session with so many keys, of which the first `cached` are projected already."""
    inputs = _inputs(request, spec, request.query.shape[-2], num_keys)._replace(cached=cached)
    return _predict.__wrapped__(inputs, spec)  # the number of keys differs from step to step, so a result is of no use to another


def _sum_of_sequences(costs: Sequence[Cost]) -> Cost:
    """The cost of sequences that are rows of one query. Weights and scores are outputs of each, other outputs have the rows of all."""
    outputs: dict[str, tuple[int, ...]] = {}
    for name, shape in costs[0].outputs.items():
        shapes = [cost.outputs[name] for cost in costs]
        if name in BY_SEQUENCE:
            outputs |= {f"{name}.{i}": own for i, own in enumerate(shapes)}
        else:
            rows = -1 if name == "log_sum_exp" else -2
            outputs[name] = (*shape[:rows], sum(own[rows] for own in shapes), *shape[len(shape) + rows + 1 :])
    totals = {name: sum(getattr(cost, name) for cost in costs) for name in ADDED}
    return Cost(outputs, **{**totals, "operations": totals["operations"] + len(costs) * OPERATIONS_PER_SEQUENCE})


def _inputs(request: AttendRequest, spec: LayerSpec, num_queries: int, num_keys: int) -> CostInputs:
    *batch, _, _ = request.query.shape
    select, reply = request.select, request.reply
    return CostInputs(
        batch[0] if batch else None,
        num_queries,
        num_keys,
        tuple(request.outputs),
        None if select is None else len(select.heads or range(spec.num_heads)),
        None if select is None else len(select.queries or range(num_queries)),
        select is not None and select.average,
        None if select is None else select.top_k,
        request.dropout is not None,
        request.output_gradient is not None,
        reply.form,
        reply.datatype,
        reply.decimals,
    )


@lru_cache(1024)  # shapes recur, and without a cache this would be a tenth of a small request's time
def _predict(inputs: CostInputs, spec: LayerSpec) -> Cost:
    b, q, k, h = inputs.batch if inputs.batch is not None else 1, inputs.num_queries, inputs.num_keys, spec.num_heads
    size, pairs = BY_TORCH[spec.dtype].size, h * q * k
    shapes = _shapes(inputs, spec, b)
    outputs = {name: shape if inputs.batch is not None else shape[1:] for name, shape in shapes.items()}
    query_width, key_width = h * spec.head_dim, spec.num_kv_heads * spec.head_dim
    value_width, joined_width = spec.num_kv_heads * spec.value_head_dim, spec.concatenated_dim
    matrices = ((name, shape) for name, shape in spec.weight_shapes().items() if name.endswith(".weight") and "norm" not in name)
    weights = {name: math.prod(shape) for name, shape in matrices if not name.startswith("position_")}
    of_keys = sum(weights.get(f"{name}.weight", 0) for name in ("key", "value", "key_value_down", "rope_key", "index_key"))
    projections = q * (sum(weights.values()) - of_keys) + (k - inputs.cached) * of_keys
    if inputs.cached and spec.latent is not None:
        projections += inputs.cached * (weights["key.weight"] + weights["value.weight"])  # cached latent vectors are expanded each time
    if "latent" in inputs.outputs:  # computed once more
        projections += k * weights.get("key_value_down.weight", 0)
    if spec.grid_bias is not None and spec.grid_bias.kind == "decomposed":  # each query times the vectors of all rows and columns
        projections += 2 * q * query_width * (spec.grid_bias.height + spec.grid_bias.width - 1)
    # softmax, dropout and sorting take time per score, beyond the matrix products
    softmaxes = 2 if spec.differential else 1
    per_score = pairs * (10 * softmaxes + 20 * inputs.dropout + 20 * bool(inputs.top_k))
    relative_products, relative_elements = _relative_cost(spec, b, q, k)
    products = 2 * (projections + q * k * (query_width + joined_width) + relative_products)
    operations = b * (products + per_score) * (3 if inputs.gradients else 1)
    selected = h * q if inputs.heads is None or inputs.queries is None else inputs.heads * inputs.queries
    rows = selected * ("attention_weights" in inputs.outputs) + h * q * ("scores" in inputs.outputs) + 3 * h * q * inputs.gradients
    rows += q * ("indexer_mask" in inputs.outputs)
    scores = b * k * rows
    per_query = spec.query_dim + query_width + 2 * joined_width + (spec.gate_dim + joined_width if spec.output_gate else 0)
    per_key = spec.key_dim + spec.value_dim + key_width + value_width
    if (latent := spec.latent) is not None:
        per_query, per_key = per_query + 2 * (latent.query_rank or 0), per_key + 2 * latent.key_value_rank + latent.rope_key_dim
    sequences = b * (q * per_query + k * per_key)
    elements = sum(math.prod(shape) for shape in outputs.values())
    memory = (sequences + elements) * size + max(4, size) * (2 * scores + softmaxes * min(b * pairs, 1 << 21) + relative_elements)
    if spec.indexer is not None:
        index_operations, index_memory = _indexer_cost(spec.indexer, spec, q, k)
        operations, memory = operations + b * index_operations, memory + b * index_memory
    datatypes = {name: wire_datatype(name, inputs.datatype, spec) for name in outputs}
    reply, tensors = reply_sizes(inputs.form, inputs.decimals, outputs, datatypes)
    return Cost(outputs, operations, scores, memory, reply, b, pairs, tensors)


def _relative_cost(spec: LayerSpec, b: int, q: int, k: int) -> tuple[int, int]:
    """Multiplications per batch item, and elements in memory, of the terms of `relative_scores`; 0 for other layers.

    There is a position vector for each of q + k distances. A block of rows is multiplied by those of its keys and rows. Keys are multiplied
    by the vectors of the buckets that these distances have.
    """
    if (relative := spec.relative_scores) is None:
        return 0, 0
    width, distances, of_block = spec.num_heads * spec.head_dim, q + k, q * (k + min(q, MAX_BLOCK_ROWS))
    buckets = min(2 * relative.columns, distances) if relative.position_to_content else 0
    embedded = 0 if relative.columns else distances * spec.d_model
    elements = b * (distances * width + 4 * embedded + spec.num_heads * buckets * k) + min(2 * b * spec.num_heads * of_block, 1 << 22)
    return width * (embedded + of_block + buckets * k), elements


def _indexer_cost(indexer: Indexer, spec: LayerSpec, q: int, k: int) -> tuple[int, int]:
    """Operations and bytes of an indexer for one item, in float64, which takes twice as long; its projections are counted elsewhere."""
    width, heads = indexer.num_heads * indexer.head_dim, indexer.num_heads
    operations = 4 * q * k * width + 6 * heads * q * k + 40 * q * k
    elements = (
        q * (spec.query_dim + 3 * width) + k * (spec.key_dim + 3 * indexer.head_dim) + 3 * min(heads * q * k, max(1 << 20, heads * k))
    )
    return operations, 8 * elements + 2 * q * k


def exceeded_limits(cost: Cost, limits: ServingLimits) -> list[Problem]:
    """The limits that a call of this cost exceeds; empty if it is admitted."""
    table = (
        (cost.scores, limits.max_scores, "", "at most {} weights and scores (max_scores); select fewer heads or queries"),
        (cost.memory_bytes, limits.max_memory_bytes, "", "at most {} bytes of predicted memory (max_memory_bytes)"),
        (cost.operations, limits.max_operations, "", "at most {} predicted operations (max_operations)"),
        (cost.items, limits.max_batch_items, "/query", "at most {} batch items, or sequences in one query (max_batch_items)"),
        (cost.pairs, limits.max_pairs, "", "at most {} heads x queries x keys (max_pairs)"),
        (cost.reply_bytes, limits.max_reply_bytes, "", MAX_REPLY_MESSAGE),
    )
    return [Problem(at, expected.format(limit), str(value)) for value, limit, at, expected in table if value > limit]


class Admission(NamedTuple):
    """Decides which calls a process admits: those within `limits`, and those whose parts are, if `shards` processes compute one each."""

    limits: ServingLimits
    shards: int = 0

    def refusals(self, request: AttendRequest, spec: LayerSpec, cost: Cost) -> tuple[list[Problem], bool]:
        """The exceeded limits (empty if the call is admitted), and whether the call is admitted only in parts, one for each shard.

        One process assembles the reply, so the bounds on scores, items and reply bytes hold for the whole call. Metrics, and calls with
        dropout or gradients, depend on all keys at once; such calls are never cut, nor are several sequences in one query.
        """
        problems = exceeded_limits(cost, self.limits)
        is_whole = request.dropout is not None or request.output_gradient is not None or request.query_lengths is not None
        if not problems or self.shards < 2 or is_whole or type(request) is not AttendRequest or not spec.splits_over_keys:
            return problems, False
        return (problems, False) if exceeded_limits(cost_of_part(cost, self.shards), self.limits) else ([], True)

    def require(self, request: AttendRequest, spec: LayerSpec, cost: Cost) -> bool:
        """Whether the call is admitted only in parts. Raises TooLarge if it is not admitted."""
        problems, in_parts = self.refusals(request, spec, cost)
        if problems:
            raise TooLarge(problems=problems)
        return in_parts


def cost_of_part(cost: Cost, shards: int) -> Cost:
    """The cost of one part of a call that is cut into `shards` parts."""
    work = {name: -(-getattr(cost, name) // shards) for name in ("operations", "memory_bytes", "pairs")}
    return replace(cost, **work)


def largest_batch(spec: LayerSpec, limits: ServingLimits) -> int:
    """The most batch items that are admitted in a call with one query, one key and the default outputs; at least 1."""
    inputs = CostInputs(1, 1, 1, ("output", "attention_weights"), None, None, False, None, False, False, "nested", None, None)
    batches = range(2, min(limits.max_batch_items, MAX_BATCH) + 1)
    return bisect_left(batches, True, key=lambda b: bool(exceeded_limits(_predict(inputs._replace(batch=b), spec), limits))) + 1


def output_shapes(spec: LayerSpec, b: int, q: int, k: int) -> dict[str, tuple[int, ...]]:
    """Output name -> shape, for b items of q queries and k keys, without a selection."""
    h, kv, joined = spec.num_heads, spec.num_kv_heads, spec.concatenated_dim
    return {
        "output": (b, q, spec.output_dim if spec.projections else joined),
        "attention_weights": (b, h, q, k),
        "scores": (b, h, q, k),
        "log_sum_exp": (b, h, q),
        "query_projection": (b, h, q, spec.head_dim),
        "key_projection": (b, kv, k, spec.head_dim),
        "value_projection": (b, kv, k, spec.value_head_dim),
        "head_outputs": (b, h, q, spec.value_head_dim),
        "concatenated": (b, q, joined),
        "indexer_mask": (b, q, k),
        "latent": (b, k, spec.latent.key_value_rank if spec.latent else 0),
        "rope_key": (b, k, spec.latent.rope_key_dim if spec.latent else 0),
        "query_gradient": (b, q, spec.query_dim),
        "key_gradient": (b, k, spec.key_dim),
        "value_gradient": (b, k, spec.value_dim),
    }


def _shapes(inputs: CostInputs, spec: LayerSpec, b: int) -> dict[str, tuple[int, ...]]:
    """Output name -> shape, with b, in the order of the request."""
    shapes = output_shapes(spec, b, inputs.num_queries, inputs.num_keys)
    made: dict[str, tuple[int, ...]] = {}
    for name in inputs.outputs:
        if name == "attention_weights":
            made |= _weights(inputs, b, spec.num_heads)
        else:
            made[name] = shapes[name]
    return made


def _weights(inputs: CostInputs, b: int, h: int) -> dict[str, tuple[int, ...]]:
    heads = h if inputs.heads is None else inputs.heads
    queries = inputs.num_queries if inputs.queries is None else inputs.queries
    rows = (b, *(() if inputs.average else (heads,)), queries)
    if inputs.top_k is None:
        return {"attention_weights": (*rows, inputs.num_keys)}
    shape = (*rows, min(inputs.top_k, inputs.num_keys))
    return {"attention_weights.keys": shape, "attention_weights.values": shape}


def wire_datatype(name: str, datatype: str | None, spec: LayerSpec) -> str:
    """The V2 datatype of an output in the reply; `datatype` is the requested one, None for the layer's."""
    return OWN_DATATYPES.get(name) or datatype or BY_TORCH[spec.dtype].name


def reply_sizes(form: str, decimals: int | None, outputs: dict[str, tuple[int, ...]], datatypes: Mapping[str, str]) -> tuple[int, int]:
    """(bytes of a reply with tensors of these shapes and V2 datatypes, bytes of the tensors as binary). `form` is nested or base64."""
    reply, binary = 200, 0
    for name, shape in outputs.items():
        count, size = math.prod(shape), DATATYPES[datatypes[name]].size
        binary += count * size
        if form == "base64":
            reply += 80 + 4 * math.ceil(count * size / 3)
        else:
            reply += count * (TEXT_BYTES[size] if decimals is None else min(decimals + 4, TEXT_BYTES[size]))
    return reply, binary
