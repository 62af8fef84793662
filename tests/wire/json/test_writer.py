"""Replies in JSON, written and read back: every form and datatype, and the values for numbers that JSON does not have."""

import base64
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attend.errors import InvalidRequest
from attend.wire.client_codec import decode_json_reply
from attend.wire.codec import Reply
from attend.wire.json import writer
from attend.wire.json.writer import encode
from attend.wire.schemas.attend import ReplyOptions

pytestmark = pytest.mark.usefixtures("either_way")
DTYPES = {"FP16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16), "FP32": np.dtype(np.float32), "FP64": np.dtype(np.float64)}
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)
ODD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def write(tensors: dict[str, Any], datatype: str = "FP32", **options: Any) -> dict[str, Any]:
    """The document of a reply with these tensors. Fails if it contains a bare NaN or infinity."""
    reply = Reply({"name": "tiny", "fingerprint": "abc"}, 7, datatype, tensors)
    document: dict[str, Any] = json.loads(text(reply, **options), parse_constant=lambda word: pytest.fail(f"a bare {word}"))
    assert list(document) == ["layer", "fully_masked_rows", *tensors]
    assert (document["layer"], document["fully_masked_rows"]) == ({"name": "tiny", "fingerprint": "abc"}, 7)
    return document


def text(reply: Reply, **options: Any) -> bytes:
    return b"".join(encode(reply, ReplyOptions(**options))[1])


def read(tensor: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Decode a tensor with a shape, in either form."""
    dtype = {**DTYPES, "INT64": np.dtype(np.int64)}[tensor["datatype"]]
    if "base64" in tensor:
        return np.frombuffer(base64.b64decode(tensor["base64"], validate=True), dtype).reshape(tensor["shape"])
    return np.array([ODD.get(x, x) if isinstance(x, str) else x for x in tensor["data"]], np.float64).astype(dtype).reshape(tensor["shape"])


def finite(dtype: Any) -> st.SearchStrategy[Any]:
    width = np.dtype(dtype).itemsize * 8
    return hnp.arrays(dtype, SHAPES, elements=st.floats(allow_nan=False, allow_infinity=False, width=width))


def same(left: Any, right: Any) -> None:
    """Bit for bit, but for the sign of a zero."""
    left, right = np.asarray(left), np.asarray(right)
    assert (left.shape, left.dtype) == (right.shape, right.dtype)
    np.testing.assert_array_equal(left.astype(np.float64), right.astype(np.float64))


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@given(data=st.data())
def test_finite_numbers_are_read_back_bit_for_bit(datatype: str, form: str, data: st.DataObject) -> None:
    """Including subnormals and negative zeros."""
    array = data.draw(finite(DTYPES[datatype]))

    tensor = write({"output": array}, datatype, form=form)["output"]

    back = np.array(tensor, np.float64).astype(array.dtype) if form == "nested" else read(tensor)
    same(back, array)
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
@pytest.mark.parametrize("datatype", DTYPES)
@given(array=finite(np.float32))
def test_every_datatype_has_the_rounded_number(datatype: str, form: str, array: Any) -> None:
    """In each form. Overflow, which only narrow datatypes have, is refused."""
    with np.errstate(over="ignore"):
        cast = array.astype(DTYPES[datatype])
    if not np.isfinite(cast).all():
        with pytest.raises(InvalidRequest):
            write({"output": array}, datatype, form=form)
        return

    tensor = write({"output": array}, datatype, form=form)["output"]

    if form != "nested":
        assert (list(tensor), tensor["datatype"]) == (["shape", "datatype", "data" if form == "flat" else "base64"], datatype)
        assert tensor["shape"] == list(array.shape)
    same(np.array(tensor, np.float64).astype(cast.dtype) if form == "nested" else read(tensor), cast)


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
@pytest.mark.parametrize("datatype", DTYPES)
@given(array=finite(np.float16), keys=hnp.arrays(np.int64, SHAPES))
def test_decode_json_reply_inverts_encode(datatype: str, form: str, array: Any, keys: Any) -> None:
    """Also for the two parts of a selection."""
    cast = array.astype(DTYPES[datatype])
    if not np.isfinite(cast).all():
        return
    reply = Reply({"name": "a", "fingerprint": "b"}, 3, datatype, {"output": array, "attention_weights": {"keys": keys, "values": array}})

    head, tensors = decode_json_reply(text(reply, form=form))

    assert (head.layer.model_dump(), head.fully_masked_rows) == (reply.layer, 3)
    selection = tensors["attention_weights"]
    assert isinstance(selection, dict)
    for tensor in (tensors["output"], selection["values"]):
        assert isinstance(tensor, np.ndarray)
        if form != "nested":
            assert tensor.dtype == cast.dtype
        same(tensor.astype(cast.dtype), cast)  # nested lists say no datatype, and are written shortest
    np.testing.assert_array_equal(selection["keys"], keys)
    assert selection["keys"].dtype == np.int64


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 0, 3), (1, 2, 0, 0)])
@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
@pytest.mark.parametrize("datatype", DTYPES)
def test_tensors_without_elements_are_written_with_a_shape(datatype: str, form: str, shape: tuple[int, ...]) -> None:
    """Whatever form was requested."""
    tensor = write({"output": np.zeros(shape, np.float32)}, datatype, form=form)["output"]

    assert (tensor["shape"], tensor["datatype"]) == (list(shape), datatype)
    assert read(tensor).shape == shape


@given(
    hnp.arrays(np.float32, SHAPES, elements=st.one_of(st.floats(width=32), st.sampled_from([np.nan, np.inf, -np.inf]))),
    st.sampled_from(["nested", "flat"]),
    st.sampled_from(["FP32", "FP64", "FP16", "BF16"]),
    st.sampled_from([None, 0, 3]),
)
def test_nonfinite_numbers_are_replaced_in_place(array: Any, form: str, datatype: str, decimals: int | None) -> None:
    """NaN and both infinities, any number of them in any order; as strings or as null."""
    with np.errstate(over="ignore"):
        cast = array.astype(DTYPES[datatype]).astype(np.float64)
    expected = [{np.inf: "inf", -np.inf: "-inf"}.get(x, "nan" if np.isnan(x) else "number") for x in cast.ravel().tolist()]

    for nonfinite in ("string", "null"):
        tensor = write({"output": array}, datatype, form=form, nonfinite=nonfinite, decimals=decimals)["output"]
        items = tensor["data"] if form == "flat" else list(np.array(tensor, object).ravel())
        words = [item if item is None or isinstance(item, str) else "number" for item in items]
        assert words == [None if word != "number" and nonfinite == "null" else word for word in expected]
        numbers = [item for item in items if isinstance(item, float | int)]
        atol = 1e-38 if decimals is None else 0.5000001 * 10**-decimals
        np.testing.assert_allclose(numbers, cast.ravel()[np.isfinite(cast.ravel())], rtol=1e-6, atol=atol)


@pytest.mark.parametrize("name", ["scores", "log_sum_exp"])
@pytest.mark.parametrize("nonfinite", ["error", "null", "string"])
@given(array=hnp.arrays(np.float32, SHAPES, elements=st.one_of(st.floats(-1e3, 1e3, width=32), st.just(-np.inf))))
def test_minus_infinity_is_allowed_in_scores_and_log_sum_exp(name: str, nonfinite: str, array: Any) -> None:
    """Whatever `nonfinite` is, in every form."""
    nested = write({name: array}, nonfinite=nonfinite)[name]
    same(np.array(nested, np.float64).astype(np.float32), array)
    assert json.dumps(nested).count('"-inf"') == int(np.isneginf(array).sum())
    for form in ("flat", "base64"):
        same(read(write({name: array}, nonfinite=nonfinite, form=form)[name]), array)


@pytest.mark.parametrize("items", [2, 6007])  # beyond FEW_FLAGS numbers, another function looks for them
@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
@pytest.mark.parametrize(
    ("name", "odd", "datatype", "word"),
    [
        ("output", np.nan, "FP32", "nan"),
        ("output", -np.inf, "FP32", "-inf"),
        ("scores", np.inf, "FP32", "inf"),
        ("scores", np.nan, "FP64", "nan"),
        ("log_sum_exp", np.nan, "FP32", "nan"),
        ("output", 65520, "FP16", "inf"),
        ("output", -70000, "FP16", "-inf"),
        ("output", 3.4e38, "BF16", "inf"),
    ],
)
def test_the_error_for_a_nonfinite_number_names_output_and_index(
    name: str, odd: float, datatype: str, word: str, form: str, items: int
) -> None:
    """In binary forms too."""
    array = (np.arange(items * 12, dtype=np.float32) % 24).reshape(items, 3, 4)
    array[1, 2, 1] = array[1, 2, 3] = odd
    if name == "scores":
        array[0, 0, 0] = -np.inf

    with pytest.raises(InvalidRequest) as caught:
        write({name: array}, datatype, form=form)

    problem = caught.value.problems[0]
    assert problem.at == ("/reply/datatype" if np.isfinite(odd) else "")
    assert problem.expected == f"finite numbers in {name} as {datatype}, unless reply.nonfinite allows others"
    assert problem.got == f"{name}[1, 2, 1] = {word}"


@given(finite(np.float32), st.integers(0, 17), st.sampled_from(["nested", "flat"]), st.sampled_from(["FP32", "FP64"]))
def test_decimals_round_and_never_overflow(array: Any, decimals: int, form: str, datatype: str) -> None:
    """Every number is within half a unit of the last decimal, or of its own last bit."""
    tensor = write({"output": array}, datatype, form=form, decimals=decimals)["output"]

    numbers = np.array(tensor if form == "nested" else read(tensor), np.float64)
    exact = array.astype(np.float64)
    assert np.all(np.abs(numbers - exact) <= 0.51 * 10.0**-decimals + np.abs(exact) * 2e-7)


@given(hnp.arrays(np.int64, SHAPES))
def test_top_k_keys_are_int64_in_every_form(keys: Any) -> None:
    """Whatever the datatype of the values."""
    tensors = {"attention_weights": {"keys": keys, "values": np.zeros(keys.shape, np.float32)}}

    assert write(tensors, decimals=0)["attention_weights"]["keys"] == keys.tolist()
    for form in ("flat", "base64"):
        tensor = write(tensors, "FP16", form=form)["attention_weights"]["keys"]
        assert (tensor["datatype"], tensor["shape"]) == ("INT64", list(keys.shape))
        values = tensor["data"] if form == "flat" else np.frombuffer(base64.b64decode(tensor["base64"]), np.int64).tolist()
        assert values == keys.ravel().tolist()


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
def test_strided_and_big_endian_arrays_are_written_row_major_and_little_endian(form: str) -> None:
    """Also transposed and broadcast ones."""
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for array in (whole.transpose(2, 0, 1), whole[:, ::-1, ::2], np.broadcast_to(whole[:1], (2, 3, 4)), whole.astype(">f4")):
        tensor = write({"output": array}, form=form)["output"]
        np.testing.assert_array_equal(tensor if form == "nested" else read(tensor), array)


@pytest.mark.parametrize(
    ("number", "decimals"), [(123456789012345.0, 4), (2.0**53 - 1, 4), (1e300, 17), (1e-300, 17), (2.675, 2), (-0.248361622095248, 17)]
)
def test_decimals_of_float64_are_the_nearest(number: float, decimals: int) -> None:
    assert write({"output": np.array([number])}, "FP64", decimals=decimals)["output"] == [round(number, decimals)]


SHAPES_OF_PIECES = [(1, 2, 3, 40), (200,), (1, 1, 1, 200), (7, 31), (50, 1, 2), (3, 4, 5, 2)]


@pytest.mark.parametrize("shape", SHAPES_OF_PIECES)
@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
@pytest.mark.parametrize("more", [{}, {"decimals": 2}, {"nonfinite": "string"}, {"nonfinite": "null"}])
def test_a_reply_in_pieces_has_the_same_bytes(shape: tuple[int, ...], form: str, more: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece has more than NUMBERS_PER_PIECE numbers."""
    if form == "base64":
        more = {}
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    if "nonfinite" in more:
        array.flat[:: max(1, array.size // 9)] = [np.nan, np.inf, -np.inf][array.size % 3]
    keys = np.arange(array.size).reshape(shape)
    reply = Reply(
        {"name": "tiny", "fingerprint": "a\0b"}, 7, "FP32", {"output": array, "attention_weights": {"keys": keys, "values": array}}
    )
    whole = b"".join(encode(reply, ReplyOptions(form=form, **more))[1])
    monkeypatch.setattr(writer, "NUMBERS_PER_PIECE", 15)
    pieces = encode(reply, ReplyOptions(form=form, **more))[1]
    assert b"".join(pieces) == whole
    assert max(len(piece) for piece in pieces) < 450
    assert len(pieces) > 3 * array.nbytes // (15 * 8) or form == "base64"


def test_metrics_in_pieces_have_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undefined numbers are null."""
    indices = np.arange(-10, 190).reshape(2, 100)
    metrics = {"entropy": np.full((4, 50), np.nan), "strongest_links": {"queries": indices, "query_words": [["a"]]}}
    reply = Reply({"name": "tiny", "fingerprint": "abc"}, 7, "FP32", {}, metrics)
    whole = encode(reply, ReplyOptions())[1]
    monkeypatch.setattr(writer, "NUMBERS_PER_PIECE", 15)
    pieces = encode(reply, ReplyOptions())[1]
    assert len(pieces) > 20
    assert b"".join(pieces) == b"".join(whole)
