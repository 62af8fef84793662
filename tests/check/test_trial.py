"""What names and options leave open is found by calls, and no mistake is taken for a convention."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attend.check import compare
from attend.spec import LayerSpec


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def merge(x):
    return x.transpose(-3, -2).flatten(-2)


class Named(nn.Module):
    """Four layers of these names."""

    names = ("fc_query", "fc_key", "fc_val", "final")

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        for name in self.names:
            setattr(self, name, nn.Linear(d_model, d_model))

    def heads(self, x):
        return [split(getattr(self, name)(x), self.num_heads) for name in self.names[:3]]

    def forward(self, x):
        return getattr(self, self.names[3])(merge(scaled_dot_product_attention(*self.heads(x))))


class Lettered(Named):
    names = ("a", "b", "c", "d")


class Exchanged(Named):
    def heads(self, x):
        q, k, v = super().heads(x)
        return k, q, v


class NumPyLettered:
    def __init__(self, d_model, num_heads):
        self.num_heads = num_heads
        self.A, self.B, self.C, self.D = np.random.default_rng(3).standard_normal((4, d_model, d_model))

    def __call__(self, x):
        q, k, v = ((x @ w).reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2) for w in (self.A, self.B, self.C))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(x.shape) @ self.D


class NormFirst(nn.Module):
    """As in a widely copied vision transformer: a norm, and one matrix for keys and values."""

    def __init__(self, dim, heads=3, dim_head=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_q, self.to_kv = nn.Linear(dim, heads * dim_head, bias=False), nn.Linear(dim, 2 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.1))

    def forward(self, x, context=None, mask=None):
        x = self.norm(x)
        keys, values = self.to_kv(x if context is None else context).chunk(2, dim=-1)
        q, k, v = (split(y, self.heads) for y in (self.to_q(x), keys, values))
        return self.to_out(merge(scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None, :])))


class NormLast(nn.Module):
    """As in a widely copied transformer: a residual connection, then a norm."""

    factor = 1.0

    def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
        super().__init__()
        self.n_head = n_head
        self.w_qs, self.w_ks, self.w_vs = (nn.Linear(d_model, n_head * d, bias=False) for d in (d_k, d_k, d_v))
        self.fc, self.layer_norm = nn.Linear(n_head * d_v, d_model, bias=False), nn.LayerNorm(d_model)

    def forward(self, q, k, v, mask=None):
        residual = q
        q, k, v = split(self.w_qs(q), self.n_head), split(self.w_ks(k), self.n_head), split(self.w_vs(v), self.n_head)
        scores = self.factor * q @ k.mT / k.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
        weights = scores.softmax(dim=-1)
        return self.layer_norm(self.fc(merge(weights @ v)) + residual), weights


class DoublesScores(NormLast):
    factor = 2.0


class MasksRowsAndContext(Named):
    """As in x-transformers: `mask` is of the queries' rows, whose outputs it makes 0, and `context_mask` of the context's."""

    def forward(self, x, context=None, mask=None, context_mask=None):
        context, of_keys = (x, mask) if context is None else (context, context_mask)
        q, k, v = (split(getattr(self, name)(y), self.num_heads) for name, y in zip(self.names, (x, context, context), strict=False))
        heads = scaled_dot_product_attention(q, k, v, None if of_keys is None else of_keys[:, None, None, :])
        output = self.final(merge(heads))
        return output if mask is None else output * mask[..., None]


class SelfAttentionAlone(Named):
    """Made without the matrices that keys of their own need."""

    def forward(self, x, context=None):
        if context is not None:
            raise ValueError
        return super().forward(x)


class Grouped(nn.Module):
    """Causal, with RoPE inside, and with fewer heads of keys if it is told so."""

    pairs = False

    def __init__(self, dim, n_heads, n_kv_heads=None):
        super().__init__()
        self.heads, self.kv_heads, self.width = n_heads, n_kv_heads or n_heads, dim // n_heads
        rows = self.kv_heads * self.width
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, n, bias=False) for n in (dim, rows, rows, dim))

    def rotate(self, x):
        angles = torch.outer(torch.arange(x.shape[-2]), 1e4 ** -(torch.arange(0, self.width, 2) / self.width))
        first, second = (x[..., ::2], x[..., 1::2]) if self.pairs else x.chunk(2, -1)
        rotated = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.stack(rotated, -1).flatten(-2) if self.pairs else torch.cat(rotated, -1)

    def repeat(self, x):
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def merge(self, x):
        return merge(x)

    def forward(self, x):
        q, k, v = split(self.wq(x), self.heads), split(self.wk(x), self.kv_heads), split(self.wv(x), self.kv_heads)
        k, v = self.repeat(self.rotate(k)), self.repeat(v)
        return self.wo(self.merge(scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)))


class GroupedPairs(Grouped):
    pairs = True


class WithoutPositions(Grouped):
    def rotate(self, x):
        return x


class WithAlibi(WithoutPositions):
    def slopes(self):
        power = 2 ** (self.heads.bit_length() - 1)
        return [2.0 ** (-8 * (i + 1) / power) for i in range(power)] + [
            2.0 ** (-4 * (2 * i + 1) / power) for i in range(self.heads - power)
        ]

    def forward(self, x):
        q, k, v = (
            split(self.wq(x), self.heads),
            self.repeat(split(self.wk(x), self.kv_heads)),
            self.repeat(split(self.wv(x), self.kv_heads)),
        )
        at = torch.arange(x.shape[1])
        bias = torch.tensor(self.slopes())[:, None, None] * (at - at[:, None]) + torch.full((len(at), len(at)), -torch.inf).triu(1)
        return self.wo(merge(scaled_dot_product_attention(q, k, v, bias)))


class WithSimpleSlopes(WithAlibi):
    def slopes(self):
        return [2.0 ** (-8 * (i + 1) / self.heads) for i in range(self.heads)]


class TilesGroups(Grouped):
    def repeat(self, x):
        return x.repeat(1, self.heads // self.kv_heads, 1, 1)


class TilesPlainGroups(WithoutPositions, TilesGroups):
    pass


class MergesHeadsOnly(WithoutPositions):
    def merge(self, x):
        return x.reshape(len(x), x.shape[2], -1)


class RotatesValues(WithoutPositions):
    def forward(self, x):
        return self.attend(x, Grouped.rotate(self, self.repeat(split(self.wv(x), self.kv_heads))))

    def attend(self, x, v):
        q, k = Grouped.rotate(self, split(self.wq(x), self.heads)), Grouped.rotate(self, split(self.wk(x), self.kv_heads))
        return self.wo(self.merge(scaled_dot_product_attention(q, self.repeat(k), v, is_causal=True)))


class DividesAnglesByWidth(Grouped):
    """Its frequencies are those of RoPE over all heads."""

    def rotate(self, x):
        angles = torch.outer(torch.arange(x.shape[-2]), 1e4 ** -(torch.arange(0, self.width, 2) / (self.heads * self.width)))
        first, second = x.chunk(2, -1)
        return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


class CubesWeights(Grouped):
    """No mistake that is known."""

    def forward(self, x):
        q, k, v = split(self.wq(x), self.heads), split(self.wk(x), self.kv_heads), split(self.wv(x), self.kv_heads)
        scores = self.rotate(q) @ self.repeat(self.rotate(k)).mT / self.width**0.5
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        return self.wo(self.merge(scores.softmax(-1) ** 3 @ self.repeat(v)))


class BlocksBesideReshape(Named):
    """True in its mask blocks a key, and its heads are split so that a blocked key is seen by others."""

    def heads(self, x):
        return [getattr(self, name)(x).reshape(len(x), self.num_heads, x.shape[1], -1) for name in self.names[:3]]

    def forward(self, x, mask=None):
        return self.final(merge(scaled_dot_product_attention(*self.heads(x), None if mask is None else ~mask)))


class RaisesBlocked(Named):
    """A key that is blocked gets 10000 more, and not less."""

    def forward(self, x, attention_mask=None):
        q, k, v = self.heads(x)
        bias = None if attention_mask is None else (1 - attention_mask[:, None, None].to(x.dtype)) * 10000
        return self.final(merge(scaled_dot_product_attention(q, k, v, bias)))


class CapsBlocked(Named):
    """Causal, with a softcap that comes after the mask."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        return self.final(merge((2 * torch.tanh(scores / 2)).softmax(-1) @ v))


class WithSinks(Named):
    names = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.sinks = nn.Parameter(torch.zeros(num_heads))

    def forward(self, x):
        q, k, v = self.heads(x)
        sinks = self.sinks[:, None, None].expand(len(x), -1, x.shape[1], 1)
        weights = torch.cat((q @ k.mT / q.shape[-1] ** 0.5, sinks), -1).softmax(-1)[..., :-1]
        return self.o_proj(merge(weights @ v))


class WithForgetGate(Named):
    names = WithSinks.names

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.forget_gate = nn.Linear(d_model, num_heads)

    def forward(self, x):
        sums = self.forget_gate(x).sigmoid().log().cumsum(1).mT
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        bias = (sums[..., None] - sums[:, :, None]).masked_fill(later, -torch.inf)
        return self.o_proj(merge(scaled_dot_product_attention(*self.heads(x), bias)))


class WithNorms(Named):
    names = WithSinks.names
    norm = nn.LayerNorm

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.q_norm, self.k_norm = (self.norm(d_model // num_heads) for _ in range(2))

    def heads(self, x):
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x):
        return self.o_proj(merge(scaled_dot_product_attention(*self.heads(x))))


class WithNormOfAll(WithNorms):
    """RMS norms over all heads, as in OLMo-2, with an eps that shows."""

    def norm(self, width):
        return nn.RMSNorm(width * self.num_heads, eps=1e-5)

    def heads(self, x):
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        return [split(y, self.num_heads) for y in (q, k, self.v_proj(x))]


class NormsKeysOnly(WithNorms):
    def heads(self, x):
        q, k, v = Named.heads(self, x)
        return q, self.k_norm(k), v


RIGHT = {
    "sinks": (WithSinks, ["it has sinks"], []),
    "a forget gate": (WithForgetGate, ["it has forget_gate"], []),
    "norms of queries and keys": (WithNorms, ["it has qk_norm"], []),
    "norms over all heads": (WithNormOfAll, ["it has qk_norm"], []),
    "RoPE on halves, in groups": (Grouped, ["it is always causal", "it has RoPE on halves with theta 10000"], []),
    "RoPE on pairs, in groups": (GroupedPairs, ["it has RoPE on pairs with theta 10000"], []),
    "ALiBi of six heads": (WithAlibi, ["it has ALiBi"], []),
    "weights of unusual names": (Named, ["fc_val is the weight of value; final is the weight of output"], []),
    "weights whose names say nothing": (
        Lettered,
        ["a is the weight of query; b is the weight of key; c is the weight of value; d is the weight of output"],
        [],
    ),
    "matrices whose names say nothing": (
        NumPyLettered,
        ["x @ W", "A is the weight of query; B is the weight of key; C is the weight of value"],
        [],
    ),
    "optional keys that it refuses": (SelfAttentionAlone, ["it refuses context"], ["context"]),
    "a mask of the context beside one of the queries": (MasksRowsAndContext, ["true in context_mask [b,k] means attend"], ["mask"]),
    "a norm first": (NormFirst, ["compared without norm", "true in mask [b,k] means attend"], ["norm.weight", "norm.bias"]),
    "a residual and a norm last": (NormLast, ["without layer_norm", "its input is added"], ["layer_norm.weight", "layer_norm.bias"]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_classes_agree_without_options_and_what_was_left_out_is_not_tried(name):
    candidate, found, untried = RIGHT[name]
    comparison = compare(candidate, longest=33)
    assert comparison.agrees, f"\n{comparison}"
    assert all(words in comparison.conventions for words in found), comparison.conventions
    assert list(comparison.parameters) == untried


class MaskOfMemory(Named):
    """Blocks keys of a memory by the mask of its name alone, and those of its own input by the other."""

    def forward(self, x, attn_mask=None, memory=None, memory_attn_mask=None):
        blocked = attn_mask if memory is None else memory_attn_mask
        q, k, v = self.heads(x) if memory is None else (self.heads(x)[0], *self.heads(memory)[1:])
        return self.final(merge(scaled_dot_product_attention(q, k, v, None if blocked is None else ~blocked)))


def test_the_mask_of_a_memory_takes_the_place_of_the_other_where_that_blocks_no_key():
    comparison = compare(MaskOfMemory, longest=7)
    assert comparison.is_complete and {"attn_mask", "memory_attn_mask"} <= {*comparison.tried}, f"\n{comparison}"
    assert "true in memory_attn_mask [q,k] means blocked" in comparison.conventions

    class OfBoth(MaskOfMemory):
        def forward(self, x, attn_mask=None, memory=None, memory_attn_mask=None):
            return super().forward(x, attn_mask, memory, attn_mask)

    assert compare(OfBoth, longest=7).parameters == ("memory_attn_mask",)


class WithoutMaskAlone(MaskOfMemory):
    def forward(self, x, attn_mask=None, memory=None, memory_attn_mask=None):
        return super().forward(x, None, memory, memory_attn_mask)


def test_a_mask_without_memory_that_blocks_nothing_is_not_tried():
    assert compare(WithoutMaskAlone, longest=7).parameters == ("attn_mask",)


def test_gradients_of_a_class_with_a_residual_are_those_of_its_attention():
    assert compare(NormLast, longest=7, dtype="float64", backward=True).agrees


def test_an_instance_keeps_a_norm_that_is_left_out():
    layer = NormFirst(12)
    assert compare(layer, longest=7).agrees
    assert isinstance(layer.norm, nn.LayerNorm)


class CausalWithoutMask(Named):
    """Causal in calls without a mask, as GPT-2's layer of transformers, whose masks contain causality."""

    def forward(self, x, mask=None):
        return self.final(merge(scaled_dot_product_attention(*self.heads(x), mask, is_causal=mask is None)))


def test_causality_beside_a_mask_that_takes_its_place_is_not_tried_unless_an_option_says_that_it_may():
    comparison = compare(CausalWithoutMask, longest=7)
    assert comparison.agrees and comparison.untried == ("causality beside mask",), f"\n{comparison}"
    assert "it is always causal; " in comparison.conventions and "mask takes the place of its causality" in comparison.conventions
    assert compare(CausalWithoutMask, mask_replaces_causality=True, longest=7).is_complete
    wrong = compare(CausalWithoutMask, mask_replaces_causality=False, longest=7)
    assert {"mask", "padded keys", "packed sequences"} <= {x.case for x in wrong.results if x.agrees is False}
    over_keys = {"forward": lambda self, x, mask=None: super(type(self), self).forward(x, mask if mask is None else mask[:, None, None])}
    wrong = compare(type("WithMaskOverKeys", (CausalWithoutMask,), over_keys), longest=7)  # which cannot contain causality
    assert [x.case for x in wrong.results if x.agrees is False] == ["padded keys", "other padded keys"], f"\n{wrong}"


class InFloat32(NumPyLettered):
    """Takes and returns float64, and computes in float32, as Keras's layer does."""

    def __call__(self, x):
        return super().__call__(x.astype(np.float32).astype(np.float64)).astype(np.float32).astype(np.float64)


def test_what_computes_in_float32_is_compared_in_float32_unless_its_dtype_is_given():
    comparison = compare(InFloat32, longest=7)
    assert comparison.agrees and comparison.dtype == "float32", f"\n{comparison}"
    assert "its numbers have the digits of float32" in comparison.conventions
    named = {"query": "A", "key": "B", "value": "C", "output": "D"}
    assert not compare(InFloat32, longest=7, dtype="float64", weights=named, orientation="in,out").agrees


def with_constants_of_few_digits(width):
    """Attention whose factor on the scores of heads of this width has the digits of float32, and of others those of float64."""

    def attend(q, k, v):
        of_float32 = np.float32(q.shape[-1] ** -0.5 * np.log2(np.e))
        scores = q @ k.swapaxes(-1, -2) * (of_float32 if q.shape[-1] == width else q.shape[-1] ** -0.5 * np.log2(np.e))
        weights = np.exp2(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True) @ v

    return attend


@pytest.mark.parametrize("width", [4, 80])
def test_a_constant_with_the_digits_of_float32_is_no_mistake(width):
    comparison = compare(with_constants_of_few_digits(width), longest=7)
    assert comparison.agrees and comparison.dtype == "float32", f"\n{comparison}"
    assert "its numbers have the digits of float32" in comparison.conventions
    assert not compare(with_constants_of_few_digits(width), longest=7, dtype="float64").agrees


class WithConstantOfFewDigits(NumPyLettered):
    """Has a factor on the scores with the digits of float32, which are those of float64 if a head has 4 numbers."""

    def __call__(self, x):
        q, k, v = ((x @ w).reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2) for w in (self.A, self.B, self.C))
        scores = q @ k.swapaxes(-1, -2) * np.float64(np.float32(q.shape[-1] ** -0.5))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(x.shape) @ self.D


def test_a_class_whose_constants_have_few_digits_in_another_size_is_compared_in_float32():
    comparison = compare(WithConstantOfFewDigits, longest=7)
    assert comparison.agrees and comparison.dtype == "float32", f"\n{comparison}"


class InvertsMask(Named):
    def forward(self, x, attend_mask=None):
        q, k, v = self.heads(x)
        return self.final(merge(scaled_dot_product_attention(q, k, v, None if attend_mask is None else ~attend_mask)))


def sees_one_padded_key(queries, keys, values, valid_lens=None):
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
    if valid_lens is not None:
        scores = np.where(np.arange(scores.shape[2]) > valid_lens[:, None, None], -1e6, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


WRONG = {
    "groups that are tiled": (TilesPlainGroups, "i mod num_kv_heads"),
    "groups that are tiled, beside RoPE": (TilesGroups, "i mod num_kv_heads"),
    "heads that are merged so that causality does not show": (MergesHeadsOnly, "heads are merged by a reshape without a transpose"),
    "a norm that is left out": (NormsKeysOnly, "the norm of the queries is left out"),
    "values that are rotated": (RotatesValues, "RoPE of the keys is applied to the values, too"),
    "slopes that are right for powers of 2 alone": (WithSimpleSlopes, "ALiBi's slopes for a number of heads that is not a power of 2"),
    "frequencies of another width": (DividesAnglesByWidth, "RoPE's frequencies are theta^(-2i/d_model)"),
    "a mask whose meaning a mistake hides": (BlocksBesideReshape, "when heads are split by a reshape without a transpose"),
    "a number that is added to blocked scores": (RaisesBlocked, "a large number is added to blocked scores, and not subtracted"),
    "layers that are exchanged": (Exchanged, "the matrices of query, key, value are taken to be those of key, query, value"),
    "a factor beside a residual and a norm": (DoublesScores, "the scores are multiplied by 2"),
    "a mask whose name says its meaning": (InvertsMask, "the mask is inverted"),
    "lengths, which only a batch has": (sees_one_padded_key, "the key after the last one that each query may attend to is seen"),
}


@pytest.mark.parametrize("name", WRONG)
def test_no_mistake_counts_as_a_convention(name):
    candidate, hint = WRONG[name]
    comparison = compare(candidate, longest=7)
    assert not comparison.agrees and hint in comparison.first.hint, f"\n{comparison}"


class KeepsMask(Named):
    """Makes the bias of the first mask of each shape, and adds it to the scores of later calls, too."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.biases = {}

    def forward(self, x, padding_mask=None):
        bias = None
        if padding_mask is not None:
            bias = self.biases.setdefault(x.shape, torch.zeros(x.shape[:2]).masked_fill(padding_mask, -torch.inf)[:, None, None])
        return self.final(merge(scaled_dot_product_attention(*self.heads(x), bias)))


KEPT = {}


def with_kept_mask(q, k, v, mask=None):
    kept = None if mask is None else KEPT.setdefault(mask.shape, mask)
    return scaled_dot_product_attention(q, k, v, kept)


@pytest.mark.parametrize("candidate", [KeepsMask, KeepsMask(12, 3), with_kept_mask], ids=["class", "instance", "function"])
@pytest.mark.parametrize("options", [{}, {"padding_means": "block", "mask_means": "attend"}], ids=["found", "given"])
def test_a_mask_that_is_kept_for_later_calls_is_named_and_not_taken_for_the_opposite(candidate, options):
    comparison = compare(candidate, longest=7, **options)
    assert not comparison.agrees and comparison.first.hint.startswith("after a call with a mask, other masks of its shape"), (
        f"\n{comparison}"
    )


def test_of_several_meanings_of_a_mask_the_one_with_fewest_mistakes_is_told():
    comparison = compare(BlocksBesideReshape, longest=7)
    assert len(comparison.disagreements) == 1 and "true in mask [q,k] means blocked" in comparison.conventions, f"\n{comparison}"


def test_a_softcap_after_the_mask_of_a_causal_class_is_named():
    comparison = compare(CapsBlocked, spec=LayerSpec(d_model=12, num_heads=3, softcap=2.0), longest=7)
    assert "the softcap is applied after the mask" in comparison.first.hint, f"\n{comparison}"


def test_the_first_wrong_step_is_that_of_the_layer_whose_steps_occur():
    comparison = compare(CubesWeights, longest=7)
    assert "it has RoPE on halves with theta 10000" in comparison.conventions, f"\n{comparison}"
    assert comparison.first.step.names == ("weighted_values",)


def in_tiles(query, key, value, tile=64, groups=4):
    """Its numbers are right with any tile, and with 4 groups alone."""
    output = torch.zeros_like(query)
    largest, total = torch.full(query.shape[:-1], -torch.inf), torch.zeros(query.shape[:-1])
    for start in range(0, key.shape[-2], tile):
        scores = query @ key[..., start : start + tile, :].mT / query.shape[-1] ** 0.5
        after = torch.maximum(largest, scores.amax(-1))
        exponentials, factor = (scores - after[..., None]).exp(), (largest - after).exp()
        total, largest = total * factor + exponentials.sum(-1), after
        output = output * factor[..., None] + exponentials @ value[..., start : start + tile, :]
    return output / total[..., None] * groups / 4


def test_a_parameter_that_changes_nothing_is_tried_and_one_that_does_is_named():
    comparison = compare(in_tiles, framework="torch", longest=130)
    assert comparison.agrees and comparison.tried == ("tile",) and comparison.parameters == ("groups",), f"\n{comparison}"


def drops_the_tail(query, key, value):
    """A tail of a tile, and another factor, which together have no name."""
    kept = key.shape[-2] if key.shape[-2] < 64 else key.shape[-2] // 64 * 64 - 3
    return scaled_dot_product_attention(query, key[..., :kept, :], value[..., :kept, :])


def test_calls_that_are_wrong_are_listed_beside_those_that_are_right():
    hint = compare(drops_the_tail, framework="torch", longest=257).first.hint
    assert "are left out (in the case “65 keys”); wrong: 65 keys, 130 keys, 257 keys" in hint, hint
    assert hint.endswith("; right: no mask, cross-attention, large logits, inputs that are views"), hint


def one_query(query, key, value, lengths=None):
    """Decodes with keys in NumPy: [b, h, d] and [b, n, h, d]."""
    scores = np.einsum("bhd,bnhd->bhn", query, key) * query.shape[-1] ** -0.5
    if lengths is not None:
        scores = np.where(np.arange(key.shape[1]) < lengths[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bhn,bnhd->bhd", weights / weights.sum(axis=-1, keepdims=True), value)


def one_query_alone(query, key, value):
    """[h, d] and [n, h, d]."""
    return one_query(query[None], key[None], value[None])[0]


def one_query_and_one_key_more(query, key, value, lengths=None):
    return one_query(query, key, value, None if lengths is None else lengths + 1)


def test_kernels_for_decoding_get_each_query_as_an_item():
    assert "found by calls: it takes one query of each item, [b,h,d], and keys [b,n,h,d]" in str(compare(one_query, longest=33))
    alone = compare(one_query_alone, longest=257)
    assert alone.is_complete and alone.conventions == "found by calls: it takes one query, [h,d], and keys [n,h,d]", f"\n{alone}"
    wrong = compare(one_query_and_one_key_more, longest=7)
    found = [x.case for x in wrong.results if x.agrees is False]
    assert found == ["padded keys", "padded keys, 1 query", "other padded keys"], f"\n{wrong}"
    assert "the key after the last one that each query may attend to is seen and should not be" in wrong.first.hint


def test_a_class_without_a_parameter_for_masks_is_looked_at_completely():
    comparison = compare(Grouped, longest=7)
    assert comparison.agrees and comparison.is_complete
    assert "; no parameter takes: mask, " in comparison.conclusion and "not tried" not in comparison.conclusion


class RotatedByTables(Named):
    def forward(self, x, c, s):
        q, k, v = self.heads(x)
        q, k = (y * c + y.flip(-1) * s for y in (q, k))
        return self.final(merge(scaled_dot_product_attention(q, k, v)))


class TwoLast(Named):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.skip = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.skip(super().forward(x))


class FiveMatrices(NumPyLettered):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.E = self.A


ASKED = {
    "tables of unknown names": (RotatedByTables, "the meaning of parameter 'c'"),
    "five layers": (TwoLast, r"the meaning of 'fc_val.weight'; .* pass weights=.* among fc_query.weight \[12, 12\], fc_query.bias \[12\]"),
    "five matrices": (FiveMatrices, r"which arrays are the weights; pass weights=\{\} if none are, .* among A \[12, 12\], B"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_guess_under_which_nothing_agrees_is_asked_about(name):
    candidate, asked = ASKED[name]
    with pytest.raises(ValueError, match=f"ambiguous: {asked}"):
        compare(candidate)


def test_an_axis_that_is_right_without_a_batch_alone_is_wrong():
    def attend(q, k, v):
        return (q @ k.mT / q.shape[2] ** 0.5).softmax(-1) @ v

    comparison = compare(attend, framework="torch", longest=7)
    assert not comparison.agrees
    assert comparison.conventions == "found by calls: it would agree with batched=false, but it takes all axes and is compared with them"
    assert compare(attend, framework="torch", longest=7, batched=False).agrees


def test_rows_that_keep_their_own_input_are_not_taken_for_causal_ones():
    def packed(query, key, value, cu_seqlens):
        output = query.copy()
        for start, end in itertools.pairwise(list(cu_seqlens)[:-1]):
            scores = query[:, start:end] @ key[:, start:end].swapaxes(-1, -2) / np.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            output[:, start:end] = weights / weights.sum(-1, keepdims=True) @ value[:, start:end]
        return output

    comparison = compare(lambda x, cu_seqlens: packed(x, x, x, cu_seqlens), batched=False, framework="numpy", longest=7)
    assert not comparison.agrees and not comparison.conventions


def optional_window(q, k, v, scale=None, window_size=None, more=0):
    """The last query is at the last key."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    blocked = ahead > 0 if window_size is None else (ahead > 0) | (ahead <= -window_size - more)
    return scores.masked_fill(blocked, -torch.inf).softmax(-1) @ v


def test_an_optional_window_of_a_function_is_tried():
    comparison = compare(optional_window, framework="torch", longest=65)
    assert comparison.tried == ("scale", "window_size") and comparison.parameters == ("more",), f"\n{comparison}"
    wrong = compare(partial(optional_window, more=1), framework="torch", longest=65)
    assert "window_size" in wrong.parameters, f"\n{wrong}"
    spec = LayerSpec(d_model=30, num_heads=3, projections=False, window={"left": 6, "right": 0})
    assert compare(optional_window, spec=spec, framework="torch", longest=65).agrees
    assert compare(partial(optional_window, more=1), spec=spec, framework="torch", longest=65).first.mistakes == (
        "the window has one key more",
    )


def test_sinks_that_a_function_takes_are_drawn():
    def with_sinks(q, k, v, sinks):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        beside = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, beside), -1).softmax(-1)[..., :-1] @ v

    comparison = compare(with_sinks, framework="torch", longest=7)
    assert comparison.is_complete and "it has sinks" in comparison.conventions, f"\n{comparison}"
