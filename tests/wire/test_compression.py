"""gzip and deflate: bodies are decompressed within a limit, and replies are compressed if the client asks for it."""

import gzip
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.errors import AttendError, MalformedBody, RequestError, TooLarge, UnsupportedMediaType
from attend.wire import compression
from attend.wire.compression import coding_of_reply, pack, unpack

TEXT = b'{"query": [[0.25, -1.5, 3.0]]}' * 20
LIMIT = 10_000
PACKED: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


# In


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("level", [0, 1, 6, 9])
def test_a_body_is_decompressed(coding: str, level: int) -> None:
    """For every compression level, including stored."""
    packed = gzip.compress(TEXT, level) if coding == "gzip" else zlib.compress(TEXT, level)
    assert unpack(packed, coding, LIMIT) == TEXT


@pytest.mark.parametrize("level", [0, 1, 6, 9])
@pytest.mark.parametrize("strategy", [zlib.Z_DEFAULT_STRATEGY, zlib.Z_FIXED])
@pytest.mark.parametrize("body", [b"", b"a", TEXT, bytes(9_973)], ids=["nothing", "one byte", "text", "zeros"])
def test_deflate_without_the_header_of_zlib_is_decompressed(level: int, strategy: int, body: bytes) -> None:
    """RFC 9110 (8.4.1.2) notes that some send it so."""
    compressor = zlib.compressobj(level, wbits=-zlib.MAX_WBITS, strategy=strategy)
    packed = compressor.compress(body) + compressor.flush()
    assert unpack(packed, "deflate", LIMIT) == body
    with pytest.raises(MalformedBody, match="deflate to its end"):
        unpack(packed[:-1], "deflate", LIMIT)


@pytest.mark.parametrize("coding", ["gzip", "GZIP", " gzip ", "x-gzip", "X-GZip"])
def test_names_of_gzip(coding: str) -> None:
    """Codings are case-insensitive (RFC 9110, 8.4.1), and x-gzip is gzip."""
    assert unpack(gzip.compress(TEXT), coding, LIMIT) == TEXT


@pytest.mark.parametrize("coding", ["", "identity", " Identity "])
def test_without_a_coding_the_body_is_returned_unchanged(coding: str) -> None:
    """Without a copy and whatever the limit, which applies before bodies are read."""
    assert unpack(TEXT, coding, 1) is TEXT


@pytest.mark.parametrize("coding", PACKED)
def test_an_empty_body(coding: str) -> None:
    assert unpack(PACKED[coding](b""), coding, LIMIT) == b""
    assert unpack(PACKED[coding](b""), coding, 0) == b""


def test_gzip_bodies_may_have_several_members() -> None:
    """RFC 1952, 2.2; also empty ones."""
    parts = [TEXT[:7], b"", TEXT[7:100], TEXT[100:], b""]
    assert unpack(b"".join(map(gzip.compress, parts)), "gzip", LIMIT) == TEXT


@pytest.mark.parametrize("coding", PACKED)
def test_the_number_of_members_is_limited(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs the memory of a stream, however small it is."""
    monkeypatch.setattr(compression, "MAX_MEMBERS", 3)
    assert unpack(PACKED[coding](b"a") * 3, coding, LIMIT) == b"aaa"
    with pytest.raises(TooLarge, match="at most 3 members"):
        unpack(PACKED[coding](b"") * 4, coding, LIMIT)


def test_optional_fields_of_a_gzip_header_are_skipped() -> None:
    """File name, time, comment and extra fields."""
    plain = gzip.compress(TEXT)
    header = plain[:3] + bytes([0b11110]) + plain[4:10] + b"\x04\x00abcd" + b"name\0" + b"comment\0"
    header += (zlib.crc32(header) & 0xFFFF).to_bytes(2, "little")
    assert unpack(header + plain[10:], "gzip", LIMIT) == TEXT


@pytest.mark.parametrize("coding", PACKED)
def test_every_prefix_is_refused(coding: str) -> None:
    """The checksum is at the end."""
    packed = PACKED[coding](TEXT)
    for length in range(1, len(packed)):
        with pytest.raises(MalformedBody):
            unpack(packed[:length], coding, LIMIT)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 12, 20, -8, -5, -4, -1])
def test_a_changed_byte_is_refused(at: int) -> None:
    """In the header, the data, the checksum or the length of a gzip body."""
    packed = bytearray(gzip.compress(TEXT))
    packed[at] ^= 0xFF
    with pytest.raises(MalformedBody):
        unpack(bytes(packed), "gzip", LIMIT)


@pytest.mark.parametrize(
    ("body", "coding"),
    [
        pytest.param(TEXT, "gzip", id="JSON as gzip"),
        pytest.param(TEXT, "deflate", id="JSON as deflate"),
        pytest.param(zlib.compress(TEXT), "gzip", id="deflate as gzip"),
        pytest.param(gzip.compress(TEXT), "deflate", id="gzip as deflate"),
        pytest.param(gzip.compress(TEXT) + b"more", "gzip", id="more behind it"),
        pytest.param(gzip.compress(TEXT) + gzip.compress(TEXT)[:-1], "gzip", id="a second member that breaks off"),
        pytest.param(b"\0", "gzip", id="one byte"),
    ],
)
def test_bytes_in_another_format_are_refused(body: bytes, coding: str) -> None:
    """The message names the coding."""
    with pytest.raises(MalformedBody, match=coding):
        unpack(body, coding, LIMIT)


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, deflate", "gzip,gzip", "*", "gzip;q=1", "x" * 1000])
def test_an_unknown_coding_is_refused(coding: str) -> None:
    """UnsupportedMediaType names the two supported codings and does not echo a long header."""
    with pytest.raises(UnsupportedMediaType, match="gzip or deflate") as refusal:
        unpack(TEXT, coding, LIMIT)
    assert len(refusal.value.detail) < 150


@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate"]), st.integers(0, 300))
def test_random_bytes_are_decompressed_or_refused(body: bytes, coding: str, limit: int) -> None:
    """As they are, and after a valid beginning."""
    for packed in (body, PACKED[coding](body), PACKED[coding](b"x") + body, PACKED[coding](body * 3)[: len(body)]):
        try:
            assert len(unpack(packed, coding, limit)) <= limit or not packed
        except AttendError as error:
            assert isinstance(error, RequestError)


# The bound


@pytest.mark.parametrize("coding", PACKED)
def test_the_size_limit_is_exact(coding: str) -> None:
    """Also if the byte beyond it is in its own member."""
    packed = PACKED[coding](TEXT)
    assert unpack(packed, coding, len(TEXT)) == TEXT
    with pytest.raises(TooLarge, match=str(len(TEXT) - 1)):
        unpack(packed, coding, len(TEXT) - 1)
    with pytest.raises(TooLarge):
        unpack(gzip.compress(TEXT) + gzip.compress(b"x"), "gzip", len(TEXT))


class Spy:
    """A decompressor that records the number of bytes in and out."""

    out, fed = 0, 0
    real: Callable[..., Any] = zlib.decompressobj

    def __init__(self, *args: Any) -> None:
        self.stream = Spy.real(*args)

    def decompress(self, data: bytes, *args: int) -> bytes:
        piece: bytes = self.stream.decompress(data, *args)
        Spy.out += len(piece)
        Spy.fed += len(data)
        return piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> type[Spy]:
    Spy.out = Spy.fed = 0
    monkeypatch.setattr(compression.zlib, "decompressobj", Spy)
    return Spy


@pytest.mark.parametrize("members", [1, 50])
@pytest.mark.parametrize("coding", PACKED)
def test_a_decompression_bomb_is_stopped_at_the_limit(coding: str, members: int, spy: type[Spy]) -> None:
    """A hundred kilobytes that decompress to a hundred megabytes, in one or many members."""
    bomb = PACKED[coding](bytes(100_000_000 // members)) * members
    assert len(bomb) < 200_000
    with pytest.raises(TooLarge):
        unpack(bomb, coding, LIMIT)
    assert spy.out <= 2 * LIMIT


def test_the_counter_of_decompressed_bytes_works(spy: type[Spy]) -> None:
    """The test above depends on it."""
    assert unpack(gzip.compress(TEXT), "gzip", LIMIT) == TEXT
    assert spy.out == len(TEXT)
    assert spy.fed >= len(gzip.compress(TEXT))


@pytest.mark.parametrize(("size", "members"), [(200, 2000), (5000, 200)])
def test_many_members_take_linear_time(spy: type[Spy], size: int, members: int) -> None:
    """Twice the members are twice the work."""
    member = gzip.compress(np.random.default_rng(0).bytes(size))
    work = []
    for count in (members, 2 * members):
        spy.fed = 0
        with suppress(AttendError):  # so many members may as well be refused
            unpack(member * count, "gzip", 10**9)
        work.append(spy.fed)
    assert work[1] <= 2.5 * work[0], f"{work[0]:,} bytes were read for {members * len(member):,}, and {work[1]:,} for twice as many"


# Out


@pytest.mark.parametrize("coding", PACKED)
@pytest.mark.parametrize("pieces", [[TEXT], [TEXT[:5], b"", TEXT[5:]], [memoryview(TEXT), np.arange(9.0).data.cast("B")], [b""], []])
def test_a_reply_is_compressed_as_one_stream(coding: str, pieces: list[Any]) -> None:
    """The standard libraries decompress it."""
    packed = b"".join(bytes(piece) for piece in pack(pieces, coding))
    unpacked = gzip.decompress(packed) if coding == "gzip" else zlib.decompress(packed)
    assert unpacked == b"".join(bytes(piece) for piece in pieces)
    assert unpack(packed, coding, 10**6) == unpacked


def test_compression_reduces_the_size() -> None:
    assert sum(map(len, pack([TEXT], "gzip"))) < len(TEXT) / 2


@pytest.mark.parametrize(
    ("accept", "by_default", "always"),
    [
        ("", "", ""),
        ("gzip", "gzip", "gzip"),
        ("deflate", "deflate", "deflate"),
        ("GZIP", "gzip", "gzip"),
        (" gzip ", "gzip", "gzip"),
        ("gzip;q=1.0", "gzip", "gzip"),
        ("gzip ; q=0.5", "gzip", "gzip"),
        ("identity", "", ""),
        ("*", "", ""),
        ("br", "", ""),
        ("br, zstd", "", ""),
        ("gzip, deflate", "", "gzip"),
        ("deflate, gzip", "", "deflate"),
        ("gzip, deflate, br, zstd", "", "gzip"),
        ("br, gzip", "", "gzip"),
        ("gzip, identity", "", "gzip"),
        ("gzip, *", "", "gzip"),
        ("gzip, *;q=0", "gzip", "gzip"),
        ("gzip, identity;q=0", "gzip", "gzip"),
        ("gzip;q=0", "", ""),
        ("gzip;q=0.000", "", ""),
        ("gzip; Q=0", "", ""),
        ("gzip;q=0, deflate", "deflate", "deflate"),
        ("deflate;q=0, gzip;q=0", "", ""),
        ("gzip;q=0.2, deflate;q=0.8", "", "deflate"),
        ("gzip;q=0.8, deflate;q=0.2", "", "gzip"),
        (",gzip,,", "gzip", "gzip"),
        ("gzipped", "", ""),
        ("not-gzip", "", ""),
    ],
)
def test_the_coding_of_a_reply(accept: str, by_default: str, always: str) -> None:
    """By default only if the client names one coding alone; with `always`, the accepted one of highest quality."""
    assert (coding_of_reply(accept, False), coding_of_reply(accept, True)) == (by_default, always)
