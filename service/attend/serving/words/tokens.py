"""POST /words/tokens: the tokens of a text, by a tokenizer that the caller sends as the text of a tokenizer.json.

Needs the package tokenizers, which is written in Rust.
"""

from importlib import import_module
from typing import Any

from attend.errors import InvalidRequest
from attend.serving.layer_requests import read_object
from attend.serving.requests import RawRequest
from attend.serving.service import Service
from attend.serving.words.sentence import ModelNotInstalled
from attend.wire.problems import describe_value, validate
from attend.wire.schemas.words import Tokens, TokensRequest

MAX_BODY_BYTES = 64 << 20  # the largest vocabularies have 260,000 tokens and take half of it
MISSING = "its tokenizer needs the package tokenizers: pip install tokenizers"
REPLACEMENT = "\ufffd"  # what bytes become that are a part of a character


async def read_tokens(service: Service, raw: RawRequest) -> str:
    """POST /words/tokens: the reply as JSON. Raises InvalidRequest, also if the package is not installed."""
    size = raw.size  # decoding takes the body out of `raw`
    document = await read_object(service, raw, MAX_BODY_BYTES)  # other bodies have at most 4 MiB besides numbers
    return await service.engine.run(raw, size, _reply_text, document)


def open_tokenizer(text: str) -> Any:
    """The tokenizer of a tokenizer.json, without padding and truncation. Raises ModelNotInstalled, and what the package raises."""
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_str(text)
    except ModuleNotFoundError:
        raise ModelNotInstalled(MISSING) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _reply_text(document: dict[str, Any]) -> str:
    request = validate(TokensRequest, document)
    try:
        tokens = tokens_of(request.tokenizer, request.text)
    except ModelNotInstalled:
        raise InvalidRequest.where("/tokenizer", "a server with the package tokenizers: pip install tokenizers", "one without it") from None
    except BaseException as error:
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or _is_panic(error)):
            raise
        raise InvalidRequest.where("/tokenizer", "the text of a tokenizer.json", describe_value(str(error))) from None
    return tokens.model_dump_json()


def tokens_of(tokenizer: str, text: str) -> Tokens:
    """Ids and words of the tokens, with the special tokens of the tokenizer's post-processor. Raises as `open_tokenizer`."""
    opened = open_tokenizer(tokenizer)
    encoding = opened.encode(text)
    words = [_word(opened, number, token) for number, token in zip(encoding.ids, encoding.tokens, strict=True)]
    return Tokens(ids=encoding.ids, tokens=words)


def _word(tokenizer: Any, number: int, token: str) -> str:
    """A token as people read it; as the vocabulary has it, if it is a part of a character or a space."""
    text: str = tokenizer.decode([number], skip_special_tokens=False).strip()
    return text if text and REPLACEMENT not in text else token


def _is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked. The class cannot be imported: each package in Rust has its own of this name."""
    return (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")
