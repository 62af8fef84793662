"""Masks of a call against loops over every pair of query and key."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from attend.attention.masks import PADDING, Masks, end_of_real_keys
from attend.attention.rows import row_slices

B, H, Q, K = 2, 3, 5, 7
FIELDS = ("attend_mask", "attend_keys", "segments", "lengths", "bias", "left", "right", "chunk")
SINGLE = [(name,) for name in FIELDS]
PAIRS = [(one, other) for one, other in product(FIELDS, FIELDS) if one < other]


def drawn(names: tuple[str, ...], seed: int) -> Masks:
    """Masks with these fields, some of whose axes are broadcast; queries stand at positions -2 to 6."""
    rng = np.random.default_rng(seed)

    def pairs() -> list[int]:
        return [n if rng.random() < 0.7 else 1 for n in (B, H, Q, K)]

    fields: dict[str, Any] = {"positions": torch.arange(Q)[None] + torch.tensor(rng.integers(-2, 3, (B, 1))), "num_keys": K}
    if "attend_mask" in names:
        fields["attend_mask"] = torch.tensor(rng.random(pairs()) < 0.6)
    if "attend_keys" in names:
        fields["attend_keys"] = torch.tensor(rng.random((B, K)) < 0.6)
    if "segments" in names:
        fields["query_segments"] = torch.tensor(rng.integers(0, 2, (B, Q)))
        fields["key_segments"] = torch.tensor(rng.choice([0, 1, PADDING], (B, K)))
    if "lengths" in names:
        fields["lengths"] = torch.tensor(rng.integers(0, K + 1, (B, Q if rng.random() < 0.5 else 1)))
    if "bias" in names:
        bias = rng.standard_normal(pairs())
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        fields |= {"bias": torch.tensor(bias), "bias_blocks": bool(np.isneginf(bias).any())}
    fields |= {name: int(rng.integers(0, 4)) for name in ("left", "right") if name in names}
    fields |= {"chunk": 3} if "chunk" in names else {}
    return Masks(**fields)


def at(tensor: torch.Tensor, *index: int) -> Any:
    """An element of a tensor whose axes of 1 broadcast."""
    return tensor[tuple(i if n > 1 else 0 for i, n in zip(index, tensor.shape, strict=True))].item()


def may_attend(masks: Masks, b: int, h: int, i: int, j: int) -> bool:
    """Whether a query may attend to a key, by what each field means."""
    position = at(masks.positions, b, i)
    rules = [
        masks.attend_mask is None or at(masks.attend_mask, b, h, i, j),
        masks.attend_keys is None or at(masks.attend_keys, b, j),
        masks.query_segments is None or masks.key_segments is None or at(masks.query_segments, b, i) == at(masks.key_segments, b, j),
        masks.lengths is None or j < at(masks.lengths, b, i),
        masks.bias is None or at(masks.bias, b, h, i, j) != -np.inf,
        masks.left is None or j >= position - masks.left,
        masks.right is None or j <= position + masks.right,
        masks.chunk is None or j // masks.chunk == position // masks.chunk,
    ]
    return all(rules)


def expected_pairs(masks: Masks) -> Any:
    """bool [b, h, q, k]."""
    return np.array([may_attend(masks, *index) for index in product(range(B), range(H), range(Q), range(K))]).reshape(B, H, Q, K)


@pytest.mark.parametrize("names", [(), *SINGLE, *PAIRS, FIELDS], ids=lambda names: " ".join(names) or "none")
def test_visible_keys_are_those_that_every_mask_allows(names: tuple[str, ...]) -> None:
    """Of all rows and keys at once, and of each part of them."""
    for seed in range(5):
        masks = drawn(names, seed)
        expected = expected_pairs(masks)
        for rows, keys in ((slice(0, Q), slice(0, K)), (slice(1, 4), slice(2, 5)), (slice(4, 5), slice(0, 1))):
            visible = masks.visible(rows, keys)
            got = np.ones((1, 1, 1, 1), bool) if visible is None else visible.numpy()
            part = expected[:, :, rows, keys]
            np.testing.assert_array_equal(np.broadcast_to(got, part.shape), part)
        if not names:
            assert masks.visible(slice(0, Q)) is None and not masks.has_any


@pytest.mark.parametrize("names", [(), *SINGLE, *PAIRS], ids=lambda names: " ".join(names) or "none")
def test_rows_without_a_key_are_found_in_blocks_of_any_size(names: tuple[str, ...]) -> None:
    empty = False
    for seed in range(5):
        masks = drawn(names, seed)
        expected = ~expected_pairs(masks).any(-1)
        for blocks in (list(row_slices(B * H * K, Q)), [slice(0, 2), slice(2, 5)]):
            found = masks.fully_masked(blocks)
            got = np.zeros((1, 1, 1), bool) if found is None else found.numpy()
            np.testing.assert_array_equal(np.broadcast_to(got, expected.shape), expected)
        empty = empty or bool(expected.any())
    assert empty or "lengths" not in names


@pytest.mark.parametrize("names", [("attend_keys",), ("segments",), ("lengths",), ("attend_keys", "segments", "lengths"), ()], ids=str)
def test_the_last_real_key_is_not_blocked_for_every_query(names: tuple[str, ...]) -> None:
    """Key masks, padding among the segments and the longest length of an item decide; masks of pairs do not."""
    for seed in range(5):
        masks = drawn((*names, "attend_mask"), seed)
        for b in range(B):
            real = [
                (masks.attend_keys is None or at(masks.attend_keys, b, j))
                and (masks.key_segments is None or at(masks.key_segments, b, j) != PADDING)
                and (masks.lengths is None or j < int(masks.lengths[b].max()))
                for j in range(K)
            ]
            assert masks.real_keys(B)[b].tolist() == real
            assert end_of_real_keys(masks, B)[b] == max((j + 1 for j in range(K) if real[j]), default=0)


def test_selected_masks_are_those_of_the_heads_and_queries_in_their_order() -> None:
    heads, queries = [2, 0], [4, 1, 3]
    for seed in range(5):
        masks = drawn(FIELDS, seed)
        visible = masks.select(heads, queries).visible(slice(0, len(queries)))
        assert visible is not None
        expected = expected_pairs(masks)[:, heads][:, :, queries]
        np.testing.assert_array_equal(np.broadcast_to(visible.numpy(), expected.shape), expected)
