"""The small model that comes with attend: a decoder of two layers whose heads can be told, trained by docs/train_small_model.py.

It has no feed-forward parts: x = E[token], then twice x + attention(norm(x)), causal, with RoPE; the next token's logits are U norm(x).
A word that it does not know gets one of its stand-ins, which it has seen in place of any word, so that it sees the word's repetition.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from attend.attention.reference.forward import attend
from attend.serving.words.hashed import hash_of
from attend.serving.words.sentence import LONGER, SHORTER, HeadEffects, InvalidText, Sentence, quoted, require_layer, split_words
from attend.spec import LayerSpec
from attend.spec_parts import PROJECTIONS
from attend.tensors import Array

FILE = Path(__file__).with_name("small.safetensors")
START = "<s>"
EPSILON = 1e-5  # of the norms
STAND_IN = "a stand-in for a word that it does not know"  # as an answer
MAX_WORDS = 63  # as in training, with the start
ORIGIN = "attention layer {} of the small model of attend"
NOTE = (
    "The weights are those of attention layer {} (0 or 1) of the small model that comes with attend, and the vectors are its input in that "
    "model. It was trained on repeated words and simple sentences."
)
UNKNOWN = "It does not know {}: a stand-in, the same each time, takes the place of such a word."


class Trained(NamedTuple):
    """The file's tensors, the words that the model knows, and what the heads of each layer have learned."""

    tensors: dict[str, Array]
    tokens: dict[str, int]
    heads: list[list[str]]

    @property
    def spec(self) -> LayerSpec:
        inner, d_model = self.tensors["layers.0.query.weight"].shape
        heads = len(self.heads[0])
        widths = {"d_model": d_model, "num_heads": heads, "head_dim": inner // heads}
        return LayerSpec.model_validate({**widths, "rope": {"theta": 10000.0}, "init": None})


class SmallModel:
    title = "the small model of attend"
    options: Mapping[str, Any] = MappingProxyType({"causal": True})
    telling_layer = 1  # of the induction head

    def layers(self) -> list[str]:
        return [f"small-layer-{i}" for i in range(len(_trained().heads))]

    def read(self, text: str, layer: int) -> Sentence:
        name = require_layer(self, layer)
        trained, words = _trained(), _words_in(text)
        unknown = tuple(dict.fromkeys(word for word in words if word.lower() not in trained.tokens))
        note = " ".join([NOTE.format(layer), *([UNKNOWN.format(quoted(unknown))] if unknown else [])])
        vectors = _norm(trained, _inputs(trained, _tokens(trained, words), layer), f"layers.{layer}.norm").astype(np.float32)
        weights = _attention_weights(trained, layer)
        heads = tuple(trained.heads[layer])
        return Sentence([START, *words], vectors, trained.spec, note, weights, name, ORIGIN.format(layer), self.options, heads)

    def effects(self, text: str) -> HeadEffects:
        trained = _trained()
        tokens = _tokens(trained, _words_in(text))
        inputs = [_inputs(trained, tokens, layer) for layer in range(len(trained.heads))]
        plain = _log_probabilities(trained, _inputs(trained, tokens, len(inputs)))
        answer = int(plain.argmax())

        def without(layer: int, head: int) -> float:
            scale = [float(other != head) for other in range(len(trained.heads[layer]))]
            x = inputs[layer] + _attention(trained, inputs[layer], layer, scale)
            for later in range(layer + 1, len(inputs)):
                x = x + _attention(trained, x, later)
            return float(_log_probabilities(trained, x)[answer] - plain[answer])

        change = np.array([[without(layer, head) for head in range(len(names))] for layer, names in enumerate(trained.heads)])
        known = list(trained.tokens)
        return HeadEffects(known[answer] if answer < len(known) else STAND_IN, float(np.exp(plain[answer])), change)


@cache
def _trained() -> Trained:
    with safe_open(str(FILE), framework="numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dictionary
    return Trained(tensors, {word: i for i, word in enumerate(json.loads(metadata["words"]))}, json.loads(metadata["heads"]))


def _words_in(text: str) -> list[str]:
    """Raises InvalidText for no words or too many."""
    words = split_words(text)
    if len(words) > MAX_WORDS:
        raise InvalidText(f"at most {MAX_WORDS} words, so {SHORTER}; {LONGER}", str(len(words)))
    return words


def _tokens(trained: Trained, words: list[str]) -> list[int]:
    return [_token(trained, word) for word in (START, *words)]


def _token(trained: Trained, word: str) -> int:
    known = len(trained.tokens)
    stand_ins = len(trained.tensors["tokens.weight"]) - known
    return trained.tokens.get(word.lower(), known + hash_of(word) % stand_ins)


def _inputs(trained: Trained, tokens: list[int], layer: int) -> Array:
    """The rows [n, d_model] before the norm of layer `layer`, in float64; after the last layer, those before the last norm."""
    x = trained.tensors["tokens.weight"][tokens].astype(np.float64)
    for i in range(layer):
        x = x + _attention(trained, x, i)
    return x


def _attention(trained: Trained, x: Array, layer: int, head_scale: list[float] | None = None) -> Array:
    """The output of an attention layer, with factors on its heads."""
    query = _norm(trained, x, f"layers.{layer}.norm")
    output = attend(trained.spec, _attention_weights(trained, layer), query=query, causal=True, head_scale=head_scale).output
    return np.asarray(output)


def _log_probabilities(trained: Trained, x: Array) -> Array:
    """Of each token after the last row of [n, d_model]."""
    logits = _norm(trained, x[-1:], "norm")[0] @ trained.tensors["unembed.weight"].T.astype(np.float64)
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _attention_weights(trained: Trained, layer: int) -> dict[str, Array]:
    """By canonical name."""
    names = [f"{part}.{kind}" for part in PROJECTIONS for kind in ("weight", "bias")]
    return {name: trained.tensors[f"layers.{layer}.{name}"] for name in names}


def _norm(trained: Trained, x: Array, name: str) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + EPSILON)
    scaled: Array = normal * trained.tensors[f"{name}.weight"] + trained.tensors[f"{name}.bias"]
    return scaled
