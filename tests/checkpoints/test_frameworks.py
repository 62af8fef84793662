"""Layers that people's frameworks made and ran: read from their own checkpoints, they compute what they computed at home.

Cases stand in tests/golden/frameworks, each file written by the generator it names; `tests/golden/casefile.py` says what is in them.
"""

import json

import numpy as np
import pytest
from support import plain_attention
from support.framework_cases import CASES, FILES, array

from service.checkpoints import detect, layers_in, read_layer
from service.spec import LayerSpec


def load(path, index):
    document = json.loads(path.read_text())
    weights = {name: array(tensor) for name, tensor in document["weights"].items()}
    return weights, document["cases"][index]


@pytest.mark.parametrize(("path", "index"), CASES, ids=[f"{path.stem}-{index}" for path, index in CASES])
def test_a_layer_computes_what_it_computed_at_home(path, index):
    """Output, and attention weights where the framework shows them."""
    weights, case = load(path, index)
    fields, canonical = read_layer(weights, **case["load"])
    spec = LayerSpec.model_validate(fields)
    assert {name: w.shape for name, w in canonical.items()} == spec.weight_shapes()
    request = {name: array(x) if isinstance(x, dict) and "base64" in x else x for name, x in case["request"].items()}

    output, attention_weights = plain_attention.attend(spec, canonical, **request)

    np.testing.assert_allclose(output, array(case["expect"]["output"]), rtol=0, atol=case["tolerance"])
    if "attention_weights" in case["expect"]:
        np.testing.assert_allclose(attention_weights, array(case["expect"]["attention_weights"]), rtol=0, atol=case["tolerance"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names_tell_the_layout_wherever_it_was_left_out(path):
    """`detect` and `layers_in` agree with how the file's layers are loaded."""
    weights, case = load(path, 0)
    layout = case["load"]["layout"]
    listed = layers_in(weights)
    assert listed
    if layout is None:
        assert detect(weights) in {name for name, _ in listed}
    else:
        assert layout in {name for name, _ in listed}
