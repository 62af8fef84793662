"""`attend heads FOLDER --text`: the map of what each head does to a model's answer, against `attend.interventions` and eager code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attend.client.captures import Capture
from support.command import run_attend

pytestmark = pytest.mark.slow  # the extra `test` does not install transformers
WORDS = ["[UNK]", "[MASK]", "anna", "ben", "gave", "the", "book", "to", "tom", "and", "went"]
TEXTS = {"gpt2": "anna gave the book to", "bert": "anna gave the [MASK] to ben"}


@pytest.fixture(scope="module", params=TEXTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model as `save_pretrained` writes it, with a tokenizer of whole words, and its text."""
    import transformers as hf

    torch.manual_seed(1)
    if request.param == "gpt2":
        model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=len(WORDS), n_embd=24, n_layer=2, n_head=3, n_positions=11))
    else:
        sizes = {"hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 2, "num_attention_heads": 3}
        model = hf.BertForMaskedLM(hf.BertConfig(**sizes, vocab_size=len(WORDS)))
    path = tmp_path_factory.mktemp(request.param)
    return path, save_model(path, model), TEXTS[request.param]


def save_model(path: Path, model: Any) -> Any:
    """The model with drawn parameters, which is saved with a tokenizer of whole words."""
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(path)
    hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", mask_token="[MASK]").save_pretrained(path)
    return model.eval()


def test_the_map_is_the_change_of_the_log_probability_without_each_head(folder: tuple[Path, Any, str]) -> None:
    path, model, text = folder
    done = run_attend("heads", str(path), "--text", text, "--token", "tom", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
    position = text.split().index("[MASK]") if "[MASK]" in text else 4
    assert (document["token"], document["position"], len(document["layers"])) == ("tom", position, 2)

    def log_probability() -> float:
        with torch.no_grad():
            return float(torch.log_softmax(model(input_ids=ids).logits[0, position].double(), -1)[WORDS.index("tom")])

    plain = log_probability()
    assert document["probability"] == pytest.approx(np.exp(plain), rel=1e-4)
    for layer in range(2):
        is_gpt = model.config.model_type == "gpt2"
        projection = model.transformer.h[layer].attn.c_proj if is_gpt else model.bert.encoder.layer[layer].attention.output.dense
        for head in range(3):
            off = torch.ones(3, 8)
            off[head] = 0
            handle = projection.register_forward_pre_hook(lambda _, values, off=off: (values[0] * off.flatten(),))
            assert document["effects"][layer][head] == pytest.approx(log_probability() - plain, abs=1e-4)
            handle.remove()


def test_a_capture_has_the_map_and_the_layers(folder: tuple[Path, Any, str], tmp_path: Path) -> None:
    path, _, text = folder
    file = tmp_path / "own.safetensors"
    done = run_attend("heads", str(path), "--text", text, "--token", "tom", "--json", "--capture", str(file))
    assert done.returncode == 0, done.stderr
    document, captured = json.loads(done.stdout), Capture.load(file)
    assert captured.effects == {
        "answer": "tom",
        "probability": document["probability"],
        "change": dict(zip(captured, document["effects"], strict=True)),
    }
    assert document["file"] == str(file)
    assert len(captured) == 2 and all(layer.agrees and layer.request["tokens"]["query"] == text.split() for layer in captured.values())


def test_the_table_is_of_the_most_likely_token(folder: tuple[Path, Any, str]) -> None:
    path, _, text = folder
    done = run_attend("heads", str(path), "--text", text)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    place = "at token 3, the mask: 0." if "[MASK]" in text else "after token 4 ('to'): 0."
    assert lines[0].startswith("probability of '") and place in lines[0]
    assert [line.split()[0] for line in lines if line.split() and line.split()[0].isdigit()] == ["0", "1"]


@pytest.mark.parametrize("heads", [1, 12, 32])
def test_every_number_is_printed_in_eighty_columns(heads: int, tmp_path: Path) -> None:
    """The heads that do not fit beside each other are below. The file is written beside the table, which says so."""
    import transformers as hf

    save_model(tmp_path, hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=len(WORDS), n_embd=4 * heads, n_layer=2, n_head=heads, n_positions=7)))
    file, command = tmp_path / "own.safetensors", ["heads", str(tmp_path), "--text", "anna gave the book", "--token", "tom"]
    effects = np.array(json.loads(run_attend(*command, "--json").stdout)["effects"])

    done = run_attend(*command, "--capture", str(file), env={"COLUMNS": "80"})

    *lines, last = done.stdout.decode().splitlines()
    assert last == f"Wrote {file}: drop it on the page of the server that `attend serve` starts." and Capture.load(file).effects
    table = lines[lines.index("") :]
    assert max(map(len, table)) <= 80
    printed: dict[str, list[str]] = {}
    for line in filter(None, table):
        label, *cells = line.replace("head ", "head-").split()
        printed.setdefault(label, []).extend(cells)
    assert printed.pop("layer") == [f"head-{head}" for head in range(heads)]
    assert printed == {str(layer): [f"{number:.3f}" for number in numbers] for layer, numbers in enumerate(effects)}


def test_models_that_cannot_be_studied_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """Each in one line and a hint, with the code of wrong usage: by its task, its input, or its attention code."""
    import transformers as hf

    sizes = {"hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 1, "num_attention_heads": 3}
    sides = {f"{side}_{n}": x for side in ("encoder", "decoder") for n, x in {"layers": 1, "attention_heads": 3, "ffn_dim": 17}.items()}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = {"d_model": 24, "num_mel_bins": 5, "max_source_positions": 11, "max_target_positions": 13}
    falcon = hf.FalconConfig(vocab_size=11, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, alibi=True)
    vit = hf.ViTConfig(**sizes, image_size=9, patch_size=3)
    cases: list[tuple[Any, str]] = [
        (hf.ViTForImageClassification(vit), "expected a model that predicts tokens"),
        (hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sides, **ends, **whisper, vocab_size=11)), "which reads input_features"),
        (hf.FalconForCausalLM(falcon), "the attention of FalconForCausalLM is code of its own, so its heads cannot be switched off"),
    ]
    for i, (model, message) in enumerate(cases):
        save_model(tmp_path / str(i), model)
        done = run_attend("heads", str(tmp_path / str(i)), "--text", "anna gave")
        first, *hints = done.stderr.decode().splitlines()
        assert (done.returncode, done.stdout) == (2, b"") and message in first
        assert len(hints) <= 1 and "Traceback" not in first


def test_refusals_of_folders(folder: tuple[Path, Any, str], tmp_path: Path) -> None:
    path, _, text = folder
    for arguments, code, message in (
        ([str(path)], 2, "--text"),
        ([str(path), "--text", text, "--token", "tom and"], 2, "one token"),
        ([str(path), "--text", text, "--target", "ben"], 2, "--target has no use"),
        ([str(path), "--text", text, "--token", "pear"], 2, "expected one token in --token, got ['[UNK]']"),
        ([str(path), "--text", text + " the" * 600], 1, "tokens, which are the model's positions, got 60"),
        ([str(path), "--text", ""], 1, "a text with tokens"),
        ([str(path), "--text", text, "--capture", str(tmp_path / "absent" / "x.safetensors")], 1, "cannot write"),
        ([str(tmp_path), "--text", text], 2, "it has no config.json"),
        (["-", "--text", text], 2, "folder of a model"),
    ):
        done = run_attend("heads", *arguments, stdin=b"{}")
        assert (done.returncode, "Traceback" in done.stderr.decode()) == (code, False), done.stdout
        assert message in done.stderr.decode()


def test_masked_models_need_a_mask(folder: tuple[Path, Any, str]) -> None:
    path, model, _ = folder
    done = run_attend("heads", str(path), "--text", "anna gave the book")
    is_masked = model.config.model_type == "bert"
    assert done.returncode == (2 if is_masked else 0)
    assert ("expected [MASK] in --text" in done.stderr.decode()) == is_masked


def test_the_map_of_an_encoder_decoder_is_of_the_last_token_of_its_target(tmp_path: Path) -> None:
    import transformers as hf

    model = save_model(
        tmp_path, hf.T5ForConditionalGeneration(hf.T5Config(d_model=24, d_kv=5, d_ff=17, num_layers=1, num_heads=3, vocab_size=11))
    )
    done = run_attend("heads", str(tmp_path), "--text", "anna gave ben the book", "--target", "tom went", "--token", "ben", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["layers"]) == len(document["effects"]) == 3 and document["position"] == 1
    inputs = {"input_ids": torch.tensor([[2, 4, 3, 5, 6]]), "decoder_input_ids": torch.tensor([[0, 8]])}

    def log_probability() -> float:
        with torch.no_grad():
            return float(torch.log_softmax(model(**inputs).logits[0, 1].double(), -1)[WORDS.index("ben")])

    plain = log_probability()
    own, cross, _ = model.decoder.block[0].layer
    blocks = model.encoder.block[0].layer[0].SelfAttention, own.SelfAttention, cross.EncDecAttention
    for effects, attention in zip(document["effects"], blocks, strict=True):
        for head in range(3):
            off = torch.ones(3, 5)
            off[head] = 0
            handle = attention.o.register_forward_pre_hook(lambda _, values, off=off: (values[0] * off.flatten(),))
            assert effects[head] == pytest.approx(log_probability() - plain, abs=1e-4)
            handle.remove()
    table = run_attend("heads", str(tmp_path), "--text", "anna gave ben the book", "--target", "tom went").stdout.decode()
    assert all(name in table for name in document["layers"])
    assert "needs --target" in run_attend("heads", str(tmp_path), "--text", "anna").stderr.decode()


def test_a_capture_of_an_encoder_decoder_has_no_map(tmp_path: Path) -> None:
    """Its layers are in another order than their effects, so the map would show a head's effect at another head."""
    done = run_attend("heads", str(tmp_path), "--text", "anna", "--target", "anna", "--capture", str(tmp_path / "file"))
    assert done.returncode == 2
    assert "expected --capture without --target" in done.stderr.decode()
