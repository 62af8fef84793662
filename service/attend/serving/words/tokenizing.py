"""Tokenizes a text by a caller's tokenizer, as a program in a process of its own, which `tokens.py` runs.

The package tokenizers holds the interpreter's lock while it reads a vocabulary, some regular expressions take for ever in it, and its Rust
code may panic or take any memory. The input is {"tokenizer", "text"} in JSON; the output is {"ids", "tokens"}, or {"error"}, or {} without
the package. It imports nothing of the service, so that it starts in a tenth of a second.
"""

import json
import os
import resource
import sys
from typing import Any

MAX_MEMORY_BYTES = 4 << 30  # of addresses
MAX_CPU_SECONDS = 60  # if nobody is left to kill it
NICE = 10  # as the threads of the server for heavy work
REPLACEMENT = "\ufffd"  # what bytes become that are a part of a character


def tokens_of(tokenizer: str, text: str) -> dict[str, Any]:
    """Ids and words of the tokens, with the special tokens of the tokenizer's post-processor, without padding and truncation."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return {}
    try:
        opened = Tokenizer.from_str(tokenizer)
        opened.no_padding()
        opened.no_truncation()
        encoding = opened.encode(text)
        words = [_word(opened, number, token) for number, token in zip(encoding.ids, encoding.tokens, strict=True)]
    except BaseException as error:  # a panic of Rust code is no Exception
        return {"error": str(error)}
    return {"ids": encoding.ids, "tokens": words}


def _word(tokenizer: Any, number: int, token: str) -> str:
    """A token as people read it; as the vocabulary has it, if it is a part of a character or a space."""
    text: str = tokenizer.decode([number], skip_special_tokens=False).strip()
    return text if text and REPLACEMENT not in text else token


if __name__ == "__main__":
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    json.dump(tokens_of(**json.load(sys.stdin.buffer)), sys.stdout)
