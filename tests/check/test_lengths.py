"""Calls of many lengths, widths and positions: what goes wrong only there is found, and the report says how far it looked."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attend.check import compare
from attend.spec import LayerSpec


def attention(wrong):
    """A function that a rule makes wrong: it returns queries, keys and values."""

    def attend(q, k, v):
        return scaled_dot_product_attention(*wrong(q, k, v))

    return attend


def loses_the_last_of_a_full_tile(q, k, v):
    kept = k.shape[2] - (k.shape[2] > 1 and k.shape[2] % 16 == 0)
    return q, k[:, :, :kept], v[:, :, :kept]


def forgets_the_last_query_of_a_tile_without_one(q, k, v):
    return (torch.cat((q[:, :, :-1], 0 * q[:, :, -1:]), 2) if q.shape[2] % 16 == 15 else q), k, v


def loses_keys_if_there_is_one_query(q, k, v):
    kept = 128 if q.shape[2] == 1 else k.shape[2]
    return q, k[:, :, :kept], v[:, :, :kept]


def multiplies_64_numbers_of_each_head(q, k, v):
    return q * (torch.arange(q.shape[3]) < 64), k, v


def keeps_1024_keys(q, k, v):
    return q, k[:, :, :1024], v[:, :, :1024]


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (loses_the_last_of_a_full_tile, "7 queries, 16 keys"),
        (forgets_the_last_query_of_a_tile_without_one, "15 queries, 11 keys"),
        (loses_keys_if_there_is_one_query, "1 query, 129 keys"),
        (multiplies_64_numbers_of_each_head, "heads of 80"),
        (keeps_1024_keys, "5 queries, 1029 keys"),
    ],
)
def test_what_is_wrong_in_some_lengths_or_widths_alone_is_found(wrong, case):
    comparison = compare(attention(wrong), framework="torch", longest=1029)
    assert comparison.first.case == case, f"\n{comparison}"


def rotated(x, positions):
    """The halves of heads [b, h, n, d], rotated by these positions [n] or [b, n]."""
    frequencies = 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = (positions[..., None] * frequencies).unflatten(0, (-1, 1, positions.shape[-1]) if positions.ndim == 1 else (-1, 1))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


class Rotary(nn.Module):
    """Causal attention with RoPE, whose positions are a parameter."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def positions(self, position_ids):
        return position_ids.float()

    def forward(self, x, position_ids):
        q, k, v = (layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        positions = self.positions(position_ids)
        heads = scaled_dot_product_attention(rotated(q, positions), rotated(k, positions), v, is_causal=True)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class InBfloat16(Rotary):
    """Has the positions in bfloat16, which tells them apart below 257."""

    def positions(self, position_ids):
        return position_ids.bfloat16().float()


class OfTheFirst(Rotary):
    """Has the positions of the first item for all."""

    def positions(self, position_ids):
        return position_ids[:1].float()


class LastOfTable(Rotary):
    """Has a table of 600 positions, of which the last stands for all that come after."""

    def positions(self, position_ids):
        return position_ids.clamp(max=600).float()


ROTARY = {"spec": LayerSpec(d_model=12, num_heads=3, rope={}), "causal": True}


@pytest.mark.parametrize(("wrong", "case"), [(InBfloat16, "513 keys"), (LastOfTable, "4097 keys"), (OfTheFirst, "positions of each item")])
def test_positions_that_few_digits_do_not_tell_apart_are_found(wrong, case):
    comparison = compare(wrong, longest=4097, **ROTARY)
    assert case in {result.case for result in comparison.results if result.agrees is False}


def in_blocks_of_queries(q, k, v, mask=None):
    """Takes the rows of the mask for the first 1,024 queries for those of all others, too."""
    queries = q.split(1024, dim=2)
    rows = [None if mask is None else mask[: x.shape[2]] for x in queries]
    return torch.cat([scaled_dot_product_attention(x, k, v, y) for x, y in zip(queries, rows, strict=True)], dim=2)


def test_a_mask_is_passed_with_many_queries():
    comparison = compare(in_blocks_of_queries, longest=1100)
    assert [x.case for x in comparison.results if x.agrees is False] == ["1100 queries, 5 keys, mask"], f"\n{comparison}"


def test_a_kernel_without_groups_that_reads_beyond_its_keys_is_not_accused():
    def attend(q, k, v):
        q, k, v = (x.contiguous() for x in (q, k, v))
        shape = *q.shape[:2], *k.shape[2:]
        key, value = (torch.as_strided(x, shape, torch.empty(shape).stride()) for x in (k, v))
        return scaled_dot_product_attention(q, key, value)

    comparison = compare(attend, framework="torch", longest=7)
    assert comparison.agrees and "groups of heads" not in comparison.conclusion, f"\n{comparison}"


def test_a_candidate_may_raise_where_an_optional_call_is_repeated():
    calls = []

    def attend(q, k, v):
        if k.shape[1] < q.shape[1]:  # groups of heads
            calls.append(q)
            if len(calls) % 2 == 0:
                raise ValueError("called again")
            k, v = torch.zeros_like(q[:, :, : k.shape[2]]), torch.zeros_like(q[:, :, : k.shape[2]])
        return scaled_dot_product_attention(q, k, v)

    comparison = compare(attend, framework="torch", longest=7)
    assert comparison.agrees and calls, f"\n{comparison}"


def test_the_report_says_how_far_it_looked():
    comparison = compare(Rotary, **ROTARY)
    assert "agrees with the reference in all 10 cases that were tried, with up to 4,097 keys, in float32, " in comparison.conclusion
    assert " and with position_ids; no parameter takes: mask, padded keys, packed sequences" in comparison.conclusion
    assert "distant positions (2 calls)" in str(comparison) and "lengths (17 calls)" in str(comparison)
    bare = compare(scaled_dot_product_attention, longest=257)
    assert ", with up to 257 keys, heads of 4 to 256 numbers, groups of heads, in float32, and with attn_mask, " in bare.conclusion


def test_a_function_with_a_fixed_scale_was_tried_with_heads_of_one_width_alone():
    comparison = compare(lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v, framework="torch", longest=7)
    assert comparison.agrees and comparison.widths == (4,) and "widths of heads" in comparison.untried
    assert "its numbers are those of heads of 4 alone" in comparison.conclusion


def in_groups_of_tiles(q, k, v, causal=False):
    """Takes the heads of keys in turn, and not in groups, where there are more than 64 keys."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat(1, repeats, 1, 1) if k.shape[2] > 64 else x.repeat_interleave(repeats, 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def eight_heads(q, k, v, causal=False):
    """Leaves the heads after the last eight at 0."""
    kept = q.shape[1] if q.shape[1] < 8 else q.shape[1] // 8 * 8
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    output = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return torch.cat((output[:, :kept], torch.zeros_like(output[:, kept:])), 1)


def test_groups_are_looked_at_in_long_calls():
    comparison = compare(in_groups_of_tiles, framework="torch", longest=600)
    wrong = {f"12 heads, 4 of keys{more}" for more in (", 193 keys", ", 1 query", ", 193 keys, causal=True")}
    assert {x.case for x in comparison.results if x.agrees is False} == wrong, f"\n{comparison}"


def test_many_heads_are_looked_at():
    comparison = compare(eight_heads, framework="torch", longest=7)
    assert [x.case for x in comparison.results if x.agrees is False] == ["17 heads"], f"\n{comparison}"
