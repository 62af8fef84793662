"""Parts of a layer that are left out."""

from attend.check.changes import change_spec
from attend.check.mistakes.mistake import Mistake

LEFT_OUT = {  # field of a spec -> its name in hints, and the arithmetic without it and with it
    "rope": ("RoPE", "q_i · k_j", "R(i) q_i · R(j) k_j, R(i): the rotation at position i"),
    "qk_norm": ("the norm of queries and keys", "q_i · k_j", "norm(q_i) · norm(k_j)"),
    "output_gate": ("the output gate", "softmax(S) V", "gate(x) ⊙ softmax(S) V"),
    "softcap": ("the softcap", "softmax(S)", "softmax(c · tanh(S / c))"),
    "window": ("the window", "all keys (that no mask blocks) are seen", "keys outside the window are blocked"),
    "chunk_size": ("the division into chunks", "all keys (that no mask blocks) are seen", "keys of other chunks are blocked"),
    "query_scale": ("the factor on queries by their position", "q_i · k_j", "f(i) q_i · k_j"),
    "alibi": ("ALiBi", "softmax(S)", "softmax(S - slope · |i - j|)"),
    "relative_bias": ("the relative bias", "softmax(S)", "softmax(S + B), B_ij by the bucket of j - i"),
    "grid_bias": ("the bias by positions in a grid", "softmax(S)", "softmax(S + B), B_ij by the places of i and j in the grid"),
    "sinks": ("the sink of the softmax", "exp(S) / Σ exp(S)", "exp(S) / (exp(sink) + Σ exp(S))"),
    "talking_heads": ("the mixing of heads (talking heads)", "softmax(S)", "W · softmax(P · S + b) + c over the heads"),
    "forget_gate": ("the forget gate", "softmax(S)", "softmax(S + F), F_ij = Σ log f_l for j < l ≤ i"),
}

MISTAKES: dict[str, dict[str, Mistake]] = {
    name: {
        f"{words} is left out": Mistake(
            change_spec(**{name: lambda spec, name=name: False if getattr(spec, name) is True else None}), computed, expected
        )
    }
    for name, (words, computed, expected) in LEFT_OUT.items()
}
