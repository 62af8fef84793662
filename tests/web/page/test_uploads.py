"""Layers that the page adds from files, in a real browser."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attend.checkpoints.model import describe, parts_of
from attend.client import Client
from attend.client.captures import Capture, CapturedLayer
from attend.spec import LayerSpec
from support.browser import Visit
from support.model_cases import MODELS, write_folder
from support.page import BeginVisit

pytestmark = pytest.mark.browser


RECORD = """window.sent = []; const real = window.fetch;
window.fetch = (path, options) => (options?.body instanceof Blob && window.sent.push(options.body), real(path, options));"""
NAMES = """async () => await Promise.all(window.sent.map(async (body) => {
  const size = Number(new DataView(await body.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
  return Object.keys(JSON.parse(await body.slice(8, 8 + size).text())).filter((name) => name !== "__metadata__");
}))"""
CONFIG = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}


def bert(folder: Path) -> Path:
    """A folder with a tiny BERT of two layers, as `save_pretrained` writes it."""
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (11, 8)}
    for layer in range(2):
        at = f"encoder.layer.{layer}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {f"{at}.attention.{name}.weight": (8, 8), f"{at}.attention.{name}.bias": (8,)}
        shapes |= {f"{at}.intermediate.dense.weight": (13, 8), f"{at}.output.dense.weight": (8, 13), f"{at}.output.LayerNorm.bias": (8,)}
    return write_model(folder, {**CONFIG, "model_type": "bert", "position_embedding_type": "absolute"}, shapes)


def llama(folder: Path) -> Path:
    """The same of a tiny Llama with one head of keys and values."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (rows, 8) for name, rows in (("q", 8), ("k", 4), ("v", 4), ("o", 8))}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (13, 8) for name in ("gate", "up")} | {f"{at}.mlp.down_proj.weight": (8, 13)}
        shapes |= {f"{at}.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    rope = {"rope_theta": 500.0, "rope_type": "default"}
    return write_model(folder, {**CONFIG, "model_type": "llama", "num_key_value_heads": 1, "rope_parameters": rope}, shapes)


def write_model(folder: Path, config: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> Path:
    rng = np.random.default_rng(7)
    folder.mkdir()
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})  # the metadata that transformers writes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("way", ["chosen", "dropped"])
@pytest.mark.parametrize(("write", "of_attention"), [(bert, "attention"), (llama, "self_attn")])
def test_the_attention_layers_of_a_models_folder_are_added(
    begin_visit: BeginVisit, http: httpx.Client, tmp_path: Path, way: str, write: Callable[[Path], Path], of_attention: str
) -> None:
    """All layers are read as the service reads them from the folder itself, and shown as one model. Only attention tensors are sent."""
    model = f"{write.__name__}-{way}"
    folder = write(tmp_path / model.replace("-", " "))
    visit = begin_visit()
    visit.page.evaluate(RECORD)
    if way == "chosen":
        visit.page.set_input_files("#folder", folder)
    else:
        drop(visit, folder)
    visit.page.locator("#upload-parts").wait_for()
    assert visit.page.input_value("#upload-name") == model
    requested = visit.request_sent_by(lambda: visit.page.click("#upload-parts .main"))
    assert requested["layer"] == f"{model}-0" and visit.page.inner_text("#upload-status") == f"Added {model}-0 to {model}-1"
    assert visit.page.locator("#model li").all_text_contents() == [f"{model}-0", f"{model}-1"]
    every = load_file(folder / "model.safetensors")
    sent = [[name for name in every if f".{number}.{of_attention}." in name] for number in range(2)]
    assert [sorted(names) for names in visit.page.evaluate(NAMES)] == [sorted(names) for names in sent]
    with Client(str(http.base_url)) as client:
        for number in range(2):
            assert client.put_layer_from("other", folder, layer=number).fingerprint == client.layer(f"{model}-{number}").fingerprint
            client.delete_layer(f"{model}-{number}")
        client.delete_layer("other")


def test_the_page_sends_every_tensor_that_any_model_needs() -> None:
    """Of the models of every family: their names have what the page looks for, and, without stages, the number of the layer first."""
    script = (Path(__file__).parents[3] / "service/attend/web/page/upload.js").read_text()
    attention, shared = re.search(r"ATTENTION = /(.*)/i;", script), re.search(r"SHARED = /(.*)/;", script)
    assert attention is not None and shared is not None
    needed = 0
    for model in MODELS.values():
        for case in model["cases"]:
            for name in describe(model["config"], case["layer"], case["part"]).find(case["shapes"]).names.values():
                needed += 1
                if re.search(shared[1], name):
                    continue
                assert re.search(attention[1], name, re.IGNORECASE), name
                first = re.findall(r"(?:^|\.)(\d+)\.", name)[:1] or ["0"]
                assert "depths" in model["config"] or first == [str(case["layer"])], name
    assert needed > 500


def test_one_layer_of_a_model_with_stages_is_added(begin_visit: BeginVisit, http: httpx.Client, tmp_path: Path) -> None:
    """Its names have the number of the stage, and of the block in the stage."""
    number = write_folder(tmp_path, "swin", 1)
    visit = begin_visit()
    drop(visit, tmp_path)
    visit.page.locator("#upload-parts").wait_for()
    assert visit.page.locator("#upload-layers option").count() == 1 + sum(MODELS["swin"]["config"]["depths"])
    visit.page.fill("#upload-name", "staged")
    visit.page.select_option("#upload-layers", str(number))
    visit.page.click("#upload-parts .main")
    visit.page.locator("#upload-status", has_text=f"Added staged-{number}").wait_for()
    with Client(str(http.base_url)) as client:
        assert client.put_layer_from("other", tmp_path, layer=number).fingerprint == client.layer(f"staged-{number}").fingerprint
        client.delete_layer("other")
        client.delete_layer(f"staged-{number}")


def test_the_part_of_an_encoder_decoder_is_chosen(begin_visit: BeginVisit, http: httpx.Client, tmp_path: Path) -> None:
    """Of those that its config has; each has a number of layers of its own."""
    [index] = [i for i, case in enumerate(MODELS["t5"]["cases"]) if case["part"] == "cross"][:1]
    number = write_folder(tmp_path, "t5", index)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_layers": 3, "num_decoder_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    visit = begin_visit()
    drop(visit, tmp_path)
    visit.page.locator("#upload-parts").wait_for()
    part, numbers = visit.page.locator("#upload-part"), visit.page.locator("#upload-layers option")
    assert part.locator("option").all_inner_texts() == ["Encoder", "Decoder", "Cross-attention"]
    assert numbers.first.inner_text() == "All 3 layers"
    part.select_option("cross")
    assert numbers.first.inner_text() == "All 5 layers"
    visit.page.select_option("#upload-layers", str(number))
    visit.page.fill("#upload-name", "parted")
    visit.page.click("#upload-parts .main")
    visit.page.locator("#upload-status", has_text=f"Added parted-cross-{number}").wait_for()
    with Client(str(http.base_url)) as client:
        added = client.layer(f"parted-cross-{number}").fingerprint
        assert client.put_layer_from("other", tmp_path, layer=number, part="cross").fingerprint == added
        client.delete_layer("other")
        client.delete_layer(f"parted-cross-{number}")


def test_a_model_of_one_part_has_no_choice_of_parts(begin_visit: BeginVisit, tmp_path: Path) -> None:
    visit = begin_visit()
    drop(visit, llama(tmp_path / "llama"))
    visit.page.locator("#upload-layers").wait_for()
    assert visit.page.locator("#upload-part").is_hidden()


def test_the_page_and_the_service_agree_on_the_parts_of_models(begin_visit: BeginVisit) -> None:
    """Of the configs of every family."""
    find = """async (configs) => { const { partsOf } = await import('/page/upload.js');
        const families = await (await fetch('/page/families.json')).json();
        return configs.map((config) => [...partsOf(config, families).keys()].sort()); }"""
    configs = [model["config"] for model in MODELS.values()]
    assert begin_visit().page.evaluate(find, configs) == [sorted(parts_of(config)) for config in configs]


def test_files_that_are_dropped_during_an_upload_wait_for_its_end(begin_visit: BeginVisit, http: httpx.Client, tmp_path: Path) -> None:
    """The page says how many wait; then all are added, the last is shown, and what is wrong with one stops no other."""
    files = [captured(name).save(tmp_path / f"{name}.safetensors") for name in ("one", "two", "three")]
    wrong = tmp_path / "notes.safetensors"
    wrong.write_text("no tensors")
    visit = begin_visit()
    held: list[Any] = []
    visit.page.route("**/layers/one-0", lambda route: held.append(route))
    with visit.page.expect_request("**/layers/one-0"):
        drop(visit, files[0])
    visit.page.locator("#upload-status", has_text="Adding one-0").wait_for()
    drop(visit, wrong)
    visit.page.locator("#upload-waiting", has_text="One more waits").wait_for()
    drop(visit, *files[1:])
    visit.page.locator("#upload-waiting", has_text="2 more wait").wait_for()
    held.pop().continue_()
    visit.page.locator("#upload-status", has_text="Added 2 layers of three").wait_for()
    visit.page.locator("#result[aria-busy=false]").wait_for()
    assert visit.page.input_value("#layer") == "three-0" and visit.page.inner_text("#upload-waiting") == ""
    for name in ("one", "two", "three"):
        for number in range(2):
            assert http.delete(f"/layers/{name}-{number}").is_success


def drop(visit: Visit, *paths: Path) -> None:
    """Drops files or a folder on the page, as a file manager does."""
    session = visit.page.context.new_cdp_session(visit.page)
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 200, "y": 200, "data": data})


def captured(name: str) -> Capture:
    """Two layers of a model with weights and inputs of their own, the first causal; the second sequence of the batch is padded."""
    rng = np.random.default_rng(8)
    spec = LayerSpec(d_model=12, num_heads=3, num_kv_heads=1)
    layers = {}
    for number in range(2):
        weights = {of: rng.standard_normal(shape).astype(np.float32) for of, shape in spec.weight_shapes().items()}
        real = np.array([[True] * 5, [True] * 3 + [False] * 2])
        request = {"query": rng.standard_normal((2, 5, 12)).astype(np.float32), "attend_keys": real, "causal": number == 0}
        own = f"{name}-{number}"
        request["tokens"] = {"query": [["[UNK]", *"bcde"], list("fghij")]}
        layers[own] = CapturedLayer(own, "", number, spec, weights, request, output=rng.standard_normal((2, 5, 12)).astype(np.float32))
    return Capture(name, layers).with_effects("yes", 0.625, np.array([[0.25, -3.5, 0], [-0.75, 1, np.nan]]))


def test_a_captured_model_is_shown_with_the_inputs_that_it_gave_its_layers(
    begin_visit: BeginVisit, http: httpx.Client, tmp_path: Path
) -> None:
    """Each layer has its own, also in the view of all layers, and the weights are those of the Python client for the same capture."""
    capture = captured("taken")
    file = capture.save(tmp_path / "taken.safetensors")
    assert Capture.load(file).effects == {
        "answer": "yes",
        "probability": 0.625,
        "change": {"taken-0": [0.25, -3.5, 0], "taken-1": [-0.75, 1]},
    }
    visit = begin_visit()
    first = visit.request_sent_by(lambda: drop(visit, file))
    visit.page.locator("#effects tbody tr").nth(1).wait_for()
    with visit.page.expect_request(lambda sent: sent.url.endswith("/attend") and sent.post_data_json["layer"] == "taken-0") as other:
        requests = [first, visit.request_sent_by(lambda: visit.page.select_option("#layer", "taken-1"))]
    assert visit.page.inner_text("#upload-status") == "Added 2 layers of taken with their inputs"
    assert "the model itself gave" in visit.page.inner_text("#note") and visit.page.locator("#note.warn").count() == 0
    assert "The token [UNK] stands for a word that the model does not know." in visit.page.inner_text("#note")
    with Client(str(http.base_url)) as client:
        for request, layer in zip(requests, capture.values(), strict=True):
            assert request["layer"] == layer.name
            expected = client.attend(**layer.request, layer=layer.name, outputs=["attention_weights"]).attention_weights
            got = http.post("/attend", json={**request, "outputs": ["attention_weights"]}).json()["attention_weights"]
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
        assert other.value.post_data_json["query"] == requests[0]["query"] and other.value.post_data_json["causal"] is True
        visit.page.locator("#effects tbody tr").nth(1).wait_for()  # nobody had to open it
        rows = [row.locator("th, td").all_inner_texts() for row in visit.page.locator("#effects tbody tr").all()]
        assert rows == [["taken-0", "0.25", "\u22123.50", "0.00"], ["taken-1", "\u22120.75", "1.00"]]
        assert "“yes”, with probability 0.6" in visit.page.inner_text("#effects .hint")
        for name in capture:
            client.delete_layer(name)


def test_a_layer_file_is_added_or_refused(begin_visit: BeginVisit, http: httpx.Client, tmp_path: Path) -> None:
    """What is missing is given in the form; what is no safetensors file is refused by name."""
    file = bert(tmp_path / "bert") / "model.safetensors"
    visit = begin_visit()
    drop(visit, file)
    visit.page.locator("#upload-parts").wait_for()
    visit.page.fill("#upload-name", "dropped")
    visit.refusal(lambda: visit.page.click("#upload-parts .main"), "**/layers/dropped")
    visit.page.locator("#upload-error", has_text="Expected").wait_for()
    visit.page.fill("#upload-prefix", "encoder.layer.1")
    visit.page.fill("#upload-spec", '{"num_heads": 2}')
    assert visit.request_sent_by(lambda: visit.page.click("#upload-parts .main"))["layer"] == "dropped"
    assert visit.page.locator("#upload-error").inner_text() == ""
    http.delete("/layers/dropped")

    (tmp_path / "bert" / "notes.txt").write_text("no tensors")
    visit.page.set_input_files("#file", tmp_path / "bert" / "notes.txt")
    visit.page.locator("#upload-error", has_text="got notes.txt").wait_for()
