"""Whether a call may share a batch without its result differing by more than rule 7 allows.

The rounding of a matrix product depends on its number of rows, so on the batch. Softmax amplifies it in proportion to the scores. So calls
whose scores may be large run alone; how large is estimated from the layer's weights and the call's inputs.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from service.attention.call import Call
from service.attention.decoding import largest_row
from service.spec import LayerSpec

MAX_SCORE = 8.0  # largest estimated score of a call that may share a batch; about 1 for xavier weights and inputs of unit variance
MAX_BIAS = 64.0  # largest |bias| of such a call: adding a larger one rounds the scores by more than results may differ
MANY_KEYS = 1 << 16  # for which the scores of scalable softmax are estimated


def score_deviation(spec: LayerSpec, weights: Mapping[str, Tensor]) -> float:
    """Standard deviation of the layer's scores before scale, for inputs of unit variance.

    It is sqrt(head_dim * variance of query components * variance of key components). Infinite for differential attention: its norm may
    amplify the rounding of any difference, so its calls run alone.
    """
    if spec.differential:
        return math.inf
    growth = math.log(MANY_KEYS) if spec.normalizer == "scalable_softmax" else 1.0
    if not spec.projections or spec.qk_norm is not None:  # components have unit variance
        return growth * math.sqrt(spec.head_dim)
    queries, keys = _variance(weights, "query"), _variance(weights, "key")
    if (latent := spec.latent) is not None:
        keys += (_variance(weights, "rope_key") - keys) * latent.rope_key_dim / spec.head_dim
    if (relative := spec.relative_scores) is not None:
        share = 1 / (2 * relative.columns or 2)  # mean square of an embedded distance: a unit vector, or sines and cosines
        keys += share * _variance(weights, "position_key")
        queries += share * _variance(weights, "position_query") if relative.position_to_content else 0
        queries += sum(float(weights[name].double().square().mean()) for name in ("content_bias", "position_bias") if name in weights)
    return growth * math.sqrt(spec.head_dim * queries * keys)


def _variance(weights: Mapping[str, Tensor], name: str) -> float:
    """Mean variance of the components of a projection, for inputs of unit variance."""
    variance: Tensor = weights[f"{name}.weight"].double().square().sum(1)
    if f"{name}.bias" in weights:
        variance += weights[f"{name}.bias"].double().square()
    return float(variance.mean())


def may_amplify_rounding(spec: LayerSpec, deviation: float, call: Call, key: Tensor | None = None, largest_cached_row: float = 1.0) -> bool:
    """Whether the scores may be so large that softmax amplifies their rounding beyond the tolerance of rule 7.

    `deviation` is the layer's `score_deviation`; `key` replaces the call's; `largest_cached_row` is that of keys that are cached.
    """
    if spec.dtype == "float64":
        return False
    key = call.key if key is None else key
    score = deviation * abs(call.scale)
    if (growth := spec.query_scale) is not None and call.masks.positions.numel():
        score *= 1 + growth.factor * math.log1p(max(0, int(call.masks.positions.max())) / growth.length)
    if score <= MAX_SCORE and spec.qk_norm is None:
        query = largest_row(call.query)
        score *= query * max(largest_cached_row, query if key is call.query else largest_row(key))
    bias = call.masks.bias
    return not score <= MAX_SCORE or (bias is not None and bool((bias.isfinite() & (bias.abs() > MAX_BIAS)).any()))
