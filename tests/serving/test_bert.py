"""BERT in NumPy against a small random model of transformers, whose layer inputs were saved."""

import json

import numpy as np
import pytest
from support.framework_cases import FOLDER, array

from service.serving.bert import Bert
from service.spec import LayerSpec

IDS = [3, 1, 4, 1, 5, 9, 2]  # the first of the two sequences in tests/golden/generate_transformers.py, the one without padding


@pytest.fixture(scope="module")
def document():
    return json.loads((FOLDER / "transformers_bert.json").read_text())


@pytest.mark.parametrize("layer", [0, 1])
def test_hidden_states_equal_those_of_transformers(document, layer):
    """Layer 0: the embeddings; layer 1: after one whole layer with its feed-forward part."""
    weights = {name: array(tensor) for name, tensor in document["weights"].items()}
    case = next(case for case in document["cases"] if case["load"]["prefix"] == f"encoder.layer.{layer}.attention")

    bert = Bert(weights.__getitem__, LayerSpec(d_model=15, num_heads=3), epsilon=1e-12)

    np.testing.assert_allclose(bert.hidden_states(IDS, layer), array(case["request"]["query"])[0], rtol=0, atol=2e-6)
    for name in ("query", "key", "value"):
        own = weights[f"encoder.layer.{layer}.attention.self.{name}.weight"]
        np.testing.assert_array_equal(bert.attention_weights(layer)[f"{name}.weight"], own)
