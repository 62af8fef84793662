"""`KeyValueCache`: the projected keys and values of one sequence, in pages of rows, for decoding (a "KV cache").

All pages have the same number of rows, those that fit into PAGE_BYTES, except that the only page of a short cache starts with FIRST_ROWS
and is replaced by one of twice as many when it is full. Forks share pages. A shared page is copied before rows are written to it. A page
that a layer's window hides from all later queries is freed, and leaves a gap.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from service.attention.weights import torch_dtype
from service.errors import InvalidRequest
from service.spec import LayerSpec

FIRST_ROWS = 16  # of the page of a new cache
PAGE_BYTES = 1 << 22  # most bytes of a page, unless FIRST_ROWS rows have more


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
    def create(self, owner: str, start: int, rows: int, widths: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> Page:
        """A page for rows of tensors; `widths` maps their names to heads and width."""
        tensors = {name: torch.empty(heads, rows, width, dtype=dtype, device=self.device) for name, (heads, width) in widths.items()}
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
        self.spec, self.pool, self.owner, self.dtype = spec, pool, owner, torch_dtype(spec.dtype)
        self.widths = cached_widths(spec)
        self.length = 0
        self._page_rows = max(FIRST_ROWS, PAGE_BYTES // max(1, self.row_bytes))
        self._pages: list[Page | None] = []  # None: freed

    @property
    def row_bytes(self) -> int:
        return sum(heads * width for heads, width in self.widths.values()) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Bytes of its pages, shared ones included."""
        return sum(page.size for page in self._pages if page is not None)

    @property
    def first(self) -> int:
        """The first row that is not freed."""
        return next((page.start for page in self._pages if page is not None), self.length if self._pages else 0)

    def missing_bytes(self, stop: int) -> int:
        """Bytes of the pages that `reserve(stop)` creates."""
        return sum(rows for _, rows in self._new_pages(stop)) * self.row_bytes

    def reserve(self, stop: int) -> None:
        """Create pages so that rows from `length` to `stop` can be written: new ones, and copies of shared or too short ones."""
        for number, rows in self._new_pages(stop):
            page = self.pool.create(self.owner, number * self._page_rows, rows, self.widths, self.dtype)
            if number == len(self._pages):
                self._pages.append(page)
            elif (before := self._pages[number]) is not None:
                page.copy(before, self.length)
                self.pool.release(before)
                self._pages[number] = page

    def _new_pages(self, stop: int) -> list[tuple[int, int]]:
        """Number and rows of each page that `reserve(stop)` creates."""
        wanted = self._page_rows
        if stop <= wanted:
            wanted = min(wanted, max(FIRST_ROWS, 1 << (stop - 1).bit_length()))
        pages = []
        for number in range(self.length // self._page_rows, -(-stop // self._page_rows)):
            page = self._pages[number] if number < len(self._pages) else None
            if page is None or page.caches > 1 or page.stop < min(stop, (number + 1) * self._page_rows):
                pages.append((number, max(wanted, 0 if page is None else page.stop - page.start)))
        return pages

    @torch.inference_mode()
    def write(self, start: int, rows: Mapping[str, Tensor]) -> None:
        """Write rows [heads, n, width], for which pages are reserved, from row `start` on, and end the cache after them."""
        (count,) = {tensor.shape[1] for tensor in rows.values()}
        stop = start + count
        for page in self._pages:
            if page is not None and start < page.stop and page.start < stop:
                first, last = max(start, page.start), min(stop, page.stop)
                for name, tensor in page.tensors.items():
                    tensor[:, first - page.start : last - page.start] = rows[name][:, first - start : last - start]
        self.length = stop

    def restore(self, first: int, rows: Mapping[str, Tensor]) -> None:
        """Write rows into an empty cache from row `first` on, the first row of a page; those before it are freed ones.

        Pages must be reserved. Raises InvalidRequest unless a page begins with the row and the layer's window hides all rows before it.
        """
        (count,) = {tensor.shape[1] for tensor in rows.values()}
        if first % self._page_rows or first > min(first_visible(self.spec, first + count), first + count):
            expected = f"0, or a multiple of {self._page_rows} of which the layer's window hides all rows before it"
            raise InvalidRequest.where("/__metadata__/first", expected, str(first))
        self.write(first, rows)
        self._free(first)

    def truncate(self, length: int) -> None:
        """Drop the rows from `length` on, and the pages without any other row."""
        self.length = length
        while (len(self._pages) - 1) * self._page_rows >= length and self._pages:
            if (page := self._pages.pop()) is not None:
                self.pool.release(page)

    def fork(self, length: int) -> "KeyValueCache":
        """A cache with the first `length` rows, in the same pages."""
        copy = KeyValueCache(self.spec, self.pool, self.owner)
        copy.length = length
        pages = self._pages[: -(-length // self._page_rows)]
        copy._pages = [None if page is None else self.pool.share(page) for page in pages]
        return copy

    def free_hidden(self) -> None:
        """Free the pages that the layer's own window or chunks hide from every query at position `length` or later."""
        self._free(min(first_visible(self.spec, self.length), self.length))

    def _free(self, stop: int) -> None:
        """Free the pages of which all rows are before `stop`."""
        for i, page in enumerate(self._pages[: stop // self._page_rows]):
            if page is not None:
                self.pool.release(page)
                self._pages[i] = None

    def close(self) -> None:
        """Drop all rows."""
        self.truncate(0)

    def blocks(self, first: int, stop: int) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """The rows from `first` to `stop` page by page: their places, and views [heads, n, width] by name. Freed rows are left out."""
        for page in self._pages:
            if page is not None and first < page.stop and page.start < stop:
                rows = slice(max(first, page.start), min(stop, page.stop))
                inside = slice(rows.start - page.start, rows.stop - page.start)
                yield rows, {name: tensor[:, inside] for name, tensor in page.tensors.items()}

    @torch.inference_mode()
    def joined(self, first: int = 0) -> dict[str, Tensor]:
        """All rows from `first` on as tensors [heads, n, width]; freed rows are 0."""
        shapes = {name: (heads, self.length - first, width) for name, (heads, width) in self.widths.items()}
        whole = {name: torch.zeros(shape, dtype=self.dtype, device=self.pool.device) for name, shape in shapes.items()}
        for rows, tensors in self.blocks(first, self.length):
            for name, tensor in tensors.items():
                whole[name][:, rows.start - first : rows.stop - first] = tensor
        return whole


def cached_widths(spec: LayerSpec) -> dict[str, tuple[int, int]]:
    """Name of each cached tensor -> its heads and width. Latent attention caches what keys and values are expanded from."""
    if caches_latent(spec):
        assert spec.latent is not None
        return {"latent": (1, spec.latent.key_value_rank), "rope_key": (1, spec.latent.rope_key_dim)}
    return {"key": (spec.num_kv_heads, spec.head_dim), "value": (spec.num_kv_heads, spec.value_head_dim)}


def caches_latent(spec: LayerSpec) -> bool:
    """Whether caches of the layer have latent vectors and rotary keys, which determine its keys and values: not if qk_norm or RoPE changes
    the heads' keys after that."""
    return spec.latent is not None and "rope_key" not in spec.undefined_outputs


def first_visible(spec: LayerSpec, position: int) -> int:
    """The first key that the layer's own window and chunks leave to queries at this position or later; 0 if it has neither."""
    first = 0
    if spec.window is not None and spec.window.left is not None:
        first = max(first, position - spec.window.left)
    if spec.chunk_size is not None:
        first = max(first, position - position % spec.chunk_size)
    return first
