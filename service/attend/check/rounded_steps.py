"""Which steps a candidate in half precision rounds, told from its outputs.

Such steps change its numbers by less than the tolerance, since correct implementations round at different places. But the reference that
rounds at the same places as the candidate gives its numbers almost exactly, and one that rounds at others does not.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from attend.check.calls import ComparedCase
from attend.check.computation import root_mean_square
from attend.check.low_precision import HALF

IN_FLOAT32 = "are computed in float32"
SCORES = {  # what is said of the scores -> the steps that are rounded
    IN_FLOAT32: frozenset[str](),
    "are rounded to {dtype} after the scale": frozenset({"scores"}),
    "are rounded to {dtype} before and after the scale": frozenset({"products", "scores"}),
    "and queries times the scale are rounded to {dtype}": frozenset({"scaled queries", "scores"}),
}
ROUNDED = "are rounded to {dtype}"  # of the scores, if the scale is a power of 2: then the order does not matter
WEIGHTS = {
    "are computed in float32, and so is their product with the values": frozenset[str](),
    "are rounded to {dtype} before they are multiplied by the values": frozenset({"applied"}),
}
ALWAYS = frozenset({"projections", "queries", "keys", "values", "heads"})
SMALLEST = 1e-30  # change by rounding
CLEAR = 0.25  # of the changes by rounding: the largest error of a description


def rounded_steps(compared: Sequence[ComparedCase]) -> str:
    """Where the scores and weights are rounded, as the outputs for cases in half precision show; empty if they do not show it."""
    observed = [(x.right, x.outputs[0].got) for x in compared if x.right.dtype in HALF and not x.outputs[0].vague]
    if not observed:
        return ""
    exact, got = (
        np.concatenate([x.ravel() for x in arrays]) for arrays in ([c.outputs()["output"] for c, _ in observed], [x for _, x in observed])
    )
    errors: dict[tuple[str, str], float] = {}
    for (scores, rounded_scores), (weights, rounded_weights) in product(SCORES.items(), WEIGHTS.items()):
        rounded = ALWAYS | rounded_scores | rounded_weights
        outputs = np.concatenate([replace(c, rounded=(c.dtype, rounded)).outputs()["output"].ravel() for c, _ in observed])
        errors[scores, weights] = root_mean_square(outputs - got) / max(root_mean_square(outputs - exact), SMALLEST)
    least = min(errors.values())
    if not least <= CLEAR:
        return ""
    near = [names for names, error in errors.items() if error <= max(1.5 * least, CLEAR / 10)]
    of_scores, of_weights = ({names[i] for names in near} for i in range(2))
    if len(of_weights) > 1 or (len(of_scores) > 1 and IN_FLOAT32 in of_scores):
        return ""
    words = f"scores {of_scores.pop() if len(of_scores) == 1 else ROUNDED}; weights {of_weights.pop()}"
    return words.format(dtype=observed[0][0].dtype)
