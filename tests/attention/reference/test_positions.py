"""Windows, RoPE, biases and scores by position, and grids: published or hand-computed numbers, other ways to compute them, and
invariants of relative positions."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from attend.attention.operators.alibi import slopes
from attend.attention.operators.relative_scores import RelativeScores, distance_buckets
from attend.attention.operators.rope import Rope, RopeScaling, frequencies, rotate
from attend.attention.operators.t5_bias import RelativeBias, relative_buckets
from attend.attention.reference.arithmetic import NumpyArithmetic
from attend.attention.reference.forward import attend
from attend.check.random_cases import FEATURES, random_case
from attend.spec import LayerSpec
from support.cases import layer_without_projections, weights_of
from support.transformers_positions import deberta_bucket


def scores(spec, q, k, weights=None, **request):
    """The scores of `q` queries and `k` keys whose products are all 0: the biases, and -inf for blocked keys."""
    width = spec.query_dim
    return attend(spec, weights or {}, query=np.zeros((q, width)), key=np.zeros((k, width)), **request).scores


M = NumpyArithmetic({})


def rotated(x, positions, rope):
    """Heads [b, heads, n, d] at positions [b, n]."""
    return rotate(M, x, positions, M.constant(frequencies(rope, rope.dims)), rope=rope)


def visible_keys(spec, q, k, **request):
    """1 where a query may attend to a key: [q, k]."""
    return np.isfinite(scores(spec, q, k, **request)[0]).astype(int).tolist()


# --- offsets and windows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [{"window": {}}, {"rope": {}}, {"alibi": True}, {"relative_bias": {}}])
def test_an_offset_is_required_if_the_layer_depends_on_positions(part):
    spec = layer_without_projections(head_dim=2, **part)
    weights = {"relative_bias": np.zeros((32, 1))}
    with pytest.raises(ValueError, match="expected query_offset, since 2 queries and 3 keys"):
        scores(spec, 2, 3, weights)
    scores(spec, 3, 3, weights)
    scores(spec, 2, 3, weights, query_offset=0)
    scores(layer_without_projections(head_dim=2), 2, 3)


def test_the_window_of_a_layer_blocks_the_expected_keys():
    assert visible_keys(layer_without_projections(window={"left": 1, "right": 0}), 3, 3) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert visible_keys(layer_without_projections(window={"left": None, "right": 1}), 2, 4, query_offset=1) == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible_keys(layer_without_projections(window={"left": 0, "right": None}), 2, 4, query_offset=2) == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert visible_keys(layer_without_projections(window={}), 2, 2) == [[1, 1], [1, 1]]


def test_windows_of_the_layer_and_the_call_both_apply():
    spec = layer_without_projections(window={"left": 2, "right": 0})
    assert visible_keys(spec, 2, 4, query_offset=2, window={"left": 1, "right": 3}) == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible_keys(spec, 2, 4, query_offset=2, window={"left": None, "right": None}) == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert visible_keys(layer_without_projections(window={"left": 2, "right": 2}), 3, 3, causal=True) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_a_window_beyond_the_keys_masks_the_row():
    got = attend(
        layer_without_projections(window={"left": 1, "right": 1}), {}, query=np.zeros((2, 1)), key=np.zeros((3, 1)), query_offset=3
    )
    assert got.fully_masked.tolist() == [[False, True]]  # query 0 is at position 3 and may attend to key 2; query 1 is at position 4


@pytest.mark.parametrize("seed", range(80))
def test_a_shift_of_all_positions_does_not_change_the_output(seed):
    """Three blocked keys are added in front, and the offset grows by three."""
    features = set(FEATURES) - {"mask", "dropout", "fully_masked", "positions"}
    case = random_case(np.random.default_rng(seed), features=features, rate=0.45, dtype="float64", batched=True)
    if not case.spec.is_relative or case.spec.normalizer == "sigmoid":  # whose weights depend on the number of keys
        return
    weights = weights_of(case)
    request = case.request | {"key": case.request.get("key", case.request["query"])}
    request["value"] = request.get("value", request["key"])
    got = attend(case.spec, weights, **request)
    (b, _, q, k), rng = got.scores.shape, np.random.default_rng(0)
    moved = dict(request)
    for name in ("key", "value"):
        moved[name] = np.concatenate([rng.standard_normal((b, 3, request[name].shape[-1])), request[name]], axis=1)
    if "bias" in request and request["bias"].shape[-1] > 1:
        moved["bias"] = np.pad(request["bias"], [(0, 0)] * (request["bias"].ndim - 1) + [(3, 0)])
    for name, ones in (("attend_keys", 1), ("block_keys", 0), ("key_segments", 0)):
        if name in request:
            moved[name] = np.pad(request[name], [(0, 0), (3, 0)], constant_values=ones)
    if "valid_lens" in request:
        moved["valid_lens"] = request["valid_lens"] + 3
    moved["block_mask"] = np.broadcast_to(np.arange(k + 3) < 3, (q, k + 3))
    if not isinstance(offset := request.get("query_offset", 0), str):
        moved["query_offset"] = offset + 3
    other = attend(case.spec, weights, **moved)
    largest = max(1.0, np.abs(got.scores[np.isfinite(got.scores)]).max(initial=0.0))
    np.testing.assert_allclose(other.scores[..., 3:], got.scores, rtol=1e-11, atol=1e-11 * largest)
    np.testing.assert_allclose(other.attention_weights[..., 3:], got.attention_weights, atol=1e-9)
    assert (other.attention_weights[..., :3] == 0).all()


@pytest.mark.parametrize("seed", range(60))
def test_a_query_alone_equals_the_query_among_others(seed):
    """Query i alone, as in a decoding step, with an offset that is larger by i."""
    features = set(FEATURES) - {"dropout", "positions"}
    case = random_case(np.random.default_rng(seed), features=features, rate=0.45, dtype="float64", batched=True)
    if not case.spec.is_relative:
        return
    weights = weights_of(case)
    request = case.request | {"key": case.request.get("key", case.request["query"])}
    if isinstance(request.get("query_offset"), str):
        request["query_offset"] = 1
    whole = attend(case.spec, weights, **request)
    queries = whole.scores.shape[2]
    for i in range(queries):
        alone = request | {"query": request["query"][:, i : i + 1], "query_offset": request.get("query_offset", 0) + i}
        for name in ("attend_mask", "block_mask", "bias"):
            if name in request and request[name].shape[-2] > 1:
                alone[name] = request[name][..., i : i + 1, :]
        if np.ndim(request.get("valid_lens")) == 2:
            alone["valid_lens"] = request["valid_lens"][:, i : i + 1]
        if "query_segments" in request:
            alone["query_segments"] = request["query_segments"][:, i : i + 1]
        got = attend(case.spec, weights, **alone)
        np.testing.assert_allclose(got.output[:, 0], whole.output[:, i], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(got.log_sum_exp[..., 0], whole.log_sum_exp[..., i], rtol=1e-9, atol=1e-9)


# --- RoPE -----------------------------------------------------------------------------------------------------------------------------


def test_rope_rotates_unit_vectors_by_the_expected_angles():
    """Position 1, frequencies 1 and 1/10: each unit vector turns towards its partner."""
    c, s, c10, s10 = np.cos(1), np.sin(1), np.cos(0.1), np.sin(0.1)
    units = np.eye(4)[None, None]
    positions = np.ones((1, 4))
    halves = rotated(units, positions, Rope(theta=100.0, dims=4))[0, 0]
    np.testing.assert_allclose(halves, [[c, 0, s, 0], [0, c10, 0, s10], [-s, 0, c, 0], [0, -s10, 0, c10]], atol=1e-15)
    interleaved = rotated(units, positions, Rope(theta=100.0, dims=4, interleaved=True))[0, 0]
    np.testing.assert_allclose(interleaved, [[c, s, 0, 0], [-s, c, 0, 0], [0, 0, c10, s10], [0, 0, -s10, c10]], atol=1e-15)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [2, 6, 8])
def test_rope_is_a_product_of_complex_numbers(interleaved, dims):
    """Su et al.: complex numbers times exp(i · position · frequency). Numbers beyond `dims` do not change."""
    rng = np.random.default_rng(dims)
    x, positions = rng.standard_normal((3, 2, 5, 8)), rng.integers(-50, 50, (3, 5))
    got = rotated(x, positions, Rope(dims=dims, interleaved=interleaved))
    points = np.stack(np.split(x[..., :dims], 2, axis=-1), axis=-1) if not interleaved else x[..., :dims].reshape(3, 2, 5, -1, 2)
    angles = positions[:, None, :, None] * 10000.0 ** (-2 * np.arange(dims // 2) / dims)
    turned = (points[..., 0] + 1j * points[..., 1]) * np.exp(1j * angles)
    parts = np.stack([turned.real, turned.imag], axis=-1 if interleaved else -2).reshape(3, 2, 5, dims)
    np.testing.assert_allclose(got, np.concatenate([parts, x[..., dims:]], axis=-1), atol=1e-13)
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-13)
    np.testing.assert_allclose(rotated(got, -positions, Rope(dims=dims, interleaved=interleaved)), x, atol=1e-13)


def test_queries_are_at_their_offset_and_keys_at_their_index():
    """A head of width 2 turns by 1 radian per position: everything is (1, 0), so projections are (cos p, sin p) and scores cosines."""
    ones = np.tile([1.0, 0.0], (2, 4, 1))
    got = attend(layer_without_projections(head_dim=2, rope={}), {}, query=ones[:, :3], key=ones, query_offset=[5, -2])
    placed = np.arange(3) + np.array([[5], [-2]])
    np.testing.assert_allclose(got.query_projection[:, 0], np.stack([np.cos(placed), np.sin(placed)], axis=-1), atol=1e-15)
    np.testing.assert_allclose(got.key_projection[0, 0], np.stack([np.cos(range(4)), np.sin(range(4))], axis=-1), atol=1e-15)
    np.testing.assert_array_equal(got.value_projection[:, 0], ones)
    np.testing.assert_allclose(got.scores[:, 0], np.cos(placed[..., None] - np.arange(4)), atol=1e-14)
    end = attend(layer_without_projections(head_dim=2, rope={}), {}, query=ones[:, :3], key=ones, query_offset="end", valid_lens=[4, 2])
    np.testing.assert_allclose(end.query_projection[:, 0, 2, 1], np.sin([3, 1]), atol=1e-15)


def test_interleaved_and_half_split_rope_agree_after_permuting_rows():
    """Checkpoints of Llama have either order: interleaved pairs (2i, 2i+1) are the halves (i, i + d/2) of a sorted head."""
    halves, interleaved = (LayerSpec(d_model=16, num_heads=2, rope={"interleaved": kind}) for kind in (False, True))
    rng = np.random.default_rng(1)
    weights = {name: rng.standard_normal(shape) for name, shape in halves.weight_shapes().items()}
    order = np.concatenate([np.r_[0:8:2, 1:8:2] + 8 * h for h in range(2)])
    rows = {f"{name}.{part}": weights[f"{name}.{part}"][order] for name in ("query", "key") for part in ("weight", "bias")}
    query = rng.standard_normal((3, 5, 16))
    np.testing.assert_allclose(
        attend(halves, weights | rows, query=query).output, attend(interleaved, weights, query=query).output, rtol=1e-9
    )


def test_linear_scaling_divides_positions():
    x = np.random.default_rng(2).standard_normal((1, 1, 5, 8))
    slow = rotated(x, np.arange(5)[None] * 4, Rope(dims=8, scaling=RopeScaling(type="linear", factor=4.0)))
    np.testing.assert_allclose(slow, rotated(x, np.arange(5)[None], Rope(dims=8)), atol=1e-14)


@pytest.mark.parametrize(
    ("theta", "dims", "context", "expected"),
    [
        (10000.0, 16, 64, [1, 0.24438458681, 0.013042256236, 0.0039528473280, 0.00125, 0.00039528473280, 0.000125, 0.000039528473280]),
        (100.0, 8, 16, [0.57605636120, 0.039528470486, 0.0125, 0.0039528473280]),
    ],
)
def test_llama3_scaling_equals_that_of_transformers(theta, dims, context, expected):
    """Computed by transformers 5.23, `rope_type: llama3` with factor 8, low_freq_factor 1, high_freq_factor 4, in float32."""
    rope = Rope(theta=theta, dims=dims, scaling=RopeScaling(type="llama3", factor=8.0, original_max_position=context))
    np.testing.assert_allclose(frequencies(rope, dims), expected, rtol=1e-6)


# --- ALiBi ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [*(2.0 ** -np.arange(1, 9)), *(2.0 ** -np.arange(0.5, 4))]),
    ],
)
def test_alibi_slopes_equal_those_of_the_paper_and_of_transformers(heads, expected):
    """Those of Press et al. and of Bloom in transformers; for 8 heads as the paper prints them."""
    np.testing.assert_allclose(slopes(heads), expected, rtol=1e-15)


def test_alibi_is_a_slope_times_the_distance():
    got = scores(layer_without_projections(num_heads=2, alibi=True), 2, 3, query_offset=1)
    distances = np.array([[1, 0, 1], [2, 1, 0]])
    np.testing.assert_array_equal(got, [-distances / 16, -distances / 256])


def test_causal_alibi_equals_a_slope_times_the_position_of_the_key():
    """Bloom adds slope · j, which is slope · (j - i) up to a constant of the row."""
    rng = np.random.default_rng(3)
    query = rng.standard_normal((2, 5, 6))
    with_alibi, plain = (LayerSpec(d_model=6, num_heads=3, head_dim=2, alibi=on, projections=False) for on in (True, False))
    expected = attend(plain, {}, query=query, causal=True, bias=np.array(slopes(3))[None, :, None, None] * np.arange(5))
    np.testing.assert_allclose(attend(with_alibi, {}, query=query, causal=True).output, expected.output, rtol=1e-12)


# --- T5 -------------------------------------------------------------------------------------------------------------------------------

DISTANCES = [-200, -128, -127, -91, -90, -64, -32, -16, -9, -8, -7, -1, 0, 1, 7, 8, 16, 127, 128]


@pytest.mark.parametrize(
    ("settings", "distances", "expected"),
    [
        ({"bidirectional": True}, DISTANCES, [15, 15, 15, 15, 14, 14, 12, 10, 8, 8, 7, 1, 0, 17, 23, 24, 26, 31, 31]),
        ({"bidirectional": False}, DISTANCES, [31, 31, 31, 29, 29, 26, 21, 16, 9, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0]),
        ({"bidirectional": False, "buckets": 9}, [-65, -64, -63, -33, -32, -31], [8, 8, 7, 7, 7, 6]),
    ],
)
def test_buckets_equal_those_of_transformers(settings, distances, expected):
    """Computed by transformers 5.23, `T5Attention._relative_position_bucket`. The last row is one that float64 would round otherwise."""
    assert relative_buckets(M, np.array(distances), RelativeBias(**settings)).tolist() == expected


def test_every_bucket_is_used_and_buckets_grow_with_distance():
    for bidirectional in (True, False):
        buckets = relative_buckets(M, np.arange(-200, 1), RelativeBias(bidirectional=bidirectional))[::-1]
        assert (np.diff(buckets) >= 0).all()
        assert set(buckets.tolist()) == set(range(16 if bidirectional else 32))


def test_relative_bias_adds_the_entry_of_the_bucket():
    """4 buckets: 0 of the query's own key, 1 of keys behind it, 3 of keys ahead. Bucket 2, of no distance ahead, is never used."""
    table = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
    spec = layer_without_projections(num_heads=2, relative_bias={"buckets": 4, "max_distance": 2})
    got = scores(spec, 2, 3, {"relative_bias": table}, query_offset=1)
    np.testing.assert_array_equal(got, [[[2, 1, 4], [2, 2, 1]], [[20, 10, 40], [20, 20, 10]]])


def test_biases_are_neither_scaled_nor_capped_and_are_summed():
    spec = layer_without_projections(alibi=True, relative_bias={"buckets": 4, "max_distance": 2})
    table = {"relative_bias": np.array([[100.0], [200.0], [300.0], [400.0]])}
    got = attend(spec, table, query=[[3.0]], key=[[2.0], [5.0]], scale=0.5, softcap=1.5, bias=[[7.0, 9.0]], query_offset=1)
    capped = 1.5 * np.tanh(np.array([3.0, 7.5]) / 1.5)
    np.testing.assert_allclose(got.scores[0, 0], [capped[0] + 7 - 2**-8 + 200, capped[1] + 9 + 100], rtol=1e-15)


# --- scores by content and distance ---------------------------------------------------------------------------------------------------


def relative_scores_of(**fields):
    """A function of weights that returns the scores of three queries. One head of width 1; queries are 3, keys 5, values 0."""
    spec = LayerSpec(**{"d_model": 2, "num_heads": 1, "head_dim": 1, "scale": 1.0, "bias": False, "dtype": "float64"} | fields)
    weights = {name: np.zeros(shape) for name, shape in spec.weight_shapes().items()}
    weights |= {"query.weight": np.array([[3.0, 0.0]]), "key.weight": np.array([[5.0, 0.0]])}
    return lambda **more: attend(spec, weights | more, query=np.full((3, 2), 1.0)).scores[0] - 15.0


@pytest.mark.parametrize("interleaved", [False, True])
def test_terms_of_transformer_xl_equal_hand_computed_numbers(interleaved):
    """u·k, then (q + v)·r with r the first number of R_D, sin D, or the second, cos D: of a width of 2, the only frequency is 1."""
    scores = relative_scores_of(relative_scores={"kind": "transformer_xl", "interleaved": interleaved})
    distance = np.subtract.outer(np.arange(3), np.arange(3))
    np.testing.assert_allclose(scores(content_bias=np.array([[7.0]])), 35.0, rtol=1e-15)
    for wave, row in zip((np.sin, np.cos), np.eye(2), strict=True):
        got = scores(**{"position_key.weight": row[None], "position_bias": np.array([[4.0]])})
        np.testing.assert_allclose(got, 7.0 * wave(distance), rtol=1e-14)


def test_terms_of_deberta_equal_hand_computed_numbers():
    """Columns 0 to 3 are distances of -2 or less, -1, 0, and 1 or more, for queries (3) and keys (5)."""
    scores = relative_scores_of(relative_scores={"kind": "disentangled", "max_distance": 2, "position_to_content": True})
    buckets = np.array([[2, 1, 0], [3, 2, 1], [3, 3, 2]])
    columns = np.array([0.1, 0.2, 0.4, 0.8])
    np.testing.assert_allclose(scores(**{"position_key.weight": columns[None]}), 3 * columns[buckets], rtol=1e-13)
    np.testing.assert_allclose(scores(**{"position_query.weight": columns[None]}), 5 * columns[buckets], rtol=1e-13)


@pytest.mark.parametrize(("buckets", "max_distance"), [(256, 512), (32, 128), (6, 20), (7, 9), (4, 5000)])
def test_buckets_equal_those_of_deberta(buckets, max_distance):
    """The function of transformers, at distances beyond those of any checkpoint."""
    distances = np.arange(-3000, 3001)
    theirs = deberta_bucket(torch.from_numpy(distances), buckets, max_distance).numpy() + buckets
    settings = RelativeScores(kind="disentangled", buckets=buckets, max_distance=max_distance)
    np.testing.assert_array_equal(distance_buckets(M, distances, settings), np.clip(theirs, 0, 2 * buckets - 1))


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"projections": False}, "/relative_scores"),
        ({"init": "torch_mha"}, "/relative_scores"),
        ({"rope": {}}, "/rope"),
        ({"query_scale": {"factor": 0.1, "length": 3}}, "/query_scale"),
        ({"d_model": 15, "num_heads": 3}, "/d_model"),
        ({"relative_scores": {"kind": "transformer_xl", "buckets": 8}}, "/buckets"),
        ({"relative_scores": {"kind": "transformer_xl", "position_to_content": True}}, "/position_to_content"),
        ({"relative_scores": {"kind": "disentangled"}}, "/max_distance"),
        ({"relative_scores": {"kind": "disentangled", "max_distance": 3, "interleaved": True}}, "/interleaved"),
        ({"relative_scores": {"kind": "disentangled", "max_distance": 5, "buckets": 8}}, "/max_distance"),
    ],
    ids=str,
)
def test_invalid_relative_scores_are_refused(fields, place):
    with pytest.raises(ValidationError) as caught:
        LayerSpec(**{"d_model": 4, "num_heads": 2, "relative_scores": {"kind": "transformer_xl"}} | fields)
    assert caught.value.errors()[0]["ctx"]["at"] == place


# --- grids ----------------------------------------------------------------------------------------------------------------------------


def grid_scores(weights, query, **grid):
    """The scores of one head of width 1 with keys 0, which are the biases of the grid; by default the grid is 2 x 3."""
    spec = layer_without_projections(grid_bias={"height": 2, "width": 3} | grid)
    return attend(spec, weights, query=query, key=np.zeros((6 + spec.grid_bias.class_token, 1)), query_offset=0).scores[0]


def test_a_table_has_a_bias_for_each_distance_in_a_grid():
    """Distances in rows, -1 to 1, by those in columns, -2 to 2: token 0 is at the upper left, so most keys are below it or to its right."""
    table = np.arange(15.0)[:, None]
    got = grid_scores({"grid_bias": table}, np.zeros((6, 1)))
    assert got[0].tolist() == [7, 6, 5, 2, 1, 0]
    assert got[5].tolist() == [14, 13, 12, 9, 8, 7]
    assert np.diag(got).tolist() == [7] * 6


def test_a_class_token_has_separate_biases():
    got = grid_scores({"grid_bias": np.arange(18.0)[:, None]}, np.zeros((7, 1)), class_token=True)
    assert got[0].tolist() == [17] + [15] * 6
    assert got[1:, 0].tolist() == [16] * 6
    assert got[1, 1:].tolist() == [7, 6, 5, 2, 1, 0]


def test_decomposed_positions_are_multiplied_with_the_query():
    """Rows give 10, 20, 30 for distances -1, 0, 1, columns 1 to 5 for -2 to 2, times the query."""
    weights = {"grid_rows": np.array([[10.0], [20.0], [30.0]]), "grid_columns": np.arange(1.0, 6)[:, None]}
    got = grid_scores(weights, np.array([[1.0], [2], [3], [4], [5], [6]]), kind="decomposed")
    assert got[0].tolist() == [23, 22, 21, 13, 12, 11]
    assert got[5].tolist() == [6 * x for x in (35, 34, 33, 25, 24, 23)]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"grid_bias": {"height": 2, "width": 3, "kind": "decomposed", "class_token": True}}, "/class_token"),
        ({"grid_bias": {"height": 2, "width": 3, "kind": "decomposed"}, "differential": {}}, "/grid_bias/kind"),
        ({"rope": {"axes": [0, 1]}}, "/axes"),
        ({"rope": {"axes": [0, 1, 2], "dims": 4}}, "/axes"),
    ],
    ids=str,
)
def test_invalid_grids_and_axes_are_refused(fields, place):
    with pytest.raises(ValidationError) as caught:
        LayerSpec(d_model=12, num_heads=2, **fields)
    assert caught.value.errors()[0]["ctx"]["at"] == place


# --- axes of positions ----------------------------------------------------------------------------------------------------------------


def test_each_pair_is_rotated_by_the_position_on_its_axis():
    """Three pairs at rows 2 and columns 5: the first and last are rotated by the row, the other by the column, as complex numbers."""
    spec = layer_without_projections(head_dim=6, rope={"frequencies": [1.0, 0.5, 0.25], "axes": [0, 1, 0]})
    got = attend(spec, {}, query=np.ones((1, 6)), positions=[[2.0, 5.0]]).query_projection[0, 0]
    points = (1 + 1j) * np.exp(1j * np.array([2.0, 2.5, 0.5]))
    np.testing.assert_allclose(got, [*points.real, *points.imag], rtol=1e-15)


@pytest.mark.parametrize("axes", [None, [0, 1, 2]])
def test_equal_positions_on_all_axes_equal_positions_on_one(axes):
    spec = LayerSpec(d_model=12, num_heads=2, rope={"axes": axes}, dtype="float64")
    rng, at = np.random.default_rng(5), np.arange(7.0)[None]
    query = rng.standard_normal((2, 7, 12))
    weights = {name: rng.standard_normal(shape) for name, shape in spec.weight_shapes().items()}
    text = attend(spec, weights, query=query, causal=True)
    same = attend(spec, weights, query=query, causal=True, positions=at if axes is None else np.repeat(at[..., None], 3, axis=-1))
    np.testing.assert_array_equal(text.output, same.output)
    moved = attend(spec, weights, query=query, causal=True, positions=(at if axes is None else np.repeat(at[..., None], 3, axis=-1)) + 1.5)
    np.testing.assert_allclose(text.output, moved.output, rtol=1e-12, atol=1e-12)
