"""Captures: the attention layers of a model with the inputs that they got in it, against the model's own attention."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attend
from attend.client import Client
from attend.errors import InvalidRequest
from support.models import PADDED, SIZES, TOKENS, filled, own_attention

INDEXED = {"q_lora_rank": 6, "kv_lora_rank": 7, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5, "index_topk": 3}
INDEXED |= {"index_n_heads": 2, "index_head_dim": 8, "first_k_dense_replace": 2, "num_key_value_heads": 3}
BLOCKS = {"num_key_value_heads": 3, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "dense_intermediate_size": 17}
BLOCKS |= {
    "mlp_layer_types": ["dense", "dense"],
    "shared_intermediate_size": 17,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "rotary_dim": 4,
}
BLOCKS |= {"index_n_heads": 3, "index_head_dim": 8, "index_block_size": 2, "index_topk_blocks": 2}
FAMILIES = ["bert", "llama", "gemma2", "t5", "whisper"]


def tiny(family: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of transformers, and its inputs."""
    import transformers as hf

    if family == "bert":
        return filled(hf.BertModel(hf.BertConfig(**SIZES))), PADDED
    if family == "llama":
        return filled(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=1))), PADDED
    if family == "gemma2":
        options = {"num_key_value_heads": 1, "head_dim": 10, "sliding_window": 3, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0}
        layers = ["sliding_attention", "full_attention"]
        return filled(hf.Gemma2Model(hf.Gemma2Config(**SIZES, **options, layer_types=layers))), PADDED
    if family == "t5":
        config = hf.T5Config(d_model=24, d_kv=5, d_ff=17, num_layers=2, num_heads=3, vocab_size=31)
        return filled(hf.T5Model(config)), PADDED | {"decoder_input_ids": TOKENS[:, :5]}
    both = {"layers": 2, "attention_heads": 3, "ffn_dim": 17}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in both.items()}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"d_model": 24, "vocab_size": 31, "num_mel_bins": 5, "max_source_positions": 11, "max_target_positions": 13}
    sound = torch.from_numpy(np.random.default_rng(4).standard_normal((2, 5, 22)).astype(np.float32))
    inputs = {"input_features": sound, "decoder_input_ids": TOKENS[:, :5]}
    return filled(hf.WhisperModel(hf.WhisperConfig(**sides, **ends, **sizes))), inputs


@pytest.mark.slow  # the extra `test` does not install transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_the_service_repeats_the_weights_of_every_layer_of_a_model(server: Any, family: str) -> None:
    model, inputs = tiny(family)
    model.set_attn_implementation("sdpa" if family != "gemma2" else "eager")
    with Client(server.url) as client:
        captured = attend.capture(model, inputs, client, name=f"own-{family}")
        assert model.config._attn_implementation == ("sdpa" if family != "gemma2" else "eager")
        expected = own_attention(model, inputs)
        assert len(captured) == len(expected) and not captured.skipped
        for layer in captured.values():
            theirs = expected[layer.part if len(expected) > 2 else "", layer.number]
            assert theirs.std() > 0.03  # the heads attend sharply, so that another mask or scale would show
            mine = client.attend(**layer.request, layer=layer.name, outputs=["attention_weights"]).attention_weights
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
            assert layer.difference < 1e-5
            client.delete_layer(layer.name)
    assert list(captured) == [layer.name for layer in captured.values()]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "gte", "swin"])
def test_models_whose_files_have_other_names_are_captured(server: Any, family: str) -> None:
    """In memory ViT has other names than in its file, and GTE three matrices where its file has one; Swin hides shifted windows by -100."""
    import transformers as hf

    pixels = torch.from_numpy(np.random.default_rng(5).standard_normal((2, 2, 9, 9)).astype(np.float32))
    if family == "vit":
        model = filled(hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=9, patch_size=3, num_channels=2)))
        inputs = {"pixel_values": pixels}
    elif family == "swin":
        sizes = {"image_size": 9, "patch_size": 1, "num_channels": 2, "embed_dim": 6, "depths": [2], "num_heads": [3], "window_size": 4}
        model, inputs = filled(hf.SwinForImageClassification(hf.SwinConfig(**sizes))), {"pixel_values": pixels}
    else:
        model, inputs = filled(hf.GteForMaskedLM(hf.GteConfig(**SIZES))), PADDED
    with Client(server.url) as client:
        captured, expected = attend.capture(model, inputs, client, name="renamed"), own_attention(model, inputs)
        assert len(captured) == 2 and not captured.skipped
        for layer in captured.values():
            client.delete_layer(layer.name)
            assert layer.difference < 1e-5
            if family == "swin" and layer.number == 0:  # its model returns the weights of the last layer, the one with shifted windows
                continue
            theirs = expected["", 0 if family == "swin" else layer.number]
            np.testing.assert_allclose(layer.attention_weights, theirs, atol=1e-5)
            assert theirs.std() > 0.03


@pytest.mark.slow
@pytest.mark.parametrize("family", ["keys", "blocks"])
def test_keys_that_an_indexer_selects(server: Any, family: str) -> None:
    """DeepSeek 3.2 and MiniMax M3 leave the selection to their kernels, unless their attention is eager."""
    import transformers as hf

    inputs = {"input_ids": TOKENS}
    if family == "keys":
        model = filled(hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**SIZES, **INDEXED)))
    else:
        model = filled(hf.MiniMaxM3VLForCausalLM(hf.MiniMaxM3VLTextConfig(**SIZES, **BLOCKS)))
    expected = own_attention(model, inputs)
    assert (expected["", 1][:, :, -1] > 0).sum(-1).max() < 7
    with Client(server.url) as client:
        captured = attend.capture(model, inputs, client, name="indexed")
        for layer in captured.values():
            np.testing.assert_allclose(layer.attention_weights, expected["", layer.number], atol=1e-5)
            assert layer.difference < 1e-5
            client.delete_layer(layer.name)
        with attend.interventions(model, client) as study:
            run = study.run(inputs)
    for number, weights in enumerate(run.attention_weights):
        np.testing.assert_allclose(weights, expected["", number], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["differential", "sinks"])
def test_outputs_are_compared_where_a_model_returns_other_weights(server: Any, family: str) -> None:
    """DiffLlama returns the weights of one softmax, Granite those before its sinks; values are multiplied with others."""
    import transformers as hf

    if family == "differential":
        model = filled(hf.DiffLlamaModel(hf.DiffLlamaConfig(**SIZES | {"num_attention_heads": 4}, num_key_value_heads=2)))
    else:
        model = filled(hf.GraniteSWAModel(hf.GraniteSWAConfig(**SIZES, num_key_value_heads=3, sliding_window=3)))
    with Client(server.url) as client:
        captured, own = attend.capture(model, PADDED, client, name="other"), own_attention(model, PADDED)
        for layer in captured.values():
            assert layer.difference < 1e-5
            mine = client.attend(**layer.request, layer=layer.name)
            theirs = layer.output
            np.testing.assert_allclose(mine.output, theirs, atol=1e-5 * np.abs(theirs).max())
            np.testing.assert_array_equal(layer.attention_weights, mine.attention_weights)
            weights = own["", layer.number]
            assert weights.shape != mine.attention_weights.shape or np.abs(weights - mine.attention_weights).max() > 0.01
            client.delete_layer(layer.name)


@pytest.mark.slow
def test_the_words_of_a_tokenizer_and_masks_in_few_fields(server: Any) -> None:
    model, inputs = tiny("llama")

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return f" w{ids[0]}"

    with Client(server.url) as client:
        captured = attend.capture(model, inputs, client, tokenizer=Tokenizer(), name="words")
        single = attend.capture(model, {"input_ids": TOKENS[:1]}, client, name="words")
        own = captured["words-1"].request
        assert own["tokens"] == {"query": [[f"w{i}" for i in row] for row in TOKENS.tolist()]}
        assert own["causal"] is True and "attend_mask" not in own
        np.testing.assert_array_equal(own["attend_keys"], TOKENS > 0)
        assert single["words-0"].request.keys() == {"query", "causal", "tokens"} and single["words-0"].request["query"].shape == (7, 24)
        only = attend.capture(model, inputs, client, name="words", layers=[1])
        assert list(only) == ["words-1"] and list(client.layers())  # the others stay as they are
        for wrong, got in (([0, 2], r"\[0, 2\]"), ([], r"\[\]"), (1, "1")):
            with pytest.raises(InvalidRequest, match=rf"expected numbers of its layers, of \[0, 1\], got {got}, at /layers"):
                attend.capture(model, inputs, client, layers=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="tokenizer"):
            attend.capture(model, "a text", client)
        for name in captured:
            client.delete_layer(name)


@pytest.mark.slow
def test_layers_that_share_their_weights_have_their_own_inputs(server: Any) -> None:
    """ALBERT calls one module for each of its layers."""
    import transformers as hf

    model = filled(hf.AlbertModel(hf.AlbertConfig(**SIZES, embedding_size=5)))
    with Client(server.url) as client:
        captured = attend.capture(model, PADDED, client, name="shared")
        expected = own_attention(model, PADDED)
        for layer in captured.values():
            np.testing.assert_allclose(layer.attention_weights, expected["", layer.number], atol=1e-5)
            assert layer.difference < 1e-5
            client.delete_layer(layer.name)
    first, second = (layer.request["query"] for layer in captured.values())
    assert np.abs(first - second).max() > 0.1


class Own(nn.Module):
    """Causal attention that someone wrote, between names that a layout has."""

    def __init__(self, heads: int, causal: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(14, 14) for _ in range(4))
        self.num_heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        projected: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected


@pytest.mark.parametrize("causal", [False, True])
def test_a_module_of_ones_own_is_captured_by_its_names(client: Client, causal: bool) -> None:
    """Whether it is causal is found by comparing outputs."""
    model = filled(nn.Sequential(Own(7, causal), nn.LayerNorm(14), Own(2, causal)))
    x = torch.randn(3, 5, 14)
    captured = attend.capture(model, {"input": x}, client, name="own", layout="vit")
    assert list(captured) == ["own-0", "own-1"]
    for layer in captured.values():
        assert layer.request.get("causal", False) is causal and layer.difference < 1e-4
        client.delete_layer(layer.name)
    np.testing.assert_array_equal(captured["own-0"].request["query"], x)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_transformer_is_captured_with_its_masks(client: Client, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(14, 7, 11, batch_first=batch_first)
    model = filled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).train()
    x = torch.randn(3, 5, 14)
    padding = torch.arange(5)[None] >= torch.tensor([[5], [3], [4]])
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    inputs = {"src": x if batch_first else x.transpose(0, 1), "mask": causal.isinf(), "src_key_padding_mask": padding}
    captured = attend.capture(model, inputs, client, name="torch")
    assert model.training  # as before
    model.eval()
    for number, own in enumerate(captured.values()):
        assert own.difference < 1e-4
        query = torch.from_numpy(own.request["query"])
        rows = query if batch_first else query.transpose(0, 1)
        _, theirs = model.layers[number].self_attn(
            rows, rows, rows, key_padding_mask=padding, attn_mask=causal.isinf(), average_attn_weights=False
        )
        np.testing.assert_allclose(own.attention_weights, theirs.detach(), atol=1e-5)
        client.delete_layer(own.name)


def test_a_capture_is_a_file_and_shown_in_a_notebook(client: Client, tmp_path: Path, captured: Callable[[], attend.Capture]) -> None:
    one = captured()
    two = attend.Capture.load(one.save(tmp_path / "own.safetensors"))
    assert list(two) == list(one) and two.name == one.name and two.skipped == one.skipped
    for name, layer in two.items():
        assert (layer.spec, layer.fingerprint, layer.difference, layer.part) == (
            one[name].spec,
            one[name].fingerprint,
            one[name].difference,
            one[name].part,
        )
        assert layer.request.keys() == one[name].request.keys()
        np.testing.assert_array_equal(layer.request["query"], one[name].request["query"])
        client.delete_layer(name)
    again = two.put(client)  # on a server without the layers
    assert {name: layer.fingerprint for name, layer in again.items()} == {name: layer.fingerprint for name, layer in one.items()}
    assert again.difference == one.difference < 1e-5  # the file has what the layers gave in the model
    changed = two["own-1"].output.copy()
    changed[4, 13] += np.abs(changed).max()
    wrong = replace(two, layers={**two.layers, "own-1": replace(two["own-1"], output=changed)}).put(client)
    assert wrong["own-0"].agrees and wrong["own-1"].difference > 0.1
    html = one._repr_html_()
    assert html.count("<figure") == 2 and "own-0" in html and "largest difference" in html
    plain = tmp_path / "plain.safetensors"
    plain.write_bytes(client.layer_file("own-0"))
    with pytest.raises(InvalidRequest, match="attend capture"):
        attend.Capture.load(plain)
    for name in one:
        client.delete_layer(name)


@pytest.fixture
def captured(client: Client) -> Callable[[], attend.Capture]:
    """Captures a small module with two layers."""
    model = filled(nn.Sequential(Own(2, False), Own(2, False)))
    return lambda: attend.capture(model, {"input": torch.randn(1, 5, 14)}, client, name="own", layout="vit")


@pytest.mark.slow
def test_an_output_of_more_than_the_layer_is_not_kept(server: Any, tmp_path: Path) -> None:
    """The weights agree, so the layer does. Its file has nothing that another service could be compared with."""
    import transformers as hf

    model = filled(hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=1)))
    model.layers[0].self_attn.o_proj.register_forward_hook(lambda _, args, result: result * 2)
    with Client(server.url) as client:
        captured = attend.capture(model, PADDED, client, name="more")
        assert captured.difference < 1e-5 and captured["more-0"].output is None and captured["more-1"].output is not None
        again = attend.Capture.load(captured.save(tmp_path / "more.safetensors")).put(client)
        assert np.isnan(again["more-0"].difference) and again["more-1"].difference < 1e-5
        for name in captured:
            client.delete_layer(name)


def test_what_python_prints_of_a_captured_layer_is_one_line(client: Client, captured: Callable[[], attend.Capture]) -> None:
    one = captured()
    assert repr(one["own-1"]).startswith("CapturedLayer('own-1', layer 1, 2 heads, 5 queries, 5 keys, request ['query'], difference ")
    assert len(repr(one)) < 100 and len(repr(dict(one))) < 400
    for name in one:
        client.delete_layer(name)


def test_a_difference_that_is_not_known_is_no_number(client: Client, captured: Callable[[], attend.Capture]) -> None:
    one = captured()
    own = one["own-1"]
    blocked = replace(own, request={**own.request, "block_keys": np.ones(5, bool)})
    for layer, why in ((blocked, "unknown: no row sees a key"), (replace(own, output=None, attention_weights=None), "unknown")):
        again = replace(one, layers={"own-0": one["own-0"], "own-1": layer}).put(client)
        assert np.isnan(again.difference) and repr(again) == f"Capture('own', 2 layers, largest difference {why})"
        assert repr(again["own-1"]).endswith(f", difference {why})")
        html = again._repr_html_()
        assert f"largest difference from the model {why}<" in html and f"own-1 is not compared with the model: {why}<" in html
    for name in one:
        client.delete_layer(name)


def test_what_differs_from_the_model_is_said(client: Client) -> None:
    """A module that does more than its names say."""

    class Scaled(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = filled(Scaled(2, False))
    model.o_proj.register_forward_hook(lambda _, args, result: result * 2)
    captured = attend.capture(model, {"x": torch.randn(1, 5, 14)}, client, name="more", layout="vit")
    assert captured.difference > 0.1 and not captured["more-0"].agrees
    assert "more-0 differs from the model" in captured._repr_html_()
    client.delete_layer("more-0")
    with pytest.raises(InvalidRequest, match="known layout"):
        attend.capture(nn.Linear(3, 3), {"input": torch.randn(1, 5, 3)}, client)
