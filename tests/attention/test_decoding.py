"""Steps with a KV cache against the float64 reference, and against one causal call."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoding import random_sequence, random_step

from service.attention import cache
from service.errors import SessionConflict

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    """Pages of 2, 2, 4, 8, … rows, so that short sequences have several."""
    before, cache.FIRST_ROWS = cache.FIRST_ROWS, 2
    yield
    cache.FIRST_ROWS = before


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@given(seed=SEEDS)
def test_all_outputs_of_random_steps_agree_with_the_reference(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequence = random_sequence(rng, dtype=dtype)
    for _ in range(6):
        grid = sequence.spec.grid_bias
        if grid is not None and sequence.length >= grid.num_tokens:
            break
        try:
            sequence.step(random_step(sequence, rng))
        except SessionConflict as conflict:
            assert sequence.cache.first > 0, conflict
