"""The formulas of a layer, step by step, for the pages of families."""

import math

from attend.spec import LayerSpec

WITH_FORMULA = """softcap window chunk_size rope query_scale alibi relative_bias relative_scores grid_bias qk_norm sinks output_gate latent
differential indexer"""


def formula(spec: LayerSpec, causal: bool, cross: bool) -> dict[str, str]:
    """Step -> its formula, of the steps that a layer has. x [n, d_model] are the inputs of queries, z [m, key_dim] those of keys."""
    z, latent = "z" if cross else "x", spec.latent
    bias = {name: f" + b_{name[0].upper()}" if spec.has_bias(name) else "" for name in ("query", "key", "value", "output")}
    steps = {"projections": f"Q = x W_Q{bias['query']},  K = {z} W_K{bias['key']},  V = {z} W_V{bias['value']}"}
    if latent:
        query = "RMSNorm(x W_DQ) W_UQ" if latent.query_rank else "x W_Q"
        steps["projections"] = f"c = RMSNorm({z} W_DKV),  Q = {query},  K = [{z} W_KR, c W_UK],  V = c W_UV"
    if spec.num_kv_heads != spec.num_heads:
        steps["heads"] = "each head of K and V serves num_heads / num_kv_heads heads of Q"
    norm = _norm(spec)
    if norm and not spec.qk_norm.after_rope:
        steps["norm"] = norm
    if spec.rope:
        steps["rope"] = _rope(spec)
    if norm and spec.qk_norm.after_rope:
        steps["norm"] = norm
    if spec.query_scale:
        steps["query_scale"] = "Q_i = Q_i · (1 + factor · ln(1 + ⌊(i + shift) / length⌋))"
    usual = math.isclose(spec.scale, spec.head_dim**-0.5, rel_tol=1e-9)
    factor = " / √head_dim" if usual else "" if spec.scale == 1 else " · scale"
    steps["scores"] = _relative(spec, factor) if spec.relative_scores else f"S = Q Kᵀ{factor}"
    if spec.differential:
        steps["scores"] = "S1 = Q1 K1ᵀ / √(head_dim/2),  S2 = Q2 K2ᵀ / √(head_dim/2), of the halves of each head"
    if spec.softcap:
        steps["softcap"] = "S = softcap · tanh(S / softcap)"
    if spec.alibi:
        steps["alibi"] = "S_ij = S_ij - slope_h · |i - j|"
    if spec.relative_bias:
        steps["relative_bias"] = "S_ij = S_ij + relative_bias[bucket(j - i), h]"
    if spec.grid_bias:
        table, vectors = "grid_bias[place_i - place_j, h]", "q_i · (grid_rows[row_i - row_j] + grid_columns[column_i - column_j])"
        steps["grid_bias"] = f"S_ij = S_ij + {table if spec.grid_bias.kind == 'table' else vectors}"
    if spec.indexer:
        steps["indexer"] = (
            "S_ij = -∞ unless j is among the top_k keys by I_ij = Σ_h w_ih relu(q_ih · k_j)  ([operators.md](../operators.md))"
        )
    if visible := _visible(spec, causal):
        steps["mask"] = f"S_ij = -∞ unless {visible}"
    steps["softmax"] = "A_ij = exp(S_ij) / (exp(sink_h) + Σ_j exp(S_ij))" if spec.sinks else "A = softmax(S)"
    if spec.differential:
        steps["softmax"] = "A = softmax(S1) - λ softmax(S2),  λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + lambda_init"
    gate = ""
    if spec.output_gate:
        act = spec.output_gate.activation
        gate = f" ⊙ {act}(x W_G{' + b_G' if spec.output_gate.bias else ''})"
        gate += ", one gate for each head" if spec.output_gate.granularity == "headwise" else ""
    heads = "(1 - lambda_init) RMSNorm(A V)" if spec.differential else "A V"
    steps["output"] = f"O = {heads}{gate},  y = concat(O) W_O{bias['output']}"
    return steps | {name: f"with {name} ([operators.md](../operators.md))" for name in _others(spec)}


def _others(spec: LayerSpec) -> list[str]:
    """Fields of the layer's operators that have no formula above."""
    return [operator.field for operator in spec.operators if operator.field not in WITH_FORMULA.split()]


def _norm(spec: LayerSpec) -> str:
    if (norm := spec.qk_norm) is None:
        return ""
    kind = "LayerNorm" if norm.kind == "layer" else "RMSNorm"
    over = "all heads as one vector" if norm.over == "all" else "each head"
    weights = {"shared": "one weight for all heads", "own": "a weight for each head", "none": "no weights"}[norm.weights]
    weights = "with weights" if norm.over == "all" and norm.weights == "own" else weights
    values = ",  V = RMSNorm(V)" if norm.values else ""
    return f"Q = {kind}(Q),  K = {kind}(K){values}, over {over}, {weights}"


def _relative(spec: LayerSpec, factor: str) -> str:
    relative = spec.relative_scores
    if relative.kind == "transformer_xl":
        far = f", at most {relative.max_distance}" if relative.max_distance else ""
        return f"S_ij = ((q_i + u)·k_j + (q_i + v)·W_R R_D){factor}, with the sinusoids R_D of D = i - j{far}"
    bucket = "bucket(i - j)" if relative.buckets else "i - j"
    return f"S_ij = (q_i·k_j + q_i·r_D{' + k_j·s_D' if relative.position_to_content else ''}){factor}, D = {bucket}"


def _rope(spec: LayerSpec) -> str:
    rope = spec.rope
    width = spec.latent.rope_key_dim if spec.latent else spec.head_dim
    share = "" if (rope.dims or width) == width else " of the first dims of each head"
    share = " of the part of K that heads share" if spec.latent else " of each half of a head" if spec.differential else share
    own = f", {rope.scaling.type} scaling" if rope.scaling else ", frequencies of its own" if rope.frequencies else ""
    own += f", by positions on {rope.num_axes} axes" if rope.num_axes > 1 else ""
    return f"Q = RoPE(Q),  K = RoPE(K), on {'pairs' if rope.interleaved else 'halves'}{share}{own}"


def _visible(spec: LayerSpec, causal: bool) -> str:
    window = spec.window
    bounds = [] if window is None or window.left is None else ["i - j ≤ left"]
    bounds += [] if window is None or window.right is None or causal else ["j - i ≤ right"]
    bounds += ["⌊i / chunk_size⌋ = ⌊j / chunk_size⌋"] if spec.chunk_size else []
    return " and ".join((["j ≤ i"] if causal else []) + bounds)
