"""Calls a candidate: its adapter takes a case, passes the arguments that arguments.py makes of it, and converts the result to NumPy arrays.

An exception of the candidate becomes a `CallFailed` that shows the arguments, since a mask of another shape or dtype than it expects is the
usual cause.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attend.check.arguments import MASKS, Arguments
from attend.check.arrays import as_float64, compiled, describe, dtype_of
from attend.check.cases import CheckCase
from attend.check.computation import RELATIVE
from attend.check.constructor import meaning_of
from attend.check.convention import Alignment
from attend.check.packed import INPUT
from attend.check.signatures import FUNCTIONS
from attend.tensors import Array

NO_PARAMETER = "no parameter is known as"  # the beginning of the reason why a case is not tried
NO_POSITIONS = "it is always causal, and q != k leaves the positions of its queries open; pass query_offset"


class CallFailed(Exception):
    """The candidate raised; the message has its exception and the arguments."""


class NoCache(Exception):
    """A call that should begin a cache returned none."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The candidate's result in the reference's layout, as float64; `dtype` is that with fewer digits of its inputs and output."""

    output: Array  # [b, q, d_model] if it has the right shape
    attention_weights: Array | None  # [b, h, q, k] if they have the right shape, or averaged over the heads [b, q, k]
    dtype: str
    sums: Array | None = None  # a number for each row, such as the log-sum-exp of its scores, in the candidate's layout

    @property
    def has_averaged_weights(self) -> bool:
        weights = self.attention_weights
        return weights is not None and weights.ndim == 3 and weights.shape[:2] == self.output.shape[:2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(Arguments):
    """A candidate's function, and how it is called."""

    function: Callable[..., Any]
    is_torch: bool = False  # whether it is torch's own function or module
    may_add_numbers: bool = False  # whether it may, since its mask has the name of torch's
    packed: tuple[str, ...] = ()  # parameters of the candidate that get several arrays in one
    others: tuple[str, ...] = ()  # parameters that have a default and no known role
    returned: set[str] = field(default_factory=set)  # the packages of what it returned: some take arrays of NumPy and return those of JAX
    keeps_cache: bool = False  # whether calls with `use_cache` keep their rows for the next one in the candidate itself

    @property
    def may_take_more(self) -> bool:
        """Whether a parameter that is None by default and whose name is not that of a size, or *args and **kwargs, may be a mask."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        unknown = {name for name in self.others if meaning_of(name) is None}
        return any(x.kind in variadic or (name in unknown and x.default is None) for name, x in self.signature.parameters.items())

    @property
    def adds_numbers(self) -> bool:
        """Whether the parameter mask takes any numbers and adds them to the scores."""
        like = self.convention.like
        known = self.is_torch or (like is not None and FUNCTIONS[like].adds_numbers)
        means = self.polarity("mask") if "mask" in self.roles else None
        return known or means == "add" or (means == "attend" and self.signature.parameters.keys() >= FUNCTIONS["sdpa"].own_parameters)

    @property
    def aligned(self) -> Alignment | None:
        """The alignment of the function that it is like; None if that has none, or it is like none."""
        return FUNCTIONS[self.convention.like].alignment if self.convention.like else None

    def changed_by(self, case: CheckCase) -> set[str]:
        """The parameters that calls of this case pass another value than their default."""
        changed = set()
        for part in case.parts if case.chunks else (case,):
            more = {"use_cache": True} if case.chunks else {}
            for role, value in self.values(part, {"cache": True} | more if case.chunks else {}).items():
                default = self.signature.parameters[self.roles[role]].default
                is_default = not hasattr(value, "shape") and (value is default or (type(value) is type(default) and value == default))
                changed |= set() if is_default else {self.roles[role]}
        return changed

    def skip_reason(self, case: CheckCase) -> str | None:
        """Why the candidate cannot be called on this case; None if it can."""
        if case.is_cross and ("key" not in self.roles or INPUT in self.packed):
            return "it takes one input"
        if case.is_cross and self.required & {"segments", "boundaries"} and "key_boundaries" not in self.roles:
            return "the sequences that it takes have as many keys as queries"
        if case.is_cross and self.convention.causal and self.convention.query_offset is None:
            return NO_POSITIONS
        if case.chunks and not self.convention.causal:
            return "only an always causal one is decoded; pass causal=true"
        if case.kind == "causal" and self.convention.causal and not self.convention.mask_replaces_causality:
            return "it is causal in every case"
        if case.kind != "plain" and self.mask_role(case.kind) is None:
            return f"{NO_PARAMETER} {MASKS[case.kind][1]}; if there is one, pass arguments={{…}}"
        return None

    def call(self, case: CheckCase) -> CandidateResult:
        """Call the candidate, or decode with it. CallFailed: it raised. NoCache. ValueError: its result is no array."""
        if not case.chunks:
            return self._result(self._call(case, {}), case)
        if self.keeps_cache:
            return replace(self, function=deepcopy(self.function), keeps_cache=False).call(case)
        results, cache, taken_back = [], self.empty_cache(), case.rolled_back
        for part in case.parts:
            returned = self._call(part, {"cache": cache, "use_cache": True})
            results.append(self._result(returned, part))
            cache = self._cache_after(returned, cache)
            if taken_back is not None:
                cache, taken_back = self._after_rows_that_are_taken_back(taken_back, cache), None
        return CandidateResult(np.concatenate([x.output for x in results], axis=1), None, results[0].dtype)

    def keeps_rows(self, case: CheckCase) -> bool:
        """Whether a call with `use_cache` changes the numbers of the next one."""
        if "use_cache" not in self.roles or self.roles.keys() & {"cache", "first_position"}:
            return False
        other = replace(case, query=np.sin(np.arange(case.query.size)).reshape(case.query.shape))
        first, second = (replace(self, function=deepcopy(self.function)) for _ in range(2))
        with suppress(CallFailed):
            second._call(case, {"use_cache": True})
            alone, after = (x._call(other, {"use_cache": True}) for x in (first, second))
            return hasattr(alone, "dtype") and not np.array_equal(as_float64(alone), as_float64(after), equal_nan=True)
        return False

    def _cache_after(self, returned: Any, cache: Any) -> Any:
        """The cache after a call: the last value that it returned, or the one that it was given and changed. NoCache: there is none."""
        if "cache" not in self.roles:  # the candidate keeps it
            return None
        last = returned[-1] if isinstance(returned, tuple | list) and len(returned) > 1 else None
        if self.new_cache is not None:
            return last if isinstance(last, type(cache)) else cache
        if last is None:
            raise NoCache
        return last

    def _after_rows_that_are_taken_back(self, rows: CheckCase, cache: Any) -> Any:
        """The cache after a call with these rows and their removal: by its method crop, or it is the cache of the call before."""
        kept = cache if self.new_cache is None or hasattr(cache, "crop") else deepcopy(cache)
        self._call(rows, {"cache": cache, "use_cache": True})
        if hasattr(cache, "crop"):
            cache.crop(rows.first_row)
        return kept

    def _call(self, case: CheckCase, more: Mapping[str, Any]) -> Any:
        """What the candidate returns; `more` has arguments by their role. CallFailed: it raised."""
        values = {self.roles[role]: value for role, value in self.values(case, more).items()}
        ordered = {name: values[name] for name in self.signature.parameters if name in values}
        bound = inspect.BoundArguments(self.signature, ordered)
        try:
            returned = self._returned(bound)
        except Exception as error:
            called = ", ".join(f"{name} {describe(value)}" for name, value in ordered.items())
            raise CallFailed(f"{type(error).__name__}: {error}; called with {called}") from error
        return self.without_residual(returned, ordered[self.roles["query"]])

    def _returned(self, bound: inspect.BoundArguments) -> Any:
        """What the candidate returns. One of JAX is compiled whole where it can be, since to compile each operation takes far longer."""
        if (self.framework == "jax" or "jaxlib" in self.returned) and self.roles.keys().isdisjoint({"cache", "use_cache"}):
            others = tuple(name for name, value in bound.arguments.items() if not hasattr(value, "dtype"))
            with suppress(Exception):
                return compiled(self.function, others)(*bound.args, **bound.kwargs)
        returned = self.function(*bound.args, **bound.kwargs)
        first = next(iter(returned), None) if isinstance(returned, tuple | list) else returned
        self.returned.add(type(first).__module__.partition(".")[0])
        return returned

    def without_residual(self, returned: Any, query: Any) -> Any:
        """What was returned, less the query that a residual connection added to the output."""
        if not self.convention.residual:
            return returned
        output, *others = returned if isinstance(returned, tuple | list) else (returned,)
        return (output - query, *others) if getattr(output, "shape", None) == query.shape else returned

    def _result(self, result: Any, case: CheckCase) -> CandidateResult:
        """The output, and the weights if they were returned. ValueError: it is no array."""
        parts = (*result.values(),) if isinstance(result, Mapping) else result if isinstance(result, tuple | list) else (result,)
        if not parts or not hasattr(parts[0], "dtype"):
            raise ValueError(f"expected an array or a tuple (output, weights), got {type(parts[0] if parts else result).__name__}")
        has_weights = len(parts) > (2 if "cache" in self.roles else 1)  # the last of several is the cache
        weights = as_float64(parts[1]) if has_weights and hasattr(parts[1], "dtype") else None
        rows = len(case.query) * case.fields.get("num_heads", self.heads) * case.query.shape[1]
        are_sums = weights is not None and weights.size == rows
        dtype = max((self.dtype, dtype_of(parts[0])), key=lambda name: RELATIVE.get(name, 0.0))
        return CandidateResult(
            output=self.as_output(as_float64(parts[0])),
            attention_weights=None if weights is None or are_sums else self._as_weights(weights),
            dtype=dtype,
            sums=weights if are_sums else None,
        )
