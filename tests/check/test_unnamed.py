"""What the hint says of bugs that are in no list: facts about the weights that a candidate applies."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attend.check import compare
from attend.spec import LayerSpec


def scores_of(query, key):
    return query @ key.mT / math.sqrt(query.shape[-1])


def skips_the_third_tile(query, key, value):
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    scores[..., 64:96] = -np.inf
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True) @ value


def scores_the_last_key_of_the_item_before(query, key, value):
    key = key.clone()
    key[1:, :, -1] = key[:-1, :, -1].clone()
    return scaled_dot_product_attention(query, key, value)


def reads_the_last_row_of_the_item_before(query, key, value):
    key, value = key.clone(), value.clone()
    key[1:, :, -1], value[1:, :, -1] = key[:-1, :, -1].clone(), value[:-1, :, -1].clone()
    return scaled_dot_product_attention(query, key, value)


def doubles_the_weight_of_key_0(query, key, value):
    weights = torch.exp(scores_of(query, key))
    weights = torch.cat([2 * weights[..., :1], weights[..., 1:]], dim=-1)
    return weights / weights.sum(-1, keepdim=True) @ value


def clamps(query, key, value):
    return scores_of(query, key).clamp(max=1.3).softmax(-1) @ value


def clips(query, key, value):
    return scores_of(query, key).clamp(-1.1, 1.1).softmax(-1) @ value


def sees_two_more_keys(query, key, value, is_causal=False):
    scores = scores_of(query, key)
    later = torch.ones(scores.shape[-2:]).triu(3) == 1
    return (scores.masked_fill(later, -math.inf) if is_causal else scores).softmax(-1) @ value


def drops_the_diagonal(query, key, value):
    scores = scores_of(query, key)
    own = torch.arange(scores.shape[-2])[:, None] == torch.arange(scores.shape[-1])
    return scores.masked_fill(own, -math.inf).softmax(-1) @ value


def adds_the_distance(query, key, value):
    return (scores_of(query, key) - 0.03 * torch.arange(key.shape[2])).softmax(-1) @ value


def is_causal_by_blocks(query, key, value, is_causal=False):
    scores = scores_of(query, key)
    if is_causal:
        later = torch.arange(key.shape[2]) // 16 > torch.arange(query.shape[2])[:, None] // 16
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ value


def shifts_heads(query, key, value):
    return scores_of(query, key).softmax(-1).roll(1, dims=1) @ value


def transposes_weights(query, key, value):
    weights = scores_of(query, key).softmax(-1)
    return (weights.mT if query.shape == key.shape else weights) @ value


def tiles_masks(query, key, value, mask=None):
    """Masks [b, 1, q, k], of which head h of item i gets that of item (i * heads + h) mod b."""
    scores = scores_of(query, key)
    masked = scores if mask is None else scores.masked_fill(~mask.repeat(query.shape[1], 1, 1, 1).view(scores.shape), -math.inf)
    return masked.softmax(-1).nan_to_num() @ value


def scores_key_0_by_its_cosine(query, key, value):
    scores = scores_of(query, key)
    return torch.cat([scores[..., :1].cos(), scores[..., 1:]], dim=-1).softmax(-1) @ value


def repeats_query_0(query, key, value):
    heads = scaled_dot_product_attention(query, key, value)
    return torch.cat([heads[:, :, :1], heads[:, :, :1], heads[:, :, 2:]], dim=2)


def half_of_each_head(query, key, value):
    return (query[..., :2] @ key[..., :2].mT / math.sqrt(query.shape[-1])).softmax(-1) @ value


def scaled_more_in_each_block(query, key, value):
    return (scores_of(query, key) * 1.25 ** (torch.arange(key.shape[2]) // 32)).softmax(-1) @ value


def reads_the_last_tile_from_the_end(query, key, value):
    """Rows of tiles of 64; the last tile begins as many rows too early as it lacks."""
    n, rows = key.shape[2], torch.arange(key.shape[2])
    if n > 64:
        last = n // 64 * 64
        rows[last:] -= last + 64 - n
    return scaled_dot_product_attention(query, key[:, :, rows], value[:, :, rows])


def drops_a_full_last_page(query, key, value):
    keys = key.shape[2] - (16 if key.shape[2] % 16 == 0 else 0)
    return scores_of(query, key)[..., :keys].softmax(-1) @ value[:, :, :keys]


def scales_later_keys_of_masked_calls(query, key, value, mask=None):
    scores = scores_of(query, key)
    masked = scores if mask is None else (scores * torch.where(torch.arange(key.shape[2]) < 3, 1, 1.7)).masked_fill(~mask, -math.inf)
    return masked.softmax(-1) @ value


def scales_causal_calls(query, key, value, is_causal=False, cap=None):
    """Weights of the smallest scores are 0 in float32."""
    scores = (17 if is_causal else 1) * scores_of(query, key)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    later = torch.ones(scores.shape[-2:]).triu(1) == 1
    return (scores.masked_fill(later, -math.inf) if is_causal else scores).softmax(-1) @ value


def scales_causal_calls_before_the_softcap(query, key, value, is_causal=False):
    return scales_causal_calls(query, key, value, is_causal, cap=41.0)


def exchanges_pairs_of_heads(query, key, value):
    return scores_of(query, key).softmax(-1)[:, [1, 0, 3, 2, 4]] @ value


def merges_by_the_maximum(query, key, value):
    """Partial results of two parts of the keys, whose maximum counts three times."""
    parts = []
    for keys, values in zip(key.split(-(-key.shape[2] // 2), 2), value.split(-(-key.shape[2] // 2), 2), strict=True):
        scores = scores_of(query, keys)
        parts.append((scores.softmax(-1) @ values, scores.logsumexp(-1, True) + 2 * scores.amax(-1, True)))
    share = torch.stack([total for _, total in parts]).softmax(0)
    return sum(output * weight for (output, _), weight in zip(parts, share, strict=True))


def counts_keys_of_zeros(query, key, value):
    scores = torch.cat([scores_of(query, key), torch.zeros(*query.shape[:3], -key.shape[2] % 32)], dim=-1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


def returns_its_query(query, key, value):
    return query * 0.5


def doubles_sinks(query, key, value, sinks):
    more = 2 * sinks[:, None, None].expand(len(query), -1, query.shape[2], 1)
    return torch.cat([scores_of(query, key), more], dim=-1).softmax(-1)[..., :-1] @ value


PLAIN = {"spec": LayerSpec(d_model=12, num_heads=3, projections=False)}  # else it is compared with layers that have positions, too
SINKS = {"spec": LayerSpec(d_model=15, num_heads=3, projections=False, sinks=True)}
CAPPED = {"spec": LayerSpec(d_model=15, num_heads=3, projections=False, softcap=41.0)}
FIVE_HEADS = {"spec": LayerSpec(d_model=15, num_heads=5, projections=False)}
FUNCTIONS = {  # a bug -> what is said, and options
    skips_the_third_tile: ("the keys 64 to 95, which are tile 2 of 32, are left out", {}),
    scores_the_last_key_of_the_item_before: ("the last key of item 1 has the scores of the last key of item 0", {}),
    reads_the_last_row_of_the_item_before: (
        "the last key in item 1 is left out; values of other items get weight: those of the last key of item 0 in item 1",
        {},
    ),
    doubles_the_weight_of_key_0: ("the first key has 2 times the weight beside the others", {}),
    clamps: ("scores above 1.3 count as 1.3", {}),
    clips: ("the scores are clipped to ±1.1", {}),
    sees_two_more_keys: (
        "the keys i + 1 to i + 2 of each query i are seen and should not be; their scores are as if nothing was blocked",
        {},
    ),
    drops_the_diagonal: ("each query's own key is left out", {}),
    adds_the_distance: ("-0.03 times the place of the key is added to the scores", {}),
    is_causal_by_blocks: ("the later keys of each query's own block of 16 are seen and should not be", {}),
    shifts_heads: ("the weights of the heads are in another order: each has that of the one before", {}),
    transposes_weights: ("the weights are transposed: that of query i and key j is that of query j and key i", {}),
    tiles_masks: ("heads have the mask of another item", {"mask_means": "attend", "mask_shape": "b,1,q,k"}),
    scores_key_0_by_its_cosine: ("the weights of the first key are wrong beside the others", {}),
    repeats_query_0: ("query 1 has the weights of query 0", {}),
    half_of_each_head: ("only the first 2 numbers of each query and key count in the scores", {}),
    scaled_more_in_each_block: ("the scores are multiplied by 1.25 once more in each block of 32 keys", {}),
    reads_the_last_tile_from_the_end: (
        "the last key is left out (in the case “65 keys”); key 1 has 2 times the weight beside the others (in the case “65 keys”)",
        {},
    ),
    drops_a_full_last_page: (
        "the output does not depend on the queries and keys and values (in the case “7 queries, 16 keys”)",
        {},
    ),
    scales_later_keys_of_masked_calls: ("the scores of the keys from 3 on are multiplied by 1.7", {"mask_means": "attend"}),
    scales_causal_calls: ("the scores are multiplied by 17", {}),
    scales_causal_calls_before_the_softcap: ("Q Kᵀ is multiplied by 17, besides its scale", CAPPED),
    exchanges_pairs_of_heads: (
        "head 0 has the weights of head 1, head 1 has the weights of head 0, head 2 has the weights of head 3, and 1 other",
        FIVE_HEADS,
    ),
    merges_by_the_maximum: ("partial results of groups of keys are merged as if the maximum of each was multiplied by 3", {}),
    counts_keys_of_zeros: ("further keys, as many as fill the last tile of 32, that are not there take part in the softmax", {}),
    returns_its_query: ("the output does not depend on the keys and values", {}),
    doubles_sinks: ("the logits of the sinks are multiplied by 2", SINKS),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("candidate", FUNCTIONS, ids=lambda candidate: candidate.__name__)
def test_weights_of_functions_are_found_by_one_hot_values(candidate):
    said, options = FUNCTIONS[candidate]
    options = PLAIN | options
    longest = 130 if any(words in said for words in ("tile", "block", " keys”")) else 7
    first = compare(candidate, longest=longest, **options).first
    assert not first.mistakes and f": {said}" in first.hint and "; ".join(first.weights).startswith(said), first.hint
    assert "1 others" not in first.hint and ("left out" in said or "left out" not in first.hint), first.hint


class Layer(nn.Module):
    """What the wrong ones have in common: four projections, and heads that a method attends with."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value, mask=None):
        inputs = ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer, x in inputs)
        return self.o_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class WithoutTheLastTwo(Layer):
    def attend(self, q, k, v, mask):
        keys = slice(0, -2) if mask is None else slice(None)
        return scaled_dot_product_attention(q, k[:, :, keys], v[:, :, keys], mask)


class BlockedByALittle(Layer):
    def attend(self, q, k, v, mask):
        scores = scores_of(q, k)
        return (scores if mask is None else scores.masked_fill(~mask, -3.7)).softmax(-1) @ v


class OfOneInput(Layer):
    def forward(self, x):
        return super().forward(x, x, x, None)

    def attend(self, q, k, v, mask):
        return scaled_dot_product_attention(q, k, v, torch.eye(q.shape[2], dtype=torch.bool) == 0)


class OfOneInputByScores(OfOneInput):
    def attend(self, q, k, v, mask):
        weights = scores_of(q, k).softmax(-1)
        weights[:, 1] = 0
        return weights @ v


class WithWindow(Layer):
    """What keeps the newest 3 rows in its cache."""

    def forward(self, x, cache=None):
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            k, v = (torch.cat((old, new), 2)[:, :, -3:] for old, new in zip(cache, (k, v), strict=True))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return self.o_proj(scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)), (k, v)


LAYERS = {
    WithoutTheLastTwo: ("found by calls that change the value of one key each: the last 2 keys are left out", {}),
    BlockedByALittle: ("all blocked keys are seen and should not be; their scores are -3.7, and not -inf", {"mask_means": "attend"}),
    OfOneInput: ("found by calls with other matrices of the values: each query's own key is left out", {}),
    OfOneInputByScores: ("which are among the arrays that it makes: all keys in head 1 are left out", {}),
    WithWindow: (
        "found by calls that change the rows of one key each: the keys older than the newest 3 of the cache, which includes those of the "
        "call, are left out",
        {"causal": True, "spec": LayerSpec(d_model=6, num_heads=3)},  # too narrow for one-hot values
    ),
}


@pytest.mark.parametrize("candidate", LAYERS, ids=lambda candidate: candidate.__name__)
def test_weights_of_layers_are_found(candidate):
    said, options = LAYERS[candidate]
    first = compare(candidate, longest=7, **{"spec": LayerSpec(d_model=12, num_heads=3)} | options).first
    assert not first.mistakes and said in first.hint, first.hint


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_that_are_left_out_are_told_in_half_precision(dtype):
    def whole_tiles(query, key, value):
        keys = key.shape[2] if key.shape[2] < 32 else key.shape[2] // 32 * 32
        return (scores_of(query, key)[..., :keys].float().softmax(-1).to(query.dtype)) @ value[:, :, :keys]

    first = compare(whole_tiles, dtype=dtype, longest=130).first
    assert first.weights == ("the keys after the last whole tile of 32 are left out",), first.hint


def test_a_layer_that_was_given_other_matrices_has_its_own_again():
    layer = OfOneInput(12, 3)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    assert "own key" in compare(layer, spec=LayerSpec(d_model=12, num_heads=3), longest=7).first.hint
    assert all(map(torch.equal, before, layer.parameters()))


def test_nothing_is_said_of_weights_that_do_not_give_the_output():
    """The values count twice: the output is not linear in them."""

    def squares(query, key, value):
        return scores_of(query, key).softmax(-1) @ (value * value.abs())

    first = compare(squares, longest=7).first
    assert first.weights == () and first.hint.startswith("no known mistake gives these numbers")
