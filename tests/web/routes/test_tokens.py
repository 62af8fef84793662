"""POST /words/tokens: tokens of a text by the caller's tokenizer."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from attend.serving.words import tokens
from attend.settings import Settings
from attend.wire.schemas.words import MAX_TEXT_CHARACTERS
from support.app import application
from support.tokenizers import tokenizer

URL = "/words/tokens"
TEXT = "Anna saw the ☂, again"  # with a sign that no tokenizer knows


def refusal_of(body: dict[str, str]) -> dict[str, str]:
    """The refusal of a server in this process."""

    async def test() -> dict[str, str]:
        async with application(Settings(access_log=False)) as client:
            return refusal(await client.post(URL, json=body))

    return asyncio.run(test())


def refusal(reply: httpx.Response) -> dict[str, str]:
    assert reply.status_code == 422, reply.text
    (error,) = reply.json()["errors"]
    return dict(error)


@pytest.mark.slow  # the extra `test` does not install tokenizers
@pytest.mark.parametrize("kind", ["pieces of words", "bytes", "spaces"])
def test_tokens_are_those_of_the_package(http: httpx.Client, kind: str) -> None:
    """Also without the tokenizer's padding and truncation."""
    made = tokenizer(kind)
    plain = made.encode(TEXT)
    made.enable_truncation(5)
    made.enable_padding(length=97)

    reply = http.post(URL, json={"tokenizer": made.to_str(), "text": TEXT})

    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert found["ids"] == plain.ids and (found["ids"][0], found["ids"][-1]) == (1, 2)
    decoded = [made.decode([number], skip_special_tokens=False).strip() for number in plain.ids]
    parts = [not word or "\ufffd" in word for word in decoded]
    assert found["tokens"] == [token if part else word for token, word, part in zip(plain.tokens, decoded, parts, strict=True)]
    assert any(parts) == (kind != "pieces of words")  # a byte of the sign, or a space
    empty = http.post(URL, json={"tokenizer": made.to_str(), "text": ""}).json()
    assert empty == {"ids": [1, 2], "tokens": ["[CLS]", "[SEP]"]}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "7", '{"model": {"type": "WordLevel"}}'])
def test_what_is_no_tokenizer_is_refused(http: httpx.Client, text: str) -> None:
    error = refusal(http.post(URL, json={"tokenizer": text, "text": TEXT}))
    assert (error["at"], error["expected"]) == ("/tokenizer", "the text of a tokenizer.json")


@pytest.mark.slow
def test_a_tokenizer_at_which_the_package_panics_is_refused(http: httpx.Client) -> None:
    """Its post-processor names a special token that it does not have."""
    made = json.loads(tokenizer("bytes").to_str())
    made["post_processor"]["special_tokens"] = {}
    error = refusal(http.post(URL, json={"tokenizer": json.dumps(made), "text": TEXT}))
    assert (error["at"], error["expected"]) == ("/tokenizer", "the text of a tokenizer.json")
    assert http.get("/health/live").status_code == 200


@pytest.mark.slow
def test_a_tokenizer_without_its_own_unknown_token_is_refused(http: httpx.Client) -> None:
    """Which the package says only for a text."""
    model = {"type": "WordLevel", "vocab": {"cat": 0}, "unk_token": "[UNK]"}
    error = refusal(http.post(URL, json={"tokenizer": json.dumps({"model": model}), "text": "dog"}))
    assert error["at"] == "/tokenizer" and "Missing [UNK] token" in error["got"]


@pytest.mark.parametrize(
    ("body", "at", "expected"),
    [
        ({"text": TEXT}, "/tokenizer", "this required field"),
        ({"tokenizer": "{}"}, "/text", "this required field"),
        ({"tokenizer": {}, "text": TEXT}, "/tokenizer", "a string"),
        ({"tokenizer": "{}", "text": "a" * (MAX_TEXT_CHARACTERS + 1)}, "/text", f"at most {MAX_TEXT_CHARACTERS} characters"),
    ],
)
def test_other_bodies_are_refused(http: httpx.Client, body: dict[str, Any], at: str, expected: str) -> None:
    error = refusal(http.post(URL, json=body))
    assert error["at"] == at and expected in error["expected"]


def test_a_body_has_at_most_64_mebibytes() -> None:
    async def test() -> None:
        async with application(Settings(access_log=False)) as client:
            headers = {"Content-Type": "application/json", "Content-Length": str((64 << 20) + 1)}
            reply = await client.post(URL, headers=headers, content=b"")
            assert reply.status_code == 413 and f"at most {64 << 20} bytes" in reply.text

    asyncio.run(test())


@pytest.mark.slow
def test_a_vocabulary_may_have_many_tokens(start_here: Callable[..., str]) -> None:
    """More bytes of text than other bodies may have."""
    vocabulary = {f"word number {i}": i for i in range(200_003)}
    made = json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "word number 0"}})
    assert len(made) > 4 << 20
    reply = httpx.post(f"{start_here()}{URL}", json={"tokenizer": made, "text": "word number 7"}, timeout=60)
    assert reply.status_code == 200 and reply.json() == {"ids": [7], "tokens": ["word number 7"]}


def test_without_the_package_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    executable, *options = tokens.COMMAND
    monkeypatch.setattr(tokens, "COMMAND", [executable, "-S", *options])  # -S: no installed packages
    error = refusal_of({"tokenizer": "{}", "text": TEXT})
    assert error["at"] == "/tokenizer" and error["expected"].endswith("pip install tokenizers")


@pytest.mark.parametrize(
    ("program", "expected"),
    [("import threading; threading.Event().wait()", "at most 0.5 seconds"), ("import os; os.abort()", "the text of a tokenizer.json")],
    ids=["endless", "crash"],
)
def test_a_tokenizer_cannot_hold_or_end_the_server(monkeypatch: pytest.MonkeyPatch, program: str, expected: str) -> None:
    monkeypatch.setattr(tokens, "COMMAND", [sys.executable, "-c", program])
    monkeypatch.setattr(tokens, "MAX_SECONDS", 0.5)
    error = refusal_of({"tokenizer": "{}", "text": TEXT})
    assert error["at"] == "/tokenizer" and expected in error["expected"]


def test_it_is_refused_where_layers_cannot_be_changed() -> None:
    """As PUT /layers is: on an address that other machines can reach, without keys."""

    async def test() -> None:
        async with application(Settings(host="0.0.0.0", access_log=False)) as client:
            reply = await client.post(URL, json={"tokenizer": "{}", "text": TEXT})
            assert reply.status_code == 403 and "layers cannot be changed" in reply.json()["detail"]

    asyncio.run(test())
