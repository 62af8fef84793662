"""Models of transformers with their attention in a service, against their own eager attention."""

import gc

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
    elif kind == "gpt_oss":
        options = {
            "num_key_value_heads": 1,
            "head_dim": 10,
            "sliding_window": 3,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "experts_implementation": "eager",
        }
        model = hf.GptOssModel(hf.GptOssConfig(**sizes, **options))
        for layer in model.layers:
            layer.self_attn.sinks.data = torch.randn(3)
    elif kind == "gemma2":
        layers = ["sliding_attention", "full_attention"]
        options = {"num_key_value_heads": 1, "head_dim": 10, "sliding_window": 3, "layer_types": layers, "attn_logit_softcapping": 2.0}
        model = hf.Gemma2Model(hf.Gemma2Config(**sizes, **options, query_pre_attn_scalar=7))
    else:
        model = hf.T5Model(hf.T5Config(d_model=24, d_kv=5, d_ff=17, num_layers=2, num_heads=3, vocab_size=31))
        inputs["decoder_input_ids"] = tokens[:, :5]
    return model.eval(), inputs


KINDS = ["bert", "llama", "gpt_oss", "gemma2", "t5"]


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
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
        with pytest.raises(ValueError, match="sinks of each query"):
            attention(model, x, x, x, None, sinks=torch.zeros(1))


def test_a_model_with_attention_code_of_its_own_is_refused_when_it_is_made(server):
    """BLOOM would ignore the implementation, and Falcon has no class of this name. Both can be made with another one."""
    import transformers as hf

    from attend.client.transformers import register

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 31}
    with Client(server.url) as client:
        register(client)
        register(client)
    for config in (hf.BloomConfig(hidden_size=24, n_layer=1, n_head=3, vocab_size=31), hf.FalconConfig(**sizes, alibi=True)):
        with pytest.raises(ValueError, match=r"needs a model that calls the attention functions .* is code of its own"):
            hf.AutoModelForCausalLM.from_config(config, attn_implementation="attend")
        hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_weights_are_those_of_the_last_calls(server):
    """Of each module; of more calls if they are asked for, as where layers share a module. Those of a model that is gone go."""
    from attend.client.transformers import register

    model, inputs = tiny("t5")
    kept = []
    with Client(server.url) as client, torch.no_grad():
        for n_calls in (1, 2):
            attention = register(client, calls_per_module=n_calls)
            model.set_attn_implementation("attend")
            for n in (5, 1, 3, 2):
                model(**inputs | {"decoder_input_ids": inputs["decoder_input_ids"][:, :n]})
            kept.append(attention)
    shapes = [{index: [array.shape[2:] for array in arrays] for index, arrays in one.weights.items()} for one in kept]
    assert shapes[0] == {key: [(7, 7), (2, 2), (2, 7)] for key in (0, 1)}
    assert shapes[1] == {key: [(7, 7), (7, 7), (3, 3), (2, 2), (3, 7), (2, 7)] for key in (0, 1)}
    del model
    gc.collect()
    assert attention.weights == {}


def test_a_layer_that_the_service_has_lost_is_put_again(server):
    """As after a restart."""
    from attend.client.transformers import register

    model, inputs = tiny("gpt_oss")
    with Client(server.url) as client, torch.no_grad():
        register(client)
        model.set_attn_implementation("attend")
        expected = model(**inputs).last_hidden_state
        made = {layer.name for layer in client.layers() if layer.name.startswith("transformers-3-1-10-10-")}
        assert len(made) == 2  # each layer has sinks of its own
        for name in made:
            client.delete_layer(name)
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected, rtol=0, atol=0)
        for name in made:
            client.delete_layer(name)


def test_a_model_in_float64_is_computed_in_float64(server):
    from attend.client.transformers import register

    model, inputs = tiny("llama")
    model = model.double()
    model.set_attn_implementation("sdpa")  # Llama's eager attention has a softmax in float32
    with Client(server.url) as client, torch.no_grad():
        expected = model(**inputs).last_hidden_state
        attention = register(client)
        model.set_attn_implementation("attend")
        got = model(**inputs).last_hidden_state
    assert attention.weights[0][0].dtype == np.float64
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
