"""Vectors drawn from hashes of the words: the same on any machine, for any layer, and without meaning."""

import hashlib

import numpy as np

from attend.serving.words.sentence import SHORTER, InvalidText, Sentence, split_words
from attend.spec import LayerSpec
from attend.tensors import Array

MAX_WORDS = 2048
NOTE = "This pattern means nothing: each word's vector is drawn from a hash of the word, which no layer was trained on."


def hash_words(sentence: str, spec: LayerSpec, width: int | None = None, largest: int | None = None) -> Sentence:
    """Words and punctuation marks with vectors of `width` numbers, by default the layer's query_dim.

    Raises InvalidText for no words, more than MAX_WORDS, or vectors of more than `largest` numbers in all.
    """
    width = width or spec.query_dim
    words = split_words(sentence)
    if len(words) > MAX_WORDS:
        raise InvalidText(f"at most {MAX_WORDS} words, so {SHORTER}", str(len(words)))
    if largest is not None and len(words) * width > largest:
        raise InvalidText(f"at most {largest // width} words for vectors of {width} numbers", str(len(words)))
    return Sentence(words, np.stack([hash_vector(word, width) for word in words]), spec, NOTE)


def hash_vector(word: str, width: int) -> Array:
    """Standard normal numbers from `RandomState(hash_of(word))`."""
    return np.random.RandomState(hash_of(word)).standard_normal(width).astype(np.float32)


def hash_of(word: str) -> int:
    """The first four bytes, little-endian, of SHA-256 of the lower-case word."""
    return int.from_bytes(hashlib.sha256(word.lower().encode()).digest()[:4], "little")
