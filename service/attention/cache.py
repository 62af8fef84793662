"""`KeyValueCache`: the projected keys and values of one sequence, in pages of rows, for decoding (a "KV cache").

The first page has FIRST_ROWS rows and each next one twice as many, up to PAGE_BYTES: so at most half of the memory of a cache is unused,
and a long cache has few pages. Forks share pages. A shared page is copied before rows are written to it. A page that a layer's window
hides from all later queries is freed, and leaves a gap.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from service.attention.weights import torch_dtype
from service.spec import LayerSpec

FIRST_ROWS = 16  # of the first page
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
        self._pages: list[Page | None] = []  # None: freed
        self._starts = [0]  # of each page, and of the next one

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
        copied = sum(page.size for page in self._pages if page is not None and self._is_written(page, stop))
        start, created = self._starts[-1], 0
        number = len(self._pages)
        while start + created < stop:
            created += self._rows_of_page(number)
            number += 1
        return copied + created * self.row_bytes

    def reserve(self, stop: int) -> None:
        """Create pages so that rows from `length` to `stop` can be written, and copy shared ones."""
        for i, page in enumerate(self._pages):
            if page is not None and self._is_written(page, stop):
                self._pages[i] = self._copy(page)
        while self._starts[-1] < stop:
            rows = self._rows_of_page(len(self._pages))
            self._pages.append(self.pool.create(self.owner, self._starts[-1], rows, self.widths, self.dtype))
            self._starts.append(self._starts[-1] + rows)

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

    def truncate(self, length: int) -> None:
        """Drop the rows from `length` on, and the pages without any other row."""
        self.length = length
        while self._pages and self._starts[-2] >= length:
            if (page := self._pages.pop()) is not None:
                self.pool.release(page)
            self._starts.pop()

    def fork(self, length: int) -> "KeyValueCache":
        """A cache with the first `length` rows, in the same pages."""
        copy = KeyValueCache(self.spec, self.pool, self.owner)
        copy.length = length
        for start, page in zip(self._starts, self._pages, strict=False):
            if start < length:
                copy._pages.append(None if page is None else self.pool.share(page))
        copy._starts = self._starts[: len(copy._pages) + 1]
        return copy

    def free_hidden(self) -> None:
        """Free the pages that the layer's own window or chunks hide from every query at position `length` or later."""
        first = first_visible(self.spec, self.length)
        for i, page in enumerate(self._pages):
            if page is not None and page.stop <= min(first, self.length):
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

    def _rows_of_page(self, number: int) -> int:
        """Rows of the page of that number."""
        return max(FIRST_ROWS, min(FIRST_ROWS << min(number, 32), PAGE_BYTES // max(1, self.row_bytes)))

    def _is_written(self, page: Page, stop: int) -> bool:
        """Whether `reserve` must copy the page: other caches have it, and rows from `length` to `stop` are in it."""
        return page.caches > 1 and self.length < page.stop and page.start < stop

    @torch.inference_mode()
    def _copy(self, page: Page) -> Page:
        """A page of this cache alone with the rows before `length`. Drops the shared one."""
        copy = self.pool.create(self.owner, page.start, page.stop - page.start, self.widths, self.dtype)
        for name, tensor in copy.tensors.items():
            tensor[:, : self.length - page.start] = page.tensors[name][:, : self.length - page.start]
        self.pool.release(page)
        return copy


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
