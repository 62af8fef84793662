"""Models of transformers with their attention in a service, against their own eager attention."""

import numpy as np
import pytest
import torch

from attend.client import Client

pytestmark = pytest.mark.slow  # the extra `test` does not install transformers


def tiny(kind: str):
    """A model of random weights, and its inputs with padding."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 31}
    tokens = torch.tensor([[5, 7, 11, 13, 2, 3, 29], [17, 19, 23, 4, 6, 0, 0]])
    inputs = {"input_ids": tokens, "attention_mask": (tokens > 0).long()}
    if kind == "bert":
        model = hf.BertModel(hf.BertConfig(**sizes))
    elif kind == "llama":
        model = hf.LlamaModel(hf.LlamaConfig(**sizes, num_key_value_heads=1))
    elif kind == "gemma2":
        layers = ["sliding_attention", "full_attention"]
        options = {"num_key_value_heads": 1, "head_dim": 10, "sliding_window": 3, "layer_types": layers, "attn_logit_softcapping": 2.0}
        model = hf.Gemma2Model(hf.Gemma2Config(**sizes, **options, query_pre_attn_scalar=7))
    else:
        model = hf.T5Model(hf.T5Config(d_model=24, d_kv=5, d_ff=17, num_layers=2, num_heads=3, vocab_size=31))
        inputs["decoder_input_ids"] = tokens[:, :5]
    return model.eval(), inputs


@pytest.mark.parametrize("kind", ["bert", "llama", "gemma2", "t5"])
def test_a_model_computes_the_same_with_the_service(server, kind):
    from attend.client.transformers import register

    model, inputs = tiny(kind)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
    with Client(server.url) as client, torch.no_grad():
        attention = register(client)
        model.set_attn_implementation("attend")
        got = model(**inputs)
        names = {layer.name for layer in client.layers()}
    assert any(name.startswith("transformers-3-") for name in names)
    error = (got.last_hidden_state - expected.last_hidden_state).abs().max() / expected.last_hidden_state.abs().max()
    assert error < 3e-5
    if kind == "t5":
        triples = zip(expected.encoder_attentions, expected.decoder_attentions, expected.cross_attentions, strict=True)
        assert len(attention.weights) == 2
        for index, by_layer in enumerate(triples):
            for mine, theirs in zip(attention.weights[index], by_layer, strict=True):
                np.testing.assert_allclose(mine, theirs.numpy(), atol=3e-5)
    else:
        for index, theirs in enumerate(expected.attentions):
            np.testing.assert_allclose(attention.weights[index][0], theirs.numpy(), atol=3e-5)


@pytest.mark.parametrize("kind", ["bert", "llama", "gemma2", "t5"])
def test_only_the_chosen_layers_are_sent(server, kind):
    """The others are computed as the model's eager attention computes them, with its soft caps, windows and biases."""
    from attend.client.transformers import register

    model, inputs = tiny(kind)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    with Client(server.url) as client, torch.no_grad():
        attention = register(client, layers=[1])
        model.set_attn_implementation("attend")
        got = model(**inputs).last_hidden_state
    assert list(attention.weights) == [1]
    real = inputs["attention_mask"][:, : got.shape[1]].bool()
    assert (got - expected)[real].abs().max() < 3e-5 * expected.abs().max()


def test_models_that_the_service_cannot_compute_are_refused(server):
    from attend.client.transformers import register

    model, inputs = tiny("llama")
    with Client(server.url) as client:
        attention = register(client)
        model.set_attn_implementation("attend")
        with pytest.raises(ValueError, match=r"torch\.no_grad"):
            model(**inputs)
        x = torch.zeros(1, 1, 2, 3)
        with pytest.raises(ValueError, match="s_aux"):
            attention(model, x, x, x, None, s_aux=torch.zeros(1))
