"""POST /words/tokens: tokens of a text by the caller's tokenizer."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from attend.errors import CallerGone, DeadlinePassed, Overloaded
from attend.serving.codec_pool import LARGE_BYTES
from attend.serving.requests import Request
from attend.serving.service import open_service
from attend.serving.words import tokens
from attend.settings import Settings
from attend.wire.schemas.words import MAX_TEXT_CHARACTERS
from support.app import application
from support.tokenizers import tokenizer
from support.waiting import PATIENCE

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
    [
        ("import threading; threading.Event().wait()", "at most 0.5 seconds"),
        ("import os; os.abort()", "the text of a tokenizer.json"),
        ("while True: print('[' * 65536)", "a tokenizer whose tokens take at most 70000 bytes"),
    ],
    ids=["endless", "crash", "endless output"],
)
def test_a_tokenizer_cannot_hold_or_end_the_server(monkeypatch: pytest.MonkeyPatch, program: str, expected: str) -> None:
    monkeypatch.setattr(tokens, "COMMAND", [sys.executable, "-c", program])
    monkeypatch.setattr(tokens, "MAX_SECONDS", 0.5 if "0.5" in expected else 60.0)
    monkeypatch.setattr(tokens, "MAX_OUTPUT_BYTES", 70_000)
    error = refusal_of({"tokenizer": "{}", "text": TEXT})
    assert error["at"] == "/tokenizer" and expected in error["expected"]


ENDLESS = "import os, pathlib, sys, threading; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); threading.Event().wait()"


def test_a_process_ends_when_its_caller_leaves_and_holds_no_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of endless tokenizers, a caller may have as many as are free. Meanwhile the threads for bodies answer others."""
    monkeypatch.setattr(tokens, "COMMAND", [sys.executable, "-c", ENDLESS, str(tmp_path)])
    monkeypatch.setattr(tokens, "MAX_SECONDS", 2 * PATIENCE)
    body, left = json.dumps({"tokenizer": "{}", "text": TEXT}).encode(), threading.Event()

    async def test() -> None:
        async with asyncio.timeout(PATIENCE):
            service = open_service("cpu")
            tokenizers = tokens.Tokenizers(service)
            reading = [asyncio.create_task(tokenizers.read(Request(body, gone=left.is_set, caller="one"))) for _ in range(2)]
            while len(list(tmp_path.iterdir())) < 2:
                await asyncio.sleep(0.01)
            with pytest.raises(Overloaded, match="at most 4 tokenizers at once"):
                await tokenizers.read(Request(body, caller="one"))
            others = [service.engine.run(Request(b""), size, lambda: 7) for size in (1, 1, LARGE_BYTES)]
            assert await asyncio.gather(*others) == [7] * 3
            left.set()
            ended = await asyncio.gather(*reading, return_exceptions=True)
            assert [type(error) for error in ended] == [CallerGone] * 2
            assert not any(alive(int(path.name)) for path in tmp_path.iterdir())
            assert not tokenizers.processes.used
            service.close()

    asyncio.run(test())


def test_a_process_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tokens, "COMMAND", [sys.executable, "-c", ENDLESS, str(tmp_path)])
    monkeypatch.setattr(tokens, "MAX_SECONDS", 2 * PATIENCE)
    body = json.dumps({"tokenizer": "{}", "text": TEXT}).encode()

    async def test() -> None:
        async with asyncio.timeout(PATIENCE):
            service, seconds = open_service("cpu"), 0.25
            while not (started := list(tmp_path.iterdir())):  # it may not have started in this time
                with pytest.raises(DeadlinePassed):
                    await tokens.Tokenizers(service).read(Request(body, deadline=service.clock() + seconds))
                seconds *= 2
            assert not any(alive(int(path.name)) for path in started)
            service.close()

    asyncio.run(test())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_is_refused_where_layers_cannot_be_changed() -> None:
    """As PUT /layers is: on an address that other machines can reach, without keys."""

    async def test() -> None:
        async with application(Settings(host="0.0.0.0", access_log=False)) as client:
            reply = await client.post(URL, json={"tokenizer": "{}", "text": TEXT})
            assert reply.status_code == 403 and "layers cannot be changed" in reply.json()["detail"]

    asyncio.run(test())
