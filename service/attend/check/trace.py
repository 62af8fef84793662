"""Records the arrays that a candidate makes during a call, with the line of its source that made each.

torch is recorded by a `TorchFunctionMode`, NumPy by a subclass of its arrays, and any other framework, JAX without `jit` among them, by the
local variables of functions in the folders of the candidate's files. Compiled and fused kernels make no arrays that can be recorded.
"""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from hashlib import sha1
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from attend.tensors import Array

MOST_NUMBERS = 20_000_000  # that are kept of a call
MOST_LINES = 200_000  # that are followed
SMALL = 4096  # numbers of an array that is looked at after each line, since loops may fill it
LIBRARIES = ("builtins", "torch")  # whose classes are not the candidate's, unless they are called themselves
LARGE = 1e8  # numbers in place of -inf are not compared
VIEWS = ("reshape", "transpose", "swapaxes", "dot", "astype", "mean", "repeat")  # methods of NumPy arrays that call no recorded function


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a candidate's source."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"line {self.number} of {Path(self.file).name}"

    @property
    def text(self) -> str:
        """Its source, or that of the statement that begins there; empty if it cannot be read."""
        return linecache.getline(self.file, self.number).strip()


@dataclass(frozen=True)
class Made:
    """An array that a candidate made, by an operation or as a variable of this name."""

    numbers: Array
    line: Line | None
    by: str = ""

    @cached_property
    def values(self) -> Array:
        """Its finite numbers in ascending order, without those in place of -inf."""
        return in_order(self.numbers)


def in_order(x: Array) -> Array:
    """The finite numbers of an array in ascending order, without those in place of -inf."""
    numbers = x.ravel()
    return np.sort(numbers[np.abs(numbers) < LARGE])  # NaN compares as false


@dataclass(slots=True)
class Trace:
    """The arrays of a call, in the order in which they were made."""

    folders: frozenset[Path]  # of the candidate's files
    made: list[Made] = field(default_factory=list)
    count: int = 0  # of their numbers
    lines: int = 0
    known: dict[tuple[tuple[int, ...], bytes], int] = field(default_factory=dict)  # shape and numbers -> place among those made
    again: dict[tuple[int, Line, str], None] = field(default_factory=dict)  # the place of one that a line has again, under this name

    @property
    def is_complete(self) -> bool:
        return self.count <= MOST_NUMBERS and self.lines <= MOST_LINES

    def add(self, x: Any, line: Line | None, by: str = "") -> None:
        """Keeps a copy of an array of several real numbers, or where one like it was made; nothing else."""
        if not hasattr(x, "shape") or not hasattr(x, "dtype") or "float" not in str(x.dtype) or not self.is_complete:
            return
        with suppress(Exception):  # an array of a computation that is only traced has no numbers
            numbers = _numbers(x)
            key = numbers.shape, sha1(numbers.tobytes()).digest()
            if key in self.known and line is not None:
                self.again[self.known[key], line, by] = None
            elif numbers.size > 1 and key not in self.known:
                self.known[key] = len(self.made)
                self.count += numbers.size
                self.made.append(Made(numbers, line, by))

    def line(self, frame: FrameType | None) -> Line | None:
        """Where the innermost function from the candidate's folders is, below the call that is recorded."""
        while frame is not None and frame.f_code is not _call.__code__:
            if self.is_own(frame):
                return Line(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return None

    def is_own(self, frame: FrameType) -> bool:
        """Whether a function is in one of the candidate's folders."""
        return _folder(frame.f_code.co_filename) in self.folders


def _numbers(x: Any) -> Array:
    """A copy in float64."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.array(x, np.float64, subok=False)


def recorded(function: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    """The function, which adds what it makes to the trace. `_call` is where the trace's own frames begin."""
    return partial(_call, function, trace)


def _call(function: Callable[..., Any], trace: Trace, *args: Any, **kwargs: Any) -> Any:
    for x in (*args, *kwargs.values()):
        trace.add(x, None)
    with _recording_torch(trace), _recording_locals(trace):
        named = {name: _as_recorded(x, trace) for name, x in kwargs.items()}
        return function(*(_as_recorded(x, trace) for x in args), **named)


def source_folders(function: Any) -> frozenset[Path]:
    """The folders of the files that a function or method is in, or the methods of an instance's class and of those that it inherits from;
    empty if it has no source."""
    function = getattr(function, "func", function)  # of a partial function
    methods = (getattr(type(function), name, None) for name in ("forward", "call", "__call__"))
    called = (code for found in (function, getattr(function, "__func__", None), *methods) if (code := _code(found)) is not None)
    classes = type(getattr(function, "__self__", function)).__mro__
    own = (code for cls in classes if cls.__module__.partition(".")[0] not in LIBRARIES for code in map(_code, vars(cls).values()))
    return frozenset(_folder(code.co_filename) for code in (next(called, None), *own) if code is not None)


def _code(function: Any) -> CodeType | None:
    """That of a function, or of what it wraps."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


@lru_cache(1024)
def _folder(file: str) -> Path:
    return Path(file).parent


@contextmanager
def _recording_torch(trace: Trace) -> Iterator[None]:
    """Records what functions and methods of torch return or change, if torch is imported."""
    if "torch" not in sys.modules:
        yield
        return
    from torch.overrides import TorchFunctionMode

    class Recording(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            line = trace.line(sys._getframe(1))
            made = result if isinstance(result, tuple | list) else (args[0] if result is None and args else result,)
            for x in made:
                trace.add(x, line, getattr(func, "__name__", ""))
            return result

    with Recording():
        yield


@dataclass(slots=True)
class _Variable:
    """A local variable: its array, and the line that bound or last changed it."""

    array: Any
    line: Line | None
    numbers: bytes = b""

    def is_changed(self) -> bool:
        """Whether a small NumPy array has other numbers than when this was last asked."""
        if type(self.array) is not np.ndarray or self.array.size > SMALL or self.array.dtype.kind != "f":
            return False
        before, self.numbers = self.numbers, self.array.tobytes()
        return before != self.numbers


@contextmanager
def _recording_locals(trace: Trace) -> Iterator[None]:
    """Records the arrays that local variables of the candidate's functions get, and what is in them when these return."""
    previous = sys.gettrace()

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        if event != "call" or not trace.is_own(frame):
            return None
        variables = {name: _Variable(x, None) for name, x in frame.f_locals.items()}
        at = Line(frame.f_code.co_filename, frame.f_lineno)

        def within(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal at
            trace.lines += 1
            for name, x in frame.f_locals.items():
                variable = variables.get(name)
                if variable is not None and (variable.array is not x or event == "return"):
                    trace.add(variable.array, variable.line, name)
                if variable is None or variable.array is not x:
                    variables[name] = _Variable(x, at)
                    trace.add(x, at, name)
                elif variable.is_changed():
                    variable.line = at
            for x in argument if isinstance(argument, tuple | list) else (argument,):
                trace.add(x, at)
                trace.add(x, trace.line(frame.f_back), frame.f_code.co_name)
            at = Line(frame.f_code.co_filename, frame.f_lineno)
            return within if trace.is_complete else None

        return within

    sys.settrace(follow)
    try:
        yield
    finally:
        sys.settrace(previous)


def _as_recorded(x: Any, trace: Trace) -> Any:
    """A NumPy array of real numbers as one that records what is made of it; anything else as it is."""
    if type(x) is not np.ndarray or x.dtype.kind != "f":
        return x
    view = x.view(_Recorded)
    view.kept_in = trace
    return view


def _plain(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return type(x)(map(_plain, x))
    return x.view(np.ndarray) if isinstance(x, _Recorded) else x


class _Recorded(np.ndarray):
    """An array that adds to a trace what functions of NumPy make of it."""

    kept_in: Trace | None = None

    def __array_finalize__(self, other: Any) -> None:
        if other is not None:
            self.kept_in = getattr(other, "kept_in", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):  # the same calls before have shown what NumPy warns of
            result = getattr(ufunc, method)(*map(_plain, inputs), **{name: _plain(x) for name, x in kwargs.items()})
        out = kwargs.get("out")
        self._add(*(result if isinstance(result, tuple) else (result,)), by=f"{ufunc.__name__} {method}")
        return out[0] if out is not None and len(out) == 1 else self._again(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = func(*map(_plain, args), **{name: _plain(x) for name, x in kwargs.items()})
        self._add(*(result if isinstance(result, tuple | list) else (result,)), by=func.__name__)
        return self._again(result)

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(_plain(index))
        self._add(result)
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_plain(index), _plain(value))
        self._add(self)

    def _add(self, *made: Any, by: str = "") -> None:
        if self.kept_in is not None:
            line = self.kept_in.line(sys._getframe(2))
            for x in made:
                self.kept_in.add(_plain(x), line, by)

    def _again(self, x: Any) -> Any:
        """What a function returned, as arrays that record."""
        if isinstance(x, tuple | list):
            return type(x)(map(self._again, x))
        return x if self.kept_in is None else _as_recorded(x, self.kept_in)


def _recording(name: str) -> Callable[..., Any]:
    """The method of NumPy's arrays, whose result is recorded."""

    def method(self: _Recorded, *args: Any, **kwargs: Any) -> Any:
        result = self._again(getattr(_plain(self), name)(*map(_plain, args), **kwargs))
        self._add(result, by=name)
        return result

    return method


for _name in VIEWS:
    setattr(_Recorded, _name, _recording(_name))
