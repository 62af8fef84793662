"""Values that operators declare."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.attention.operators.declarations import Interval

BOUNDS = st.none() | st.integers(0, 11)
INTERVALS = st.builds(Interval, BOUNDS, BOUNDS, st.none() | st.just(5))


def holds(interval: Interval, query: int, key: int) -> bool:
    """Whether the key at this position is in the query's interval."""
    near = (interval.left is None or query - key <= interval.left) and (interval.right is None or key - query <= interval.right)
    return near and (interval.chunk is None or query // interval.chunk == key // interval.chunk)


@given(one=INTERVALS, other=INTERVALS)
def test_an_intersection_has_the_keys_of_both(one: Interval, other: Interval) -> None:
    for query, key in ((query, key) for query in (0, 4, 13) for key in range(29)):
        assert holds(one & other, query, key) == (holds(one, query, key) and holds(other, query, key))


def test_chunks_of_two_sizes_have_no_intersection_of_this_kind() -> None:
    with pytest.raises(ValueError, match="chunks of one size, got 5 and 7"):
        Interval(chunk=5) & Interval(chunk=7)
