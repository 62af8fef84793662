"""The inputs that a fuzzer found to lead through the decoders, each held to what must hold; the fuzzer itself is `run.py`."""

import base64
import json
from pathlib import Path

import pytest
from fuzz import decoders

CORPUS: dict[str, list[str]] = json.loads(Path(__file__).with_name("corpus.json").read_text())


@pytest.mark.parametrize("name", decoders.TARGETS)
def test_a_corpus_is_refused_or_read_rightly(name: str) -> None:
    """Most of them are broken, each in a way of its own."""
    assert len(CORPUS[name]) >= 3
    for body in CORPUS[name]:
        decoders.TARGETS[name](base64.b64decode(body))


def test_a_wrong_number_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle can fail."""
    monkeypatch.setattr(decoders, "parse_strictly", lambda body: {"query": [[1, 3]]})
    with pytest.raises(AssertionError):
        decoders.hold_json(b'{"query": [[1, 2]]}')
    body = decoders.SEEDS["v2"][1]
    monkeypatch.setattr(decoders, "parse_strictly", lambda text: json.loads(text.replace(b"2.5", b"2.25")))
    with pytest.raises(AssertionError):
        decoders.hold_v2(body)
