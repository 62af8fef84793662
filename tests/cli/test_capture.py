"""`attend capture`: tiny models made on the spot, against their own eager attention."""

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from attend.client import Client
from attend.client.captures import Capture
from support.command import run_attend, spawn_attend

pytestmark = pytest.mark.slow  # the extra `test` does not install transformers
WORDS = ["[UNK]", "[CLS]", "[SEP]", "anna", "gave", "ben", "the", "book", "das", "buch"]


def save_model(folder: Path, family: str) -> Any:
    """Writes a model with drawn weights and its tokenizer, as save_pretrained does; returns the model."""
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(7)
    if family == "bert":
        sizes = {"hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 2, "num_attention_heads": 3}
        model: Any = hf.BertModel(hf.BertConfig(**sizes, vocab_size=len(WORDS), initializer_range=0.5))
    else:
        model = hf.T5Model(hf.T5Config(d_model=24, d_kv=5, d_ff=17, num_layers=2, num_heads=3, vocab_size=len(WORDS)))
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_the_file_has_each_layer_with_its_inputs_and_words(server: Any, tmp_path: Path, family: str) -> None:
    model, file = save_model(tmp_path / family, family), tmp_path / "out.safetensors"
    target = ["--target", "das buch"] if family == "t5" else []
    done = run_attend("capture", str(tmp_path / family), "anna gave ben the book", *target, "-o", str(file), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["layers"]) == (6 if family == "t5" else 2) and not document["skipped"]
    assert all(layer["difference"] < 1e-5 for layer in document["layers"])

    inputs = {"input_ids": torch.tensor([[3, 4, 5, 6, 7]])} | ({"decoder_input_ids": torch.tensor([[0, 8]])} if target else {})
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    parts = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    with Client(server.url) as client:
        captured = Capture.load(file).put(client)
        for layer in captured.values():
            got = client.attend(**layer.request, layer=layer.name, outputs=["attention_weights"]).attention_weights
            np.testing.assert_allclose(
                got, getattr(outputs, parts[layer.part] if target else "attentions")[layer.number][0].numpy(), rtol=0, atol=1e-5
            )
            client.delete_layer(layer.name)
    first = next(iter(captured.values()))
    assert first.request["tokens"]["query"] == ["anna", "gave", "ben", "the", "book"]


def test_a_name_is_that_of_a_model_in_the_cache(tmp_path: Path) -> None:
    """Nothing is downloaded: a model that is not in the cache is refused, with the command that downloads it."""
    snapshot = tmp_path / "hub" / "models--anna--small" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--anna--small" / "refs").mkdir()
    (tmp_path / "hub" / "models--anna--small" / "refs" / "main").write_text("1234")
    save_model(snapshot, "bert")
    file, env = tmp_path / "out.safetensors", {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = spawn_attend("capture", "anna/small", "anna gave ben the book", "-o", str(file), env=env)
    assert done.returncode == 0, done.stderr
    assert f"Wrote {file}" in done.stdout.decode()
    assert list(Capture.load(file)) == ["small-0", "small-1"] and Capture.load(file).difference < 1e-5
    for arguments in (["capture", "ben/absent", "anna"], ["heads", "ben/absent", "--text", "anna"]):
        done = run_attend(*arguments)
        assert done.returncode == 2
        assert "ben/absent is neither a folder nor a model in the cache of Hugging Face" in done.stderr.decode()
        assert "`hf download ben/absent`" in done.stderr.decode()
    assert "or a model with --text." in run_attend("heads", "ben/absent").stderr.decode()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    save_model(tmp_path / "t5", "t5")
    save_model(tmp_path / "bert", "bert")
    (tmp_path / "empty").mkdir()
    for folder, more, expected in (
        ("t5", [], "needs --target"),
        ("bert", ["--target", "das"], "--target has no use"),
        ("empty", [], "it has no config.json"),
        ("absent", [], "there is no such folder"),
        ("bert", ["--layers", "one"], "expected numbers separated by commas, got 'one'"),
        ("bert", ["--layers", "1,2"], "numbers of its layers, of [0, 1], got [1, 2]"),
        ("bert", ["-o", str(tmp_path / "absent" / "x.safetensors")], "cannot write"),
    ):
        done = run_attend("capture", str(tmp_path / folder), "anna", *more)
        assert done.returncode in (1, 2) and expected in " ".join(done.stderr.decode().split()), done.stderr


def test_what_a_reader_should_know_is_said(tmp_path: Path) -> None:
    """Texts that the model cannot read, unknown words, weights that the folder does not have, and layers that differ."""
    save_model(tmp_path / "bert", "bert")
    long = "the " * 600
    for text, expected in (
        ("", "expected a text with tokens, got none, at /inputs"),
        (long, "expected at most 512 tokens, which are the model's positions, got 600"),
    ):
        done = run_attend("capture", str(tmp_path / "bert"), text)
        assert done.returncode == 1 and expected in done.stderr.decode() and "Traceback" not in done.stderr.decode()

    file = tmp_path / "bert" / "model.safetensors"
    tensors = load_file(file)
    dropped = tensors.pop("encoder.layer.1.attention.self.query.weight")
    save_file({name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}, file, {"format": "pt"})
    done = run_attend("capture", str(tmp_path / "bert"), "anna gave tom the book", "-o", str(tmp_path / "out.safetensors"))
    assert done.returncode == 0 and dropped.any()
    assert "drawn at random: encoder.layer.1.attention.self.query.weight" in " ".join(done.stderr.decode().split())
    assert "1 of the tokens are unknown" in done.stdout.decode() and "differs from the model" not in done.stdout.decode()
    assert Capture.load(tmp_path / "out.safetensors").difference < 1e-5  # the model computes in float32, whatever its file has
