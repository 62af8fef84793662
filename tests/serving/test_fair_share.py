"""Shares of a bounded thing, by drawn sequences of takings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.errors import Overloaded
from attend.serving.fair_share import FairShare, Shortage

CALLERS = "abcd"
STEPS = st.lists(st.tuples(st.sampled_from(CALLERS), st.integers(-7, 7)), max_size=60)


@given(STEPS, st.integers(0, 23), st.integers(1, 3), st.integers(0, 2))
def test_no_caller_takes_more_than_its_share(steps: list[tuple[str, int]], capacity: int, times: int, least: int) -> None:
    """Counted beside it. A refusal says how much has to be given back, no more and no less."""
    share, held = FairShare(capacity, times, least), dict.fromkeys(CALLERS, 0)

    def allowed(mine: int, others: int) -> bool:
        free = capacity - mine - others
        return free >= 0 and (mine <= least or mine <= times * free)

    for caller, size in steps:
        if size < 0:
            size = min(-size, held[caller])
            share.give_back(caller, size)
            held[caller] -= size
            continue
        mine, others = held[caller] + size, sum(held.values()) - held[caller]
        lacking = share.shortage(caller, size)
        assert (lacking is None) == allowed(mine, others)
        if lacking is None:
            share.take(caller, size)
            held[caller] = mine
        elif lacking.of_caller:
            assert mine - lacking.missing <= times * (capacity - mine - others + lacking.missing)
            assert mine - lacking.missing + 1 > times * (capacity - mine - others + lacking.missing - 1)
        else:
            assert lacking.missing == mine + others - capacity
        assert share.used == sum(held.values()) <= capacity
        assert [share.taken(name) for name in CALLERS] == list(held.values())
        assert len(share) == sum(map(bool, held.values()))


def test_one_caller_leaves_room_for_another() -> None:
    share = FairShare(9, times=2)
    taken = 0
    while share.shortage("greedy", 1) is None:
        share.take("greedy", 1)
        taken += 1
    assert taken == 6
    assert share.shortage("greedy", 1) == Shortage(1, of_caller=True)
    assert share.shortage("modest", 2) is None
    assert share.shortage("modest", 4) == Shortage(1, of_caller=False)


def test_one_caller_has_at_most_half_of_the_slots() -> None:
    """And each caller at least one, while there is any."""
    share = FairShare(4, times=1, least=1)
    with share.slot("a", "calls"), share.slot("a", "calls"):
        with (
            pytest.raises(Overloaded, match=r"at most 4 calls at once, .* of one caller"),
            share.slot("a", "calls"),
        ):
            raise AssertionError("one too many")
        with share.slot("b", "calls"), share.slot("c", "calls"), pytest.raises(Overloaded), share.slot("d", "calls"):
            raise AssertionError("one too many")
    with share.slot("a", "calls"), share.slot("a", "calls"):
        pass


def test_a_slot_is_given_back_also_after_an_error() -> None:
    """One caller at a time has the only slot there is."""
    share = FairShare(1, times=1, least=1)
    with pytest.raises(KeyError), share.slot("one", "calls"):
        with pytest.raises(Overloaded, match=r"at most 1 calls at once"), share.slot("two", "calls"):
            pass
        raise KeyError
    with share.slot("two", "calls"):
        assert share.taken("two") == share.used == 1
    assert len(share) == share.used == 0
