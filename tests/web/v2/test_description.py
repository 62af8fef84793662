"""Inputs and outputs announced by metadata and configuration are those that infer accepts and returns: names, datatypes, shapes, largest
batch."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from support.v2 import DTYPES, in_bytes, in_json, read, refused

B, Q, K, H = 2, 3, 5, 3
SEQUENCES = {"query": (B, Q), "key": (B, K), "value": (B, K), "attend_keys": (B, K), "block_keys": (B, K), "head_scale": (B,)}
SEGMENTS = {"segments": (B, Q), "query_segments": (B, Q), "key_segments": (B, K)}
PAIRS = dict.fromkeys(("attend_mask", "block_mask", "bias", "pattern"), (B, H, Q, K))
ROWS = dict.fromkeys(("pattern_rows", "head_output_rows", "head_outputs"), (B, H, Q))
PER_ITEM = dict.fromkeys(("valid_lens", "query_offset"), (B,))
LENGTHS: dict[str, tuple[int, ...]] = {**SEQUENCES, **PAIRS, **ROWS, **SEGMENTS, **PER_ITEM}
CROSS, PAIR = ("query", "key", "value"), ("query_segments", "key_segments")
RNG = np.random.default_rng(47)
INFER = "/v2/models/tiny/infer"


def announced(tensor: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A tensor of exactly this datatype and shape, with consistent lengths in place of -1."""
    lengths = iter(LENGTHS[tensor["name"]])
    shape = [next(lengths) if length == -1 else length for length in tensor["shape"]]
    return RNG.integers(0, 2, shape).astype(DTYPES[tensor["datatype"]])


def inputs_of(v2: httpx.Client) -> dict[str, np.ndarray[Any, Any]]:
    return {tensor["name"]: announced(tensor) for tensor in v2.get("/v2/models/tiny").json()["inputs"]}


def test_metadata_lists_exactly_these_inputs(v2: httpx.Client) -> None:
    assert set(inputs_of(v2)) == set(LENGTHS)


@pytest.mark.parametrize("name", [name for name in LENGTHS if name not in ("query", "value")])
def test_an_input_of_the_announced_shape_has_the_meaning_of_the_field(v2: httpx.Client, name: str) -> None:
    """The result equals POST /attend; causal is set if an offset is given."""
    every = inputs_of(v2)
    names = {"segments": ("query", name), "query_segments": (*CROSS, *PAIR), "key_segments": (*CROSS, *PAIR)}.get(name, (*CROSS, name))
    names += {"pattern_rows": ("pattern",), "head_output_rows": ("head_outputs",)}.get(name, ())
    tensors = {one: every[one] for one in dict.fromkeys(names)}
    parameters = {"causal": name == "query_offset"}
    reply = read(v2.post(INFER, json={"inputs": in_json(**tensors), "parameters": parameters}))

    plain = {one: array[:, 0].tolist() if one in PER_ITEM else array.tolist() for one, array in tensors.items()}
    want = v2.post("/attend", json={"layer": "tiny", **plain, **parameters}, headers={"Content-Type": "application/json"}).json()
    for output in ("output", "attention_weights"):
        np.testing.assert_allclose(reply.arrays[output], want[output], rtol=0, atol=2e-6)


def test_numbers_per_item_may_have_other_shapes(v2: httpx.Client) -> None:
    """[b], [b, 1], for lengths [b, q], for offsets a single number. Other shapes are refused."""
    query = RNG.standard_normal((B, Q, 6)).astype(np.float32)
    lengths = np.array([1, 3])
    shapes = [lengths, lengths[:, None], np.repeat(lengths[:, None], Q, 1)]
    answers = [
        read(v2.post(INFER, json={"inputs": in_json(query=query, valid_lens=shape), "parameters": {"reproducible": True}})).arrays["output"]
        for shape in shapes
    ]
    np.testing.assert_array_equal(answers[1], answers[0])
    np.testing.assert_array_equal(answers[2], answers[0])

    offset = np.array([1, 1])
    members = {"parameters": {"causal": True, "reproducible": True}}
    answers = [
        read(v2.post(INFER, json={"inputs": in_json(query=query, query_offset=shape), **members})).arrays["output"]
        for shape in (offset, offset[:, None], np.array(1))
    ]
    answers.append(
        read(
            v2.post(INFER, json={"inputs": in_json(query=query), "parameters": {"causal": True, "reproducible": True, "query_offset": 1}})
        ).arrays["output"]
    )
    body, headers = in_bytes(members, query=query, query_offset=np.array(1))
    answers.append(read(v2.post(INFER, content=body, headers=headers)).arrays["output"])
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])

    for name in PER_ITEM:
        for shape in ((B + 1, 1), (B, 1, 1), (1, 1), (1, B)):
            wrong = {"inputs": in_json(query=query, **{name: np.ones(shape, np.int64)})}
            assert f" in {name}, at /inputs/1" in refused(v2.post(INFER, json=wrong))
        lone = {"inputs": in_json(query=query[0], **{name: np.ones((Q, 1), np.int64)})}
        assert f" in {name}, at /inputs/1" in refused(v2.post(INFER, json=lone))


INDEXED = {
    "latent": {"query_rank": 5, "key_value_rank": 7, "rope_key_dim": 2},
    "rope": {"dims": 2},
    "indexer": {"num_heads": 3, "head_dim": 4, "top_k": 3},
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("operators", [{}, INDEXED, {"normalizer": "sigmoid"}], ids=["plain", "indexer", "sigmoid"])
def test_outputs_of_metadata_and_replies_agree(v2: httpx.Client, operators: dict[str, Any], dtype: str) -> None:
    """Names, datatypes and shapes of every announced output, in a reply with all of them, as bytes."""
    spec = {"d_model": 14, "num_heads": 2, "output_dim": 11, "dtype": dtype, **operators}
    assert v2.put("/layers/announced", json={"spec": spec}, headers={"Content-Type": "application/json"}).is_success
    metadata = v2.get("/v2/models/announced").json()
    query = RNG.standard_normal((B, Q, 14)).astype(np.float32)
    key = RNG.standard_normal((B, K, 14)).astype(np.float32)
    requested = [{"name": tensor["name"], "parameters": {"binary_data": True}} for tensor in metadata["outputs"]]
    body, headers = in_bytes({"outputs": requested, "parameters": {"causal": True, "query_offset": "end"}}, query=query, key=key)
    reply = read(v2.post("/v2/models/announced/infer", content=body, headers=headers))
    v2.delete("/layers/announced")
    for announced, output in zip(metadata["outputs"], reply.document["outputs"], strict=True):
        assert (announced["name"], announced["datatype"]) == (output["name"], output["datatype"])
        lengths = zip(announced["shape"], output["shape"], strict=True)
        assert [n for n, length in lengths if n not in (-1, length)] == [], announced["name"]
    assert ("indexer_mask" in reply.arrays) == ("indexer" in operators)


def test_inputs_without_a_default_are_not_optional(v2: httpx.Client) -> None:
    """If keys have another width than queries, a request needs them."""
    for widths, want in (({"key_dim": 4}, ["query", "key"]), ({"key_dim": 4, "value_dim": 2}, ["query", "key", "value"]), ({}, ["query"])):
        spec = json.dumps({"d_model": 6, "num_heads": 3, **({"value_dim": 4} if widths == {"key_dim": 4} else {}), **widths})
        assert v2.post("/v2/repository/models/wide/load", json={"parameters": {"config": spec}}).status_code == 200
        config = v2.get("/v2/models/wide/config").json()
        needed = [tensor for tensor in config["input"] if not tensor["optional"]]
        assert [tensor["name"] for tensor in needed] == want
        tensors = {tensor["name"]: np.ones((B, Q, tensor["dims"][-1]), np.float32) for tensor in needed}
        read(v2.post("/v2/models/wide/infer", json={"inputs": in_json(**tensors)}))
        for name in want[1:]:
            rest = {other: array for other, array in tensors.items() if other != name}
            refused(v2.post("/v2/models/wide/infer", json={"inputs": in_json(**rest)}))
    v2.delete("/layers/wide")


@pytest.mark.parametrize(
    ("setting", "limit", "most"),
    [
        ("max_batch_items", 40, 40),
        ("max_scores", 400, 50),  # 8 heads
        ("max_body_bytes", 1024 + 30 * 64 * 4, 30),
        ("max_memory_bytes", 1 << 20, None),
        ("max_reply_bytes", 20000, None),
    ],
)
def test_max_batch_size_is_the_largest_admitted_batch(start_here: Callable[..., str], setting: str, limit: int, most: int | None) -> None:
    """Of one query and one key, whichever limit applies."""
    with httpx.Client(base_url=start_here(**{setting: limit}), timeout=60) as http:
        largest = http.get("/v2/models/default/config").json()["max_batch_size"]
        assert most is None or largest == most

        def infer(items: int) -> httpx.Response:
            body, headers = in_bytes({"parameters": {"binary_data_output": True}}, query=np.ones((items, 1, 64), np.float32))
            return http.post("/v2/models/default/infer", content=body, headers=headers)

        assert largest > 1
        assert read(infer(largest)).arrays["attention_weights"].shape == (largest, 8, 1, 1)
        if setting == "max_body_bytes":  # tensors get the bytes that the JSON does not use
            largest += 4
        assert "at most" in refused(infer(largest + 1), 413)
