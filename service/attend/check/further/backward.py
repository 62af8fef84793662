"""Mistakes in the backward pass of a function of heads: what its gradients are with each of them.

P = softmax(S),  S = c Q Kᵀ  (or softcap · tanh of it / softcap)
dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P (dP - Σ_j P dP),  dQ = c dS K,  dK = c dSᵀ Q,  both summed over the query heads of a group
"""

from collections.abc import Iterator, Mapping

import numpy as np

from attend.check.cases import CheckCase
from attend.check.layer import Layer
from attend.spec import LayerSpec
from attend.tensors import Array

KNOWN = {"softcap", "window"}  # operators of layers that are differentiated here


Named = Iterator[tuple[str, Array]]


def mistaken_gradients(spec: LayerSpec, weights: Mapping[str, Array], case: CheckCase, outside: Array, of: str) -> Named:
    """Names of mistakes, and the gradient of the input `of` with each, for the gradient `outside` of the output [b, q, width].

    None for a layer that has projections, or more than a scale, a softcap and a window.
    """
    if spec.projections or not {operator.field for operator in spec.operators} <= KNOWN:
        return
    heads = spec.num_heads if of == "query" else spec.num_kv_heads
    for name, each in _of_values(spec, weights, case, outside) if of == "value" else _of_scores(spec, weights, case, outside, of):
        if heads == spec.num_heads:
            yield from [(name, Layer.merge_heads(each))] if name else []
            continue
        groups = each.reshape(len(each), heads, -1, *each.shape[2:])
        if name:
            yield name, Layer.merge_heads(groups.sum(axis=2))
            continue
        tiled = each.reshape(len(each), -1, heads, *each.shape[2:]).sum(axis=1)
        for which, summed in (("first", groups[:, :, 0]), ("last", groups[:, :, -1])):
            yield f"it is that of the {which} query head of each group, and not their sum", Layer.merge_heads(summed)
        yield "it is the mean of the query heads of each group, and not their sum", Layer.merge_heads(groups.mean(axis=2))
        yield "head i has the sum of the query heads i mod num_kv_heads, and not of its group", Layer.merge_heads(tiled)


def _of_values(spec: LayerSpec, weights: Mapping[str, Array], case: CheckCase, outside: Array) -> Named:
    """dV of each query head [b, h, k, d]: the right one, without a name, and wrong ones."""
    p, upstream = case.reference(spec, weights).attention_weights, Layer.split_heads(outside, spec.num_heads)
    yield "", p.swapaxes(-1, -2) @ upstream
    if p.shape[-2] == p.shape[-1]:
        yield "the weights are not transposed: dV = P dO, and not Pᵀ dO", p @ upstream


def _of_scores(spec: LayerSpec, weights: Mapping[str, Array], case: CheckCase, outside: Array, of: str) -> Named:
    """dQ or dK of each query head [b, h, n, d]: the right one, without a name, and wrong ones."""
    p = case.reference(spec, weights).attention_weights
    counts = {"query": spec.num_heads, "key": spec.num_kv_heads, "value": spec.num_kv_heads}
    heads = (Layer.split_heads(getattr(case, role), count) for role, count in counts.items())
    q, k, v = (np.repeat(x, spec.num_heads // x.shape[1], axis=1) for x in heads)
    of_weights, scores = Layer.split_heads(outside, spec.num_heads) @ v.swapaxes(-1, -2), spec.scale * q @ k.swapaxes(-1, -2)
    cap = 1 - np.tanh(scores / spec.softcap) ** 2 if spec.softcap else np.ones(())
    unmasked = np.exp(scores - scores.max(axis=-1, keepdims=True))
    unmasked /= unmasked.sum(axis=-1, keepdims=True)
    row_sum = (p * of_weights).sum(axis=-1, keepdims=True)
    for name, of_scores in (
        ("", cap * p * (of_weights - row_sum)),
        ("the row sum is left out: dS = P dP, and not P (dP - Σ_j P dP)", cap * p * of_weights),
        ("the row sum is that of dP: dS = P (dP - Σ_j dP)", cap * p * (of_weights - of_weights.sum(axis=-1, keepdims=True))),
        ("dS is not multiplied by the weights: dS = dP - Σ_j P dP", cap * (of_weights - row_sum)),
        ("the weights are those without the mask: P = softmax(c Q Kᵀ)", unmasked * (of_weights - row_sum)),
        ("the derivative of the softcap is left out", p * (of_weights - row_sum)),
    ):
        yield name, spec.scale * (of_scores @ k if of == "query" else of_scores.swapaxes(-1, -2) @ q)
