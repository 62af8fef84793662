"""Multi-head attention in NumPy float64: the program of a layer, run whole. What the service computes is compared with it.

It runs the same steps as the service, in float64 and without blocks or kernels; `call.py` has masks and positions of its own. That the
steps are right is tested against loops over rows that share no code with them (`tests/attention/reference/test_loops.py`), and against
other frameworks.

Vaswani et al. 2017, "Attention Is All You Need", section 3.2:
    Attention(Q, K, V) = softmax(Q Kᵀ / √d) V
    MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O   where head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from attend.attention.dataflow import needed
from attend.attention.operators.step import Step, as_output
from attend.attention.program import Program, outputs_of, program_of
from attend.attention.reference.arithmetic import NumpyArithmetic
from attend.attention.reference.call import ReferenceCall
from attend.axes import FEATURES, PROGRAM_TENSORS
from attend.spec import LayerSpec
from attend.tensors import Array

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Every output of one call in float64; a call without a batch drops the leading b of each."""

    output: Array  # [b, q, output_dim]; without projections, concatenated
    attention_weights: Array  # [b, h, q, k], after dropout
    scores: Array  # [b, h, q, k], after everything added and blocked, before the softmax; [b, n * h, q, k] before n softmaxes
    log_sum_exp: Array  # [b, h, q], of the scores and the sink; [b, n * h, q] of n softmaxes
    normalised: Array  # [b, n, h, q, k], each softmax or sigmoid, before dropout, 0 in fully masked rows; n softmaxes
    query_projection: Array  # [b, h, q, d], after the norm, RoPE and query_scale
    key_projection: Array  # [b, kv heads, k, d], after the norm and RoPE
    value_projection: Array  # [b, kv heads, k, dv]
    head_outputs: Array  # [b, h, q, dv], after head_scale and the gate
    concatenated: Array  # [b, q, h*dv]
    indexer_mask: Array  # [b, q, k], 1 for the keys that the indexer selects; without an indexer, for those that may be attended to
    latent: Array  # [b, k, key_value_rank], of the key, after the norm; rank 0 without latent attention
    rope_key: Array  # [b, k, rope_key_dim], what the keys of all heads begin with, after RoPE if it is rotated by itself; likewise
    fully_masked: Array  # [b, h, q], true where no key is left

    @property
    def fully_masked_rows(self) -> int:
        return int(self.fully_masked.sum())


def attend(spec: LayerSpec, weights: Mapping[str, Array], **arguments: Any) -> Outputs:
    """Every output of the layer `spec` with these canonical weights. The arguments are the fields of `ReferenceCall`.

    ValueError: a value without a key; q != k without query_offset where positions matter; fully masked rows with fully_masked="error".
    """
    call = ReferenceCall.from_fields(**arguments)
    outputs = named_outputs(spec, run(spec, weights, call))
    return outputs if call.batched else Outputs(**{field.name: getattr(outputs, field.name)[0] for field in fields(Outputs)})


def value_of(name: str, spec: LayerSpec, weights: Mapping[str, Array], **arguments: Any) -> Array:
    """A value of a call with a batch axis, such as "output": only the steps that it depends on are run. Arguments and errors as `attend`.

    Scores are [b, h, q, k], or [n, b, h, q, k] before n softmaxes.
    """
    call = ReferenceCall.from_fields(**arguments)
    m, steps = NumpyArithmetic(weights), _steps_to(name, spec, frozenset(features_of(spec, call)))
    values = m.weights | inputs_of(spec, call)
    run_steps(m, steps, values)
    return np.asarray(values[name])


@lru_cache(1024)
def _steps_to(name: str, spec: LayerSpec, features: frozenset[str]) -> Program:
    return needed(program_of(spec, features), {name})


def run(spec: LayerSpec, weights: Mapping[str, Array], call: ReferenceCall) -> Values:
    """Every value of the program, with a batch axis, by name; and by the name of each step what it wrote first."""
    m = NumpyArithmetic(weights)
    values = m.weights | inputs_of(spec, call)
    run_steps(m, program_of(spec, features_of(spec, call)), values)
    return values


@np.errstate(invalid="ignore", over="ignore")  # blocked keys may be NaN or infinite; their scores are replaced by -inf
def run_steps(m: NumpyArithmetic, steps: Sequence[Step], values: Values) -> None:
    """Add what the steps write to the values."""
    for step in steps:
        result = step.compute(m, *[values[name] for name in step.reads])
        written = (result,) if len(step.writes) == 1 else result
        values |= zip(step.writes, written, strict=True)
        values.setdefault(f"{step.name}()", written[0])


def features_of(spec: LayerSpec, call: ReferenceCall) -> set[str]:
    """What `program_of` needs to know of the call."""
    softcap = spec.softcap if call.softcap is None else call.softcap
    present = {
        "sets": True,
        "bias": call.bias is not None,
        "softcap": softcap,
        "dropout": call.dropout is not None,
        "uniform": call.fully_masked == "uniform",
        "values": call.has_values,
        **{feature: call.tensors.get(name) is not None for feature, name in FEATURES.items()},
    }
    return {name for name, is_present in present.items() if is_present}


def inputs_of(spec: LayerSpec, call: ReferenceCall) -> Values:
    """What the program gets of a call. ValueError as `attend`, and for projected inputs of another width."""
    widths = {
        "query": (spec.num_heads, spec.head_dim),
        "key": (spec.num_kv_heads, spec.head_dim),
        "value": (spec.num_kv_heads, spec.value_head_dim),
    }
    for name, (count, width) in widths.items() if not spec.projections else ():
        if (got := getattr(call, name).shape[-1]) != count * width:
            raise ValueError(f"expected a {name} of {count} heads of {width} numbers, got {got} numbers")
    heads, b, q, k = spec.num_heads, len(call.query), call.query.shape[1], call.key.shape[1]
    needs_positions = call.causal or call.window is not None or bool(spec.positional)
    positions = call.query_indices((b, heads, q, k), needs_positions)
    masks = call.masks(spec, positions)
    visible = np.broadcast_to(masks.visible(), (b, heads, q, k))
    fully_masked = ~visible.any(axis=-1)
    if call.fully_masked == "error" and fully_masked.any():
        raise ValueError(f"expected a key for every query, got none at [b, h, q] = {np.argwhere(fully_masked)[0].tolist()}")
    coordinates = {"query": positions, "key": np.arange(k)[None]}
    if call.positions is not None:
        coordinates = {"query": call.positions, "key": call.positions if call.key_positions is None else call.key_positions}
    dropout = call.dropout or {"p": 0.0, "seed": 0}
    return {
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "positions": positions,
        "keys": np.arange(k),
        "query_coordinates": coordinates["query"],
        "key_coordinates": coordinates["key"],
        "masks": masks,
        "fully_masked": fully_masked,
        "bias": None if call.bias is None else call.per_pair(np.asarray(call.bias, np.float64)),
        "scale": spec.scale if call.scale is None else call.scale,
        "softcap": spec.softcap if call.softcap is None else call.softcap,
        # inverted dropout, Srivastava et al. 2014
        "kept": None if call.dropout is None else np.random.RandomState(dropout["seed"]).random_sample((b, heads, q, k)) >= dropout["p"],
        "kept_share": 1 - dropout["p"],
        **{field.value: call.program_tensor(name, field) for name, field in PROGRAM_TENSORS.items()},
    }


def every_output(spec: LayerSpec, weights: Mapping[str, Array], **arguments: Any) -> dict[str, Array]:
    """Each value that the layer's steps write, by name, with the axes that it has as an output. Arguments and errors as `attend`."""
    call = ReferenceCall.from_fields(**arguments)
    values, features = run(spec, weights, call), features_of(spec, call)
    (b, h, q), k = values["fully_masked"].shape, len(values["keys"])
    lengths = {"b": b, "h": h, "q": q, "k": k}
    outputs = {
        name: as_output(np, values[name], one.axes.split(","), lengths) for name, one in outputs_of(spec, frozenset(features)).items()
    }
    return outputs if call.batched else {name: array[0] for name, array in outputs.items()}


def named_outputs(spec: LayerSpec, values: Values) -> Outputs:
    """The outputs among the values of a program."""
    (b, h, q), k = values["fully_masked"].shape, len(values["keys"])
    softmaxes: Any = values["softmax()"] if "softmax()" in values else values["attention_weights"]
    normalised = values.get("sigmoid()", values.get("sinks()", softmaxes))
    scores = values["scores"]
    visible = np.broadcast_to(values["visible"], (b, h, q, k))
    keys = values["key_projection"]
    totals = values["log_sum_exp"] if "log_sum_exp" in values else NumpyArithmetic({}).log_sum_exp(scores)
    return Outputs(
        scores=scores if scores.ndim == 4 else np.moveaxis(scores, 0, 1).reshape(b, -1, q, k),
        log_sum_exp=totals if totals.ndim == 3 else np.moveaxis(totals, 0, 1).reshape(b, -1, q),
        normalised=normalised[:, None] if normalised.ndim == 4 else np.moveaxis(normalised, 0, 1),
        indexer_mask=1.0 * np.broadcast_to(values["indexer_mask"] if "indexer_mask" in values else np.any(visible, axis=1), (b, q, k)),
        latent=values.get("latent", keys[:, 0, :, :0]),
        rope_key=values.get("rope_key", keys[:, 0, :, :0]),
        fully_masked=values["fully_masked"],
        **{name: values[name] for name in ("output", "attention_weights", "query_projection", "key_projection", "value_projection")},
        **{name: values[name] for name in ("head_outputs", "concatenated")},
    )
