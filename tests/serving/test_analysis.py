"""POST /attend/analysis: every metric on random layers and masks against plain NumPy, identities from theory, and refusals."""

import asyncio
import json
import threading
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from attend.attention.call import Call, Result
from attend.attention.layer import MultiHeadAttention
from attend.attention.reference.call import ReferenceCall
from attend.check.layer import Layer
from attend.check.random_cases import FEATURES, Case, random_case
from attend.client import AnalysisResult, Client
from attend.client.responses import read_analysis
from attend.errors import InvalidRequest, TooLarge
from attend.heads.metrics.compute import OF_WEIGHTS, MetricsOperation
from attend.serving import requests
from attend.serving.analysis import ANALYSIS
from attend.serving.service import open_service
from attend.spec import LayerSpec
from attend.wire.schemas.analysis import METRICS, AnalysisRequest
from support.cases import weights_of
from support.plain_metrics import Item, between_metrics, output_metrics, row_metrics, strongest

WORDS = ["duplicate_token_score", "induction_score"]
WORDLESS = [name for name in METRICS if name not in (*WORDS, "single_head")]
MEASURED = sorted(set(FEATURES) - {"dropout", "block_selection"})  # selected blocks empty rows of one of two differential softmaxes
WINDOW, LINKS, MASS = 1, 3, 0.8


def items(case: Case, weights: dict[str, Any], words: Any) -> list[Item]:
    """The items of a case, with padding and positions derived from the request alone."""
    request = ReferenceCall.from_fields(**case.request)
    ref = Layer(case.spec, weights).attend(request)
    b, h, q, _ = ref.attention_weights.shape
    positions, real = request.query_indices(ref.scores.shape, needed=False), request.real_keys()
    counted = real if case.request.get("key") is None else np.ones((b, q), bool)
    return [Item(ref, i, h, real[i], counted[i], positions[i], words) for i in range(b)]


def agree(name: str, ours: Any, theirs: Any, case: Case) -> None:
    if isinstance(ours, dict):
        for part, array in ours.items():
            agree(f"{name}.{part}", array, theirs[part], case)
        return
    np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=2e-7, err_msg=f"{name} of {case.spec}")


def ask(client: Client, case: Case, **more: Any) -> AnalysisResult:
    options = {"local_window": WINDOW, "top_links": LINKS, "mass": MASS}
    return client.analysis(**case.request, layer="analysed", analysis=options, **more)


@given(seed=st.integers(0, 2**32 - 1))
def test_metrics_agree_with_plain_numpy_on_random_layers_and_masks(client: Client, seed: int) -> None:
    """Grouped heads, cross-attention, padding, masks per head, fully masked rows, sinks, positions."""
    rng = np.random.default_rng(seed)
    case = random_case(rng, features=MEASURED, rate=0.3, dtype="float64")
    if case.request.get("key") is not None and case.request.get("query_offset") is None:
        case.request["query_offset"] = int(rng.integers(-2, 3))
    weights = weights_of(case)
    if 0 in np.shape(case.request["query"]) or 0 in np.shape(case.request.get("key", [[1]])):
        return
    client.put_layer("analysed", case.spec, case.weights)
    single = np.ndim(case.request["query"]) == 2
    q, k = np.shape(case.request["query"])[-2], np.shape(case.request.get("key", case.request["query"]))[-2]
    words = [list(rng.choice(["a", "b", "c"], n)) for n in (q, k)]
    words = [words[0], words[0]] if case.request.get("key") is None else words
    spec = case.spec
    width = spec.output_dim if spec.projections else spec.concatenated_dim
    direction = rng.standard_normal((*np.shape(case.request["query"])[:-1], width)) if rng.random() < 0.5 else None

    refused = {"weights", "value norms"} if spec.signed_weights else set()
    if any(operator.writes(spec, "head_outputs") for operator in spec.operators):
        refused |= {"value norms"}
    names = [name for name in (*WORDLESS, *WORDS) if METRICS[name].of not in refused]
    result = ask(client, case, metrics=names, tokens={"query": words[0], "key": words[1]}, direction=direction)

    assert list(result) == names
    weight = np.asarray(weights["output.weight"], np.float64) if spec.projections else np.eye(spec.concatenated_dim)
    bias = np.asarray(weights.get("output.bias", np.zeros(len(weight))), np.float64)
    scales = np.broadcast_to(case.request.get("head_scale", 1.0), (len(items(case, weights, words)), spec.num_heads))
    for b, item in enumerate(items(case, weights, words)):
        toward = None if direction is None else np.reshape(direction, (-1, q, width))[b]
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = row_metrics(item, WINDOW, MASS) | between_metrics(item)
            expected |= output_metrics(item, weight, bias, scales[b], toward)
        for name in names:
            value = result[name]
            here = {p: x if single or p.endswith("_words") else x[b] for p, x in value.items()} if isinstance(value, dict) else value
            here = here if single or isinstance(here, dict) else here[b]
            if name == "strongest_links":
                _links_agree(here, strongest(item, LINKS + 1))
            elif name == "pruning_order":
                agree(name, here["errors"], expected[name]["errors"], case)
            else:
                agree(name, here, expected[name], case)


def _links_agree(ours: dict[str, Any], theirs: list[list[tuple[float, int, int]]]) -> None:
    """Asserts equal weights, and equal indices except where weights differ only by rounding."""
    for h, more in enumerate(theirs):
        links = more[:LINKS]
        found = int((ours["queries"][h] >= 0).sum())
        assert found == len(links)
        assert np.isnan(ours["weights"][h][found:]).all() and (ours["keys"][h][found:] == -1).all()
        np.testing.assert_allclose(ours["weights"][h][:found], [-w for w, _, _ in links], rtol=1e-9)
        if all(after[0] - before[0] > 1e-9 for before, after in pairwise(more)):
            assert [(i, j) for _, i, j in links] == list(zip(ours["queries"][h][:found], ours["keys"][h][:found], strict=True))


@given(seed=st.integers(0, 2**32 - 1))
def test_contribution_towards_a_direction_equals_what_ablation_removes(client: Client, seed: int) -> None:
    """The contributions of all heads sum to the output without its bias."""
    rng = np.random.default_rng(seed)
    case = random_case(rng, features=["key", "value", "num_kv_heads", "value_head_dim", "biases"], dtype="float64")
    if 0 in np.shape(case.request["query"]) or 0 in np.shape(case.request.get("key", [[1]])):
        return
    client.put_layer("analysed", case.spec, case.weights)
    heads = case.spec.num_heads
    plain = client.attend(**case.request, layer="analysed", outputs=["output"]).output
    direction = rng.standard_normal(plain.shape)
    lost = []
    for head in range(heads):
        scale = np.ones(heads)
        scale[head] = 0
        lost.append(plain - client.attend(**case.request, layer="analysed", outputs=["output"], head_scale=scale).output)

    result = ask(client, case, metrics=["contribution", "zero_ablation"], direction=direction)
    half_square = ask(client, case, metrics=["contribution"])

    axes = (-2, -1)
    np.testing.assert_allclose(result["contribution"], np.stack([(direction * x).sum(axes) for x in lost], -1), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(half_square["contribution"], np.stack([(plain * x).sum(axes) for x in lost], -1), rtol=1e-9, atol=1e-9)
    changes = np.stack([np.sqrt((x**2).sum(axes) / (plain**2).sum(axes)) for x in lost], -1)
    np.testing.assert_allclose(result["zero_ablation"]["relative_change"], changes, rtol=1e-7, atol=1e-9)


def test_single_head_equals_a_layer_with_one_head_of_the_same_seed(client: Client) -> None:
    """Also for grouped heads."""
    rng = np.random.default_rng(5)
    query, lens = rng.standard_normal((3, 7, 12)), [7, 4, 5]
    client.put_layer("many", {"d_model": 12, "num_heads": 3, "seed": 9, "dtype": "float64", "init": "torch_linear"})
    client.put_layer("one", {"d_model": 12, "num_heads": 1, "seed": 9, "dtype": "float64", "init": "torch_linear"})
    both = [client.attend(query, layer=name, valid_lens=lens) for name in ("many", "one")]

    parts = client.analysis(query, layer="many", valid_lens=lens, metrics=["single_head"])["single_head"]
    alone = client.analysis(query, layer="one", valid_lens=lens, metrics=["entropy", "confidence"])

    np.testing.assert_allclose(parts["entropy"], alone["entropy"][:, 0], rtol=1e-12)
    np.testing.assert_allclose(parts["confidence"], alone["confidence"][:, 0], rtol=1e-12)
    for b, n in enumerate(lens):
        many, one = (result.output[b, :n] for result in both)
        np.testing.assert_allclose(parts["relative_change"][b], np.linalg.norm(one - many) / np.linalg.norm(many), rtol=1e-12)
        np.testing.assert_allclose(parts["cosine"][b], (one * many).sum() / np.linalg.norm(one) / np.linalg.norm(many), rtol=1e-12)
        for h in range(3):
            x, y = both[0].attention_weights[b, h, :n], both[1].attention_weights[b, 0, :n]
            np.testing.assert_allclose(parts["similarity"][b, h], (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), rtol=1e-12)


BASE: dict[str, Any] = {"query": [[1.0] * 64] * 3}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"metrics": []}, "/metrics"),
    ({"metrics": ["entropie"]}, "/metrics/0"),
    ({"metrics": ["entropy", "entropy"]}, "/metrics/1"),
    ({"metrics": ["entropy"], "dropout": {"p": 0.5, "seed": 1}}, "/dropout"),
    ({"metrics": ["induction_score"]}, "/tokens"),
    ({"metrics": ["mean_distance"], "key": [[1.0] * 64] * 3}, "/query_offset"),
    ({"metrics": ["duplicate_token_score"], "key": [[1.0] * 64] * 3, "tokens": {"query": ["a"] * 3, "key": ["a"] * 3}}, "/query_offset"),
    ({"metrics": ["single_head"], "block_mask": [[[0] * 3] * 3] * 8}, "/block_mask"),
    ({"analysis": {"query_lens": [2]}}, "/analysis/query_lens"),
    ({"analysis": {"query_lens": 4}}, "/analysis/query_lens"),
    ({"analysis": {"query_lens": -1}}, "/analysis/query_lens"),
    ({"analysis": {"query_lens": [1, 2.5]}}, "/analysis/query_lens"),
    ({"analysis": {"query_lens": "all"}}, "/analysis/query_lens"),
    ({"analysis": {"mass": 0}}, "/analysis/mass"),
    ({"analysis": {"local": 3}}, "/analysis/local"),
    ({"metrics": ["contribution"], "direction": [[1.0] * 63] * 3}, "/direction"),
    ({"tokens": {"query": ["a", "b"]}}, "/tokens/query"),
    ({"fully_masked": "error", "block_keys": [1, 1, 1]}, "/fully_masked"),
]


@pytest.mark.parametrize(("fields", "at"), REFUSED, ids=[at + str(i) for i, (_, at) in enumerate(REFUSED)])
def test_undefined_metrics_are_refused_with_a_pointer(http: httpx.Client, fields: dict[str, Any], at: str) -> None:
    """As problem details."""
    answer = http.post("/attend/analysis", json=BASE | fields)

    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["at"] == at


@pytest.mark.parametrize("metric", ["value_norms", "value_norm_weights", "single_head"])
def test_value_metrics_and_single_head_are_refused_for_gated_layers(client: Client, metric: str) -> None:
    """The gate is a factor per query, so values have no norm after it; a layer with one head would need another gate."""
    client.put_layer("analysed", {"d_model": 4, "num_heads": 2, "output_gate": {}})
    with pytest.raises(InvalidRequest, match="output_gate") as caught:
        client.analysis(np.ones((3, 4)), layer="analysed", metrics=["entropy", metric])

    assert caught.value.problems[0].at == "/metrics/1"


@pytest.mark.parametrize("metrics", [["contribution", "entropy"], ["value_norms"], ["subspace_disagreement", "single_head"]])
def test_metrics_of_weights_are_refused_where_weights_may_be_negative(client: Client, metrics: list[str]) -> None:
    client.put_layer("analysed", {"d_model": 8, "num_heads": 2, "differential": {}})
    with pytest.raises(InvalidRequest, match="may be negative") as caught:
        client.analysis(np.ones((3, 8)), layer="analysed", metrics=metrics)

    assert caught.value.problems[0].at == f"/metrics/{len(metrics) - 1}"


@pytest.mark.parametrize("fields", [{}, {"key": np.ones((5, 8)), "query_offset": 1}, {"tokens": {"query": list("abc")}}], ids=str)
def test_without_metrics_a_layer_of_negative_weights_has_metrics_of_its_outputs(client: Client, fields: dict[str, Any]) -> None:
    client.put_layer("analysed", {"d_model": 8, "num_heads": 2, "differential": {}})
    query = np.random.default_rng(3).standard_normal((3, 8))
    default = client.analysis(query, layer="analysed", **fields)
    named = client.analysis(query, layer="analysed", metrics=["output_disagreement", "contribution", "zero_ablation"], **fields)

    assert [*default.metrics] == [*named.metrics]
    np.testing.assert_array_equal(default["contribution"], named["contribution"])


def test_single_head_is_refused_for_layers_with_parameters_per_head(client: Client) -> None:
    client.put_layer("analysed", {"d_model": 4, "num_heads": 2, "alibi": True})
    with pytest.raises(InvalidRequest, match="one head has no alibi") as caught:
        client.analysis(np.ones((3, 4)), layer="analysed", metrics=["entropy", "single_head"])

    assert caught.value.problems[0].at == "/metrics/1"


def test_metrics_are_refused_on_attend(http: httpx.Client) -> None:
    answer = http.post("/attend", json=BASE | {"metrics": ["entropy"]})

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["at"] == "/metrics"


def test_every_metric_has_the_planned_shape(http: httpx.Client, client: Client) -> None:
    """In JSON, base64 and safetensors, batched and unbatched. The plan names each tensor and admits it."""
    rng = np.random.default_rng(2)
    lengths = {"b": 3, "h": 8, "q": 5, "k": 5, "n": 4}
    tokens = {"query": list("abcab")}
    fields: dict[str, Any] = {"metrics": list(METRICS), "analysis": {"top_links": 4}, "tokens": tokens, "valid_lens": [5, 2, 3]}
    query = rng.standard_normal((3, 5, 64))
    shapes = {f"metrics.{name}{'.' if part else ''}{part}": s for name, metric in METRICS.items() for part, s in metric.shapes.items()}

    result = client.analysis(query, **fields)
    plan = client.plan(query, **fields)
    nested = http.post("/attend/analysis", json={"query": query.tolist(), **fields}).json()["metrics"]
    one = client.analysis(query[1], **{**fields, "valid_lens": 2})

    assert plan.admitted
    assert {name: tensor.shape for name, tensor in plan.outputs.items()} == {n: [lengths[x] for x in s] for n, s in shapes.items()}
    for name, metric in METRICS.items():
        for part in metric.shapes:
            array = result[name][part] if part else result[name]
            listed = np.array(nested[name][part] if part else nested[name], np.float64)
            alone = one[name][part] if part else one[name]
            assert list(array.shape) == plan.outputs[f"metrics.{name}{'.' if part else ''}{part}"].shape
            listed = np.where(np.isnan(listed), -1, listed) if array.dtype == np.int64 else listed
            np.testing.assert_allclose(listed, array, rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(alone, array[1], rtol=1e-4, atol=1e-5, err_msg=name)


def test_undefined_numbers_are_null(http: httpx.Client) -> None:
    """A padded query, the normalised entropy of one key, missing links. NaN is never written."""
    body = BASE | {"valid_lens": 1, "tokens": {"query": ["a", "b", "c"]}, "reply": {"decimals": 3}}
    body["metrics"] = ["entropy_per_query", "normalised_entropy", "strongest_links"]

    text = http.post("/attend/analysis", json=body).text

    metrics = json.loads(text, parse_constant=lambda word: pytest.fail(word))["metrics"]
    assert metrics["entropy_per_query"] == [[0.0, None, None]] * 8
    assert metrics["normalised_entropy"] == [None] * 8
    assert metrics["strongest_links"] == {part: [[None] * 5] * 8 for part in ("queries", "keys", "weights", "query_words", "key_words")}


@pytest.mark.parametrize("omit", ["special", ["[CLS]", "<|end|>"]])
def test_omitted_tokens_are_neither_queries_nor_in_links(client: Client, omit: Any) -> None:
    """Other weights do not change. Each item of the batch has its own tokens."""
    x, n = np.random.default_rng(11).standard_normal((2, 6, 64)), 30
    words = [["[CLS]", "a", "b", "[UNK]", "c", "<|end|>"], ["a", "[CLS]", "b", "c", "d", "e"]]
    names, options = ["entropy", "entropy_per_query", "value_norms", "strongest_links"], {"top_links": n}

    whole = client.analysis(x, metrics=names, analysis=options)
    part = client.analysis(x, metrics=names, analysis=options, tokens={"query": words, "omit": omit})

    for b, kept in enumerate(([1, 2, 3, 4], [0, 2, 3, 4, 5])):
        rest = sorted({*range(6)} - {*kept})
        np.testing.assert_array_equal(part["entropy_per_query"][b][:, kept], whole["entropy_per_query"][b][:, kept])
        assert np.isnan(part["entropy_per_query"][b][:, rest]).all()
        np.testing.assert_allclose(part["entropy"][b], whole["entropy_per_query"][b][:, kept].mean(-1))
        every, links = whole["strongest_links"], part["strongest_links"]
        for h in range(8):
            expected = [
                (q, k, w)
                for q, k, w in zip(every["queries"][b, h], every["keys"][b, h], every["weights"][b, h], strict=True)
                if {q, k} <= {*kept}
            ]
            found = [*zip(links["queries"][b, h], links["keys"][b, h], links["weights"][b, h], strict=True)]
            assert found[: len(expected)] == expected and all({q, k} <= {*kept, -1} for q, k, _ in found)
    np.testing.assert_array_equal(part["value_norms"], whole["value_norms"])


def test_an_omission_is_special_or_a_list(http: httpx.Client) -> None:
    for omit in ("none", ["a", 1], True):
        [refused] = http.post("/attend/analysis", json=BASE | {"tokens": {"omit": omit}}).json()["errors"]
        assert refused["at"] == "/tokens/omit" and refused["expected"] == '"special" or a list of tokens'


def test_padding_does_not_change_metrics(client: Client) -> None:
    """An item padded at its end by lengths, or at its front by a key mask, has the metrics of the item alone, whatever the padding
    contains."""
    rng = np.random.default_rng(3)
    real, n = rng.standard_normal((5, 64)), 5
    words = list("abcab")
    behind = np.concatenate((real, 100 * rng.standard_normal((3, 64))))
    before = np.concatenate((100 * rng.standard_normal((3, 64)), real))
    names = [name for name in METRICS if "per_query" not in name and METRICS[name].shapes.get("", "") in ("b", "bh", "bhh")]

    alone = client.analysis(real, metrics=names, tokens={"query": words})
    padded = client.analysis(behind, metrics=names, tokens={"query": [*words, *"abc"]}, valid_lens=n)
    masked = client.analysis(before, metrics=names, tokens={"query": [*"abc", *words]}, block_keys=[1, 1, 1, 0, 0, 0, 0, 0])

    assert len(names) > 15
    for name in names:
        np.testing.assert_allclose(padded[name], alone[name], rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(masked[name], alone[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_query_lens_excludes_padded_queries_in_cross_attention(client: Client) -> None:
    """Without `query_lens` all queries count. The default metrics leave out those that need positions."""
    rng = np.random.default_rng(4)
    query, key = rng.standard_normal((5, 64)), rng.standard_normal((7, 64))

    whole = client.analysis(query[:3], key)
    padded = client.analysis(query, key, analysis={"query_lens": 3})

    assert list(whole) == ["entropy", "normalised_entropy", "confidence", "strongest_links", "first_key_mass"]
    for name in ("entropy", "normalised_entropy", "confidence", "first_key_mass"):
        np.testing.assert_allclose(padded[name], whole[name], rtol=1e-6)
    assert "mean_distance" in client.analysis(query, key, query_offset="end")


def test_the_default_metrics_with_tokens_have_those_of_repeated_tokens(client: Client) -> None:
    query, key = np.random.default_rng(4).standard_normal((2, 5, 64))
    tokens = {"query": list("abacb")}
    of_repeated = ["duplicate_token_score", "induction_score"]
    for rows, expected in (((query,), of_repeated), ((query, key), [])):  # the tokens of other keys are not known
        assert [name for name in client.analysis(*rows, tokens=tokens, causal=True) if name in of_repeated] == expected
    assert not set(of_repeated) & set(client.analysis(query))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_metrics_of_half_precision_layers_are_float32(client: Client, dtype: str) -> None:
    client.put_layer("analysed", {"d_model": 8, "num_heads": 2, "dtype": dtype})
    client.put_layer("exact", {"d_model": 8, "num_heads": 2, "dtype": "float64"})
    query = np.random.default_rng(6).standard_normal((9, 8)).astype(np.float16)

    result, exact = (client.analysis(query, layer=name, metrics=["entropy", "zero_ablation"]) for name in ("analysed", "exact"))

    assert result["entropy"].dtype == np.float32
    np.testing.assert_allclose(result["entropy"], exact["entropy"], rtol=1e-5 if dtype == "float32" else 2e-2)


def test_metrics_beyond_the_memory_limit_are_refused_and_the_plan_says_so(client: Client) -> None:
    """Numbers per query and key count only where the requested metrics hold them."""
    shape = {"shape": [1, 6000, 64]}
    with pytest.raises(TooLarge, match="max_scores"):
        client.analysis(np.zeros((1, 6000, 64), np.float16), metrics=["value_norm_weights"])

    assert not client.plan(shape, metrics=["value_norm_weights"]).admitted
    assert client.plan(shape, metrics=["entropy"]).admitted


def test_the_table_says_which_metrics_are_of_weights() -> None:
    """Those that are computed from them; where weights may be negative, they are refused."""
    assert {name for name, row in METRICS.items() if row.of == "weights"} | {"value_norm_weights"} == OF_WEIGHTS & METRICS.keys()


def test_the_direction_is_read_as_a_tensor() -> None:
    assert AnalysisRequest.tensor_kinds["direction"] == "number"


def test_all_reply_forms_have_the_same_metrics(http: httpx.Client) -> None:
    """Nested, flat, base64 and safetensors: indices, undefined numbers, and words of each item."""
    rng = np.random.default_rng(7)
    tokens = {"query": [["a", "b", "c"], ["d", "e", "f"]], "key": [["g", "h"], ["i", "j"]]}
    body = {"query": rng.standard_normal((2, 3, 64)).tolist(), "key": rng.standard_normal((2, 2, 64)).tolist(), "tokens": tokens}
    body |= {"valid_lens": [2, 1], "metrics": ["entropy", "normalised_entropy", "strongest_links"], "analysis": {"top_links": 5}}

    nested = http.post("/attend/analysis", json=body)
    others = [http.post("/attend/analysis", json=body | {"reply": {"form": form}}) for form in ("flat", "base64")]
    binary = http.post("/attend/analysis", json=body, headers={"Accept": "application/vnd.safetensors"})

    expected = read_analysis(nested)
    links = expected["strongest_links"]
    assert np.isnan(expected["normalised_entropy"][1]).all() and not np.isnan(expected["normalised_entropy"][0]).any()
    assert (links["keys"][0] >= 0).all() and (links["keys"][1] == -1).all()
    assert links["key_words"][1] == [[None] * 5] * 8  # the second item sees one key
    assert links["query_words"][0][0] == [tokens["query"][0][i] for i in links["queries"][0, 0]]
    for reply in others:
        same(read_analysis(reply), expected)
    tensors = load(binary.content)
    head = json.loads(json.loads(binary.content[8 : 8 + int.from_bytes(binary.content[:8], "little")])["__metadata__"]["reply"])
    assert head["metrics"] == {"strongest_links": {part: links[part] for part in ("query_words", "key_words")}}
    assert len(tensors) == 5 and tensors["metrics.strongest_links.keys"].dtype == np.int64
    np.testing.assert_array_equal(tensors["metrics.strongest_links.keys"], links["keys"])
    np.testing.assert_allclose(tensors["metrics.entropy"], expected["entropy"], rtol=1e-7)


def same(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        if isinstance(value, dict):
            same(value, theirs[name])
        elif name.endswith("_words"):
            assert value == theirs[name]
        else:
            np.testing.assert_allclose(value, theirs[name], rtol=1e-7)


def test_metrics_are_computed_on_the_device_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the call is, since metrics take many steps."""
    threads: list[int] = []

    compute_metrics = MetricsOperation.run

    def watched(operation: MetricsOperation, layer: MultiHeadAttention, call: Call) -> Result:
        threads.append(threading.get_ident())
        return compute_metrics(operation, layer, call)

    async def ask() -> bytes:
        await service.start({"default": LayerSpec(d_model=4, num_heads=2)})
        return b"".join((await service.engine.answer(requests.Request(b'{"query": [[1, 0, 0, 0]]}'), ANALYSIS))[1])

    monkeypatch.setattr(MetricsOperation, "run", watched)
    service = open_service("cpu")
    try:
        reply = json.loads(asyncio.run(ask()))
    finally:
        service.close()

    assert reply["metrics"]["confidence"] == [1.0, 1.0]
    assert len(threads) == 1 and threading.get_ident() not in threads


OF_KEYS = {"value_norms", "subspace_disagreement"}


def numbers(metric: Any) -> list[np.ndarray[Any, Any]]:
    """The numbers of a metric in JSON, part by part and with NaN for null, the words of links left out."""
    parts = {name: part for name, part in metric.items() if not name.endswith("_words")} if isinstance(metric, dict) else {"": metric}
    return [np.array(part, np.float64) for part in parts.values()]


@pytest.mark.parametrize(
    ("fields", "of_keys"),
    [
        ({"attend_mask": [np.zeros((3, 3), int).tolist(), np.ones((3, 3), int).tolist()]}, True),
        ({"attend_mask": [np.zeros((3, 3), int).tolist(), np.ones((3, 3), int).tolist()], "fully_masked": "uniform"}, True),
        ({"bias": [np.full((3, 3), "-inf").tolist(), np.zeros((3, 3)).tolist()]}, True),
        ({"analysis": {"query_lens": [0, 3]}}, True),
        ({"valid_lens": [0, 3]}, False),
        ({"block_keys": [[1, 1, 1], [0, 0, 0]]}, False),
    ],
    ids=["mask", "uniform", "bias", "queries", "lengths", "keys"],
)
def test_every_metric_is_null_where_no_row_counts(http: httpx.Client, fields: dict[str, Any], of_keys: bool) -> None:
    """All 29 metrics, for an item whose rows are masked or padding; metrics about keys only where all keys are padding. The other item has
    numbers."""
    query = np.random.default_rng(12).standard_normal((2, 3, 64)).tolist()
    body = {"query": query, "tokens": {"query": ["a", "b", "a"]}, "metrics": list(METRICS), **fields}

    reply = http.post("/attend/analysis", json=body).json()

    assert list(reply["metrics"]) == list(METRICS)
    for name, metric in reply["metrics"].items():
        for part in numbers(metric):
            assert np.isnan(part[0]).all() != (of_keys and name in OF_KEYS), name
            assert not np.isnan(part[1]).all(), name


def test_a_fully_masked_head_is_null_and_contributes_zero(http: httpx.Client) -> None:
    """Its own numbers and comparisons with it are null. It adds 0 to the output, so it is the first to be pruned."""
    mask = np.ones((8, 3, 3), int)
    mask[5] = 0
    query = np.random.default_rng(13).standard_normal((3, 64)).tolist()
    names = [name for name in METRICS if name != "single_head"]
    body = {"query": query, "tokens": {"query": ["a", "b", "a"]}, "metrics": names, "attend_mask": mask.tolist()}

    metrics = http.post("/attend/analysis", json=body).json()["metrics"]

    of_output = {"contribution": 0, "gradient_importance": 0, "zero_ablation": {"relative_change": 0, "cosine": 1}}
    for name in names:
        if name in of_output:
            here = metrics[name]
            got = {part: array[5] for part, array in here.items()} if isinstance(here, dict) else here[5]
            assert got == of_output[name], name
        elif name != "pruning_order" and name not in OF_KEYS and METRICS[name].shapes.get("", "bh").startswith("bh"):
            for part in numbers(metrics[name]):
                assert np.isnan(part[5]).all() and not np.isnan(part[0]).all(), name
    assert metrics["pruning_order"]["heads"][0] == 5 and metrics["pruning_order"]["errors"][0] == 0
    assert metrics["position_disagreement"] is metrics["output_disagreement"] is None
    assert metrics["deviation_across_heads"] == [None] * 3


LOUD = [[3e30, 1.0, 0.5, 2.0], [-3e30, 0.5, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize(
    ("metrics", "fields"),
    [
        (["entropy_per_query"], {}),
        (["single_head"], {}),
        (["zero_ablation"], {}),
        (["strongest_links"], {"valid_lens": 2}),  # under a mask too
        (["value_norms"], {"reply": {"datatype": "FP16"}}),
    ],
    ids=["entropy", "single", "outputs", "masked", "datatype"],
)
def test_overflow_is_an_error_unless_nonfinite_is_null(
    client: Client, http: httpx.Client, metrics: list[str], fields: dict[str, Any]
) -> None:
    """A row whose scores overflow is not fully masked, and is not silently left out of means."""
    client.put_layer("analysed", {"d_model": 4, "num_heads": 2, "projections": False})
    body = {"layer": "analysed", "query": LOUD, "metrics": metrics, **fields}

    refused = http.post("/attend/analysis", json=body)
    taken = http.post("/attend/analysis", json={**body, "reply": {**body.get("reply", {}), "nonfinite": "null"}})

    assert refused.status_code == 422
    assert refused.json()["errors"][0]["at"] == ("/reply/datatype" if "reply" in fields else "")
    assert taken.status_code == 200
    assert any(np.isnan(part).any() for part in numbers(taken.json()["metrics"][metrics[0]]))


def test_overflow_in_blocked_keys_and_uncounted_queries_is_allowed(client: Client) -> None:
    """Only the numbers about that key or query are affected."""
    client.put_layer("analysed", {"d_model": 4, "num_heads": 2, "projections": False, "dtype": "float32"})
    rng = np.random.default_rng(14)
    query, key = rng.standard_normal((3, 4)), rng.standard_normal((4, 4))
    query[2], key[3] = 3e30, 3e30
    names = [name for name in METRICS if name not in ("duplicate_token_score", "induction_score", "single_head")]
    ends: dict[str, Any] = {"query_offset": 0, "analysis": {"query_lens": 2}}

    spoilt = client.analysis(query, key, layer="analysed", metrics=names, valid_lens=3, **ends)
    plain = client.analysis(query[:2], key[:3], layer="analysed", metrics=names, query_offset=0)

    for name in names:
        if METRICS[name].shapes.get("", "bh") in ("b", "bh", "bhh"):
            theirs = plain[name] if isinstance(plain[name], dict) else {"": plain[name]}
            ours = spoilt[name] if isinstance(spoilt[name], dict) else {"": spoilt[name]}
            for part, array in theirs.items():
                np.testing.assert_allclose(ours[part], array, rtol=1e-5, atol=1e-6, err_msg=name)
