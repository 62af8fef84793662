"""Content-Type and Accept: the media types of body and reply (RFC 9110, sections 8.3 and 12.5.1)."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.errors import NotAcceptable, UnsupportedMediaType
from attend.wire.negotiation import CODECS, JSON, SAFETENSORS, SUPPORTED, media_type_of_body, media_type_of_reply

ST = SAFETENSORS


def test_every_supported_type_can_be_requested() -> None:
    assert set(SUPPORTED) == set(CODECS)
    assert SUPPORTED[0] == JSON
    for name in CODECS:
        assert name == media_type_of_body(name) == media_type_of_reply(name)


@pytest.mark.parametrize(
    ("content_type", "media"),
    [
        ("", JSON),
        ("application/json", JSON),
        ("application/json; charset=utf-8", JSON),
        ("Application/JSON", JSON),
        ("  application/json  ;x=y", JSON),
        ("text/json", JSON),
        ("application/problem+json", JSON),
        ("application/vnd.api+json; version=1", JSON),
        ("application/x-www-form-urlencoded", JSON),
        (ST, ST),
        ("Application/Vnd.SafeTensors", ST),
        (f"{ST}; version=1", ST),
        (f" {ST} ", ST),
    ],
)
def test_media_type_of_a_body(content_type: str, media: str) -> None:
    """Without Content-Type, and with curl's default, JSON. Case and parameters do not matter."""
    assert media_type_of_body(content_type) == media


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "application/octet-stream",
        "multipart/form-data; boundary=x",
        "application/xml",
        "safetensors",
        "application/*",
        "*/*",
        "x" * 999,
    ],
)
def test_a_body_of_another_type_is_refused(content_type: str) -> None:
    """With the supported types."""
    with pytest.raises(UnsupportedMediaType, match=f"{JSON} or {ST}"):
        media_type_of_body(content_type)


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        (JSON, JSON),
        (ST, ST),
        (f"{ST}, {JSON}", JSON),
        (f"{JSON}, {ST}", JSON),
        (f"{ST};q=0.5, {JSON};q=0.5", JSON),
        (f"{ST};q=0.5, {JSON};q=0.4", ST),
        (f"{ST};q=0.4, {JSON};q=0.5", JSON),
        (f"{ST}, {JSON};q=0.999", ST),
        (f"{JSON};q=0, {ST};q=0.001", ST),
        (f"{ST}, */*;q=0.1", ST),
        (f"{ST}, application/*;q=0.9", ST),
        (f"{ST};q=0.1, */*", JSON),
        (f"{ST};q=0.1, */*;q=0.1", JSON),
        (f"{JSON};q=0, */*", ST),
        (f"{JSON};q=0.1, application/*;q=0.5", ST),
        (f"*/*;q=1, application/*;q=0.2, {ST};q=0.3", ST),
        (f"{ST};q=0, application/*", JSON),
        ("text/html, application/xhtml+xml, */*;q=0.8", JSON),
        (f"text/html, {ST};q=0.2", ST),
        ("text/*, */*;q=0.01", JSON),
        (f"image/png, {JSON};q=0.001", JSON),
        (f"*/*;q=0, {JSON}", JSON),
        ("Application/JSON", JSON),
        (f"{ST};q=0.9, */*;q=0.9", JSON),
        (f"  {ST} ;  q=1.0  ,{JSON};q=0.5", ST),
        (f"{ST};Q=1, {JSON};Q=0.5", ST),
        ("APPLICATION/VND.SAFETENSORS", ST),
        (f"{JSON};charset=utf-8", JSON),
        (f"{ST};version=1;q=0.9, {JSON};charset=utf-8;q=0.8", ST),
        (f"{ST};q=7, {JSON}", JSON),
        (f"{ST};q=-1, {JSON};q=0.1", JSON),
        (f"{ST};q=nan, {JSON};q=0.1", JSON),
        (f"{ST};q=much, {JSON};q=0.1", JSON),
        (f"{ST};q=, {JSON};q=0.1", JSON),
        (f",, {ST},,", ST),
        (", ,", JSON),
        ("  ", JSON),
    ],
)
def test_media_type_of_a_reply(accept: str, media: str) -> None:
    """The highest quality wins, the most specific range sets it, ties go to JSON; an empty header accepts anything."""
    assert media_type_of_reply(accept) == media


@pytest.mark.parametrize(
    "accept",
    [
        "text/html",
        "text/*",
        "image/png, text/html;q=0.9",
        f"{JSON};q=0",
        f"{JSON};q=0, {ST};q=0.0",
        "*/*;q=0",
        "application/*;q=0.000, */*",
        "json",
        "application/jsonx",
        "*/json",
        "application",
        "x" * 5000,
    ],
)
def test_an_accept_without_a_supported_type_is_refused(accept: str) -> None:
    """NotAcceptable names both types and does not echo a long header."""
    with pytest.raises(NotAcceptable, match=f"{JSON} or {ST}") as refusal:
        media_type_of_reply(accept)
    assert len(refusal.value.detail) < 250


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from([JSON, ST, "*/*", "application/*", ";", "q=", "0.5", ",", " ", "nan", "1e9"])).map("".join)
)
def test_random_headers_are_parsed_or_refused(header: str) -> None:
    for negotiate, refusal in ((media_type_of_body, UnsupportedMediaType), (media_type_of_reply, NotAcceptable)):
        with suppress(refusal):
            assert negotiate(header) in SUPPORTED


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_the_higher_quality_wins(json: int, safetensors: int) -> None:
    """For any two qualities, in either order."""
    ranges = [f"{JSON};q={json / 1000}", f"{ST};q={safetensors / 1000}"]
    for accept in (", ".join(ranges), ", ".join(reversed(ranges))):
        if json == safetensors == 0:
            with pytest.raises(NotAcceptable):
                media_type_of_reply(accept)
        else:
            assert media_type_of_reply(accept) == (ST if safetensors > json else JSON)
