"""What is recorded of a pass: padding, masks of booleans, positions, nested tensors; against the model's own attention."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attend
from attend.client import Client
from attend.errors import InvalidRequest
from support.models import PADDED, SIZES, TOKENS, filled, own_attention

LEFT = {"input_ids": TOKENS, "attention_mask": torch.tensor([[1] * 7, [0] * 3 + [1] * 4])}  # the first rows of the second item see no key
SHARED = torch.tensor([[0, 1, 2, 3, 4, 3, 4], [0, 1, 2, 3, 2, 3, 4]])  # positions behind a prefix that two continuations share
PREFIXES = (3, 2)


def padded_model(family: str) -> Any:
    """A model, each of which does something else in the rows of padding. DeBERTa's masks say that these see no key."""
    import transformers as hf

    one = {"vocab_size": 31, "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
    if family == "bloom":
        return filled(hf.BloomForCausalLM(hf.BloomConfig(vocab_size=31, hidden_size=24, n_layer=2, n_head=3)))
    if family == "mpt":
        return filled(hf.MptForCausalLM(hf.MptConfig(vocab_size=31, d_model=24, n_layers=2, n_heads=3, max_seq_len=13)))
    if family == "falcon":
        own = {"multi_query": False, "new_decoder_architecture": False, "attn_implementation": "eager"}  # set later, it would not be taken
        return filled(hf.FalconForCausalLM(hf.FalconConfig(**one, **own)))
    if family.startswith("deberta"):
        own = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 9}
        both = {"deberta": (hf.DebertaModel, hf.DebertaConfig), "deberta_v2": (hf.DebertaV2Model, hf.DebertaV2Config)}
        model, config = both[family]
        return filled(model(config(**SIZES, **own)))
    sizes = {"head_dim": 10, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 3}
    return filled(hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES | {"intermediate_size": 20}, **sizes)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon", "gpt_oss", "deberta", "deberta_v2"])
def test_rows_of_padding_do_not_count_as_differences(server: Any, family: str) -> None:
    model = padded_model(family)
    with Client(server.url) as client:
        captured, own = attend.capture(model, LEFT, client, name="left"), own_attention(model, LEFT)
        assert len(captured) == 2 and not captured.skipped
        for layer in captured.values():
            mine = client.attend(**layer.request, layer=layer.name).attention_weights
            theirs = own["", layer.number]
            assert theirs.std() > 0.03
            np.testing.assert_allclose(mine[0], theirs[0], atol=1e-5)
            np.testing.assert_allclose(mine[1, :, 3:], theirs[1, :, 3:], atol=1e-5)
            assert layer.difference < 1e-5
            assert layer.request.get("fully_masked", "zero") == ("zero" if family == "gpt_oss" else "uniform")
            client.delete_layer(layer.name)


@pytest.mark.slow
def test_a_difference_in_one_row_of_a_padded_batch_counts(server: Any) -> None:
    """The row of one token is changed behind the layer, among rows of padding that do not count."""
    model = padded_model("bloom")
    model.transformer.h[0].self_attention.dense.register_forward_hook(lambda _, args, result: result + 9 * row)
    row = torch.zeros(2, 7, 1)
    row[1, 3] = 1
    with Client(server.url) as client:
        captured = attend.capture(model, LEFT, client, name="changed")
        assert captured["changed-0"].difference > 0.1 and captured["changed-1"].difference < 1e-5
        for name in captured:
            client.delete_layer(name)


class Masked(nn.Module):
    """Attention that someone wrote with a mask of pairs, 1 for visible; `blocks_rows`: of padding also as queries, as DeBERTa does."""

    def __init__(self, blocks_rows: bool) -> None:
        super().__init__()
        self.attention, self.blocks_rows = PairMasked(), blocks_rows

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        keys = attention_mask[:, None, None].expand(-1, 1, x.shape[1], -1)
        attended: torch.Tensor = self.attention(x, keys * attention_mask[:, None, :, None] if self.blocks_rows else keys)
        return attended


class PairMasked(nn.Module):
    """One head."""

    num_heads = 1

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(14, 14) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.q_proj(x) @ self.k_proj(x).mT / 14**0.5
        weights = scores.masked_fill(mask[:, 0] == 0, torch.finfo(x.dtype).min).softmax(-1)
        projected: torch.Tensor = self.o_proj(weights @ self.v_proj(x))
        return projected


@pytest.mark.parametrize("blocks_rows", [True, False])
def test_rows_of_padding_count_unless_the_modules_own_mask_blocks_them(client: Client, blocks_rows: bool) -> None:
    """A mask among the arguments of the layer's module says which. A row of padding is changed behind the layer."""
    model, padding = filled(Masked(blocks_rows)), torch.tensor([[1] * 5, [1] * 3 + [0] * 2, [0] + [1] * 4])
    inputs = {"x": torch.randn(3, 5, 14), "attention_mask": padding}
    same = attend.capture(model, inputs, client, name="pairs", layout="vit")
    assert same.difference < 1e-5
    visible = same["pairs-0"].request["attend_mask" if blocks_rows else "attend_keys"]
    np.testing.assert_array_equal(visible, padding[:, None] * padding[:, :, None] if blocks_rows else padding)
    mine = client.attend(**same["pairs-0"].request, layer="pairs-0", outputs=["output"]).output
    np.testing.assert_allclose(mine, same["pairs-0"].output, atol=1e-4)  # also in rows without keys
    row = torch.zeros(3, 5, 1)
    row[1, 4] = 9
    model.attention.o_proj.register_forward_hook(lambda _, args, result: result + row)
    changed = attend.capture(model, inputs, client, name="pairs", layout="vit")
    client.delete_layer("pairs-0")
    assert changed.difference < 1e-5 if blocks_rows else changed.difference > 0.1


class BatchSecond(nn.Module):
    """Tokens [b, n], whose rows the attention gets as [n, b, width], or every second of them."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.embedding, self.attention, self.step = nn.Embedding(31, 14), RowsFirst() if step == 1 else PairMasked(), step

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(input_ids)[:, :: self.step]
        attended: torch.Tensor = self.attention(
            rows if self.step > 1 else rows.transpose(0, 1), attention_mask[:, None, None, :: self.step]
        )
        return attended


class RowsFirst(PairMasked):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qbd,kbd->bqk", self.q_proj(x), self.k_proj(x)) / 14**0.5
        weights = scores.masked_fill(mask[:, 0] == 0, torch.finfo(x.dtype).min).softmax(-1)
        projected: torch.Tensor = self.o_proj(torch.einsum("bqk,kbd->qbd", weights, self.v_proj(x)))
        return projected


@pytest.mark.parametrize("items", [2, 1])
def test_a_layer_that_has_the_batch_second_is_recorded_with_the_batch_first(client: Client, items: int) -> None:
    model, inputs = filled(BatchSecond(1)), {name: tensor[-items:] for name, tensor in PADDED.items()}
    captured = attend.capture(model, inputs, client, name="second", layout="vit")
    client.delete_layer("second-0")
    expected = model.embedding(inputs["input_ids"]).detach()
    np.testing.assert_array_equal(captured["second-0"].request["query"], expected if items == 2 else expected[0])
    assert captured.difference < 1e-5


def test_a_mask_of_other_rows_than_those_of_the_layer_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"expected a mask of the layer's 2 batch items and 4 keys, got \[2, 7\], at /inputs"):
        attend.capture(filled(BatchSecond(2)), PADDED, client, layout="vit")


@pytest.mark.slow
def test_fsmt_has_the_batch_second(server: Any) -> None:
    import transformers as hf

    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in {"layers": 1, "attention_heads": 3, "ffn_dim": 17}.items()
    }
    config = hf.FSMTConfig(langs=["en", "de"], src_vocab_size=31, tgt_vocab_size=31, d_model=24, **sides)
    with Client(server.url) as client:
        inputs = PADDED | {"decoder_input_ids": TOKENS[:, :5], "use_cache": False}
        captured = attend.capture(filled(hf.FSMTModel(config)), inputs, client, name="fsmt")
        for name in captured:
            client.delete_layer(name)
    assert list(captured) == ["fsmt-encoder-0", "fsmt-decoder-0", "fsmt-cross-0"] and captured.difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("items", [2, 1])
def test_xlnet_is_refused(client: Client, items: int) -> None:
    """Its module gives the output after the residual and a norm, so that nothing is known to compare with."""
    import transformers as hf

    model = filled(hf.XLNetModel(hf.XLNetConfig(vocab_size=31, d_model=24, n_layer=2, n_head=3, d_inner=17)))
    inputs = {name: tensor[-items:] for name, tensor in PADDED.items()}
    with pytest.raises(
        InvalidRequest, match=rf"expected a layer that gets rows .*, got rows \[7, {items}, 24\] in a XLNetRelativeAttention$"
    ):
        attend.capture(model, inputs, client)


def shared_prefix() -> torch.Tensor:
    """bool [2, 1, 7, 7]: a causal mask in which the second continuation does not see the first."""
    visible = torch.ones(7, 7).tril().bool().repeat(2, 1, 1)
    for item, prefix in enumerate(PREFIXES):
        second = 5 if item == 0 else 4
        visible[item, second:, prefix:second] = False
    return visible[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_of_booleans_is_what_the_models_attention_makes_of_it(server: Any, implementation: str) -> None:
    """Fused kernels hide keys with False. Eager code adds booleans as numbers, which the request does not repeat, and that is said."""
    import transformers as hf

    model = filled(hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=1)))
    inputs = {"input_ids": TOKENS, "attention_mask": shared_prefix()}
    outputs: list[torch.Tensor] = []
    model.set_attn_implementation(implementation)
    handle = model.layers[0].self_attn.register_forward_hook(lambda _, args, result: outputs.append(result[0]))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    with Client(server.url) as client:
        layer = attend.capture(model, inputs, client, name="booleans", layers=[0])["booleans-0"]
        mine = client.attend(**layer.request, layer=layer.name).output
        client.delete_layer(layer.name)
    error = np.abs(mine - outputs[0].numpy()).max() / outputs[0].abs().max()
    assert error < 1e-5 and layer.difference < 1e-5 if implementation == "sdpa" else error > 0.1 and layer.difference > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_positions_that_the_model_got_are_in_the_request(server: Any, family: str) -> None:
    """GPT-J rotates by them without a module of its own for that."""
    import transformers as hf

    if family == "llama":
        model: Any = filled(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=1)))
    else:
        model = filled(hf.GPTJForCausalLM(hf.GPTJConfig(vocab_size=31, n_embd=24, n_layer=2, n_head=3, rotary_dim=4, n_positions=13)))
    hidden = torch.zeros(2, 1, 7, 7).masked_fill(~shared_prefix(), torch.finfo(torch.float32).min)
    inputs = {"input_ids": TOKENS, "attention_mask": hidden, "position_ids": SHARED}
    with Client(server.url) as client:
        captured, own = attend.capture(model, inputs, client, name="placed"), own_attention(model, inputs)
        for layer in captured.values():
            np.testing.assert_array_equal(layer.request["positions"], SHARED)
            mine = client.attend(**layer.request, layer=layer.name).attention_weights
            np.testing.assert_allclose(mine, own["", layer.number], atol=1e-5)
            in_order = {name: value for name, value in layer.request.items() if name != "positions"}
            moved = client.attend(**in_order, layer=layer.name).attention_weights
            assert np.abs(moved - mine).max() > 0.1 and layer.difference < 1e-5
        plain = attend.capture(model, {"input_ids": TOKENS, "position_ids": torch.arange(7)[None]}, client, name="placed")
        assert all("positions" not in layer.request for layer in plain.values())
        for name in captured:
            client.delete_layer(name)


@pytest.mark.parametrize("nested", [False, True])
def test_torchs_encoder_with_padding_is_recorded_beside_its_fast_path(client: Client, nested: bool) -> None:
    """With this mask it packs the rows into a nested tensor, unless that is switched off."""
    layer = nn.TransformerEncoderLayer(14, 2, 11, batch_first=True)  # of an even number of heads
    model = filled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested))
    x, padding = torch.randn(3, 5, 14), torch.arange(5)[None] >= torch.tensor([[5], [3], [4]])
    captured = attend.capture(model, {"src": x, "src_key_padding_mask": padding}, client, name="packed")
    assert torch.backends.mha.get_fastpath_enabled()  # as before
    assert len(captured) == 2 and captured.difference < 1e-4
    for number, own in enumerate(captured.values()):
        np.testing.assert_array_equal(np.isinf(own.request["bias"][:, 0, 0]), padding)
        rows = torch.from_numpy(own.request["query"])
        _, theirs = model.layers[number].self_attn(rows, rows, rows, key_padding_mask=padding, average_attn_weights=False)
        np.testing.assert_allclose(own.attention_weights, theirs.detach(), atol=1e-5)
        client.delete_layer(own.name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["past", "fixed"])
def test_keys_of_a_cache_are_refused(server: Any, kind: str) -> None:
    import transformers as hf

    model = filled(hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=1)))
    with torch.no_grad():
        past = model(input_ids=TOKENS[:, :3], use_cache=True).past_key_values
    cache, expected = (past, "a cache of 3 rows") if kind == "past" else (hf.StaticCache(model.config, max_cache_len=11), "a fixed length")
    with Client(server.url) as client:
        with pytest.raises(InvalidRequest, match=rf"in one pass without past_key_values.*{expected}"):
            attend.capture(model, {"input_ids": TOKENS[:, 3:], "past_key_values": cache}, client)
        empty = {"input_ids": TOKENS, "past_key_values": hf.DynamicCache(config=model.config)}
        captured = attend.capture(model, empty, client, name="cached")
        assert captured.difference < 1e-5
        for name in captured:
            client.delete_layer(name)


def test_a_model_that_is_none_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"expected a model, as AutoModel.from_pretrained.* got the text .openai"):
        attend.capture("openai-community/gpt2", {"input_ids": TOKENS}, client)
    with pytest.raises(InvalidRequest, match="got a dict, at /model"):
        attend.capture({}, {"input_ids": TOKENS}, client)


@pytest.mark.slow
def test_positions_on_several_axes(server: Any) -> None:
    """Of an image of 2 x 3 patches between tokens: rows and columns in the vision part, with time in the decoder."""
    import transformers as hf

    text = {**SIZES, "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    image = {"depth": 1, "embed_dim": 24, "num_heads": 3, "hidden_size": 24, "mlp_ratio": 2, "patch_size": 2, "in_channels": 2}
    image |= {"spatial_merge_size": 1, "temporal_patch_size": 1}
    marks = {"image_token_id": 5, "vision_start_token_id": 6, "video_token_id": 7, "vision_end_token_id": 8}
    model = filled(hf.Qwen2VLModel(hf.Qwen2VLConfig(text_config=text, vision_config=image, **marks)))
    pixels = torch.from_numpy(np.random.default_rng(8).standard_normal((6, 8)).astype(np.float32))
    inputs = {"input_ids": torch.tensor([[6, *[5] * 6, 8, 11]]), "mm_token_type_ids": torch.tensor([[0, *[1] * 6, 0, 0]])}
    inputs |= {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 3]])}
    with Client(server.url) as client:
        captured = attend.capture(model, inputs, client, name="axes")
        assert list(captured) == ["axes-vision-0", "axes-decoder-0", "axes-decoder-1"] and captured.difference < 1e-5
        for name in captured:
            client.delete_layer(name)
    grid = [[row, column] for row in range(2) for column in range(3)]
    np.testing.assert_array_equal(captured["axes-vision-0"].request["positions"], grid)
    expected = [[0] * 3, *([1, 1 + row, 1 + column] for row, column in grid), [4] * 3, [5] * 3]
    np.testing.assert_array_equal(captured["axes-decoder-1"].request["positions"], expected)
