"""Gradients of the float64 reference with respect to its query, key and value, by formulas derived by hand.

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

from attend.attention.operators.qk_norm import QKNorm
from attend.attention.reference.forward import Layer, Outputs, Positions, average_values, dropout_multiplier
from attend.attention.reference.operators.grid_bias import grid_vectors
from attend.attention.reference.operators.output_gate import activate, gate_logits
from attend.attention.reference.operators.query_scale import query_factors
from attend.attention.reference.operators.relative_scores import position_vectors
from attend.attention.reference.operators.scalable_softmax import log_num_keys
from attend.attention.reference.operators.sigmoid import sigmoid
from attend.attention.reference.request import Request
from attend.spec import LayerSpec
from attend.tensors import Array
from support.oracles import oracle_steps


@np.errstate(invalid="ignore", over="ignore")  # as in `attend`
def gradients(spec: LayerSpec, weights: Mapping[str, Array], output_gradient: ArrayLike, **arguments: Any) -> dict[str, Array]:
    """`query_gradient`, `key_gradient` and `value_gradient` of ⟨output_gradient, output⟩, each shaped as its input.

    output_gradient is shaped as the output; the other arguments are those of `attend`. A key or value that defaults to another input has a
    separate gradient, as if it were given.
    """
    layer, request = Layer(spec, weights), Request(**arguments)
    forward = Layer(spec.model_copy(update={"output_gate": None}), weights).attend(request)
    inputs = {name: getattr(request, name) for name in ("query", "key", "value")}

    back = request.as_batch(output_gradient)
    if spec.projections:
        back = back @ layer.weights["output.weight"]
    back = Layer.split_heads(back, spec.num_heads)
    through_gate: ArrayLike = 0.0
    if spec.output_gate:
        through_gate, back = _through_gate(layer, request.query, forward.head_outputs, back)
    if request.head_scale is not None:
        back = back * np.asarray(request.head_scale, np.float64)[..., None, None]
    if spec.differential:
        averaged = average_values(forward.attention_weights, layer.repeat_kv_heads(forward.value_projection))
        back = _through_norm(layer, "head", QKNorm(eps=spec.differential.eps), averaged, (1 - spec.differential.lambda_init) * back)

    positions = layer.positions(request, forward.scores.shape)
    *through_heads, added = _through_attention(layer, request, forward, positions, back)
    through = dict(zip(inputs, through_heads, strict=True))
    if spec.query_scale:
        through["query"] = query_factors(positions.indices, spec.query_scale) * through["query"]
    if spec.rope:  # the gradient of a rotation is the opposite rotation
        for name, rotary in positions.coordinates.items():
            if spec.qk_norm and spec.qk_norm.after_rope:
                rotated = layer.rotate(layer.project_heads(name, inputs[name]), name, rotary)
                through[name] = _through_norm(layer, name, spec.qk_norm, rotated, through[name])
            through[name] = layer.rotate(through[name], name, -rotary)
    input_gradients = {name: _through_projection(layer, name, inputs[name], x) for name, x in through.items()}
    input_gradients["query"] = input_gradients["query"] + through_gate
    for name, x in added.items():
        input_gradients[name] = input_gradients[name] + x
    return {f"{name}_gradient": x if request.batched else x[0] for name, x in input_gradients.items()}


def _through_gate(layer: Layer, query: Array, heads: Array, back: Array) -> tuple[Array, Array]:
    """From the gradient Ȳ of Y = H ∘ a(Z), Z = X Wᵀ + b: the gradient of X, (Ȳ ∘ H ∘ a'(Z)) W, and that of H, Ȳ ∘ a(Z).

    A headwise gate has one column of Z for all columns of H, so their gradients are summed.
    """
    gate, logits = layer.spec.output_gate, gate_logits(layer, query)
    assert gate is not None
    slope = sigmoid(logits) if gate.activation == "softplus" else sigmoid(logits) * sigmoid(-logits)
    for_logits = back * heads * slope
    if gate.granularity == "headwise":
        for_logits = for_logits.sum(axis=-1, keepdims=True)
    return Layer.merge_heads(for_logits) @ layer.weights["gate.weight"], back * activate(logits, gate)


def _through_attention(layer: Layer, request: Request, forward: Outputs, positions: Positions, back: Array) -> tuple[Any, ...]:
    """From the gradient of the heads' outputs [b, h, q, dv] to those of their queries [b, h, q, d], keys and values [b, kv heads, k, …].

    The last item has what biases add to the gradients of inputs, by name.
    """
    spec, scale, cap = layer.spec, layer.scale(request), layer.softcap(request)
    q, k, v = (layer.repeat_kv_heads(x) for x in (forward.query_projection, forward.key_projection, forward.value_projection))
    blocked = np.isneginf(forward.scores)
    multiplier = 1.0 if request.dropout is None else dropout_multiplier(request.dropout, blocked.shape)
    vectors = None  # which a grid adds to the keys, [b, q, k, d]
    if spec.grid_bias and spec.grid_bias.kind == "decomposed":
        vectors = grid_vectors(spec.grid_bias, layer.weights, positions.indices, k.shape[2])

    for_values = forward.attention_weights.swapaxes(-1, -2) @ back
    for_weights = np.where(blocked, 0.0, multiplier * (back @ v.swapaxes(-1, -2)))
    for step in oracle_steps(spec, "through_mix_weights"):
        for_weights = step(layer, np.where(forward.fully_masked[..., None], 0.0, for_weights))
    added: dict[str, Array] = {}
    for_queries, for_keys = [], []
    for i, (factor, queries, keys) in enumerate(zip(layer.factors(), layer.split(q), layer.split(k), strict=True)):
        for_scores = factor * _through_normalizer(spec, forward.normalised[:, i], for_weights)
        if spec.normalizer == "scalable_softmax":
            for_scores = for_scores * log_num_keys(blocked)
        for step in oracle_steps(spec, "through_bias_of_visible"):
            for name, x in step(layer, request, positions, np.where(blocked, 0.0, for_scores), blocked).items():
                added[name] = added.get(name, 0.0) + x
        for_query: Array | float = 0.0 if vectors is None else np.einsum("bhij,bijd->bhid", for_scores, vectors)
        for step in oracle_steps(spec, "through_score"):
            for_scores = step(layer, np.where(blocked, 0.0, for_scores))
        if cap:
            slope = 1 - np.tanh(scale * layer.raw_scores(queries, keys, positions.ahead) / cap) ** 2
            for_scores = np.where(for_scores == 0, 0.0, for_scores * slope)  # blocked keys may be NaN
        for_queries.append(scale * average_values(for_scores, keys) + for_query)
        for_keys.append(scale * (for_scores.swapaxes(-1, -2) @ queries))
        if spec.relative_scores:
            through_terms = _through_relative_terms(layer, scale * for_scores, positions.ahead)
            for_queries[i], for_keys[i] = for_queries[i] + through_terms[0], for_keys[i] + through_terms[1]
    by_kv_head = (_sum_over_groups(x, spec.num_kv_heads) for x in (np.concatenate(for_keys, axis=-1), for_values))
    return np.concatenate(for_queries, axis=-1), *by_kv_head, added


def _through_normalizer(spec: LayerSpec, weights: Array, back: Array) -> Array:
    """From the gradient of weights [b, h, q, k] to that of the scores that they were made from."""
    sigmoid = spec.normalizer == "sigmoid"
    result: Array = weights * (1 - weights) * back if sigmoid else weights * (back - (weights * back).sum(axis=-1, keepdims=True))
    return result


def _through_relative_terms(layer: Layer, back: Array, ahead: Array) -> tuple[Array, Array]:
    """From the gradient of the terms [b, h, q, k] to those of queries, Σ_j back_ij r_ij, and keys, Σ_i back_ij (u + s_ij)."""
    weights = layer.weights
    for_queries = np.einsum("bhij,bijhd->bhid", back, position_vectors(layer.spec, weights, "position_key", ahead))
    if "content_bias" in weights:
        return for_queries, back.sum(axis=2)[..., None] * weights["content_bias"][:, None]
    if "position_query.weight" in weights:
        return for_queries, np.einsum("bhij,bijhd->bhjd", back, position_vectors(layer.spec, weights, "position_query", ahead))
    return for_queries, np.zeros(1)


def _sum_over_groups(x: Array, kv_heads: int) -> Array:
    """Reverses `repeat_kv_heads`: the sum over the query heads of each kv head."""
    b, h, n, d = x.shape
    summed: Array = x.reshape(b, kv_heads, h // kv_heads, n, d).sum(axis=2)
    return summed


def _through_projection(layer: Layer, name: str, x: Array, back: Array) -> Array:
    """Reverses `project_heads`: from the gradient of the heads [b, heads, n, d] to that of the input x [b, n, in]."""
    spec, norm = layer.spec, layer.spec.qk_norm
    if norm and (norm.values if name == "value" else not (norm.after_rope and spec.rope)):
        without_norm = Layer(spec.model_copy(update={"qk_norm": None}), layer.weights)
        back = _through_norm(layer, name, norm, without_norm.project_heads(name, x), back)
    if spec.latent:
        return _through_latent(layer, name, x, back)
    back = Layer.merge_heads(back)
    return back @ layer.weights[f"{name}.weight"] if spec.projections else back


def _through_latent(layer: Layer, name: str, x: Array, back: Array) -> Array:
    """Reverses latent attention's `project`. The part of the keys that all heads share has the sum of their gradients."""
    latent, weights = layer.spec.latent, layer.weights
    assert latent is not None
    direct = np.zeros(1)
    if name == "key":
        shared, back = np.split(back, [latent.rope_key_dim], axis=-1)
        direct = shared.sum(axis=1) @ weights["rope_key.weight"]
    back = Layer.merge_heads(back) @ weights[f"{name}.weight"]
    if name == "query" and latent.query_rank is None:
        return back
    down = "query_down" if name == "query" else "key_value_down"
    back = _through_norm(layer, down, QKNorm(eps=latent.eps), layer.project(x, down), back)
    return direct + back @ weights[f"{down}.weight"]


def _through_norm(layer: Layer, name: str, norm: QKNorm, x: Array, back: Array) -> Array:
    """Of y = n · w + b with n = x/r and r = √(mean x² + eps): x̄ = (n̄ - n · mean(n ∘ n̄)) / r.

    The layer norm subtracts the mean of x first, so the mean of the gradient is subtracted last.
    """
    axes = (-1,) if norm.over == "head" else (1, 3)
    if norm.kind == "layer":
        x = x - x.mean(axis=axes, keepdims=True)
    root = np.sqrt((x**2).mean(axis=axes, keepdims=True) + norm.eps)
    normed, back = x / root, back * layer.norm_weight(f"{name}_norm.weight", 1.0)
    result: Array = (back - normed * (normed * back).mean(axis=axes, keepdims=True)) / root
    return result - result.mean(axis=axes, keepdims=True) if norm.kind == "layer" else result
