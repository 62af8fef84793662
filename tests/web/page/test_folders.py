"""Models whose folders are dropped on the page, in a real browser: real inputs for the first layer, made of tokenizer and embeddings."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import attend
from attend.client import Client
from support.browser import Visit
from support.page import BeginVisit, side
from support.tokenizers import tokenizer

pytestmark = pytest.mark.browser

TEXT = "Anna saw the cats again"
SIZES = {"hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 29}
GROUPED = {**SIZES, "num_key_value_heads": 1}
MODELS: dict[str, dict[str, Any]] = {  # class of transformers -> fields of its config
    "BertModel": SIZES,
    "RobertaForMaskedLM": {**SIZES, "pad_token_id": 3},
    "DistilBertModel": {"dim": 24, "hidden_dim": 17, "n_layers": 2, "n_heads": 3, "max_position_embeddings": 29},
    "GPT2LMHeadModel": {"n_embd": 24, "n_inner": 17, "n_layer": 2, "n_head": 3, "n_positions": 97},
    "GPTNeoXForCausalLM": SIZES,
    "PhiForCausalLM": SIZES,
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 10},
    "Phi3ForCausalLM": {**GROUPED, "pad_token_id": 0},
    "GemmaForCausalLM": {**GROUPED, "head_dim": 10},
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 10},
    "Gemma3ForCausalLM": {**GROUPED, "head_dim": 10},
    "T5Model": {"d_model": 24, "d_kv": 5, "d_ff": 17, "num_layers": 2, "num_heads": 3},
}


KINDS = {"GPT2LMHeadModel": "bytes", "T5Model": "spaces", "LlamaForCausalLM": "spaces", "Qwen2ForCausalLM": "bytes"}


def folder_of(path: Path, name: str) -> tuple[Path, Any, Any]:
    """A tiny model of transformers, as `save_pretrained` writes it, with its tokenizer; both."""
    import torch
    import transformers as hf

    words = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer(KINDS.get(name, "pieces of words")), unk_token="[UNK]")
    made = getattr(hf, name)
    model = made(made.config_class(**MODELS[name], vocab_size=len(words))).eval()
    rng = np.random.default_rng(11)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32) * 0.5)
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path, model, words


def drop(visit: Visit, folder: Path, part: str = "") -> dict[str, Any]:
    """Chooses a folder and adds all its layers; the request that the page then sends."""
    visit.page.set_input_files("#folder", folder)
    visit.page.locator("#upload-parts").wait_for()
    if part:
        visit.page.select_option("#upload-part", part)
    return visit.request_sent_by(lambda: visit.page.click("#upload-parts .main"))


def array(tensor: dict[str, Any]) -> np.ndarray[Any, Any]:
    from base64 import b64decode

    return np.frombuffer(b64decode(tensor["base64"]), np.float32).reshape(tensor["shape"])


@pytest.mark.slow  # the extra `test` does not install transformers
@pytest.mark.parametrize("name", MODELS)
def test_the_first_layer_of_a_models_folder_gets_its_own_inputs(
    begin_visit: BeginVisit, http: httpx.Client, tmp_path: Path, name: str
) -> None:
    """They, their tokens and the weights are those of the model itself, by `attend.capture`; for another text too."""
    folder, model, words = folder_of(tmp_path / name, name)
    visit = begin_visit()
    part = "encoder" if name == "T5Model" else ""
    first = drop(visit, folder, part)
    added_as = f"{name}-{part}" if part else name
    assert first["layer"] == f"{added_as}-0" and "its input for this text" in visit.page.inner_text("#note")
    assert visit.page.locator("#note.warn").count() == 0
    typed = visit.request_sent_by(lambda: visit.page.fill("#text", TEXT))
    inputs = dict(words(TEXT, return_tensors="pt"))
    inputs = {key: value for key, value in inputs.items() if key in ("input_ids", "attention_mask")}
    if part:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with Client(str(http.base_url)) as client:
        captured = attend.capture(model, inputs, client, tokenizer=words, name="own")
        layer = next(layer for layer in captured.values() if layer.number == 0 and part in ("", layer.part))
        assert layer.agrees
        expected = np.squeeze(layer.request["query"], 0) if np.ndim(layer.request["query"]) == 3 else layer.request["query"]
        np.testing.assert_allclose(array(typed["query"]), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        assert typed["tokens"] == layer.request["tokens"] and bool(typed.get("causal")) == bool(layer.request.get("causal"))
        own = {key: value for key, value in typed.items() if key not in ("reply", "outputs")}
        weights = np.array(http.post("/attend", json={**own, "outputs": ["attention_weights"]}).json()["attention_weights"])
        np.testing.assert_allclose(weights, np.squeeze(layer.attention_weights), rtol=0, atol=1e-5)
        for added in [*captured, f"{added_as}-0", f"{added_as}-1"]:
            client.delete_layer(added)


@pytest.mark.slow
def test_deeper_layers_of_a_folder_say_what_they_need(begin_visit: BeginVisit, http: httpx.Client, tmp_path: Path) -> None:
    """Above the heads, and in place of pictures in the view of all layers. A folder without tokenizer says so of its first layer."""
    folder, _, _ = folder_of(tmp_path / "deep", "LlamaForCausalLM")
    visit = begin_visit()
    drop(visit, folder)
    visit.request_sent_by(lambda: visit.page.select_option("#layer", "deep-1"))
    needs = "Layer 1 of deep needs what layer 0 makes of the text"
    note = visit.page.inner_text("#note")
    assert note.startswith(needs) and "attend capture" in note and "means nothing" in note and "small-layer" not in note
    assert visit.page.locator("#note.warn").count() == 1
    visit.page.locator("#model summary").click()
    visit.page.locator("#model li", has_text=needs).wait_for()
    assert "means nothing" not in visit.page.locator("#model li", has_text=needs).inner_text()  # there is no pattern
    visit.page.locator("#result[aria-busy=false]").wait_for()
    visit.request_sent_by(lambda: visit.page.select_option("#layer", "deep-0"))
    visit.request_sent_by(lambda: visit.page.fill("#text", "Anna saw ☂"))
    assert "The token [UNK] stands for a word that the model does not know." in visit.page.inner_text("#note")
    assert side(visit, "q").all_inner_texts()[0] == "[CLS]"
    visit.page.click("[data-copy=json]")
    assert '"base64"' in visit.page.input_value("#code")

    (folder / "tokenizer.json").unlink()
    drop(visit, folder)
    assert "since the folder has no tokenizer.json: run attend capture" in visit.page.inner_text("#note")
    for number in range(2):
        http.delete(f"/layers/deep-{number}")
