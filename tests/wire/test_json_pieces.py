"""A body parsed in pieces and the same body parsed whole: the same arrays, or the same refusal."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import AttendError
from service.wire import json_pieces
from service.wire.documents import AttendRequest
from service.wire.limits import WireLimits

WHOLE = 1 << 60


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    """Pieces of a few bytes, so that small bodies have many."""
    before = json_pieces.WORTHWHILE, json_pieces.PIECE
    json_pieces.WORTHWHILE, json_pieces.PIECE = 0, 23
    yield
    json_pieces.WORTHWHILE, json_pieces.PIECE = before


def outcome(body: bytes, worthwhile: int) -> Any:
    """What the parser makes of a body that is worth the pieces, or not: its members, or the refusal's class and places."""
    json_pieces.WORTHWHILE = worthwhile
    try:
        return json_pieces.parse(body, AttendRequest.tensors, WireLimits())
    except AttendError as error:
        return type(error), [(problem.at, problem.expected, problem.got) for problem in error.problems]


def assert_same(body: bytes) -> Any:
    whole, pieces = outcome(body, WHOLE), outcome(body, 0)
    assert type(whole) is type(pieces), body
    if isinstance(whole, tuple):
        assert pieces == whole, body
        return whole
    assert pieces.keys() == whole.keys(), body
    for name, value in whole.items():
        if isinstance(value, np.ndarray):
            assert pieces[name].dtype == value.dtype
            np.testing.assert_array_equal(pieces[name], value, err_msg=str(body))
        else:
            assert pieces[name] == value
    return whole


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
@settings(max_examples=300)
def test_pieces_are_the_whole(seed: int) -> None:
    """Whatever the shapes, the white space, and the strings between."""
    assert_same(document(random.Random(seed)).encode())


@given(st.integers(0, 2**32))
@settings(max_examples=600)
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


def test_large_tensors_come_in_pieces() -> None:
    """Three of them in one body, beside a small one; the rest of the body is what stands around them."""
    body = f'{{"query": [{ROW},{ROW}, {ROW}], "key":[[{ROW},{ROW}]] ,"value":[{ROW}],"valid_lens":[3],"outputs":["output"]}}'.encode()
    found = json_pieces.find_pieces(body, AttendRequest.tensors)
    assert found is not None
    assert found.rest == b'{"query": 0, "key":0 ,"value":0,"valid_lens":[3],"outputs":["output"]}'
    assert {name: [body[rows.text] for rows in parts] for name, parts in found.tensors.items()} == {
        "query": [ROW.encode() + b"," + ROW.encode(), ROW.encode()],
        "key": [f"[{ROW},{ROW}]".encode()],
        "value": [ROW.encode()],
    }
    assert [rows.count for parts in found.tensors.values() for rows in parts] == [2, 1, 1, 1]


def test_escapes_and_crowds_of_strings_are_left_to_the_parser() -> None:
    """Where a quotation mark might not end a string, or there are too many to look at, nothing is taken apart."""
    assert json_pieces.find_pieces(f'{{"layer":"\\\\","query":[{ROW},{ROW}]}}'.encode(), AttendRequest.tensors) is None
    words = ",".join(['"w"'] * (json_pieces.STRINGS // 2))
    assert json_pieces.find_pieces(f'{{"tokens":{{"query":[{words}]}},"query":[{ROW},{ROW}]}}'.encode(), AttendRequest.tensors) is None


@pytest.mark.parametrize("field", ["query", "bias"])
def test_integers_of_more_than_64_bits_are_read_in_bodies_of_any_size(field: str) -> None:
    """The fast parser refuses them, and the slow one takes no body as large as this: it is given a piece."""
    rows: list[Any] = [[0.5, 1, -2.5] for _ in range(9)]
    rows[4][1] = -(2**80)
    body = json.dumps({"query": [[1.0]], field: rows}).encode()
    members = json_pieces.parse(body, AttendRequest.tensors, WireLimits(scan_bytes=60))
    assert members[field].tolist() == rows


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("1,,2", "number that is written wrong"),
        ("1 2", "a comma, a bracket or a value"),
        ("1e400", "beyond them"),
        ("tru", "a word that is not true"),
        ('"', "a string without an end"),
        ('"\\x"', "a wrong escape"),
        ('"\\ud83d"', "a wrong escape"),
        ('"\x01"', "a control character"),
        ("\udcff", "no UTF-8"),
        (str(2**80), "an integer of more than 64 bits"),
    ],
)
def test_faults_of_bodies_too_large_for_the_slow_parser_are_told_in_words(fault: str, words: str) -> None:
    body = f'{{"query": [[1.0, {fault}]], "x": 1}}'.encode(errors="surrogateescape")
    with pytest.raises(AttendError) as caught:
        json_pieces.parse(body, AttendRequest.tensors, WireLimits(scan_bytes=8))
    (problem,) = caught.value.problems
    assert words in problem.got
    assert "at most 8 bytes are told where" in problem.got
