"""Candidates that take some dtypes, widths of heads and lengths alone."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attend.check import compare


def kernel(takes, *, wrong=False):
    """A function that raises unless `takes(q, k)`, and computes in float32. `wrong`: without the last tile of 16 keys of more than 16."""

    def attend(q, k, v, causal=False):
        if q.ndim != 4 or not takes(q, k):
            raise ValueError("not supported")
        rows = len(k[0, 0]) - 16 * (wrong and len(k[0, 0]) > 16)
        return scaled_dot_product_attention(q.float(), k[:, :, :rows].float(), v[:, :, :rows].float(), is_causal=causal).to(q.dtype)

    return attend


def has_whole_tiles(tile):
    return lambda q, k: len(q[0, 0]) % tile == 0 and len(k[0, 0]) % tile == 0


TAKEN = {
    "it raises in float32, and takes float16": lambda q, k: q.dtype in (torch.float16, torch.bfloat16),
    "it raises in float32, and takes bfloat16": lambda q, k: q.dtype is torch.bfloat16,
    "it raises with 12 numbers in all heads, and takes 192": lambda q, k: q.shape[-1] in (16, 32, 64, 128),
    "it takes whole tiles of 16 rows alone": has_whole_tiles(16),
    "it takes whole tiles of 128 rows alone": has_whole_tiles(128),
    "takes float16; it raises with 12 numbers in all heads, and takes 192; it takes whole tiles of 64 rows alone": lambda q, k: (
        q.dtype is torch.float16 and q.shape[-1] == 64 and has_whole_tiles(64)(q, k)
    ),
}


@pytest.mark.parametrize("words", TAKEN)
def test_a_kernel_that_takes_some_calls_alone_gets_those(words):
    comparison = compare(kernel(TAKEN[words]), longest=700)
    assert comparison.agrees and comparison.is_complete, f"\n{comparison}"
    assert words in comparison.conventions and comparison.keys > 500
    assert not compare(kernel(TAKEN[words], wrong=True), longest=700).agrees


def test_a_dtype_that_is_given_is_not_replaced():
    first = compare(kernel(lambda q, k: q.dtype is torch.float16), dtype="bfloat16", framework="torch").first
    assert first.case == "no mask" and "not supported; called with q [2, 3, 5, 4] bfloat16" in first.got


def test_what_takes_as_many_keys_as_queries_alone_gets_all_lengths_of_them():
    comparison = compare(kernel(lambda q, k: q.shape == k.shape), longest=700)
    assert comparison.agrees and "not tried: cross-attention, since it raised ValueError" in comparison.conclusion
    assert "it takes as many keys as queries alone" in comparison.conventions and comparison.keys > 500
    assert not compare(kernel(lambda q, k: q.shape == k.shape, wrong=True), longest=700).agrees


class Bfloat16(nn.Module):
    """Takes heads whose width is a multiple of 8, in bfloat16."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        if d_model // num_heads % 8:
            raise ValueError("not supported")
        self.num_heads, self.qkv, self.out = num_heads, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        if x.dtype is not torch.bfloat16:
            raise ValueError("not supported")
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_class_is_constructed_with_a_width_and_a_dtype_that_it_takes():
    comparison = compare(Bfloat16, longest=7)
    assert comparison.agrees and comparison.dtype == "bfloat16", f"\n{comparison}"
    assert "it raises in float32, and takes bfloat16; it raises with 12 numbers in all heads, and takes 192" in comparison.conventions


def test_masks_of_each_item_and_head_in_one_axis_are_found():
    def attend(q, k, v, mask=None):
        if mask is not None and mask.shape[0] != q.shape[0] * q.shape[1]:
            raise ValueError("expected a mask [b * h, q, k]")
        return scaled_dot_product_attention(q, k, v, None if mask is None else mask.unflatten(0, q.shape[:2]))

    comparison = compare(attend, longest=7)
    assert comparison.is_complete and "true in mask [b*h,q,k] means attend" in comparison.conventions, f"\n{comparison}"
