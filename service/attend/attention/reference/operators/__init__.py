"""The arithmetic of each operator, in a file of its name; `window` and `softcap`, which calls may have too, are in forward.py.

Each function that has the name of a stage is a step of `forward.Layer`, which is its first argument. The stages have the same names in
`attention/operators/stages.py`, except for `blocked`, which is an `interval` there.

project         replaces the projection of a query, key or value
norm            of projected heads
rotate          heads by position
rescale         queries and keys after that
terms           added to q·k
score           scores of all heads, after scale and softcap
bias            added to the scores
blocked         pairs that are blocked
select          pairs that are kept, of those that are allowed
bias_of_visible added to the scores too, if it depends on which pairs are blocked
normalise_input scores before the softmax
normalise       replaces the softmax
sinks           one more score of each row
factors         those of each softmax in the weights
mix_weights     weights of all heads
value           weighted values
gate            the factor on them
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from attend.attention.operators.operator import Operator
from attend.spec import LayerSpec

Step = Callable[..., Any]


def steps(spec: LayerSpec, stage: str) -> Sequence[Step]:
    """The functions of this stage of the layer's operators, in their order."""
    return _steps(spec.operators, stage)


@lru_cache(1024)  # `attend check` computes thousands of layers with the same operators
def _steps(operators: tuple[type[Operator], ...], stage: str) -> Sequence[Step]:
    files = [import_module(f"{__name__}.{operator.name}") for operator in operators if not operator.of_calls]
    return tuple(getattr(file, stage) for file in files if hasattr(file, stage))
