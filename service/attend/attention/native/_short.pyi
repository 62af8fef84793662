from attend.tensors import Array

Masks = tuple[
    Array, int, int, int, Array | None, Array | None, Array | None, Array | None, Array | None, Array | None, Array | None, Array | None
]

variants: list[str]
"""The implementations that this processor can run, fastest first."""

class Layer:
    """Opaque: an implementation, and a copy of a layer's weights."""

def layer(width: int, num_heads: int, variant: str, weights: tuple[Array, ...], biases: tuple[Array, ...], /) -> Layer:
    """A layer from the float32 weights [width, width] and biases [width] of query, key, value and output.

    Raises ValueError if the sizes do not fit, or the variant is not one of `variants`.
    """

def attend(
    layer: Layer,
    items: int,
    queries: int,
    keys: int,
    scale: float,
    query: int,
    key: int,
    value: int,
    output: Array,
    weights: Array,
    masks: Masks = ...,
    /,
) -> bool:
    """Compute `output` [items, queries, width] and attention `weights` [items, heads, queries, keys], contiguous float32 arrays.

    `masks`: bool `fully_masked` [b, h, q], which is written; `left`, `right` and `chunk` of the visible keys around a position; and arrays,
    or None: positions and lengths, int64 [b, q]; attend_mask, bool [b, h, q, k]; attend_keys, bool [b, k]; query_segments [b, q] and
    key_segments [b, k], int64; bias [b, h, q, k] and head_scale [b, h, 1, 1], float32. Axes of these may be 1, for all.

    `query` [items, queries, width], `key` and `value` [items, keys, width] are the addresses of the first numbers of contiguous float32
    tensors, whose sizes the caller ensures. Returns whether all numbers of the output are finite. Raises ValueError if the other sizes do
    not fit.
    """

def attend_cache(
    variant: str,
    threads: int,
    kv_heads: int,
    group: int,
    width: int,
    scale: float,
    query: Array,
    pages: tuple[tuple[Array, Array, int, int], ...],
    bias: Array | None,
    output: Array,
    log_sum_exp: Array,
    /,
) -> bool:
    """Compute `output` [kv_heads, group, width] and `log_sum_exp` [kv_heads, group] of one query, in contiguous float32 arrays.

    A page is key and value, [kv_heads, n, width], and the first row and the end of those rows that the query attends to; at least one row.
    `bias` [kv_heads, group, these rows of all pages] is added to the scores.
    `width` is at most 256. Returns whether all numbers of the output are finite: they are not where all scores of a head
    overflow. Raises ValueError if the sizes do not fit, or the variant is not one of `variants`.
    """
