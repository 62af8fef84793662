"""Lists of numbers that are read from the text in pieces, against the strict parser: the same arrays or the same refusal."""

import base64
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.errors import AttendError, InvalidRequest, MalformedBody, TooLarge
from attend.limits import WireLimits
from attend.wire.json import lists as json_lists
from attend.wire.json import reader as json_reader
from attend.wire.json.lists import EMPTY_AXIS
from attend.wire.json.strict import parse_strictly
from attend.wire.schemas.attend import AttendRequest

pytestmark = pytest.mark.usefixtures("either_way")
LIMITS = WireLimits()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few bytes, so that small bodies have many."""
    monkeypatch.setattr(json_lists, "PIECE_BYTES", 31)
    monkeypatch.setattr(json_reader, "MAX_TEMPLATE_STRING", 17)


def outcome(body: bytes, strict: int | None, limits: WireLimits = LIMITS) -> Any:
    """The members of a body, or the class and problems of its refusal. `strict` is the largest body that the strict reader parses as a
    whole after a refusal; None leaves the body to the strict reader from the beginning."""
    try:
        if strict is None:
            return json_reader.DocumentReader(limits).members(parse_strictly(body), AttendRequest.tensor_kinds)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_reader, "MAX_STRICT_BYTES", strict)
            return json_reader.decode(body, {}, AttendRequest.tensor_kinds, limits).members
    except AttendError as error:
        return type(error), [(problem.at, problem.expected, problem.got) for problem in error.problems]


def assert_same(body: bytes) -> Any:
    """A small body is refused as the strict reader refuses it. A body that is too large for that reader is refused too. No other is."""
    strictly, small, large = outcome(body, None), outcome(body, len(body)), outcome(body, -1)
    if isinstance(strictly, tuple):
        assert small == strictly, body
        assert isinstance(large, tuple), body
        return strictly
    assert_equal(small, strictly, body)
    assert_equal(large, strictly, body)
    return strictly


def assert_equal(members: Any, whole: dict[str, Any], body: bytes) -> None:
    assert isinstance(members, dict), (members, body)
    assert members.keys() == whole.keys(), body
    for name, value in whole.items():
        if isinstance(value, np.ndarray):
            assert members[name].dtype == value.dtype
            np.testing.assert_array_equal(members[name], value, err_msg=str(body))
        else:
            assert members[name] == value


def document(rng: random.Random) -> str:
    """A request of several tensors and other members, in some order, with white space anywhere."""

    def tensor(shape: tuple[int, ...]) -> Any:
        return rng.choice([0, 1, -2.5, 1e-7, 123456789]) if not shape else [tensor(shape[1:]) for _ in range(shape[0])]

    def shape() -> tuple[int, ...]:
        return tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))

    members: list[tuple[str, Any]] = [(name, tensor(shape())) for name in ("query", "key", "bias", "attend_mask") if rng.random() < 0.7]
    members += [("tokens", {"query": ["[", "]]", "{\u00e9,"]}), ("outputs", ["output"]), ("layer", "a[0]"), ("unknown", [[[1]], [2]])]
    rng.shuffle(members)
    space = lambda: rng.choice(["", "", " ", "\n\t"])  # noqa: E731
    text = json.dumps(dict(members), ensure_ascii=False, separators=(f"{space()},{space()}", f"{space()}:{space()}"))
    return text.replace("]", f"{space()}]") if rng.random() < 0.3 else text


@given(st.integers(0, 2**32))
def test_both_readers_give_the_same_arrays(seed: int) -> None:
    """For random shapes, white space, and strings in between."""
    assert_same(document(random.Random(seed)).encode())


@given(st.integers(0, 2**32))
def test_both_readers_refuse_a_damaged_body_alike(seed: int) -> None:
    """A byte or two changed, removed, repeated or moved: the same fault at the same place."""
    rng = random.Random(seed)
    body = bytearray(document(rng).encode())
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(body))
        damage = rng.randrange(4)
        if damage == 0:
            body[at] = rng.choice(b'[]{},:" 0e.-x\\')
        elif damage == 1:
            del body[at]
        elif damage == 2:
            body.insert(at, rng.choice(b'[]{},:"'))
        else:
            body[at:at] = body[at : at + rng.randint(1, 12)]
    assert_same(bytes(body))


ROW = "[1,2,3,4,5,6,7,8,9,10]"


@pytest.mark.parametrize(
    "text",
    [
        f'{{"query":[{ROW},{ROW},[1,2]]}}',
        f'{{"query":[{ROW},{ROW}],"query":[{ROW},{ROW}]}}',
        f'{{"query":[{ROW},{ROW},]}}',
        f'{{"query":[{ROW} {ROW}]}}',
        f'{{"query":[{ROW},,{ROW}]}}',
        f'{{"query":[1,{ROW},{ROW}]}}',
        f'{{"query":[{ROW},[{ROW}]]}}',
        f'{{"query":[{ROW},[1,2,3,4,[5],6,7,8,9,10]]}}',
        f'{{"query":[{ROW},{ROW}]}}]',
        f'{{"query":[{ROW},{ROW}]',
        f'{{"query":[{ROW},{ROW}}}]',
        f'{{"query":[{ROW},[1,2,3,4,5,6,7,8,9,NaN]]}}',
        f'{{"query":[{ROW},[1,2,3,4,5,6,7,8,9,1e999]]}}',
        f'{{"query":[{ROW},[1,2,3,4,5,6,7,8,9,null]]}}',
        f'{{"query":[{ROW},[1,2,3,4,5,6,7,8,9,-]]}}',
        f'{{"query":[{ROW},[1,2,3,4,5,6,7 8,9,10]]}}',
        f'{{"query":{{"shape":[2,10],"data":[{ROW},[[1],2,3,4,5,6,7,8,9,10]]}}}}',
        '{"query":{"shape":[10],"data":[1,2,3,4,5,6,7,8,9,[2,3]]}}',
        f'{{"bias":[{ROW},[1,2,3,4,5,6,7,8,9,"-inf"]]}}',
        f'{{"attend_mask":[{ROW},[1,2,3,4,5,6,7,8,9,true]]}}',
        f'{{"que\\u0072y":[{ROW},{ROW}]}}',
        f'{{"a":{{"query":[{ROW},{ROW}]}}}}',
        f"{{query:[{ROW},{ROW}]}}",
        f'{{"query" "key":[{ROW},{ROW}]}}',
        f'[{{"query":[{ROW},{ROW}]}}]',
        "[" * 100,
        '"' * 3,
    ],
)
def test_both_readers_agree_on_random_documents(text: str) -> None:
    assert_same(text.encode())


def test_lists_of_numbers_and_long_base64_strings_are_replaced_by_placeholders() -> None:
    """If they are values of members. The place of every byte of the rest is known."""
    form = f'{{"shape":[2,10],"data":[{ROW},{ROW}]}}'
    binary = '{"shape":[4],"datatype":"FP64","base64":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}'
    text = f'{{"query": [{ROW},\n{ROW}], "key":{form} ,"value":{binary},"tokens":{{"x":["NaN, [1]"]}},"layer":"a",}}'
    template, values = json_reader.split_json(text.encode(), LIMITS)
    assert template.decode() == (
        '{"query": NaN, "key":{"shape":NaN,"data":NaN} ,"value":{"shape":NaN,"datatype":"FP64","base64":NaN},'
        '"tokens":{"x":["NaN, [1]"]},"layer":"a",}'
    )
    assert [text[value.start : value.stop][:9] for value in values] == [f"[{ROW[:8]}", "[2,10]", f"[{ROW[:8]}", "[4]", '"AAAAAAAA']
    with pytest.raises(MalformedBody, match=f"'}}' at line 2 column {len(text) - 1 - text.index(chr(10))} "):
        json_reader.parse_template(text.encode(), template, values, LIMITS)


@pytest.mark.parametrize("outside", ['"layer":"\\\\",', '"layer":"\\"[",', '"layer":"\\\\\\"",', ""])
def test_escapes_in_strings_are_skipped(outside: str) -> None:
    """Escaped quotation marks belong to a string; those after an escaped backslash end it."""
    assert assert_same(f'{{{outside}"query":[{ROW},{ROW}],"key":[{ROW}]}}'.encode())["query"].shape == (2, 10)


@pytest.mark.parametrize("escape", [("/", "\\/"), ("+", "\\u002B"), ("+", "\\u002b")])
def test_base64_may_have_escapes(escape: tuple[str, str]) -> None:
    """PHP and .NET escape slashes and plus signs."""
    array = np.random.default_rng(3).integers(0, 256, 333).astype(np.uint8)
    text = base64.b64encode(array.tobytes()).decode().replace(*escape)
    body = f'{{"query":{{"shape":[333],"datatype":"UINT8","base64":"{text}"}}}}'
    assert np.array_equal(assert_same(body.encode())["query"], array)
    for wrong in (body.replace(text, text[:100] + "=" + text[101:]), body.replace(text, text[:-1]), body.replace(text, text + "!")):
        assert isinstance(assert_same(wrong.encode()), tuple)


def test_minus_infinity_and_booleans_among_numbers_are_read_in_pieces() -> None:
    """In a bias and a mask."""
    lowest = -1e308  # the number as which "-inf" is read
    rows = [[0, "-inf", 1.5, lowest, "-inf"]] * 20
    bias = assert_same(json.dumps({"bias": rows}).encode())["bias"]
    assert np.array_equal(bias[7], [0, -np.inf, 1.5, lowest, -np.inf])
    assert np.array_equal(assert_same(json.dumps({"attend_mask": [[True, False, 1]] * 20}).encode())["attend_mask"][3], [1, 0, 1])
    for wrong in (
        '"-inf"1',
        '1"-inf"',
        '"-inf".5',
        '"-inf"e1',
        '-"-inf"',
        '1e"-inf"',
        '"-Inf"',
        "1true",
        "true1",
        "1false",
        "false1",
        '"true"',
    ):
        for field in ("bias", "attend_mask"):
            assert isinstance(assert_same(f'{{"{field}":[{ROW},[1,2,3,4,5,6,7,8,9,{wrong}]]}}'.encode()), tuple)


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (f'{{"query":[{ROW},{ROW},[1,2,3,4,5,6,7,8,9,null]]}}', ("/query/2/9", "a number", "null")),
        (f'{{"query":[[{ROW},{ROW},[1,2,3,4,5,6,7,8,9,"x"]]]}}', ("/query/0/2/9", "a number", '"x"')),
        (f'{{"query":[{ROW},{ROW},[1,2]]}}', ("/query/2", "10 values, as in the rows before", "2")),
        (f'{{"query":[[{ROW},{ROW}],[{ROW}]]}}', ("/query/1", "2 values, as in the rows before", "1")),
        (f'{{"query":[{ROW},{ROW},[[1]]]}}', ("/query/2", "10 values, as in the rows before", "1")),
        (f'{{"query":[{ROW},{ROW},[1,2,3,4,5,6,7,8,9,[1]]]}}', ("/query/2/9", "a number", "a list of 1")),
        (f'{{"query":[{ROW},{ROW},7,{ROW}]}}', ("/query/2", "a list of 10", "7")),
        (f'{{"query":[{ROW},{ROW},7]}}', ("/query/2", "a list of 10", "7")),
        (f'{{"query":[[[1,2,3,4,5,6,7,8],5],[{ROW}]]}}', ("/query/0/1", "a list of 8", "5")),
        ('{"query":[' + "1,2,3,4,5,6," * 9 + "[1]]}", ("/query/54", "a number", "a list of 1")),
        ('{"query":[' + "1,2,3,4,5,6," * 9 + "1e999]}", ("/query/54", "a finite number", "a number beyond the range of a float64")),
        ('{"query":[' + "[]," * 40 + "[]]}", ("/query", EMPTY_AXIS, "an empty list")),
        (f'{{"query":[{ROW},{ROW},\n[1,2,3,4,5,6,7,8,9,,10]]}}', ("", "JSON", "',' at line 2 column 20 (expecting value)")),
        (f'{{"query":[{ROW},{ROW},\n1[2]]}}', ("", "JSON", "'[' at line 2 column 2 (expecting ',' delimiter)")),
        (f'{{"query":[{ROW},{ROW}],\n"layer":}}', ("", "JSON", "'}' at line 2 column 9 (expecting value)")),
        (f'{{"query":[{ROW},{ROW}]', ("", "JSON", "the end of the body at line 1 column 57 (expecting ',' delimiter)")),
    ],
)
def test_the_place_of_a_fault_in_a_large_body(body: str, refusal: Any) -> None:
    """In a body too large for the strict parser."""
    found = outcome(body.encode(), -1)
    assert isinstance(found, tuple)
    assert found[1] == [refusal]


@pytest.mark.parametrize("datatype", ["INT64", "UINT64"])
def test_integers_of_64_bits_are_read_exactly_in_pieces(datatype: str) -> None:
    """Also those that no float64 is; others are refused."""
    bounds = np.iinfo(datatype.lower())
    for field in ("query", "valid_lens"):
        for last in (2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, 2**64, 10**400, 1.5, -1):
            numbers = [*range(2**53 + 1, 2**53 + 40), last]
            found = assert_same(json.dumps({field: {"shape": [40], "datatype": datatype, "data": numbers}}).encode())
            if isinstance(last, int) and bounds.min <= last <= bounds.max:
                assert found[field].tolist() == numbers
            else:
                assert found[0] is InvalidRequest and found[1][0][0] == f"/{field}/data/39"


def test_an_extra_comma_is_refused_wherever_pieces_end() -> None:
    for commas in ("{},", ",{}", "{},,1", "{} ,"):
        for digits in range(1, 70):
            assert assert_same(f'{{"query":[{commas.format("1" * digits)}]}}'.encode())[0] is MalformedBody


@pytest.mark.parametrize("field", ["query", "bias"])
def test_integers_of_more_than_64_bits_are_read_in_bodies_of_any_size(field: str) -> None:
    """The compiled reader refuses them; the strict parser reads the piece."""
    rows: list[Any] = [[0.5, 1, -2.5] for _ in range(9)]
    rows[4][1] = -(2**80)
    members = outcome(json.dumps({"query": [[1.0]], field: rows}).encode(), -1)
    assert members[field].tolist() == rows


PLAIN = {
    "words": {"tokens": {"query": ["a"] * 20}},
    "lists": {"tokens": {"query": [[]] * 20}},
    "numbers": {"select": {"queries": [1] * 20}},
    "members": {"select": {str(i): 1 for i in range(20)}},
}


@pytest.mark.parametrize("body", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("strict", [-1, 1 << 20])
def test_plain_values_are_counted(body: Any, strict: int) -> None:
    """All values outside of tensors, in bodies of any size."""
    assert isinstance(outcome(json.dumps(body).encode(), strict, WireLimits(values=25)), dict)
    kind, ((_, expected, _),) = outcome(json.dumps(body).encode(), strict, WireLimits(values=15))
    assert (kind, expected) == (TooLarge, "at most 15 values outside of tensors in one body")


def test_lists_and_the_rest_are_limited_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reader, "MAX_TEMPLATE_BYTES", 200)
    kind, ((at, expected, _),) = outcome(json.dumps({"query": [[1]] * 40}).encode(), -1, WireLimits(lists=10))
    assert (kind, at, expected) == (TooLarge, "/query", "at most 10 lists in one tensor")
    monkeypatch.setattr(json_reader, "parse_strictly", None)
    assert outcome(f'{{"tokens":["{"a" * 15}"{", 1" * 80}]}}'.encode(), -1)[0] is TooLarge


def test_a_long_first_row_does_not_determine_the_memory() -> None:
    """An array as wide as the first row would be far larger than the body."""
    kind, ((at, *_),) = outcome(json.dumps({"query": [[1] * 3000, *[[1]] * 3000]}).encode(), -1)
    assert (kind, at) == (InvalidRequest, "/query/1")


def test_lists_are_counted_before_they_are_parsed() -> None:
    """Finding them costs more time than reading their bytes."""
    body = "{" + '"a":[1],' * 20 + '"b":1}'
    assert outcome(body.encode(), -1)[0] is MalformedBody
    assert outcome(body.encode(), -1, WireLimits(values=15))[0] is TooLarge


@pytest.mark.parametrize("field", ["query", "tokens"])
@pytest.mark.parametrize(
    ("number", "finite"),
    [("1" + "0" * 308, True), ("-1" + "0" * 308, True), ("2" + "0" * 308, False), ("-1" + "0" * 5000, False)],
    ids=["large", "-large", "huge", "-longest"],
)
def test_integers_near_the_limit_of_float64(number: str, finite: bool, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lists, "PIECE_BYTES", 1 << 17)
    members = assert_same(f'{{"{field}":[1,2,{number},3]}}'.encode())
    if finite:
        assert list(members[field]) == [1, 2, float(number), 3]
    else:
        assert members == (InvalidRequest, [(f"/{field}/2", "a finite number", "a number beyond the range of a float64")])
