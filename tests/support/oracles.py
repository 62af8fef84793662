"""The second implementations of operators, each in `tests/attention/operators/test_NAME.py` beside its tests.

Functions of these names there are steps of the loops over rows (`tests/attention/reference/test_loops.py`). Operators without such a
function have theirs in that file.

score                   one pair's scores of all heads, in a list, after softcap
mix_weights             one row's weights of all heads
bias_of_visible         of one row and head, for each key
selected                the keys that one row of a head selects, of a query and the head's keys
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from attend.spec import LayerSpec


def oracle_steps(spec: LayerSpec, name: str) -> list[Callable[..., Any]]:
    """The functions of this name of the layer's operators."""
    modules = [_module(operator.name) for operator in spec.operators]
    return [getattr(module, name) for module in modules if hasattr(module, name)]


@cache  # looking for a file takes as long as a row
def _module(operator: str) -> ModuleType | None:
    file = f"attention.operators.test_{operator}"
    return import_module(file) if find_spec(file) else None
