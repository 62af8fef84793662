"""The reference against a second implementation of the definition: Python loops over rows, for every field of layers and requests.

It computes differently where it can: each head has its rows of a projection, RoPE multiplies complex numbers, buckets are found with
integers, slopes by recursion.
"""

import cmath
import itertools
import math

import numpy as np
import pytest

from attend.attention.reference.forward import attend
from attend.check.random_cases import FEATURES, random_case
from support.cases import weights_of
from support.oracles import oracle_steps


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_loops_over_rows(seed):
    case = random_case(np.random.default_rng(seed), features=FEATURES, rate=0.45, batched=True)
    weights = weights_of(case)
    assert_agrees(case.spec, in_float64(weights), in_float64(case.request))


@pytest.mark.parametrize("seed", range(30))
def test_a_call_without_a_batch_axis_equals_a_batch_of_one(seed):
    case = random_case(np.random.default_rng(1000 + seed), features=FEATURES, batched=False)
    weights = weights_of(case)
    single = attend(case.spec, weights, **case.request)
    batch_of_one = attend(case.spec, weights, **{name: as_item(name, x) for name, x in case.request.items()})
    for name in single.__slots__:
        np.testing.assert_array_equal(getattr(single, name), getattr(batch_of_one, name)[0])


def in_float64(named):
    return {name: x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x for name, x in named.items()}


def as_item(name, x):
    settings = ("causal", "window", "fully_masked", "dropout", "scale", "softcap")
    return x if name in settings or (name == "query_offset" and isinstance(x, str)) else np.asarray(x)[None]


def assert_agrees(spec, weights, request):
    got = attend(spec, weights, **request)
    query = request["query"]
    key = request.get("key", query)
    value = request.get("value", key)
    b, h, q, k = got.attention_weights.shape
    of_softmaxes = [x.reshape(b, spec.num_softmaxes, h, *x.shape[2:]) for x in (got.scores, got.log_sum_exp)]
    dropout = request.get("dropout", {"p": 0.0, "seed": 0})
    stream = np.random.RandomState(dropout["seed"]).random_sample((b, h, q, k))
    group = spec.num_heads // spec.num_kv_heads
    for item in range(b):
        offset = offset_of(request, item, q, k)
        keys = by_head(heads_of(spec, weights, "key", key[item, j], position_of(request, "key", item, j, j)) for j in range(k))
        values = by_head(heads_of(spec, weights, "value", value[item, j]) for j in range(k))
        assert_same(got.key_projection[item], keys)
        assert_same(got.value_projection[item], values)
        if spec.latent:
            assert_same(got.latent[item], [latent(spec, weights, "key", row) for row in key[item]])
        if spec.latent and not spec.qk_norm and not (spec.rope and spec.rope.dims > spec.latent.rope_key_dim):
            assert_same(got.rope_key[item], [row[: spec.latent.rope_key_dim] for row in keys[0]])
        side_by_side = [[] for _ in range(q)]
        for i in range(q):
            at = position_of(request, "query", item, i, i + offset)
            factor = query_factor(spec.query_scale, i + offset)
            mine = [factor * own for own in heads_of(spec, weights, "query", query[item, i], at)]
            assert_same(got.query_projection[item, :, i], mine)
            chosen = [visible_keys(spec, weights, request, (item, n, i), offset, query[item, i], key[item]) for n in range(h)]
            assert spec.indexer is None or got.indexer_mask[item, i].tolist() == [j in chosen[0] for j in range(k)]
            for select in oracle_steps(spec, "selected"):
                of_heads = [list(keys[n // group]) for n in range(h)]
                chosen = [chosen[n] & select(spec, i + offset, mine[n], of_heads[n]) for n in range(h)]
            attention_weights, log_sums = np.zeros((h, k)), [0.0] * h
            for part, factor in reversed([*enumerate(softmax_factors(spec, weights))]):
                scores, own = np.zeros((h, k)), [halves(spec, x)[part] for x in mine]
                for j in range(k):
                    raw = [
                        score(spec, weights, request, (item, n, i, j), offset, own[n], halves(spec, keys[n // group][j])[part])
                        for n in range(h)
                    ]
                    for mix in oracle_steps(spec, "score"):
                        raw = mix(weights, raw)
                    more = [added(spec, weights, request, (item, n, i, j), offset, own[n]) for n in range(h)]
                    scores[:, j] = [s + m if j in chosen[n] else -math.inf for n, (s, m) in enumerate(zip(raw, more, strict=True))]
                for bias, n in itertools.product(oracle_steps(spec, "bias_of_visible"), range(h)):
                    scores[n] += bias(weights, n, i + offset, scores[n] > -math.inf, key[item])
                rows = []
                for n in range(h):
                    real = sum(in_sequence(request, item, i, j, q) for j in range(k))
                    scores[n] = scaled_by_count(spec, scores[n].tolist(), real)
                    own_weights, log_sums[n] = normalised(scores[n].tolist(), weights["sinks"][n] if spec.sinks else -math.inf)
                    if spec.normalizer == "sigmoid":
                        own_weights = [1 / (1 + math.exp(-s)) if s > -math.inf else 0.0 for s in scores[n]]
                    assert_same(got.normalised[item, part, n, i], own_weights)
                    assert_same(of_softmaxes[0][item, part, n, i], scores[n])
                    assert of_softmaxes[1][item, part, n, i] == pytest.approx(log_sums[n], rel=1e-9, abs=1e-9)
                    rows.append(own_weights)
                for mix in oracle_steps(spec, "mix_weights"):
                    rows = mix(weights, rows, np.isneginf(scores))
                for n in range(h):
                    if math.isinf(log_sums[n]):
                        rows[n] = [1 / k if request.get("fully_masked") == "uniform" else 0.0] * k
                    attention_weights[n] += factor * np.array(rows[n])
            for n in range(h):
                assert got.fully_masked[item, n, i] == math.isinf(log_sums[n])
                kept = stream[item, n, i] >= dropout["p"]
                own = [w / (1 - dropout["p"]) if keep else 0.0 for w, keep in zip(attention_weights[n], kept, strict=True)]
                assert_same(got.attention_weights[item, n, i], own)
                mean = sum((w * v for w, v in zip(own, values[n // group], strict=True)), np.zeros(spec.value_head_dim))
                mean = differential_norm(spec, weights, mean)
                factor = np.broadcast_to(request.get("head_scale", 1.0), (b, h))[item, n] * gate(spec, weights, query[item, i], n)
                assert_same(got.head_outputs[item, n, i], factor * mean)
                side_by_side[i] += (factor * mean).tolist()
        assert_same(got.concatenated[item], side_by_side)
        if spec.projections:
            side_by_side = side_by_side @ weights["output.weight"].T + weights.get("output.bias", 0.0)
        assert_same(got.output[item], side_by_side)


def assert_same(got, expected):
    expected = np.asarray(expected)
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-10 * max(1.0, largest))


def by_head(rows):
    """Head -> row, of row -> head."""
    return [list(head) for head in zip(*rows, strict=True)]


def heads_of(spec, weights, name, x, position=None):
    """The heads of one query, key or value: each has its own rows of the projection, its norm, and RoPE."""
    width = spec.value_head_dim if name == "value" else spec.head_dim
    if spec.latent and name == "key":
        width -= spec.latent.rope_key_dim
    every = [slice(i * width, (i + 1) * width) for i in range(spec.num_heads if name == "query" else spec.num_kv_heads)]
    narrow = latent(spec, weights, name, x)
    heads = [project(spec, weights, name, narrow, rows) for rows in every]
    if spec.latent and name == "key":
        shared = weights["rope_key.weight"] @ x + weights.get("rope_key.bias", 0.0)
        heads = [np.array([*shared, *own]) for own in heads]
    rotates, norm = spec.rope and name != "value", spec.qk_norm
    if norm and (norm.values if name == "value" else not norm.after_rope):
        heads = [normalise(heads, i, weights, name, norm) for i in range(len(heads))]
    if rotates:
        heads = [np.concatenate([rotate(half.tolist(), spec.rope, position) for half in halves(spec, one)]) for one in heads]
    if norm and norm.after_rope and name != "value":
        heads = [normalise(heads, i, weights, name, norm) for i in range(len(heads))]
    return heads


def position_of(request, name, item, n, index):
    """The position of row n for RoPE, or one for each axis; its index among the keys if none is given."""
    given = request.get("positions")
    if name == "key":
        given = request.get("key_positions", given)
    return index if given is None else given[item % len(given), n]


def visible_keys(spec, weights, request, of_query, offset, query, keys):
    """The allowed keys that the indexer selects: pairs of the score and the key are sorted, the best first."""
    item, _, i = of_query
    everything = set(range(len(keys)))
    if spec.indexer is None:
        return everything
    nothing = spec.model_copy(update=dict.fromkeys(("alibi", "relative_bias", "grid_bias")))
    free = [j for j in everything if added(nothing, weights, request, (*of_query, j), offset, np.zeros(1)) > -math.inf]
    rows = latent(spec, weights, "query", query)
    best = []
    for j in free:
        key = weights["index_key.weight"] @ keys[j]
        centred = key - math.fsum(key) / len(key)
        key = centred / math.sqrt(math.fsum(centred**2) / len(key) + spec.indexer.eps)
        key = rotate_index(
            spec, key * weights["index_key_norm.weight"] + weights["index_key_norm.bias"], position_of(request, "key", item, j, j)
        )
        total = 0.0
        for m, factor in enumerate(weights["index_head_weights.weight"] @ query):
            own = weights["index_query.weight"][m * len(key) : (m + 1) * len(key)] @ rows
            own = rotate_index(spec, own, position_of(request, "query", item, i, i + offset))
            total += factor * max(0.0, math.fsum(own * key))
        best.append((-total, j))
    return {j for _, j in sorted(best)[: spec.indexer.top_k]}


def rotate_index(spec, x, position):
    if not spec.rope:
        return x
    return rotate(x.tolist(), spec.rope.model_copy(update={"interleaved": spec.indexer.interleaved}), position)


def halves(spec, x):
    """The part of a query or key that each softmax uses."""
    return np.split(np.asarray(x), 2) if spec.differential else [x]


def softmax_factors(spec, weights):
    """1 and minus lambda, equation 2 of Ye et al."""
    if not spec.differential:
        return [1.0]
    first, second = (math.exp(math.fsum(weights[f"lambda_q{i}"] * weights[f"lambda_k{i}"])) for i in (1, 2))
    return [1.0, -(first - second + spec.differential.lambda_init)]


def in_sequence(request, item, i, j, q):
    """Whether a key is real and of the query's segment."""
    same_segment = "query_segments" not in request or request["query_segments"][item, i] == request["key_segments"][item, j]
    return same_segment and any(is_real(request, item, m, j) for m in range(q))


def scaled_by_count(spec, scores, real):
    """Scores times the logarithm of the number of allowed keys, or minus that of the number of real keys."""
    if spec.normalizer == "scalable_softmax":
        factor = math.log(max(1, sum(s > -math.inf for s in scores)))
        return [s * factor if s > -math.inf else s for s in scores]
    return [s - math.log(max(1, real)) for s in scores] if spec.normalizer == "sigmoid" else scores


def differential_norm(spec, weights, mean):
    if not spec.differential:
        return mean
    root = math.sqrt(math.fsum(a * a for a in mean) / len(mean) + spec.differential.eps)
    return mean / root * weights.get("head_norm.weight", 1.0) * (1 - spec.differential.lambda_init)


def query_factor(scale, position):
    """Llama 4's factor, which grows in steps of `length` positions."""
    return 1.0 if scale is None else 1 + scale.factor * math.log(1 + math.floor((max(position, 0) + scale.shift) / scale.length))


def gate(spec, weights, x, n):
    """Head n's own rows of the gate: a factor for each of its numbers, or one row and one factor for all of them."""
    if spec.output_gate is None:
        return 1.0
    width = spec.value_head_dim if spec.output_gate.granularity == "elementwise" else 1
    rows = slice(n * width, (n + 1) * width)
    logits = weights["gate.weight"][rows] @ x + weights.get("gate.bias", np.zeros(spec.num_heads * width))[rows]
    function = {"sigmoid": lambda z: 1 / (1 + math.exp(-z)), "softplus": lambda z: math.log1p(math.exp(z))}[spec.output_gate.activation]
    return np.array([function(z) for z in logits])


def latent(spec, weights, name, x):
    """The latent vector: the first projection divided by its root mean square."""
    down = "query_down" if name == "query" else "key_value_down"
    if f"{down}.weight" not in weights:
        return x
    first = weights[f"{down}.weight"] @ x + weights.get(f"{down}.bias", 0.0)
    return first / math.sqrt(math.fsum(a * a for a in first) / len(first) + spec.latent.eps) * weights[f"{down}_norm.weight"]


def project(spec, weights, name, x, rows):
    if not spec.projections:
        return x[rows]
    x = weights[f"{name}.weight"][rows] @ x
    return x + weights[f"{name}.bias"][rows] if spec.has_bias(name) else x


def normalise(heads, n, weights, name, norm):
    """Head n minus the mean, divided by the root mean square, of its numbers or of those of all heads."""
    among = heads[n] if norm.over == "head" else np.concatenate(heads)
    centre = math.fsum(among) / len(among) if norm.kind == "layer" else 0.0
    variance = math.fsum((a - centre) ** 2 for a in among) / len(among)
    weight, bias = weights.get(f"{name}_norm.weight", np.ones(1)), weights.get(f"{name}_norm.bias", np.zeros(1))
    weight, bias = (x if x.ndim == 1 else x[n] for x in (weight, bias))
    return np.array([(a - centre) / math.sqrt(variance + norm.eps) for a in heads[n]]) * weight + bias


def rotate(x, rope, position):
    dims = rope.dims
    for i in range(dims // 2):
        first, second = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + dims // 2)
        at = position if np.ndim(position) == 0 else position[rope.axes[i]]
        point = complex(x[first], x[second]) * rope.attention_factor * cmath.exp(1j * at * frequency(rope, i))
        x[first], x[second] = point.real, point.imag
    return np.array(x)


def frequency(rope, i):
    """transformers' `_compute_llama3_parameters`, by wavelengths."""
    if rope.frequencies:
        return rope.frequencies[i]
    plain, scaling = 1 / rope.theta ** (2 * i / rope.dims), rope.scaling
    if scaling is None:
        return plain
    if scaling.type == "linear":
        return plain / scaling.factor
    wavelength = 2 * math.pi / plain
    if wavelength < scaling.original_max_position / scaling.high_freq_factor:
        return plain
    if wavelength > scaling.original_max_position / scaling.low_freq_factor:
        return plain / scaling.factor
    smooth = scaling.original_max_position / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def score(spec, weights, request, place, offset, query, key):
    """The score of one query and one key, after scale and softcap."""
    _, n, i, j = place
    product = math.fsum(query * key) + relative(spec, weights, n, i + offset - j, query, key)
    raw = product * request.get("scale", spec.scale)
    cap = request.get("softcap", spec.softcap)
    return cap * math.tanh(raw / cap) if cap else raw


def added(spec, weights, request, place, offset, query):
    """What is added to the score of one query and one key: biases, and -inf where it is blocked."""
    item, n, i, j = place
    ahead, total = j - (i + offset), 0.0
    if "bias" in request:
        total += pick(request["bias"], place)
    if spec.alibi:
        total -= slopes(spec.num_heads)[n] * abs(ahead)
    if spec.relative_bias:
        total += weights["relative_bias"][bucket(ahead, spec.relative_bias), n]
    total += grid_bias(spec.grid_bias, weights, query, n, i + offset, j)
    windows = [spec.window.model_dump() if spec.window else {}, request.get("window", {})]
    blocked = [
        not pick(request.get("attend_mask", np.ones((1, 1))), place),
        pick(request.get("block_mask", np.zeros((1, 1))), place),
        not is_real(request, item, i, j),
        "query_segments" in request and request["query_segments"][item, i] != request["key_segments"][item, j],
        request.get("causal", False) and ahead > 0,
        spec.chunk_size and math.floor((i + offset) / spec.chunk_size) != math.floor(j / spec.chunk_size),
        *(window.get("left") is not None and -ahead > window["left"] for window in windows),
        *(window.get("right") is not None and ahead > window["right"] for window in windows),
    ]
    return -math.inf if any(blocked) else total


def relative(spec, weights, n, distance, query, key):
    """Transformer-XL's terms b, c and d, or DeBERTa's content-to-position and position-to-content, of head n."""
    settings = spec.relative_scores
    if settings is None:
        return 0.0
    rows = slice(n * spec.head_dim, (n + 1) * spec.head_dim)
    if settings.kind == "disentangled":
        column = bucketed(distance, settings)
        towards = math.fsum(key * weights["position_query.weight"][rows, column]) if settings.position_to_content else 0.0
        return math.fsum(query * weights["position_key.weight"][rows, column]) + towards
    if settings.max_distance is not None:
        distance = max(-settings.max_distance, min(settings.max_distance, distance))
    angles = [distance / 10000 ** (2 * i / spec.d_model) for i in range(spec.d_model // 2)]
    waves = [wave(a) for a in angles for wave in (math.sin, math.cos)]
    if not settings.interleaved:
        waves = waves[0::2] + waves[1::2]
    position = weights["position_key.weight"][rows] @ waves
    u, v = weights["content_bias"][n], weights["position_bias"][n]
    return math.fsum(u * key) + math.fsum(query * position) + math.fsum(v * position)


def bucketed(distance, settings):
    """DeBERTa's row in whole numbers: ⌈(m - 1) log(d/m) / log(e/m)⌉ is the number of whole t from 0 on with d^(m-1) m^t > e^t m^(m-1)."""
    size, far = settings.buckets or settings.max_distance, abs(distance)
    if settings.buckets and far > (middle := settings.buckets // 2):
        end = settings.max_distance - 1
        far = middle + next(t for t in itertools.count() if far ** (middle - 1) * middle**t <= end**t * middle ** (middle - 1))
        distance = far if distance > 0 else -far
    return max(0, min(2 * size - 1, distance + size))


def grid_bias(grid, weights, query, n, i, j):
    """The bias for two tokens of a grid: an entry of the table of distances, or products with the query."""
    if grid is None:
        return 0.0
    if grid.class_token and (i == 0 or j == 0):
        return weights["grid_bias"][{(True, False): -3, (False, True): -2, (True, True): -1}[i == 0, j == 0], n]
    height, width = grid.height, grid.width
    (y, x), (other_y, other_x) = (divmod(token - grid.class_token, width) for token in (i, j))
    if grid.kind == "table":
        distances = [(dy, dx) for dy in range(1 - height, height) for dx in range(1 - width, width)]
        return weights["grid_bias"][distances.index((y - other_y, x - other_x)), n]
    rows, columns = weights["grid_rows"], weights["grid_columns"]
    return math.fsum(query * rows[y - other_y + height - 1]) + math.fsum(query * columns[x - other_x + width - 1])


def pick(x, place):
    """An entry of a mask or bias of rank 2, 3 or 4; an axis of 1 is broadcast."""
    item, n, i, j = place
    index = {2: (i, j), 3: (item, i, j), 4: (item, n, i, j)}[x.ndim]
    return x[tuple(0 if size == 1 else at for at, size in zip(index, x.shape, strict=True))]


def is_real(request, item, i, j):
    lens = request.get("valid_lens")
    if lens is not None and j >= (lens[item] if lens.ndim == 1 else lens[item, i]):
        return False
    if "key_segments" in request and request["key_segments"][item, j] == -1:
        return False
    if "attend_keys" in request:
        return bool(request["attend_keys"][item, j])
    return not ("block_keys" in request and request["block_keys"][item, j])


def offset_of(request, item, q, k):
    offset = request.get("query_offset", 0)
    if isinstance(offset, str):
        return max((j + 1 for j in range(k) if any(is_real(request, item, i, j) for i in range(q))), default=0) - q
    return int(offset[item]) if isinstance(offset, np.ndarray) else offset


def slopes(n):
    """The recursion of Press et al."""
    if math.log2(n).is_integer():
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]
    below = 2 ** math.floor(math.log2(n))
    return slopes(below) + slopes(2 * below)[0::2][: n - below]


def bucket(ahead, settings):
    """T5's bucket in whole numbers: log(d/e) / log(max/e) · n ≥ m is dⁿ eᵐ ≥ maxᵐ eⁿ."""
    buckets = settings.buckets // 2 if settings.bidirectional else settings.buckets
    distance = abs(ahead) if settings.bidirectional else max(-ahead, 0)
    exact = buckets // 2
    rest, longest = buckets - exact, settings.max_distance
    wide = exact + sum(distance**rest * exact**m >= longest**m * exact**rest for m in range(1, rest))
    return (buckets if settings.bidirectional and ahead > 0 else 0) + (distance if distance < exact else wide)


def normalised(scores, sink):
    """Weights and the logarithm of the sum. The sink is a score whose weight is dropped."""
    if all(s == -math.inf for s in scores):
        return [0.0] * len(scores), -math.inf
    highest = max([*scores, sink])
    total = math.fsum(math.exp(s - highest) for s in [*scores, sink])
    return [math.exp(s - highest) / total for s in scores], highest + math.log(total)
