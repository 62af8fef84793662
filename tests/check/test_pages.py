"""Functions that read keys and values from pages get pages in any order, with NaN in rows that no item has."""

import pytest
import torch

from attend.check import compare


def rows_of(cache, table, length):
    """The rows of one item [length, heads, head_dim], from its pages."""
    return torch.cat([cache[int(page)] for page in table])[:length]


def read_pages(q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False, rows=rows_of):
    """As flash_attn_with_kvcache: [b, n, h, d], causality aligned at the last key of each item; pages or whole keys."""
    output = torch.zeros(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for item, query in enumerate(q):
        length = k_cache.shape[1] if cache_seqlens is None else int(cache_seqlens[item])
        if block_table is None:
            key, value = k_cache[item, :length], v_cache[item, :length]
        else:
            key, value = (rows(cache, block_table[item], length) for cache in (k_cache, v_cache))
        scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        if causal:
            later = torch.ones(len(query), length).triu(1 + length - len(query)).bool()
            scores = scores.masked_fill(later, -torch.inf)
        output[item] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), value)
    return output


def only_pages(q, k_cache, v_cache, block_table, cache_seqlens):
    return read_pages(q, k_cache, v_cache, cache_seqlens, block_table)


def always_pages(q, k_cache, v_cache, cache_seqlens=None, block_table=None):
    """Its table is optional by its signature alone."""
    return read_pages(q, k_cache, v_cache, cache_seqlens.long(), block_table.long())


def beyond_the_end(q, k_cache, v_cache, block_table, cache_seqlens):
    """The weights of rows beyond the end are 0, and their values are multiplied by them."""
    key, value = (cache[block_table].flatten(1, 2) for cache in (k_cache, v_cache))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, key) * q.shape[-1] ** -0.5
    beyond = torch.arange(key.shape[1]) >= cache_seqlens[:, None]
    weights = scores.masked_fill(beyond[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def consecutive(q, k_cache, v_cache, block_table, cache_seqlens):
    """The first entry of the table is read alone."""

    def rows(cache, table, length):
        return torch.cat([cache[(int(table[0]) + i) % len(cache)] for i in range(len(table))])[:length]

    return read_pages(q, k_cache, v_cache, cache_seqlens, block_table, rows=rows)


def one_more(q, k_cache, v_cache, block_table, cache_seqlens):
    """Reads the row after the last one."""
    return read_pages(q, k_cache, v_cache, cache_seqlens + 1, block_table)


def twice_the_scale(q, k_cache, v_cache, cache_seqlens=None, block_table=None):
    return read_pages(q * (1 if block_table is None else 2), k_cache, v_cache, cache_seqlens, block_table)


@pytest.mark.parametrize(
    ("function", "found"),
    [(only_pages, "its axes are [b,n,h,d]"), (always_pages, "it gets pages of 16 keys in every call")],
)
def test_right_functions_agree_in_all_calls(function, found):
    comparison = compare(function, framework="torch", longest=257)
    assert comparison.is_complete and "block_table" in comparison.tried, f"\n{comparison}"
    assert found in comparison.conventions


def test_a_function_that_is_like_flash_attention_gets_whole_keys_and_pages_of_any_size():
    comparison = compare(read_pages, like="flash_attn_with_kvcache", framework="torch", page_size=5, longest=33)
    assert comparison.agrees and {"block_table", "cache_seqlens", "causal"} <= {*comparison.tried}, f"\n{comparison}"
    assert comparison.parameters == ("rows",)
    cases = [x.case for x in comparison.results]
    assert {"no mask", "block_table", "block_table with padded keys"} <= {*cases}


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (beyond_the_end, "rows of pages that no item has change the output: it is right if they are 1, and not if they are NaN"),
        (consecutive, "it is right if the pages of an item follow one another, and not in another order"),
    ],
)
def test_what_is_wrong_with_pages_alone_is_told(function, hint):
    comparison = compare(function, framework="torch", longest=65)
    assert comparison.first.hint == hint, f"\n{comparison}"


def test_a_row_too_many_is_no_question_of_its_numbers():
    comparison = compare(one_more, framework="torch", longest=33)
    assert not comparison.agrees and "NaN" not in comparison.first.hint, f"\n{comparison}"


def test_calls_with_pages_alone_are_wrong():
    comparison = compare(twice_the_scale, framework="torch", longest=33)
    assert {x.case for x in comparison.results if x.agrees is False} == {"block_table", "block_table with padded keys"}, f"\n{comparison}"


def one_query(query, key_cache, value_cache, block_tables, seq_lens, scale=None):
    """As vLLM's kernels for decoding: the query is [b, h, d]."""
    return read_pages(query[:, None], key_cache, value_cache, seq_lens, block_tables, scale)[:, 0]


def one_query_without_its_last_page(query, key_cache, value_cache, block_tables, seq_lens):
    """A last page that is full is left out."""
    return one_query(query, key_cache, value_cache, block_tables, torch.where(seq_lens % 16 == 0, seq_lens - 16, seq_lens))


def test_what_takes_one_query_of_each_item_gets_each_query_as_an_item():
    right = compare(one_query, framework="torch", longest=257)
    assert right.is_complete and {"block_tables", "scale"} <= {*right.tried} and right.keys == 257, f"\n{right}"
    assert "it takes one query of each item, [b,h,d], and keys [b,n,h,d]" in right.conventions
    wrong = compare(one_query_without_its_last_page, framework="torch", longest=65)
    assert {x.case for x in wrong.results if x.agrees is False} == {f"7 queries, {keys} keys" for keys in (16, 32, 64)}, f"\n{wrong}"
    assert "; of the lengths, wrong: those with whole tiles of 16 keys, 7 queries, 16 keys" in wrong.first.hint
