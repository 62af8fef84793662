"""Pages of a KV cache: their rows and bytes, forks and roll-backs, and the pages that a window frees."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attend.attention.cache import FIRST_ROWS, PAGE_BYTES, KeyValueCache, Page, PagePool, first_visible
from attend.errors import InvalidRequest
from attend.spec import LayerSpec
from support.decoding import rows_of, small_pages_of

SPECS = (
    {},
    {"window": {"left": 2}},
    {"window": {"left": 0, "right": 0}, "dtype": "float64"},
    {"chunk_size": 5, "num_kv_heads": 1},
    {"chunk_size": 3, "window": {"left": 1}},
    {"latent": {"key_value_rank": 5, "rope_key_dim": 2}, "dtype": "bfloat16"},
    {"indexer": {"num_heads": 2, "head_dim": 5, "top_k": 3}, "dtype": "float16"},
)


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    """Pages of few rows."""
    with small_pages_of(300):
        yield


def spec_of(**fields: Any) -> LayerSpec:
    return LayerSpec(**{"d_model": 12, "num_heads": 3, "value_head_dim": 7, **fields})


class Model:
    """A cache, and all rows that it should have; row i of each tensor is the number of the write."""

    def __init__(self, cache: KeyValueCache, rows: list[int]) -> None:
        self.cache, self.rows = cache, rows


class Caches(RuleBasedStateMachine):
    """Any order of appends, failed appends, roll-backs, forks and closes of several caches in one pool."""

    written = 0

    @initialize(spec=st.sampled_from(SPECS))
    def begin(self, spec: dict[str, Any]) -> None:
        self.pool, self.spec, self.models = PagePool(torch.device("cpu")), spec_of(**spec), []

    @rule()
    def create(self) -> None:
        if len(self.models) < 4:
            self.models.append(Model(KeyValueCache(self.spec, self.pool, "owner"), []))

    @precondition(lambda self: self.models)
    @rule(data=st.data(), count=st.integers(0, 13), is_kept=st.booleans())
    def append(self, data: st.DataObject, count: int, is_kept: bool) -> None:
        """`reserve` takes exactly the announced bytes at its peak; pages that no row was written to are dropped."""
        model = data.draw(st.sampled_from(self.models))
        cache, start = model.cache, len(model.rows)
        missing, created = cache.missing_bytes(start + count), self._created_by(cache, start + count)
        assert missing == created and (missing == 0 or count)
        if is_kept:
            self.written += 1
            shapes = {name: (heads, count, width) for name, (heads, width, *_) in cache.cached.items()}
            cache.write(start, {name: torch.full(shape, float(self.written % 97)) for name, shape in shapes.items()})
            model.rows += [self.written % 97] * count
        cache.truncate(len(model.rows))
        cache.free_hidden()

    def _created_by(self, cache: KeyValueCache, stop: int) -> int:
        """Reserve, and return the bytes of the pages that are created for it."""
        pages: list[Page] = []
        create = self.pool.create
        self.pool.create = lambda *args: pages.append(create(*args)) or pages[-1]  # type: ignore[method-assign,func-returns-value]
        cache.reserve(stop)
        del self.pool.create
        assert cache.missing_bytes(stop) == 0
        return sum(page.size for page in pages)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), is_fork=st.booleans())
    def fork_or_roll_back(self, data: st.DataObject, is_fork: bool) -> None:
        """To any length whose queries see no freed row."""
        model = data.draw(st.sampled_from(self.models))
        lengths = [n for n in range(len(model.rows) + 1) if model.cache.first <= first_visible(self.spec, n)]
        length = data.draw(st.sampled_from(lengths))
        if not is_fork:
            model.cache.truncate(length)
            del model.rows[length:]
        elif len(self.models) < 4:
            used = self.pool.used
            self.models.append(Model(model.cache.fork(length), model.rows[:length]))
            assert self.pool.used == used

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.models))
        model.cache.close()
        self.models.remove(model)

    @invariant()
    def rows_and_bytes_are_exact(self) -> None:
        """Every row that is not freed is the one last written, and the pool counts the bytes of its pages once each."""
        pages: dict[int, tuple[Page, int]] = {}
        for model in getattr(self, "models", []):
            cache, first = model.cache, model.cache.first
            assert cache.length == len(model.rows) and first <= first_visible(self.spec, cache.length)
            for tensor in rows_of(cache).values():
                expected = np.broadcast_to(np.array(model.rows[first:])[None, :, None], tensor.shape)
                np.testing.assert_array_equal(tensor.astype("f8"), expected)
            assert cache.size == sum(page.size for page in cache.pages)
            for page in cache.pages:
                pages[id(page)] = page, pages.get(id(page), (page, 0))[1] + 1
                assert page.size == (page.stop - page.start) * cache.row_bytes
        if hasattr(self, "pool"):
            assert self.pool.used == self.pool.of_owner["owner"] == sum(page.size for page, _ in pages.values())
            assert self.pool.shared == sum(page.size for page, count in pages.values() if count > 1)
            assert all(page.caches == count for page, count in pages.values())

    def teardown(self) -> None:
        for model in getattr(self, "models", []):
            model.cache.close()
        if hasattr(self, "pool"):
            assert self.pool.used == self.pool.shared == 0 and not any(self.pool.of_owner.values())


TestCaches = Caches.TestCase


def filled(length: int, **fields: Any) -> KeyValueCache:
    cache = KeyValueCache(spec_of(**fields), PagePool(torch.device("cpu")), "owner")
    cache.reserve(length)
    cache.write(0, {name: torch.rand(heads, length, width) for name, (heads, width, *_) in cache.cached.items()})
    return cache


@given(length=st.integers(0, 40), fields=st.sampled_from(SPECS))
def test_a_cache_that_begins_with_a_later_row_has_the_same_rows(length: int, fields: dict[str, Any]) -> None:
    """As an imported session may. No pages are created for the rows before it."""
    cache = filled(length, **fields)
    cache.free_hidden()
    copy = KeyValueCache(cache.spec, cache.pool, "copy")
    copy.begin(cache.first, length)
    copy.reserve(length)
    copy.write(cache.first, cache.joined(cache.first))
    assert (copy.first, copy.length) == (cache.first, length)
    for name, rows in rows_of(cache).items():
        np.testing.assert_array_equal(rows_of(copy)[name], rows)
    assert cache.pool.of_owner["copy"] <= cache.pool.of_owner["owner"]


@pytest.mark.parametrize("first", [1, 9, 12, 9998])
def test_a_cache_cannot_begin_within_a_page_or_with_a_row_that_queries_need(first: int) -> None:
    cache = KeyValueCache(spec_of(window={"left": 2}), PagePool(torch.device("cpu")), "owner")
    with pytest.raises(InvalidRequest, match="a multiple of 2 of which the layer's window hides"):
        cache.begin(first, 12)


@pytest.mark.parametrize(("length", "rows"), [(1, 16), (16, 16), (17, 32), (100, 128), (1024, 1024), (1025, 2048), (5000, 5120)])
def test_a_short_cache_has_one_small_page_and_a_long_one_few(length: int, rows: int) -> None:
    """With the page sizes of servers."""
    with small_pages_of(PAGE_BYTES, FIRST_ROWS):
        cache = KeyValueCache(LayerSpec(d_model=512, num_heads=8), PagePool(torch.device("cpu")), "owner")
        cache.reserve(length)
    assert cache.size == rows * 2 * 512 * 4
