"""Steps with a KV cache against the float64 reference, and against one causal call."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attend.attention.cache import KeyValueCache, PagePool
from attend.attention.decoding import forward_cached
from attend.attention.kernels import pages
from attend.attention.kernels.pages import MAX_HEAD_DIM
from attend.attention.native.extension import extension
from attend.check.random_cases import FEATURES, LAYER_FEATURES, Case, random_case
from attend.errors import InvalidRequest, SessionConflict, TooLarge
from attend.limits import ServingLimits
from attend.serving.admission import Admission
from attend.serving.calls import make_call
from attend.serving.casting import numpy_of
from attend.serving.sessions.steps import STEP
from attend.spec import LayerSpec
from attend.wire.codec import Decoded
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from support.decoding import Sequence, random_sequence, random_step, small_pages_of

SEEDS = st.integers(0, 2**32 - 1)
RNG = np.random.default_rng(0)
PAGE_BYTES = 600
ROUNDED_AGAIN = {"qk_norm", "query_scale", "grid_bias", "relative_scores"}  # round queries or keys to half precision more often than others


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    """Pages of few rows, so that short sequences have several."""
    with small_pages_of(PAGE_BYTES):
        yield


def sequence_of(**spec: Any) -> Sequence:
    return Sequence(Case(LayerSpec(**{"d_model": 6, "num_heads": 3, "seed": 1, "dtype": "float64", **spec}), {}))


@given(seed=SEEDS, dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]))
def test_random_steps_agree_with_the_reference(seed: int, dtype: str) -> None:
    """All outputs of steps with any masks, biases and positions, of sequences that are forked and rolled back. Memory returns."""
    rng, pool = np.random.default_rng(seed), PagePool(torch.device("cpu"))
    features = frozenset(FEATURES) - (ROUNDED_AGAIN if dtype in ("float16", "bfloat16") else frozenset())
    sequences = [random_sequence(rng, pool, dtype=dtype, features=features)]
    for _ in range(9):
        sequence = sequences[rng.integers(len(sequences))]
        freed, length = sequence.cache.first, int(rng.integers(sequence.length + 1))
        try:
            match rng.integers(6):
                case 0:
                    sequence.truncate(length)
                case 1 if len(sequences) < 4:
                    sequences.append(sequence.fork(length))
                case _ if sequence.room:
                    sequence.step(random_step(sequence, rng))
        except SessionConflict:
            assert freed > 0
    for sequence in sequences:
        sequence.cache.close()
    assert pool.used == pool.shared == pool.of_owner["owner"] == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
@given(seed=SEEDS)
def test_steps_equal_one_causal_call(dtype: str, tolerance: float, seed: int) -> None:
    """Output and weights of any split into steps, to `tolerance` of the largest value, times the largest score if that exceeds 1."""
    rng = np.random.default_rng(seed)
    features = set(LAYER_FEATURES) - {"weights", "qk_norm", "normalizer"}  # sigmoid weights depend on the number of keys
    case = random_case(rng, features=features, rate=0.3, dtype=dtype, init="xavier_uniform", batched=False)
    sequence, count = Sequence(Case(case.spec, {}, case.weights)), 13
    query = rng.standard_normal((count, case.spec.query_dim)).astype(dtype)
    outputs = ["output", "attention_weights", "query_projection", "key_projection"]
    request = validate(AttendRequest, {"layer": "layer", "query": query, "causal": True, "outputs": outputs})
    whole = sequence.layer.attention.forward(make_call(request, case.spec)).tensors
    keys = whole["key_projection"].repeat_interleave(case.spec.num_heads // case.spec.num_kv_heads, 1)
    tolerance *= max(1.0, case.spec.scale * float((whole["query_projection"] @ keys.transpose(2, 3)).abs().max()))
    start = 0
    while start < count:
        stop = min(count, start + int(rng.choice([1, 1, 2, 5])))
        outputs = ["output", "attention_weights"] if rng.random() < 0.3 else ["output"]
        prepared = sequence.prepare({"query": query[start:stop], "causal": True, "outputs": outputs})
        tensors = prepared.operation.run(sequence.layer.attention, prepared.call).tensors
        for name, got in tensors.items():
            expected = whole[name][..., start:stop, : got.shape[-1]]
            assert (got - expected).abs().max() <= tolerance * whole[name].abs().max(), (name, case.spec)
        start = stop


@given(seed=SEEDS)
def test_steps_of_several_caches_in_one_batch_agree_with_the_reference(seed: int) -> None:
    """The caches have different lengths and the calls different options; only the shapes of the new rows are equal."""
    rng = np.random.default_rng(seed)
    first = random_sequence(rng, features=LAYER_FEATURES)
    sequences = [first, *(Sequence(first.case, first.pool, first.layer) for _ in range(3))]
    for sequence in sequences[:-1]:
        sequence.step(sequence.draw(rng, *(int(n) for n in rng.integers(1, 5, 2))))
    queries, keys = (int(n) for n in rng.choice([1, 1, 2, 3], 2))
    features = ("mask", "key_mask", "valid_lens", "bias", "causal", "window", "head_scale", "scale", "softcap")
    steps = [sequence.draw(rng, queries, keys, *(name for name in features if rng.random() < 0.2)) for sequence in sequences]
    starts = [sequence.length for sequence in sequences]
    prepared = [sequence.prepare(members) for sequence, members in zip(sequences, steps, strict=True)]
    results = forward_cached(first.layer.attention, [(each.operation, each.call) for each in prepared])
    for sequence, members, start, result in zip(sequences, steps, starts, results, strict=True):
        sequence.keep(members)
        sequence.check(result, members, start)


@pytest.mark.parametrize("offset", [-5, 3, 40])
@pytest.mark.parametrize("window", [None, {"left": 2}])
def test_a_query_beyond_its_keys_agrees_with_the_reference(offset: int, window: dict[str, int] | None) -> None:
    """ALiBi is then a large bias of all keys, and a sink has none."""
    spec = LayerSpec(d_model=6, num_heads=3, dtype="float64", alibi=True, sinks=True, window=window)
    weights = {name: RNG.standard_normal(shape) for name, shape in spec.weight_shapes().items()}
    sequence = Sequence(Case(spec, {}, weights))
    sequence.step(sequence.draw(RNG, 7, 7))
    sequence.cache.first or sequence.step({**sequence.draw(RNG, 1, 1), "query_offset": offset, "outputs": ["output"]})


@pytest.mark.parametrize("head_dim", [2, 16])
def test_rows_that_overflow_agree_with_the_reference(head_dim: int) -> None:
    """Scores overflow float32 within a page; the weights of the others, and masked ones, stay right. Heads of 16 are computed in C."""
    sequence = sequence_of(dtype="float32", projections=False, head_dim=head_dim)
    for factor in (1e30, 1.0, -1e30, 1.0):
        row = {name: rows * np.float32(factor) for name, rows in sequence.draw(RNG, 1, 1).items()}
        prepared = sequence.prepare({**row, "outputs": ["output"]})
        step = prepared.operation.run(sequence.layer.attention, prepared.call).tensors["output"]
        sequence.keep(row)
        keys = sequence.rows["key"].astype("f4")
        request = {"layer": "layer", "query": row["query"], "key": keys, "query_offset": sequence.length - 1}
        whole = sequence.layer.attention.forward(make_call(validate(AttendRequest, {**request, "outputs": ["output"]}), sequence.spec))
        np.testing.assert_allclose(numpy_of(step), numpy_of(whole.tensors["output"]), rtol=1e-6)


def test_a_look_appends_nothing_and_needs_no_page() -> None:
    """Also where keys are narrower than queries, and in a fork, whose pages stay shared."""
    for spec in ({"projections": False, "num_kv_heads": 1, "value_head_dim": 5}, {"key_dim": 5, "value_dim": 7}):
        case = Case(LayerSpec(d_model=6, num_heads=3, dtype="float64", **spec), {"key": ..., "value": ...})
        sequence = Sequence(case)
        sequence.step(sequence.draw(RNG, 2, 5))
        fork = sequence.fork(5)
        used = sequence.pool.used
        fork.step({"query": sequence.draw(RNG, 3, 1)["query"], "append": False, "query_offset": 1})
        assert sequence.pool.used == sequence.pool.shared == used


@pytest.mark.parametrize("axes", [None, [0, 1]])
def test_a_look_may_have_positions(axes: list[int] | None) -> None:
    spec = LayerSpec(d_model=8, num_heads=2, dtype="float64", rope={"axes": axes} if axes else {})
    sequence = Sequence(Case(spec, {}))
    sequence.step(sequence.draw(RNG, 4, 4, "positions"))
    sequence.step(sequence.look(RNG, 3, "positions"))


def test_keys_of_latent_layers_and_latents_of_normed_layers_are_refused() -> None:
    latent = sequence_of(latent={"key_value_rank": 5, "rope_key_dim": 1})
    members = latent.draw(RNG, 1, 1)
    with pytest.raises(InvalidRequest, match="no value, since sessions of this layer"):
        latent.prepare({**members, "key": members["query"], "value": members["query"]})
    normed = sequence_of(latent={"key_value_rank": 5, "rope_key_dim": 1}, qk_norm={"kind": "rms"})
    with pytest.raises(InvalidRequest, match="no latent, since sessions of this layer"):
        normed.prepare({**members, "outputs": ["latent"]})


def test_a_window_frees_pages_and_bounds_what_is_possible() -> None:
    """The refusals name the lowest length, and nothing is appended."""
    sequence = sequence_of(window={"left": 3})
    rows = PAGE_BYTES // sequence.cache.row_bytes
    sequence.step(sequence.draw(RNG, 1, 1))
    sequence.step(sequence.draw(RNG, 3 * rows, 3 * rows))
    freed = sequence.cache.first
    assert freed == 2 * rows

    for refused in (lambda: sequence.truncate(freed + 2), lambda: sequence.fork(0)):
        with pytest.raises(SessionConflict, match=f"at least {freed + 3}, since the first {freed} rows are freed"):
            refused()
    query = sequence.draw(RNG, 1, 1)["query"]
    for offset in (0, 1 - 2**31, [freed + 2], "end"):
        lengths = {"valid_lens": np.array([2])} if offset == "end" else {}
        with pytest.raises(SessionConflict, match="/query_offset"):
            sequence.prepare({"query": query[None], "query_offset": offset, **lengths})
    with pytest.raises(SessionConflict, match="would average rows that the layer's window has freed"):
        sequence.prepare({"query": query, "valid_lens": np.array(0), "fully_masked": "uniform"})
    sequence.step({"query": query, "valid_lens": np.array(0)})
    sequence.truncate(freed + 3)
    sequence.step({"query": query})


def in_c(
    query: np.ndarray, cache: KeyValueCache, keys: slice, variant: str, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output [heads, d] and log-sum-exp [heads] of query [kv heads, group, d], as an implementation in C computes them."""
    added = None if bias is None else torch.from_numpy(bias)
    result = pages.attend_to_pages(torch.from_numpy(query), 0.3, cache, keys, added, variant)
    assert result is not None
    return result[0].numpy(), result[1].numpy()


def filled_cache(
    rng: np.random.Generator, kv_heads: int, width: int, rows: int, page_rows: int
) -> tuple[KeyValueCache, np.ndarray, np.ndarray]:
    """A cache with random rows, and its keys and values [kv_heads, rows, width]."""
    key, value = rng.standard_normal((2, kv_heads, rows, width)).astype(np.float32)
    with small_pages_of(8 * kv_heads * width * page_rows):
        cache = KeyValueCache(LayerSpec(d_model=kv_heads * width, num_heads=kv_heads), PagePool(torch.device("cpu")), "owner")
    cache.reserve(rows)
    cache.write(0, {"key": torch.from_numpy(key), "value": torch.from_numpy(value)})
    return cache, key, value


@given(
    seed=SEEDS,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 8, 9, 17]),
    width=st.sampled_from([1, 5, 8, 16, 17, 31, 48, 64, 97, 128, 144, 256]),
    rows=st.sampled_from([1, 2, 7, 16, 31, 64, 509, 512, 1031, 1613]),
    page_rows=st.sampled_from([5, 17, 512, 601, 2000]),
    size=st.sampled_from([1.0, 100.0]),
    has_bias=st.booleans(),
)
def test_steps_in_c_agree_with_float64(
    seed: int, kv_heads: int, group: int, width: int, rows: int, page_rows: int, size: float, has_bias: bool
) -> None:
    """Every implementation that this processor can run, for any part of a cache; threads do not change a bit."""
    rng = np.random.default_rng(seed)
    cache, key, value = filled_cache(rng, kv_heads, width, rows, page_rows)
    query = (size * rng.standard_normal((kv_heads, group, width)) / np.sqrt(width)).astype(np.float32)
    first, stop = sorted(int(n) for n in rng.integers(0, rows + 1, 2))
    keys = slice(first, stop) if first < stop else slice(0, rows)
    bias = rng.standard_normal((kv_heads, group, keys.stop - keys.start)).astype(np.float32) if has_bias else None
    scores = 0.3 * query.astype("f8") @ key[:, keys].astype("f8").swapaxes(1, 2) + (0 if bias is None else bias)
    most = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - most)
    totals = exponentials.sum(-1, keepdims=True)
    expected = (exponentials @ value[:, keys].astype("f8") / totals).reshape(-1, width)
    expected_total = (most + np.log(totals)).reshape(-1)
    tolerance = 2e-6 * max(1.0, np.abs(scores).max())
    for variant in extension.variants if extension is not None else ():
        output, total = in_c(query, cache, keys, variant, bias)
        assert np.abs(output - expected).max() <= tolerance * np.abs(value).max()
        assert np.abs(total - expected_total).max() <= tolerance * max(1.0, np.abs(expected_total).max())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 3)
            assert all(np.array_equal(a, b) for a, b in zip(in_c(query, cache, keys, variant, bias), (output, total), strict=True))


@pytest.mark.parametrize(
    "more", [{}, {"sinks": True}, {"window": {"left": 5}}, {"num_kv_heads": 1}, {"alibi": True}, {"head_dim": 17}], ids=str
)
@pytest.mark.parametrize("has_extension", [True, False])
def test_steps_with_and_without_the_extension_agree_with_the_reference(
    more: dict[str, Any], has_extension: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_extension:
        monkeypatch.setattr(pages, "extension", None)
    sequence = sequence_of(**{"d_model": 7, "num_heads": 3, "head_dim": 16, "dtype": "float32", **more})
    sequence.step(sequence.draw(RNG, 11, 11))
    for _ in range(5):
        sequence.step({**sequence.draw(RNG, 1, 1), "causal": True, "outputs": ["output"]})


@pytest.mark.parametrize("kv_heads", [-1, 0, 3, 2**20, 2**31 - 1])
@pytest.mark.parametrize("width", [-16, 0, 8, 24, MAX_HEAD_DIM + 1, 2**31 - 16])
def test_steps_in_c_refuse_sizes_that_do_not_fit(kv_heads: int, width: int) -> None:
    """Nothing is read or written beyond an array."""
    query, page, total = np.zeros((2, 1, 16), np.float32), np.zeros((2, 5, 16), np.float32), np.zeros((2, 1), np.float32)

    def attend(kv_heads: int, width: int, key: np.ndarray, value: np.ndarray, first: int, stop: int, output: np.ndarray = total) -> None:
        extension.attend_cache(
            extension.variants[0], 1, kv_heads, 1, width, 1.0, query, ((key, value, first, stop),), None, query.copy(), output
        )

    if extension is not None:
        attend(2, 16, page, page, 0, 5)
        for sizes in ((kv_heads, 16), (2, width), (kv_heads, width)):
            with pytest.raises(ValueError, match="sizes"):
                attend(*sizes, page, page, 0, 5)
        for rows in ((-1, 5), (0, 6), (3, 3), (4, 3), (5, 6)):
            with pytest.raises(ValueError, match="sizes"):
                attend(2, 16, page, page, *rows)
        with pytest.raises(ValueError, match="sizes"):
            attend(2, 16, page, page[:, :4].copy(), 0, 4)
        with pytest.raises(ValueError, match="sizes"):
            attend(2, 16, page, page, 0, 5, total[:1].copy())
        with pytest.raises(ValueError, match="variant"):
            extension.attend_cache("none", 1, 2, 1, 16, 1.0, query, ((page, page, 0, 5),), None, query.copy(), total)
        with pytest.raises(ValueError, match="sizes"):
            extension.attend_cache(extension.variants[0], 1, 2, 1, 16, 1.0, query, (), None, query.copy(), total)
        for bias in (np.zeros(2 * 5 - 1, np.float32), np.zeros(2 * 5 + 1, np.float32)):
            with pytest.raises(ValueError, match="sizes"):
                extension.attend_cache(extension.variants[0], 1, 2, 1, 16, 1.0, query, ((page, page, 0, 5),), bias, query.copy(), total)


def test_a_step_beyond_the_limits_is_refused_also_where_calls_are_cut_into_parts() -> None:
    """Its cache is in one process."""
    spec = LayerSpec(d_model=6, num_heads=3)
    sequence = Sequence(Case(spec, {}, {name: np.ones(shape) for name, shape in spec.weight_shapes().items()}))
    limited = Admission(ServingLimits(max_pairs=3 * 5 * 5 - 1), shards=3)
    with pytest.raises(TooLarge, match="max_pairs"):
        STEP.prepare_for_session(sequence.session, Decoded({"query": np.ones((5, 6)), "causal": True}), limited)
