"""POST /attend with several sequences in one query, as segments and one after the other: each is computed as if it were alone."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from attend.client import Client
from attend.errors import InvalidRequest, TooLarge
from support.v2 import in_bytes, read

RNG = np.random.default_rng(3)
QUERIES, KEYS = (2, 7, 1, 5), (3, 11, 2, 5)  # rows of each sequence
SPEC = {"d_model": 6, "num_heads": 3, "key_dim": 5, "value_dim": 7, "output_dim": 8, "dtype": "float64", "seed": 4}
LAYERS = {
    "plain": {},
    "rope": {"rope": {"theta": 50.0}, "num_kv_heads": 1},
    "alibi": {"alibi": True, "sinks": True},
    "gate": {"output_gate": {}, "window": {"left": 2, "right": 1}},
}
OUTPUTS = ["output", "attention_weights", "scores", "log_sum_exp", "query_projection", "key_projection", "head_outputs", "concatenated"]
GRADIENTS = ["query_gradient", "key_gradient", "value_gradient"]


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Client]:
    """Of a server with the layers LAYERS, and `self`, which has one width."""
    with Client(server.url) as one:
        for name, fields in LAYERS.items():
            one.put_layer(f"sequences-{name}", {**SPEC, **fields})
        one.put_layer("sequences-self", {"d_model": 10, "num_heads": 5, "seed": 2})
        yield one
        for name in (*LAYERS, "self"):
            one.delete_layer(f"sequences-{name}")


def inputs() -> dict[str, Any]:
    """Query, key and value of all sequences, and the gradient of the output."""
    q, k = sum(QUERIES), sum(KEYS)
    shapes = {"query": (q, 6), "key": (k, 5), "value": (k, 7), "output_gradient": (q, 8)}
    return {name: RNG.standard_normal(shape) for name, shape in shapes.items()}


def parts(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The inputs of each sequence."""
    ends = {"q": np.cumsum(QUERIES), "k": np.cumsum(KEYS)}
    for i, (q, k) in enumerate(zip(QUERIES, KEYS, strict=True)):
        rows = {"q": slice(ends["q"][i] - q, ends["q"][i]), "k": slice(ends["k"][i] - k, ends["k"][i])}
        yield {name: array[rows["k" if name in ("key", "value") else "q"]] for name, array in arrays.items()}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "fields",
    [{"query_offset": 0}, {"causal": True, "query_offset": "end"}, {"window": {"left": 3, "right": 0}, "query_offset": 1}],
    ids=str,
)
@pytest.mark.parametrize("tensors", ["safetensors", "json"])
def test_sequences_one_after_the_other_are_computed_as_if_alone(client: Client, layer: str, fields: dict[str, Any], tensors: str) -> None:
    """All outputs and gradients; rows without a key are counted over all sequences."""
    arrays = inputs()
    common = {"layer": f"sequences-{layer}", "outputs": [*OUTPUTS, *GRADIENTS], "head_scale": [0.5, 2.0, -1.0], **fields}
    if tensors == "json":
        common["reply"] = {"form": "nested"}

    got = client.attend(**arrays, **common, query_lengths=QUERIES, key_lengths=KEYS)

    alone = [client.attend(**part, **common) for part in parts(arrays)]
    assert got.fully_masked_rows == sum(one.fully_masked_rows for one in alone)
    for name in (*OUTPUTS, *GRADIENTS):
        wanted = [one[name] for one in alone]
        if name in ("attention_weights", "scores"):
            assert [x.shape for x in got[name]] == [(3, q, k) for q, k in zip(QUERIES, KEYS, strict=True)]
            for ours, theirs in zip(got[name], wanted, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12, err_msg=name)
        else:
            joined = np.concatenate(wanted, -1 if name == "log_sum_exp" else -2)
            np.testing.assert_allclose(got[name], joined, rtol=0, atol=1e-12, err_msg=name)


def test_sequences_of_one_layer_without_keys_of_their_own(client: Client) -> None:
    """Self-attention in float32, with the mean over two heads; as segments it has the same outputs."""
    query = RNG.standard_normal((8, 10)).astype(np.float32)
    common: dict[str, Any] = {"layer": "sequences-self", "select": {"heads": [4, 1], "average": True}, "causal": True}

    packed = client.attend(query, query_lengths=[3, 5], **common)
    segments = client.attend(query, segments=[0] * 3 + [1] * 5, **common)

    assert repr(packed).startswith("AttendResult(output [8, 10], attention_weights of [3, 3] and [5, 5];")
    np.testing.assert_allclose(packed.output, segments.output, rtol=0, atol=1e-6)
    for weights, rows in zip(packed.attention_weights, (slice(0, 3), slice(3, 8)), strict=True):
        np.testing.assert_allclose(weights, segments.attention_weights[rows, rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("reproducible", [False, True])
def test_sequences_of_equal_length_and_empty_ones_are_computed_as_if_alone(client: Client, reproducible: bool) -> None:
    """Those of equal length share a batch, unless each must have the bits that it has alone."""
    lengths = [2, 0, 3, 2, 0, 3, 2]
    query = RNG.standard_normal((sum(lengths), 10)).astype(np.float32)
    common: dict[str, Any] = {"layer": "sequences-self", "causal": True, "reproducible": reproducible}

    got = client.attend(query, query_lengths=lengths, **common)

    ends = np.cumsum(lengths)
    for i, (n, end) in enumerate(zip(lengths, ends, strict=True)):
        alone = client.attend(query[end - n : end], **common)
        largest = 0.0 if reproducible else 1e-6
        np.testing.assert_allclose(got.output[end - n : end], alone.output, rtol=0, atol=largest)
        np.testing.assert_allclose(got.attention_weights[i], alone.attention_weights, rtol=0, atol=largest)


def test_sequences_count_as_batch_items(client: Client) -> None:
    """A body of a few kilobytes may have very many empty ones."""
    with pytest.raises(TooLarge, match=r"at most 65536 batch items, or sequences in one query \(max_batch_items\), got 65538"):
        client.attend(np.zeros((1, 10)), layer="sequences-self", query_lengths=[0] * 65537 + [1])


def test_v2_names_the_weights_of_each_sequence(client: Client, http: httpx.Client) -> None:
    query = RNG.standard_normal((8, 10)).astype(np.float32)
    body, headers = in_bytes({"parameters": {"binary_data_output": True}}, query=query, query_lengths=np.array([3, 5]))

    reply = read(http.post("/v2/models/sequences-self/infer", content=body, headers=headers)).arrays

    wanted = client.attend(query, layer="sequences-self", query_lengths=[3, 5])
    assert {name: x.shape for name, x in reply.items()} == {
        "output": (8, 10),
        "attention_weights.0": (5, 3, 3),
        "attention_weights.1": (5, 5, 5),
    }
    np.testing.assert_allclose(reply["attention_weights.1"], wanted.attention_weights[1], rtol=0, atol=1e-6)


def test_the_cost_of_sequences_is_the_sum_of_theirs(client: Client) -> None:
    """As segments, all pairs are computed. The plan's outputs are those of the reply."""
    query = RNG.standard_normal((1000, 10)).astype(np.float32)

    packed = client.plan(query, layer="sequences-self", query_lengths=[100] * 10)
    segments = client.plan(query, layer="sequences-self", segments=np.repeat(np.arange(10), 100))

    assert packed.outputs["output"].shape == [1000, 10]
    assert packed.outputs["attention_weights.9"].shape == [5, 100, 100]
    assert packed.memory_bytes < segments.memory_bytes / 5
    assert packed.operations < segments.operations / 4
    assert packed.reply_bytes < segments.reply_bytes / 5


@pytest.mark.parametrize("outputs", [["output"], ["output", "attention_weights"]])
@pytest.mark.parametrize("causal", [False, True])
def test_segments_of_one_row_are_computed_as_if_alone(client: Client, outputs: list[str], causal: bool) -> None:
    """Sequences of 2, 3 and 1 tokens in a row of 7, the last of which is padding."""
    row = RNG.standard_normal((7, 10)).astype(np.float32)
    common: dict[str, Any] = {"layer": "sequences-self", "causal": causal, "outputs": outputs}

    got = client.attend(row, segments=[5, 5, 0, 0, 0, 3, -1], **common)

    assert got.fully_masked_rows == 5
    for part in (slice(0, 2), slice(2, 5), slice(5, 6)):
        alone = client.attend(row[part], **common)
        np.testing.assert_allclose(got.output[part], alone.output, rtol=0, atol=1e-6)
        if "attention_weights" in outputs:
            np.testing.assert_allclose(got.attention_weights[:, part, part], alone.attention_weights, rtol=0, atol=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another sum": ({"query_lengths": [3, 4]}, "/query_lengths: expected lengths with the sum 8, the rows of the query, got the sum 7"),
    "a batch": ({"query": np.zeros((1, 8, 10)), "query_lengths": [3, 5]}, "got a batch"),
    "keys alone": ({"key_lengths": [3, 5]}, "got key_lengths alone"),
    "a key without lengths": ({"key": np.zeros((8, 10)), "query_lengths": [3, 5]}, "expected key_lengths, since query_lengths and key"),
    "another number of sequences": ({"key": np.zeros((8, 10)), "query_lengths": [3, 5], "key_lengths": [1, 3, 4]}, "expected 2 lengths"),
    "a mask": ({"query_lengths": [3, 5], "attend_keys": np.ones(8)}, "expected no attend_keys beside query_lengths"),
    "dropout": ({"query_lengths": [3, 5], "dropout": {"p": 0.5, "seed": 1}}, "expected no dropout beside query_lengths"),
    "the largest weights": ({"query_lengths": [3, 5], "select": {"top_k": 2}}, "expected no top_k beside query_lengths"),
    "unequal lengths of queries and keys": (
        {"key": np.zeros((8, 10)), "query_lengths": [3, 5], "key_lengths": [5, 3], "causal": True},
        "expected an offset",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sequences_that_do_not_fit_are_refused(client: Client, case: str) -> None:
    fields, expected = REFUSED[case]
    with pytest.raises(InvalidRequest) as refusal:
        client.attend(**{"layer": "sequences-self", "query": np.zeros((8, 10)), **fields})
    problem = refusal.value.problems[0]
    assert expected in f"{problem.at}: expected {problem.expected}, got {problem.got}"


def test_analysis_and_figures_take_segments_only(client: Client) -> None:
    query = np.zeros((8, 10))
    for refused in (client.analysis, client.figure):
        with pytest.raises(InvalidRequest, match="segments, which keep sequences in one query apart here"):
            refused(query, layer="sequences-self", query_lengths=[3, 5])
    assert client.analysis(query, layer="sequences-self", segments=[0] * 3 + [1] * 5)["entropy"].shape == (5,)
