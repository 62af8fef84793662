"""A body parsed in pieces and the same body parsed whole: the same arrays, or the same refusal."""

import base64
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import AttendError, InvalidRequest, TooLarge
from service.wire.json import cuts as json_cuts
from service.wire.json import pieces as json_pieces
from service.wire.limits import WireLimits
from service.wire.schemas.attend import AttendRequest

WHOLE = 1 << 60
LIMITS = WireLimits()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few bytes, so that small bodies have many."""
    for name, size in (("CUT", 17), ("PIECE", 31), ("STEP", 31)):
        monkeypatch.setattr(json_cuts, name, size)


def outcome(body: bytes, worthwhile: int, at_once: int = WHOLE, limits: WireLimits = LIMITS) -> Any:
    """What the parser makes of a body that is worth the pieces, or not: its members, or the refusal's class and places."""
    before = json_pieces.WORTHWHILE, json_pieces.AT_ONCE
    json_pieces.WORTHWHILE, json_pieces.AT_ONCE = worthwhile, at_once
    try:
        return json_pieces.parse(body, AttendRequest.tensors, limits)
    except AttendError as error:
        return type(error), [(problem.at, problem.expected, problem.got) for problem in error.problems]
    finally:
        json_pieces.WORTHWHILE, json_pieces.AT_ONCE = before


def assert_same(body: bytes) -> Any:
    """A small body is refused in the same words; one that is never parsed whole is refused too, and nothing else is."""
    whole, pieces, never_whole = outcome(body, WHOLE), outcome(body, 0), outcome(body, 0, 0)
    if isinstance(whole, tuple):
        assert pieces == whole, body
        assert isinstance(never_whole, tuple), body
        return whole
    assert_equal(pieces, whole, body)
    assert_equal(never_whole, whole, body)
    return whole


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
def test_pieces_are_the_whole(seed: int) -> None:
    """Whatever the shapes, the white space, and the strings between."""
    assert_same(document(random.Random(seed)).encode())


@given(st.integers(0, 2**32))
def test_a_damaged_body_is_refused_alike(seed: int) -> None:
    """A byte or two changed, left out, doubled, or moved: what the whole is refused for, the pieces are, at the same place."""
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
def test_what_is_odd_is_the_same_odd(text: str) -> None:
    assert_same(text.encode())


def test_long_lists_and_strings_are_cut_out() -> None:
    """Wherever they are members; the rest of the body is what stands around them, and says where each byte of it stood."""
    form = f'{{"shape":[2,10],"data":[{ROW},{ROW}]}}'
    binary = '{"shape":[4],"datatype":"FP64","base64":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}'
    text = f'{{"query": [{ROW},\n{ROW}], "key":{form} ,"value":{binary},"tokens":{{"x":["aaaaaaaaaaaaaaaaaaaa"]}},"layer":"a"}}'
    cuts = json_cuts.Cuts(text.encode(), AttendRequest.tensors, LIMITS)
    first, second, third = cuts.values
    assert cuts.rest.decode() == (
        f'{{"query": "{first}", "key":{{"shape":[2,10],"data":"{second}"}} ,"value":{{"shape":[4],"datatype":"FP64","base64":"{third}"}},'
        f'"tokens":{{"x":["aaaaaaaaaaaaaaaaaaaa"]}},"layer":"a"}}'
    )
    line = text.index("\n")
    assert cuts.place_of(0) == "line 1 column 1"
    assert cuts.place_of(cuts.rest.index(b'"layer"')) == f"line 2 column {text.index(chr(34) + 'layer') - line}"


@pytest.mark.parametrize("outside", ['"layer":"\\\\",', '"layer":"\\"[",', '"layer":"\\\\\\"",', ""])
def test_escapes_do_not_hide_where_a_string_ends(outside: str) -> None:
    """Escaped quotation marks are part of a string, and escaped backslashes before one are not."""
    assert assert_same(f'{{{outside}"query":[{ROW},{ROW}],"key":[{ROW}]}}'.encode())["query"].shape == (2, 10)


@pytest.mark.parametrize("escape", [("/", "\\/"), ("+", "\\u002B"), ("+", "\\u002b")])
def test_base64_may_have_escapes_and_is_read_in_pieces(escape: tuple[str, str]) -> None:
    """As PHP and .NET write it."""
    array = np.random.default_rng(3).integers(0, 256, 333).astype(np.uint8)
    text = base64.b64encode(array.tobytes()).decode().replace(*escape)
    body = f'{{"query":{{"shape":[333],"datatype":"UINT8","base64":"{text}"}}}}'
    assert np.array_equal(assert_same(body.encode())["query"], array)
    for wrong in (body.replace(text, text[:100] + "=" + text[101:]), body.replace(text, text[:-1]), body.replace(text, text + "!")):
        assert isinstance(assert_same(wrong.encode()), tuple)


def test_words_among_numbers_are_read_in_pieces() -> None:
    """Those that a bias, or a mask, may have; and none of them may be the end of a number, nor stand for the number read in its place."""
    lowest = -1e308  # which is what stands for "-inf" while it is read
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
        ('{"query":[' + "1,2,3,4,5,6," * 9 + "[1]]}", None),
        ('{"query":[' + "1,2,3,4,5,6," * 9 + "1e999]}", ("/query/54", "a finite number", "a number beyond the range of a float64")),
        (f'{{"query":[{ROW},{ROW},\n[1,2,3,4,5,6,7,8,9,,10]]}}', ("", "JSON", "',' at line 2 column 20 (expecting value)")),
        (f'{{"query":[{ROW},{ROW}],\n"layer":}}', ("", "JSON", "'}' at line 2 column 9 (expecting value)")),
        (f'{{"query":[{ROW},{ROW}]', ("", "JSON", "the end of the body at line 1 column 57 (a bracket without its end)")),
    ],
)
def test_faults_of_bodies_that_are_never_parsed_whole_are_told_with_their_place(body: str, refusal: Any) -> None:
    found = outcome(body.encode(), 0, 0)
    assert isinstance(found, tuple)
    assert refusal is None or found[1] == [refusal]


def test_integers_are_read_in_pieces_as_they_were_sent() -> None:
    """Those that no float64 holds."""
    numbers = [2**53 + 1 + i for i in range(40)]
    body = {"query": {"shape": [40], "datatype": "INT64", "data": numbers}}
    assert assert_same(json.dumps(body).encode())["query"].tolist() == numbers


@pytest.mark.parametrize("field", ["query", "bias"])
def test_integers_of_more_than_64_bits_are_read_in_bodies_of_any_size(field: str) -> None:
    """The fast parser refuses them; the slow one is given a piece."""
    rows: list[Any] = [[0.5, 1, -2.5] for _ in range(9)]
    rows[4][1] = -(2**80)
    members = outcome(json.dumps({"query": [[1.0]], field: rows}).encode(), 0, 0)
    assert members[field].tolist() == rows


PLAIN = {
    "words": {"tokens": {"query": ["a"] * 20}},
    "lists": {"tokens": {"query": [[]] * 20}},
    "numbers": {"select": {"queries": [1] * 20}},
    "members": {"select": {str(i): 1 for i in range(20)}},
}


@pytest.mark.parametrize("body", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("at_once", [0, WHOLE])
def test_plain_values_are_counted(body: Any, at_once: int) -> None:
    """All that are no numbers of a tensor, in bodies of any size."""
    assert isinstance(outcome(json.dumps(body).encode(), 0, at_once, WireLimits(values=25)), dict)
    kind, ((_, expected, _),) = outcome(json.dumps(body).encode(), 0, at_once, WireLimits(values=15))
    assert (kind, expected) == (TooLarge, "at most 15 plain values in one body")


def test_lists_and_what_is_left_are_bounded_before_a_parser_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_cuts, "REST", 200)
    lists = json.dumps(PLAIN["lists"])
    for body, limits in ((lists, WireLimits(lists=10)), (f'{{"tokens":["{"a" * 15}"{", 1" * 80}]}}', LIMITS)):
        monkeypatch.setattr(json_pieces, "parse_object", None)
        assert outcome(body.encode(), 0, 0, limits)[0] is TooLarge


def test_a_first_row_longer_than_all_others_takes_no_memory_for_each() -> None:
    """An array as wide as the first row would be far larger than the body."""
    kind, ((at, *_),) = outcome(json.dumps({"query": [[1] * 3000, *[[1]] * 3000]}).encode(), 0, 0)
    assert (kind, at) == (InvalidRequest, "/query/1")
