"""The checks of the decoders, for the inputs in `corpus.json`; the fuzzer that found them is `run.py`."""

import base64
import json
from pathlib import Path

import pytest

from fuzz import decoders

CORPUS: dict[str, list[str]] = json.loads(Path(__file__).with_name("corpus.json").read_text())


@pytest.mark.parametrize("name", decoders.TARGETS)
def test_every_input_is_refused_or_read_correctly(name: str) -> None:
    """Most inputs are invalid, each in a different way."""
    assert len(CORPUS[name]) >= 3
    for body in CORPUS[name]:
        decoders.TARGETS[name](base64.b64decode(body))


def test_the_checks_find_a_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "parse_strictly", lambda body: {"query": [[1, 3]]})
    with pytest.raises(AssertionError):
        decoders.check_json(b'{"query": [[1, 2]]}')
    body = decoders.SEEDS["v2"][1]
    monkeypatch.setattr(decoders, "parse_strictly", lambda text: json.loads(text.replace(b"2.5", b"2.25")))
    with pytest.raises(AssertionError):
        decoders.check_v2(body)
