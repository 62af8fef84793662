"""Calls a candidate: its adapter takes a case, passes arrays in the candidate's framework, layout and mask convention, and converts the
result to NumPy arrays in the reference's.

An exception of the candidate becomes a `CallFailed` that shows the arguments, since a mask of another shape or dtype than it expects is the
usual cause.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np

from attend.attention.reference.forward import Layer
from attend.check.cases import CheckCase
from attend.check.convention import Convention, Polarity, find_roles, mask_polarity
from attend.check.weights import is_matrix
from attend.tensors import BY_TORCH, Array

# kind of case -> roles of the parameters that may take its mask, and their description
MASKS: dict[str, tuple[tuple[str, ...], str]] = {
    "plain": ((), ""),
    "mask": (("mask",), "a mask over queries and keys"),
    "causal": (("mask", "causal"), "such a mask or is_causal"),
    "padding": (("padding", "lengths", "mask"), "a mask, key mask or lengths"),
    "segments": (("segments", "boundaries", "mask"), "segments, or a mask over queries and keys"),
}

ARRAYS = {"jax": ("jax.numpy", "asarray"), "mlx": ("mlx.core", "array")}  # frameworks, and what makes their arrays
NO_PARAMETER = "no parameter is known as"  # the beginning of the reason why a case is not tried
NO_POSITIONS = "it is always causal, and q != k leaves the positions of its queries open; pass query_offset"


class CallFailed(Exception):
    """The candidate raised; the message has its exception and the arguments."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The candidate's result in the reference's layout, as float64; `dtype` is that of its output."""

    output: Array  # [b, q, d_model] if it has the right shape
    attention_weights: Array | None  # [b, h, q, k] if they have the right shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """A candidate's function, and how it is called."""

    function: Callable[..., Any]
    signature: inspect.Signature
    roles: dict[str, str]  # role -> parameter
    polarities: dict[str, Polarity]  # of the roles mask and padding
    convention: Convention
    framework: str
    dtype: str
    device: Any = None
    batch_first: bool = True
    heads: int = 1
    kv_heads: int = 1
    heads_given: bool = False  # whether query, key and value are passed as heads, already projected
    matrices: Mapping[str, Array] = field(default_factory=dict)  # canonical weights, for a function that takes them as arguments
    new_cache: Callable[[], Any] | None = None  # makes the cache of the first call, which calls change in place

    @property
    def required(self) -> set[str]:
        """The roles of the parameters that every call has to pass."""
        return {role for role, name in self.roles.items() if self.signature.parameters[name].default is inspect.Parameter.empty}

    def skip_reason(self, case: CheckCase) -> str | None:
        """Why the candidate cannot be called on this case; None if it can."""
        if case.is_cross and "key" not in self.roles:
            return "it takes one input"
        if case.is_cross and self.required & {"segments", "boundaries"}:
            return "the sequences that it takes have as many keys as queries"
        if case.is_cross and self.convention.causal and self.convention.query_offset is None:
            return NO_POSITIONS
        if case.chunks and not self.convention.causal:
            return "only an always causal one is decoded; pass causal=true"
        if case.kind == "causal" and self.convention.causal:
            return "it is causal in every case"
        if case.kind != "plain" and self._mask_role(case) is None:
            return f"{NO_PARAMETER} {MASKS[case.kind][1]}; if there is one, pass arguments={{…}}"
        return None

    def call(self, case: CheckCase) -> CandidateResult:
        """Call the candidate, or decode with it. CallFailed: it raised. ValueError: its result is no array."""
        if not case.chunks:
            return self._result(self._call(case, {}))
        results, cache, taken_back = [], self._empty_cache(), case.rolled_back
        for part in case.parts:
            returned = self._call(part, {"cache": cache, "use_cache": True})
            results.append(self._result(returned))
            cache = self._cache_after(returned, cache)
            if taken_back is not None:
                cache, taken_back = self._after_rows_that_are_taken_back(taken_back, cache), None
        return CandidateResult(np.concatenate([x.output for x in results], axis=1), None, results[0].dtype)

    def _empty_cache(self) -> Any:
        return None if self.new_cache is None else self.new_cache()

    def _cache_after(self, returned: Any, cache: Any) -> Any:
        """The cache after a call: the last value that it returned, or the one that it was given and changed. ValueError: there is none."""
        if "cache" not in self.roles:  # the candidate keeps it
            return None
        last = returned[-1] if isinstance(returned, tuple | list) and len(returned) > 1 else None
        if self.new_cache is not None:
            return last if isinstance(last, type(cache)) else cache
        if last is None:
            raise ValueError("expected a tuple that ends with the cache; pass new_cache=… if calls change the cache in place")
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
        values = self._arguments(case) | {self.roles[role]: value for role, value in more.items() if role in self.roles}
        ordered = {name: values[name] for name in self.signature.parameters if name in values}
        bound = inspect.BoundArguments(self.signature, ordered)
        try:
            return self.function(*bound.args, **bound.kwargs)
        except Exception as error:
            called = ", ".join(f"{name} {_describe(value)}" for name, value in ordered.items())
            raise CallFailed(f"{type(error).__name__}: {error}; called with {called}") from error

    def _result(self, result: Any) -> CandidateResult:
        """The output, and the weights if they were returned. ValueError: it is no array."""
        parts = result if isinstance(result, tuple | list) else (result,)
        if not parts or not hasattr(parts[0], "dtype"):
            raise ValueError(f"expected an array or a tuple (output, weights), got {type(parts[0] if parts else result).__name__}")
        weights = parts[1] if len(parts) > 1 and hasattr(parts[1], "dtype") else None
        dtype = _dtype_of(parts[0])
        return CandidateResult(
            self._as_output(_as_float64(parts[0])), None if weights is None else self._as_weights(_as_float64(weights)), dtype
        )

    def _mask_role(self, case: CheckCase) -> str | None:
        """The role of the parameter that takes the mask of a case; None where the candidate has none, or the case is plain."""
        over_pairs = self.convention.mask_shape != "b,k"
        roles = (role for role in MASKS[case.kind][0] if role in self.roles)
        unfit = {"boundaries"} if self.convention.batched else set()  # they are of rows without a batch
        unfit |= {"mask"} if not over_pairs and case.kind != "padding" else set()
        return next((role for role in roles if role not in unfit), None)

    def _arguments(self, case: CheckCase) -> dict[str, Any]:
        """Parameter -> argument. A mask that the case does not have is passed only if it is required, and blocks nothing."""
        mask_role = self._mask_role(case)
        optional = {"mask", "padding", "lengths", "segments", "boundaries", "cache", "use_cache"} - self.required - {mask_role}
        return {name: self._argument(role, case, role == mask_role) for role, name in self.roles.items() if role not in optional}

    def _argument(self, role: str, case: CheckCase, takes_mask: bool) -> Any:
        """The argument for a role. `takes_mask`: whether this parameter takes the mask of the case."""
        mask = case.mask if takes_mask else np.ones_like(case.mask)
        if role in ("query", "key", "value"):
            return self._tensor(self._in_layout(getattr(case, role), self.heads if role == "query" else self.kv_heads), self.dtype)
        if role in ("mask", "padding"):
            return self._mask(mask, role)
        if role in self.matrices:
            matrix = self.matrices[role]
            return self._tensor(matrix.T if is_matrix(role) and self.convention.orientation == "in,out" else matrix, self.dtype)
        segments = np.ones(case.query.shape[:2]) if case.segments is None else case.segments
        integers = {
            "lengths": mask[:, 0].sum(axis=-1),
            "segments": segments,
            "boundaries": np.flatnonzero(np.diff(segments, prepend=0, append=0))[None],
            "positions": np.broadcast_to(case.first_row + np.arange(case.query.shape[1]), case.query.shape[:2]),
        }
        if role == "cache":
            return self._empty_cache()
        if role == "use_cache":
            return None
        if role == "first_position":
            return case.first_row
        if role == "cache_positions":
            return self._tensor(case.first_row + np.arange(case.query.shape[1]), "int64")
        if role in integers:
            return self._tensor(self._unbatched(integers[role]), "int64")
        return {"heads": self.heads, "causal": takes_mask}.get(role, role == "return_weights")

    def _in_layout(self, x: Array, heads: int) -> Array:
        """[b, n, width] in the layout of the candidate."""
        if self.heads_given and self.convention.layout != "b,n,d":
            x = Layer.split_heads(x, heads)
            x = x if self.convention.layout == "b,h,n,d" else x.swapaxes(1, 2)
        elif self.convention.batched and not self.batch_first:
            x = x.swapaxes(0, 1)
        return self._unbatched(x)

    def _unbatched(self, x: Array) -> Array:
        return x if self.convention.batched else x[0]

    def _mask(self, mask: Array, role: str) -> Any:
        """A mask [b, q, k], true = may attend, in the shape and polarity of the candidate."""
        shape = "b,k" if role == "padding" else self.convention.mask_shape
        per_item = {"b,k": mask[:, 0], "b,q,k": mask, "b,1,q,k": mask[:, None], "b,h,q,k": np.repeat(mask[:, None], self.heads, axis=1)}
        mask = mask[0] if shape == "q,k" else self._unbatched(per_item[shape])
        if self.polarities[role] == "add":
            return self._tensor(np.where(mask, 0.0, -np.inf), self.dtype)
        dtype = {"bool": "bool", "int": "int64", "float": self.dtype}[self.convention.mask_dtype]
        return self._tensor(mask if self.polarities[role] == "attend" else ~mask, dtype)

    def _tensor(self, x: Array, dtype: str) -> Any:
        if self.framework == "torch":
            import torch

            return torch.tensor(x, dtype=getattr(torch, dtype), device=self.device)
        array = x.astype(BY_TORCH[dtype].numpy if dtype in BY_TORCH else dtype)
        return array if self.framework == "numpy" else _array_function(self.framework)(array)

    def _as_output(self, x: Array) -> Array:
        x = x if self.convention.batched else x[None]
        if self.heads_given and x.ndim == 4:
            return Layer.merge_heads(x if self.convention.layout == "b,h,n,d" else x.swapaxes(1, 2))
        return x.swapaxes(0, 1) if not self.batch_first and self.convention.batched and x.ndim == 3 else x

    def _as_weights(self, x: Array) -> Array:
        x = x if self.convention.batched else x[None]
        return x[:, None] if self.convention.layout == "b,n,d" and x.ndim == 3 else x


def make_adapter(candidate: Any, convention: Convention, framework: str, heads: int | None) -> Adapter:
    """The adapter of an instance or function. ValueError: its parameters or masks are ambiguous."""
    torch = sys.modules.get("torch")
    polarity: Polarity | None = None  # of torch's own masks
    if torch is not None and candidate is torch.nn.functional.scaled_dot_product_attention:
        known = {"query": "query", "key": "key", "value": "value", "attn_mask": "mask"}
        convention, polarity = replace(convention, arguments=known | dict(convention.arguments)), "attend"
    elif torch is not None and isinstance(candidate, torch.nn.MultiheadAttention):
        polarity = "block"
    convention = replace(convention, mask_means=convention.mask_means or polarity, padding_means=convention.padding_means or polarity)
    function, signature = _function_and_signature(candidate, convention)
    roles = find_roles(signature, convention.arguments)
    polarities: dict[str, Polarity] = {
        r: mask_polarity(convention, roles[r], padding=r == "padding") for r in ("mask", "padding") if r in roles
    }
    first = next(iter(candidate.parameters()), None) if is_module(candidate) else None
    dtype = convention.dtype or ("float64" if framework == "numpy" else "float32")
    return Adapter(
        function=function,
        signature=signature,
        roles=roles,
        polarities=polarities,
        convention=convention,
        framework=framework,
        dtype=dtype if first is None else _dtype_of(first),
        device=convention.device if first is None else first.device,
        batch_first=(getattr(candidate, "batch_first", True) if convention.batch_first is None else convention.batch_first) is not False,
        heads=heads or 1,
    )


def _function_and_signature(candidate: Any, convention: Convention) -> tuple[Callable[..., Any], inspect.Signature]:
    """The function to call, and its parameters. A builtin has no signature: its parameters are those in the option `arguments`."""
    if convention.method is not None:
        function = described = getattr(candidate, convention.method)
    elif is_module(candidate):
        function, described = candidate, candidate.forward
    else:
        methods = [getattr(candidate, name) for name in ("forward", "call") if hasattr(candidate, name)]
        if not callable(candidate) and not methods:
            raise ValueError(f"expected something to call, got {candidate!r}: pass method=…")
        function = described = candidate if callable(candidate) else methods[0]
    try:
        return function, inspect.signature(described)
    except ValueError:
        defaults = {
            name: inspect.Parameter.empty if role in ("query", "key", "value") else None for name, role in convention.arguments.items()
        }
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return function, inspect.Signature([inspect.Parameter(name, kind, default=default) for name, default in defaults.items()])


def is_module(candidate: Any) -> bool:
    torch = sys.modules.get("torch")  # a module exists only where torch was imported
    return torch is not None and isinstance(candidate, torch.nn.Module)


def _as_float64(x: Any) -> Array:
    """A copy in NumPy of a tensor, or of whatever NumPy can read: by `__array__`, DLPack or the buffer protocol."""
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        x = x.detach().cpu().double().numpy()
    elif not hasattr(x, "__array__") and hasattr(x, "__dlpack__"):
        x = np.from_dlpack(x)
    return np.array(x, np.float64)


def _array_function(framework: str) -> Callable[[Array], Any]:
    """The function of a framework that makes its arrays of NumPy's."""
    module, name = ARRAYS[framework]
    function: Callable[[Array], Any] = getattr(import_module(module), name)
    return function


def _dtype_of(x: Any) -> str:
    """The name of a dtype: float32 of torch.float32, of mlx.core.float32 and of NumPy's float32."""
    return str(x.dtype).rpartition(".")[2]


def _describe(x: Any) -> str:
    return f"{list(x.shape)} {_dtype_of(x)}" if hasattr(x, "dtype") else repr(x)
