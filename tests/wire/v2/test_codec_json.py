"""V2 requests with numbers in the JSON: the codec that cuts out lists against a parser of the whole text.

The lists themselves are read as those of `/attend`, in `tests/wire/json/test_lists.py`.
"""

import json
import math
import re
from contextlib import nullcontext
from itertools import product
from secrets import token_hex
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attend.errors import InvalidRequest, MalformedBody, RequestError, TooLarge
from attend.limits import WireLimits
from attend.wire.json import lists as json_lists
from attend.wire.json.reader import split_json
from attend.wire.schemas.attend import AttendRequest
from attend.wire.v2 import codec
from attend.wire.v2.codec import CODEC, MAX_CACHED_HEADER
from support.v2 import described, in_bytes

pytestmark = pytest.mark.usefixtures("either_way")
QUERY = np.random.default_rng(47).standard_normal((2, 3, 5)).astype(np.float32)
LENGTHS = np.array([[3], [2]])
PARAMETERS = {"model": "tiny", "header_length": ""}
SPACES = st.text(" \t\r\n", max_size=2)
GOOD: dict[str, Any] = {
    "id": 'with [brackets], {braces} and "data": [1]',
    "parameters": {"select": '{"heads": [1]}', "tokens": '{"query": [["[", "]", "\\"data\\":[2]"]]}', "binary_data_output": False},
    "inputs": [
        {"name": "query", "shape": [2, 3, 5], "datatype": "FP32", "data": QUERY.ravel().tolist()},
        {"data": QUERY.tolist(), "name": "key", "datatype": "FP64", "shape": [2, 3, 5]},
        {"name": "valid_lens", "shape": [2], "data": [3, 2], "datatype": "INT64"},
        {"name": "attend_mask", "shape": [3, 3], "datatype": "BOOL", "data": [True, False, 1, 0, 1, 1, True, True, False]},
        {"name": "bias", "shape": [1, 3], "datatype": "FP16", "data": [[0.5, -2, 1e-3]]},
    ],
    "outputs": [{"name": "output"}],
}


def parsed(body: bytes, length: str = "") -> dict[str, Any]:
    """The members of the request. Raises RequestError."""
    return dict(CODEC.decode(body, {**PARAMETERS, "header_length": length}, AttendRequest.tensor_kinds, WireLimits()).members)


def outcome(body: bytes, length: str = "") -> Any:
    """The members, arrays as dtype, shape and bytes; or the refusal."""
    try:
        members = parsed(body, length)
    except RequestError as refusal:
        return type(refusal), refusal.problems
    return {n: (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for n, v in members.items()}


def agree(body: bytes, length: str = "") -> Any:
    """The outcome, which is the same whether lists are cut out or the strict reader parses the whole body."""
    quick = outcome(body, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "split_json", MagicMock(side_effect=InvalidRequest))
        assert quick == outcome(body, length)
    return quick


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lists, "PIECE_BYTES", 11)


def test_valid_requests_are_read() -> None:
    got = agree(json.dumps(GOOD).encode())
    assert got["query"] == ("<f4", (2, 3, 5), QUERY.tobytes())
    assert got["key"] == ("<f8", (2, 3, 5), QUERY.astype(np.float64).tobytes())
    assert got["valid_lens"][2] == np.array([3, 2]).tobytes()
    assert np.frombuffer(got["attend_mask"][2], np.bool_).tolist() == [True, False, True, False, True, True, True, True, False]
    assert got["bias"][2] == np.array([0.5, -2, 1e-3], np.float16).tobytes()
    assert got["tokens"] == {"query": [["[", "]", '"data":[2]']]}


def test_data_lists_are_replaced_by_placeholders() -> None:
    """Otherwise this file would not test the placeholders."""
    body = json.dumps(GOOD).encode()
    template, values = split_json(body, WireLimits(), codec.BEFORE_DATA)
    assert [json.loads(body[value.start : value.stop]) for value in values] == [entry["data"] for entry in GOOD["inputs"]]
    kept = json.loads(template, parse_constant=lambda name: name)
    assert [entry.pop("data") for entry in kept["inputs"]] == ["NaN"] * 5
    assert kept["parameters"] == GOOD["parameters"]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The strict parser of headers, which counts its calls."""
    counted = MagicMock(side_effect=codec.parse_strictly)
    monkeypatch.setattr(codec, "parse_strictly", counted)
    return counted


@pytest.mark.parametrize(("length", "parsings"), [(0, 1), (MAX_CACHED_HEADER, 3)])
def test_a_parsed_header_is_cached_unless_it_is_long(parse: MagicMock, length: int, parsings: int) -> None:
    document = {**json.loads(SMALL), "id": token_hex(8).ljust(length, "x")}  # a header that no test has sent
    for number in (1, 2.5, 2.5):
        document["inputs"][0]["data"][0] = number
        assert parsed(json.dumps(document).encode())["query"][0, 0] == number
    assert parse.call_count == parsings


def test_a_cached_header_is_refused_under_lower_limits() -> None:
    for limits, refusal in ((WireLimits(), nullcontext()), (WireLimits(values=4), pytest.raises(TooLarge))):
        with refusal:
            CODEC.decode(SMALL.encode(), PARAMETERS, AttendRequest.tensor_kinds, limits)


def spaced(document: Any, draw: Any) -> str:
    """The document as JSON, with spaces wherever some may be."""
    if isinstance(document, dict):
        members = (f"{draw(SPACES)}{json.dumps(key)}{draw(SPACES)}:{spaced(value, draw)}" for key, value in document.items())
        return f"{draw(SPACES)}{{{','.join(members)}}}{draw(SPACES)}"
    if isinstance(document, list):
        return f"{draw(SPACES)}[{','.join(spaced(value, draw) for value in document) or draw(SPACES)}]{draw(SPACES)}"
    return f"{draw(SPACES)}{json.dumps(document)}{draw(SPACES)}"


@given(st.data())
def test_white_space_and_order_of_members_do_not_matter(data: st.DataObject) -> None:
    shuffled = {**GOOD, "inputs": [dict(data.draw(st.permutations(list(entry.items())))) for entry in GOOD["inputs"]]}
    assert agree(spaced(shuffled, data.draw).encode()) == outcome(json.dumps(GOOD).encode())


SMALL = json.dumps(
    {"inputs": [described("query", QUERY[0, :2, :2], data=[1.5, -2, 3e1, 0]), described("valid_lens", LENGTHS, data=[[3], [2]])]}
)
BITS = [*'[]{},:"\\ -.0', "[[", "]]", "},{", "true", "null", "1e9", "1e400", "NaN", '"id":"a",']
BITS += ['"data":', '"data":[1]', '"d\\u0061ta":[1,2,3,4]']


@settings(max_examples=10 * settings().max_examples)
@given(
    st.lists(st.tuples(st.integers(0, len(SMALL)), st.integers(0, 3), st.sampled_from(["", *BITS])), min_size=1, max_size=3),
)
@example([(SMALL.index("1.5"), 0, ",")])
@example([(SMALL.index("0]"), 1, "0,")])
@example([(SMALL.index("0]"), 2, "0],[1]")])
@example([(SMALL.index("[1.5"), 0, "[")])
@example([(SMALL.index('"data": [1'), 0, '"data": [9, 9, 9, 9], ')])
@example([(SMALL.index('data": [1'), 1, "d\\u0061")])
@example([(SMALL.index('"data": [1'), 1, '"a\\"')])
def test_both_parsers_agree_on_changed_requests(changes: list[tuple[int, int, str]]) -> None:
    text = SMALL
    for place, left_out, put in changes:
        text = text[:place] + put + text[place + left_out :]
    agree(text.encode())


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(["FP64", "FP32", "FP16", "BF16", "INT8"]),
    st.integers(-1, 1),
)
@example([0.5] * 9, "FP32", 0)
@example([0.5] * 9, "FP32", 1)
@example([0.5] * 9, "FP32", -1)
def test_numbers_are_read_exactly(numbers: list[float], datatype: str, more: int) -> None:
    entry = {"name": "query", "shape": [len(numbers) + more], "datatype": datatype, "data": numbers}
    got = agree(json.dumps({"inputs": [entry]}).encode())
    if more or datatype == "INT8":
        return
    if datatype == "FP64":
        assert got["query"] == ("<f8", (len(numbers),), np.array(numbers).tobytes())


EMPTY = ["[]", "[ ]", "[[]]", "[[], []]", f"[{' ' * 40}]", f"[{' ' * 20},{' ' * 20}]", "null", "{}", '""', "7"]


def test_empty_lists_and_lists_of_a_wrong_length() -> None:
    for shape, data in product([[0], [0, 5], [1], [1, 1], [2, 0], [2**20, 2**20], [2**31 - 1]], EMPTY):
        got = agree(f'{{"inputs":[{{"name":"query","shape":{shape},"datatype":"FP32","data":{data}}}]}}'.encode())
        assert isinstance(got, dict) == (math.prod(shape) == 0 and bool(re.fullmatch(r"\[ *\]", data))) or "[[" in data, (shape, data)


def test_both_parsers_agree_on_numbers_outside_of_data() -> None:
    numbers = '{"name":"query","shape":[1,1],"datatype":"FP64","data":[1]}'
    scales = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" + "0" * 400, "1e-400", "0.1"]
    for inside, scale in product(["{}", '{{"x": {}}}', "[{}]"], scales):
        found = agree(f'{{"inputs":[{numbers}],"parameters":{{"scale":{inside.format(scale)}}}}}'.encode())
        assert isinstance(found, dict) == (inside == "{}" and scale in ("1e-400", "0.1")), (inside, scale)


def test_inputs_in_json_and_in_bytes_can_be_mixed() -> None:
    body, headers = in_bytes(query=QUERY)
    size = int(headers["Inference-Header-Content-Length"])
    document = json.loads(body[:size])
    document["inputs"].append(described("valid_lens", LENGTHS, data=[[3], [2]]))
    head = json.dumps(document).encode()
    got = agree(head + body[size:], str(len(head)))
    assert got["query"] == ("<f4", (2, 3, 5), QUERY.tobytes())
    assert got["valid_lens"][2] == LENGTHS.tobytes()
    assert agree(head + body[size:] + b"\0", str(len(head)))[0] is MalformedBody


def test_searching_for_lists_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search begins where the last one ended."""
    monkeypatch.setattr("attend.wire.json.reader.MAX_TEMPLATE_BYTES", 1 << 20)
    for text in (b'"data":[', b'"data":[1],', b'"data":[]}', b'"data":[}', b'"data" : ', b'"data":[1]"'):
        with pytest.raises(TooLarge):
            split_json(text * (1 << 18), WireLimits(), codec.BEFORE_DATA)
