"""Calls a candidate: its adapter takes a case, passes arrays in the candidate's framework, layout and mask convention, and converts the
result to NumPy arrays in the reference's.

An exception of the candidate becomes a `CallFailed` that shows the arguments, since a mask of another shape or dtype than it expects is the
usual cause.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from attend.check.arrays import as_array, as_float64, compiled, describe, dtype_of
from attend.check.cases import CaseKind, CheckCase
from attend.check.computation import RELATIVE
from attend.check.convention import ROPE_TABLES, Alignment, Convention, Polarity, mask_polarity
from attend.check.layer import Layer
from attend.check.pages import in_pages, page_table
from attend.check.rope_tables import turns
from attend.check.signatures import FUNCTIONS, TORCH_NAMES
from attend.check.weights import is_matrix
from attend.tensors import Array

# kind of case -> roles of the parameters that may take its mask, and their description
MASKS: dict[str, tuple[tuple[str, ...], str]] = {
    "plain": ((), ""),
    "mask": (("mask",), "a mask over queries and keys"),
    "causal": (("mask", "causal"), "such a mask or is_causal"),
    "padding": (("padding", "lengths", "mask"), "a mask, key mask or lengths"),
    "segments": (("segments", "boundaries", "mask"), "segments, or a mask over queries and keys"),
    "numbers": (("mask",), "a mask over queries and keys"),
}
OPTIONAL = frozenset(  # roles of parameters that are passed only where a case is about them
    ("mask", "padding", "lengths", "segments", "boundaries", "page_table", "cache", "use_cache", "causal", "scale", "softcap", "window")
)

LAYOUTS = {  # places of the axes b, h, n, d
    "b,h,n,d": (0, 1, 2, 3),
    "b,n,h,d": (0, 2, 1, 3),
    "n,b,h,d": (2, 0, 1, 3),
    "b,h,d": (0, 2, 1, 3),  # of the keys; the query has one row, without an axis
}
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

    @property
    def has_averaged_weights(self) -> bool:
        weights = self.attention_weights
        return weights is not None and weights.ndim == 3 and weights.shape[:2] == self.output.shape[:2]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A candidate's function, and how it is called."""

    function: Callable[..., Any]
    signature: inspect.Signature
    roles: dict[str, str]  # role -> parameter
    convention: Convention
    framework: str
    dtype: str
    device: Any = None
    batch_first: bool = True
    heads: int = 1
    kv_heads: int = 1
    heads_given: bool = False  # whether query, key and value are passed as heads, already projected
    matrices: Mapping[str, Array] = field(default_factory=dict)  # canonical weights, for a function that takes them as arguments
    unused: float = np.nan  # the number in rows of pages that no item has
    in_order: bool = False  # whether the pages of an item follow one another, and those of the next item follow them
    is_torch: bool = False  # whether it is torch's own function or module
    may_add_numbers: bool = False  # whether it may, since its signature is that of torch's function
    others: tuple[str, ...] = ()  # parameters that have a default and no known role
    returned: set[str] = field(default_factory=set)  # the packages of what it returned: some take arrays of NumPy and return those of JAX
    keeps_cache: bool = False  # whether calls with `use_cache` keep their rows for the next one in the candidate itself
    new_cache: Callable[[], Any] | None = None  # makes the cache of the first call, which calls change in place

    @property
    def required(self) -> set[str]:
        """The roles of the parameters that every call has to pass."""
        return {role for role, name in self.roles.items() if self.signature.parameters[name].default is inspect.Parameter.empty}

    @property
    def paged(self) -> bool:
        """Whether keys and values are passed in pages in every call."""
        return self.convention.paged or "page_table" in self.required

    def polarity(self, role: str) -> Polarity:
        """What true in the mask of the role mask or padding means."""
        return mask_polarity(self.convention, self.roles[role], padding=role == "padding") or "attend"

    @property
    def may_take_more(self) -> bool:
        """Whether a parameter of unknown meaning that is None by default, or *args and **kwargs, may be a mask."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return any(x.kind in variadic or (name in self.others and x.default is None) for name, x in self.signature.parameters.items())

    @property
    def adds_numbers(self) -> bool:
        """Whether the parameter mask takes any numbers and adds them to the scores."""
        like = self.convention.like
        known = self.is_torch or (like is not None and FUNCTIONS[like].adds_numbers)
        means = self.polarity("mask") if "mask" in self.roles else None
        return known or means == "add" or (means == "attend" and self.signature.parameters.keys() >= TORCH_NAMES)

    @property
    def aligned(self) -> Alignment | None:
        """The alignment of the function that it is like; None if that has none, or it is like none."""
        return FUNCTIONS[self.convention.like].alignment if self.convention.like else None

    def changed_by(self, case: CheckCase) -> set[str]:
        """The parameters that calls of this case pass another value than their default."""
        changed = set()
        for part in case.parts if case.chunks else (case,):
            more = {"use_cache": True} if case.chunks else {}
            for role, value in self._values(part, {"cache": True} | more if case.chunks else {}).items():
                default = self.signature.parameters[self.roles[role]].default
                is_default = not hasattr(value, "shape") and (value is default or (type(value) is type(default) and value == default))
                changed |= set() if is_default else {self.roles[role]}
        return changed

    def skip_reason(self, case: CheckCase) -> str | None:
        """Why the candidate cannot be called on this case; None if it can."""
        if case.is_cross and "key" not in self.roles:
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
            return self._result(self._call(case, {}))
        if self.keeps_cache:
            return replace(self, function=deepcopy(self.function), keeps_cache=False).call(case)
        results, cache, taken_back = [], self._empty_cache(), case.rolled_back
        for part in case.parts:
            returned = self._call(part, {"cache": cache, "use_cache": True})
            results.append(self._result(returned))
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

    def _empty_cache(self) -> Any:
        return None if self.new_cache is None else self.new_cache()

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
        values = {self.roles[role]: value for role, value in self._values(case, more).items()}
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

    def _result(self, result: Any) -> CandidateResult:
        """The output, and the weights if they were returned. ValueError: it is no array."""
        parts = result if isinstance(result, tuple | list) else (result,)
        if not parts or not hasattr(parts[0], "dtype"):
            raise ValueError(f"expected an array or a tuple (output, weights), got {type(parts[0] if parts else result).__name__}")
        has_weights = len(parts) > (2 if "cache" in self.roles else 1)  # the last of several is the cache
        weights = parts[1] if has_weights and hasattr(parts[1], "dtype") else None
        dtype = max((self.dtype, dtype_of(parts[0])), key=lambda name: RELATIVE.get(name, 0.0))
        return CandidateResult(
            self.as_output(as_float64(parts[0])), None if weights is None else self._as_weights(as_float64(weights)), dtype
        )

    def mask_role(self, kind: CaseKind) -> str | None:
        """The role of the parameter that takes the mask of such a case; None where the candidate has none, or the case is plain."""
        over_pairs = self.convention.mask_shape not in ("b,k", "b,1,1,k")
        roles = (role for role in MASKS[kind][0] if role in self.roles)
        unfit = {"boundaries"} if self.convention.batched else set()  # they are of rows without a batch
        unfit |= {"mask"} if not over_pairs and kind != "padding" else set()
        return next((role for role in roles if role not in unfit), None)

    def _values(self, case: CheckCase, more: Mapping[str, Any]) -> dict[str, Any]:
        """Role -> argument. What the case does not have is passed only if it is required, and then has no effect."""
        mask_role = self.mask_role(case.kind)
        needed = self.required | {mask_role, *case.passed, *more} | ({"causal"} if self._causal_by_default else set())
        needed |= {"page_table", "lengths"} if self.paged or "page_table" in case.passed else set()
        values = {role: self._argument(role, case, role == mask_role) for role in self.roles if role in needed or role not in OPTIONAL}
        return values | {role: value for role, value in more.items() if role in self.roles}

    @property
    def _causal_by_default(self) -> bool:
        """Whether the parameter `causal` has to be passed in each call, since its default is another value."""
        default = self.signature.parameters[self.roles["causal"]].default if "causal" in self.roles else None
        return bool(default) is not self.convention.causal

    def _argument(self, role: str, case: CheckCase, takes_mask: bool) -> Any:
        """The argument for a role. `takes_mask`: whether this parameter takes the mask of the case."""
        if role in ROPE_TABLES:
            return self._rope_tables(role, case)
        if role in ("key", "value", "page_table") and (self.paged or "page_table" in case.passed):
            return self._in_pages(role, case)
        if role in case.passed and role not in ("padding", "lengths"):
            return case.passed[role]
        mask = case.mask if takes_mask else case.passed.get(role, np.ones_like(case.mask))
        if role in ("query", "key", "value"):
            return self._tensor(self.in_layout(getattr(case, role), role), self.dtype)
        if role in ("mask", "padding"):
            return self._mask(mask, role) if case.numbers is None else self._tensor(self._in_mask_shape(case.numbers, role), self.dtype)
        if role in self.matrices:
            matrix = self.matrices[role]
            return self._tensor(matrix.T if is_matrix(role) and self.convention.orientation == "in,out" else matrix, self.dtype)
        if role in ("cache", "use_cache", "first_position"):
            return {"cache": self._empty_cache(), "use_cache": None, "first_position": case.first_row}[role]
        if (integers := self._integers(role, case, mask)) is not None:
            return integers
        plain = {
            "heads": self.heads,
            "causal": takes_mask or self.convention.causal,
            "return_weights": True,
            "softcap": 0.0,
            "window": (-1, -1),
            "module": SimpleNamespace(num_key_value_groups=self.heads // self.kv_heads, is_causal=False, training=False),
        }
        return plain.get(role, False)

    def _in_pages(self, role: str, case: CheckCase) -> Any:
        """Keys or values in pages, in the layout of the candidate; or the table of the pages of each item."""
        rows = case.mask[:, 0] if self.mask_role(case.kind) == "lengths" else np.ones(case.key.shape[:2], bool)
        table, of_item = page_table(rows, self.convention.page_size, in_order=self.in_order)
        if role == "page_table":
            return self._tensor(of_item, "int32")
        pages = in_pages(getattr(case, role), rows, table, self.convention.page_size, self.unused)
        return self._tensor(self.in_layout(pages, role), self.dtype)

    def _rope_tables(self, role: str, case: CheckCase) -> Any:
        """The cosines, the sines, or both of the angles of the case's rows, in the axes that the candidate takes."""
        rows = case.first_row + np.arange(case.query.shape[1])
        tables = turns(case.passed[role], rows, self.convention.rope_tables or "n,d/2", len(case.query))
        if role == "turns":
            return self._tensor(tables, "complex128" if self.dtype == "float64" else "complex64")
        cosines, sines = (self._tensor(x, self.dtype) for x in (tables.real, tables.imag))
        return {"cosines": cosines, "sines": sines, "cosines_and_sines": (cosines, sines)}[role]

    def _integers(self, role: str, case: CheckCase, mask: Array) -> Any:
        """The argument of integers for a role; None for other roles."""
        rows = case.first_row + np.arange(case.query.shape[1])
        segments = np.ones(case.query.shape[:2]) if case.segments is None else case.segments
        if role in ("boundaries", "key_boundaries", "max_queries", "max_keys"):
            bounds = _boundaries(segments if role in ("boundaries", "max_queries") else case.segments_of_keys)
            return int(np.diff(bounds).max()) if role.startswith("max") else self._tensor(bounds, "int32")
        made: dict[str, Callable[[], Array]] = {
            "lengths": lambda: self._unbatched(mask[:, 0].sum(axis=-1)),
            "segments": lambda: self._unbatched(segments),
            "positions": lambda: self._unbatched(np.broadcast_to(rows, case.query.shape[:2])),
            "cache_positions": lambda: rows,
        }
        return self._tensor(made[role](), "int64") if role in made else None

    def in_layout(self, x: Array, role: str) -> Array:
        """A query, key or value [b, n, width] in the layout of the candidate."""
        if self.heads_given and self.convention.layout != "b,n,d":
            x = np.transpose(Layer.split_heads(x, self.heads if role == "query" else self.kv_heads), LAYOUTS[self.convention.layout])
            x = x[:, 0] if self.convention.takes_one_query and role == "query" else x
        elif self.convention.batched and not self.batch_first:
            x = x.swapaxes(0, 1)
        return self._unbatched(x)

    def _unbatched(self, x: Array) -> Array:
        return x if self.convention.batched else np.asarray(x[0])

    def _mask(self, mask: Array, role: str) -> Any:
        """A mask [b, q, k], true = may attend, in the shape and polarity of the candidate."""
        mask = self._in_mask_shape(mask, role)
        if self.polarity(role) == "add":
            return self._tensor(np.where(mask, 0.0, -np.inf), self.dtype)
        dtype = {"bool": "bool", "int": "int64", "float": self.dtype}[self.convention.mask_dtype]
        return self._tensor(mask if self.polarity(role) == "attend" else ~mask, dtype)

    def _in_mask_shape(self, mask: Array, role: str) -> Array:
        """[b, q, k] in the shape that the parameter takes."""
        shape = "b,k" if role == "padding" else self.convention.mask_shape
        if shape == "q,k":
            return np.asarray(mask[0])
        per_item: dict[str, Array] = {
            "b,k": mask[:, 0],
            "b,q,k": mask,
            "b,1,q,k": mask[:, None],
            "b,h,q,k": np.repeat(mask[:, None], self.heads, axis=1),
            "b,1,1,k": mask[:, None, :1],
        }
        return self._unbatched(per_item[shape])

    def _tensor(self, x: Array, dtype: str) -> Any:
        return as_array(x, dtype, self.framework, self.device)

    def as_output(self, x: Array) -> Array:
        """What the candidate returned as [b, q, width], if it has the right shape."""
        x = x if self.convention.batched else x[None]
        x = x[:, None] if self.convention.takes_one_query and x.ndim == 3 else x
        if self.heads_given and x.ndim == 4:
            return Layer.merge_heads(np.transpose(x, np.argsort(LAYOUTS[self.convention.output_layout or self.convention.layout])))
        return x.swapaxes(0, 1) if not self.batch_first and self.convention.batched and x.ndim == 3 else x

    def _as_weights(self, x: Array) -> Array:
        x = x if self.convention.batched else x[None]
        return x[:, None] if self.convention.layout == "b,n,d" and x.ndim == 3 else x


def _boundaries(segments: Array) -> Array:
    """Where each sequence of the first item begins, and where the last one ends."""
    return np.flatnonzero(np.diff(segments[0], prepend=0, append=0))
