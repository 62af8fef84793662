"""POST /words/tokens: the tokens of a text, by a tokenizer that the caller sends as the text of a tokenizer.json.

Needs the package tokenizers, which another process uses (`tokenizing.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from attend.errors import InvalidRequest
from attend.serving.layer_requests import read_object
from attend.serving.requests import RawRequest
from attend.serving.service import Service
from attend.wire.problems import describe_value, validate
from attend.wire.schemas.words import TokenizedText, TokensRequest

MAX_BODY_BYTES = 64 << 20  # the largest vocabularies have 260,000 tokens and take half of it
MAX_SECONDS = 20.0  # the largest vocabularies take a few
COMMAND = [sys.executable, "-I", str(Path(__file__).with_name("tokenizing.py"))]
ENVIRONMENT = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}


async def read_tokens(service: Service, raw: RawRequest) -> str:
    """POST /words/tokens: the reply as JSON. Raises InvalidRequest, also if the package is not installed."""
    size = raw.size  # decoding takes the body out of `raw`
    document = await read_object(service, raw, MAX_BODY_BYTES)  # other bodies have at most 4 MiB besides numbers
    return await service.engine.run(raw, size, _reply_text, document)


def _reply_text(document: dict[str, Any]) -> str:
    request = validate(TokensRequest, document)
    message, found = json.dumps({"tokenizer": request.tokenizer, "text": request.text}).encode(), {}
    try:
        done = subprocess.run(COMMAND, input=message, capture_output=True, timeout=MAX_SECONDS, env=ENVIRONMENT, check=True)
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        expected = f"a tokenizer that takes at most {MAX_SECONDS:g} seconds for the text"
        raise InvalidRequest.where("/tokenizer", expected, "one that takes longer") from None
    except subprocess.CalledProcessError as failure:  # it was ended by a signal, or had no memory
        found = {"error": f"status {failure.returncode}"}
    if "error" in found:
        raise InvalidRequest.where("/tokenizer", "the text of a tokenizer.json", describe_value(found["error"]))
    if not found:
        raise InvalidRequest.where("/tokenizer", "a server with the package tokenizers: pip install tokenizers", "one without it")
    return TokenizedText(**found).model_dump_json()
