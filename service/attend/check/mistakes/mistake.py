"""A known mistake: the change that makes it in the reference, and its arithmetic beside the right one.

In the arithmetic, Q, K, V are the projected queries, keys and values of a head, q_i, k_j, v_j their rows, x inputs, M the mask (0 and
-inf), S the scores, P the weights, o the outputs of the heads, d head_dim. `{scale}`, `{mask}` and `{slopes}` stand for what the layer and
the case have.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from attend.check.changes import Change
from attend.check.computation import Computation


@dataclass(frozen=True, slots=True)
class Mistake:
    change: Change
    computed: str  # what a candidate with this mistake computes
    expected: str
    step: str = ""  # of the layer's program that it changes, of `algebra/`

    def arithmetic(self, right: Computation) -> tuple[str, str]:
        """The wrong and the right arithmetic in the layer and case of a computation."""
        scale, usual = right.scale, right.spec.head_dim**-0.5
        words = {
            "{scale}": " / √d" if abs(scale - usual) < 1e-12 else f" · {scale:.4g}",
            "{mask}": "" if right.case.visible.all() else " + M",
            "{slopes}": _slopes(right.spec.num_heads),
        }
        wrong, expected = self.computed, self.expected
        for name, text in words.items():
            wrong, expected = wrong.replace(name, text), expected.replace(name, text)
        return wrong, expected


Named = tuple[str, Mistake]


def _slopes(heads: int) -> str:
    """ALiBi's slopes of this number of heads, which have one formula only if that is a power of 2."""
    power = 1 << (heads.bit_length() - 1)
    if heads == power:
        return "slopes 2^(-8i/n), i from 1, of n heads"
    return f"slopes 2^(-8i/{power}), i = 1 to {power}; then 2^(-8i/{2 * power}), i = 1, 3, …"


def computing(expected: str, rows: Mapping[str, tuple[str, Change]]) -> dict[str, Mistake]:
    """Mistakes with the same right arithmetic: name -> the wrong arithmetic and the change."""
    return {name: Mistake(change, computed, expected) for name, (computed, change) in rows.items()}


def seeing(keys: str) -> str:
    """Attention in which query i sees these keys alone."""
    return f"softmax(S + M) V, query i sees the keys {keys}"


def attention(scores: str = "Q Kᵀ{scale}") -> str:
    """Attention with these scores before the mask."""
    return f"softmax({scores}{{mask}}) V"
