"""POST /attend in JSON: shapes and numbers of the reply for every field of a request.

`tests/web/test_numbers.py` compares the numbers of all forms with the reference, and `tests/attention/test_layer.py` those of random calls.
"""

import base64
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from support.app import collecting_server

B, Q, K = 2, 3, 5  # of most requests here; the layer `cross` has d_model 4, 2 heads, key_dim 3, value_dim 5
H, D = 2, 2
RNG = np.random.default_rng(11)
QUERY = RNG.standard_normal((B, Q, 4)).round(3)
KEY = RNG.standard_normal((B, K, 3)).round(3)
VALUE = RNG.standard_normal((B, K, 5)).round(3)
OUTPUTS = {
    "output": (B, Q, 4),
    "attention_weights": (B, H, Q, K),
    "scores": (B, H, Q, K),
    "log_sum_exp": (B, H, Q),
    "query_projection": (B, H, Q, D),
    "key_projection": (B, H, K, D),
    "value_projection": (B, H, K, D),
    "head_outputs": (B, H, Q, D),
    "concatenated": (B, Q, 4),
}


@pytest.fixture
def reply_to(http: httpx.Client, layers: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """POST /attend with these fields (arrays become lists); the reply, which must be 200."""

    def send(path: str = "/attend", **fields: Any) -> dict[str, Any]:
        body = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    return send


@pytest.fixture
def cross(reply_to: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The batched request to the layer `cross`, with these fields besides."""
    return lambda **fields: reply_to(**{"layer": "cross", "query": QUERY, "key": KEY, "value": VALUE, **fields})


def unpack(tensor: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A tensor of float32 in form `flat` or `base64` as an array."""
    assert tensor["datatype"] == "FP32"
    data = np.frombuffer(base64.b64decode(tensor["base64"], validate=True), "<f4") if "base64" in tensor else np.float32(tensor["data"])
    return data.reshape(tensor["shape"])


def words(tensor: Any) -> np.ndarray[Any, Any]:
    """Nested lists with "-inf" among the numbers as an array."""
    return np.array(tensor, np.float64)


# Shapes


def test_every_output_has_its_shape(cross: Callable[..., dict[str, Any]]) -> None:
    """All nine outputs at once, in the requested order, with unequal sizes."""
    reply = cross(outputs=list(OUTPUTS))

    assert list(reply) == ["layer", "fully_masked_rows", *OUTPUTS]
    assert {name: np.shape(reply[name]) for name in OUTPUTS} == OUTPUTS


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_does_not_depend_on_the_other_requested_outputs(cross: Callable[..., dict[str, Any]], name: str) -> None:
    together = cross(outputs=list(OUTPUTS), causal=True, query_offset=1)
    alone = cross(outputs=[name], causal=True, query_offset=1)

    assert list(alone) == ["layer", "fully_masked_rows", name]
    np.testing.assert_allclose(words(alone[name]), words(together[name]), rtol=0, atol=1e-6)


def test_the_default_outputs_are_output_and_attention_weights(cross: Callable[..., dict[str, Any]]) -> None:
    assert list(cross()) == ["layer", "fully_masked_rows", "output", "attention_weights"]


def test_outputs_have_the_order_of_the_request(cross: Callable[..., dict[str, Any]]) -> None:
    assert list(cross(outputs=["scores", "output", "log_sum_exp"]))[2:] == ["scores", "output", "log_sum_exp"]


def test_weights_are_softmax_of_scores_and_outputs_follow_from_them(cross: Callable[..., dict[str, Any]]) -> None:
    """Head outputs are weights times values; `concatenated` joins them."""
    reply = {name: words(tensor) for name, tensor in cross(outputs=list(OUTPUTS)).items() if name in OUTPUTS}

    scores = reply["query_projection"] @ reply["key_projection"].swapaxes(-1, -2) / math.sqrt(D)
    np.testing.assert_allclose(reply["scores"], scores, atol=1e-5)
    np.testing.assert_allclose(reply["log_sum_exp"], np.log(np.exp(scores).sum(-1)), atol=1e-5)
    np.testing.assert_allclose(reply["attention_weights"], np.exp(scores - reply["log_sum_exp"][..., None]), atol=1e-5)
    np.testing.assert_allclose(reply["head_outputs"], reply["attention_weights"] @ reply["value_projection"], atol=1e-5)
    np.testing.assert_allclose(reply["concatenated"], reply["head_outputs"].transpose(0, 2, 1, 3).reshape(B, Q, 4), atol=0)


UNBATCHED: list[tuple[str, dict[str, Any]]] = [
    ("nothing", {}),
    ("mask [q, k]", {"attend_mask": [[[1, 0, 1, 0, 1], [0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]] * B}),
    ("mask [h, q, k]", {"block_mask": RNG.integers(0, 2, (B, H, Q, K)).tolist()}),
    ("mask [1, q, k]", {"block_mask": RNG.integers(0, 2, (B, 1, Q, K)).tolist()}),
    ("mask [h, 1, k]", {"attend_mask": RNG.integers(0, 2, (B, H, 1, K)).tolist()}),
    ("attend_keys [k]", {"attend_keys": [[1, 0, 1, 1, 0]] * B}),
    ("block_keys [k]", {"block_keys": [[True, False, True, True, False]] * B}),
    ("segments", {"query_segments": [[0, 1, 1], [-1, 0, 3]], "key_segments": [[0, 0, 1, 1, -1], [3, 3, 0, -1, 2]]}),
    ("valid_lens, a number", {"valid_lens": [3, 2]}),
    ("valid_lens [q]", {"valid_lens": [[3, 2, 5], [0, 1, 4]]}),
    ("bias [q, k]", {"bias": RNG.standard_normal((B, Q, K)).tolist()}),
    ("bias [h, q, k]", {"bias": RNG.standard_normal((B, H, Q, K)).tolist()}),
    ("offset", {"causal": True, "query_offset": [1, -1]}),
    ("offset end", {"causal": True, "query_offset": "end", "valid_lens": [4, 3]}),
    ("head_scale [h]", {"head_scale": [[0.5, 2], [1, 0]]}),
    ("tokens", {"tokens": {"query": [["a", "b", "c"]] * B, "key": [["a", "b", "c", "d", "e"]] * B}}),
]


@pytest.mark.parametrize("fields", [fields for _, fields in UNBATCHED], ids=[name for name, _ in UNBATCHED])
def test_an_unbatched_request_gets_an_unbatched_reply(
    cross: Callable[..., dict[str, Any]], reply_to: Callable[..., dict[str, Any]], fields: dict[str, Any]
) -> None:
    """Every item of a batch, sent alone without the axis b, gets its part of the batch's reply."""
    batched = cross(outputs=list(OUTPUTS), **fields)
    whole = ("causal", "tokens")
    rows = 0
    for i in range(B):
        own = {name: value[i] if isinstance(value, list) else value for name, value in fields.items() if name not in whole}
        own |= {name: fields[name] for name in whole if name in fields}
        if "tokens" in own:
            own["tokens"] = {name: lists[i] for name, lists in own["tokens"].items()}
        reply = reply_to(layer="cross", query=QUERY[i], key=KEY[i], value=VALUE[i], outputs=list(OUTPUTS), **own)
        rows += reply["fully_masked_rows"]
        for name, shape in OUTPUTS.items():
            assert np.shape(reply[name]) == shape[1:]
            np.testing.assert_allclose(words(reply[name]), words(batched[name][i]), rtol=0, atol=1e-6, err_msg=name)
    assert rows == batched["fully_masked_rows"]


def test_value_defaults_to_key_and_both_to_query(reply_to: Callable[..., dict[str, Any]]) -> None:
    """Self-attention needs only a query; null is the same as left out. The projections may be one product, so the last bits may differ."""
    query, key = QUERY, QUERY[:, :2] + 1

    def same(left: dict[str, Any], right: dict[str, Any]) -> None:
        for name in ("output", "attention_weights"):
            np.testing.assert_allclose(left[name], right[name], rtol=0, atol=1e-6)

    same(reply_to(layer="tiny", query=query), reply_to(layer="tiny", query=query, key=query, value=query))
    same(reply_to(layer="tiny", query=query, key=key), reply_to(layer="tiny", query=query, key=key, value=key))
    assert reply_to(layer="tiny", query=query, key=None, value=None, attend_mask=None, select=None) == reply_to(layer="tiny", query=query)


def test_the_three_forms_of_a_tensor_are_equivalent(cross: Callable[..., dict[str, Any]]) -> None:
    """Nested lists, shape and data, shape and base64, in any datatype that represents the numbers."""
    nested = cross(valid_lens=[3, 4], block_keys=[[0, 1, 0, 0, 0]] * B)
    flat = cross(
        query={"shape": [B, Q, 4], "data": QUERY.reshape(-1).tolist()},
        key={"shape": [B, K, 3], "datatype": "FP64", "data": KEY.tolist()},
        value={"shape": [B, K, 5], "datatype": "FP64", "base64": base64.b64encode(VALUE.astype("<f8").tobytes()).decode()},
        valid_lens={"shape": [B], "datatype": "INT8", "base64": base64.b64encode(bytes([3, 4])).decode()},
        block_keys={"shape": [B, K], "datatype": "BOOL", "data": [[False, True, False, False, False]] * B},
    )

    assert flat == nested


def test_masks_may_be_numbers_or_booleans(cross: Callable[..., dict[str, Any]]) -> None:
    """Mixed too; and the inverted mask under the opposite field name."""
    mask = RNG.integers(0, 2, (Q, K))
    numbers = cross(attend_mask=mask)

    assert cross(attend_mask=(mask == 1)) == numbers
    assert cross(attend_mask=[[bool(x) if j % 2 else int(x) for j, x in enumerate(row)] for row in mask]) == numbers
    assert cross(block_mask=1 - mask) == numbers
    assert cross(attend_mask=mask[None, None].repeat(H, 1).repeat(B, 0)) == numbers


def test_a_key_is_visible_only_if_all_masks_allow_it(cross: Callable[..., dict[str, Any]]) -> None:
    fields = {
        "attend_mask": np.array([[1, 1, 1, 1, 0]] * Q),
        "block_keys": np.array([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]),
        "valid_lens": np.array([5, 3]),
        "bias": [["-inf", 0, 0, 0, 0]] * Q,
        "causal": True,
        "query_offset": 2,
    }
    weights = np.array(cross(**fields)["attention_weights"])

    first = np.array([[0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]], bool)
    second = np.array([[0, 1, 1, 0, 0]] * 3, bool)
    np.testing.assert_array_equal(weights[:, 0] > 0, [first, second])
    np.testing.assert_array_equal(weights[:, 1] > 0, [first, second])


# Selection and forms of the reply


def test_top_k_ties_go_to_the_lower_key(reply_to: Callable[..., dict[str, Any]]) -> None:
    """Twenty keys of equal weight, some blocked: the lowest visible ones come first, and the zeros after them."""
    query = np.ones((20, 4))
    blocked = [j % 3 == 0 for j in range(20)]

    top = reply_to(layer="tiny", query=query, block_keys=blocked, select={"top_k": 20, "queries": [0]})["attention_weights"]

    expected = [j for j in range(20) if j % 3] + [j for j in range(20) if not j % 3]
    assert top["keys"] == [[expected]] * H


@pytest.mark.parametrize("decimals", [0, 3, 17])
@pytest.mark.parametrize("form", ["nested", "flat"])
def test_decimals_round_numbers_in_text(cross: Callable[..., dict[str, Any]], http: httpx.Client, form: str, decimals: int) -> None:
    """Each number is the exact one, rounded, in few characters."""
    exact = cross(outputs=["scores", "output"], reply={"datatype": "FP64"})
    rounded = cross(outputs=["scores", "output"], reply={"decimals": decimals, "form": form})

    for name in ("scores", "output"):
        numbers = rounded[name] if form == "nested" else unpack(rounded[name])
        np.testing.assert_allclose(numbers, exact[name], rtol=1e-6, atol=0.5000001 * 10**-decimals)
        if decimals == 3:
            data = np.ravel(rounded[name] if form == "nested" else rounded[name]["data"])
            assert max(len(str(number).partition(".")[2]) for number in data.tolist()) <= 3


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_decimals_round_datatypes_of_two_bytes(cross: Callable[..., dict[str, Any]], datatype: str) -> None:
    data = np.ravel(cross(outputs=["output"], reply={"decimals": 2, "datatype": datatype})["output"]).tolist()

    assert max(len(str(number).partition(".")[2]) for number in data) <= 2


# Axes of length zero


def empty(*shape: int) -> dict[str, Any]:
    return {"shape": shape, "data": []}


def test_zero_length_axes_with_masks_dropout_and_selections(reply_to: Callable[..., dict[str, Any]]) -> None:
    fields = {
        "layer": "cross",
        "attend_keys": empty(B, 0),
        "valid_lens": [0, 0],
        "attend_mask": empty(Q, 0),
        "bias": empty(B, H, Q, 0),
        "causal": True,
        "query_offset": "end",
        "window": {"left": 1, "right": None},
        "dropout": {"p": 0.5, "seed": 1},
        "head_scale": [1, 2],
        "fully_masked": "uniform",
        "outputs": list(OUTPUTS),
    }

    reply = reply_to(query=QUERY, key=empty(B, 0, 3), value=empty(B, 0, 5), **fields)
    top = reply_to(query=QUERY, key=empty(B, 0, 3), value=empty(B, 0, 5), layer="cross", select={"top_k": 3, "average": True})

    assert reply["fully_masked_rows"] == B * H * Q
    assert reply["attention_weights"]["shape"] == [B, H, Q, 0]
    assert np.shape(reply["output"]) == (B, Q, 4)
    assert top["attention_weights"]["keys"] == {"shape": [B, Q, 0], "datatype": "INT64", "data": []}


# Rows without keys


def test_fully_masked_rows_are_zero_by_default(cross: Callable[..., dict[str, Any]]) -> None:
    """Weights and head outputs are 0, the output is the output projection's bias. Rows are counted over batch, heads and queries."""
    reply = cross(valid_lens=[[0, 5, 0], [1, 2, 3]], outputs=["output", "attention_weights", "concatenated"])

    assert reply["fully_masked_rows"] == 2 * H
    assert np.array(reply["attention_weights"])[0, :, [0, 2]].any() == np.False_
    assert reply["concatenated"][0][0] == reply["output"][0][2] == [0.0] * 4  # the bias of a seeded layer is 0
    np.testing.assert_allclose(np.array(reply["attention_weights"]).sum(-1)[1], 1, atol=1e-6)


@pytest.mark.parametrize("outputs", [["output"], ["output", "attention_weights", "concatenated"]])
def test_fully_masked_rows_can_be_uniform(cross: Callable[..., dict[str, Any]], outputs: list[str]) -> None:
    """1/k over all keys, including blocked ones, for any requested outputs."""
    values = np.array(cross(outputs=["value_projection"])["value_projection"])
    plain = cross(outputs=["concatenated"])

    reply = cross(valid_lens=[0, 5], fully_masked="uniform", outputs=[*outputs, "head_outputs"])

    assert reply["fully_masked_rows"] == H * Q
    np.testing.assert_allclose(np.array(reply["head_outputs"])[0], values[0].mean(1, keepdims=True).repeat(Q, 1), atol=1e-6)
    if "attention_weights" in outputs:
        np.testing.assert_allclose(np.array(reply["attention_weights"])[0], 1 / K, atol=1e-7)
        np.testing.assert_allclose(reply["concatenated"][1], plain["concatenated"][1], atol=1e-6)


@pytest.mark.parametrize("outputs", [["output"], ["scores"], ["query_projection"], ["attention_weights"]])
def test_fully_masked_rows_are_counted_for_any_outputs(cross: Callable[..., dict[str, Any]], outputs: list[str]) -> None:
    """By masks, lengths, causality, window and a bias of -inf."""
    assert cross(outputs=outputs)["fully_masked_rows"] == 0
    assert cross(outputs=outputs, block_keys=[[1] * K, [0] * K])["fully_masked_rows"] == H * Q
    assert cross(outputs=outputs, causal=True, query_offset=-2)["fully_masked_rows"] == B * H * 2
    assert cross(outputs=outputs, causal=True, query_offset=[-1, 0])["fully_masked_rows"] == H
    assert cross(outputs=outputs, window={"left": 0, "right": 0}, query_offset=3)["fully_masked_rows"] == B * H
    assert cross(outputs=outputs, bias=[["-inf"] * K, [0] * K, [0] * K])["fully_masked_rows"] == B * H
    assert cross(outputs=outputs, block_mask=[[[[0] * K] * Q, [[0] * K, [1] * K, [0] * K]]] * B)["fully_masked_rows"] == B
    assert cross(outputs=outputs, attend_keys=[[1, 1, 0, 0, 0]] * B, block_mask=[[1, 1, 0, 0, 0]] * Q)["fully_masked_rows"] == B * H * Q


def test_fully_masked_error_is_raised_only_for_fully_masked_rows(cross: Callable[..., dict[str, Any]]) -> None:
    assert cross(fully_masked="error", valid_lens=[1, 5])["fully_masked_rows"] == 0


def test_large_blocked_keys_do_not_change_the_reply(cross: Callable[..., dict[str, Any]]) -> None:
    """A blocked key and value of 1e38, whose products overflow, changes no bit of the other rows."""
    outputs = ["output", "attention_weights", "scores", "log_sum_exp"]
    masks = {"attend_keys": [[1, 1, 0, 1, 1]] * B}
    key, value = KEY.copy(), VALUE.copy()
    key[:, 2] = value[:, 2] = 1e38

    assert cross(key=key, value=value, outputs=outputs, **masks) == cross(outputs=outputs, **masks)
    np.testing.assert_allclose(
        cross(key=key, value=value, outputs=["output"], **masks)["output"], cross(outputs=["output"], **masks)["output"], rtol=0, atol=1e-6
    )


# Position


def test_causal_self_attention_needs_no_offset(reply_to: Callable[..., dict[str, Any]]) -> None:
    """With q = k the offset is 0."""
    weights = np.array(reply_to(layer="tiny", query=QUERY, causal=True)["attention_weights"])

    np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.tri(Q, dtype=bool), (B, H, Q, Q)))


@pytest.mark.parametrize(
    ("fields", "offsets"),
    [
        ({"query_offset": 0}, [0, 0]),
        ({"query_offset": "end"}, [2, 2]),
        ({"query_offset": -1}, [-1, -1]),
        ({"query_offset": [2, 0]}, [2, 0]),
        ({"query_offset": "end", "valid_lens": [4, 2]}, [1, -1]),
        ({"query_offset": "end", "valid_lens": [[1, 2, 3], [0, 0, 5]]}, [0, 2]),
        ({"query_offset": "end", "valid_lens": [0, 5]}, [-3, 2]),
        ({"query_offset": "end", "attend_keys": [[1, 0, 1, 0, 0], [1, 1, 1, 1, 1]]}, [0, 2]),
        ({"query_offset": "end", "block_keys": [[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]}, [1, -3]),
        ({"query_offset": "end", "block_keys": [[0, 0, 0, 1, 0]] * B, "valid_lens": [4, 5]}, [0, 2]),
    ],
)
def test_query_offset_shifts_the_queries(cross: Callable[..., dict[str, Any]], fields: dict[str, Any], offsets: list[int]) -> None:
    """Query i is at key position i + offset; "end" puts the last query on the last key that lengths and key masks allow."""
    reply = cross(causal=True, **fields)
    there = np.array(reply["attention_weights"]) > 0

    open_keys = np.array(cross(**fields)["attention_weights"]) > 0
    at = np.arange(Q)[None, :, None] + np.array(offsets)[:, None, None]
    np.testing.assert_array_equal(there, open_keys & (np.arange(K) <= at)[:, None])


@pytest.mark.parametrize(
    "window", [{"left": 1}, {"right": 1}, {"left": 0, "right": 0}, {"left": 2, "right": 1}, {"left": None, "right": None}, {}]
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_bounds_the_visible_keys(cross: Callable[..., dict[str, Any]], window: dict[str, int | None], causal: bool) -> None:
    """i + offset - left <= j <= i + offset + right; null is no bound; causal removes later keys."""
    weights = np.array(cross(window=window, causal=causal, query_offset=1)["attention_weights"])

    ahead = np.arange(K)[None] - (np.arange(Q)[:, None] + 1)
    seen = np.ones((Q, K), bool)
    if window.get("left") is not None:
        seen &= ahead >= -window["left"]
    if window.get("right") is not None:
        seen &= ahead <= window["right"]
    if causal:
        seen &= ahead <= 0
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(seen, weights.shape))


@pytest.mark.parametrize("width", [2**31, 2**63 - 1, 2**63, 10**30])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_huge_window_does_not_overflow(cross: Callable[..., dict[str, Any]], side: str, width: int) -> None:
    assert cross(window={side: width}, query_offset=1) == cross(window={side: K + Q}, query_offset=1)


@pytest.mark.parametrize("offset", [2**31 - 1, 1 - 2**31])
def test_distant_offsets_make_all_keys_or_none_visible(cross: Callable[..., dict[str, Any]], offset: int) -> None:
    """A query far behind the keys sees all of them, one far before them none."""
    reply = cross(causal=True, query_offset=offset)

    assert reply["fully_masked_rows"] == (0 if offset > 0 else B * H * Q)


# Modifiers


def test_dropout_uses_the_documented_random_stream(cross: Callable[..., dict[str, Any]]) -> None:
    """RandomState(seed).random_sample((b, h, q, k)) >= p is kept and divided by 1 - p; scores do not change."""
    p, seed = 0.4, 12345
    outputs = ["attention_weights", "scores", "log_sum_exp", "head_outputs", "value_projection"]
    plain, dropped = cross(outputs=outputs), cross(outputs=outputs, dropout={"p": p, "seed": seed})

    kept = np.random.RandomState(seed).random_sample((B, H, Q, K)) >= p
    expected = np.where(kept, np.array(plain["attention_weights"]) / (1 - p), 0)
    np.testing.assert_allclose(dropped["attention_weights"], expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(dropped["head_outputs"], expected @ np.array(plain["value_projection"]), rtol=0, atol=1e-5)
    assert (dropped["scores"], dropped["log_sum_exp"]) == (plain["scores"], plain["log_sum_exp"])
    assert not kept.all()


def test_dropout_of_selected_rows_equals_that_of_the_whole(cross: Callable[..., dict[str, Any]]) -> None:
    dropout = {"p": 0.5, "seed": 7}
    whole = np.array(cross(dropout=dropout)["attention_weights"])

    chosen = cross(dropout=dropout, select={"heads": [1], "queries": [2, 0]})["attention_weights"]

    np.testing.assert_allclose(chosen, whole[:, [1]][:, :, [2, 0]], rtol=0, atol=1e-7)


def test_dropout_with_p_zero_keeps_all_weights(cross: Callable[..., dict[str, Any]]) -> None:
    np.testing.assert_allclose(cross(dropout={"p": 0, "seed": 1})["attention_weights"], cross()["attention_weights"], rtol=0, atol=1e-7)


@pytest.mark.parametrize("scale", [[0.5, -2], [[1, 0], [0, 3]]])
def test_head_scale_multiplies_head_outputs_but_not_weights(cross: Callable[..., dict[str, Any]], scale: Any) -> None:
    """Shapes [h] and [b, h]."""
    plain, scaled = cross(outputs=list(OUTPUTS)), cross(outputs=list(OUTPUTS), head_scale=scale)

    factors = np.broadcast_to(np.array(scale), (B, H))
    expected = np.array(plain["head_outputs"]) * factors[:, :, None, None]
    np.testing.assert_allclose(scaled["head_outputs"], expected, atol=1e-6)
    np.testing.assert_allclose(scaled["concatenated"], expected.transpose(0, 2, 1, 3).reshape(B, Q, 4), atol=1e-6)
    assert scaled["attention_weights"] == plain["attention_weights"]
    np.testing.assert_allclose(cross(outputs=["output"], head_scale=scale)["output"], scaled["output"], atol=1e-6)


def test_scale_softcap_and_bias_are_applied_in_this_order(cross: Callable[..., dict[str, Any]]) -> None:
    """A softcap of 0 is none."""
    bias = RNG.standard_normal((Q, K)).round(3)
    raw = cross(outputs=["scores"], scale=1.0)["scores"]

    scores = cross(outputs=["scores"], scale=3, softcap=0.7, bias=bias)["scores"]

    np.testing.assert_allclose(scores, 0.7 * np.tanh(3 * np.array(raw) / 0.7) + bias, atol=1e-5)
    assert cross(softcap=0) == cross()


def test_bias_broadcasts_from_all_accepted_shapes(cross: Callable[..., dict[str, Any]]) -> None:
    """[q, k], [b, q, k], [b, h, q, k], and axes of 1."""
    plain = np.array(cross(outputs=["scores"])["scores"])
    for shape in ((Q, K), (1, K), (Q, 1), (B, Q, K), (B, 1, K), (1, Q, K), (B, H, Q, K), (1, H, 1, K), (B, 1, Q, 1), (1, 1, 1, 1)):
        bias = RNG.standard_normal(shape).round(3)
        added = bias[:, None] if bias.ndim == 3 else bias
        np.testing.assert_allclose(cross(outputs=["scores"], bias=bias)["scores"], plain + added, atol=1e-5, err_msg=str(shape))


def test_reproducible_calls_are_computed_alone_bit_for_bit() -> None:
    """Each is a batch of its own; the same calls without the flag share a batch."""
    query = np.random.default_rng(621).standard_normal((2, 211, 64)).tolist()
    with collecting_server(64) as (url, collect), httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(3) as threads:

        def attend(reproducible: bool) -> dict[str, Any]:
            answer = http.post("/attend", json={"query": query, "causal": True, "reproducible": reproducible, "reply": {"form": "base64"}})
            answer.raise_for_status()
            return answer.json()

        def batches() -> float:
            return float(re.search(r"^attend_batch_calls_count (\S+)$", http.get("/metrics").text, re.MULTILINE)[1])

        def attend_together(reproducible: bool) -> list[dict[str, Any]]:
            with collect(3):
                calls = [threads.submit(attend, reproducible) for _ in range(3)]
            return [call.result() for call in calls]

        alone, start = attend(True), batches()
        fixed = attend_together(True)
        assert batches() - start == 1 + 3
        usual = attend_together(False)
        assert batches() - start == 1 + 3 + 1 + 1

    assert fixed == [alone] * 3
    for name in ("output", "attention_weights"):
        for one in usual:
            np.testing.assert_allclose(unpack(alone[name]), unpack(one[name]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("more", [{}, {"causal": True, "query_offset": 1}, {"attend_keys": [1, 1]}, {"bias": [[0.5, 0.25]]}])
def test_scores_that_overflow_are_refused_whatever_is_requested(http: httpx.Client, dtype: str, more: dict[str, Any]) -> None:
    """A row whose scores are all -inf has no softmax; without overflow, a value of zeros gives zeros."""
    assert http.put("/layers/large", json={"spec": {"d_model": 1, "num_heads": 1, "projections": False, "dtype": dtype}}).is_success
    large = 1e200 if dtype == "float64" else 1e25
    fields = {"layer": "large", "key": [[-large], [-2 * large]], "value": [[3], [5]], **more}
    for outputs in (["output"], ["head_outputs"], ["output", "attention_weights"]):
        answer = http.post("/attend", json={**fields, "query": [[large]], "outputs": outputs})
        assert (answer.status_code, answer.json()["errors"][0]["at"]) == (422, ""), answer.text
    answer = http.post("/attend", json={**fields, "query": [[1e-3]], "value": [[0], [0]], "outputs": ["output"]})
    assert answer.json()["output"] == [[0.0]], answer.text
    assert http.delete("/layers/large").status_code == 204


# torch as an oracle


@pytest.mark.parametrize(("kdim", "vdim"), [(None, None), (10, 14)])
@pytest.mark.parametrize("bias", [True, False])
def test_init_torch_mha_equals_torchs_module(
    http: httpx.Client, layers: dict[str, Any], bias: bool, kdim: int | None, vdim: int | None
) -> None:
    """Its weights bit for bit, by their fingerprint, and its output and weights."""
    spec = {"d_model": 12, "num_heads": 3, "seed": 99, "init": "torch_mha", "bias": bias, "key_dim": kdim, "value_dim": vdim}
    seeded = http.put("/layers/torch", json={"spec": spec}).json()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        module = torch.nn.MultiheadAttention(12, 3, bias=bias, kdim=kdim, vdim=vdim, batch_first=True)
    packed = module.in_proj_weight
    parts = packed.chunk(3) if packed is not None else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = {f"{name}.weight": part for name, part in zip(("query", "key", "value"), parts, strict=True)}
    weights["output.weight"] = module.out_proj.weight
    if bias:
        weights |= {f"{name}.bias": part for name, part in zip(("query", "key", "value"), module.in_proj_bias.chunk(3), strict=True)}
        weights["output.bias"] = module.out_proj.bias
    del spec["init"], spec["seed"]
    loaded = http.put("/layers/torch", json={"spec": spec, "weights": {name: tensor.tolist() for name, tensor in weights.items()}}).json()
    query, key, value = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 12), (2, 7, kdim or 12), (2, 7, vdim or 12)))
    blocked = RNG.random((5, 7)) < 0.3
    padding = np.array([[False] * 5 + [True] * 2, [False] * 7])
    blocked[:, 0] = False

    body = {
        name: x.tolist() for name, x in {"query": query, "key": key, "value": value, "block_mask": blocked, "block_keys": padding}.items()
    }
    reply = http.post("/attend", json={"layer": "torch", **body}).json()
    inputs = (torch.from_numpy(x) for x in (query, key, value))
    output, attention = module(
        *inputs, attn_mask=torch.from_numpy(blocked), key_padding_mask=torch.from_numpy(padding), average_attn_weights=False
    )
    assert http.delete("/layers/torch").status_code == 204

    assert seeded["fingerprint"] == loaded["fingerprint"]
    np.testing.assert_allclose(reply["output"], output.detach().numpy(), rtol=0, atol=2e-6)
    np.testing.assert_allclose(reply["attention_weights"], attention.detach().numpy(), rtol=0, atol=2e-6)


def test_init_torch_mha_draws_torchs_weights_bit_for_bit(http: httpx.Client, layers: dict[str, Any]) -> None:
    """The value projection of the identity is the weight, transposed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = torch.nn.MultiheadAttention(6, 2)
    assert http.put("/layers/torch", json={"spec": {"d_model": 6, "num_heads": 2, "seed": 5, "init": "torch_mha"}}).status_code == 201

    outputs = ["query_projection", "key_projection", "value_projection"]
    reply = http.post(
        "/attend", json={"layer": "torch", "query": np.eye(6).tolist(), "outputs": outputs, "reply": {"form": "base64"}}
    ).json()
    assert http.delete("/layers/torch").status_code == 204

    for name, weight in zip(outputs, module.in_proj_weight.detach().numpy().reshape(3, 6, 6), strict=True):
        ours = unpack(reply[name]).transpose(0, 2, 1).reshape(6, 6)  # [h, n, d] -> [h * d, n]
        np.testing.assert_array_equal(ours, weight)


# The plan


PLANS: list[dict[str, Any]] = [
    {},
    {"outputs": list(OUTPUTS)},
    {"outputs": list(OUTPUTS), "reply": {"datatype": "FP64"}},
    {"outputs": list(OUTPUTS), "reply": {"datatype": "BF16"}},
    {"select": {"heads": [1], "queries": [2, 0]}},
    {"select": {"heads": [1, 0], "average": True}},
    {"select": {"top_k": 3}},
    {"select": {"top_k": 99, "average": True, "queries": [1]}},
    {"outputs": ["scores"], "reply": {"decimals": 3}},
]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_the_plan_predicts_the_reply(http: httpx.Client, layers: dict[str, Any], fields: dict[str, Any], batched: bool) -> None:
    """Names, shapes, datatypes and bytes of every tensor; the size of the reply nearly exactly in base64, within a factor of 2 in text."""
    query, key, value = RNG.standard_normal((3, 19, 4)), RNG.standard_normal((3, 23, 3)), RNG.standard_normal((3, 23, 5))
    body = {"layer": "cross", **fields}
    body |= {name: (x if batched else x[0]).tolist() for name, x in (("query", query), ("key", key), ("value", value))}
    for form in ("base64", "nested"):
        reply = {"form": form, **fields.get("reply", {})}
        if form == "base64":
            reply.pop("decimals", None)
        answer = http.post("/attend", json={**body, "reply": reply})
        assert answer.status_code == 200, answer.text

        plan = http.post("/attend/plan", json={**body, "reply": reply}).json()

        assert (plan["admitted"], plan["refusals"], plan["layer"]) == (True, [], answer.json()["layer"])
        if form == "base64":
            assert abs(plan["reply_bytes"] - len(answer.content)) <= 300
            tensors = {name: tensor for name, tensor in answer.json().items() if name not in ("layer", "fully_masked_rows")}
            for name in list(tensors):
                if "shape" not in tensors[name]:
                    tensors |= {f"{name}.{part}": tensor for part, tensor in tensors.pop(name).items()}
            assert list(plan["outputs"]) == list(tensors)
            for name, tensor in tensors.items():
                raw = len(base64.b64decode(tensor["base64"]))
                assert plan["outputs"][name] == {"shape": tensor["shape"], "datatype": tensor["datatype"], "bytes": raw}
        else:
            assert plan["reply_bytes"] / 2 <= len(answer.content) <= plan["reply_bytes"] * 2


def test_a_plan_of_shapes_equals_the_plan_of_tensors(http: httpx.Client, layers: dict[str, Any]) -> None:
    shapes = {
        "query": [B, Q, 4],
        "key": [B, K, 3],
        "value": [B, K, 5],
        "attend_mask": [B, H, Q, K],
        "block_keys": [B, K],
        "valid_lens": [B, Q],
        "bias": [Q, K],
        "head_scale": [B, H],
    }
    numbers = {name: np.zeros(shape, int).tolist() for name, shape in shapes.items()}

    by_shape = http.post("/attend/plan", json={"layer": "cross", **{name: {"shape": shape} for name, shape in shapes.items()}})
    by_number = http.post("/attend/plan", json={"layer": "cross", **numbers})

    assert by_shape.status_code == by_number.status_code == 200, by_shape.text
    assert by_shape.json() == by_number.json()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attend_mask": {"shape": [1_000_000, 1_000_000]}},
        {"bias": {"shape": [1, 8, 1_000_000, 1_000_000]}},
        {"valid_lens": {"shape": [100, 1_000_000]}},
        {"block_keys": {"shape": [100, 1_000_000]}},
    ],
    ids=str,
)
def test_a_plan_of_huge_shapes_allocates_nothing(http: httpx.Client, layers: dict[str, Any], more: dict[str, Any]) -> None:
    """Terabytes of scores: not admitted, with the reason."""
    body = {"query": {"shape": [100, 1_000_000, 64]}, "causal": True, **more}

    answer = http.post("/attend/plan", json=body, timeout=5)

    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert plan["outputs"]["attention_weights"]["shape"] == [100, 8, 1_000_000, 1_000_000]
    assert plan["outputs"]["attention_weights"]["bytes"] == 4 * 8 * 10**14
    assert plan["operations"] >= 4 * 100 * 10**12 * 64
    assert not plan["admitted"]
    assert "max_scores" in plan["refusals"][0]["expected"]


def test_a_plan_of_huge_lengths_allocates_nothing(http: httpx.Client, layers: dict[str, Any]) -> None:
    """10^12 lengths are compared with the number of keys."""
    body = {"query": {"shape": [1_000_000, 1_000_000, 64]}, "valid_lens": {"shape": [1_000_000, 1_000_000]}, "outputs": ["log_sum_exp"]}

    answer = http.post("/attend/plan", json=body, timeout=5)

    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"]["log_sum_exp"]["shape"] == [1_000_000, 8, 1_000_000]


def test_a_plan_refuses_invalid_requests_with_the_text_of_attend(http: httpx.Client, layers: dict[str, Any]) -> None:
    body = {"layer": "cross", "query": QUERY.tolist()}

    attend, plan = (http.post(path, json=body) for path in ("/attend", "/attend/plan"))

    assert attend.status_code == plan.status_code == 422
    assert attend.json()["errors"] == plan.json()["errors"]


@pytest.mark.parametrize("field", ["scale", "softcap"])
@pytest.mark.parametrize("value", [1e31, 1e100, 1e308])
def test_factors_that_overflow_are_refused_with_a_pointer(http: httpx.Client, layers: dict[str, Any], field: str, value: float) -> None:
    """In a request, and in the spec of a layer, which would refuse every call."""
    reply = http.post("/attend", json={"layer": "tiny", "query": [[1, 0, 0, 0]], field: value})
    assert (reply.status_code, reply.json()["errors"][0]["at"]) == (422, f"/{field}")
    reply = http.put("/layers/never", json={"spec": {"d_model": 4, "num_heads": 2, field: value}})
    assert (reply.status_code, reply.json()["errors"][0]["at"]) == (422, f"/spec/{field}")


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"outputs": ["output", "latent"]}, "/outputs/1"),
        ({"outputs": ["score_bias"]}, "/outputs/0"),
        ({"dropout": {"p": 0.5, "seed": 1}}, "/dropout"),
    ],
)
def test_what_differential_attention_does_not_define_is_refused(http: httpx.Client, fields: dict[str, Any], at: str) -> None:
    assert http.put("/layers/differential", json={"spec": {"d_model": 4, "num_heads": 2, "differential": {}}}).is_success
    for path in ("/attend", "/attend/plan"):
        answer = http.post(path, json={"layer": "differential", "query": [[1, 2, 3, 4]], **fields})
        assert answer.status_code == 422 and answer.json()["errors"][0]["at"] == at
    outputs = {tensor["name"] for tensor in http.get("/v2/models/differential").json()["outputs"]}
    http.delete("/layers/differential")
    assert {"attention_weights", "scores", "lambda"} <= outputs and not {"latent", "score_bias"} & outputs


@pytest.mark.parametrize("normalizer", ["sigmoid", "scalable_softmax"])
def test_padding_and_other_segments_do_not_change_weights_that_depend_on_a_number_of_keys(http: httpx.Client, normalizer: str) -> None:
    spec = {"d_model": 8, "num_heads": 2, "normalizer": normalizer, "alibi": True, "gain": 2.0}
    assert http.put("/layers/counted", json={"spec": spec}).is_success
    rows = RNG.standard_normal((7, 8)).tolist()
    alone = http.post("/attend", json={"layer": "counted", "query": rows[:3], "causal": True}).json()["attention_weights"]
    padded = http.post("/attend", json={"layer": "counted", "query": rows, "causal": True, "valid_lens": 3}).json()["attention_weights"]
    together = http.post("/attend", json={"layer": "counted", "query": rows, "causal": True, "segments": [5, 5, 5, 6, 6, 6, 6]}).json()
    parts = http.post("/attend", json={"layer": "counted", "query": rows, "causal": True, "query_lengths": [3, 4]}).json()
    refused = http.post("/attend", json={"layer": "counted", "query": rows, "outputs": ["log_sum_exp"]})
    http.delete("/layers/counted")
    np.testing.assert_allclose(np.array(padded)[:, :3, :3], alone, atol=1e-6)
    np.testing.assert_allclose(np.array(together["attention_weights"])[:, :3, :3], alone, atol=1e-6)
    np.testing.assert_allclose(np.concatenate((parts["output"][:3], parts["output"][3:])), together["output"], atol=1e-6)
    assert refused.status_code == (422 if normalizer == "sigmoid" else 200)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_differential_layer_and_calls_to_it_in_every_datatype(http: httpx.Client, dtype: str) -> None:
    """Rows sum to 1 - lambda, and lambda is lambda_init in a seeded layer; each head's output has the mean square (1 - lambda_init)²."""
    spec = {"d_model": 12, "num_heads": 2, "num_kv_heads": 1, "differential": {"lambda_init": 0.3}, "dtype": dtype, "rope": {"dims": 2}}
    assert http.put("/layers/differential", json={"spec": spec}).is_success
    body = {"layer": "differential", "query": RNG.standard_normal((3, 7, 12)).tolist(), "outputs": ["attention_weights", "head_outputs"]}
    reply = http.post("/attend", json=body | {"causal": True, "reply": {"datatype": "FP64"}}).json()
    http.delete("/layers/differential")
    weights, outputs = np.array(reply["attention_weights"]), np.array(reply["head_outputs"])
    np.testing.assert_allclose(weights.sum(-1), 0.7, atol=1e-2 if dtype.endswith("16") else 1e-6)
    np.testing.assert_allclose((outputs**2).mean(-1), 0.7**2, rtol=3e-2)


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
def test_the_mask_of_an_indexer_can_be_requested_and_given_to_another_layer(http: httpx.Client, form: str) -> None:
    """Each query keeps the best three of the keys that it may attend to. The reply has the same mask in every form."""
    latent, indexer = {"query_rank": 5, "key_value_rank": 7, "rope_key_dim": 2}, {"num_heads": 3, "head_dim": 4, "top_k": 3}
    spec = {"d_model": 12, "num_heads": 2, "latent": latent, "rope": {"dims": 2}, "gain": 3.0}
    assert http.put("/layers/indexed", json={"spec": spec | {"indexer": indexer}}).is_success
    query = RNG.standard_normal((2, 7, 12)).tolist()
    body = {"layer": "indexed", "query": query, "causal": True, "outputs": ["attention_weights", "indexer_mask", "output"]}
    reply = http.post("/attend", json=body | {"reply": {"form": form}}).json()
    plan = http.post("/attend/plan", json=body).json()["outputs"]["indexer_mask"]
    mask = np.array(reply["indexer_mask"]) if form == "nested" else None
    if form == "flat":
        mask = np.array(reply["indexer_mask"]["data"]).reshape(reply["indexer_mask"]["shape"])
    if form == "base64":
        mask = np.frombuffer(base64.b64decode(reply["indexer_mask"]["base64"]), np.bool_).reshape(reply["indexer_mask"]["shape"])
    alone = http.post("/attend", json={**body, "query": query[1], "outputs": ["indexer_mask", "output"]}).json()
    entropy = http.post("/attend/analysis", json={"layer": "indexed", "query": query, "causal": True, "metrics": ["keys_for_mass"]}).json()
    several = {**body, "query": query[0], "query_lengths": [3, 4], "outputs": ["indexer_mask"]}
    packed, planned = http.post("/attend", json=several), http.post("/attend/plan", json=several).json()["outputs"]
    assert http.put("/layers/plain", json={"spec": spec}).is_success  # the same weights, since those of the indexer are drawn last
    masked = http.post("/attend", json={"layer": "plain", "query": query[1], "attend_mask": alone["indexer_mask"]}).json()
    for name in ("indexed", "plain"):
        http.delete(f"/layers/{name}")

    assert mask is not None and mask.dtype == np.bool_ and plan == {"shape": [2, 7, 7], "datatype": "BOOL", "bytes": 98}
    assert mask.sum(-1).tolist() == [[1, 2, 3, 3, 3, 3, 3]] * 2 and not np.triu(mask, 1).any()
    if form == "nested":
        assert ((np.array(reply["attention_weights"]) > 0) == mask[:, None]).all()
        np.testing.assert_array_equal(alone["indexer_mask"], mask[1])
        np.testing.assert_allclose(alone["output"], np.array(reply["output"])[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(alone["output"], masked["output"], rtol=1e-5, atol=1e-5)
        assert np.max(entropy["metrics"]["keys_for_mass"]) <= 3
        assert {name: np.array(x).shape for name, x in packed.json()["indexer_mask"].items()} == {"0": (3, 3), "1": (4, 4)}
    assert planned["indexer_mask.1"] == {"shape": [4, 4], "datatype": "BOOL", "bytes": 16}


def test_fields_that_an_indexer_excludes_are_refused(http: httpx.Client) -> None:
    spec = {"d_model": 4, "num_heads": 2, "indexer": {"num_heads": 1, "head_dim": 2, "top_k": 1}}
    assert http.put("/layers/indexed", json={"spec": spec}).status_code == 201
    for fields, at in (({"attend_mask": np.ones((2, 3, 3)).tolist()}, "/attend_mask"), ({"bias": np.zeros((2, 3, 3)).tolist()}, "/bias")):
        refused = http.post("/attend", json={"layer": "indexed", "query": np.ones((3, 4)).tolist(), **fields})
        assert refused.status_code == 422 and refused.json()["errors"][0]["at"] == at
    http.delete("/layers/indexed")
    refused = http.post("/attend", json={"query": np.ones((3, 64)).tolist(), "outputs": ["indexer_mask"]})
    assert refused.status_code == 422 and "one of attention_weights, concatenated" in refused.json()["errors"][0]["expected"]
