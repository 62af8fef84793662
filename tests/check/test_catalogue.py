"""Each known mistake shows in a case, and has one name."""

import functools
import itertools

import numpy as np
import pytest

from attend.check.cases import CaseKind, Draw, draw_long_cases, draw_short_cases, lengths_for
from attend.check.changes import Impossible
from attend.check.computation import Computation
from attend.check.explanation import Observation, explain
from attend.check.mistakes import MISTAKES
from attend.check.parameters import draw_parameter_cases
from attend.check.random_cases import Draw as DrawValues
from attend.check.random_cases import draw_weights
from attend.spec import LayerSpec

SIZES = {"d_model": 12, "num_heads": 4}


GROUPED = {"d_model": 13, "num_heads": 6, "num_kv_heads": 2, "head_dim": 11, "bias": False}


ROTARY = {"theta": 500, "dims": 10, "attention_factor": 1.5}


LLAMA3 = {"type": "llama3", "factor": 4, "original_max_position": 20}


LAYERS = [
    LayerSpec(**SIZES),
    LayerSpec(**GROUPED, rope=ROTARY | {"scaling": LLAMA3}, qk_norm={"weights": "own"}, window={"left": 4}, softcap=2, scale=0.5),
    LayerSpec(**GROUPED, rope=ROTARY | {"interleaved": True}, qk_norm={"weights": "own", "over": "all", "after_rope": True}),
    LayerSpec(**SIZES, output_gate={}, alibi=True, sinks=True),
    LayerSpec(**SIZES, relative_bias={}, chunk_size=5, query_scale={"factor": 0.5, "length": 3}),
    LayerSpec(**SIZES, normalizer="sigmoid", grid_bias={"height": 3, "width": 5}),
    LayerSpec(d_model=12, num_heads=2, rope={}, talking_heads=True),
    LayerSpec(d_model=12, num_heads=2, forget_gate=True),
    LayerSpec(**SIZES, scale=0.9, rope={"dims": 2}, latent={"query_rank": 7, "key_value_rank": 5, "rope_key_dim": 2}),
    LayerSpec(d_model=12, num_heads=3, alibi=True),
    LayerSpec(d_model=12, num_heads=3, block_selection={"block_size": 2, "top_k": 1}),
]


CANDIDATES = [{}, {"causal": True, "decodes": True}, {"causal": True, "at_end": True}, {"batched": False}]


MASK_OF: dict[CaseKind, str] = {"mask": "mask", "causal": "mask", "padding": "padding", "numbers": "mask"}


@functools.cache
def right_computations(layer, candidate, seed, is_whole=False):
    """The computations of the reference for the short cases, or all, and what they return; made once, since hundreds of mistakes are tried
    on them."""
    spec, options = LAYERS[layer], dict(CANDIDATES[candidate])
    weights = draw_weights(DrawValues(np.random.default_rng(0)), spec, ["weights"])
    decodes, lengths = options.pop("decodes", False), lengths_for(spec, batched=options.pop("batched", True))
    draw = Draw(spec=spec, weights=weights, rng=np.random.default_rng(seed), lengths=lengths, **options)
    cases = [*draw_short_cases(draw, decodes=decodes)]
    if is_whole:
        names = {role: role for role in ("padding", "softcap", "window")}
        more = {"is_torch": False, "adds_numbers": True, "decodes": decodes, "aligned": None}
        cases += [*draw_parameter_cases(draw, names, MASK_OF, **more), *draw_long_cases(draw, decodes=decodes)]
    computations = [Computation(case.layer(spec), weights, case) for case in cases]
    return [(right, right.run()) for right in computations]


def observations(layer, candidate, seed, change, is_whole=False):
    """What a candidate with this mistake returns in each case; it raises where the mistake has no shape."""
    for right, expected in right_computations(layer, candidate, seed, is_whole):
        got = expected
        try:
            got = change(right).run()
        except Impossible:
            pass
        except ValueError:
            continue
        agrees = all(x.shape == expected.outputs[name].shape and expected.agrees(name, x) for name, x in got.outputs.items())
        yield Observation(right, got.outputs, agrees)


@functools.cache
def where_mistakes_show():
    """For each mistake the first cases that it changes: of layer, candidate, and whether long cases are among them."""
    left = {name: mistake.change for name, mistake in MISTAKES.items()}
    found = {}
    for is_whole in (False, True):  # few show in long cases or with further arguments alone
        for layer, candidate in itertools.product(range(len(LAYERS)), range(len(CANDIDATES))):
            for hint in list(left):
                if not all(x.agrees for x in observations(layer, candidate, 0, left[hint], is_whole)):
                    found[hint] = layer, candidate, is_whole
                    del left[hint]
    return found


def test_every_known_mistake_changes_a_case():
    assert MISTAKES.keys() == where_mistakes_show().keys()


@pytest.mark.parametrize("hint", [*MISTAKES][::16])
def test_known_mistakes_are_named_and_no_others(hint):
    """The reference makes the mistake in all cases. It is named, alone or with one that gives the same numbers in every case."""
    layer, candidate, is_whole = where_mistakes_show()[hint]
    change = MISTAKES[hint].change
    observed = list(observations(layer, candidate, 0, change, is_whole))
    explanation = explain(observed, observations(layer, candidate, 1, change, True))  # long cases tell blocks of keys apart
    assert (hint,) in (explanation.mistakes, *explanation.equals)


def test_every_mistake_has_its_arithmetic_on_a_line_of_80_columns():
    right = right_computations(0, 0, 0)[0][0].with_scale(0.9)
    for name, mistake in MISTAKES.items():
        computed, expected = mistake.arithmetic(right)
        assert computed != expected, name
        assert max(len(f"  you compute: {computed}"), len(f"  expected:    {expected}")) <= 80, name
