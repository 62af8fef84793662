"""Predicts the cost of a call from its shapes: shapes of the outputs, floating-point operations, memory, bytes of the reply.

`admission.py` compares it with the limits, POST /attend/plan reports it, and the queue is bounded and shared by it. Only the shapes of
tensors are used, and the lengths of several sequences in one query.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from attend.attention.call import CallOptions
from attend.attention.cost import cost_of_steps
from attend.axes import GRADIENTS
from attend.serving.calls import call_options
from attend.spec import LayerSpec
from attend.tensors import BY_TORCH, DATATYPES
from attend.wire.schemas.attend import AttendRequest, ReplyOptions

DRAW_OPERATIONS, SORT_OPERATIONS = 100, 20  # of a score, where weights are dropped, and where the largest are selected
EIGENVALUE_OPERATIONS = 150  # of a product that take as long as the eigenvalues of a matrix [1, 1], times width^3
OPERATIONS_PER_SEQUENCE = 1 << 16  # that take as long as the overhead of a sequence among several in one query
SUMMED_FIELDS = (
    "operations",
    "output_scores",
    "memory_bytes",
    "reply_bytes",
    "pairs",
    "tensor_bytes",
    "items",
)  # of the costs of sequences
TEXT_BYTES = {1: 6, 2: 9, 4: 12, 8: 20}  # size of the datatype -> average bytes of a number in JSON; measured on normal variates
FIXED_DATATYPES = {"bool": "BOOL", "int64": "INT64"}  # of outputs of these datatypes, which are no numbers of the layer's


@dataclass(frozen=True, slots=True)
class Cost:
    """The predicted cost of one call. `outputs` maps output names to shapes, without b if the request has no batch axis."""

    outputs: dict[str, tuple[int, ...]]
    operations: int
    output_scores: int  # weights and scores that the outputs hold
    memory_bytes: int
    reply_bytes: int
    items: int = 1
    pairs: int = 0  # heads * queries * keys of one batch item
    tensor_bytes: int = 0  # of the outputs as binary numbers in the reply's datatype
    word_bytes: int = 0  # of the words in the reply, at most; `reply_bytes` has them, too


def predict(request: AttendRequest, spec: LayerSpec) -> Cost:
    """The cost of a request whose shapes fit the layer."""
    options, outputs, reply, batched = call_options(request, spec), tuple(request.outputs), request.reply, request.batched
    if request.query_lengths is None:
        return _predict_recurring(options, outputs, reply, spec, batched)
    pairs = request.sequence_lengths
    costs = {(q, k): _predict_recurring(replace(options, num_queries=q, num_keys=k), outputs, reply, spec, batched) for q, k in set(pairs)}
    return _sum_of_sequences([costs[pair] for pair in pairs], spec)


def _sum_of_sequences(costs: Sequence[Cost], spec: LayerSpec) -> Cost:
    """The cost of sequences that are rows of one query. Weights and scores are outputs of each, other outputs have the rows of all."""
    outputs: dict[str, tuple[int, ...]] = {}
    for name, shape in costs[0].outputs.items():
        shapes = [cost.outputs[name] for cost in costs]
        if spec.every_output[name].by_sequence:
            outputs |= {f"{name}.{i}": one for i, one in enumerate(shapes)}
        else:
            rows = spec.every_output[name].row_axis
            outputs[name] = (*shape[:rows], sum(one[rows] for one in shapes), *shape[len(shape) + rows + 1 :])
    totals = {name: sum(getattr(cost, name) for cost in costs) for name in SUMMED_FIELDS}
    return Cost(outputs, **{**totals, "operations": totals["operations"] + len(costs) * OPERATIONS_PER_SEQUENCE})


def predict_call(
    options: CallOptions, outputs: tuple[str, ...], reply: ReplyOptions, spec: LayerSpec, batched: bool = True, cached: int = 0
) -> Cost:
    """The cost of a call with these options and `outputs`, in the order of the request; its first `cached` keys are projected already."""
    b, q, k, h = options.items, options.num_queries, options.num_keys, spec.num_heads
    size, pairs = BY_TORCH[spec.dtype].size, h * q * k
    shapes = {name: shape if batched else shape[1:] for name, shape in _shapes(options, outputs, spec).items()}
    per_item, stored = cost_of_steps(spec, options, cached)
    # the random numbers of dropout (two draws of a Mersenne Twister) and sorting take time per score
    per_score = DRAW_OPERATIONS * (options.dropout is not None) + SORT_OPERATIONS * bool(options.top_k)
    passes = 1 if options.outputs.isdisjoint(GRADIENTS) else 3
    operations = b * (per_item + pairs * per_score) * passes
    scores = _output_scores(options, spec)
    wider = [math.prod(shape) for name, shape in shapes.items() if (output := spec.every_output.get(name)) and output.dtype == "float64"]
    elements = sum(math.prod(shape) for shape in shapes.values()) + 8 // size * sum(wider)
    memory = stored + elements * size + max(4, size) * 2 * scores
    datatypes = {name: wire_datatype(name, reply.datatype, spec) for name in shapes}
    reply_bytes, tensor_bytes = reply_sizes(reply.form, reply.decimals, shapes, datatypes)
    return Cost(shapes, operations, scores, memory, reply_bytes, b, pairs, tensor_bytes)


def predict_circuits(spec: LayerSpec, h: int) -> Cost:
    """The cost of the circuits of h heads of a layer: QR decompositions of their matrices in float64, and eigenvalues of products."""
    circuits = {"qk": (spec.head_dim, spec.query_dim, spec.key_dim)}
    circuits["ov"] = spec.value_head_dim, spec.output_dim, spec.value_dim
    operations = sum(h * (4 * d * d * (m + n) + EIGENVALUE_OPERATIONS * d**3) for d, m, n in circuits.values())
    memory = 8 * sum(4 * h * d * (m + n + d) for d, m, n in circuits.values())
    outputs: dict[str, tuple[int, ...]] = {f"{name}_singular_values": (h, min(sizes)) for name, sizes in circuits.items()}
    reply_bytes, tensor_bytes = reply_sizes("nested", None, {**outputs, "scores": (2, h)}, dict.fromkeys((*outputs, "scores"), "FP64"))
    return Cost(outputs, operations, 0, memory, reply_bytes, tensor_bytes=tensor_bytes)


_predict_recurring = lru_cache(1024)(predict_call)  # shapes recur: of requests, and of several sequences in one query


def _output_scores(options: CallOptions, spec: LayerSpec) -> int:
    """The numbers for pairs of a query and a key that weights, other outputs and gradients hold."""
    b, q, k, h = options.items, options.num_queries, options.num_keys, spec.num_heads
    heads, queries = _selected(options, h)
    weights = heads * queries * ("attention_weights" in options.outputs) + 3 * h * q * (not options.outputs.isdisjoint(GRADIENTS))
    others = [name for name in options.outputs - {"attention_weights"} if spec.every_output[name].of_pairs]
    return b * k * weights + sum(math.prod(spec.output_shape(name, b, q, k)) for name in others)


def _selected(options: CallOptions, h: int) -> tuple[int, int]:
    """The numbers of heads and queries whose weights are requested."""
    return h if options.heads is None else len(options.heads), options.num_queries if options.queries is None else len(options.queries)


def _shapes(options: CallOptions, outputs: Sequence[str], spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    """Output name -> shape, with b, in the order of the request."""
    lengths = options.items, options.num_queries, options.num_keys
    requested: dict[str, tuple[int, ...]] = {}
    for name in outputs:
        weights = name == "attention_weights"
        requested |= _weights_shapes(options, spec.num_heads) if weights else {name: spec.output_shape(name, *lengths)}
    return requested


def _weights_shapes(options: CallOptions, h: int) -> dict[str, tuple[int, ...]]:
    """The shape of the selected weights, or with `top_k` those of their keys and values."""
    heads, queries = _selected(options, h)
    rows = (options.items, *(() if options.average else (heads,)), queries)
    if options.top_k is None:
        return {"attention_weights": (*rows, options.num_keys)}
    shape = (*rows, min(options.top_k, options.num_keys))
    return {"attention_weights.keys": shape, "attention_weights.values": shape}


def wire_datatype(name: str, datatype: str | None, spec: LayerSpec) -> str:
    """The V2 datatype of an output in the reply; `datatype` is the requested one, None for the layer's."""
    if name == "attention_weights.keys":
        return "INT64"
    output = spec.every_output.get(name.partition(".")[0])
    return (output and FIXED_DATATYPES.get(output.dtype)) or datatype or BY_TORCH[spec.dtype].name


def reply_sizes(form: str, decimals: int | None, outputs: Mapping[str, tuple[int, ...]], datatypes: Mapping[str, str]) -> tuple[int, int]:
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
