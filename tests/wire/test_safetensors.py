"""safetensors against the library of that name, and against malicious bodies.

The library reads what is written here, and the reverse. Every invalid body raises a RequestError with the name of the tensor, and nothing
else.
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import load, save

from attend.errors import AttendError, InvalidRequest, MalformedBody, RequestError, TooLarge
from attend.limits import WireLimits
from attend.tensors import DATATYPES, Array, datatype_of
from attend.wire.codec import Reply
from attend.wire.safetensors import MAX_HEADER_BYTES, decode, encode, read_tensors, write_tensors
from attend.wire.schemas.attend import AttendRequest, ReplyOptions

LIMITS = WireLimits()
KINDS = AttendRequest.tensor_kinds
RNG = np.random.default_rng(8)


def body(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A body with this header, given as a document or as text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def parse(body: bytes) -> Mapping[str, Any]:
    """The members of a body."""
    return decode(body, {}, KINDS, LIMITS).members


def random_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Numbers that the dtype holds, its edges among them."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        array: Array = np.array(RNG.integers(info.min, info.max, shape, dtype, endpoint=True))
    elif dtype.kind == "b":
        array = np.array(RNG.integers(0, 2, shape)).astype(dtype)
    else:
        array = np.array(RNG.standard_normal(shape)).astype(dtype)
        edges = np.array([np.nan, -np.inf, -0.0]).astype(dtype)
        array.reshape(-1)[:3] = edges[: array.size]
    return array


def read_by_library(content: bytes) -> dict[str, Array]:
    """The tensors as the library reads them. Its NumPy interface lacks bfloat16, which is read from the raw bytes."""
    if '"BF16"' not in content[8 : 8 + struct.unpack("<Q", content[:8])[0]].decode():
        return load(content)
    parts = dict(deserialize(content))
    dtypes = {row.safetensors: row.numpy for row in DATATYPES.values()}
    return {name: np.frombuffer(part["data"], dtypes[part["dtype"]]).reshape(part["shape"]) for name, part in parts.items()}


def assert_equal(got: Array, wanted: Array) -> None:
    """The same dtype, shape and bytes."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.tobytes() == wanted.tobytes()


def joined(pieces: list[Any]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


# Both ways


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 3, 4, 5), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", DATATYPES)
def test_tensors_written_by_the_library_are_read_exactly(name: str, shape: tuple[int, ...]) -> None:
    """Every dtype, scalars and empty tensors."""
    array = random_array(DATATYPES[name].numpy, shape)
    tensors, metadata = read_tensors(save({"x": array}))
    assert_equal(tensors["x"], array)
    assert not metadata


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 3, 4, 5), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", DATATYPES)
def test_the_library_reads_tensors_exactly(name: str, shape: tuple[int, ...]) -> None:
    """Every dtype, scalars and empty tensors."""
    array = random_array(DATATYPES[name].numpy, shape)
    assert_equal(read_by_library(joined(write_tensors({"x": array}, {})))["x"], array)


def everything() -> dict[str, Array]:
    """A tensor of every dtype, of sizes that leave the ones behind them unaligned."""
    return {f"tensor.{name}": random_array(row.numpy, (3, 1 + i % 3)) for i, (name, row) in enumerate(DATATYPES.items())}


def test_the_library_opens_a_file_of_many_tensors(tmp_path: Path) -> None:
    """Names, dtypes, shapes, numbers, and metadata in any script."""
    metadata = {"reply": '{"layer": "größe ✓ \\u0000"}', "": "nothing", "format": "np"}
    tensors = {**everything(), "größe/~1": random_array(np.dtype(np.float32), (2,)), "": random_array(np.dtype(np.int8), (1,))}
    path = tmp_path / "all.safetensors"
    path.write_bytes(joined(write_tensors(tensors, metadata)))

    with safe_open(path, "numpy") as opened:
        assert opened.metadata() == metadata
        assert set(opened.keys()) == set(tensors)
    for name, array in read_by_library(path.read_bytes()).items():
        assert_equal(array, tensors[name])
    again, read_metadata = read_tensors(path.read_bytes())
    assert read_metadata == metadata
    assert again.keys() == tensors.keys()
    for name, array in again.items():
        assert_equal(array, tensors[name])


def test_many_tensors_from_the_library_are_read() -> None:
    """The library sorts them by element size and name."""
    tensors = everything()
    got, metadata = read_tensors(save(tensors, {"request": "{}", "who": "me"}))
    assert metadata == {"request": "{}", "who": "me"}
    assert got.keys() == tensors.keys()
    for name, array in tensors.items():
        assert_equal(got[name], array)


def test_a_body_without_tensors_and_metadata_is_valid() -> None:
    """For the library too."""
    assert read_tensors(save({})) == ({}, {})
    assert load(joined(write_tensors({}, {}))) == {}
    assert read_tensors(body({})) == ({}, {})


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1), id="transposed"),
        pytest.param(np.arange(24.0)[::-2], id="backwards"),
        pytest.param(np.arange(24, dtype=">f4").reshape(4, 6), id="big-endian"),
        pytest.param(np.broadcast_to(np.float32(3), (2, 5)), id="broadcast"),
    ],
)
def test_arrays_are_written_row_major_and_little_endian(array: Array) -> None:
    """Whatever their strides and byte order."""
    got = load(joined(write_tensors({"x": array}, {})))["x"]
    np.testing.assert_array_equal(got, array)
    assert got.dtype == array.dtype.newbyteorder("<")


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")


@given(st.dictionaries(names, st.tuples(st.sampled_from(sorted(DATATYPES)), shapes), max_size=5), st.dictionaries(names, names, max_size=3))
def test_random_tensors_survive_a_round_trip_with_the_library(
    what: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    """In both directions."""
    tensors = {name: random_array(DATATYPES[dtype].numpy, shape) for name, (dtype, shape) in what.items()}
    written = joined(write_tensors(tensors, metadata))
    by_library, (by_service, read_metadata) = read_by_library(written), read_tensors(save(tensors, metadata or None))
    assert by_library.keys() == by_service.keys() == tensors.keys()
    assert read_metadata == metadata == read_tensors(written)[1]
    for name, array in tensors.items():
        assert_equal(by_library[name], array)
        assert_equal(by_service[name], array)


# Memory


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_arrays_are_views_of_the_body(kind: Callable[[bytes], Any]) -> None:
    tensors = {
        "a": random_array(np.dtype(np.float32), (3, 4)),
        "b": random_array(np.dtype(np.float64), (5,)),
        "c": random_array(np.dtype(np.bool_), (7,)),
    }
    content = kind(save(tensors))
    whole = np.frombuffer(content, np.uint8)
    for name, array in read_tensors(content)[0].items():
        assert np.shares_memory(array, whole), name
        assert_equal(array, tensors[name])


def test_an_unaligned_tensor_is_copied() -> None:
    """torch and numpy need numbers at multiples of their size."""
    data = b"\x01" + np.array([1.5, -2.0], np.float32).tobytes()
    text = json.dumps({"flag": entry("BOOL", (1,), (0, 1)), "x": entry("F32", (2,), (1, 9))}).encode()
    for padding in range(8):
        got, _ = read_tensors(body(text + b" " * padding, data))
        assert got["x"].flags.aligned
        assert got["x"].tolist() == [1.5, -2.0]
        assert got["flag"].tolist() == [True]


def test_pieces_of_a_reply_are_views_of_the_arrays() -> None:
    """Only an array that is not contiguous is copied."""
    output, weights = random_array(np.dtype(np.float32), (2, 3)), random_array(np.dtype(np.float64), (4, 4))
    pieces = write_tensors({"output": output, "weights": weights, "turned": weights.T}, {"reply": "{}"})
    assert [len(piece) for piece in pieces[1:]] == [output.nbytes, weights.nbytes, weights.nbytes]
    assert np.shares_memory(np.frombuffer(pieces[1], np.uint8), output)
    assert np.shares_memory(np.frombuffer(pieces[2], np.uint8), weights)
    assert len(pieces[0]) % 8 == 0


# Attacks

DATA = bytes(range(1, 9))
ATTACKS: list[tuple[str, bytes, type[AttendError], str]] = [
    ("empty", b"", MalformedBody, ""),
    ("seven bytes", b"\0" * 7, MalformedBody, ""),
    ("a header of nothing", struct.pack("<Q", 0), MalformedBody, ""),
    ("a header of nothing, and data", struct.pack("<Q", 0) + DATA, MalformedBody, ""),
    ("a header beyond the body", body({"x": entry()}, DATA, length=10_000), MalformedBody, ""),
    ("a header one byte beyond the body", body({}, length=3), MalformedBody, ""),
    ("a huge header", body({"x": entry()}, DATA, length=MAX_HEADER_BYTES + 1), TooLarge, ""),
    ("the hugest header", b"\xff" * 8 + b"{}", TooLarge, ""),
    ("a header that overflows", struct.pack("<Q", 2**63) + b"{}", TooLarge, ""),
    ("a header cut short", body(b'{"x": {"dtype": "F32", "sha'), MalformedBody, ""),
    ("a header that is no UTF-8", body(b'{"\xff": 1}'), MalformedBody, ""),
    ("a header in UTF-8 that is none", body(b'{"\xed\xa0\x80": %b}' % json.dumps(entry()).encode(), DATA), MalformedBody, ""),
    ("a header in UTF-16", body(json.dumps({"x": entry()}).encode("utf-16-le"), DATA), MalformedBody, ""),
    ("a header in UTF-32", body(json.dumps({"x": entry()}).encode("utf-32-be"), DATA), MalformedBody, ""),
    ("a header that is no JSON", body(b"not json"), MalformedBody, ""),
    ("a header with NaN", body(b'{"x": NaN}'), MalformedBody, "/x"),
    ("a header of null bytes", body(b"\0" * 16), MalformedBody, ""),
    ("a header that is a list", body([]), MalformedBody, ""),
    ("a header that is a string", body("x"), MalformedBody, ""),
    ("a header that is null", body(None), MalformedBody, ""),
    ("a header nested without end", body(b'{"x":' * 100_000), TooLarge, ""),
    ("a header of lists without end", body(b"[" * 100_000 + b"]" * 100_000), MalformedBody, ""),
    ("a number of a million digits", body(b'{"x": {"dtype": "F32", "shape": [' + b"9" * 10**6 + b"]}}"), MalformedBody, ""),
    ("a tensor that stands twice", body(b'{"x": %b, "x": %b}' % ((json.dumps(entry()).encode(),) * 2), DATA), MalformedBody, "/x"),
    ("a dtype that stands twice", body(b'{"x":{"dtype":"F32","dtype":"F64","shape":[1],"data_offsets":[0,8]}}', DATA), MalformedBody, ""),
    ("metadata that stand twice", body(b'{"__metadata__":{},"__metadata__":{}}'), MalformedBody, "/__metadata__"),
    ("a key that stands twice in the metadata", body(b'{"__metadata__":{"a":"1","a":"2"}}'), MalformedBody, ""),
    ("metadata that are a list", body({"__metadata__": []}), MalformedBody, "/__metadata__"),
    ("metadata that are a string", body({"__metadata__": "x"}), MalformedBody, "/__metadata__"),
    ("metadata with a number", body({"__metadata__": {"request": 1}}), MalformedBody, "/__metadata__"),
    ("metadata with an object", body({"__metadata__": {"request": {"causal": True}}}), MalformedBody, "/__metadata__"),
    ("metadata with null", body({"__metadata__": {"request": None}}), MalformedBody, "/__metadata__"),
    ("an entry of the metadata in other case", body({"__metadata__": {"Request": "{}"}}), MalformedBody, "/__metadata__/Request"),
    ("an entry that is null", body({"x": None}), MalformedBody, "/x"),
    ("an entry that is a list", body({"x": [1]}, DATA), MalformedBody, "/x"),
    ("an entry without a dtype", body({"x": {"shape": [2], "data_offsets": [0, 8]}}, DATA), MalformedBody, "/x"),
    ("an entry without a shape", body({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, DATA), MalformedBody, "/x"),
    ("an entry without offsets", body({"x": {"dtype": "F32", "shape": [2]}}, DATA), MalformedBody, "/x"),
    ("an entry with more", body({"x": {**entry(), "strides": [1]}}, DATA), MalformedBody, "/x"),
    ("an unknown dtype", body({"x": entry("F33")}, DATA), InvalidRequest, "/x"),
    ("a dtype of 8 bits that nobody here has", body({"x": entry("F8_E4M3", (8,), (0, 8))}, DATA), InvalidRequest, "/x"),
    ("a complex dtype", body({"x": entry("C64", (1,), (0, 8))}, DATA), InvalidRequest, "/x"),
    ("a dtype in small letters", body({"x": entry("f32")}, DATA), InvalidRequest, "/x"),
    ("a dtype that is a number", body({"x": entry(32)}, DATA), InvalidRequest, "/x"),  # type: ignore[arg-type]
    ("a dtype that is a list", body({"x": entry(["F32"])}, DATA), InvalidRequest, "/x"),  # type: ignore[arg-type]
    ("a dtype that is null", body({"x": entry(None)}, DATA), InvalidRequest, "/x"),  # type: ignore[arg-type]
    ("a shape that is a number", body({"x": {**entry(), "shape": 2}}, DATA), MalformedBody, "/x"),
    ("a shape that is null", body({"x": {**entry(), "shape": None}}, DATA), MalformedBody, "/x"),
    ("a negative length", body({"x": entry(shape=(-2,))}, DATA), MalformedBody, "/x"),
    ("two negative lengths", body({"x": entry(shape=(-2, -1))}, DATA), MalformedBody, "/x"),
    ("a length with a fraction", body({"x": entry(shape=(2.0,))}, DATA), MalformedBody, "/x"),
    ("a length that is true", body({"x": entry(shape=(True, 2))}, DATA), MalformedBody, "/x"),
    ("a length in words", body({"x": entry(shape=("2",))}, DATA), MalformedBody, "/x"),
    ("a shape that overflows 64 bits to 2", body({"x": entry(shape=(2**32, 2**32, 2))}, DATA), MalformedBody, "/x"),
    ("a shape that overflows to 0", body({"x": entry(shape=(2**32, 2**32), offsets=(0, 0))}), MalformedBody, "/x"),
    ("a shape whose bytes overflow", body({"x": entry(shape=(2**62 + 2,))}, DATA), MalformedBody, "/x"),
    ("a length beyond 64 bits", body({"x": entry(shape=(2**64 + 2,))}, DATA), MalformedBody, "/x"),
    ("too many axes", body({"x": entry(shape=(1, 1, 1, 1, 2))}, DATA), InvalidRequest, "/x"),
    ("a million axes", body({"x": entry(shape=(1,) * 10**6)}, DATA), TooLarge, ""),
    ("one offset", body({"x": entry(offsets=(0,))}, DATA), MalformedBody, "/x"),
    ("three offsets", body({"x": entry(offsets=(0, 8, 8))}, DATA), MalformedBody, "/x"),
    ("offsets that are no list", body({"x": {**entry(), "data_offsets": 8}}, DATA), MalformedBody, "/x"),
    ("offsets with a fraction", body({"x": entry(offsets=(0, 8.0))}, DATA), MalformedBody, "/x"),
    ("a negative offset", body({"x": entry(offsets=(-8, 0))}, DATA), MalformedBody, "/x"),
    ("offsets the wrong way round", body({"x": entry(offsets=(8, 0))}, DATA), MalformedBody, "/x"),
    ("offsets beyond the body", body({"x": entry(offsets=(0, 8))}, DATA[:7]), MalformedBody, "/x"),
    ("offsets far beyond the body", body({"x": entry(shape=(2**40,), offsets=(0, 2**42))}, DATA), MalformedBody, "/x"),
    ("fewer bytes than the shape", body({"x": entry(offsets=(0, 4))}, DATA[:4]), MalformedBody, "/x"),
    ("more bytes than the shape", body({"x": entry(shape=(1,))}, DATA), MalformedBody, "/x"),
    ("no bytes for a scalar", body({"x": entry(shape=(), offsets=(0, 0))}), MalformedBody, "/x"),
    ("bytes for an empty tensor", body({"x": entry(shape=(0,))}, DATA), MalformedBody, "/x"),
    ("a hole before the first", body({"x": entry("F32", (1,), (4, 8))}, DATA), MalformedBody, "/x"),
    ("a hole between two", body({"a": entry("U8", (3,), (0, 3)), "x": entry("U8", (4,), (4, 8))}, DATA), MalformedBody, "/x"),
    ("an overlap", body({"a": entry("U8", (5,), (0, 5)), "x": entry("U8", (4,), (4, 8))}, DATA), MalformedBody, "/x"),
    ("twins in one place", body({"a": entry(), "x": entry()}, DATA), MalformedBody, "/x"),
    ("one inside another", body({"a": entry(), "x": entry("U8", (2,), (2, 4))}, DATA), MalformedBody, "/x"),
    ("an empty tensor inside another", body({"a": entry(), "x": entry("U8", (0,), (3, 3))}, DATA), MalformedBody, "/x"),
    ("an empty tensor behind the end", body({"a": entry(), "x": entry("U8", (0,), (9, 9))}, DATA), MalformedBody, "/x"),
    ("bytes left over", body({"x": entry()}, DATA + b"\0"), MalformedBody, ""),
    ("bytes and no tensors", body({}, DATA), MalformedBody, ""),
    ("a bool of 2", body({"x": entry("BOOL", (8,), (0, 8))}, b"\0\1\0\1\0\1\2\0"), InvalidRequest, "/x"),
    ("a bool of 255", body({"x": entry("BOOL", (2, 1), (0, 2))}, b"\xff\0"), InvalidRequest, "/x"),
    ("a bool of 2 after many others", body({"x": entry("BOOL", (70001,), (0, 70001))}, b"\1" * 70000 + b"\2"), InvalidRequest, "/x"),
    ("a name to be escaped", body({"a/b~": None}), MalformedBody, "/a~1b~0"),
    ("a name of half a pair", body(b'{"\\ud800": null}'), MalformedBody, ""),
]


@pytest.mark.parametrize(("content", "kind", "at"), [attack[1:] for attack in ATTACKS], ids=[attack[0] for attack in ATTACKS])
def test_invalid_bodies_are_refused(content: bytes, kind: type[AttendError], at: str) -> None:
    """With the right class and the tensor's name, briefly, and without allocating the announced memory."""
    with pytest.raises(AttendError) as refusal:
        read_tensors(content)
    assert type(refusal.value) is kind, refusal.value
    (problem,) = refusal.value.problems
    if at:  # it is named, by its place or, where no place could tell two of the same name apart, in words
        assert problem.at.startswith(at) or f'"{at[1:]}"' in problem.got
    assert len(refusal.value.detail) < 300
    assert problem.expected
    assert problem.got


def test_the_library_refuses_the_same_bodies_but_for_some_valid_ones() -> None:
    """The others are valid safetensors that this service does not accept."""
    stricter = {name for name, content, _, _ in ATTACKS if _library_reads(content)}
    assert stricter <= {
        "an entry of the metadata in other case",
        "too many axes",
        "a million axes",
        "a bool of 2",
        "a bool of 255",
        "a bool of 2 after many others",
        "an entry with more",
        "a dtype that stands twice",
        "a tensor that stands twice",
        "metadata that stand twice",
        "a key that stands twice in the metadata",
        "a dtype of 8 bits that nobody here has",
        "a complex dtype",
    }


def _library_reads(content: bytes) -> bool:
    """Whether the library reads it. Its conversion to numpy fails for dtypes that numpy lacks."""
    try:
        load(content)
    except (SafetensorError, KeyError, ValueError, TypeError):
        return False
    return True


@pytest.mark.parametrize("n", [0, 1, 3])
def test_every_prefix_of_a_body_is_refused(n: int) -> None:
    whole = save({f"x{i}": random_array(np.dtype(np.float32), (2, 3)) for i in range(n)}, {"request": '{"causal": true}'})
    assert len(read_tensors(whole)[0]) == n
    for length in range(len(whole)):
        with pytest.raises(MalformedBody):
            read_tensors(whole[:length])
        with pytest.raises(MalformedBody):
            read_tensors(memoryview(whole)[:length])


def test_bytes_after_the_last_tensor_are_refused() -> None:
    with pytest.raises(MalformedBody):
        read_tensors(save({"x": random_array(np.dtype(np.float32), (2, 3))}) + b"\0")


def test_a_header_beyond_the_limit_is_refused_before_it_is_read() -> None:
    """By its first eight bytes."""
    for size in (MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1):
        with pytest.raises(TooLarge, match=str(MAX_HEADER_BYTES)):
            read_tensors(struct.pack("<Q", size))


# Requests and replies


def test_a_request_of_tensors_and_metadata() -> None:
    """Tensors by their names, the other fields from the entry `request`; other entries are ignored."""
    query, mask = random_array(np.dtype(np.float16), (2, 3, 4)), random_array(np.dtype(np.bool_), (3, 3))
    text = '{"causal": true, "select": {"heads": [1]}, "key": [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]}'
    members = parse(save({"query": query, "attend_mask": mask}, {"request": text, "format": "pt", "note": "no { json"}))
    assert set(members) == {"query", "attend_mask", "causal", "select", "key"}
    assert_equal(members["query"], query)
    assert members["causal"] is True
    assert members["select"] == {"heads": [1]}
    np.testing.assert_array_equal(members["key"], np.arange(1.0, 9).reshape(2, 1, 4))


def test_a_request_of_tensors_or_metadata_alone() -> None:
    assert set(parse(save({"query": np.ones((2, 4))}))) == {"query"}
    members = parse(save({}, {"request": '{"query": [[1, 2], [3, 4]]}'}))
    np.testing.assert_array_equal(members["query"], [[1, 2], [3, 4]])


@pytest.mark.parametrize("inside", ["[[1.0]]", "null", "{}"])
def test_a_field_in_tensors_and_metadata_is_refused(inside: str) -> None:
    """Even if both are equal."""
    with pytest.raises(InvalidRequest) as refusal:
        parse(
            save(
                {"query": np.ones((1, 1))},
                {"request": f'{{"query": {inside}}}' if inside != "{}" else '{"query": {"shape": [1, 1], "data": [1]}}'},
            )
        )
    assert [problem.at for problem in refusal.value.problems] == ["/query"]


@pytest.mark.parametrize(
    ("request_entry", "kind"),
    [
        ("", MalformedBody),
        ("{", MalformedBody),
        ("[]", InvalidRequest),
        ('"x"', InvalidRequest),
        ("null", InvalidRequest),
        ('{"causal": true, "causal": true}', MalformedBody),
        ('{"scale": NaN}', MalformedBody),
        ('{"scale": 1e999}', InvalidRequest),
        ('{"query": [[1, 2], [3]]}', InvalidRequest),
        ('{"select": ' * 2000 + "1" + "}" * 2000, TooLarge),
        ('{"layer": "\ud800"}', MalformedBody),
    ],
    ids=["empty", "broken off", "list", "string", "null", "twice", "NaN", "1e999", "ragged", "deep", "half a pair"],
)
def test_an_invalid_entry_request_is_refused(request_entry: str, kind: type[AttendError]) -> None:
    """By the rules for JSON bodies."""
    with pytest.raises(RequestError) as refusal:
        parse(body({"__metadata__": {"request": request_entry}}))
    assert type(refusal.value) is kind


def test_a_reply_has_tensors_and_metadata() -> None:
    """Outputs by name in the reply's datatype, a selection as two tensors, the other members in the entry `reply`."""
    tensors: dict[str, Any] = {
        "output": np.full((1, 3, 4), 1.25),
        "attention_weights": {"keys": np.array([[2, 0]]), "values": np.array([[0.75, 0.25]])},
        "empty": np.zeros((0, 3)),
    }
    reply = Reply({"name": "größe", "fingerprint": "f" * 64}, 7, "BF16", tensors)
    pieces = encode(reply, ReplyOptions())[1]

    got = read_by_library(joined(pieces))
    _, metadata = read_tensors(joined(pieces))

    assert set(got) == {"output", "attention_weights.keys", "attention_weights.values", "empty"}
    assert json.loads(metadata["reply"]) == {"layer": {"name": "größe", "fingerprint": "f" * 64}, "fully_masked_rows": 7}
    assert set(metadata) == {"reply"}
    assert_equal(got["output"], np.full((1, 3, 4), 1.25, ml_dtypes.bfloat16))
    assert_equal(got["attention_weights.keys"], np.array([[2, 0]], np.int64))
    assert_equal(got["attention_weights.values"], np.array([[0.75, 0.25]], ml_dtypes.bfloat16))
    assert got["empty"].shape == (0, 3)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_a_reply_in_each_datatype(datatype: str) -> None:
    """Numbers are rounded once, to the nearest."""
    numbers = RNG.standard_normal((5, 7))
    pieces = encode(Reply({"name": "x", "fingerprint": "y"}, 0, datatype, {"output": numbers}), ReplyOptions())[1]
    got = read_by_library(joined(pieces))["output"]
    assert datatype_of(got).name == datatype
    assert_equal(got, numbers.astype(DATATYPES[datatype].numpy))


def test_nonfinite_numbers_in_replies() -> None:
    """-inf in scores is allowed; elsewhere NaN and overflow are errors with output and index, unless `nonfinite` allows them."""
    head = {"name": "x", "fingerprint": "y"}
    scores = np.array([[0.5, -np.inf]])
    for name in ("scores", "log_sum_exp"):
        assert_equal(load(joined(encode(Reply(head, 0, "FP64", {name: scores}), ReplyOptions())[1]))[name], scores)
    wrong = {"output": np.array([[1.0, np.nan]]), "scores": np.array([[1.0, np.inf]]), "concatenated": np.array([[1.0, 1e6]])}
    for name, array in wrong.items():
        reply = Reply(head, 0, "FP16", {name: array})
        with pytest.raises(InvalidRequest) as refusal:
            encode(reply, ReplyOptions())[1]
        assert f"{name}[0, 1]" in refusal.value.detail
        with np.errstate(over="ignore"):
            wanted = array.astype(np.float16)
        for way in ("null", "string"):
            assert_equal(load(joined(encode(reply, ReplyOptions(nonfinite=way))[1]))[name], wanted)  # type: ignore[arg-type]
    selected = Reply(head, 0, "FP32", {"attention_weights": {"keys": np.array([0]), "values": np.array([np.nan])}})
    with pytest.raises(InvalidRequest, match=r"attention_weights.values\[0\] = nan"):
        encode(selected, ReplyOptions())


# Fuzz


def assert_refused_or_read(content: bytes) -> None:
    """Asserts that the content is refused with a RequestError, or that its tensors are all of it."""
    try:
        tensors, metadata = read_tensors(content)
    except AttendError as error:
        assert isinstance(error, RequestError)
        assert error.problems
        return
    size = struct.unpack("<Q", content[:8])[0]
    assert 8 + size + sum(array.nbytes for array in tensors.values()) == len(content)
    assert all(type(text) is str for text in metadata.values())


@given(st.binary(max_size=200))
@example(b"\x02\0\0\0\0\0\0\0{}")
def test_random_bytes_are_read_or_refused(content: bytes) -> None:
    """As they are, and after a header length that fits."""
    assert_refused_or_read(content)
    assert_refused_or_read(body(content))


VALID = save(
    {"query": np.ones((2, 3), np.float32), "mask": np.ones((3,), np.bool_), "lens": np.ones((), np.int64)}, {"request": '{"a": 1}'}
)


@given(st.data())
def test_bodies_with_changed_bytes_are_read_or_refused(data: st.DataObject) -> None:
    """Bytes of a valid body changed, removed and added anywhere."""
    content = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        what = data.draw(st.sampled_from(["change", "change", "remove", "insert"]))
        if what == "remove":
            del content[at : at + data.draw(st.integers(1, 9))]
        elif what == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            content[at] = data.draw(st.integers(0, 255))
        if not content:
            break
    assert_refused_or_read(bytes(content))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["F32", "BOOL", "I64", "BF16"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["dtype", "shape", "data_offsets"]), inner, max_size=4)
    ),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BOOL", "U8", "F64", "F8_E5M2"]) | json_values,
        "shape": st.lists(st.integers(0, 3), max_size=5)
        | st.lists(st.sampled_from([0, 1, 2**16, 2**31, 2**32, 2**62, 2**63, 2**64]), max_size=4)
        | json_values,
        "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | st.lists(st.integers(-1, 2**65), max_size=3) | json_values,
    }
)


@given(
    st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries | json_values, max_size=4),
    st.binary(max_size=16),
    st.dictionaries(st.just("request"), st.text(max_size=20) | st.sampled_from(["{}", '{"x": 1}']), max_size=1),
)
def test_random_json_headers_are_read_or_refused(header: dict[str, Any], data: bytes, metadata: dict[str, str]) -> None:
    """Entries of many shapes and sizes around the valid ones, and requests in the metadata."""
    assert_refused_or_read(body(header, data))
    content = body({**header, "__metadata__": metadata}, data)
    assert_refused_or_read(content)
    try:
        parse(content)
    except AttendError as error:
        assert isinstance(error, RequestError)
