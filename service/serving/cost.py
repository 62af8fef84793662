"""What a call will cost, predicted from its shapes alone: floating-point operations, memory, bytes of reply. Pure arithmetic.

The same prediction decides admission and answers POST /attend/plan. Nothing is computed and no tensor's values are read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from service.errors import Problem, TooLarge
from service.spec import LayerSpec
from service.tensors import BY_TORCH, DATATYPES
from service.wire.documents import AttendRequest
from service.wire.limits import MIB

TEXT_BYTES = {2: 9, 4: 12, 8: 20}  # bytes that one number takes in JSON, by bytes of its datatype; measured on normal variates
PROJECTED = {"query_projection": "q", "key_projection": "k", "value_projection": "k"}


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Bounds on layers and calls; each refusal names the one it ran into."""

    layer_parameters: int = 1 << 28
    total_parameters: int = 1 << 30
    scores: int = 1 << 28  # batch * heads * queries * keys that [q, k] outputs may hold
    memory_bytes: int = 4096 * MIB


@dataclass(frozen=True, slots=True)
class Cost:
    """What is predicted for one call. `outputs` maps output names to their shapes, without b where the request has none."""

    outputs: dict[str, tuple[int, ...]]
    operations: int
    scores: int  # elements of [q, k] that the outputs hold
    memory_bytes: int
    reply_bytes: int


def predict(request: AttendRequest, spec: LayerSpec) -> Cost:
    """The cost of a request that fits the layer."""
    b, q, k, h = _sizes(request, spec)
    size = BY_TORCH[spec.dtype].size
    shapes = _shapes(request, spec, b, q, k, h)
    outputs = {name: shape if request.batched else shape[1:] for name, shape in shapes.items()}
    gradients = request.output_gradient is not None
    wide, narrow, joined = h * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.concatenated_dim  # queries, keys, heads' outputs
    values = spec.num_kv_heads * spec.value_head_dim
    products = q * spec.d_model * wide + k * (spec.key_dim * narrow + spec.value_dim * values) + q * joined * spec.output_dim
    elements = h * q * k * (10 + 20 * (request.dropout is not None) + 20 * bool(request.select and request.select.top_k))
    # softmax, random numbers and sorting are no products, yet take time
    operations = b * (2 * (products * spec.projections + q * k * (wide + joined)) + elements) * (3 if gradients else 1)
    selection = request.select
    rows = h * q if selection is None else len(selection.heads or range(h)) * len(selection.queries or range(q))
    scores = b * k * (rows * ("attention_weights" in request.outputs) + h * q * ("scores" in request.outputs) + 3 * h * q * gradients)
    held = b * (q * (spec.query_dim + wide + 2 * joined) + k * (spec.key_dim + spec.value_dim + narrow + values))
    wire = sum(math.prod(shape) for shape in outputs.values())
    memory = held * size + max(4, size) * (2 * scores + min(b * h * q * k, 1 << 21)) + wire * size
    return Cost(outputs, operations, scores, memory, reply_bytes(request, outputs, lambda name: wire_datatype(name, request, spec)))


def admit(cost: Cost, limits: ServingLimits) -> list[Problem]:
    """Why a call of this cost is not taken; empty if it is."""
    problems = []
    if cost.scores > limits.scores:
        wanted = f"at most {limits.scores} weights and scores (max_scores); select fewer heads or queries"
        problems.append(Problem("", wanted, str(cost.scores)))
    if cost.memory_bytes > limits.memory_bytes:
        wanted = f"at most {limits.memory_bytes} bytes of predicted memory (max_memory_bytes)"
        problems.append(Problem("", wanted, str(cost.memory_bytes)))
    return problems


def check(cost: Cost, limits: ServingLimits) -> None:
    """Raises TooLarge if the call is not admitted."""
    if problems := admit(cost, limits):
        raise TooLarge(problems=problems)


def _sizes(request: AttendRequest, spec: LayerSpec) -> tuple[int, int, int, int]:
    b = request.query.shape[0] if request.batched else 1
    key = request.query if request.key is None else request.key
    return b, request.query.shape[-2], key.shape[-2], spec.num_heads


def _shapes(request: AttendRequest, spec: LayerSpec, b: int, q: int, k: int, h: int) -> dict[str, tuple[int, ...]]:
    """Output name -> shape with b, in the order asked for."""
    joined, kv = spec.concatenated_dim, spec.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "output": (b, q, spec.output_dim if spec.projections else joined),
        "scores": (b, h, q, k),
        "log_sum_exp": (b, h, q),
        "query_projection": (b, h, q, spec.head_dim),
        "key_projection": (b, kv, k, spec.head_dim),
        "value_projection": (b, kv, k, spec.value_head_dim),
        "head_outputs": (b, h, q, spec.value_head_dim),
        "concatenated": (b, q, joined),
        "query_gradient": (b, q, spec.query_dim),
        "key_gradient": (b, k, spec.key_dim),
        "value_gradient": (b, k, spec.value_dim),
    }
    made: dict[str, tuple[int, ...]] = {}
    for name in request.outputs:
        if name == "attention_weights":
            made |= _weights(request, b, h, q, k)
        else:
            made[name] = shapes[name]
    return made


def _weights(request: AttendRequest, b: int, h: int, q: int, k: int) -> dict[str, tuple[int, ...]]:
    select = request.select
    if select is None:
        return {"attention_weights": (b, h, q, k)}
    heads, queries = len(select.heads or range(h)), len(select.queries or range(q))
    head_axis = () if select.average else (heads,)
    if select.top_k is None:
        return {"attention_weights": (b, *head_axis, queries, k)}
    shape = (b, *head_axis, queries, min(select.top_k, k))
    return {"attention_weights.keys": shape, "attention_weights.values": shape}


def wire_datatype(name: str, request: AttendRequest, spec: LayerSpec) -> str:
    """The V2 name of the datatype in which an output is replied."""
    if name == "attention_weights.keys":
        return "INT64"
    return request.reply.datatype or BY_TORCH[spec.dtype].name


def reply_bytes(request: AttendRequest, outputs: dict[str, tuple[int, ...]], datatype: Callable[[str], str]) -> int:
    """Of tensors of these shapes in the form that the request wants; `datatype` tells each one's V2 name."""
    total = 200
    for name, shape in outputs.items():
        size = DATATYPES[datatype(name)].size
        count = math.prod(shape)
        if request.reply.form == "base64":
            total += 80 + 4 * math.ceil(count * size / 3)
        elif request.reply.decimals is not None:
            total += count * min(request.reply.decimals + 4, TEXT_BYTES[size])
        else:
            total += count * TEXT_BYTES[size]
    return total
