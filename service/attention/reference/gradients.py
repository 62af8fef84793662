"""Gradients of the reference with respect to its query, key and value, by formulas derived by hand.

It reverses the steps of `forward.attend` one by one. Write x̄ for the gradient of ⟨output_gradient, output⟩ with respect to x. For one
head with queries Q, keys K, values V, raw scores R = scale · Q Kᵀ, weights A = softmax(S) and, after dropout with multipliers M, A' = M∘A:

    O = A' V            V̄ = A'ᵀ Ō               Ā = M ∘ (Ō Vᵀ)
    A = softmax(S)      S̄_ij = A_ij (Ā_ij - Σ_l A_il Ā_il)
    S = c tanh(R/c)     R̄ = S̄ ∘ (1 - tanh²(R/c))
    R = scale · Q Kᵀ    Q̄ = scale · R̄ K         K̄ = scale · R̄ᵀ Q

With relative_scores, R_ij = scale · (q_i·k_j + u·k_j + (q_i + v)·r_ij + k_j·s_ij), so that scale · R̄_ij r_ij is added to q̄_i, and
scale · R̄_ij (u + s_ij) to k̄_j.
Sigmoid weights have S̄ = Ā ∘ A ∘ (1 - A). Scores that are multiplied by f (scalable softmax) have f · S̄ in place of S̄.
With differential attention A' = A1 - λ A2 for halves of Q and K, so each softmax has Ā1 = Ā, Ā2 = -λ Ā, and its own half of Q̄ and K̄.
Biases do not change these formulas, but for those that depend on the query: q_i · r_ij adds Σ_j S̄_ij r_ij to Q̄_i. Blocked pairs have
A = 0. A sink is a score with value vector 0, so the formula for S̄ also holds for rows that sum to less than 1. The weights of a fully
masked row are constants, so its S̄ is 0.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from service.attention.reference.forward import (
    Reference,
    activate,
    as_batch,
    attend,
    average_values,
    dropout_multiplier,
    factors,
    gate_logits,
    growth,
    merge_heads,
    norm_weight,
    normalises,
    parts_of,
    project,
    project_heads,
    raw_scores,
    repeat_kv_heads,
    rotate_parts,
    split_heads,
)
from service.attention.reference.masks import blocked_by_keys, query_positions
from service.attention.reference.positions import grid_vectors, position_vectors, query_factors, rotary_positions, rotate
from service.spec import LayerSpec
from service.spec_parts import OutputGate, QKNorm
from service.tensors import Array


@np.errstate(invalid="ignore", over="ignore")  # as in `attend`
def gradients(
    spec: LayerSpec,
    weights: Mapping[str, Array],
    output_gradient: ArrayLike,
    *,
    query: ArrayLike,
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    **call: Any,
) -> dict[str, Array]:
    """`query_gradient`, `key_gradient` and `value_gradient` of ⟨output_gradient, output⟩, each shaped as its input.

    output_gradient is shaped as the output; the other arguments are those of `attend`. A key or value that defaults to another input has a
    separate gradient, as if it were given.
    """
    key = query if key is None else key
    value = key if value is None else value
    batched = np.ndim(query) == 3
    forward = attend(spec.model_copy(update={"output_gate": None}), weights, query=query, key=key, value=value, **call)
    inputs = {name: as_batch(x, batched) for name, x in (("query", query), ("key", key), ("value", value))}

    back = as_batch(output_gradient, batched)
    if spec.projections:
        back = back @ np.asarray(weights["output.weight"], np.float64)
    back = split_heads(back, spec.num_heads)
    through_gate: ArrayLike = 0.0
    if spec.output_gate:
        through_gate, back = _through_gate(spec, weights, inputs["query"], as_batch(forward.head_outputs, batched), back)
    if (head_scale := call.get("head_scale")) is not None:
        back = back * np.asarray(head_scale, np.float64)[..., None, None]
    if spec.differential:
        values = repeat_kv_heads(as_batch(forward.value_projection, batched), spec.num_heads)
        averaged = average_values(as_batch(forward.attention_weights, batched), values)
        norm, back = QKNorm(eps=spec.differential.eps), (1 - spec.differential.lambda_init) * back
        back = _back_through_norm(averaged, weights, "head", norm, back)

    indices, num_keys = _indices(forward, call, batched), inputs["key"].shape[1]
    vectors = None  # which a grid adds to the keys, [b, q, k, d]
    if spec.grid_bias and spec.grid_bias.kind == "decomposed":
        vectors = grid_vectors(spec.grid_bias, weights, indices, num_keys)
    through = dict(zip(inputs, _through_attention(spec, weights, back, forward, call, batched, vectors), strict=True))
    if spec.query_scale:
        through["query"] = query_factors(indices, spec.query_scale) * through["query"]
    if spec.rope:  # the gradient of a rotation is the opposite rotation
        positions, key_positions = (as_batch(call.get(name), batched) for name in ("positions", "key_positions"))
        for name, turned in rotary_positions(positions, key_positions, indices, num_keys).items():
            if spec.qk_norm and spec.qk_norm.after_rope:
                rotated = rotate(project_heads(spec, weights, name, inputs[name]), turned, spec.rope)
                through[name] = _back_through_norm(rotated, weights, name, spec.qk_norm, through[name])
            through[name] = rotate_parts(spec, through[name], -turned)
    input_gradients = {name: _back_through_projection(spec, weights, name, inputs[name], x) for name, x in through.items()}
    input_gradients["query"] = input_gradients["query"] + through_gate
    return {f"{name}_gradient": x if batched else x[0] for name, x in input_gradients.items()}


def _through_gate(spec: LayerSpec, weights: Mapping[str, Array], query: Array, heads: Array, back: Array) -> tuple[Array, Array]:
    """From the gradient Ȳ of Y = H ∘ a(Z), Z = X Wᵀ + b: the gradient of X, (Ȳ ∘ H ∘ a'(Z)) W, and that of H, Ȳ ∘ a(Z).

    A headwise gate has one column of Z for all columns of H, so their gradients are summed.
    """
    assert spec.output_gate is not None
    logits = gate_logits(spec, weights, query)
    gate, sigmoid = activate(logits, spec.output_gate), activate(logits, OutputGate())
    slope = sigmoid if spec.output_gate.activation == "softplus" else sigmoid * (1 - sigmoid)
    for_logits = back * heads * slope
    if spec.output_gate.granularity == "headwise":
        for_logits = for_logits.sum(axis=-1, keepdims=True)
    return merge_heads(for_logits) @ np.asarray(weights["gate.weight"], np.float64), back * gate


def _through_attention(
    spec: LayerSpec,
    weights: Mapping[str, Array],
    back: Array,
    forward: Reference,
    call: Mapping[str, Any],
    batched: bool,
    vectors: Array | None,
) -> tuple[Array, ...]:
    """From the gradient of the heads' outputs [b, h, q, dv] to those of their queries [b, h, q, d], keys and values [b, kv heads, k, …]."""
    projections = (forward.query_projection, forward.key_projection, forward.value_projection)
    q, k, v = (repeat_kv_heads(as_batch(x, batched), spec.num_heads) for x in projections)
    scores, normalised, after_dropout = (as_batch(x, batched) for x in (forward.scores, forward.normalised, forward.attention_weights))
    blocked = np.isneginf(scores)
    multiplier = 1.0 if call.get("dropout") is None else dropout_multiplier(call["dropout"], scores.shape)

    for_values = after_dropout.swapaxes(-1, -2) @ back
    for_weights = np.where(blocked, 0.0, multiplier * (back @ v.swapaxes(-1, -2)))
    scale = spec.scale if call.get("scale") is None else call["scale"]
    ahead = np.arange(k.shape[2]) - _indices(forward, call, batched)[:, None, :, None]
    cap = spec.softcap if call.get("softcap") is None else call["softcap"]
    for_queries, for_keys = [], []
    for i, (factor, queries, keys) in enumerate(zip(factors(spec, weights), parts_of(spec, q), parts_of(spec, k), strict=True)):
        for_scores = factor * _through_normalizer(spec, normalised[:, i], for_weights) * growth(spec, blocked, blocked)[0]
        through_vectors: Array | float = 0.0 if vectors is None else np.einsum("bhij,bijd->bhid", for_scores, vectors)
        if cap:
            slope = 1 - np.tanh(scale * raw_scores(spec, weights, queries, keys, ahead) / cap) ** 2
            for_scores = np.where(blocked, 0.0, for_scores * slope)
        for_queries.append(scale * average_values(for_scores, keys) + through_vectors)
        for_keys.append(scale * (for_scores.swapaxes(-1, -2) @ queries))
        if spec.relative_scores:
            through_terms = _through_relative_terms(spec, weights, scale * for_scores, ahead)
            for_queries[i], for_keys[i] = for_queries[i] + through_terms[0], for_keys[i] + through_terms[1]
    by_kv_head = (_sum_over_groups(x, spec.num_kv_heads) for x in (np.concatenate(for_keys, axis=-1), for_values))
    return np.concatenate(for_queries, axis=-1), *by_kv_head


def _through_normalizer(spec: LayerSpec, weights: Array, back: Array) -> Array:
    """From the gradient of weights [b, h, q, k] to that of the scores that they were made from."""
    sigmoid = spec.normalizer == "sigmoid"
    result: Array = weights * (1 - weights) * back if sigmoid else weights * (back - (weights * back).sum(axis=-1, keepdims=True))
    return result


def _through_relative_terms(spec: LayerSpec, weights: Mapping[str, Array], back: Array, ahead: Array) -> tuple[Array, Array]:
    """From the gradient of the terms [b, h, q, k] to those of queries, Σ_j back_ij r_ij, and keys, Σ_i back_ij (u + s_ij)."""
    for_queries = np.einsum("bhij,bijhd->bhid", back, position_vectors(spec, weights, "position_key", ahead))
    if "content_bias" in weights:
        return for_queries, back.sum(axis=2)[..., None] * np.asarray(weights["content_bias"], np.float64)[:, None]
    if "position_query.weight" in weights:
        return for_queries, np.einsum("bhij,bijhd->bhjd", back, position_vectors(spec, weights, "position_query", ahead))
    return for_queries, np.zeros(1)


def _sum_over_groups(x: Array, kv_heads: int) -> Array:
    """Reverses `repeat_kv_heads`: the sum over the query heads of each kv head."""
    b, h, n, d = x.shape
    summed: Array = x.reshape(b, kv_heads, h // kv_heads, n, d).sum(axis=2)
    return summed


def _indices(forward: Reference, call: Mapping[str, Any], batched: bool) -> Array:
    """The key positions of the queries, as in `attend`: [b, q]."""
    shape = as_batch(forward.scores, batched).shape
    segments = "key_segments" if call.get("segments") is None else "segments"
    masks = ("valid_lens", "attend_keys", "block_keys", segments)
    blocked_keys = blocked_by_keys(shape, *(as_batch(call.get(name), batched) for name in masks))
    return query_positions(call.get("query_offset"), blocked_keys, needed=False)


def _back_through_projection(spec: LayerSpec, weights: Mapping[str, Array], name: str, x: Array, back: Array) -> Array:
    """Reverses `project_heads`: from the gradient of the heads [b, heads, n, d] to that of the input x [b, n, in]."""
    norm = spec.qk_norm
    if norm and (normalises(norm, name) or (norm.after_rope and not spec.rope and name != "value")):
        without_norm = spec.model_copy(update={"qk_norm": None})
        back = _back_through_norm(project_heads(without_norm, weights, name, x), weights, name, norm, back)
    if spec.latent:
        return _back_through_latent(spec, weights, name, x, back)
    back = merge_heads(back)
    return back @ np.asarray(weights[f"{name}.weight"], np.float64) if spec.projections else back


def _back_through_latent(spec: LayerSpec, weights: Mapping[str, Array], name: str, x: Array, back: Array) -> Array:
    """Reverses `latent_heads`. The part of the keys that all heads share has the sum of their gradients."""
    assert spec.latent is not None
    in_float64 = {n: np.asarray(w, np.float64) for n, w in weights.items()}
    direct = np.zeros(1)
    if name == "key":
        shared, back = np.split(back, [spec.latent.rope_key_dim], axis=-1)
        direct = shared.sum(axis=1) @ in_float64["rope_key.weight"]
    back = merge_heads(back) @ in_float64[f"{name}.weight"]
    if name == "query" and spec.latent.query_rank is None:
        return back
    down = "query_down" if name == "query" else "key_value_down"
    back = _back_through_norm(project(x, weights, down), weights, down, QKNorm(eps=spec.latent.eps), back)
    return direct + back @ in_float64[f"{down}.weight"]


def _back_through_norm(x: Array, weights: Mapping[str, Array], name: str, norm: QKNorm, back: Array) -> Array:
    """Of y = n · w + b with n = x/r and r = √(mean x² + eps): x̄ = (n̄ - n · mean(n ∘ n̄)) / r.

    The layer norm subtracts the mean of x first, so the mean of the gradient is subtracted last.
    """
    axes = (-1,) if norm.over == "head" else (1, 3)
    if norm.kind == "layer":
        x = x - x.mean(axis=axes, keepdims=True)
    root = np.sqrt((x**2).mean(axis=axes, keepdims=True) + norm.eps)
    normed, back = x / root, back * norm_weight(weights, f"{name}_norm.weight", 1.0)
    result: Array = (back - normed * (normed * back).mean(axis=axes, keepdims=True)) / root
    return result - result.mean(axis=axes, keepdims=True) if norm.kind == "layer" else result
