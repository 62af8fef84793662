"""Layers of whole models, loaded as their own config.json describes them."""

import asyncio
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load, save

from attend.checkpoints import read_model_layer
from attend.checkpoints.families import FAMILIES, REFUSED
from attend.checkpoints.folder import ModelFolder
from attend.checkpoints.model import describe, parts_of
from attend.client import AsyncClient, Client
from attend.errors import InvalidRequest, pointer
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from support.command import run_attend
from support.framework_cases import SAFETENSORS, array
from support.model_cases import CASES, MODELS, TOLERANCE, difference, put, tensors_of, write_folder
from support.server import Server

GOLDEN = Path(__file__).parents[1] / "golden"
HUB_CONFIGS: dict[str, Any] = json.loads((Path(__file__).parent / "hub_configs.json").read_text())
LATENT_CACHES: dict[str, Any] = json.loads((GOLDEN / "caches" / "latent.json").read_text())


@pytest.fixture
def layers(http: httpx.Client) -> Iterator[httpx.Client]:
    """The shared server, left with the layers that it had."""
    yield http
    http.delete("/layers/model")


def assert_refused(reply: httpx.Response, at: str) -> None:
    """`at`: where the problem is among the members of PUT. The tensors of a file have their own names; config and layer are metadata."""
    problem, *_ = reply.json()["errors"]
    _, member, *rest = at.split("/", 2)
    if member == "spec":
        assert problem["at"] == "" and f"at /{rest[0]}" in problem["expected"] and "of the spec" in problem["expected"], reply.text
    else:
        place = "" if member == "weights" else f"/__metadata__/{member}"
        assert problem["at"] == place if not rest else problem["at"].startswith("/".join([place, *rest])), reply.text
    assert reply.status_code == 422


@pytest.mark.parametrize(("model", "index"), CASES, ids=[f"{model}-{index}" for model, index in CASES])
def test_a_layer_computes_what_transformers_computes(layers: httpx.Client, model: str, index: int) -> None:
    """Over HTTP, with nothing but the tensors and the model's config."""
    made = put(layers, model, index)
    assert made.is_success, made.text
    assert difference(layers, model, index) <= TOLERANCE


@pytest.mark.parametrize("model", LATENT_CACHES)
def test_latent_and_rope_key_equal_what_transformers_caches(layers: httpx.Client, model: str) -> None:
    """Most of its models whose RoPE turns neighbouring numbers store these as two halves; here they stay neighbours, as in DeepSeek-V2."""
    spec = put(layers, model, 0).json()["spec"]
    body = {**MODELS[model]["cases"][0]["request"], "layer": "model", "outputs": ["latent", "rope_key"], "reply": {"form": "base64"}}
    reply = layers.post("/attend", json=body).json()
    latent, rope_key = (array(LATENT_CACHES[model][name]) for name in ("latent", "rope_key"))
    if spec["rope"] and spec["rope"]["interleaved"] and MODELS[model]["config"]["model_type"] != "deepseek_v2":
        rope_key = np.stack(np.split(rope_key, 2, axis=-1), axis=-1).reshape(rope_key.shape)
    np.testing.assert_allclose(array(reply["latent"]), latent, rtol=0, atol=1e-5)
    np.testing.assert_allclose(array(reply["rope_key"]), rope_key, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", [name for name, kept in LATENT_CACHES.items() if "index_key" in kept])
def test_steps_of_a_layer_with_an_indexer_agree_with_transformers_and_cache_the_same(layers: httpx.Client, model: str) -> None:
    """Row by row, the outputs of the whole sequence; the indexer's keys are cached with the others.

    Here the numbers that RoPE turns stay neighbours, and come first; transformers stores them as two halves, and Hy4's indexer last.
    """
    spec, case = put(layers, model, 0).json()["spec"], MODELS[model]["cases"][0]
    session = "/sessions/" + layers.post("/sessions", json={"layer": "model"}).json()["id"]
    outputs = []
    for row in array(case["request"]["query"])[0]:
        body = {"query": row[None].tolist(), "causal": True, "outputs": ["output"], "reply": {"form": "base64"}}
        outputs.append(array(layers.post(f"{session}/attend", json=body).json()["output"])[0])
    expected = array(case["output"])[0]
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())

    kept = {name: array(tensor)[0] for name, tensor in LATENT_CACHES[model].items()}
    cache = load(layers.get(f"{session}/cache").content)
    dims = spec["rope"]["dims"]
    if model == "hy_v4":
        kept["index_key"] = np.roll(kept["index_key"], dims, axis=-1)
    for name, is_interleaved in (("rope_key", spec["rope"]["interleaved"]), ("index_key", spec["indexer"]["interleaved"])):
        if is_interleaved:
            turned = np.stack(np.split(kept[name][:, :dims], 2, axis=-1), axis=-1).reshape(-1, dims)
            kept[name] = np.concatenate((turned, kept[name][:, dims:]), axis=-1)
    for name, rows in kept.items():
        np.testing.assert_allclose(cache[name], rows, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("part", ["wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias"])
def test_index_heads_of_another_width_are_refused(layers: httpx.Client, part: str) -> None:
    tensors = tensors_of(MODELS["hy_v4"]["cases"][0])
    name = next(name for name in tensors if name.endswith(f"indexer.{part}"))
    assert_refused(put(layers, "hy_v4", 0, tensors | {name: tensors[name][:-1]}), "/weights/")


@pytest.mark.parametrize(
    "model",
    ["squeezebert", "swinv2", "deberta-v2", "diffllama", "qwen3_next", "deepseek_v3", "xlnet", "codegen", "hrm_text", "gemma3_text"],
)
def test_a_number_that_is_not_finite_is_refused_at_its_place_in_the_tensor_sent(layers: httpx.Client, model: str) -> None:
    """Conversions cut, turn, roll and compute weights. A tensor that is not refused is no part of the layer."""
    made = put(layers, model, 0).json()["fingerprint"]
    tensors = tensors_of(MODELS[model]["cases"][0])
    refused = []
    for name, tensor in tensors.items():
        place = tuple(length - 1 for length in tensor.shape)
        spoiled = tensor.copy()
        spoiled[place] = np.nan
        answer = put(layers, model, 0, {**tensors, name: spoiled})
        if answer.is_success:
            assert answer.json()["fingerprint"] == made
        else:
            assert_refused(answer, pointer(["weights", name, *place]))
            assert answer.json()["errors"][0]["at"] == pointer([name, *place])
            refused.append(name)

    assert len(refused) >= 2


def test_a_number_that_the_config_makes_infinite_is_refused_with_its_tensor(layers: httpx.Client) -> None:
    """All numbers sent are finite; a factor of the config makes one of them infinite."""
    name = "layers.0.self_attn.v_proj.weight"
    tensors = tensors_of(MODELS["mimo_v2_flash"]["cases"][0])
    tensors[name][11, 19] = 3e38

    refused = put(layers, "mimo_v2_flash", 0, tensors, attention_value_scale=2.0)

    assert_refused(refused, pointer(["weights", name]))
    assert refused.json()["errors"] == [{"at": f"/{name}", "expected": "a finite float32, for value.weight/11/19", "got": "inf"}]


def test_every_family_has_a_case() -> None:
    assert set(FAMILIES) <= {
        describe(model["config"], case["layer"], case["part"]).model_type for model in MODELS.values() for case in model["cases"]
    }


def test_families_of_transformers_are_computed_or_refused_with_a_reason() -> None:
    """What `golden/count_families.py` wrote: at least four in five are right, none is wrong, and each refusal has its reason."""
    tried = [line.split(": ") for line in (GOLDEN / "tiny_families.txt").read_text().splitlines()]
    right, wrong = ({name for kind, name, *_ in tried if kind == wanted} for wanted in ("right", "wrong"))
    refused = {name: why for kind, name, *why in tried if kind == "refused"}
    assert not wrong
    assert right <= set(FAMILIES)
    assert refused == {name: [REFUSED[name]] for name in refused}
    assert len(right) >= 4 * len(refused)


def test_the_pages_of_families_are_current() -> None:
    """Written by `python docs/list_checkpoints.py`; the README has the same numbers."""
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "docs" / "list_checkpoints.py"))
    pages = script["pages"]()
    assert {path: path.read_text() for path in pages} == pages
    right, softmax = re.findall(r"\*\*(\d+) of the other (\d+)\*\*", script["claim"]())[0]
    assert f"**{right} of {softmax}** [families](docs/checkpoints.md)" in (root / "README.md").read_text()


@pytest.mark.parametrize(
    ("config", "at"),
    [
        ({"model_type": "lama"}, "/config/model_type"),
        ({"num_attention_heads": 2}, "/spec/"),
        ({"num_key_value_heads": 4}, "/spec/num_kv_heads"),
        ({"num_attention_heads": "4"}, "/config/num_attention_heads"),
        ({"attention_bias": True}, "/spec/bias"),
        ({"attention_sinks": 4}, "/config/attention_sinks"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "/config/rope_parameters/rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 3}}, "/config/rope_parameters/twist"),
        ({"rope_parameters": {"rope_type": "linear"}}, "/config/rope_parameters/factor"),
        ({"num_hidden_layers": 0}, "/config/num_hidden_layers"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "spiral"}}, "/config/rope_scaling/rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2**31}}, "/config/rope_parameters/partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "/config/partial_rotary_factor"),
        ({"rotary_pct": -1}, "/config/rotary_pct"),
        # transformers' Llama rotates whole heads, and merges the older field into the newer
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "/config/partial_rotary_factor"),
        ({"rotary_pct": 0.5}, "/config/partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "/config/rope_scaling"),
    ],
)
def test_unknown_values_in_a_config_are_refused(layers: httpx.Client, config: dict[str, Any], at: str) -> None:
    assert_refused(put(layers, "llama", 0, **config), at)


@pytest.mark.parametrize(
    "name",
    [
        "position_embedding_type",
        "rotary_embedding_base",
        "diff_lambda",
        "qk_norm_epsilon",
        "qk_layernorm_eps",
        "norm_qk",
        "layer_norm_qk",
        "output_attention_gate",
        "attn_logit_softcapping",
        "attention_embedding_multiplier",
        "qk_post_norm",
        "logit_softcapping",
        "logit_cap",
        "soft_cap",
        "logits_soft_cap",
        "use_xpos",
        "use_dynamic_ntk",
        "ntk_alpha",
        "yarn_factor",
        "use_bidirectional",
        "prefix_lm",
        "softmax_offset",
        "use_ssmax",
        "value_residual",
        "q_lora_rank",
        "moe_attention_heads",
        "pruned_heads",
        "a_field_of_tomorrow",
    ],
)
@pytest.mark.parametrize("model", ["llama", "bert", "vit", "falcon_h1", "wav2vec2"])
def test_fields_that_may_change_attention_are_refused(model: str, name: str) -> None:
    case = MODELS[model]["cases"][0]
    with pytest.raises(InvalidRequest) as refusal:
        describe(MODELS[model]["config"] | {name: {"0": 1}}, case["layer"], case["part"])
    assert refusal.value.problems[0].at == f"/config/{name}"


def test_the_refusal_of_a_field_says_how_to_go_on() -> None:
    with pytest.raises(
        InvalidRequest, match=r"if this field has no effect on attention, remove it from config\.json, got true, at /config/use_xpos"
    ):
        describe(MODELS["llama"]["config"] | {"use_xpos": True}, 0)


@pytest.mark.parametrize(("model", "part"), [(model, part) for model, config in HUB_CONFIGS.items() for part in parts_of(config)])
def test_configs_of_hubs_are_understood(model: str, part: str) -> None:
    """Files with the fields that transformers 3 and 4, training tools and code beside the model wrote."""
    assert describe(HUB_CONFIGS[model], 0, part).fields["num_heads"] > 1


@pytest.mark.parametrize("model", HUB_CONFIGS)
def test_files_of_hubs_with_one_more_field_are_refused(model: str) -> None:
    """The section that describes a layer is what its config is checked by."""
    config = HUB_CONFIGS[model]
    for part, (section, _) in parts_of(config).items():
        inner = {**section.fields, "softmax_offset": 1}
        changed = inner if section.at == "/config" else config | {section.at.removeprefix("/config/"): inner}
        with pytest.raises(InvalidRequest, match="/softmax_offset"):
            describe(changed, 0, part)


def test_older_names_in_files_of_hubs_are_read() -> None:
    """MiniMax-M2 says how many dims are rotated; InternLM3 has a flag for the biases of queries, keys and values, and one for others."""
    assert describe(HUB_CONFIGS["MiniMaxAI/MiniMax-M2"], 0).fields["rope"]["dims"] == 64
    internlm = HUB_CONFIGS["internlm/internlm3-8b-instruct"]
    assert describe(internlm | {"qkv_bias": True, "bias": True}, 0).fields["bias"] == dict.fromkeys(PROJECTIONS, True)
    assert describe(internlm | {"qkv_bias": True}, 0).fields["bias"] == {"query": True, "key": True, "value": True, "output": False}
    assert describe(HUB_CONFIGS["bigscience/bloom-560m"], 0).fields["head_dim"] == 64


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        ("gemma3_text", "attn_logit_softcapping", 3.0),  # which transformers' Gemma 3 does not apply
        ("nanochat", "attn_logit_softcapping", 3.0),
        ("codegen", "rope_theta", 5e5),  # its theta is in the code
        ("roformer", "rope_theta", 5e5),
        ("gptj", "rotary", False),
        ("gpt_bigcode", "scale_attn_by_inverse_layer_idx", True),
        ("deberta", "attention_head_size", 3),
        ("minimax_m2", "attn_type_list", [0, 1, 1, 1, 1, 1]),
        ("minimax_m2", "qk_norm_type", "per_head"),
    ],
)
def test_fields_that_a_family_does_not_apply_are_refused(model: str, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        describe(MODELS[model]["config"] | {field: value}, 0)
    assert refusal.value.problems[0].at == f"/config/{field}"


@pytest.mark.parametrize("model", ["bert", "albert", "bart", "big_bird", "clip_text_model"])
def test_positions_in_scores_are_refused(model: str) -> None:
    """BERT's relative_key adds a table of its own to the scores; absolute positions are added to the model's input."""
    config, case = MODELS[model]["config"], MODELS[model]["cases"][0]
    describe(config | {"position_embedding_type": "absolute"}, case["layer"], case["part"])
    with pytest.raises(InvalidRequest, match="/config/position_embedding_type"):
        describe(config | {"position_embedding_type": "relative_key"}, case["layer"], case["part"])


@pytest.mark.parametrize("model", ["gte", "jina_embeddings_v3", "modernbert"])
def test_encoders_with_rope_may_have_any_position_embedding_type(model: str) -> None:
    case = MODELS[model]["cases"][0]
    for positions in ("rotary", "rope", "absolute"):
        described = describe(MODELS[model]["config"] | {"position_embedding_type": positions}, case["layer"])
        assert described.fields["rope"] is not None


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        ("gptj", "rotary_dim", 2**31),
        ("gptj", "rotary_dim", 1 << 20),
        ("gemma4_text", "global_head_dim", 2**31),
        ("llama", "head_dim", 2**31),
    ],
)
def test_too_wide_heads_are_refused(model: str, field: str, value: int) -> None:
    """Before an array of that length is made."""
    config = {name: x for name, x in MODELS[model]["config"].items() if name != "per_layer_config"} | {field: value}
    refusals = []
    for layer in range(config.get("num_hidden_layers") or config["n_layer"]):
        try:
            describe(config, layer)
        except InvalidRequest as refusal:
            refusals.append(refusal.problems[0].at)
    assert f"/config/{field}" in refusals


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_layers_of_linear_attention_are_refused_by_their_number(model: str) -> None:
    config = MODELS[model]["config"]
    kinds = config["layer_types"]
    assert set(kinds) == {"linear_attention", "full_attention"}
    for layer, kind in enumerate(kinds):
        if kind == "full_attention":
            assert describe(config, layer).fields["output_gate"] == {"granularity": "elementwise", "activation": "sigmoid", "bias": False}
        else:
            with pytest.raises(InvalidRequest, match=f"layer {layer} is linear attention.* at /config/layer_types"):
                describe(config, layer)


def test_a_gate_on_which_config_and_tensors_disagree_is_refused() -> None:
    """Without the gate's tensor; headwise where it is elementwise; in a family without gates; without half of the queries' rows."""
    case = MODELS["laguna"]["cases"][0]
    tensors, prefix = tensors_of(case), f"layers.{case['layer']}.self_attn"
    without = {name: x for name, x in tensors.items() if "g_proj" not in name}
    llama = tensors_of(MODELS["llama"]["cases"][0]) | {"layers.0.self_attn.gate_proj.weight": np.ones((4, 20), np.float32)}
    qwen = MODELS["qwen3_next"]["cases"][0]
    halved = {name: x[:36] if "q_proj" in name else x for name, x in tensors_of(qwen).items()}
    for given, config, number, at in (
        (without, MODELS["laguna"]["config"], case["layer"], "/spec/output_gate"),
        (tensors, MODELS["laguna"]["config"] | {"gating": "per-element"}, case["layer"], "/spec/output_gate/granularity"),
        (tensors | {f"{prefix}.g_proj.weight": np.ones((3, 20), np.float32)}, MODELS["laguna"]["config"], case["layer"], "/weights/"),
        (llama, MODELS["llama"]["config"], 0, "/spec/output_gate"),
        (halved, MODELS["qwen3_next"]["config"], qwen["layer"], "/weights/"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            read_model_layer(given, config, number)
        assert refusal.value.problems[0].at.startswith(at)


@pytest.mark.parametrize(
    ("config", "cut", "at"),
    [
        ({"kv_lora_rank": 6}, {}, "/weights/layers.0.self_attn.kv_a_proj_with_mqa.weight"),
        ({"q_lora_rank": 5}, {}, "/spec/latent/query_rank"),
        ({"q_lora_rank": None}, {}, "/spec/latent/query_rank"),
        ({"attention_bias": True}, {}, "/spec/"),
        ({"v_head_dim": 4}, {}, "/weights/layers.0.self_attn.kv_b_proj.weight"),
        ({"qk_rope_head_dim": 2}, {}, "/config/qk_head_dim"),
        ({"qk_rope_head_dim": 2, "qk_head_dim": None}, {}, "/weights/layers.0.self_attn.q_b_proj.weight"),
        ({"num_key_value_heads": 2}, {}, "/config/num_key_value_heads"),
        ({"qk_head_dim": 9}, {}, "/config/qk_head_dim"),
        ({}, {"q_a_layernorm": None}, "/weights/layers.0.self_attn.q_a_layernorm.weight"),
        ({}, {"kv_a_layernorm": None}, "/layer"),
        ({}, {"kv_a_layernorm": 5}, "/weights/"),
        ({}, {"q_a_proj": 5}, "/spec/latent/query_rank"),
    ],
    ids=str,
)
def test_latents_on_which_config_and_tensors_disagree_are_refused(
    layers: httpx.Client, config: dict[str, Any], cut: dict[str, int | None], at: str
) -> None:
    """`cut`: tensors that are left out, or of which these rows are left."""
    tensors = tensors_of(MODELS["deepseek_v3"]["cases"][0])
    for part, rows in cut.items():
        (name,) = (name for name in tensors if part in name)
        whole = tensors.pop(name)
        tensors |= {} if rows is None else {name: whole[:rows]}
    assert_refused(put(layers, "deepseek_v3", 0, tensors, **config), at)


@pytest.mark.parametrize(
    ("model", "config", "at"),
    [
        ("swin", {"depths": [1]}, "/layer"),
        ("swin", {"depths": 3}, "/config/depths"),
        ("swin", {"depths": [1, 0]}, "/config/depths"),
        ("swin", {"depths": [4096] * 65}, "/config/depths"),
        ("swin", {"num_heads": [2]}, "/config/num_heads"),
        ("swin", {"num_heads": [2, 2]}, "/weights/"),
        ("swin", {"embed_dim": 16}, "/spec/"),
        ("swin", {"window_size": 3}, "/weights/encoder.layers.1.blocks.0.attention.self.relative_position_bias_table"),
        ("swinv2", {"pretrained_window_sizes": [12, 6]}, "/config/pretrained_window_sizes"),
        ("vitdet", {"window_block_indices": [0, 1]}, "/weights/encoder.layer.1.attention.rel_pos_h"),
        ("vitdet", {"use_relative_position_embeddings": False}, "/weights/"),
        ("sam_vision_model", {"use_rel_pos": False}, "/weights/"),
        ("beit", {"use_relative_position_bias": True}, "/weights"),
        ("beit_tables", {"use_relative_position_bias": False}, "/weights/"),
        ("beit_tables", {"use_shared_relative_position_bias": True}, "/config/use_shared_relative_position_bias"),
        ("beit_tables", {"image_size": [8, 12]}, "/config/image_size"),
        ("dinov3_vit", {"hidden_size": 24}, "/config/head_dim"),
        ("sam3_vit_model", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "/config/rope_parameters/rope_type"),
        ("sam3_vit_model", {"rope_parameters": {"rope_type": "axial", "twist": 2}}, "/config/rope_parameters/twist"),
        ("qwen2_vl_text", {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [2, 1]}}, "/config/rope_parameters/mrope_section"),
        ("qwen2_vl_text", {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [2, 1, 2]}}, "/config/rope_parameters/mrope_section"),
    ],
    ids=str,
)
def test_grids_on_which_config_and_tensors_disagree_are_refused(layers: httpx.Client, model: str, config: dict[str, Any], at: str) -> None:
    assert_refused(put(layers, model, len(MODELS[model]["cases"]) - 1, **config), at)


@pytest.mark.parametrize(
    ("model", "config", "at"),
    [
        ("squeezebert", {"q_groups": 2}, "/weights/encoder.layers.0.attention.query.weight"),
        ("squeezebert", {"post_attention_groups": 5}, "/weights/encoder.layers.0.post_attention.conv1d.weight"),
        ("luke", {"use_entity_aware_attention": True}, "/config/use_entity_aware_attention"),
        ("ibert", {"quant_mode": True}, "/config/quant_mode"),
        ("mvp", {"use_prompt": True}, "/config/use_prompt"),
        ("beam", {"layer_types": ["full_attention"] * 6}, "/config/layer_types"),
        ("longcat_flash", {"q_lora_rank": None}, "/config/q_lora_rank"),
        ("longcat_flash", {"kv_lora_rank": 6}, "/weights/"),
    ],
)
def test_configs_that_need_another_operation_are_refused(model: str, config: dict[str, Any], at: str) -> None:
    case = MODELS[model]["cases"][0]
    with pytest.raises(InvalidRequest) as refusal:
        read_model_layer(tensors_of(case), MODELS[model]["config"] | config, case["layer"], case["part"])
    assert refusal.value.problems[0].at.startswith(at)


def test_vision_encoder_decoders_have_a_section_for_each_part() -> None:
    """An encoder of images and a decoder with cross-attention, each described in its own section, in one file."""
    sections = {"encoder": MODELS["vit"], "decoder": MODELS["gpt2_cross"]}
    config = {"model_type": "vision-encoder-decoder"} | {name: model["config"] for name, model in sections.items()}
    tensors = {
        f"{name}.{tensor}": array
        for name, model in sections.items()
        for case in model["cases"]
        for tensor, array in tensors_of(case).items()
    }
    for name, model in sections.items():
        for case in model["cases"]:
            fields, weights = read_model_layer(tensors, config, case["layer"], case["part"])
            expected = read_model_layer(tensors_of(case), model["config"], case["layer"], case["part"])
            assert fields == expected[0]
            own = {tensor: tensors[f"{name}.{tensor}"] for tensor in tensors_of(case)}
            for part, numbers in read_model_layer(own, model["config"], case["layer"], case["part"])[1].items():
                np.testing.assert_array_equal(weights[part], numbers)


@pytest.mark.parametrize(
    ("model", "fields", "part", "at"),
    [
        ("bert", {}, "cross", "/part"),
        ("gpt2", {}, "cross", "/part"),
        ("mllama_text_model", {}, "cross", "/config/cross_attention_layers"),
        ("mllama_text_model", {"cross_attention_layers": [0]}, "decoder", "/config/cross_attention_layers"),
        ("mllama_text_model", {"cross_attention_layers": 3}, "decoder", "/config/cross_attention_layers"),
    ],
)
def test_only_layers_that_the_config_lists_have_cross_attention(model: str, fields: dict[str, Any], part: str, at: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        describe(MODELS[model]["config"] | fields, 0, part)
    assert refusal.value.problems[0].at == at
    assert describe(MODELS[model]["config"], 0, None if model in ("bert", "gpt2") else "decoder").number == 0


@pytest.mark.parametrize(
    "fields", [{"indexer_types": ["full", "full", "shared"] * 2}, {"index_topk_pattern": "FFS" * 2}, {"index_topk_freq": 2}]
)
def test_layers_that_share_the_keys_of_an_earlier_layer_are_refused(fields: dict[str, Any]) -> None:
    config = {name: x for name, x in MODELS["glm_moe_dsa"]["config"].items() if name != "indexer_types"} | fields
    assert describe(config, 1).fields["indexer"]["top_k"] == 4
    reason = "full in layer 2; a layer without an indexer attends to the keys that an earlier layer selects"
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        describe(config, 2)
    assert refusal.value.problems[0].at == "/config/indexer_types"


@pytest.mark.parametrize(
    ("model", "config", "at"),
    [
        ("deberta", {"relative_attention": False}, "/config/relative_attention"),
        ("deberta", {"pos_att_type": ["p2c"]}, "/config/pos_att_type"),
        ("deberta", {"pos_att_type": ["c2p", "p2p"]}, "/config/pos_att_type"),
        ("deberta", {"talking_head": True}, "/config/talking_head"),
        ("deberta", {"max_relative_positions": 6}, "/weights/encoder.rel_embeddings.weight"),
        ("deberta-v2", {"position_buckets": 7}, "/weights/encoder.rel_embeddings.weight"),
        ("deberta-v2", {"share_att_key": False}, "/weights"),
        ("deberta_v2_own", {"share_att_key": True}, "/weights"),
        ("deberta_v2_own", {"norm_rel_ebd": "layer_norm"}, "/weights"),
        ("xlnet", {"attn_type": "uni"}, "/config/attn_type"),
        ("xlnet", {"bi_data": True}, "/config/bi_data"),
        ("wav2vec2-conformer", {"position_embeddings_type": "rotary"}, "/config/position_embeddings_type"),
        ("wav2vec2-conformer", {"position_embeddings_type": None}, "/spec/relative_scores"),
        ("wav2vec2_conformer_plain", {"position_embeddings_type": "relative"}, "/spec/relative_scores"),
        ("wav2vec2-bert", {"right_max_position_embeddings": 5}, "/config/right_max_position_embeddings"),
    ],
    ids=str,
)
def test_relative_positions_on_which_config_and_tensors_disagree_are_refused(
    layers: httpx.Client, model: str, config: dict[str, Any], at: str
) -> None:
    assert_refused(put(layers, model, 0, **config), at)


WRONG_VALUES = [None, "x", -1, 2**70, 1e308, [], {}, [[]], {"a": 1}, True, 0.5]


@pytest.mark.parametrize(
    "model",
    [
        "llama_yarn",
        "gemma3_text",
        "granite_swa",
        "mpt",
        "t5",
        "phi3_longrope",
        "gemma4_text",
        "laguna",
        "deepseek_v3_yarn",
        "deepseek_v32_yarn",
        "hy_v4",
        "diffllama",
        "swinv2",
        "vitdet",
        "dinov3_vit",
        "qwen2_vl_text",
        "mistral4",
        "deberta-v2",
        "xlnet",
    ],
)
def test_wrong_types_in_a_config_raise_no_other_error_than_a_refusal(model: str) -> None:
    """Every field, also in nested sections, with every wrong value."""
    case, config = MODELS[model]["cases"][0], MODELS[model]["config"]
    tensors = tensors_of(case)
    for path in _paths(config):
        for value in WRONG_VALUES:
            changed = json.loads(json.dumps(config))
            reduce(lambda inner, name: inner[name], path[:-1], changed)[path[-1]] = value
            with suppress(InvalidRequest, ValidationError):  # the spec is validated where it is read
                LayerSpec.model_validate(read_model_layer(tensors, changed, case["layer"], case["part"])[0])


@pytest.mark.parametrize("model", ["deberta", "deberta-v2", "deberta_v2_own", "swinv2", "wav2vec2-bert", "squeezebert", "deepseek_v32"])
def test_missing_and_short_tensors_raise_no_other_error_than_a_refusal(model: str) -> None:
    """A layer without the tensor is refused, or read if the tensor is optional, such as a bias."""
    case, config = MODELS[model]["cases"][0], MODELS[model]["config"]
    tensors = tensors_of(case)
    for name in tensors:
        less = {other: x for other, x in tensors.items() if other != name}
        for given in (less, {**tensors, name: tensors[name][:-1]}):
            with suppress(InvalidRequest):
                read_model_layer(given, config, case["layer"], case["part"])


def test_the_trained_length_may_be_inside_or_outside_rope_parameters() -> None:
    """transformers 5 saves it inside; if both are there, the outer one takes precedence, as in transformers."""
    case, config = MODELS["phi3_longrope"]["cases"][0], MODELS["phi3_longrope"]["config"]
    name = "original_max_position_embeddings"

    def read(outside: int | None, inside: int | None) -> Any:
        changed = {**config, name: outside, "rope_parameters": {**config["rope_parameters"], name: inside}}
        return read_model_layer(tensors_of(case), changed, case["layer"], case["part"])[0]

    assert read(None, 16) == read(16, None) == read(16, 8) != read(8, 16)


def _paths(fields: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from _paths(value, *above, name)


def test_tensors_that_contradict_the_config_are_refused(layers: httpx.Client) -> None:
    """A missing matrix, one too many, norms in a family without them, and another layer's tensors."""
    tensors = tensors_of(MODELS["llama"]["cases"][0])
    norms = {f"layers.0.self_attn.{name}_norm.weight": np.ones(8, np.float32) for name in "qk"}
    for given, words in (
        ({name: x for name, x in tensors.items() if "v_proj" not in name}, "layers.0.self_attn without v_proj.weight"),
        (tensors | {"layers.0.self_attn.gate.weight": np.ones(8, np.float32)}, "only what a layer of layout separate has"),
        (tensors | norms, "one, as the tensor query_norm.weight is there"),
        ({name.replace("layers.0", "layers.1"): x for name, x in tensors.items()}, "ends with layers.0.self_attn"),
    ):
        refused = put(layers, "llama", 0, given)
        assert refused.status_code == 422 and words in refused.json()["detail"], refused.text


def test_a_config_without_a_layer_number_is_refused(layers: httpx.Client) -> None:
    body = save(tensors_of(MODELS["llama"]["cases"][0]), {"config": json.dumps(MODELS["llama"]["config"])})
    refused = layers.put("/layers/model", content=body, headers=SAFETENSORS)
    assert refused.status_code == 422 and refused.json()["errors"][0]["at"] == "/__metadata__/layer"


async def _put(url: str, folder: Path, number: int) -> str:
    async with AsyncClient(url) as client:
        return (await client.put_layer_from("folder", folder, number)).fingerprint


def test_the_client_loads_a_layer_from_a_folder(server: Server, tmp_path: Path) -> None:
    """Whole or in shards, by either client, to the same layer; other fields of the spec may be added, but none contradicted."""
    number = write_folder(tmp_path, "smollm3", 1)
    with Client(server.url) as client:
        made = client.put_layer_from("folder", tmp_path, layer=number)
        assert made.spec.rope is None
        sharded = tmp_path / "sharded"
        sharded.mkdir()
        write_folder(sharded, "smollm3", 1, sharded=True)
        assert client.put_layer_from("folder", sharded, number, part="decoder").fingerprint == made.fingerprint
        assert asyncio.run(_put(server.url, sharded, number)) == made.fingerprint
        assert client.put_layer_from("folder", tmp_path, number, spec={"dtype": "float64"}).spec.dtype == "float64"
        for wrong in ({"spec": {"num_heads": 2}}, {"part": "encoder"}):
            with pytest.raises(InvalidRequest):
                client.put_layer_from("folder", tmp_path, number, **wrong)  # type: ignore[arg-type]
        (tmp_path / "config.json").unlink()
        with pytest.raises(InvalidRequest, match=r"config\.json"):
            client.put_layer_from("folder", tmp_path, number)
        client.delete_layer("folder")


INDEX = "model.safetensors.index.json"


def _with_header(folder: Path, header: str) -> None:
    data = header.encode()
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + b"\0" * 64)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([2, 2], [-16, 16]),
        ([2, 2], [2**70, 2**70 + 16]),
        ([2, 2], [16, 0]),
        ([-1], [0, 16]),
        ([2**70], [0, 16]),
        ([2.0], [0, 8]),
        (4, [0, 16]),
    ],
)
def test_a_broken_entry_of_a_safetensors_file_is_refused(tmp_path: Path, shape: Any, offsets: list[int]) -> None:
    write_folder(tmp_path, "llama", 0)
    _with_header(tmp_path, json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}))
    with pytest.raises(InvalidRequest, match=r"expected a safetensors file.* at /model"):
        ModelFolder(tmp_path).read(["x"])


def test_a_tensor_of_a_datatype_that_numpy_lacks_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama", 0)
    _with_header(tmp_path, json.dumps({"x": {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]}}))
    with pytest.raises(InvalidRequest, match=r"datatypes that NumPy has.* at /model"):
        ModelFolder(tmp_path).read(["x"])


def test_a_folder_with_a_broken_file_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama", 0)
    deep = '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    _with_header(tmp_path, deep)
    with pytest.raises(InvalidRequest, match=r"expected a safetensors file.* at /model"):
        ModelFolder(tmp_path)
    for text in ("{", "[]", "{}", "3", deep, '{"weight_map": {"x": 1}}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(InvalidRequest, match=f"expected weight_map.* at /{re.escape(INDEX)}"):
            ModelFolder(tmp_path)


def test_the_command_lists_and_loads_layers_of_a_folder(tmp_path: Path) -> None:
    """`layers inspect` says which layers there are and which are refused; `layers add` loads one."""
    number = write_folder(tmp_path, "qwen2_sliding", 1)
    listed = run_attend("layers", "inspect", str(tmp_path), "--json")
    assert listed.returncode == 0, listed.stderr
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [line["layer"] for line in lines] == list(range(6)) and "refused" in lines[0]
    assert lines[number]["spec"]["window"] == {"left": 4} and lines[number]["name"].endswith("self_attn")
    assert lines[number]["spec"]["d_model"] == 32 and lines[number]["spec"]["num_kv_heads"] == 2
    shown = run_attend("layers", "inspect", str(tmp_path)).stdout.decode()
    assert re.search(rf"decoder +{number} +\S+self_attn +32 +8 +float32 +4/2 +window 4 before, rope theta", shown)
    assert "layer 0 of part decoder is refused: " in shown
    kept = ("--layers-dir", str(tmp_path / "kept"))
    added = run_attend("layers", "add", "one", str(tmp_path), "--layer", str(number), "--json", *kept)
    assert added.returncode == 0 and json.loads(added.stdout)["spec"]["num_kv_heads"] == 2, added.stderr
    for wrong in (("--part", "decoder"), ("--layer", "1", "--prefix", "layers.1")):
        assert run_attend("layers", "add", "one", str(tmp_path), *wrong, *kept).returncode == 2


@pytest.mark.parametrize(
    ("model", "index", "operators"),
    [
        ("llama", 0, "rope theta 10000 on halves"),
        ("mistral", 0, "window 4 before, rope theta 10000 on halves"),
        ("gemma2", 0, "window 4 before, rope theta 10000 on halves, softcap 50"),
        ("gpt_oss", 0, "window 4 before, rope with frequencies on halves, sinks"),
    ],
)
def test_inspect_tells_models_with_equal_widths_apart(tmp_path: Path, model: str, index: int, operators: str) -> None:
    number = write_folder(tmp_path, model, index)
    shown = run_attend("layers", "inspect", str(tmp_path)).stdout.decode().splitlines()
    assert next(line for line in shown if line.split()[1:2] == [str(number)]).rstrip().endswith(f" {operators}")


def test_fields_added_later_do_not_change_fingerprints(layers: httpx.Client) -> None:
    """Computed by 0.1.0's code, so that layers stored by it are accepted."""
    tensors = tensors_of(MODELS["llama"]["cases"][0])
    norms = {f"layers.0.self_attn.{name}_norm.weight": np.ones(8, np.float32) for name in "qk"}
    query = {"spec": '{"rope": {"theta": 10000.0, "interleaved": false}}'}
    made = layers.put("/layers/model", params=query, content=save(tensors | norms), headers=SAFETENSORS)
    assert made.json()["fingerprint"] == "ad759485a0ddaa01290c537b28b5364b8a2137bf11d765fee1ffa09218c02a18", made.text


def test_a_call_beyond_the_max_length_of_rope_is_refused(layers: httpx.Client) -> None:
    """In keys or in positions of queries."""
    rope = {"max_length": 3, "frequencies": [0.5, 0.25], "attention_factor": 1.5}
    assert layers.put("/layers/model", json={"spec": {"d_model": 4, "num_heads": 1, "rope": rope}}).is_success
    row = [0.1, 0.2, 0.3, 0.4]
    for body, status in (
        ({"query": [row] * 3}, 200),
        ({"query": [row] * 4}, 422),
        ({"query": [row], "key": [row] * 3, "query_offset": 2}, 200),
        ({"query": [row], "key": [row] * 3, "query_offset": 3}, 422),
        ({"query": [[row]], "key": [[row] * 3], "query_offset": [3]}, 422),
        ({"query": [row], "key": [row] * 4, "query_offset": "end"}, 422),
    ):
        assert layers.post("/attend", json={"layer": "model", **body}).status_code == status, body


def test_the_reply_lists_assumed_fields(layers: httpx.Client) -> None:
    """Without a config: all fields that change results and that neither tensors nor spec give. With one, nothing."""
    tensors = tensors_of(MODELS["llama"]["cases"][0])
    rope = {"theta": 500.0, "interleaved": False}
    made = layers.put(
        "/layers/model", params={"spec": json.dumps({"num_heads": 4, "rope": rope})}, content=save(tensors), headers=SAFETENSORS
    )
    assert made.is_success, made.text
    expected = {"scale": 1 / 8**0.5, "softcap": None, "window": None, "alibi": False, "relative_bias": None, "qk_norm": None}
    expected |= {
        "chunk_size": None,
        "query_scale": None,
        "output_gate": None,
        "latent": None,
        "relative_scores": None,
        "differential": None,
        "normalizer": "softmax",
        "indexer": None,
        "block_selection": None,
    }
    expected |= {"rope.scaling": None, "rope.frequencies": None, "rope.attention_factor": 1.0, "rope.max_length": None}
    expected |= {"rope.axes": None, "rope.requires_positions": False, "grid_bias": None}
    assert made.json()["assumed"] == expected
    assert "assumed" not in layers.get("/layers/model").json()
    assert "assumed" not in put(layers, "llama", 0).json()
    assert "assumed" not in layers.put("/layers/model", json={"spec": {"d_model": 4, "num_heads": 1}}).json()


def as_floats(value: Any) -> Any:
    """The value with 16.0 for 16, at every depth."""
    if isinstance(value, dict):
        return {name: as_floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_floats(item) for item in value]
    return float(value) if type(value) is int else value


def test_integers_of_a_config_may_be_written_as_floats() -> None:
    """Some files have `original_max_position_embeddings` 16.0, which transformers takes. Half an integer is none."""
    for model, index in CASES:
        case, config = MODELS[model]["cases"][index], MODELS[model]["config"]
        assert describe(as_floats(config), case["layer"], case["part"]) == describe(config, case["layer"], case["part"]), model
    with pytest.raises(InvalidRequest, match=r"expected an integer from 1 to \d+, got 4\.5, at /config/num_attention_heads"):
        describe(MODELS["llama"]["config"] | {"num_attention_heads": 4.5}, 0)


@pytest.mark.parametrize("model", ["llama_yarn", "falcon_several", "t5", "swin", "glm4v_text"])
def test_such_a_config_gives_the_same_layer(layers: httpx.Client, model: str) -> None:
    made = put(layers, model, 0).json()["fingerprint"]
    assert put(layers, model, 0, **as_floats(MODELS[model]["config"])).json()["fingerprint"] == made


def test_the_record_of_changed_configs_has_no_wrong_layer() -> None:
    """`golden/perturb_models.py --record` wrote it, for every model."""
    lines = (GOLDEN / "perturbed.txt").read_text().splitlines()
    assert {line.partition(":")[0] for line in lines} == set(MODELS)
    assert not [line for line in lines if "wrong" in line]


@pytest.mark.slow
@pytest.mark.checkpoint
def test_changed_configs_are_followed_or_refused() -> None:
    """A sample of what `golden/perturb_models.py` does with every family."""
    command = [sys.executable, str(GOLDEN / "perturb_models.py"), "ministral3"]
    tried = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(GOLDEN)}, capture_output=True, text=True)
    assert tried.returncode == 0, tried.stdout + tried.stderr
