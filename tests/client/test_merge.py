"""Results over parts of the keys, merged: computed by hand, and compared with one service that has all keys, for all fields."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from service.attention.compare.random_cases import FEATURES, random_case
from service.client import Client, merge
from service.errors import InvalidRequest
from service.spec import LayerSpec

BOTH = ["head_outputs", "log_sum_exp"]
RNG = np.random.default_rng(4)
B, H, Q, K = 3, 6, 5, 18
QUERY, KEY, VALUE = RNG.standard_normal((B, Q, 29)), RNG.standard_normal((B, K, 17)), RNG.standard_normal((B, K, 23))
BASE = {"d_model": 29, "key_dim": 17, "value_dim": 23, "num_heads": H, "head_dim": 4, "value_head_dim": 7, "output_dim": 31}
BASE |= {"dtype": "float64"}
LENGTHS = RNG.integers(0, K + 1, (B, Q))
LENGTHS[0, :3] = 0, 2, K
ATTEND = RNG.random((B, K)) < 0.6
SEGMENTS = RNG.integers(-1, 2, (B, K))
BIAS = np.where(RNG.random((B, H, Q, K)) < 0.3, -np.inf, RNG.standard_normal((B, H, Q, K)))

# name -> (fields of the spec, fields of the request)
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True, "query_offset": 9}),
    "causal_end": ({}, {"causal": True, "query_offset": K - Q}),
    "window": ({"window": {"left": 4, "right": 1}}, {"query_offset": [2, 9, 13]}),
    "window_of_the_call": ({}, {"window": {"left": 3, "right": None}, "query_offset": 6}),
    "alibi": ({"alibi": True}, {"query_offset": 6}),
    "rope": ({"rope": {"theta": 100.0}}, {"query_offset": 11, "causal": True}),
    "rope_pairs": ({"rope": {"dims": 2, "interleaved": True}}, {"query_offset": [-2, 0, 40]}),
    "relative_bias": ({"relative_bias": {"buckets": 8, "max_distance": 13}}, {"query_offset": 4}),
    "valid_lens": ({}, {"valid_lens": LENGTHS}),
    "masks": ({}, {"attend_keys": ATTEND, "bias": BIAS}),
    "segments": ({}, {"query_segments": SEGMENTS[:, :Q], "key_segments": SEGMENTS}),
    "grouped": ({"num_kv_heads": 2}, {}),
    "softcap": ({"softcap": 0.5}, {}),
    "norms": ({"qk_norm": {"kind": "rms"}}, {}),
    "latent": (
        {"latent": {"key_value_rank": 5, "rope_key_dim": 2}, "rope": {"dims": 2}, "value_dim": 17},
        {"query_offset": 4, "value": KEY[:, ::-1].copy()},
    ),
    "transformer_xl": (
        {"relative_scores": {"kind": "transformer_xl"}, "d_model": 28},
        {"query": QUERY[..., :28].copy(), "query_offset": [2, 9, 13]},
    ),
    "disentangled": (
        {"relative_scores": {"kind": "disentangled", "max_distance": 9, "buckets": 4, "position_to_content": True}, "num_kv_heads": 3},
        {"query_offset": [2, 9, 13]},
    ),
    "axes": ({"rope": {"axes": [0, 1], "dims": 4}}, {"query_offset": 4}),
    "gate": ({"output_gate": {"granularity": "headwise", "bias": True}}, {}),
    "sinks": ({"sinks": True}, {"causal": True, "query_offset": 13}),
    "all": (
        {"sinks": True, "num_kv_heads": 3, "rope": {"theta": 50.0}, "alibi": True, "softcap": 2.0, "window": {"left": 9, "right": None}},
        {"causal": True, "query_offset": [3, 8, 13], "valid_lens": LENGTHS, "bias": BIAS, "head_scale": [1, 0.5, 0, 2, 1, -1]},
    ),
}
CUTS = {"two": (7, 11), "three": (2, 13, 3)}


def shard(request: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The call over the keys from start to stop alone, renumbered from 0."""
    keys = np.shape(request["key"])[-2]
    own = {"query": request["query"], "key": request["key"][..., start:stop, :], "value": request["value"][..., start:stop, :]}
    for name in ("attend_mask", "block_mask", "attend_keys", "block_keys", "key_segments", "bias"):
        if name in request:
            field = np.asarray(request[name])
            own[name] = field[..., start:stop] if field.shape[-1] == keys else field
    if "valid_lens" in request:
        own["valid_lens"] = np.clip(np.asarray(request["valid_lens"]) - start, 0, stop - start)
    own["query_offset"] = np.asarray(request.get("query_offset", 0)) - start
    return own | {
        name: request[name] for name in ("causal", "window", "query_segments", "head_scale", "scale", "softcap") if name in request
    }


def attend_in_shards(client: Client, layer: str, request: dict[str, Any], sizes: tuple[int, ...]) -> list[Any]:
    """A reply for each part of the keys."""
    ends = np.cumsum(sizes)
    return [client.attend(layer=layer, outputs=BOTH, **shard(request, end - n, end)) for n, end in zip(sizes, ends, strict=True)]


def draw(spec: dict[str, Any], seed: int = 7) -> dict[str, Any]:
    """Weights in which sinks and tables matter."""
    stream = np.random.default_rng(seed)
    shapes = LayerSpec.model_validate(spec).weight_shapes()
    return {name: stream.standard_normal(shape) * (0.4 if len(shape) == 2 else 1.0) for name, shape in shapes.items()}


@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_merged_parts_equal_the_whole(client: Client, name: str, sizes: tuple[int, ...]) -> None:
    spec, fields = BASE | LAYERS[name][0], LAYERS[name][1]
    weights = draw(spec)
    client.put_layer("whole", spec, weights)
    request = {"query": QUERY, "key": KEY, "value": VALUE, **fields}
    whole = client.attend(layer="whole", outputs=[*BOTH, "output"], **request)

    replies = attend_in_shards(client, "whole", request, sizes)
    merged = merge(replies, sinks=weights.get("sinks"), output_weight=weights["output.weight"], output_bias=weights["output.bias"])

    assert list(merged) == [*BOTH, "output"]
    for output in merged:
        assert merged[output].dtype == np.float64
        np.testing.assert_allclose(merged[output], whole[output], rtol=0, atol=1e-12, err_msg=output)
    assert all(np.abs(reply.head_outputs - whole.head_outputs).max() > 1e-3 for reply in replies)


@pytest.mark.parametrize("batched", [True, False])
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_parts_of_any_call_to_any_layer_can_be_merged(client: Client, batched: bool, seed: int, data: st.DataObject) -> None:
    """Some parts have no keys. The order and grouping of merges do not matter."""
    features = [
        feature
        for feature in FEATURES
        if feature
        not in ("dropout", "fully_masked", "chunk_size", "query_scale", "differential", "normalizer", "indexer", "grid_bias", "positions")
    ]
    case = random_case(np.random.default_rng(seed), features=features, rate=0.4, dtype="float64", batched=batched)
    assume(case.spec.splits_over_keys)
    request = {"key": case.request["query"], **case.request}
    request = {"value": request["key"], **request}
    if isinstance(request.get("query_offset"), str):  # "end": a part does not have the last key
        request["query_offset"] = 2
    client.put_layer("cut", case.spec, case.weights)
    whole = client.attend(layer="cut", outputs=BOTH, **request)
    keys = np.shape(request["key"])[-2]
    first, second = sorted(data.draw(st.tuples(st.integers(0, keys), st.integers(0, keys))))
    sinks = (case.weights or {}).get("sinks")

    a, b, c = attend_in_shards(client, "cut", request, (first, second - first, keys - second))

    for merged in (merge([a, b, c], sinks=sinks), merge([merge([c, a], sinks=sinks), b], sinks=sinks)):
        for output in BOTH:
            exact = whole[output]
            np.testing.assert_array_equal(np.isneginf(merged[output]), np.isneginf(exact))
            there = np.isfinite(exact)
            scale = max(1.0, np.abs(exact[there]).max(initial=0.0))
            np.testing.assert_allclose(
                merged[output][there], exact[there], rtol=0, atol=1e-10 * scale, err_msg=f"{output} of {case.spec!r}"
            )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_merged_arrays_have_the_dtype_of_the_replies(client: Client, dtype: str, tolerance: float) -> None:
    """Without a batch, too. The layer rounds; merging adds one rounding of the result."""
    spec = BASE | {"sinks": True, "dtype": dtype}
    client.put_layer("low", spec, draw(spec))
    request = {"query": QUERY[0], "key": KEY[0], "value": VALUE[0]}
    whole = client.attend(layer="low", outputs=BOTH, **request)

    merged = merge(attend_in_shards(client, "low", request, (13, 5)), sinks=draw(spec)["sinks"])

    assert merged["head_outputs"].shape == (H, Q, 7)
    for name, exact in whole.items():
        assert merged[name].dtype == exact.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        np.testing.assert_allclose(merged[name].astype(float), exact.astype(float), rtol=tolerance, atol=tolerance)


# --- by hand --------------------------------------------------------------------------------------------------------------------------


def reply(heads: Any, log: Any) -> dict[str, Any]:
    return {"head_outputs": np.array(heads, float), "log_sum_exp": np.array(log, float)}


def test_parts_are_weighted_by_their_sums_of_exponentials() -> None:
    """One head, one query: sums of 1 and 3, so a quarter and three quarters."""
    merged = merge([reply([[[4.0, 0.0]]], [[0.0]]), reply([[[0.0, 8.0]]], [[np.log(3)]])])

    np.testing.assert_allclose(merged["head_outputs"], [[[1.0, 6.0]]], rtol=1e-15)
    np.testing.assert_allclose(merged["log_sum_exp"], [[np.log(4)]], rtol=1e-15)


def test_a_sink_counts_once() -> None:
    """A sink of 1 in sums of 2 and 4: with the keys' own 1 and 3, that is 5 in all."""
    parts = [reply([[[4.0]]], [[np.log(2)]]), reply([[[8.0]]], [[np.log(4)]])]
    merged = merge(parts, sinks=[0.0], output_weight=[[2.0], [0.0]], output_bias=[1.0, 3.0])

    np.testing.assert_allclose(merged["head_outputs"], [[[8.0]]], rtol=1e-15)  # (2*4 + 4*8) / 5
    np.testing.assert_allclose(merged["log_sum_exp"], [[np.log(5)]], rtol=1e-15)
    np.testing.assert_allclose(merged["output"], [[17.0, 3.0]], rtol=1e-15)


@pytest.mark.parametrize("sinks", [None, [0.7]])
def test_two_fully_masked_halves_are_fully_masked(sinks: Any) -> None:
    """One fully masked half changes nothing."""
    empty, full = reply([[[0.0, 0.0]]], [[-np.inf]]), reply([[[1.5, -2.0]]], [[0.9]])
    merged = merge([empty, empty], sinks=sinks)
    assert merged["head_outputs"].tolist() == [[[0.0, 0.0]]] and merged["log_sum_exp"].tolist() == [[-np.inf]]

    for parts in ([empty, full], [full, empty, empty], [full]):
        merged = merge(parts, sinks=sinks)
        np.testing.assert_allclose(merged["head_outputs"], full["head_outputs"], rtol=1e-15)
        np.testing.assert_allclose(merged["log_sum_exp"], full["log_sum_exp"], rtol=1e-15)


def test_numbers_far_apart_neither_overflow_nor_vanish() -> None:
    """exp(1000) is no float64."""
    merged = merge([reply([[[1.0]]], [[1000.0]]), reply([[[3.0]]], [[1000.0]]), reply([[[9.0]]], [[-1000.0]])], sinks=[-2000.0])
    np.testing.assert_allclose(merged["head_outputs"], [[[2.0]]], rtol=1e-15)
    np.testing.assert_allclose(merged["log_sum_exp"], [[1000 + np.log(2)]], rtol=1e-15)
    low = merge([reply([[[1.0]]], [[-2000.0]]), reply([[[3.0]]], [[-2000.0]])])
    np.testing.assert_allclose(low["head_outputs"], [[[2.0]]], rtol=1e-15)


def test_replies_in_json_can_be_merged() -> None:
    """Nested lists, with "-inf" in words."""
    merged = merge([{"head_outputs": [[[2.0]]], "log_sum_exp": [[0.0]]}, {"head_outputs": [[[0.0]]], "log_sum_exp": [["-inf"]]}])
    assert merged["head_outputs"].tolist() == [[[2.0]]] and merged["head_outputs"].dtype == np.float64


FULL = reply(np.ones((2, 3, 5)), np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("replies", "more", "at", "message"),
    [
        ([], {}, "/replies", "at least one reply"),
        ([FULL, {"head_outputs": [[[1.0]]]}], {}, "/replies/1/log_sum_exp", "only head_outputs"),
        ([{"head_outputs": [["x"]], "log_sum_exp": [[0.0]]}], {}, "/replies/0/head_outputs", "expected numbers"),
        ([reply([[1.0]], [0.0])], {}, "/replies/0/head_outputs", r"\[h, q, d\]"),
        ([FULL, reply(np.ones((2, 4, 5)), np.zeros((2, 4)))], {}, "/replies/1/head_outputs", r"shape \[2, 3, 5\]"),
        ([FULL, reply(np.ones((2, 3, 5)), np.zeros((3, 2)))], {}, "/replies/1/log_sum_exp", r"shape \[2, 3\]"),
        ([FULL, reply(np.full((2, 3, 5), np.inf), np.zeros((2, 3)))], {}, "/replies/1/head_outputs/0/0/0", "finite"),
        ([reply([[[1.0]]], [[np.nan]])], {}, "/replies/0/log_sum_exp/0/0", "or -inf"),
        ([reply([[[1.0]]], [[-np.inf]])], {}, "/replies/0/head_outputs/0/0/0", "fully_masked: zero"),
        ([FULL], {"sinks": [0.0]}, "/sinks", "one for each head"),
        ([FULL], {"sinks": [0.0, 1.0]}, "/replies/0/log_sum_exp/1/0", "at least 1, the sink"),
        ([FULL], {"output_weight": np.ones((7, 9))}, "/output_weight", r"shape \[output_dim, 10\]"),
        ([FULL], {"output_weight": np.ones((7, 10)), "output_bias": [1.0]}, "/output_bias", r"shape \[7\]"),
        ([FULL], {"output_bias": [1.0]}, "/output_bias", "output_weight with it"),
    ],
)
def test_replies_that_cannot_be_merged_are_refused(replies: Any, more: Any, at: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        merge(replies, **more)
    assert refused.value.problems[0].at == at
