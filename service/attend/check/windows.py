"""Windows of which the candidate has the size alone: a parameter of its constructor or of its calls such as `sliding_window`.

It is given a small window, in which the short calls show an edge, and compared with the layer that has this window.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from attend.check.adapter import Adapter
from attend.check.candidate import Candidate
from attend.check.constructor import meaning_of
from attend.check.convention import Convention
from attend.spec import LayerSpec

KEYS = 5  # of the window, with the query's own
WINDOWS = ((KEYS - 1, None), (KEYS // 2, KEYS // 2))  # before and after the own key: of a causal layer, and around the own
ON_EACH_SIDE = (KEYS - 1, KEYS - 1)  # with the own key, as causality leaves the first of these windows


def with_and_without_window(candidate: Any, prepared: Candidate, convention: Convention) -> list[Convention]:
    """The convention with each window and without one, first as the parameter's default has it; alone if there is no parameter."""
    parameters = [*sizes_constructed(candidate, convention), *_sizes_in(prepared.adapter)]
    if not parameters or any(side is not None for interval in prepared.spec.intervals for side in interval):
        return [convention]
    default = parameters[0].default
    without, windows = replace(convention, window=None), [replace(convention, window=window) for window in WINDOWS]
    return [*windows, without] if type(default) is int and default > 1 else [without, *windows]


def sizes_constructed(candidate: Any, convention: Convention) -> Iterator[inspect.Parameter]:
    """The parameter of the constructor of a class that is the size of its window."""
    if isinstance(candidate, type):
        parameters = inspect.signature(candidate).parameters
        yield from (x for name, x in parameters.items() if name not in convention.construct and _is_size(x))


def passing_window(adapter: Adapter, spec: LayerSpec | None) -> Adapter:
    """The adapter of which each call passes the size of the convention's window, or of the layer's, if a parameter is that."""
    names = [parameter.name for parameter in _sizes_in(adapter)]
    of_layer = [(interval.left, interval.right) for interval in spec.intervals] if spec is not None else []
    left, right = adapter.convention.window or next(iter(of_layer), (None, None))
    if left is None or not names:
        return adapter
    function = partial(adapter.function, **dict.fromkeys(names, left + 1 + (right or 0)))
    return replace(adapter, function=function, others=tuple(name for name in adapter.others if name not in names))


def with_windows(prepared: Candidate) -> Iterator[tuple[str, Candidate]]:
    """A parameter of calls that is the size of a window, if the layer has none, and the candidate with each window that it may be."""
    adapter = prepared.adapter
    if not prepared.spec.positional:
        for parameter, window in product(_sizes_in(adapter), (*WINDOWS, ON_EACH_SIDE)):
            windowed = replace(adapter, function=partial(adapter.function, **{parameter.name: KEYS}))
            spec = with_window(prepared.spec, replace(adapter.convention, window=window))
            yield parameter.name, replace(prepared, adapter=windowed, spec=spec)


def with_window(spec: LayerSpec, convention: Convention) -> LayerSpec:
    """The layer with the convention's window, if it has one."""
    if convention.window is None:
        return spec
    left, right = convention.window
    return LayerSpec.model_validate(spec.model_dump(exclude_unset=True) | {"window": {"left": left, "right": right}})


def window_in_words(convention: Convention) -> str:
    """What is said of a window that was found by calls."""
    around = ", as many before as after the own" if convention.window and convention.window[1] is not None else ""
    return f"it has a window of {KEYS} keys{around}, if it is constructed or called with this size"


def _sizes_in(adapter: Adapter) -> Iterator[inspect.Parameter]:
    """The parameter of calls that is the size of a window."""
    parameters = adapter.signature.parameters
    yield from (parameters[name] for name in adapter.others if name in parameters and _is_size(parameters[name]))


def _is_size(parameter: inspect.Parameter) -> bool:
    has_size = parameter.default in (None, parameter.empty) or type(parameter.default) is int
    return meaning_of(parameter.name) == "window" and has_size
