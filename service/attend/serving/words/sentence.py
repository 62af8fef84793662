"""A text as the input of one attention layer, and what gives it: a `TextModel`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from attend.spec import LayerSpec
from attend.tensors import Array


class ModelNotInstalled(Exception):
    """The checkpoint or its tokenizer is not installed; the message names the missing packages."""


SHORTER = "leave some out, or split the text"  # how to go on with one that is too long
LONGER = "a model of your own may take longer texts (attend capture)"


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
    note: str  # where vectors and weights come from
    weights: dict[str, Array] = field(default_factory=dict)
    layer: str = "default"
    origin: str = ""  # of the weights
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of a request, as in the model's own calls of the layer
    heads: tuple[str, ...] = ()  # what each head of the layer has learned, where that is known


@dataclass(frozen=True, slots=True)
class HeadEffects:
    """The most likely next token, its probability, and the change of the logarithm of that without each head, [layers, heads]."""

    answer: str
    probability: float
    change: Array


class TextModel(Protocol):
    """A model whose attention layers are served with the inputs that they get in it."""

    title: str
    options: Mapping[str, Any]  # fields of a request, as in its own calls
    telling_layer: int  # whose heads are the first to look at

    def layers(self) -> list[str]:
        """The names of its attention layers. Raises ModelNotInstalled."""
        ...

    def read(self, text: str, layer: int) -> Sentence:
        """The input of attention layer `layer` (0-based).

        Raises ModelNotInstalled, InvalidText for no words or too many, and ValueError for a layer that the model does not have.
        """
        ...

    def effects(self, text: str) -> HeadEffects | None:
        """What each head does to the model's answer to a text; None for a model that predicts no tokens. Raises InvalidText."""
        ...


def split_words(text: str) -> list[str]:
    """Words and punctuation marks. Raises InvalidText if there are none."""
    words = re.findall(r"\w+|[^\w\s]", text)
    if not words:
        raise InvalidText("a sentence with at least one word")
    return words


def quoted(words: tuple[str, ...]) -> str:
    return ", ".join(f'"{word}"' for word in words)


def require_layer(model: TextModel, layer: int) -> str:
    """The name of a layer. Raises ValueError for one that the model does not have, and ModelNotInstalled."""
    names = model.layers()
    if not 0 <= layer < len(names):
        raise ValueError(f"expected a layer of {model.title}, 0 to {len(names) - 1}, got {layer}")
    return names[layer]
