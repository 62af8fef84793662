"""What is refused as the arguments of a model, and what is said of texts that a model cannot read."""

from typing import Any

import numpy as np
import pytest
import torch

from attend.client.model_inputs import model_arguments
from attend.client.recording import one_pass
from attend.errors import InvalidRequest
from support.models import SIZES, TOKENS, filled

NESTED = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(5, 3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["a text", "another"], r"expected one text, or .*tokenizer\(texts, padding=True.* got a list of texts, at /inputs$"),
        (TOKENS, "got a Tensor, at /inputs$"),
        ("a text", "or a tokenizer with a text, got a text"),
        ({"input_ids": "a text"}, 'expected a tensor, as tokenizer.* got "a text", at /inputs/input_ids'),
        ({"input_ids": ["a", "text"]}, "expected a tensor, as tokenizer.* got a list of 2, at /inputs/input_ids"),
        ({"decoder_input_ids": np.zeros((1, 2))}, r"got a tensor of shape \[1, 2\], at /inputs/decoder_input_ids"),
        (
            {"input_ids": TOKENS, "attention_mask": [[1, 1], [1, 0]]},
            "expected a tensor, as tokenizer.* got a list of 2, at /inputs/attention_mask",
        ),
        ({"src": NESTED}, "expected a padded tensor, .* got a nested tensor, at /inputs/src"),
    ],
)
def test_what_is_neither_a_text_nor_arguments_is_refused(inputs: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        model_arguments(inputs, None)


def test_a_tokenizer_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match='or a tokenizer with a text, got a text, and "openai-community/gpt2" as the tokenizer'):
        model_arguments("a text", "openai-community/gpt2")


def bounded_model(family: str) -> Any:
    """A model with 13 positions, which fails in its own way for more."""
    import transformers as hf

    if family == "bert":
        return hf.BertModel(hf.BertConfig(**SIZES, max_position_embeddings=13))
    if family == "roberta":  # numbers its tokens from after the padding index
        return hf.RobertaModel(hf.RobertaConfig(**SIZES, max_position_embeddings=15, pad_token_id=1))
    if family == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=31, n_embd=24, n_layer=2, n_head=3, n_positions=13))
    if family == "gptj":
        return hf.GPTJModel(hf.GPTJConfig(vocab_size=31, n_embd=24, n_layer=2, n_head=3, rotary_dim=4, n_positions=13))
    if family == "opt":
        sizes = {"hidden_size": 24, "ffn_dim": 17, "num_hidden_layers": 2, "num_attention_heads": 3, "word_embed_proj_dim": 24}
        return hf.OPTModel(hf.OPTConfig(**sizes, vocab_size=31, max_position_embeddings=13))
    return hf.CLIPTextModel(hf.CLIPTextConfig(**SIZES, max_position_embeddings=13, eos_token_id=2))


@pytest.mark.slow  # the extra `test` does not install transformers
@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "gptj", "opt", "clip"])
def test_more_tokens_than_positions(family: str) -> None:
    model = filled(bounded_model(family))
    ids = torch.arange(14)[None] + 3
    one_pass(model, {"input_ids": ids[:, :13]})
    with pytest.raises(
        InvalidRequest, match="expected at most 13 tokens, which are the model's positions, got 14 tokens, at /inputs/input_ids"
    ):
        one_pass(model, {"input_ids": ids})


@pytest.mark.slow
def test_the_decoders_positions() -> None:
    import transformers as hf

    both = {"layers": 2, "attention_heads": 3, "ffn_dim": 17}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in both.items()}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"d_model": 24, "vocab_size": 31, "num_mel_bins": 5, "max_source_positions": 11, "max_target_positions": 13}
    model = filled(hf.WhisperModel(hf.WhisperConfig(**sides, **ends, **sizes)))
    with pytest.raises(InvalidRequest, match=r"at most 13 tokens, .* got 14 tokens, at /inputs/decoder_input_ids"):
        one_pass(model, {"input_features": torch.zeros(1, 5, 22), "decoder_input_ids": torch.arange(14)[None] + 3})


@pytest.mark.slow
def test_rotary_models_read_more_and_tokens_are_of_the_vocabulary() -> None:
    """Other failures keep their own words."""
    import transformers as hf

    model = filled(hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=1, max_position_embeddings=13)))
    one_pass(model, {"input_ids": torch.arange(14)[None]})
    with pytest.raises(InvalidRequest, match="expected ids of tokens below 31, the size of the model's vocabulary, got 31"):
        one_pass(model, {"input_ids": torch.arange(18, 32)[None]})
    with pytest.raises(RuntimeError, match="size"):
        one_pass(model, {"input_ids": torch.arange(14)[None], "attention_mask": torch.zeros(1, 1, 3, 5)})
