"""The compiled reader and writer of numbers, in each variant that this processor can run, against float(), json, orjson and NumPy."""

import json
import math
import random
import sys
import threading
from collections.abc import Iterator
from decimal import Context, Decimal
from typing import Any

import numpy as np
import orjson
import pytest

from attend.wire.native import numbers

RNG = np.random.default_rng(0)
PAD = b" " * 100  # vector instructions are used where enough text is on both sides
FLOATS = (np.dtype(np.float64), np.dtype(np.float32))


@pytest.fixture(autouse=True, params=numbers.variants()[:-1])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    before = numbers.variant()
    numbers.use(request.param)
    yield request.param
    numbers.use(before)


def read(text: str, dtype: Any = np.float64, before: bytes = PAD, after: bytes = PAD) -> Any:
    """The array, or None."""
    data = text.encode()
    found = numbers.read(before + data + after, len(before), len(before) + len(data), 1 << 21, np.dtype(dtype))
    return None if found is None else found[0]


def assert_read(rows: list[list[str]], separator: str = ",") -> None:
    """Each number is read as Python reads it, in float64 and in float32, wherever the text is."""
    text = f"[{separator.join(f'[{separator.join(row)}]' for row in rows)}]"
    expected = np.array([[float(json.loads(number)) for number in row] for row in rows])
    for before, after in ((PAD, PAD), (b"", b""), (b"[", b"]")):
        found = read(text, np.float64, before, after)
        assert found is not None, text
        assert found.shape == expected.shape and found.tobytes() == expected.tobytes(), text
    with np.errstate(over="ignore"):
        as_float32 = expected.astype(np.float32)
    found = read(text, np.float32)
    if np.isinf(as_float32).any():
        assert found is None
    else:
        assert found.tobytes() == as_float32.tobytes(), text


def decimal(rng: random.Random) -> str:
    """A number of up to 19 digits that count, with a point anywhere, and perhaps an exponent."""
    digits = "".join(rng.choices("0123456789", k=rng.choice([1, 2, 5, 9, 15, 16, 17, 18, 19])))
    point = rng.randint(0, len(digits))
    whole, fraction = digits[:point].lstrip("0") or "0", digits[point:]
    exponent = f"{rng.choice('eE')}{rng.choice(['', '+', '-'])}{rng.choice([0, 1, 5, '05', 22, 23, 30, 300, 307])}" * (rng.random() < 0.4)
    text = f"{rng.choice(['', '-'])}{whole}{'.' if fraction else ''}{fraction}{exponent}"
    return text if math.isfinite(float(text)) else "1"


def test_numbers_in_any_notation_are_read() -> None:
    """Alone and in long rows, in which one number may have another notation."""
    rng = random.Random(1)
    for _ in range(300):
        assert_read([[decimal(rng) for _ in range(rng.choice([1, 3, 64, 65, 130]))]])
    for format in ("%.9g", "%.6f", "%.17g", "%r", "%.8e", "%d", "%.3G", "%.11f"):
        rows = [
            [format % value for value in row] for row in (RNG.standard_normal((3, 130)) * 10.0 ** RNG.integers(-6, 6, (3, 130))).tolist()
        ]
        for separator in (",", ", ", " ,", ",\n  "):
            assert_read(rows, separator)
        for other in ("1e-05", "-2.5E+10", "1234567890123456789", "0.1234567890123456789", "0", "-0", "-0.0", "0.0e-20", "5e-324", "1e22"):
            changed = [[*rows[0]] for _ in range(2)]
            changed[1][rng.randrange(130)] = other
            assert_read(changed)


def test_numbers_between_two_floats_are_rounded_to_even() -> None:
    """Halfway between neighbours, up to 19 digits, and with one more digit."""
    rng, context = random.Random(2), Context(prec=19)
    rows = []
    for exponent in range(-1074, 971):
        value = math.ldexp(rng.getrandbits(53) | 1 << 52, exponent)
        if 0 < value < sys.float_info.max:
            middle = (context.create_decimal(Decimal(value)) + context.create_decimal(Decimal(math.nextafter(value, math.inf)))) / 2
            rows.append([str(context.plus(middle)), str(context.next_plus(middle)), str(context.next_minus(middle))])
    integers = [2**53 + 1, 2**53 + 3, 2**54 + 2, 2**54 + 6, 2**63 + 1024, 2**63 + 3072]
    assert_read([[str(integer), f"{integer}.0"[:20].removesuffix("."), f"{integer}e0"] for integer in integers])
    for row in rows:
        if all(math.isfinite(float(number)) for number in row):
            assert_read([row])


def test_every_power_of_ten_is_read() -> None:
    for digits in (1, 7, 2**53 + 1, 10**18 + 3, 10**19 - 1):
        assert_read([[f"{digits}e{power}"] for power in range(-345, 290)])


def test_literals_are_reported() -> None:
    rows = ['[1, true, false, 0.5, "-inf"]', "[true]", '["-inf", -0.5]']
    found = [numbers.read(row.encode(), 0, len(row), 10) for row in rows]
    assert [(array.tolist(), literals) for array, literals in found if array is not None] == [  # type: ignore[misc]
        ([1, 1, 0, 0.5, -np.inf], numbers.HAS_BOOLEANS | numbers.HAS_MINUS_INFINITY),
        ([1], numbers.HAS_BOOLEANS),
        ([-np.inf, -0.5], numbers.HAS_MINUS_INFINITY),
    ]


WRONG = """01 -01 00 +1 .5 -.5 1. -1. 1e 1e+ 1.e5 - -- --1 1-1 1.2.3 1e5.2 1e5e5 1e1000 -1e309 0x10
1_0 1f Infinity NaN nan null True tru falsee
"-Inf" "1" "-inf {} [] [[1],2] 1:2 \0 1\0 \u0661 12345678901234567890 1.2345678901234567890
1,, ,1 1e-0x 1e--5 e-05 .e-05 -e-05 1/2 /5 :5 5:"""


@pytest.mark.parametrize("wrong", [*WRONG.split(), "", "1 2", "1. 5", "- 1", "1 e5", "\v1", "\u00a01"])
def test_values_other_than_numbers_are_refused(wrong: str) -> None:
    """Anywhere in rows of any length."""
    for length, format in ((1, "%.9g"), (3, "%.9g"), (70, "%.9g"), (70, "%.17g"), (70, "%.8e"), (70, "%d")):
        for place in {0, length // 2, length - 1}:
            row = [format % value for value in RNG.standard_normal(length).tolist()]
            row[place] = wrong
            for after in (PAD, b""):
                assert read(f"[{','.join(row)}]", after=after) is None


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "1", "[", "]", "[[1]", "[1]]", "[1][2]", "[1],[2]", "[[1],2]", "[1,[2]]", "[[1],[2,3]]", "[[[1]],[2]]", "[[1]2]", "[[1],]"),
        *(
            "[,[1]]",
            "[[1] [2]]",
            "[[[[[1]]]]]",
            "[[[1,2]],[[1],[2]]]",
            "{}",
            "[[1}]",
            "[[1],[]]",
            "[[],[1]]",
            "[[1],[[2]]]",
            "[1]x",
            "x[1]",
        ),
    ],
)
def test_irregular_lists_are_refused(wrong: str) -> None:
    for before, after in ((b"", b""), (PAD, PAD), (b"[", b"]"), (b"[", b",[2]]")):
        assert read(wrong, before=before, after=after) is None


def regular(value: Any) -> bool:
    """Whether nested lists are an array of numbers of at most 19 digits."""
    try:
        array = np.array(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        return False
    return 0 < array.ndim <= 4 and array.size > 0 and bool(np.isfinite(array).all())


def test_lists_with_changed_bytes_are_read_as_json_reads_them_or_refused() -> None:
    rng = random.Random(3)
    read_ones = 0
    for _ in range(4000):
        width, format = rng.choice([1, 2, 5, 70]), rng.choice(["%.9g", "%.4f", "%d", "%.17g", "%.8e"])
        text = list(json.dumps([[0.25] * width] * 2).replace("0.25", "%s") % tuple(format % rng.gauss(0, 10) for _ in range(2 * width)))
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            place = rng.randrange(len(text))
            text[place] = rng.choice(["", "", text[place] * 2, *'0123456789.,-+eE[] \n"ntf{}x\0'])
        changed = "".join(text)
        try:
            expected = json.loads(changed, parse_constant=lambda name: name)
        except ValueError:
            expected = None
        found = read(changed.strip())
        if found is not None:
            assert regular(expected), changed
            assert found.tolist() == np.array(expected, np.float64).tolist(), changed
            read_ones += 1
        elif regular(expected) and "e" not in changed.lower():
            assert any(sum(map(str.isdigit, number)) > 19 for number in changed.replace("[", ",").split(",")) or "t" in changed, changed
    assert read_ones > 1000


def test_only_the_given_range_is_read() -> None:
    text = b"[[1,2],[3,4]] , [5]"
    found = numbers.read(text, 0, 13, 3)
    assert found is not None and found[0].tolist() == [[1, 2], [3, 4]]
    assert numbers.read(text, 0, 13, 2) is None, "more lists than allowed"
    for part in ((0, 12), (0, 14), (1, 13), (1, 12), (5, 5)):
        assert numbers.read(text, *part, 10) is None
    for part in ((-1, 3), (3, 2), (0, 20)):
        with pytest.raises(ValueError, match="no such part"):
            numbers.read(text, *part, 10)


@pytest.mark.parametrize("dtype", FLOATS)
def test_arrays_of_any_shape_are_read_and_written(dtype: np.dtype[Any]) -> None:
    rng = random.Random(4)
    for _ in range(100):
        shape = [*rng.choices([1, 2, 3, 5], k=rng.randint(0, 3)), rng.choice([1, 2, 3, 7, 64, 65, 100])]
        array = RNG.standard_normal(shape).astype(np.float32)
        written = numbers.write(array)
        assert written is not None and json.loads(written) == json.loads(orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY))
        found = read(written.decode(), dtype)
        assert found.dtype == dtype and found.shape == array.shape
        assert found.astype(np.float32).tobytes() == array.tobytes()


def any_floats(count: int) -> np.ndarray[Any, Any]:
    """Float32 of any bits; powers of two and their neighbours; numbers of few digits; the largest and the smallest."""
    powers = np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32)
    near = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    few = (RNG.integers(-999, 999, count) * 10.0 ** RNG.integers(-40, 36, count)).astype(np.float32)
    bits = RNG.integers(0, 2**32, count, np.uint32).view(np.float32)
    return np.concatenate([bits[np.isfinite(bits)], near[np.isfinite(near)], few, RNG.standard_normal(count).astype(np.float32)])


def test_the_fewest_digits_that_read_back_are_written() -> None:
    """The same digits as NumPy's algorithm."""
    array = any_floats(5000)
    written = numbers.write(array)
    assert written is not None
    texts = written.decode()[1:-1].split(",")
    for text, number in zip(texts, array, strict=True):
        assert Decimal(text) == Decimal(np.format_float_scientific(number)), (text, number)
        assert text.startswith("-") == bool(np.signbit(number)) and json.loads(text) == float(text)
        assert len(text) <= 16 and isinstance(json.loads(text), float)
    assert np.array(texts, np.float32).tobytes() == array.tobytes()


@pytest.mark.parametrize("decimals", range(18))
def test_decimals_limit_the_digits_after_the_point(decimals: int) -> None:
    """The number is the one that NumPy rounds to; if float32 has fewer decimals than that, its own."""
    array = any_floats(3000)
    written = numbers.write(array, decimals)
    with np.errstate(over="ignore"):
        expected = np.round(array.astype(np.float64), decimals).astype(np.float32) + np.float32(0)
    assert written == numbers.write(expected)


def test_nonfinite_numbers_are_null() -> None:
    array = np.array([[1, np.nan, -np.inf] * 40, [np.inf, 0, -0.0] * 40], np.float32)
    written = numbers.write(array)
    assert written == orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def test_other_arrays_are_not_written() -> None:
    for array in (np.zeros(3), np.zeros(3, np.int64), np.zeros(3, np.float16), np.zeros((), np.float32), np.zeros((2, 0), np.float32)):
        assert numbers.write(array) is None
    assert numbers.write(np.zeros((1, 1, 1, 1, 1), np.float32)) is None
    strided = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)[:, ::-1]
    assert json.loads(numbers.write(strided) or b"") == strided.tolist()
    with pytest.raises(ValueError, match="decimals"):
        numbers.write(np.zeros(1, np.float32), 99)


@pytest.mark.parametrize("work", ["read", "write"])
def test_other_threads_run_while_numbers_are_read(work: str) -> None:
    """The interpreter switches threads only when one releases the lock, since the interval is longer than the test may take."""
    array = RNG.standard_normal(100_000).astype(np.float32)
    text = numbers.write(array) or b""
    gate, ran = threading.Lock(), threading.Event()
    gate.acquire()
    thread = threading.Thread(target=lambda: (gate.acquire(), ran.set()))
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        gate.release()
        while not ran.is_set():
            _ = numbers.read(text, 0, len(text), 1) if work == "read" else numbers.write(array)
    finally:
        sys.setswitchinterval(interval)
    thread.join()


def test_a_variant_that_fails_the_self_test_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    write = numbers.write
    for name, broken in (("read", lambda *_: None), ("write", lambda *_: b"[[1.0]]"), ("write", lambda array, *_: write(array + 1))):
        with monkeypatch.context() as patch:
            patch.setattr(numbers, name, broken)
            numbers.choose()
        assert numbers.variant() == numbers.PYTHON
        assert numbers.read(b"[1]", 0, 3, 1) is None and numbers.write(np.ones(1, np.float32)) is None
    numbers.choose()
    assert numbers.variant() == numbers.variants()[0]


def test_a_variant_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="no variant avx1024"):
        numbers.use("avx1024")
