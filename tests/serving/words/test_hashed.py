"""Words and vectors drawn from their hashes."""

import hashlib

import numpy as np
import pytest

from attend.serving.words.hashed import hash_vector, hash_words
from attend.spec import LayerSpec

SPEC = LayerSpec(d_model=8, num_heads=2)


def test_a_hashed_vector_depends_only_on_the_word():
    """By the documented algorithm, which other languages can implement."""
    seed = int.from_bytes(hashlib.sha256(b"cat").digest()[:4], "little")
    expected = np.random.RandomState(seed).standard_normal(8).astype(np.float32)
    np.testing.assert_array_equal(hash_vector("Cat", 8), expected)
    assert hash_vector("cat", 8)[0] == np.float32(expected[0]) != hash_vector("mat", 8)[0]


def test_words_and_punctuation_marks_are_tokens():
    read = hash_words("Don't stop, Zoë!", SPEC)
    assert read.tokens == ["Don", "'", "t", "stop", ",", "Zoë", "!"]
    assert read.vectors.shape == (7, 8) and read.vectors.dtype == np.float32 and not read.weights
    with pytest.raises(ValueError, match="at least one word"):
        hash_words(" \n", SPEC)
