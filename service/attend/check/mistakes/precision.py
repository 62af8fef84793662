"""Steps in fewer digits than the candidate's dtype has."""

from dataclasses import replace

from attend.check.changes import Change, Impossible
from attend.check.computation import Computation
from attend.check.mistakes.mistake import Mistake, attention

SCORES = frozenset({"queries", "keys", "products"})
SUM = frozenset({"applied", "values", "heads"})
STEPS: dict[str, tuple[frozenset[str], str]] = {  # which numbers are rounded, and the arithmetic, where [x] is x in few digits
    "the scores are rounded to {dtype} before the softmax": (frozenset({"scores"}), attention("[Q Kᵀ{scale}]")),
    "the weights are rounded to {dtype}": (frozenset({"weights"}), "[softmax(Q Kᵀ{scale}{mask})] V"),
    "the softmax is computed in {dtype}": (frozenset({"scores", "weights"}), "[softmax([Q Kᵀ{scale}{mask}])] V"),
    "queries and keys are multiplied in {dtype}": (SCORES, attention("[[Q] [K]ᵀ]{scale}")),
    "queries and keys are multiplied and scaled in {dtype}": (SCORES | {"scores"}, attention("[[[Q] [K]ᵀ]{scale}]")),
    "weights and values are multiplied in {dtype}": (SUM, "[[softmax(Q Kᵀ{scale}{mask})] [V]]"),
    "scores and weights are computed in {dtype}": (SCORES | {"scores", "weights"}, "[softmax([[[Q] [K]ᵀ]{scale}{mask}])] V"),
    "attention is computed in {dtype}, without the projections": (
        SCORES | SUM | {"scores", "weights"},
        "[[softmax([[[Q] [K]ᵀ]{scale}{mask}])] [V]]",
    ),
}


def in_dtype(dtype: str, rounded: frozenset[str]) -> Change:
    """Rounds these numbers. Impossible in a candidate of half precision, and in one that rounds others already."""

    def change(c: Computation) -> Computation:
        if c.dtype not in ("float32", "float64") or c.rounded is not None:
            raise Impossible
        return replace(c, rounded=(dtype, rounded))

    return change


MISTAKES: dict[str, Mistake] = {
    name.format(dtype=dtype): Mistake(in_dtype(dtype, rounded), f"{wrong}, [·] in {dtype}", attention())
    for name, (rounded, wrong) in STEPS.items()
    for dtype in ("bfloat16", "float16")
}
