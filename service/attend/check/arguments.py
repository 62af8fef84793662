"""Makes the arguments of a candidate's calls: arrays in its framework, layout and mask convention; and reads what it returns."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from attend.check.arrays import as_array
from attend.check.cases import CaseKind, CheckCase
from attend.check.convention import POLARITY_OF, ROPE_TABLES, Convention, Polarity
from attend.check.layer import Layer
from attend.check.pages import in_pages, page_table
from attend.check.rope_tables import turns
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
    (
        *("mask", "padding", "lengths", "segments", "boundaries", "page_table", "cache", "use_cache"),
        *("causal", "scale", "softcap", "window", "groups", "dropout"),
    )
)

LAYOUTS = {  # places of the axes b, h, n, d
    "b,h,n,d": (0, 1, 2, 3),
    "b,n,h,d": (0, 2, 1, 3),
    "n,b,h,d": (2, 0, 1, 3),
    "b,h,d": (0, 2, 1, 3),  # of the keys; the query has one row, without an axis
}
VIEWS = {"query": 3, "key": 1, "value": 2}  # numbers after each row, in calls with views


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The parameters of a candidate, and what they get."""

    signature: inspect.Signature
    roles: dict[str, str]  # role -> parameter
    required: frozenset[str]  # roles of the parameters that every call has to pass
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
    new_cache: Callable[[], Any] | None = None  # makes the cache of the first call, which calls change in place

    @property
    def paged(self) -> bool:
        """Whether keys and values are passed in pages in every call."""
        return self.convention.paged or "page_table" in self.required

    def polarity(self, role: str) -> Polarity:
        """What true in the mask of the role mask or padding means."""
        means: Polarity | None = getattr(self.convention, f"{role}_means")
        return means or POLARITY_OF.get(self.roles[role], "attend")

    def mask_role(self, kind: CaseKind) -> str | None:
        """The role of the parameter that takes the mask of such a case; None where the candidate has none, or the case is plain."""
        over_pairs = self.convention.mask_shape not in ("b,k", "b,1,1,k")
        roles = (role for role in MASKS[kind][0] if role in self.roles)
        unfit = {"boundaries"} if self.convention.batched else set()  # they are of rows without a batch
        unfit |= {"mask"} if not over_pairs and kind != "padding" else set()
        return next((role for role in roles if role not in unfit), None)

    def values(self, case: CheckCase, more: Mapping[str, Any]) -> dict[str, Any]:
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
        if role in ("query", "key", "value"):
            return self._input(self.in_layout(getattr(case, role), role, case), role, case)
        if role in ("mask", "padding") and case.numbers is not None:
            return self._tensor(self._in_mask_shape(case.numbers, role), self.dtype)
        if role in ("mask", "padding", "lengths"):
            mask = case.mask if takes_mask else case.passed.get(role, np.ones_like(case.mask))
            return self._mask(mask, role) if role != "lengths" else self._tensor(self._unbatched(mask[:, 0].sum(axis=-1)), "int64")
        if role in self.matrices:
            matrix = self.matrices[role]
            return self._tensor(matrix.T if is_matrix(role) and self.convention.orientation == "in,out" else matrix, self.dtype)
        if role in ("cache", "use_cache", "first_position"):
            return {"cache": self.empty_cache(), "use_cache": None, "first_position": case.first_row}[role]
        if (integers := self._integers(role, case)) is not None:
            return integers
        is_training = "dropout" in case.passed
        plain = {
            "training": is_training,
            "dropout": 0.0,
            "heads": self.heads,
            "key_heads": self.kv_heads,
            "causal": takes_mask or self.convention.causal,
            "return_weights": True,
            "softcap": 0.0,
            "window": (-1, -1),
            "module": SimpleNamespace(num_key_value_groups=self.heads // self.kv_heads, is_causal=False, training=is_training),
        }
        return plain.get(role, False)

    def _in_pages(self, role: str, case: CheckCase) -> Any:
        """Keys or values in pages, in the layout of the candidate; or the table of the pages of each item."""
        rows = case.mask[:, 0] if self.mask_role(case.kind) == "lengths" else np.ones(case.key.shape[:2], bool)
        table, of_item = page_table(rows, self.convention.page_size, in_order=self.in_order)
        if role == "page_table":
            return self._tensor(of_item, "int32")
        pages = in_pages(getattr(case, role), rows, table, self.convention.page_size, self.unused)
        return self._tensor(self.in_layout(pages, role, case), self.dtype)

    def _rope_tables(self, role: str, case: CheckCase) -> Any:
        """The cosines, the sines, or both of the angles of the case's rows, in the axes that the candidate takes."""
        rows = case.first_row + np.arange(case.query.shape[1])
        tables = turns(case.passed[role], rows, self.convention.rope_tables or "n,d/2", len(case.query))
        if role == "turns":
            return self._tensor(tables, "complex128" if self.dtype == "float64" else "complex64")
        cosines, sines = (self._tensor(x, self.dtype) for x in (tables.real, tables.imag))
        return {"cosines": cosines, "sines": sines, "cosines_and_sines": (cosines, sines)}[role]

    def _integers(self, role: str, case: CheckCase) -> Any:
        """The argument of integers for a role; None for other roles."""
        rows = case.first_row + np.arange(case.query.shape[1])
        segments = np.ones(case.query.shape[:2]) if case.segments is None else case.segments
        if role in ("boundaries", "key_boundaries", "max_queries", "max_keys"):
            sequences = 1 + np.arange(max(segments[0].max(), case.segments_of_keys[0].max()) + 1)
            of_rows = segments if role in ("boundaries", "max_queries") else case.segments_of_keys
            bounds = np.searchsorted(of_rows[0], sequences)  # where each sequence of the first item begins, and the last one ends
            return int(np.diff(bounds).max()) if role.startswith("max") else self._tensor(bounds, "int32")
        if role in ("segments", "positions"):
            positions = np.broadcast_to(rows, segments.shape) if case.positions is None else case.positions
            return self._tensor(self._unbatched(segments if role == "segments" else positions), "int64")
        return self._tensor(rows, "int64") if role == "cache_positions" else None

    def in_layout(self, x: Array, role: str, case: CheckCase) -> Array:
        """A query, key or value [b, n, width] of a case in the layout of the candidate."""
        if self.heads_given and self.convention.layout != "b,n,d":
            heads = case.fields.get("num_heads", self.heads) if role == "query" else case.fields.get("num_kv_heads", self.kv_heads)
            x = np.transpose(Layer.split_heads(x, heads), LAYOUTS[self.convention.layout])
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
        """[b, q, k] in the shape that the parameter takes; masks of each head stay [b, h, q, k]."""
        if mask.ndim == 4:
            return self._unbatched(mask)
        shape = "b,k" if role == "padding" else self.convention.mask_shape
        if shape == "q,k":
            return np.asarray(mask[0])
        per_item: dict[str, Array] = {
            "b,k": mask[:, 0],
            "b,q,k": mask,
            "b,1,q,k": mask[:, None],
            "b,h,q,k": np.repeat(mask[:, None], self.heads, axis=1),
            "b*h,q,k": np.repeat(mask, self.heads, axis=0),
            "b,1,1,k": mask[:, None, :1],
        }
        return self._unbatched(per_item[shape])

    def _input(self, x: Array, role: str, case: CheckCase) -> Any:
        """A query, key or value: the first numbers of longer rows in a case with views, and in one with groups of heads the first half of
        an array that ends with NaN, since a kernel that knows no groups reads beyond its keys."""
        if case.views:
            more = VIEWS[role]
            return self._tensor(np.concatenate([x, np.ones((*x.shape[:-1], more))], axis=-1), self.dtype)[..., :-more]
        if case.group == "groups" and self.framework in ("torch", "numpy"):  # whose kernels may be given addresses
            return self._tensor(np.concatenate([x.ravel(), np.full(x.size, np.nan)]), self.dtype)[: x.size].reshape(x.shape)
        return self._tensor(x, self.dtype)

    def _tensor(self, x: Array, dtype: str) -> Any:
        return as_array(x, dtype, self.framework, self.device)

    def as_output(self, x: Array) -> Array:
        """What the candidate returned as [b, q, width], if it has the right shape."""
        x = x if self.convention.batched else x[None]
        x = x[:, None] if self.convention.takes_one_query and x.ndim == 3 else x
        axes = LAYOUTS.get(self.convention.output_layout or self.convention.layout)
        if self.heads_given and x.ndim == 4 and axes is not None:
            return Layer.merge_heads(np.transpose(x, np.argsort(axes)))
        return x.swapaxes(0, 1) if not self.batch_first and self.convention.batched and x.ndim == 3 else x

    def _as_weights(self, x: Array) -> Array:
        x = x if self.convention.batched else x[None]
        return x[:, None] if self.convention.layout == "b,n,d" and x.ndim == 3 else x

    def empty_cache(self) -> Any:
        return None if self.new_cache is None else self.new_cache()
