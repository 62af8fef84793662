"""Changes of one step of a layer's program are named."""

import numpy as np
import pytest

from attend.check import compare
from attend.check.algebra import changes_of
from attend.check.cases import Draw, draw_short_cases, lengths_for
from attend.check.computation import Computation
from attend.check.random_cases import Draw as DrawValues
from attend.check.random_cases import draw_weights
from support.candidates import GROUPED_ROTARY, GroupedRotary

NAMES = {
    "the norm of the keys is applied after RoPE and not before": {"keys": lambda self, k: self.k_norm(self.rotate(k))},
    "RoPE of the keys is applied twice": {"keys": lambda self, k: self.rotate(self.rotate(self.k_norm(k)))},
    "the key as it is when scores are computed (after norms and RoPE) is used in place of the value": {"values": lambda self, k, v: k},
    "the heads of the values are in another order: they are in the reverse order": {"values": lambda self, k, v: v.flip(1)},
    "the scores have the opposite sign": {"scale": lambda self, scores: -scores / self.width**0.5},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_change_of_one_step_is_named(name):
    explanation = compare(type("Wrong", (GroupedRotary,), NAMES[name]), spec=GROUPED_ROTARY, causal=True, longest=7).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((name,), ())


def test_the_changes_of_a_step_have_one_name_each_and_their_arithmetic_on_a_line_of_80_columns():
    rng, spec = np.random.default_rng(0), GROUPED_ROTARY
    weights = draw_weights(DrawValues(rng), spec, ["weights"])
    case = next(draw_short_cases(Draw(spec=spec, weights=weights, rng=rng, lengths=lengths_for(spec))))
    right = Computation(spec, weights, case)
    changes = list(changes_of(right))
    assert len(dict(changes)) == len(changes)
    for name, mistake in changes:
        computed, expected = mistake.arithmetic(right)
        assert computed != expected, name
        assert max(len(f"  you compute: {computed}"), len(f"  expected:    {expected}")) <= 80, name
