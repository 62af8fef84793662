"""`KeyValueCache`: the projected keys and values of one sequence, in pages of rows, for decoding (a "KV cache").

All pages have the same number of rows, those that fit into PAGE_BYTES, except that the only page of a short cache starts with FIRST_ROWS
and is replaced by one of twice as many when it is full. Forks share pages. A shared page is copied before rows are written to it. A page
that a layer's window hides from all later queries is freed, and leaves a gap.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attend.attention.dataflow import OF_KEYS, cached_values, needed
from attend.attention.numerics import torch_dtype
from attend.attention.program import program_of
from attend.errors import InvalidRequest
from attend.spec import LayerSpec

FIRST_ROWS = 16  # of the page of a new cache
PAGE_BYTES = 1 << 22  # most bytes of a page, unless FIRST_ROWS rows have more


class CachedTensor(NamedTuple):
    """A tensor of which a cache keeps a row [heads, width] for each key, in a datatype."""

    heads: int
    width: int
    dtype: str
    shared: bool  # whether its value in the program has no axis of heads; it then has one head here, and none in exported files
    value: str  # its name in the program


@dataclass(slots=True, eq=False)
class Page:
    """Rows start to stop of a cache: tensors [heads, rows, width] by name."""

    start: int
    stop: int
    tensors: dict[str, Tensor]
    owner: str
    caches: int = 1  # number of caches that have this page

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @torch.inference_mode()
    def copy(self, other: "Page", stop: int) -> None:
        """Copy the rows of another page that begins with the same row, before `stop`."""
        count = min(stop, other.stop) - self.start
        for name, tensor in self.tensors.items():
            tensor[:, :count] = other.tensors[name][:, :count]


class PagePool:
    """Creates the pages of the caches of one process, and counts their bytes for each owner."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used = self.shared = 0  # bytes of all pages, and of those of several caches
        self.of_owner: Counter[str] = Counter()

    @torch.inference_mode()
    def create(self, owner: str, start: int, rows: int, cached: Mapping[str, CachedTensor]) -> Page:
        """A page for rows of these tensors."""
        tensors = {
            name: torch.empty(one.heads, rows, one.width, dtype=torch_dtype(one.dtype), device=self.device) for name, one in cached.items()
        }
        page = Page(start, start + rows, tensors, owner)
        self.used += page.size
        self.of_owner[owner] += page.size
        return page

    def share(self, page: Page) -> Page:
        """The page, for one more cache."""
        page.caches += 1
        if page.caches == 2:
            self.shared += page.size
        return page

    def release(self, page: Page) -> None:
        """Drop the page from one cache; free it if no other cache has it."""
        page.caches -= 1
        if page.caches == 1:
            self.shared -= page.size
        elif not page.caches:
            self.used -= page.size
            self.of_owner[page.owner] -= page.size
            page.tensors = {}


class KeyValueCache:
    """The rows that one layer has projected for one sequence. `length`: number of rows."""

    def __init__(self, spec: LayerSpec, pool: PagePool, owner: str) -> None:
        self.spec, self.pool, self.owner = spec, pool, owner
        self.cached = cached_tensors(spec)
        self.length = 0
        self.largest_row = 1.0  # largest root mean square of a row of which a key was projected; at least 1, inf if unknown
        self.finite = True  # whether the rows of the last step are
        self._page_rows = max(FIRST_ROWS, PAGE_BYTES // max(1, self.row_bytes))
        self._pages: list[Page] = []
        self._freed = 0  # number of pages before them that are freed

    @property
    def row_bytes(self) -> int:
        return sum(one.heads * one.width * torch_dtype(one.dtype).itemsize for one in self.cached.values())

    @property
    def size(self) -> int:
        """Bytes of its pages, shared ones included."""
        return sum(page.size for page in self._pages)

    @property
    def first(self) -> int:
        """The first row that is not freed."""
        return self._freed * self._page_rows

    @property
    def pages(self) -> Sequence[Page]:
        """Its pages, shared ones included."""
        return self._pages

    def missing_bytes(self, stop: int) -> int:
        """Bytes of the pages that `reserve(stop)` creates."""
        return sum(rows for _, rows in self._new_pages(stop)) * self.row_bytes

    def reserve(self, stop: int) -> None:
        """Create pages so that rows from `length` to `stop` can be written: new ones, and copies of shared or too short ones."""
        for start, rows in self._new_pages(stop):
            page = self.pool.create(self.owner, start, rows, self.cached)
            i = start // self._page_rows - self._freed
            if i == len(self._pages):
                self._pages.append(page)
            else:
                page.copy(self._pages[i], self.length)
                self.pool.release(self._pages[i])
                self._pages[i] = page

    def _new_pages(self, stop: int) -> list[tuple[int, int]]:
        """First row and number of rows of each page that `reserve(stop)` creates."""
        if stop <= self.length:
            return []
        wanted = self._page_rows
        if stop <= wanted:
            wanted = min(wanted, max(FIRST_ROWS, 1 << (stop - 1).bit_length()))
        pages = []
        for start in range(self.length - self.length % self._page_rows, stop, self._page_rows):
            i = start // self._page_rows - self._freed
            page = self._pages[i] if i < len(self._pages) else None
            if page is None or page.caches > 1 or page.stop < min(stop, start + self._page_rows):
                pages.append((start, max(wanted, 0 if page is None else page.stop - page.start)))
        return pages

    @torch.inference_mode()
    def write(self, start: int, rows: Mapping[str, Tensor]) -> None:
        """Write rows [heads, n, width], for which pages are reserved, from row `start` on, and end the cache after them."""
        (count,) = {tensor.shape[1] for tensor in rows.values()}
        stop = start + count
        for page in reversed(self._pages):
            if page.stop <= start:
                break
            if page.start < stop:
                first, last = max(start, page.start), min(stop, page.stop)
                for name, tensor in page.tensors.items():
                    tensor[:, first - page.start : last - page.start] = rows[name][:, first - start : last - start]
        self.length = stop

    def begin(self, first: int, stop: int) -> None:
        """Let an empty cache, which will have rows up to `stop`, begin with row `first`, as if those before it were freed.

        Raises InvalidRequest unless a page begins with that row and the layer's window then hides all rows before it.
        """
        if first % self._page_rows or first > min(first_visible(self.spec, stop), stop):
            expected = f"0, or a multiple of {self._page_rows} of which the layer's window hides all rows before it"
            raise InvalidRequest.where("/__metadata__/first", expected, str(first))
        self.length, self._freed = first, first // self._page_rows

    def truncate(self, length: int) -> None:
        """Drop the rows from `length` on, and the pages without any other row."""
        self.length = length
        while self._pages and self._pages[-1].start >= length:
            self.pool.release(self._pages.pop())
        self._freed = min(self._freed, length // self._page_rows)

    def fork(self, length: int) -> "KeyValueCache":
        """A cache with the first `length` rows, in the same pages."""
        copy = KeyValueCache(self.spec, self.pool, self.owner)
        copy.length, copy.largest_row, copy._freed = length, self.largest_row, self._freed
        copy._pages = [self.pool.share(page) for page in self._pages if page.start < length]
        return copy

    def free_hidden(self) -> None:
        """Free the pages that the layer's own window or chunks hide from every query at position `length` or later."""
        hidden = min(first_visible(self.spec, self.length), self.length) // self._page_rows
        while self._freed < hidden:
            self.pool.release(self._pages.pop(0))
            self._freed += 1

    def close(self) -> None:
        """Drop all rows."""
        self.truncate(0)

    def blocks(self, first: int, stop: int) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """The rows from `first` to `stop` page by page: as a slice, and as views [heads, n, width] by name. Freed rows are left out."""
        for page in self._pages:
            if first < page.stop and page.start < stop:
                rows = slice(max(first, page.start), min(stop, page.stop))
                inside = slice(rows.start - page.start, rows.stop - page.start)
                yield rows, {name: tensor[:, inside] for name, tensor in page.tensors.items()}

    @torch.inference_mode()
    def joined(self, first: int = 0) -> dict[str, Tensor]:
        """All rows from `first` on as tensors [heads, n, width]; freed rows are 0."""
        count, device = self.length - first, self.pool.device
        joined = {
            name: torch.zeros(one.heads, count, one.width, dtype=torch_dtype(one.dtype), device=device) for name, one in self.cached.items()
        }
        for rows, tensors in self.blocks(first, self.length):
            for name, tensor in tensors.items():
                joined[name][:, rows.start - first : rows.stop - first] = tensor
        return joined


NAMES = {"key_projection": "key", "value_projection": "value"}  # of values of a program in caches; others have their own


@lru_cache(256)
def cached_tensors(spec: LayerSpec) -> dict[str, CachedTensor]:
    """Each cached tensor by name: the values of the program that depend on keys alone, where others are computed from them."""
    tensors: dict[str, CachedTensor] = {}
    for name, value in cached_values(spec.program).items():
        axes = value.axes.split(",")
        heads = 1 if axes[1] == "k" else spec.length_of(axes[1])
        tensors[NAMES.get(name, name)] = CachedTensor(heads, spec.length_of(axes[-1]), value.dtype or spec.dtype, axes[1] == "k", name)
    return tensors


def follows_from_cache(spec: LayerSpec, name: str) -> bool:
    """Whether an output of a call with a cache can be computed, without the inputs of its keys."""
    cached = [one.value for one in cached_tensors(spec).values()]
    program = program_of(spec, spec.features | {"bias"})
    return any(name in step.writes for step in program) and all(OF_KEYS.isdisjoint(step.reads) for step in needed(program, {name}, cached))


def as_values(cached: Mapping[str, CachedTensor], rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of a program, with a batch axis, of rows of a cache [heads, n, width]."""
    return {cached[name].value: tensor if cached[name].shared else tensor[None] for name, tensor in rows.items()}


def as_rows(cached: Mapping[str, CachedTensor], values: Mapping[str, Tensor], item: int) -> dict[str, Tensor]:
    """The rows of a cache [heads, n, width] of an item of the values of a program."""
    return {name: values[one.value][item : item + 1] if one.shared else values[one.value][item] for name, one in cached.items()}


def first_visible(spec: LayerSpec, position: int) -> int:
    """The first key that the layer's own window and chunks leave to queries at this position or later; 0 if it has neither.

    Of a layer with a step that reads all keys of a cache, whatever is visible, it is 0 too.
    """
    first = 0
    if spec.reads_hidden_keys:
        return first
    for interval in spec.intervals:
        if interval.left is not None:
            first = max(first, position - interval.left)
        if interval.chunk is not None:
            first = max(first, position - position % interval.chunk)
    return first
