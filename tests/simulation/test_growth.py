"""The work of an operation on the event loop does not grow with what is beside it (docs/reliability.md has the whole table)."""

import pytest

from simulation.growth import grows

QUICK = [("attend", "waiting calls"), ("put a layer", "layers")]
SLOW = [
    ("a call that waits", "waiting calls"),
    ("step of a session", "sessions"),
    ("a step that ends another session", "sessions"),
    ("index", "layers"),
    ("ready", "layers"),
    ("list layers", "layers"),
    ("index of models", "layers"),
    ("read metrics", "layers"),
    ("connect and leave", "connections"),
    ("a second without calls", "connections"),
    ("a second without calls", "sessions"),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("operation", "beside"), CASES)
def test_work_does_not_grow(operation: str, beside: str) -> None:
    more, few, many = grows(operation, beside)
    assert not more, f"{operation} beside {beside}: {few} becomes {many}"
