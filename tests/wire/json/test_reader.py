"""The JSON decoder against Python's json: regular tensors give the same numbers, anything else is refused with its place."""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from attend.axes import Kind
from attend.errors import InvalidRequest, MalformedBody, RequestError, TooLarge
from attend.limits import WireLimits
from attend.tensors import DATATYPES
from attend.wire.json.reader import decode
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest

pytestmark = pytest.mark.usefixtures("either_way")
LIMITS = WireLimits()
KINDS: dict[str, Kind] = {"x": "number", "y": "number", "bias": "bias", "mask": "mask", "lens": "count", "weights/*": "number"}

INTEGERS = st.one_of(st.integers(-1000, 1000), st.integers(-(2**63), 2**64 - 1), st.integers(-(10**300), 10**300))
FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1e-300, 1e-300),  # subnormals included
    st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 2.0**53 + 2, 0.1]),
)
TEXTS = st.sampled_from(
    ["-0", "-0.0", "0e5", "1E+2", "1e-2", "12.50e-1", "-1.0E0", "9007199254740993", "18446744073709551616", "2.5e-324", "0.1e1"]
)
NUMBERS = st.one_of(INTEGERS.map(str), FLOATS.map(repr), TEXTS)  # as they stand in the text
SPACES = st.sampled_from(["", " ", "\n", "\t ", "\r\n"])
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
WIDE = st.lists(st.integers(2, 4), min_size=2, max_size=4)  # no axis of 1
TRICKY = st.text(
    st.one_of(st.sampled_from('[]{}",:\\/\u005b\n'), st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=12
)
Nested = Any  # a text, or a list of such


def parse(body: bytes, kinds: Mapping[str, Kind] = KINDS) -> Mapping[str, Any]:
    """The members of a body."""
    return decode(body, {}, kinds, LIMITS).members


def nest(flat: list[str], shape: list[int]) -> Nested:
    """The texts as nested lists of this shape."""
    if len(shape) == 1:
        return list(flat)
    step = len(flat) // shape[0]
    return [nest(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def write(value: Nested, space: str = "") -> str:
    """Nested texts as JSON."""
    return value if isinstance(value, str) else "[" + f"{space},{space}".join(write(item, space) for item in value) + space + "]"


@st.composite
def tensors(draw: Callable[..., Any], shapes: st.SearchStrategy[list[int]] = SHAPES) -> tuple[list[int], Nested]:
    """A shape, and a tensor of it as nested texts of numbers."""
    shape = draw(shapes)
    return shape, nest(draw(st.lists(NUMBERS, min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))), shape)


@st.composite
def paths(draw: Callable[..., Any], shape: list[int], depth: int) -> tuple[int, ...]:
    """Indices into the first `depth` axes, not all 0: the first row of each axis is what says how long its rows should be."""
    path = tuple(draw(st.integers(0, n - 1)) for n in shape[:depth])
    assume(any(path))
    return path


def changed(value: Nested, path: tuple[int, ...], change: Callable[[Nested], Nested]) -> Nested:
    """The tensor with the item at `path` changed."""
    if not path:
        return change(value)
    return [changed(item, path[1:], change) if i == path[0] else item for i, item in enumerate(value)]


def body(tensor: Nested, strings: dict[str, str] | None = None, ascii_only: bool = True, space: str = "") -> bytes:
    """A body with the tensor as member `x`, between these strings."""
    members = [
        f"{json.dumps(k, ensure_ascii=ascii_only)}:{space}{json.dumps(v, ensure_ascii=ascii_only)}" for k, v in (strings or {}).items()
    ]
    half = len(members) // 2
    return ("{" + ",".join([*members[:half], f'"x":{space}{write(tensor, space)}', *members[half:]]) + "}").encode()


def bits(array: Any) -> Any:
    return np.asarray(array, np.float64).view(np.int64).tolist()


def python(text: str) -> np.ndarray[Any, Any]:
    """The tensor as Python's json reads it."""
    return np.array(json.loads(text, parse_int=lambda digits: float(int(digits))), np.float64)


def refusal(data: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(data)
    assert caught.value.problems
    return caught.value


STRINGS = st.dictionaries(TRICKY.filter(lambda key: key not in KINDS), TRICKY, max_size=4)


@given(tensors(), SPACES)
def test_regular_tensors_decode_as_python_decodes_them(tensor: tuple[list[int], Nested], space: str) -> None:
    """Rank 1 to 4, bit for bit, with negative zeros, subnormals and integers of any size."""
    shape, nested = tensor

    array = parse(body(nested, space=space))["x"]

    assert array.dtype == np.float64
    assert list(array.shape) == shape
    assert bits(array) == bits(python(write(nested)))


@given(tensors(), STRINGS, st.booleans(), SPACES)
@example(([1, 1], [["1"]]), {"a": "[[", "[": "\\", "]": "\u005b"}, True, "")
def test_strings_beside_a_tensor_do_not_affect_it(
    tensor: tuple[list[int], Nested], strings: dict[str, str], ascii_only: bool, space: str
) -> None:
    """Brackets, quotation marks and backslashes in keys and values, escaped or not."""
    members = parse(body(tensor[1], strings, ascii_only, space))

    assert bits(members.pop("x")) == bits(python(write(tensor[1])))
    assert members == strings


@given(st.data(), tensors(WIDE), STRINGS, st.booleans())
def test_a_short_or_long_row_is_refused_with_its_place(
    data: st.DataObject, tensor: tuple[list[int], Nested], strings: dict[str, str], longer: bool
) -> None:
    """At every depth, one item more or less than in the rows before."""
    shape, nested = tensor
    path = data.draw(paths(shape, data.draw(st.integers(1, len(shape) - 1))))

    error = refusal(body(changed(nested, path, lambda row: [*row, row[0]] if longer else row[:-1]), strings))

    assert isinstance(error, InvalidRequest)
    assert error.problems[0].at == "/x" + "".join(f"/{i}" for i in path)
    wanted = shape[len(path)]
    assert f"{wanted} values" in error.problems[0].expected
    assert error.problems[0].got == str(wanted + 1 if longer else wanted - 1)


@given(st.data(), tensors(WIDE), STRINGS)
def test_ragged_rows_that_keep_the_count_are_refused(
    data: st.DataObject, tensor: tuple[list[int], Nested], strings: dict[str, str]
) -> None:
    """An item moved from one row to the next does not change the number of numbers and brackets."""
    shape, nested = tensor
    row = data.draw(paths(shape, len(shape) - 1))
    assume(row[-1] + 1 < shape[len(shape) - 2])
    following = (*row[:-1], row[-1] + 1)
    moved: list[Nested] = []

    def take(items: Nested) -> Nested:
        moved.append(items[-1])
        return items[:-1]

    error = refusal(body(changed(changed(nested, row, take), following, lambda items: [moved[0], *items]), strings))

    assert error.problems[0].at == "/x" + "".join(f"/{i}" for i in row)


@given(st.data(), tensors(WIDE), STRINGS, st.booleans(), st.integers(1, 3))
def test_a_list_among_numbers_is_refused_with_its_place(
    data: st.DataObject, tensor: tuple[list[int], Nested], strings: dict[str, str], ascii_only: bool, depth: int
) -> None:
    """It does not change the count of numbers. Strings full of brackets do not hide it."""
    shape, nested = tensor
    path = data.draw(paths(shape, len(shape)))

    def wrap(item: Nested) -> Nested:
        for _ in range(depth):
            item = [item]
        return item

    error = refusal(body(changed(nested, path, wrap), strings, ascii_only))

    assert isinstance(error, InvalidRequest)
    assert error.problems[0].at == "/x" + "".join(f"/{i}" for i in path)
    assert (error.problems[0].expected, error.problems[0].got) == ("a number", "a list of 1")


@given(st.data(), tensors(WIDE), STRINGS)
def test_a_row_too_deep_or_too_flat_is_refused_with_its_place(
    data: st.DataObject, tensor: tuple[list[int], Nested], strings: dict[str, str]
) -> None:
    """A row inside another list, and a number in place of a row."""
    shape, nested = tensor
    path = data.draw(paths(shape, data.draw(st.integers(1, len(shape) - 1))))
    place = "/x" + "".join(f"/{i}" for i in path)

    deep, flat = (refusal(body(changed(nested, path, change), strings)) for change in (lambda row: [row], lambda row: "7"))

    assert deep.problems[0].at == flat.problems[0].at == place
    assert flat.problems[0].got == "7"


@given(st.data(), tensors(), st.sampled_from(["true", "false", "null", '""', '"1"', '"-inf"', '"nan"', "{}", '{"a":1}', "[]"]), STRINGS)
def test_values_other_than_numbers_are_refused_with_their_place(
    data: st.DataObject, tensor: tuple[list[int], Nested], word: str, strings: dict[str, str]
) -> None:
    """Booleans, nulls, strings, objects and empty lists, anywhere."""
    shape, nested = tensor
    path = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    assume(word != "[]" or any(path))

    error = refusal(body(changed(nested, path, lambda _: word), strings))

    assert isinstance(error, InvalidRequest)
    assert error.problems[0].at == "/x" + "".join(f"/{i}" for i in path)
    assert error.problems[0].expected == "a number"


@given(st.data(), tensors(), st.sampled_from(["NaN", "Infinity", "-Infinity"]))
def test_nan_and_infinity_are_malformed_with_their_place(data: st.DataObject, tensor: tuple[list[int], Nested], token: str) -> None:
    """Other writers emit them, but JSON does not have them."""
    shape, nested = tensor
    path = tuple(data.draw(st.integers(0, n - 1)) for n in shape)

    error = refusal(body(changed(nested, path, lambda _: token)))

    assert isinstance(error, MalformedBody)
    assert (error.problems[0].at, error.problems[0].got) == ("/x" + "".join(f"/{i}" for i in path), token)


@given(st.data(), tensors(), st.sampled_from(["1e999", "-1e309", "1.8e308"]))
def test_numbers_beyond_float64_are_refused_with_their_place(data: st.DataObject, tensor: tuple[list[int], Nested], number: str) -> None:
    shape, nested = tensor
    path = tuple(data.draw(st.integers(0, n - 1)) for n in shape)

    error = refusal(body(changed(nested, path, lambda _: number)))

    assert isinstance(error, InvalidRequest)
    assert error.problems[0].at == "/x" + "".join(f"/{i}" for i in path)


@given(tensors(), STRINGS, st.booleans())
def test_every_prefix_of_a_body_is_refused(tensor: tuple[list[int], Nested], strings: dict[str, str], ascii_only: bool) -> None:
    """Wherever it ends, even inside a character. The next body is read correctly."""
    whole = body(tensor[1], strings, ascii_only)

    for end in range(len(whole)):
        assert isinstance(refusal(whole[:end]), MalformedBody)
    assert bits(parse(whole)["x"]) == bits(python(write(tensor[1])))


@given(st.binary(max_size=60))
def test_random_bytes_are_read_or_refused(data: bytes) -> None:
    """Only RequestErrors are raised."""
    try:
        parse(data)
    except RequestError as error:
        assert error.problems


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TRICKY, st.sampled_from(["-inf"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(TRICKY, st.sampled_from(["shape", "data", "datatype", "base64"])), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["x", "bias", "mask", "lens", "weights", "other"]), JSON))
def test_random_documents_are_read_or_refused(document: dict[str, Any]) -> None:
    """Any JSON under the names of tensors: arrays of the right numbers, or a refusal with a pointer."""
    try:
        members = parse(json.dumps(document).encode())
    except RequestError as error:
        assert all(problem.at.split("/")[1] in document for problem in error.problems)
        return
    for name, value in members.items():
        if isinstance(value, np.ndarray) and isinstance(document[name], list):
            assert "-inf" in str(document[name]) or bits(value) == bits(np.array(document[name], np.float64))
        elif not isinstance(value, np.ndarray | dict):
            assert value == document[name]


@given(st.dictionaries(TRICKY, st.integers(), min_size=1), st.data(), st.booleans())
def test_a_repeated_key_is_refused_with_its_name(members: dict[str, int], data: st.DataObject, nested: bool) -> None:
    """However it is escaped, at any depth."""
    twice = data.draw(st.sampled_from(sorted(members)))
    assume(twice not in KINDS)
    pairs = [(json.dumps(key, ensure_ascii=data.draw(st.booleans())), value) for key, value in [*members.items(), (twice, 1)]]
    text = "{" + ",".join(f"{key}:{value}" for key, value in pairs if json.loads(key) not in KINDS) + "}"

    error = refusal((f'{{"reply":{text}}}' if nested else text).encode())

    assert isinstance(error, MalformedBody)
    escaped = twice.replace("~", "~0").replace("/", "~1")
    assert error.problems[0].at == ("/reply/" if nested else "/") + escaped


@pytest.mark.parametrize("key", [r"\u0000", r"x\u0000", r"a\u0000b"])
def test_a_key_with_a_null_character_is_an_unknown_key(key: str) -> None:
    for text in (f'{{"a": 1, "{key}": 2}}', f'{{"reply": {{"x": 1, "{key}": 3}}}}'):
        assert parse(text.encode()) == json.loads(text)
    with pytest.raises(InvalidRequest, match="no field of that name"):
        validate(AttendRequest, parse(f'{{"query": [[1]], "{key}": 2}}'.encode(), AttendRequest.tensor_kinds))


@given(tensors(), st.sampled_from(["flat", "nested", "base64"]), STRINGS)
def test_flat_nested_and_base64_data_are_equivalent(tensor: tuple[list[int], Nested], form: str, strings: dict[str, str]) -> None:
    shape, nested = tensor
    array = python(write(nested))
    content = {
        "flat": f'"data":[{",".join(np.array(nested, object).ravel())}]',
        "nested": f'"data":{write(nested)}',
        "base64": f'"datatype":"FP64","base64":"{base64.b64encode(array.tobytes()).decode()}"',
    }[form]
    text = f'{{"shape":{json.dumps(shape)},{content}}}'

    members = parse(body(text, strings))

    assert bits(members["x"]) == bits(array)
    assert list(members["x"].shape) == shape


@pytest.mark.parametrize("datatype", DATATYPES)
@given(data=st.data(), shape=st.lists(st.integers(0, 4), min_size=0, max_size=4))
def test_base64_gives_the_exact_bytes(datatype: str, data: st.DataObject, shape: list[int]) -> None:
    """Every datatype, zero-length axes and scalars. One byte more or less is refused."""
    row = DATATYPES[datatype]
    count = int(np.prod(shape)) * row.size
    content = (
        bytes(data.draw(st.integers(0, 1)) for _ in range(count))
        if datatype == "BOOL"
        else data.draw(st.binary(min_size=count, max_size=count))
    )

    def send(content: bytes) -> bytes:
        return json.dumps({"x": {"shape": shape, "datatype": datatype, "base64": base64.b64encode(content).decode()}}).encode()

    array = parse(send(content))["x"]

    assert (array.dtype, list(array.shape), array.tobytes()) == (row.numpy, shape, content)
    for wrong in (content + b"\0", content[:-1] if content else b"\0\0"):
        error = refusal(send(wrong))
        assert error.problems[0].at == "/x/base64"


@given(tensors(WIDE))
def test_many_tensors_in_one_body(tensor: tuple[list[int], Nested]) -> None:
    """An extra bracket in one tensor is not balanced by a missing one in another."""
    shape, nested = tensor
    last = tuple(n - 1 for n in shape)
    good, bad = write(nested), write(changed(nested, last, lambda item: [item]))

    members = parse(f'{{"x":{good},"y":{good},"weights":{{"a/b":{good},"c":{good}}}}}'.encode())
    error = refusal(
        f'{{"x":{good},"y":{good},"weights":{{"a/b":{bad},"c":{good}}},"mask":{write(nest(["1"] * int(np.prod(shape)), shape))}}}'.encode()
    )

    assert all(bits(array) == bits(python(good)) for array in (members["x"], members["y"], *members["weights"].values()))
    assert error.problems[0].at == "/weights/a~1b" + "".join(f"/{i}" for i in last)


@given(st.lists(st.lists(st.sampled_from(["0", "1", "true", "false"]), min_size=3, max_size=3), min_size=1, max_size=4))
def test_masks_may_mix_numbers_and_booleans(rows: list[list[str]]) -> None:
    mask = parse(f'{{"mask":{write(rows)}}}'.encode())["mask"]

    np.testing.assert_array_equal(mask != 0, [[word in ("1", "true") for word in row] for row in rows])


@given(st.lists(st.lists(st.one_of(NUMBERS, st.just('"-inf"')), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_bias_may_contain_minus_infinity(rows: list[list[str]]) -> None:
    """As the string "-inf"."""
    bias = parse(f'{{"bias":{write(rows)}}}'.encode())["bias"]

    assert bits(bias) == bits([[-np.inf if word == '"-inf"' else float(python(f"[{word}]")[0]) for word in row] for row in rows])


@pytest.mark.parametrize("depth", [60, 65, 500, 1023, 1025, 5000, 200_000])
@pytest.mark.parametrize("inside", ["1", "NaN", "", "1e999", "[1], 2", '"a"'])
@pytest.mark.parametrize(
    "place", ['{"x": %s}', '{"other": %s}', '{"x": {"shape": %s}}', '{"x": {"shape": [1], "data": %s}}', '{"x": [1, %s]}', "%s"]
)
def test_deep_nesting_is_refused_without_recursion(place: str, inside: str, depth: int) -> None:
    """Whatever is wrong inside. The next body is read."""
    text = "[" * depth + inside + "]" * depth

    error = None
    try:
        parse((place % text).encode())
    except RequestError as refused:
        error = refused

    assert error is not None or (place == '{"other": %s}' and depth == 60 and inside in ("1", "", '"a"', "[1], 2"))
    if depth > 1024:
        assert isinstance(error, TooLarge)
    assert parse(b'{"x": [1]}')["x"].tolist() == [1]


def test_decoded_arrays_are_not_overwritten_by_later_bodies() -> None:
    first = parse(b'{"x": [[1, 2], [3, 4]], "other": ["kept"]}')
    for i in range(50):
        parse(json.dumps({"x": [[9.5] * 50] * 50, "other": [str(i)] * 100}).encode())

    assert first["x"].tolist() == [[1, 2], [3, 4]]
    assert first["other"] == ["kept"]


def test_large_bodies_are_read_and_refused_alike() -> None:
    """The same numbers, and the same place for a fault in the last one."""
    rows = np.random.default_rng(0).standard_normal((70_000, 4))
    text = json.dumps(rows.tolist())
    assert len(text) > 4 * 1024 * 1024

    assert bits(parse(f'{{"x": {text}}}'.encode())["x"]) == bits(rows)
    last = text.rindex(",") + 1
    for word, place in (("[1]", "/x/69999/3"), ("null", "/x/69999/3"), ("NaN", "/x/69999/3"), ("1, 2", "/x/69999")):
        assert refusal(f'{{"x": {text[:last]}{word}]]}}'.encode()).problems[0].at == place

    beside = '"tokens": {"query": [1, 1e999]}'
    large, small = refusal(f'{{{beside}, "x": {text}}}'.encode()), refusal(f"{{{beside}}}".encode())
    assert large.problems == small.problems and small.problems[0].at == "/tokens/query/1"
