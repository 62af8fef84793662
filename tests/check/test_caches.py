"""`compare` of candidates with a cache."""

import pytest
import torch
from torch import nn

from attend.check import assert_agrees, compare
from attend.spec import LayerSpec
from support.candidates import merge, scaled_dot_product, split


class Cached(nn.Module):
    """Causal attention with a cache of keys and values, whose last query is at the last key."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def first_position(self, queries, keys):
        return keys - queries

    def used(self, cache):
        return cache

    def forward(self, x, kv_cache=None):
        q, k, v = (split(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if (cache := self.used(kv_cache)) is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cache, (k, v), strict=True))
        rows = torch.arange(q.shape[2])[:, None] + self.first_position(q.shape[2], k.shape[2])
        output, _ = scaled_dot_product(q, k, v, torch.arange(k.shape[2]) <= rows)
        return self.o_proj(merge(output)), (k, v)


@pytest.mark.parametrize(
    ("replaced", "named"),
    [
        ({}, None),
        ({"first_position": lambda self, queries, keys: 0}, "in a call with a cache, the causal mask is aligned at the first key"),
        (
            {"first_position": lambda self, queries, keys: keys - 1 if queries == 1 else 0},
            "in a call of several rows with a cache, the causal mask is aligned at the first key",
        ),
        ({"used": lambda self, cache: None}, "the cache is not used: each call sees its own rows alone"),
    ],
)
def test_a_candidate_with_a_cache_is_decoded_and_compared_with_one_causal_call(replaced, named):
    comparison = compare(type("Cached", (Cached,), replaced), causal=True, longest=7)
    cases = {result.case: result.agrees for result in comparison.results}
    assert cases["no mask"] is True
    assert cases["decoding row by row"] is (named is None or "several rows" in named)
    assert cases["decoding in chunks"] is (named is None)
    assert comparison.agrees if named is None else comparison.first.mistakes[0].startswith(named)


def test_a_cache_that_is_not_returned_is_not_tried():
    class Keeps(Cached):
        def forward(self, x, kv_cache=None):
            return super().forward(x, kv_cache)[0]

    comparison = compare(Keeps, longest=7)
    assert comparison.agrees and "not return its cache last" in comparison.omissions, comparison


class LengthOfAnotherAxis(Cached):
    """Reads the length of the cache from one of its axes, 2 if it is right; `alone`: calls of one row have a mask too."""

    axis, alone = 2, True

    def used(self, cache):
        self.length = 0 if cache is None else len(cache) if self.axis is None else cache[0].shape[self.axis]
        return cache

    def first_position(self, queries, keys):
        return self.length if self.alone or queries > 1 else keys - 1


class KeysOfAnotherAxis(LengthOfAnotherAxis):
    """Reads the number of all keys from one of their axes."""

    def first_position(self, queries, keys):
        sizes = {0: self.batch, 1: self.num_heads, 2: keys, 3: self.q_proj.out_features // self.num_heads}
        return sizes[self.axis] - queries if self.alone or queries > 1 else keys - 1

    def forward(self, x, kv_cache=None):
        self.batch = len(x)
        return super().forward(x, kv_cache)


@pytest.mark.parametrize(
    ("right", "axis", "alone", "taken"),
    [
        (LengthOfAnotherAxis, 0, True, "in a call with a cache, the size of the batch is taken for the length of the cache"),
        (LengthOfAnotherAxis, None, False, "in a call of several rows with a cache, len((K, V)) is taken for the length of the cache"),
        (KeysOfAnotherAxis, 1, True, "the number of key heads is taken for the number of keys"),
        (KeysOfAnotherAxis, 3, False, "in a call of several rows, head_dim is taken for the number of keys"),
    ],
)
def test_a_length_that_is_read_from_another_axis_of_the_cache_is_named(right, axis, alone, taken):
    assert_agrees(type("Right", (right,), {"alone": alone}), causal=True, allow_skipped=True, longest=7)
    first = compare(type("Wrong", (right,), {"axis": axis, "alone": alone}), causal=True, longest=7).first
    assert (first.explanation.mistakes, first.explanation.equals) == ((f"{taken} in the causal mask",), ())
    assert first.step is not None and first.step.line.file == __file__


class RotatedCache(nn.Module):
    """Grouped heads with RoPE, whose positions begin at the length of the cache [b, n, h, d]: that is axis 1."""

    query_axis = key_axis = 1

    def __init__(self, d_model, num_heads, num_kv_heads, head_dim):
        super().__init__()
        self.head_dim = head_dim
        heads = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
        for name, number in heads.items():
            setattr(self, name, nn.Linear(d_model, number * head_dim, bias=False))
        self.o_proj = nn.Linear(num_heads * head_dim, d_model, bias=False)

    def rotate(self, x, role, past):
        return self.rotated(x, 0 if past is None else past[0].shape[getattr(self, f"{role}_axis")])

    def rotated(self, x, start):
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = ((start + torch.arange(x.shape[1]))[:, None] * frequencies)[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)

    def cached(self, past):
        return past

    def forward(self, x, past=None):
        q, k, v = (layer(x).unflatten(2, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotate(q, "query", past), self.rotate(k, "key", past)
        k, v = (k, v) if past is None else (torch.cat(pair, dim=1) for pair in zip(self.cached(past), (k, v), strict=True))
        keys, values = (rows.transpose(1, 2).repeat_interleave(q.shape[2] // rows.shape[2], dim=1) for rows in (k, v))
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        output, _ = scaled_dot_product(q.transpose(1, 2), keys, values, visible)
        return self.o_proj(merge(output)), (k, v)


def test_positions_of_rope_that_begin_at_another_axis_of_the_cache_are_named():
    rope = {"theta": 10000.0, "interleaved": False}
    spec = LayerSpec(d_model=26, num_heads=6, num_kv_heads=3, head_dim=10, bias=False, rope=rope)
    wrong = type("Wrong", (RotatedCache,), {"query_axis": 2})
    assert compare(RotatedCache, spec=spec, causal=True, longest=7).agrees
    explanation = compare(wrong, spec=spec, causal=True, longest=7).first.explanation
    assert explanation.mistakes == (
        "in a call with a cache, the number of key heads is taken for the length of the cache in RoPE's positions of queries",
    )
    assert not explanation.equals


def test_cached_keys_that_are_rotated_in_each_call_are_named():
    class Wrong(RotatedCache):
        def cached(self, past):
            keys, values = past
            return self.rotated(keys, 0), values

    spec = LayerSpec(d_model=26, num_heads=6, num_kv_heads=3, head_dim=10, bias=False, rope={})
    explanation = compare(Wrong, spec=spec, causal=True, longest=7).first.explanation
    assert (explanation.mistakes, explanation.equals) == (("RoPE rotates the cached keys again in each call",), ())


class RotatesAgain(RotatedCache):
    """All keys are rotated in each call, those of the cache, which are rotated, too."""

    def projected(self, x, past):
        q, k, v = (layer(x).unflatten(2, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if past is not None:
            k, v = (torch.cat(pair, dim=1) for pair in zip(past, (k, v), strict=True))
        return q, k, v

    def forward(self, x, past=None):
        q, k, v = self.projected(x, past)
        q, k = self.rotated(q, k.shape[1] - q.shape[1]), self.rotated(k, 0)
        return self.attended(q, k, v), (k, v)

    def attended(self, q, k, v):
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / self.head_dim**0.5
        later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


class RotatesAgainUnnamed(RotatesAgain):
    """The rotated queries have no name where they are used."""

    def forward(self, x, past=None):
        q, k, v = self.projected(x, past)
        k = self.rotated(k, 0)
        return self.attended(self.rotated(q, k.shape[1] - q.shape[1]), k, v), (k, v)


@pytest.mark.parametrize("candidate", [RotatesAgain, RotatesAgainUnnamed])
def test_what_one_function_makes_of_queries_and_keys_in_turn_is_told_apart(candidate):
    spec = LayerSpec(d_model=26, num_heads=3, head_dim=10, num_kv_heads=3, bias=False, rope={})
    assert compare(candidate, spec=spec, causal=True, longest=7).first.step.names == ("rotate_key",)


class InPlace(Cached):
    """A cache that is a list of keys and values, which each call changes."""

    def forward(self, x, kv_cache=None):
        kv_cache = [] if kv_cache is None else kv_cache
        output, kv_cache[:] = super().forward(x, tuple(kv_cache) or None)
        return output


class KeepsPositions(InPlace):
    """Its last position is not in the cache, so that it survives a roll-back."""

    def first_position(self, queries, keys):
        self.rows = queries if keys == queries else self.rows + queries
        return self.rows - queries


class Llama(Cached):
    """A cache in the module, and the position of the first row as an argument."""

    def forward(self, x, start_pos):
        kept = [rows[:, :, :start_pos] for rows in self.kept] if start_pos else None
        output, self.kept = super().forward(x, kept)
        return output


class ForgetsToRollBack(Llama):
    def forward(self, x, start_pos):
        output, self.kept = Cached.forward(self, x, self.kept if start_pos else None)
        return output


class Grows(Llama):
    """Its cache of 256 rows grows while rows are decoded, and then loses the last of them."""

    def forward(self, x, start_pos):
        if start_pos and start_pos == 256 < start_pos + x.shape[1]:
            self.kept = [torch.cat((rows[:, :, :-1], 0 * rows[:, :, -1:]), dim=2) for rows in self.kept]
        return super().forward(x, start_pos)


def test_a_cache_that_loses_a_row_when_it_grows_is_found():
    comparison = compare(Grows, causal=True, longest=259)
    assert [result.case for result in comparison.results if result.agrees is False] == ["decoding 259 rows"]


@pytest.mark.parametrize(
    ("candidate", "options", "wrong", "named"),
    [
        (InPlace, {"new_cache": "list"}, set(), ()),
        (KeepsPositions, {"new_cache": "list"}, {"decoding with roll-back"}, ()),
        (Llama, {}, set(), ()),
        (ForgetsToRollBack, {}, {"decoding with roll-back"}, ("rows that were rolled back stay in the cache",)),
    ],
)
def test_caches_in_place_and_in_the_candidate_are_decoded_and_rolled_back(candidate, options, wrong, named):
    comparison = compare(candidate, causal=True, longest=7, **options)
    assert {result.case for result in comparison.results if result.agrees is False} == wrong
    assert sum(result.case.startswith("decoding") for result in comparison.results) == 3
    assert (comparison.first.mistakes if comparison.first else ()) == named


class WithFlag(Cached):
    """Keeps the rows of calls with a flag, as no value that it takes or returns shows."""

    kept = None

    def forward(self, x, use_cache=False):
        output, cache = super().forward(x, self.kept if use_cache else None)
        self.kept = cache if use_cache else self.kept
        return output


class FlagWithTopLeft(WithFlag):
    def first_position(self, queries, keys):
        return 0


class FlagOfReturnedCache(Cached):
    """A flag whose cache is returned, and taken by a parameter of unknown meaning."""

    def forward(self, x, use_cache=False, state=None):
        output, cache = super().forward(x, state)
        return (output, cache) if use_cache else output


def test_a_cache_in_the_candidate_that_a_flag_turns_on_is_decoded():
    comparison = compare(WithFlag, longest=7)
    cases = [x.case for x in comparison.results if x.agrees]
    assert comparison.is_complete and {"decoding row by row", "decoding in other chunks"} <= {*cases}, f"\n{comparison}"
    layer = WithFlag(12, 3)
    assert compare(layer, longest=7).is_complete and layer.kept is None
    wrong = compare(FlagWithTopLeft, longest=7)
    assert wrong.first.mistakes[0].startswith("in a call with a cache, the causal mask is aligned at the first key"), f"\n{wrong}"


def test_a_flag_whose_cache_is_returned_is_not_tried():
    comparison = compare(FlagOfReturnedCache, longest=7)
    assert comparison.agrees and comparison.parameters == ("use_cache", "state"), f"\n{comparison}"


class Padded(Cached):
    """`attention_mask` [b, k] has the cached keys, too."""

    forgets = False

    def forward(self, x, attention_mask=None, layer_past=None):
        q, k, v = (split(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if layer_past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(layer_past, (k, v), strict=True))
        rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        visible = torch.arange(k.shape[2]) <= rows
        if attention_mask is not None and not (self.forgets and layer_past is not None):
            visible = visible & attention_mask[:, None, None].bool()
        return self.o_proj(merge(scaled_dot_product(q, k, v, visible)[0])), (k, v)


class ForgetsPadding(Padded):
    forgets = True


def test_a_padded_key_is_blocked_in_calls_with_a_cache_too():
    assert "decoding with a padded key" in [x.case for x in compare(Padded, longest=7).results if x.agrees]
    comparison = compare(ForgetsPadding, longest=7)
    assert [x.case for x in comparison.results if x.agrees is False] == ["decoding with a padded key"], f"\n{comparison}"
