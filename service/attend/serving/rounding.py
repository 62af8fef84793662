"""Whether a call may share a batch without its result differing by more than rule 7 allows.

The rounding of a matrix product depends on its number of rows, so on the batch. Softmax amplifies it in proportion to the scores. So calls
whose scores may be large run alone; how large is estimated from the layer's weights and the call's inputs.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from attend.attention.call import Call
from attend.attention.dataflow import needed
from attend.attention.decoding import largest_row
from attend.attention.operators.declarations import Variances, variance
from attend.attention.program import program_of
from attend.axes import PROGRAM_TENSORS
from attend.spec import LayerSpec

MAX_SCORE = 8.0  # largest estimated score of a call that may share a batch; about 1 for xavier weights and inputs of unit variance
MAX_BIAS = 64.0  # largest |bias| of such a call: adding a larger one rounds the scores by more than results may differ


def score_deviation(spec: LayerSpec, weights: Mapping[str, Tensor]) -> float:
    """Standard deviation of the layer's scores before scale, for inputs of unit variance.

    It is sqrt(head_dim * variance of query components * variance of key components). Infinite if an operator may amplify rounding
    without bound, so calls run alone.
    """
    if any(operator.amplifies_rounding for operator in spec.operators):
        return math.inf
    variances = Variances(*(variance(weights, name) if spec.projections else 1.0 for name in ("query", "key")))
    for operator in spec.operators:
        variances = operator.variances(spec, weights, variances)
    return math.sqrt(spec.head_dim * variances.query * variances.key)


def may_amplify_rounding(spec: LayerSpec, deviation: float, call: Call, largest_cached_row: float = 1.0) -> bool:
    """Whether the scores may be so large that softmax amplifies their rounding beyond the tolerance of rule 7.

    `deviation` is the layer's `score_deviation`; `largest_cached_row` is that of keys that are cached.
    """
    if spec.dtype == "float64":
        return False
    score = deviation * abs(call.options.scale)
    for operator in spec.operators:
        score *= operator.score_growth(spec, call.masks)
    score *= _largest_factor(spec, call)
    if score <= MAX_SCORE and not spec.normalises_heads:
        query = largest_row(call.query)
        score *= query * max(largest_cached_row, query if call.options.self_attention else largest_row(call.key))
    bias = call.masks.bias
    return not score <= MAX_SCORE or (bias is not None and bool((bias.isfinite() & (bias.abs() > MAX_BIAS)).any()))


def _largest_factor(spec: LayerSpec, call: Call) -> float:
    """How much the tensors of a call from which scores are computed may enlarge them, beside its inputs and its bias."""
    factors = {field.value: call.optional_inputs[name] for name, field in PROGRAM_TENSORS.items() if name in call.optional_inputs}
    if not factors:
        return 1.0
    read = {name for step in needed(program_of(spec, call.features), ("scores",)) for name in step.reads}
    return math.prod(max(1.0, float(tensor.abs().max())) for name, tensor in factors.items() if name in read and tensor.numel())
