"""Keys and values in pages, for candidates that take a table of the pages of each item."""

import numpy as np

from attend.tensors import Array


def page_table(of_item: Array, page_size: int, *, in_order: bool) -> tuple[Array, Array]:
    """The pages of the rows of each item, and of those which are the item's, `of_item` [b, n] of booleans: each [b, pages of an item].

    The pages of the items are mixed, unless they are `in_order`. In the second table, the page after the last one, which no item has,
    stands beyond an item's end.
    """
    items, rows = of_item.shape
    begins = np.arange(0, rows, page_size)
    pages = np.arange(items * len(begins) + 1)
    *order, unused = pages if in_order else np.random.default_rng(rows).permutation(pages)
    table = np.reshape(order, (items, len(begins)))
    return table, np.where(begins < of_item.sum(-1, keepdims=True), table, unused)


def in_pages(x: Array, of_item: Array, table: Array, page_size: int, unused: float) -> Array:
    """Rows [b, n, width] in pages [pages, page_size, width], as the first of the tables says; rows that no item has are `unused`."""
    (items, rows, width), count = x.shape, table.shape[1]
    padded = np.full((items, count * page_size, width), unused)
    padded[:, :rows] = np.where(of_item[..., None], x, unused)
    pages = np.full((table.size + 1, page_size, width), unused)
    pages[table] = padded.reshape(items, count, page_size, width)
    return pages
